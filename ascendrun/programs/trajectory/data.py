"""From a data file, prepared directory, or nothing, to encoded samples in splits that are the same on every rank."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trajectory.leakage import check_leak, check_same_segments
from ascendrun.programs.trajectory.points.generate import generate
from ascendrun.programs.trajectory.points.read_ais import ALIASES, read_tracks
from ascendrun.programs.trajectory.points.tracks import Limits
from ascendrun.programs.trajectory.records import (
    Prepared,
    Record,
    count_classes,
    from_tracks,
    is_texts,
    load_prepared,
    read_texts,
)
from ascendrun.programs.trajectory.split import split_records
from ascendrun.programs.trajectory.tokens import Encoded, encode, label_ids, make_vocabulary
from ascendrun.text import Text, to_json

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Samples:
    """All data of a training. `names`: class names by id. `digest`: hash of the content, equal on all ranks."""

    records: dict[str, list[Record]]
    encoded: dict[str, list[Encoded]]
    vocabulary: dict[str, int]
    names: list[str]
    text: dict[str, Any]
    facts: dict[str, Any]
    digest: str

    def labels(self, split: str) -> list[int]:
        return [sample.label for sample in self.encoded[split]]

    def longest(self) -> int:
        return max(len(sample) for part in self.encoded.values() for sample in part)


def load_records(options: Options, *, grammar: str, resolution: int) -> tuple[list[Record], dict[str, Any]]:
    """Return every segment of --data_path (or generated segments), and the counts of the import."""
    if not options["data_path"]:
        tracks = generate(options["synthetic_tracks"], seed=options["seed"])
        return from_tracks(tracks, grammar=grammar, resolution=resolution), {"generated": len(tracks)}
    path = Path(options["data_path"])
    if is_texts(path):
        records, removed = read_texts(path)
        return records, {"texts": len(records), "class_words_removed": removed}
    limits = Limits(
        options["max_gap_s"], options["segment_size"], options["min_segment_size"], options["max_speed_knots"]
    )
    found, cleaning = read_tracks(path, columns=column_map(options["column_map"]), limits=limits)
    return from_tracks(found, grammar=grammar, resolution=resolution), to_json(asdict(cleaning))


def multiple_of(options: Options, family: str) -> int:
    """Return the multiple to which batch lengths are rounded up: accelerators compile for each shape, CPUs do not."""
    return int(options["pad_to_multiple_of"]) or (1 if family == "cpu" else 16)


def column_map(pairs: Sequence[str]) -> dict[str, str]:
    """Parse "lat=Latitude" texts. Raises InvalidDataError for other texts."""
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise InvalidDataError(
            "program.column-map",
            "--column_map: {wrong}: expected NAME=COLUMN, with NAME one of {known}",
            wrong=list(wrong),
            known=list(ALIASES),
        )
    return {ours.strip(): yours.strip() for ours, yours in (pair.split("=", 1) for pair in pairs)}


def prepare(options: Options) -> Prepared:
    """Read or generate tracks, split them by ship, check for label leaks, and make the vocabulary of the training
    ships. Tracks of unknown class are added to training without a label, for pretraining.

    Raises InvalidDataError, including its subclass LabelLeakError.
    """
    text = {"grammar": options["grammar"], "resolution": options["h3_resolution"]}
    records, counts = load_records(options, **text)
    known = [record for record in records if record.label is not None]
    names = list(label_ids([str(record.label) for record in known]))
    if len(names) < 2:
        classes = Counter(record.label or Text("program.no-class", "no class") for record in records).most_common()
        raise InvalidDataError(
            "program.one-class",
            "training requires tracks of at least two classes, got {found}\n"
            "hint: set the class column with --column_map=class=NAME",
            found=[Text("program.class-count", "{count} of {name}", count=count, name=name) for name, count in classes],
        )
    parts = split_records(
        known,
        val=options["val_size"],
        test=options["test_size"],
        seed=options["seed"],
        use_column=options["use_split_column"],
    )
    parts = {name: sorted(part, key=lambda record: record.id) for name, part in parts.items()}
    check_leak([record.words for record in known], [str(record.label) for record in known])
    check_same_segments({name: [(record.id, record.mark) for record in part] for name, part in parts.items()})
    elsewhere = {record.ship for name in ("val", "test") for record in parts[name]}
    parts["unlabelled"] = sorted(
        (record for record in records if record.label is None and record.ship not in elsewhere),
        key=lambda record: record.id,
    )
    vocabulary = make_vocabulary((record.words for record in parts["train"]), min_count=options["min_frequency"])
    return Prepared(
        parts,
        vocabulary,
        {
            "names": names,
            "text": text,
            "cleaning": counts,
            "segments": {name: len(part) for name, part in parts.items()},
            "classes": {name: count_classes(part) for name, part in parts.items()},
        },
    )


def make_samples(options: Options) -> Samples:
    """Return samples of the prepared directory --prepared_dir, or of --data_path. Raises InvalidDataError."""
    prepared = load_prepared(Path(options["prepared_dir"])) if options["prepared_dir"] else prepare(options)
    return encode_prepared(prepared)


def encode_prepared(prepared: Prepared) -> Samples:
    ids = {name: i for i, name in enumerate(prepared.names)}
    encoded = {split: encode_all(part, prepared.vocabulary, ids) for split, part in prepared.records.items()}
    return Samples(
        prepared.records,
        encoded,
        prepared.vocabulary,
        prepared.names,
        dict(prepared.facts["text"]),
        prepared.facts,
        digest_of(encoded, prepared.vocabulary),
    )


def encode_all(records: Sequence[Record], vocabulary: Mapping[str, int], ids: Mapping[str, int]) -> list[Encoded]:
    return [encode(record.words, vocabulary, ids.get(str(record.label), -1)) for record in records]


def digest_of(encoded: Mapping[str, Sequence[Encoded]], vocabulary: Mapping[str, int]) -> str:
    digest = hashlib.sha256(repr(list(vocabulary)).encode())
    for name in sorted(encoded):
        for sample in encoded[name]:
            digest.update(sample.ids().tobytes() + sample.label.to_bytes(2, "big", signed=True))
    return digest.hexdigest()
