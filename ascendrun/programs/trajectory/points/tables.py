"""Tables in CSV and Parquet files: columns by name, and the invalid lines of a file."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from ascendrun.programs.errors import InvalidDataError

SEPARATORS = ",;\t|"
"""Characters between columns; the one that the first line has most often."""
NO_TEXT = "\0\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Table:
    """`torn`: number of lines with too few or too many values, which are skipped; `first_torn`: the first of them."""

    columns: Mapping[str, Sequence[Any]]
    torn: int = 0
    first_torn: int | None = None


def read_table(file: Path) -> Table:
    """Read a table. Raises InvalidDataError for an invalid file."""
    try:
        return Table(read_parquet(file)) if file.suffix == ".parquet" else read_csv(file)
    except (EOFError, OSError, zlib.error) as error:
        raise InvalidDataError(
            "program.cannot-read", "{file}: cannot be read: {error}", file=file, error=error
        ) from error


def read_parquet(file: Path) -> dict[str, Sequence[Any]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InvalidDataError(
            "program.no-pyarrow",
            "{file}: reading Parquet requires pyarrow\nhint: pip install pyarrow, or convert the data to CSV",
            file=file,
        ) from None
    try:
        return dict(parquet.read_table(file).to_pydict())
    except (pyarrow.ArrowException, ValueError) as error:
        raise InvalidDataError(f"{file}: {error}") from error


def read_csv(file: Path) -> Table:
    """Read a CSV file; its first line shows the separator. Empty lines are skipped.

    A ship name in another encoding does not make its positions invalid.
    """
    body: list[list[str]] = []
    torn, first_torn, first_line = 0, None, 1
    with open_text(file) as lines:
        first = lines.readline()
        if any(mark in first for mark in NO_TEXT):
            raise InvalidDataError(
                "program.table-not-utf8",
                "{file}: not valid UTF-8\n"
                "hint: convert it with iconv -t UTF-8; files in gzip or Parquet format must end in .csv.gz "
                "or .parquet",
                file=file,
            )
        separator = max(SEPARATORS, key=first.count)
        rows = csv.reader((line.replace("\0", "") for line in chain([first], lines)), delimiter=separator)
        try:
            header = next(rows, None)
            if not header:
                raise InvalidDataError(
                    "program.table-empty", "{file}: empty; the first line must name the columns", file=file
                )
            first_line = rows.line_num + 1
            for row in rows:
                if len(row) == len(header):
                    body.append(row)
                elif row:
                    torn += rows.line_num + 1 - first_line
                    first_torn = first_torn or first_line
                first_line = rows.line_num + 1
        except csv.Error as error:
            raise InvalidDataError(
                "program.bad-csv",
                "{file}: line {line}: {error} (possibly an unclosed quote)",
                file=file,
                line=first_line,
                error=error,
            ) from error
    return Table({name.strip(): [row[i] for row in body] for i, name in enumerate(header)}, torn, first_torn)


def open_text(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig", errors="replace", newline="")
    return open(file, encoding="utf-8-sig", errors="replace", newline="")
