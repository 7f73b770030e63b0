"""Files of sequences, row by row: coding sequences to train on, and proteins to make DNA of, checked and complete."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from ascendrun.facts import proteins as facts
from ascendrun.programs.codon.asked import AMBIGUOUS, Ambiguity, problems_of
from ascendrun.programs.codon.vocabulary import MAX_RESIDUES, Organisms
from ascendrun.programs.errors import InvalidDataError
from ascendrun.text import Text, listed

GENE_FILES = (*facts.TABLES, *facts.FASTA, *facts.LINES)


@dataclass(frozen=True)
class Row:
    """A sequence as read. `place`: its line or record. `protein` None: not given. `words`: of the guide's lines, which
    have neither `dna` nor `protein`."""

    place: int
    organism: str
    dna: str = ""
    protein: str | None = None
    words: Sequence[str] | None = None


def files_of(path: Path) -> list[Path]:
    """Return the files of a path in the order of their names. Raises InvalidDataError."""
    inside = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    found = [each for each in inside if facts.form_of(each.name) in GENE_FILES and not each.name.startswith(".")]
    if not found:
        raise InvalidDataError(listed("program.no-text-files", path=path, forms=list(GENE_FILES)))
    return found


def open_text(path: Path) -> TextIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def rows_of(path: Path, organism: str) -> Iterator[Row | Text]:
    """Yield the sequences of a file, and a Text for each problem. `organism`: of sequences that name none."""
    form = facts.form_of(path.name)
    with open_text(path) as file:
        yield from (
            rows_of_table(path, file, organism)
            if form in facts.TABLES
            else rows_of_fasta(path, file, organism)
            if form in facts.FASTA
            else rows_of_lines(path, file)
        )


def rows_of_table(path: Path, file: TextIO, organism: str) -> Iterator[Row | Text]:
    reader = csv.reader(file)
    header = [name.strip().lower() for name in next(reader, [])]
    places = {
        kind: next((header.index(name) for name in facts.COLUMNS[kind] if name in header), None)
        for kind in ("dna", "protein", "organism")
    }
    required = ["dna"] if organism else ["dna", "organism"]
    missing = [kind for kind in required if places[kind] is None]
    if header and missing:
        yield listed("program.codon-columns", path=path, missing=missing, columns=header)
        return
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            yield listed(
                "program.codon-cells", path=path, place=reader.line_num, count=len(cells), expected=len(header)
            )
            continue
        values = {kind: None if place is None else cells[place] for kind, place in places.items()}
        yield Row(reader.line_num, values["organism"] or organism, values["dna"] or "", values["protein"] or None)


def rows_of_fasta(path: Path, file: TextIO, organism: str) -> Iterator[Row | Text]:
    for number, (title, dna) in enumerate(facts.read_fasta(file), start=1):
        named = organism or facts.organism_of(title)
        if named:
            yield Row(number, named, dna)
        else:
            yield listed("program.codon-no-organism", path=path, place=number)


def rows_of_lines(path: Path, file: TextIO) -> Iterator[Row | Text]:
    for place, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            words, organism = found["codons"].split(), found["organism"]
            if isinstance(organism, bool) or not isinstance(organism, (int, str)):
                raise TypeError
            yield Row(place, str(organism), words=words)
        except (ValueError, KeyError, TypeError, AttributeError):
            yield listed(
                "program.codon-line", path=path, place=place, form='{"codons": "M_ATG … __TAA", "organism": 51}'
            )


@dataclass(frozen=True)
class Protein:
    """`residues`: with the stop, none ambiguous. `organism`: its number. `dna`: a known sequence of it, or none."""

    name: str
    residues: str
    organism: int
    dna: str = ""


def replaced(residues: str, ambiguity: Ambiguity) -> str:
    """Return the residues with what takes the place of ambiguous ones, where it is known."""
    random = np.random.default_rng([ambiguity.seed, zlib.crc32(residues.encode())])
    found = []
    for letter in residues:
        options = AMBIGUOUS.get(letter, "")
        if letter in ambiguity.table:
            letter = ambiguity.table[letter]
        elif options and ambiguity.way == "deterministic":
            letter = options[0]
        elif options and ambiguity.way == "random":
            letter = options[int(random.integers(len(options)))]
        found.append(letter)
    return "".join(found)


def complete(text: str, ambiguity: Ambiguity, *, most: int = MAX_RESIDUES) -> tuple[str, list[Text]]:
    """Return the residues of a protein with its stop, at most so many, and all problems of it."""
    residues = replaced(facts.residues_of(text), ambiguity)
    return residues, problems_of(len(residues), facts.odd_letters(residues), ambiguity, most=most)


def read_proteins(
    given: str, organism: str, organisms: Organisms, ambiguity: Ambiguity, *, most: int = MAX_RESIDUES
) -> tuple[list[Protein], list[Text]]:
    """Return the proteins of a file, or the one in letters, and all problems of them with file and place.

    `organism`: of proteins that name none, by name or number. `most`: residues with the stop that the model reads.
    """
    proteins: list[Protein] = []
    problems: list[Text] = []
    for place, name, text, named, dna in given_rows(given):
        residues, found = complete(text, ambiguity, most=most)
        number = organisms.find(named or organism)
        if number is None:
            found.append(organisms.unknown(named or organism))
        elif not found:
            proteins.append(Protein(name, residues, number, "".join(dna.split()).upper()))
        problems += [listed("program.codon-protein", place=place, problem=each) for each in found]
    if not proteins and not problems:
        problems.append(listed("program.codon-no-proteins", input=given))
    return proteins, problems


def given_rows(given: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield place, name, residues, organism and DNA of each protein. Raises InvalidDataError for other files."""
    path = Path(given)
    if facts.form_of(path.name) not in facts.PROTEIN_FILES:
        if path.exists() or not given or "." in given or "/" in given:
            raise InvalidDataError(listed("program.codon-input", got=given, forms=list(facts.PROTEIN_FILES)))
        yield "input", "1", given, "", ""
        return
    try:
        with open_text(path) as file:
            for found in facts.read_proteins(facts.form_of(path.name), file):
                if found.letters is None:
                    raise InvalidDataError(
                        listed(
                            "program.codon-no-column",
                            path=path,
                            place=found.place,
                            names=list(facts.COLUMNS["protein"]),
                        )
                    )
                yield f"{path}:{found.place}", found.name, found.letters, found.organism, found.dna
    except (OSError, ValueError, csv.Error) as error:
        raise InvalidDataError(listed("program.codon-unreadable", path=path, reason=str(error))) from error
