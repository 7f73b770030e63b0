"""From a data file, prepared directory, or nothing, to encoded samples in splits that are the same on every rank."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ascendrun.options import GENERATED
from ascendrun.programs.errors import InvalidDataError, check_given
from ascendrun.programs.trajectory.data_rules import column_map
from ascendrun.programs.trajectory.grammars import TEXTS, fit_text
from ascendrun.programs.trajectory.points.generate import generate
from ascendrun.programs.trajectory.points.read_ais import Reading, read_tracks
from ascendrun.programs.trajectory.points.tracks import SPLITS, Limits, Track
from ascendrun.programs.trajectory.records import (
    Prepared,
    Record,
    count_classes,
    from_tracks,
    is_texts,
    load_prepared,
    read_texts,
)
from ascendrun.programs.trajectory.split import check_leak, check_same_segments, split_records
from ascendrun.programs.trajectory.store import load_pretrained, pretrained_folder
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

    @property
    def is_leaky(self) -> bool:
        """Whether pieces of one ship may be in several splits."""
        return bool(self.facts.get("split") == "segment")

    def labels(self, split: str) -> list[int]:
        return [sample.label for sample in self.encoded[split]]

    def longest(self) -> int:
        return max(len(sample) for part in self.encoded.values() for sample in part)


def load_data(options: Options) -> tuple[Sequence[Track | Record], dict[str, Any]]:
    """Return every piece of --data_path (or generated tracks), or its texts, and the counts of the import.

    Raises InvalidDataError.
    """
    check_given(options["data_path"], Text("program.tracks-form", "a file or directory of AIS points, or .jsonl texts"))
    if options["data_path"] == GENERATED:
        tracks = generate(options["synthetic_tracks"], seed=options["seed"])
        return tracks, {"generated": len(tracks)}
    path = Path(options["data_path"])
    if is_texts(path):
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


def prepare(options: Options, text: Mapping[str, Any] | None = None) -> Prepared:
    """Read or generate tracks, split them by ship, check for label leaks, and make the vocabulary of the training
    ships. Tracks of unknown class are added to training without a label, for pretraining. `text`: how tokens are made,
    of a trained model; None: with the bins of the training ships.

    Raises InvalidDataError, including its subclass LabelLeakError.
    """
    records, counts = load_data(options)
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
        folds=options["folds"],
        fold=max(0, options["fold"]),
        by_ship=options["split"] == "ship",
    )
    elsewhere = {record.ship for name in ("val", "test") for record in parts[name]}
    parts["unlabelled"] = [each for each in records if each.label is None and each.ship not in elsewhere]
    text = dict(text or text_of(options, parts["train"]))
    made = {name: sorted(as_records(part, text), key=lambda record: record.id) for name, part in parts.items()}
    labelled = [record for name in SPLITS for record in made[name]]
    check_leak([record.words for record in labelled], [str(record.label) for record in labelled])
    check_same_segments({name: [(record.id, record.mark) for record in made[name]] for name in SPLITS})
    vocabulary = make_vocabulary(
        ((record.ship, record.words) for record in made["train"]), min_count=options["min_frequency"]
    )
    return Prepared(
        made,
        vocabulary,
        {
            "names": names,
            "text": text,
            "split": options["split"],
            "cleaning": counts,
            "segments": {name: len(part) for name, part in made.items()},
            "tokens": {name: tokens_of(encode_all(part, vocabulary, {})) for name, part in made.items()},
            "classes": {name: count_classes(part) for name, part in made.items()},
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
                "program.base-grammar",
                "--grammar={grammar}: {directory} was pretrained with {pretrained}\n"
                "hint: use the same grammar for both",
                grammar=options["grammar"],
                directory=folder,
                pretrained=text["grammar"],
            )
        return text
    if not tracks:
        return {"grammar": TEXTS, "resolution": 0, "inputs": [], "edges": {}}
    names = {"grammar": options["grammar"], "resolution": options["h3_resolution"]}
    return fit_text(tracks, **names, inputs=options["inputs"])


def make_samples(options: Options, text: Mapping[str, Any] | None = None) -> Samples:
    """Return samples of the prepared directory --prepared_dir, or of --data_path. Raises InvalidDataError."""
    prepared = load_prepared(Path(options["prepared_dir"])) if options["prepared_dir"] else prepare(options, text)
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
            digest.update(sample.values.tobytes())
    return digest.hexdigest()
