"""From a data file, or none, to encoded samples in three splits that are the same on every rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ascendrun.programs.trajectory.generate import generate
from ascendrun.programs.trajectory.split import split_tracks
from ascendrun.programs.trajectory.tokens import (
    Encoded,
    Words,
    as_texts,
    check_leak,
    encode,
    label_ids,
    make_vocabulary,
)
from ascendrun.programs.trajectory.tracks import ALIASES, BadData, Cleaning, Limits, Track, read_tracks

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Samples:
    """All that training needs. `names`: class names by id. `digest` names the content: it must agree on all ranks.
    `cleaning` None: the tracks were generated."""

    tracks: Dict[str, List[Track]]
    encoded: Dict[str, List[Encoded]]
    vocabulary: Dict[str, int]
    names: List[str]
    cleaning: Optional[Cleaning]
    digest: str

    def labels(self, split: str) -> List[int]:
        return [sample.label for sample in self.encoded[split]]

    def longest(self) -> int:
        return max(len(sample) for part in self.encoded.values() for sample in part)


def load_tracks(options: Options) -> Tuple[List[Track], Optional[Cleaning]]:
    if not options["data"]:
        return generate(options["tracks"], seed=options["seed"]), None
    limits = Limits(options["gap_s"], options["segment_points"], options["min_points"])
    return read_tracks(Path(options["data"]), columns=column_map(options["columns"]), limits=limits)


def column_map(pairs: Sequence[str]) -> Dict[str, str]:
    """Of "lat=Latitude" texts. Raises BadData for anything else."""
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise BadData(f"--columns: {', '.join(wrong)} must be OURS=YOURS, with ours one of {', '.join(ALIASES)}")
    return {ours.strip(): yours.strip() for ours, yours in (pair.split("=", 1) for pair in pairs)}


def make_samples(options: Options) -> Samples:
    """Reads or generates, splits by ship, turns into words, proves that the words do not hold the answer, encodes.

    Raises BadData, its child LabelLeak included.
    """
    tracks, cleaning = load_tracks(options)
    tracks = [track for track in tracks if track.label is not None]
    if len({track.label for track in tracks}) < 2:
        raise BadData("training needs tracks of at least two classes; name the class column with --columns=class=NAME")
    parts = split_tracks(tracks, val=options["val_fraction"], test=options["test_fraction"], seed=options["seed"],
                         use_column=options["split_column"])
    parts = {name: sorted(part, key=lambda track: track.id) for name, part in parts.items()}
    texts = {name: as_texts(part, grammar=options["grammar"], resolution=options["h3_resolution"])
             for name, part in parts.items()}
    for name, part in parts.items():
        check_leak(texts[name], [str(track.label) for track in part])
    vocabulary = make_vocabulary(texts["train"], min_count=options["min_count"])
    ids = label_ids([str(track.label) for track in tracks])
    encoded = {name: encode_all(texts[name], part, vocabulary, ids) for name, part in parts.items()}
    return Samples(parts, encoded, vocabulary, list(ids), cleaning, digest_of(encoded, vocabulary))


def encode_all(texts: Sequence[Words], tracks: Sequence[Track], vocabulary: Mapping[str, int],
               ids: Mapping[str, int]) -> List[Encoded]:
    return [encode(words, vocabulary, ids.get(str(track.label), -1)) for words, track in zip(texts, tracks)]


def digest_of(encoded: Mapping[str, Sequence[Encoded]], vocabulary: Mapping[str, int]) -> str:
    digest = hashlib.sha256(repr(list(vocabulary)).encode())
    for name in sorted(encoded):
        for sample in encoded[name]:
            digest.update(sample.ids().tobytes() + sample.label.to_bytes(2, "big", signed=True))
    return digest.hexdigest()
