"""Proteins to make DNA of: one in letters, or those of a FASTA file, a table or JSON lines, checked and complete."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.genes import FASTA, FORMS, NAMED_ORGANISM, TABLES, biopython, form_of, open_text
from ascendrun.programs.codon.vocabulary import Organisms
from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.text import Text

AMBIGUOUS: Mapping[str, str] = {"B": "ND", "Z": "QE", "X": "A", "J": "LI", "U": "C", "O": "K"}
"""Letters that stand for one of several amino acids, or for a rare one, and what may take their place."""
SHOWN_PLACES = 5
COLUMNS = {
    "protein": ("protein", "protein_sequence"),
    "organism": ("organism",),
    "name": ("id", "name"),
    "dna": ("dna",),
}  # fmt: skip


@dataclass(frozen=True)
class Protein:
    """`residues`: with the stop, none ambiguous. `organism`: its number. `dna`: a known sequence of it, or none."""

    name: str
    residues: str
    organism: int
    dna: str = ""


@dataclass(frozen=True)
class Ambiguity:
    """What becomes of B, Z, X, J, U and O: `error`, `deterministic` (the first of AMBIGUOUS), `random` by the seed and
    the protein, or the letters of `table`; one that it lacks is an error."""

    way: str = "error"
    table: Mapping[str, str] | None = None
    seed: int = 0

    @classmethod
    def of(cls, text: str, *, seed: int = 0) -> Ambiguity:
        """Read the option: a way, or a table such as X=A,B=N. Raises InvalidDataError."""
        if text in ("error", "deterministic", "random"):
            return cls(text, seed=seed)
        pairs = dict(pair.strip().upper().partition("=")[::2] for pair in text.split(","))
        residues = set(v.RESIDUES) - {v.STOP}
        if not all(letter in AMBIGUOUS and to in residues for letter, to in pairs.items()):
            raise InvalidDataError(
                "program.codon-ambiguous-option",
                "--ambiguous={got}: expected error, deterministic, random, or a table such as X=A,B=N",
                got=text,
            )
        return cls("error", pairs)

    def replace(self, residues: str) -> str:
        """Return the residues with what is known to take the place of ambiguous ones."""
        random = np.random.default_rng([self.seed, zlib.crc32(residues.encode())])
        table = self.table or {}
        found = []
        for letter in residues:
            options = AMBIGUOUS.get(letter, "")
            if letter in table:
                letter = table[letter]
            elif options and self.way == "deterministic":
                letter = options[0]
            elif options and self.way == "random":
                letter = options[int(random.integers(len(options)))]
            found.append(letter)
        return "".join(found)


def complete(text: str, ambiguity: Ambiguity) -> tuple[str, list[Text]]:
    """Return the residues of a protein with its stop, and all problems of it."""
    given = "".join(text.split()).upper().replace("*", v.STOP)
    residues = ambiguity.replace(given if given.endswith(v.STOP) else given + v.STOP)
    if len(residues) == 1:
        return residues, [Text("program.codon-no-protein", "the protein is empty")]
    problems = []
    unknown = [f"{letter}{at}" for at, letter in enumerate(residues, start=1) if letter not in v.RESIDUES]
    stops = [at for at, letter in enumerate(residues[:-1], start=1) if letter == v.STOP]
    if unknown:
        problems.append(
            Text(
                "program.codon-residues",
                "{count:plural letter letters} other than the 20 amino acids: {places}",
                count=len(unknown),
                places=unknown[:SHOWN_PLACES],
            )
        )
        if any(place[0] in AMBIGUOUS for place in unknown):
            problems.append(
                Text(
                    "program.codon-ambiguous",
                    "ambiguous residues; set --ambiguous to deterministic, random, or a table such as X=A",
                )
            )
    if stops:
        problems.append(Text("program.codon-inner-stops", "a stop before the end, at {places}", places=stops))
    if len(residues) > v.MAX_RESIDUES:
        problems.append(
            Text(
                "program.codon-long",
                "{count} residues with the stop (expected at most {most})",
                count=len(residues),
                most=v.MAX_RESIDUES,
            )
        )
    return residues, problems


def read_proteins(
    given: str, organism: str, organisms: Organisms, ambiguity: Ambiguity
) -> tuple[list[Protein], list[Text]]:
    """Return the proteins of a file, or the one in letters, and all problems of them with file and place.

    `organism`: of proteins that name none, by name or number.
    """
    proteins: list[Protein] = []
    problems: list[Text] = []
    for place, name, text, named, dna in rows_of(given):
        residues, found = complete(text, ambiguity)
        number = None
        try:
            number = organisms.number_of(named or organism)
        except InvalidDataError as error:
            found.append(error.args[0])
        if number is not None and not found:
            proteins.append(Protein(name, residues, number, "".join(dna.split()).upper()))
        problems += [Text("program.codon-protein", "{place}: {problem}", place=place, problem=each) for each in found]
    if not proteins and not problems:
        problems.append(Text("program.codon-no-proteins", "{input}: no proteins found", input=given))
    return proteins, problems


def rows_of(given: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield place, name, residues, organism and DNA of each protein. Raises InvalidDataError for other files."""
    path = Path(given)
    if form_of(path) not in FORMS:
        if path.exists() or not given or "." in given or "/" in given:
            raise InvalidDataError(
                "program.codon-input",
                "--input={got}: expected a protein, or a file that ends in {forms}",
                got=given,
                forms=list(FORMS),
            )
        yield "--input", "1", given, "", ""
        return
    try:
        with open_text(path) as file:
            if form_of(path) in FASTA:
                biopython(given)
                from Bio.SeqIO import FastaIO

                parse: Any = FastaIO.SimpleFastaParser
                for number, (title, text) in enumerate(parse(file), start=1):
                    named = NAMED_ORGANISM.search(title)
                    name = (title.split() or [str(number)])[0]
                    yield f"{path}:{name}", name, text, named[1] if named else "", ""
            elif form_of(path) in TABLES:
                reader = csv.DictReader(file)
                for row in reader:
                    yield _row(path, reader.line_num, row)
            else:
                for line, text in enumerate(file, start=1):
                    if text.strip():
                        yield _row(path, line, json.loads(text))
    except (OSError, ValueError, csv.Error) as error:
        raise InvalidDataError(
            "program.codon-unreadable", "{path}: cannot be read: {reason}", path=path, reason=str(error)
        ) from error


def _row(path: Path, place: int, row: Any) -> tuple[str, str, str, str, str]:
    lower = {str(name).strip().lower(): value for name, value in row.items()} if isinstance(row, dict) else {}
    values = {kind: next((lower[name] for name in names if name in lower), None) for kind, names in COLUMNS.items()}
    if values["protein"] is None:
        raise InvalidDataError(
            "program.codon-no-column",
            "{path}:{place}: no protein; expected {names}, and organism",
            path=path,
            place=place,
            names=list(COLUMNS["protein"]),
        )
    name, organism = ("" if values[kind] is None else str(values[kind]) for kind in ("name", "organism"))
    return f"{path}:{place}", name or str(place), str(values["protein"]), organism, str(values["dna"] or "")
