"""Documents to train on: Parquet files with a column text, JSON lines with a key text, text files; or generated."""

from __future__ import annotations

import bisect
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ascendrun.options import GENERATED
from ascendrun.programs import errors
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.nanochat.data_rules import FORMS
from ascendrun.text import Text

LINES = 512
"""Lines of a JSON file that are read together."""
HASHED_BYTES = 32 << 20
"""Of a larger file only the beginning and the end are hashed, with its size."""


@dataclass(frozen=True)
class Chunk:
    """Documents of a file that are read together. `place`: the row group of Parquet, else the first byte. `size`: bytes
    of the chunk, or the characters of each document of a text file."""

    path: Path
    place: int
    size: int
    documents: int

    def read(self) -> list[str]:
        """Raises InvalidDataError."""
        try:
            if self.path.suffix == ".parquet":
                import pyarrow.parquet as parquet

                return parquet.ParquetFile(self.path).read_row_group(self.place, ["text"]).column(0).to_pylist()  # type: ignore[no-any-return]
            if self.path.suffix == ".txt":
                whole = self.path.read_text(encoding="utf-8")
                return [whole[start : start + self.size] for start in range(0, len(whole), self.size)]
            with open(self.path, "rb") as file:
                file.seek(self.place)
                return [json.loads(line)["text"] for line in file.read(self.size).splitlines()]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise unreadable(self.path, error) from error


class Documents(Sequence[str]):
    """Documents of files, which are read when they are iterated; slices are not read."""

    def __init__(self, chunks: Sequence[Chunk], start: int = 0, stop: int | None = None) -> None:
        self.chunks = chunks
        self.starts = [0, *accumulate(chunk.documents for chunk in chunks)]
        self.range = range(start, self.starts[-1] if stop is None else stop)

    def __len__(self) -> int:
        return len(self.range)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            found = self.range[place]
            return Documents(self.chunks, found.start, found.stop)
        return next(iter(self[place : place + 1]))

    def __iter__(self) -> Iterator[str]:
        first = bisect.bisect_right(self.starts, self.range.start) - 1
        for chunk, start in zip(self.chunks[first:], self.starts[first:]):
            if start >= self.range.stop:
                return
            texts = chunk.read()
            for text in texts[max(0, self.range.start - start) : self.range.stop - start]:
                if not isinstance(text, str):
                    raise unreadable(chunk.path, TypeError("text is not a string"))
                yield text


@dataclass(frozen=True)
class Corpus:
    """All documents; those from `first_val` on are for validation. `digest`: of the content."""

    documents: Sequence[str]
    first_val: int
    digest: str


def read_corpus(options: Mapping[str, Any]) -> Corpus:
    """Open the documents of `data_path`. With several files the last one is for validation, else the last part.

    Raises InvalidDataError.
    """
    form = Text("program.texts-form", "Parquet, JSON lines or text files")
    errors.check_given(options["data_path"], form)
    if options["data_path"] == GENERATED:
        texts = generated(options["synthetic_documents"], seed=options["seed"])
        return Corpus(texts, first_val_of(len(texts), options), hashlib.sha256("\0".join(texts).encode()).hexdigest())
    files = files_of(Path(options["data_path"]))
    chunks = [chunks_of(file, options["document_chars"]) for file in files]
    documents = Documents([chunk for each in chunks for chunk in each])
    last = sum(chunk.documents for chunk in chunks[-1])
    first_val = len(documents) - last if len(files) > 1 else first_val_of(len(documents), options)
    if not 0 < first_val < len(documents):
        raise InvalidDataError(
            "program.few-documents",
            "{path}: {count:plural document documents}; expected some to train on and some to validate with",
            path=options["data_path"],
            count=len(documents),
        )
    marks = [f"{file.name} {mark_of(file)}" for file in files]
    return Corpus(
        documents, first_val, hashlib.sha256("\0".join([*marks, str(options["document_chars"])]).encode()).hexdigest()
    )


def first_val_of(count: int, options: Mapping[str, Any]) -> int:
    return count - max(1, round(count * float(options["val_size"])))


def files_of(path: Path) -> list[Path]:
    """Return the files of a path in the order of their names. Raises InvalidDataError."""
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.suffix in FORMS and not each.name.startswith("."))
        kinds = sorted({each.suffix for each in found if each.suffix != ".txt"} or {each.suffix for each in found})
        found = [each for each in found if each.suffix in kinds]  # notes next to the data are no data
    else:
        found = [path] if path.is_file() and path.suffix in FORMS else []
    if not found:
        raise InvalidDataError(
            "program.no-text-files", "{path}: no file found that ends in {forms}", path=path, forms=list(FORMS)
        )
    return found


def chunks_of(file: Path, document_chars: int) -> list[Chunk]:
    """Return where the documents of a file are. Raises InvalidDataError."""
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet as parquet

            with parquet.ParquetFile(file) as table:
                if "text" not in table.schema_arrow.names:
                    raise InvalidDataError(
                        "program.no-text-column",
                        "{path}: no column text among {columns}",
                        path=file,
                        columns=list(table.schema_arrow.names),
                    )
                groups = range(table.num_row_groups)
                return [Chunk(file, group, 0, table.metadata.row_group(group).num_rows) for group in groups]
        if file.suffix == ".txt":
            length = len(file.read_text(encoding="utf-8"))
            return [Chunk(file, 0, document_chars, -(-length // document_chars))] if length else []
        with open(file, "rb") as lines:
            sizes = [len(line) for line in lines]
        starts = [0, *accumulate(sizes)]
        return [
            Chunk(file, starts[at], sum(sizes[at : at + LINES]), len(sizes[at : at + LINES]))
            for at in range(0, len(sizes), LINES)
        ]
    except (ValueError, OSError) as error:
        raise unreadable(file, error) from error


def unreadable(path: Path, error: Exception) -> InvalidDataError:
    return InvalidDataError(
        "program.text-unreadable", "{path}: cannot be read as documents: {reason}", path=path, reason=repr(error)
    )


def mark_of(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as content:
        digest.update(content.read(HASHED_BYTES))
        if size > HASHED_BYTES:
            content.seek(max(HASHED_BYTES, size - HASHED_BYTES))
            digest.update(content.read())
    return digest.hexdigest()


# --- generated ---

WHO = ("Ada", "Bo", "Chen", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "June", "Kai", "Lin")
WHAT = ("apples", "books", "coins", "shells", "stamps", "tickets", "pencils", "stones")
WHERE = ("in the garden", "at school", "by the river", "on the train", "in the old house", "near the harbour")
DID = ("finds", "buys", "counts", "hides", "paints", "carries", "loses", "shares")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def generated(count: int, *, seed: int) -> list[str]:
    """Return short texts with sums and spelled words, which a small model can learn to continue."""
    return [short_text(random.Random(f"{seed} {number}")) for number in range(count)]


def short_text(chance: random.Random) -> str:
    who, what, lines = chance.choice(WHO), chance.choice(WHAT), []
    for _ in range(chance.randint(2, 8)):
        kind = chance.random()
        if kind < 0.5:
            lines.append(f"{who} {chance.choice(DID)} {chance.choice(NUMBERS)} {what} {chance.choice(WHERE)}.")
        elif kind < 0.8:
            first, second = chance.randint(0, 5), chance.randint(0, 5)
            lines.append(f"{NUMBERS[first]} {what} and {NUMBERS[second]} {what} are {NUMBERS[first + second]} {what}.")
        else:
            lines.append(f"{what} is spelled {' '.join(what)}.")
    return " ".join(lines) + "\n"
