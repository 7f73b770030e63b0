"""Segments as tokens, from tracks or from existing texts; and a directory that stores them for later stages."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.checkpoint import replace_text, replacing
from ascendrun.programs.trajectory.grammars import END, as_texts
from ascendrun.programs.trajectory.points.clean import NUMBERED_CLASSES, class_name, split_name
from ascendrun.programs.trajectory.points.tracks import FEATURES, Track
from ascendrun.programs.trajectory.split import fingerprint
from ascendrun.programs.trajectory.tokens import Words

NUMBER = re.compile(f"({'|'.join(FEATURES)})=(-?[0-9.]+(?:e[-+]?[0-9]+)?)")
SAMPLES, FACTS = "samples.jsonl.gz", "prepared.json"


@dataclass(frozen=True)
class Record:
    """One segment. `label` None: unknown class; `split` None: not assigned yet. `mark`: hash of its points or of its
    text, independent of its name."""

    id: str
    ship: str
    label: str | None
    split: str | None
    words: Words
    mark: str


def from_tracks(tracks: Sequence[Track], **text: Any) -> list[Record]:
    """Return the record of each track. `text`: of `fit_text`."""
    texts = as_texts(tracks, **text)
    return [
        Record(
            track.id,
            track.ship,
            track.label,
            track.split,
            words,
            fingerprint(track.time.tobytes(), track.lat.tobytes(), track.lon.tobytes()),
        )
        for track, words in zip(tracks, texts)
    ]


# --- existing texts: the guide's JSON lines ---


def is_texts(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def read_texts(path: Path) -> tuple[list[Record], int]:
    """Return the records of lines {"text", "label", "source_file"}, and the number of class tokens removed.

    The published texts name the class at every point. Such a token is removed if it is before POINT_END and
    names the line's own class. A class token elsewhere stays for the leak check. Raises InvalidDataError.
    """
    if not path.is_file():
        raise InvalidDataError(
            "program.texts-not-found",
            "{path}: file not found on this node; the data must be at the same path on every node",
            path=path,
        )
    records: list[Record] = []
    problems: list[str] = []
    removed = 0
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record, dropped = read_text_line(line, f"{path}:{number}")
            except InvalidDataError as error:
                problems.append(str(error))
                continue
            records.append(record)
            removed += dropped
    if problems:
        raise InvalidDataError.of(problems)
    if not records:
        raise InvalidDataError("program.no-texts", "{path}: no line with a text", path=path)
    return records, removed


def read_text_line(line: str, place: str) -> tuple[Record, int]:
    try:
        row = json.loads(line)
        text, label = row["text"], row.get("label")
        if not isinstance(text, str):
            raise TypeError
        text.encode()
    except (ValueError, KeyError, AttributeError, TypeError):
        raise InvalidDataError(
            "program.text-form", '{place}: must be {{"text": "…", "label": 0, "source_file": "…"}}', place=place
        ) from None
    name = class_name("" if label is None else str(label))
    words, removed = without_class(text.split(), name)
    ship = str(row.get("ship") or row.get("source_file") or place)
    split = split_name(str(row.get("split") or ""))
    return Record(
        place.rsplit("/", 1)[-1], ship, name, split, in_points(words), fingerprint(" ".join(words).encode())
    ), removed


def without_class(words: Sequence[str], name: str | None) -> tuple[list[str], int]:
    own = {name, *NUMBERED_CLASSES} if name else set(NUMBERED_CLASSES)
    kept = [word for i, word in enumerate(words) if not (word in own and i + 1 < len(words) and words[i + 1] == END)]
    return kept, len(words) - len(kept)


def in_points(words: Sequence[str]) -> Words:
    """Split tokens into points, which end with POINT_END; a text without it is only a head. Numbers of the summary, as
    in speed_mean=4.5, are no tokens."""
    numbers = {each[1]: each[2] for each in map(NUMBER.fullmatch, words) if each}
    words = [word for word in words if not NUMBER.fullmatch(word)]
    values = tuple(float(numbers[name]) if name in numbers else None for name in FEATURES) if numbers else ()
    points: list[tuple[str, ...]] = []
    start = 0
    for i, word in enumerate(words):
        if word == END:
            points.append(tuple(words[start : i + 1]))
            start = i + 1
    rest = tuple(words[start:])
    return Words(rest if not points else (), tuple(points) if not (points and rest) else (*points, rest), values)


# --- the prepared directory ---


@dataclass(frozen=True)
class Prepared:
    """All segments by split, the vocabulary of the training segments, and their origin (`facts`)."""

    records: dict[str, list[Record]]
    vocabulary: dict[str, int]
    facts: dict[str, Any]

    @property
    def names(self) -> list[str]:
        return list(self.facts["names"])


def save_prepared(prepared: Prepared, folder: Path) -> None:
    """Write two files. Readers check for the second, which is written when the first is complete."""
    with replacing(folder / SAMPLES) as fresh:
        with open(fresh, "wb") as raw, gzip.GzipFile("", "wb", compresslevel=5, fileobj=raw, mtime=0) as file:
            for split, records in prepared.records.items():
                for record in records:
                    file.write((json.dumps(as_line(replace(record, split=split)), ensure_ascii=False) + "\n").encode())
        digest = hashlib.sha256(fresh.read_bytes()).hexdigest()
    facts = {**prepared.facts, "samples_sha256": digest, "vocabulary": prepared.vocabulary}
    text = json.dumps(facts, indent=1, ensure_ascii=False, default=str)  # notes have paths
    replace_text(folder / FACTS, text + "\n")


def as_line(record: Record) -> dict[str, Any]:
    line = asdict(record)
    words = record.words
    line["words"] = {"head": " ".join(words.head), "points": [" ".join(point) for point in words.points]}
    line["words"]["values"] = list(words.values)
    return line


def load_prepared(folder: Path) -> Prepared:
    """Read the directory. Raises InvalidDataError if there is none, or if its files do not match."""
    if not (folder / FACTS).is_file() or not (folder / SAMPLES).is_file():
        raise InvalidDataError(
            "program.not-prepared",
            "{directory}: no prepared data found\n"
            "hint: run --mode=prepare with the same --output_dir on every node first, or set --data_path",
            directory=folder,
        )
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidDataError(
            "program.prepared-damaged", "{file}: damaged\nhint: run --mode=prepare again", file=folder / FACTS
        ) from error
    raw = (folder / SAMPLES).read_bytes()
    if hashlib.sha256(raw).hexdigest() != facts["samples_sha256"]:
        raise InvalidDataError(
            "program.prepared-mixed",
            "{file} does not match {other}\nhint: run --mode=prepare again",
            file=folder / SAMPLES,
            other=FACTS,
        )
    records: dict[str, list[Record]] = {}
    for line in filter(None, gzip.decompress(raw).split(b"\n")):
        record = from_line(json.loads(line))
        records.setdefault(str(record.split), []).append(record)
    vocabulary = facts.pop("vocabulary")
    return Prepared(records, vocabulary, facts)


def from_line(line: Mapping[str, Any]) -> Record:
    words = line["words"]
    points = tuple(tuple(point.split()) for point in words["points"])
    return Record(**{**line, "words": Words(tuple(words["head"].split()), points, tuple(words["values"]))})


def open_text(path: Path) -> TextIO:
    """Open a text file. Invalid UTF-8 is kept as surrogates, so that only its own line is rejected."""
    kept = "surrogateescape"
    return (
        gzip.open(path, "rt", encoding="utf-8", errors=kept)
        if path.suffix == ".gz"
        else open(path, encoding="utf-8", errors=kept)
    )


def count_classes(records: Sequence[Record]) -> dict[str, int]:
    return dict(Counter(record.label or "?" for record in records).most_common())
