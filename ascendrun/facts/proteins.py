"""Proteins of FASTA records, of tables and of JSON lines, and their letters."""

from __future__ import annotations

import csv
import json
import re
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable, Iterator

TABLES, FASTA, LINES = (".csv",), (".fasta", ".fa", ".fna", ".ffn"), (".jsonl", ".json")
PROTEIN_FILES = (*TABLES, *FASTA, *LINES, ".faa")
"""Endings of files, also with .gz behind."""
COLUMNS = {
    "protein": ("protein", "protein_sequence"),
    "organism": ("organism",),
    "dna": ("dna", "predicted_dna"),
    "name": ("id", "name"),
}
"""Names of columns and of keys by meaning, in lower case; those of CodonTransformer's predictions too."""
AMINO_ACIDS, STOP = "ACDEFGHIKLMNPQRSTVWY", "_"
SHOWN_PLACES = 5
_ORGANISM = re.compile(r"\[organism=([^\]]*)\]")


class Protein(NamedTuple):
    """A row as it is given. `place`: its line, or the name of its record. `letters` None: it has no protein."""

    place: int | str
    name: str
    letters: str | None
    organism: str
    dna: str = ""


def form_of(name: str) -> str:
    """Return the ending of a file's name in lower case, without .gz; "" if there is none."""
    plain = name[: -len(".gz")] if name.endswith(".gz") else name
    dot = plain.rfind(".")
    return plain[dot:].lower() if dot > plain.rfind("/") + 1 else ""


def organism_of(title: str) -> str:
    """Return the organism that the title of a FASTA record names, as in [organism=Homo sapiens]; "": none."""
    named = _ORGANISM.search(title)
    return named.group(1) if named else ""


def read_fasta(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (title, letters) of each record; lines before the first one are skipped."""
    title = None
    letters: list[str] = []
    for line in lines:
        if line.startswith(">"):
            if title is not None:
                yield title, "".join(letters)
            title, letters = line[1:].strip(), []
        else:
            letters.append(line.strip())
    if title is not None:
        yield title, "".join(letters)


def read_proteins(form: str, lines: Iterable[str]) -> Iterator[Protein]:
    """Yield the proteins of a file of this form; lines keep their ends. Raises csv.Error."""
    if form in TABLES:
        reader = csv.DictReader(lines)
        for row in reader:
            yield _protein(reader.line_num, row)
    elif form in LINES:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _protein(number, read_object(line))
    else:
        for number, (title, letters) in enumerate(read_fasta(lines), start=1):
            name = (title.split() or [str(number)])[0]
            yield Protein(name, name, letters, organism_of(title))


def read_object(line: str) -> dict[str, Any]:
    """Return the object of a line; {}: it has none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def has_protein(row: dict[str, Any]) -> bool:
    return _protein(0, row).letters is not None


def _protein(place: int, row: dict[Any, Any]) -> Protein:
    lower = {str(name).strip().lower(): value for name, value in row.items() if value is not None}
    given = [str(lower[name]) for name in COLUMNS["protein"] if name in lower]
    named = [str(lower[name]) for name in COLUMNS["name"] if name in lower]
    return Protein(
        place,
        (named or [""])[0] or str(place),
        given[0] if given else None,
        str(lower.get("organism", "")),
        str(lower.get("dna") or ""),
    )


def residues_of(text: str) -> str:
    """Return the residues of a protein as given, with its stop."""
    residues = "".join(text.split()).upper().replace("*", STOP)
    return residues if residues.endswith(STOP) else residues + STOP


def odd_letters(residues: str) -> dict[str, tuple[int, list[int]]]:
    """Return what is not an amino acid, without the stop at the end: how many, and the first positions from 1."""
    places: dict[str, list[int]] = {}
    for at, letter in enumerate(residues[:-1], start=1):
        if letter not in AMINO_ACIDS:
            places.setdefault(letter, []).append(at)
    return {letter: (len(each), each[:SHOWN_PLACES]) for letter, each in places.items()}
