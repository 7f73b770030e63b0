"""Proteins of a file on this node, for `ascendrun plan`: what is not an amino acid, lengths and organisms, by row.

Nothing is judged here: the options of the training decide which letters and organisms are right.
"""

from __future__ import annotations

import csv
import io
import json
import re
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, Optional, Tuple

    Raw = Dict[str, Any]
    Row = Tuple[Any, Optional[str], str]  # place, protein, organism

FASTA = ("fasta", "fa", "fna", "ffn", "faa")
PROTEIN, ORGANISM = ("protein", "protein_sequence"), "organism"
IN_HEADER = re.compile(r"\[organism=([^\]]*)\]")
AMINO_ACIDS = frozenset("ACDEFGHIKLMNPQRSTVWY")
ROWS_SENT, PLACES_SENT, ORGANISMS_SENT, LONGEST_SENT = 200, 5, 200, 5
ROWS_BETWEEN_LOOKS = 1024


def read(form: str, text: str, deadline: float) -> Raw | None:
    """Return what the proteins of a file are; None: it has none.

    {"count", "odd": [[place, residues with the stop, {letter: [how many, first positions]}]],
    "longest": [[residues with the stop, place]], "organisms": {name: first place}, "lacking": [place]}. `lacking`: rows
    without a protein; "" in `organisms`: no name. Lists end at a limit, and all of it at the deadline.
    """
    kind = form.split(".")[0]
    if kind not in FASTA and not _has_proteins(kind, text):
        return None
    found: Raw = {"count": 0, "odd": [], "longest": [], "organisms": {}, "lacking": []}
    for place, protein, organism in _rows(kind, text):
        if protein is None:
            found["lacking"].append(place)
            continue
        found["count"] += 1
        _add(found, place, protein, organism.strip())
        if found["count"] % ROWS_BETWEEN_LOOKS == 0 and time.monotonic() > deadline - 0.5:
            break
    found["lacking"] = found["lacking"][:ROWS_SENT]
    return found


def _add(found: Raw, place: Any, protein: str, organism: str) -> None:
    size, odd = odd_letters(protein)
    if (odd or size == 1) and len(found["odd"]) < ROWS_SENT:
        found["odd"].append([place, size, odd])
    if len(found["longest"]) < LONGEST_SENT or size > found["longest"][-1][0]:
        ordered = sorted([*found["longest"], [size, place]], key=lambda each: -int(each[0]))
        found["longest"] = ordered[:LONGEST_SENT]
    if len(found["organisms"]) < ORGANISMS_SENT:
        found["organisms"].setdefault(organism, place)


def odd_letters(protein: str) -> tuple[int, dict[str, list[Any]]]:
    """Return the residues with the stop, and what is not an amino acid, without the stop at the end."""
    letters = "".join(protein.split()).upper().replace("*", "_")
    letters = letters[:-1] if letters.endswith("_") else letters
    places: dict[str, list[int]] = {}
    for at, letter in enumerate(letters, start=1):
        if letter not in AMINO_ACIDS:
            places.setdefault(letter, []).append(at)
    return len(letters) + 1, {letter: [len(each), each[:PLACES_SENT]] for letter, each in places.items()}


def _has_proteins(kind: str, text: str) -> bool:
    first = text.lstrip().split("\n", 1)[0]
    if kind == "csv":
        return any(name.strip().lower() in PROTEIN for name in next(csv.reader([first]), []))
    return _protein_of(_object(first)) is not None


def _rows(kind: str, text: str) -> Iterator[Row]:
    if kind in FASTA:
        for record in ("\n" + text).split("\n>")[1:]:
            title, _, body = record.partition("\n")
            named = IN_HEADER.search(title)
            yield (title.split() or ["?"])[0], body, named.group(1) if named else ""
    elif kind == "csv":
        reader = csv.DictReader(io.StringIO(text, newline=""))
        try:
            for row in reader:
                yield (reader.line_num, *_fields(row))
        except csv.Error:
            return  # it is a problem of the table
    else:
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield (number, *_fields(_object(line)))


def _object(line: str) -> Raw:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _fields(row: Raw) -> tuple[str | None, str]:
    lower = {str(name).strip().lower(): value for name, value in row.items()}
    organism = lower.get(ORGANISM)
    return _protein_of(row), "" if organism is None else str(organism)


def _protein_of(row: Raw) -> str | None:
    lower = {str(name).strip().lower(): value for name, value in row.items()}
    values = [lower[name] for name in PROTEIN if lower.get(name) is not None]
    return str(values[0]) if values else None
