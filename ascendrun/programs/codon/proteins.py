"""Proteins to make DNA of: one in letters, or those of a FASTA file, a table or JSON lines, checked and complete."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ascendrun.facts import proteins as facts
from ascendrun.facts.proteins import PROTEIN_FILES, form_of, odd_letters, residues_of
from ascendrun.programs.codon.asked import AMBIGUOUS, Ambiguity, problems_of
from ascendrun.programs.codon.gene_files import open_text
from ascendrun.programs.codon.vocabulary import MAX_RESIDUES, Organisms
from ascendrun.programs.errors import InvalidDataError
from ascendrun.text import Text


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
    residues = replaced(residues_of(text), ambiguity)
    return residues, problems_of(len(residues), odd_letters(residues), ambiguity, most=most)


def read_proteins(
    given: str, organism: str, organisms: Organisms, ambiguity: Ambiguity, *, most: int = MAX_RESIDUES
) -> tuple[list[Protein], list[Text]]:
    """Return the proteins of a file, or the one in letters, and all problems of them with file and place.

    `organism`: of proteins that name none, by name or number. `most`: residues with the stop that the model reads.
    """
    proteins: list[Protein] = []
    problems: list[Text] = []
    for place, name, text, named, dna in rows_of(given):
        residues, found = complete(text, ambiguity, most=most)
        number = organisms.find(named or organism)
        if number is None:
            found.append(organisms.unknown(named or organism))
        elif not found:
            proteins.append(Protein(name, residues, number, "".join(dna.split()).upper()))
        problems += [Text("program.codon-protein", "{place}: {problem}", place=place, problem=each) for each in found]
    if not proteins and not problems:
        problems.append(Text("program.codon-no-proteins", "{input}: no proteins found", input=given))
    return proteins, problems


def rows_of(given: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield place, name, residues, organism and DNA of each protein. Raises InvalidDataError for other files."""
    path = Path(given)
    if form_of(path.name) not in PROTEIN_FILES:
        if path.exists() or not given or "." in given or "/" in given:
            raise InvalidDataError(
                "program.codon-input",
                "input: {got:quote} (expected a protein, or a file that ends in {forms})",
                got=given,
                forms=list(PROTEIN_FILES),
            )
        yield "input", "1", given, "", ""
        return
    try:
        with open_text(path) as file:
            for found in facts.read_proteins(form_of(path.name), file):
                if found.letters is None:
                    raise InvalidDataError(
                        "program.codon-no-column",
                        "{path}:{place}: no protein; expected {names}, and organism",
                        path=path,
                        place=found.place,
                        names=list(facts.COLUMNS["protein"]),
                    )
                yield f"{path}:{found.place}", found.name, found.letters, found.organism, found.dna
    except (OSError, ValueError, csv.Error) as error:
        raise InvalidDataError(
            "program.codon-unreadable", "{path}: cannot be read: {reason}", path=path, reason=str(error)
        ) from error
