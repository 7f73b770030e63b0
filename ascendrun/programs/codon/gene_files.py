"""Files of coding sequences, row by row: tables, FASTA files, and the lines of the guide."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ascendrun.facts.proteins import COLUMNS, FASTA, LINES, TABLES, form_of, organism_of, read_fasta
from ascendrun.programs.errors import InvalidDataError
from ascendrun.text import Text

GENE_FILES = (*TABLES, *FASTA, *LINES)


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
    found = [each for each in inside if form_of(each.name) in GENE_FILES and not each.name.startswith(".")]
    if not found:
        raise InvalidDataError(
            "program.no-text-files", "{path}: no file found that ends in {forms}", path=path, forms=list(GENE_FILES)
        )
    return found


def open_text(path: Path) -> TextIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def rows_of(path: Path, organism: str) -> Iterator[Row | Text]:
    """Yield the sequences of a file, and a Text for each problem. `organism`: of sequences that name none."""
    form = form_of(path.name)
    with open_text(path) as file:
        yield from (
            rows_of_table(path, file, organism)
            if form in TABLES
            else rows_of_fasta(path, file, organism)
            if form in FASTA
            else rows_of_lines(path, file)
        )


def rows_of_table(path: Path, file: TextIO, organism: str) -> Iterator[Row | Text]:
    reader = csv.reader(file)
    header = [name.strip().lower() for name in next(reader, [])]
    places = {
        kind: next((header.index(name) for name in COLUMNS[kind] if name in header), None)
        for kind in ("dna", "protein", "organism")
    }
    required = ["dna"] if organism else ["dna", "organism"]
    missing = [kind for kind in required if places[kind] is None]
    if header and missing:
        yield Text(
            "program.codon-columns",
            "{path}:1: no column {missing} among {columns}; expected dna, protein and organism",
            path=path,
            missing=missing,
            columns=header,
        )
        return
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            yield Text(
                "program.codon-cells",
                "{path}:{place}: {count} cells, the header has {expected}",
                path=path,
                place=reader.line_num,
                count=len(cells),
                expected=len(header),
            )
            continue
        values = {kind: None if place is None else cells[place] for kind, place in places.items()}
        yield Row(reader.line_num, values["organism"] or organism, values["dna"] or "", values["protein"] or None)


def rows_of_fasta(path: Path, file: TextIO, organism: str) -> Iterator[Row | Text]:
    for number, (title, dna) in enumerate(read_fasta(file), start=1):
        named = organism or organism_of(title)
        if named:
            yield Row(number, named, dna)
        else:
            yield Text(
                "program.codon-no-organism",
                "{path}: record {place} names no organism\n"
                "hint: set --organism, or write [organism=NAME] into the headers",
                path=path,
                place=number,
            )


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
            yield Text(
                "program.codon-line",
                "{path}:{place}: expected {form}",
                path=path,
                place=place,
                form='{"codons": "M_ATG … __TAA", "organism": 51}',
            )
