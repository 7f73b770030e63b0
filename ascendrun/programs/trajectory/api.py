"""Python interface of a classifier: Classifier("out/finetune/best").predict_single(text, return_probs=True)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ascendrun.facts.columns import find_columns
from ascendrun.programs.devices import accelerator as devices
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.data import in_points, without_class
from ascendrun.programs.trajectory.grammars import as_texts
from ascendrun.programs.trajectory.points.clean import LeftOut, clean_rows
from ascendrun.programs.trajectory.points.read_ais import because
from ascendrun.programs.trajectory.points.tables import read_times
from ascendrun.programs.trajectory.points.tracks import Floats, in_order
from ascendrun.programs.trajectory.store import Vote, answer, load_vote, probabilities_of, put_together
from ascendrun.programs.trajectory.tokens import MOSTLY_KNOWN, Encoded, Groups, Words, check_known, encode, known_share
from ascendrun.text import listed

LONGEST = 4096
"""Maximum number of tokens of a text; a longer text is an error, it is not truncated."""
MOST_TOKENS = 2**17
"""Tokens of a pass, with padding."""
POINT_KEYS = ("time", "lat", "lon", "sog", "cog")
FAULTS_OF_INPUT = (InvalidDataError, ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors of an invalid request: JSON values of wrong types, or nested too deeply."""


class Classifier:
    """`path`: the `best` directory of a training's output, or the output of --mode=evaluate. `device`: auto, cpu, cuda,
    npu; `index`: the device number; `dtype`: as the option. Raises InvalidDataError if there is no model."""

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        device: str = "auto",
        index: int = 0,
        warm_up: int = 3,
        dtype: str = "auto",
    ) -> None:
        paths = [path] if isinstance(path, (str, Path)) else list(path)
        self.accelerator = devices.open_accelerator(devices.choose_family(device, {}), index)
        self.precision = devices.choose_precision(dtype, self.accelerator)
        self.vote = load_vote([Path(each) for each in paths], self.accelerator, self.precision)
        self.warm_up(warm_up)

    @classmethod
    def of(cls, vote: Vote, accelerator: devices.Accelerator, precision: devices.Precision) -> Classifier:
        """Create a classifier from a model that is loaded on that device."""
        fresh = cls.__new__(cls)
        fresh.vote, fresh.accelerator, fresh.precision = vote, accelerator, precision
        return fresh

    def warm_up(self, passes: int) -> None:
        words = self.words_of_text("POINT_END")
        for _ in range(passes):
            self.classify([encode(words, self.vote.members[0].vocabulary, -1)])

    @property
    def class_names(self) -> list[str]:
        return self.vote.names

    def predict_single(self, text: str, *, return_probs: bool = False) -> dict[str, Any]:
        """Classify `text`: the tokens of a track in the model's grammar. Return {class_name, confidence}; with
        return_probs also {probabilities: {class: probability}}."""
        return self.predict_batch([text], return_probs=return_probs)[0]

    def predict_batch(self, texts: Sequence[str], *, return_probs: bool = False) -> list[dict[str, Any]]:
        return self._answers([self.words_of_text(text) for text in texts], return_probs)

    def predict_track(self, points: Sequence[Mapping[str, Any]], *, return_probs: bool = False) -> dict[str, Any]:
        """Classify `points`: {time, lat, lon, sog, cog} each, heading optional, under any column name of a file. Raises
        InvalidDataError."""
        return self._answers([self.words_of(points)], return_probs)[0]

    def words_of_text(self, text: str) -> Words:
        return in_points(without_class(text.split(), None)[0])

    def words_of(self, points: Sequence[Mapping[str, Any]]) -> Words:
        if not isinstance(points, (list, tuple)) or not points or not all(isinstance(each, Mapping) for each in points):
            raise InvalidDataError(listed("program.points-form"))
        names = dict.fromkeys(name for point in points for name in point)
        table = {name: [point.get(name) for point in points] for name in names}
        known = find_columns(list(names)).of
        found = {ours: name for ours, name in known.items() if ours not in ("class", "type_code")}
        missing = [key for key in POINT_KEYS if key not in found]
        if missing:
            raise InvalidDataError(listed("program.points-keys", missing=list(missing)))
        left_out = LeftOut()
        tracks = clean_rows(table, found, "one", left_out, times=read_times(table[found["time"]], order=None))
        if len(tracks) != 1 or len(tracks[0]) < 2:
            raise InvalidDataError(
                listed("program.points-tracks", points=len(points), tracks=len(tracks), why=because(left_out.reasons()))
            )
        return as_texts([in_order(tracks[0])[0]], **self.vote.members[0].text)[0]

    def rows_of(self, words: Sequence[Words]) -> list[Encoded]:
        """Return the tokens and numbers of tracks. Raises InvalidDataError, also where most tokens are
        unknown."""
        vocabulary = self.vote.members[0].vocabulary
        rows = [encode(each, vocabulary, -1) for each in words]
        for row in rows:
            if not 0 < len(row) <= LONGEST:
                raise InvalidDataError(listed("program.text-length", length=len(row), limit=LONGEST))
            check_known([row], vocabulary, vocabulary, model=listed("program.the-model"))
        return rows

    def classify(self, rows: Sequence[Encoded]) -> Floats:
        """Return class probabilities, one row per track. Tracks of similar length are computed together."""
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        found: list[Floats] = []
        while len(found) < len(rows):
            most = MOST_TOKENS // len(rows[order[-1]])
            batch = [rows[number] for number in order[len(found) : len(found) + max(1, most)]]
            with torch.no_grad(), self.accelerator.autocast(self.precision.compute):
                each = [
                    probabilities_of(member.model, batch, self.accelerator.device, multiple=1)
                    for member in self.vote.members
                ]
            found += list(put_together(self.vote, each))
        answers = np.empty((len(rows), len(self.class_names)))
        answers[order] = found
        return answers

    def reply_of(self, row: Encoded, probabilities: Floats, *, return_probs: bool) -> dict[str, Any]:
        """Return the reply, with `known_tokens` where that share is low, and `known_waters: False` where
        training had no ships."""
        vocabulary = self.vote.members[0].vocabulary
        reply = answer(probabilities, self.vote.names, with_all=return_probs)
        share = known_share([row], vocabulary, vocabulary)
        if share < MOSTLY_KNOWN:
            reply["known_tokens"] = round(share, 4)
        if len(self._places) and not np.isin(row.head, self._places).any():
            reply["known_waters"] = False
        return reply

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        return Groups.make(self.vote.members[0].vocabulary).known_places()

    def _answers(self, words: Sequence[Words], return_probs: bool) -> list[dict[str, Any]]:
        rows = self.rows_of(words)
        return [self.reply_of(*each, return_probs=return_probs) for each in zip(rows, self.classify(rows))]
