"""Segments as tokens, from tracks, texts or a directory of earlier stages, and encoded samples in splits."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from ascendrun.options import GENERATED
from ascendrun.programs.errors import InvalidDataError, check_given
from ascendrun.programs.trainer.checkpoint import replace_text, replacing
from ascendrun.programs.trajectory.data_rules import column_map
from ascendrun.programs.trajectory.grammars import TEXTS, as_texts, fit_text
from ascendrun.programs.trajectory.leaks import check_leak, check_same_segments, fingerprint
from ascendrun.programs.trajectory.points.clean import NUMBERED_CLASSES, numbered_class, split_name
from ascendrun.programs.trajectory.points.generate import generate
from ascendrun.programs.trajectory.points.read_ais import Reading, read_tracks
from ascendrun.programs.trajectory.points.tracks import FEATURES, SPLITS, Limits, Track
from ascendrun.programs.trajectory.split import split_records
from ascendrun.programs.trajectory.store import load_pretrained, pretrained_folder
from ascendrun.programs.trajectory.tokens import END, Encoded, Words, encode, make_vocabulary
from ascendrun.text import listed, to_json

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Samples:
    """All segments by split, the vocabulary of the training segments, and their origin (`facts`)."""

    records: dict[str, list[Record]]
    vocabulary: dict[str, int]
    facts: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """Class names by id."""
        return list(self.facts["names"])

    @property
    def text(self) -> dict[str, Any]:
        """How tokens are made, as `fit_text` returns it."""
        return dict(self.facts["text"])

    @property
    def is_leaky(self) -> bool:
        """Whether pieces of one ship may be in several splits."""
        return bool(self.facts.get("split") == "segment")

    @cached_property
    def encoded(self) -> dict[str, list[Encoded]]:
        ids = {name: i for i, name in enumerate(self.names)}
        return {split: encode_all(part, self.vocabulary, ids) for split, part in self.records.items()}

    @cached_property
    def digest(self) -> str:
        """Hash of the content, equal on all ranks."""
        digest = hashlib.sha256(repr(list(self.vocabulary)).encode())
        for name in sorted(self.encoded):
            for sample in self.encoded[name]:
                digest.update(sample.ids().tobytes() + sample.label.to_bytes(2, "big", signed=True))
                digest.update(sample.values.tobytes())
        return digest.hexdigest()

    def as_read_by(self, vocabulary: Mapping[str, int], names: Sequence[str]) -> Samples:
        """Return the samples in the tokens and classes of a trained model."""
        return replace(self, vocabulary=dict(vocabulary), facts={**self.facts, "names": list(names)})

    def labels(self, split: str) -> list[int]:
        return [sample.label for sample in self.encoded[split]]

    def longest(self) -> int:
        return max(len(sample) for part in self.encoded.values() for sample in part)


def load_data(options: Options) -> tuple[Sequence[Track | Record], dict[str, Any]]:
    """Return every piece of --data_path (or generated tracks), or its texts, and the counts of the import.

    Raises InvalidDataError.
    """
    check_given(options["data_path"], listed("program.tracks-form"))
    if options["data_path"] == GENERATED:
        tracks = generate(options["synthetic_tracks"], seed=options["seed"])
        return tracks, {"generated": len(tracks)}
    path = Path(options["data_path"])
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        records, removed = read_texts(path)
        return records, {"texts": len(records), "class_words_removed": removed}
    limits = Limits(
        options["max_gap_s"], options["segment_size"], options["min_segment_size"], options["max_speed_knots"]
    )
    reading = Reading(column_map(options["column_map"])[0], options["units"], options["time_format"])
    found, cleaning = read_tracks(path, reading, limits=limits)
    return found, to_json(asdict(cleaning))


def as_records(pieces: Sequence[Track | Record], text: Mapping[str, Any]) -> list[Record]:
    """Return the pieces with their tokens, made as `text` (of `fit_text`) says. Texts stay as they are."""
    records = [each for each in pieces if isinstance(each, Record)]
    return records or from_tracks([each for each in pieces if isinstance(each, Track)], **text)


def prepare(options: Options, text: Mapping[str, Any] | None = None) -> Samples:
    """Read or generate tracks, split them by ship, check for label leaks, and make the vocabulary of the training
    ships. Tracks of unknown class are added to training without a label, for pretraining. `text`: how tokens are made,
    of a trained model; None: with the bins of the training ships.

    Raises InvalidDataError, including its subclass LabelLeakError.
    """
    records, counts = load_data(options)
    known = [record for record in records if record.label is not None]
    names = sorted({str(record.label) for record in known})
    if len(names) < 2:
        classes = Counter(record.label or listed("program.no-class") for record in records).most_common()
        raise InvalidDataError(
            listed(
                "program.one-class",
                found=[listed("program.class-count", count=count, name=name) for name, count in classes],
            )
        )
    parts = split_records(
        known,
        val=options["val_size"],
        test=options["test_size"],
        seed=options["seed"],
        use_column=options["use_split_column"],
        folds=options["folds"],
        fold=max(0, options["fold"]),
        by_ship=options["split"] == "ship",
    )
    elsewhere = {record.ship for name in ("val", "test") for record in parts[name]}
    parts["unlabelled"] = [each for each in records if each.label is None and each.ship not in elsewhere]
    text = dict(text or text_of(options, parts["train"]))
    made = {name: sorted(as_records(part, text), key=lambda record: record.id) for name, part in parts.items()}
    labelled = [record for name in SPLITS for record in made[name]]
    columns = zip(*((record.words, str(record.label), record.ship) for record in labelled))
    leaks = check_leak(*columns, of_points=text["grammar"] != TEXTS)
    check_same_segments({name: [(record.id, record.mark) for record in made[name]] for name in SPLITS})
    vocabulary = make_vocabulary(
        ((record.ship, record.words) for record in made["train"]), min_count=options["min_frequency"]
    )
    return Samples(
        made,
        vocabulary,
        {
            "names": names,
            "text": text,
            "split": options["split"],
            "leaks": to_json(leaks),
            "cleaning": counts,
            "segments": {name: len(part) for name, part in made.items()},
            "tokens": {name: tokens_of(encode_all(part, vocabulary, {})) for name, part in made.items()},
            "classes": {
                name: dict(Counter(record.label or "?" for record in part).most_common()) for name, part in made.items()
            },
        },
    )


def tokens_of(samples: Sequence[Encoded]) -> dict[str, int]:
    """Return the number of tokens of all samples, and of the longest."""
    lengths = list(map(len, samples))
    return {"total": sum(lengths), "longest": max(lengths, default=0)}


def text_of(options: Options, train: Sequence[Track | Record]) -> dict[str, Any]:
    """Return how tokens are made: as the pretrained --base_model has it, else with the bins of the training ships.
    Texts have their tokens.

    Raises InvalidDataError if it was pretrained with another grammar.
    """
    tracks = [each for each in train if isinstance(each, Track)]
    folder = pretrained_folder(Path(options["base_model"])) if options["base_model"] else None
    if folder is not None:
        text = dict(load_pretrained(folder)["text"])
        if tracks and text["grammar"] != options["grammar"]:
            raise InvalidDataError(
                listed("program.base-grammar", grammar=options["grammar"], directory=folder, pretrained=text["grammar"])
            )
        return text
    if not tracks:
        return {"grammar": TEXTS, "resolution": 0, "inputs": [], "edges": {}}
    names = {"grammar": options["grammar"], "resolution": options["h3_resolution"]}
    return fit_text(tracks, **names, inputs=options["inputs"])


def make_samples(options: Options, text: Mapping[str, Any] | None = None) -> Samples:
    """Return samples of the prepared directory --prepared_dir, or of --data_path. Raises InvalidDataError."""
    return load_prepared(Path(options["prepared_dir"])) if options["prepared_dir"] else prepare(options, text)


def encode_all(records: Sequence[Record], vocabulary: Mapping[str, int], ids: Mapping[str, int]) -> list[Encoded]:
    return [encode(record.words, vocabulary, ids.get(str(record.label), -1)) for record in records]


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


def read_texts(path: Path) -> tuple[list[Record], int]:
    """Return the records of lines {"text", "label", "source_file"}, and the number of class tokens removed.

    The published texts name the class at every point. Such a token is removed if it is before POINT_END and
    names the line's own class. A class token elsewhere stays for the leak check. Raises InvalidDataError.
    """
    if not path.is_file():
        raise InvalidDataError(listed("program.texts-not-found", path=path))
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
        raise InvalidDataError(listed("program.no-texts", path=path))
    return records, removed


def read_text_line(line: str, place: str) -> tuple[Record, int]:
    try:
        row = json.loads(line)
        text, label = row["text"], row.get("label")
        if not isinstance(text, str):
            raise TypeError
        text.encode()
    except (ValueError, KeyError, AttributeError, TypeError):
        raise InvalidDataError(listed("program.text-form", place=place)) from None
    name = numbered_class("" if label is None else str(label))
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


def save_prepared(prepared: Samples, folder: Path) -> None:
    """Write two files. Readers check for the second, which is written when the first is complete."""
    with replacing(folder / SAMPLES) as fresh:
        with open(fresh, "wb") as raw, gzip.GzipFile("", "wb", compresslevel=5, fileobj=raw, mtime=0) as file:
            for split, records in prepared.records.items():
                for record in records:
                    words = {
                        "head": " ".join(record.words.head),
                        "points": [" ".join(point) for point in record.words.points],
                        "values": list(record.words.values),
                    }
                    line = {**vars(record), "split": split, "words": words}
                    file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
        digest = hashlib.sha256(fresh.read_bytes()).hexdigest()
    facts = {**prepared.facts, "samples_sha256": digest, "vocabulary": prepared.vocabulary}
    text = json.dumps(facts, indent=1, ensure_ascii=False, default=str)  # notes have paths
    replace_text(folder / FACTS, text + "\n")


def load_prepared(folder: Path) -> Samples:
    """Read the directory. Raises InvalidDataError if there is none, or if its files do not match."""
    if not (folder / FACTS).is_file() or not (folder / SAMPLES).is_file():
        raise InvalidDataError(listed("program.not-prepared", directory=folder))
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidDataError(listed("program.prepared-damaged", file=folder / FACTS)) from error
    raw = (folder / SAMPLES).read_bytes()
    if hashlib.sha256(raw).hexdigest() != facts["samples_sha256"]:
        raise InvalidDataError(listed("program.prepared-mixed", file=folder / SAMPLES, other=FACTS))
    records: dict[str, list[Record]] = {}
    for line in filter(None, gzip.decompress(raw).split(b"\n")):
        row = json.loads(line)
        words = row["words"]
        points = tuple(tuple(point.split()) for point in words["points"])
        row["words"] = Words(tuple(words["head"].split()), points, tuple(words["values"]))
        records.setdefault(str(row["split"]), []).append(Record(**row))
    vocabulary = facts.pop("vocabulary")
    return Samples(records, vocabulary, facts)


def open_text(path: Path) -> TextIO:
    """Open a text file. Invalid UTF-8 is kept as surrogates, so that only its own line is rejected."""
    kept = "surrogateescape"
    return (
        gzip.open(path, "rt", encoding="utf-8", errors=kept)
        if path.suffix == ".gz"
        else open(path, encoding="utf-8", errors=kept)
    )
