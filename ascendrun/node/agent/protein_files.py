"""Proteins of a file on this node, for `ascendrun plan`: what is not an amino acid, lengths and organisms, by row.

Nothing is judged here: the options of the training decide which letters and organisms are right.
"""

from __future__ import annotations

import contextlib
import csv
import io
import time

from ascendrun.facts.proteins import (
    COLUMNS,
    LINES,
    TABLES,
    Protein,
    has_protein,
    odd_letters,
    read_object,
    read_proteins,
    residues_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict

    Raw = Dict[str, Any]

ROWS_SENT, ORGANISMS_SENT, LONGEST_SENT = 200, 200, 5
ROWS_BETWEEN_LOOKS = 1024


def read(form: str, text: str, deadline: float) -> Raw | None:
    """Return what the proteins of a file are; None: it has none.

    {"count", "odd": [[place, residues with the stop, {letter: [how many, first positions]}]],
    "longest": [[residues with the stop, place]], "organisms": {name: first place}, "lacking": [place]}. `lacking`: rows
    without a protein; "" in `organisms`: no name. Lists end at a limit, and all of it at the deadline.
    """
    if not _has_proteins(form, text):
        return None
    found: Raw = {"count": 0, "odd": [], "longest": [], "organisms": {}, "lacking": []}
    with contextlib.suppress(csv.Error):  # it is a problem of the table
        for protein in read_proteins(form, io.StringIO(text, newline="")):
            if protein.letters is None:
                found["lacking"].append(protein.place)
                continue
            found["count"] += 1
            _add(found, protein, residues_of(protein.letters))
            if found["count"] % ROWS_BETWEEN_LOOKS == 0 and time.monotonic() > deadline - 0.5:
                break
    found["lacking"] = found["lacking"][:ROWS_SENT]
    return found


def _add(found: Raw, protein: Protein, residues: str) -> None:
    size, odd = len(residues), odd_letters(residues)
    if (odd or size == 1) and len(found["odd"]) < ROWS_SENT:
        found["odd"].append([protein.place, size, odd])
    if len(found["longest"]) < LONGEST_SENT or size > found["longest"][-1][0]:
        ordered = sorted([*found["longest"], [size, protein.place]], key=lambda each: -int(each[0]))
        found["longest"] = ordered[:LONGEST_SENT]
    if len(found["organisms"]) < ORGANISMS_SENT:
        found["organisms"].setdefault(protein.organism.strip(), protein.place)


def _has_proteins(form: str, text: str) -> bool:
    first = text.lstrip().split("\n", 1)[0]
    if form in TABLES:
        return any(name.strip().lower() in COLUMNS["protein"] for name in next(csv.reader([first]), []))
    return form not in LINES or has_protein(read_object(first))
