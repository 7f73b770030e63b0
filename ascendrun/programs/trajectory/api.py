"""Python interface of a classifier: Classifier("out/finetune/best").predict_single(text, return_probs=True)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ascendrun.programs.trainer.devices.accelerator import choose_family, open_accelerator
from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trajectory.evaluation.evaluate import probabilities_of
from ascendrun.programs.trajectory.grammars import as_texts
from ascendrun.programs.trajectory.points.read_ais import NEEDED, LeftOut, because, clean_rows, find_columns
from ascendrun.programs.trajectory.points.tracks import in_order
from ascendrun.programs.trajectory.records import in_points, without_class
from ascendrun.programs.trajectory.store import Vote, load_vote
from ascendrun.programs.trajectory.tokens import Words, encode
from ascendrun.programs.trajectory.vote import answer, put_together

LONGEST = 4096
"""Maximum number of tokens of a text; a longer text is an error, it is not truncated."""
FAULTS_OF_INPUT = (InvalidDataError, ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors of an invalid request: JSON values of wrong types, or nested too deeply."""


class Classifier:
    """`path`: the `best` directory of a training's output, or the output of --mode=evaluate. `device`: auto, cpu, cuda,
    npu; `index`: the device number. Raises InvalidDataError if there is no model."""

    def __init__(
        self, path: str | Path | Sequence[str | Path], *, device: str = "auto", index: int = 0, warm_up: int = 3
    ) -> None:
        paths = [path] if isinstance(path, (str, Path)) else list(path)
        accelerator = open_accelerator(choose_family(device, {}), index)
        self.vote, self.device = load_vote([Path(each) for each in paths], accelerator), accelerator.device
        for _ in range(warm_up):
            self.predict_batch(["POINT_END"])

    @classmethod
    def of(cls, vote: Vote, device: torch.device) -> Classifier:
        """Create a classifier from a model that is loaded on that device."""
        fresh = cls.__new__(cls)
        fresh.vote, fresh.device = vote, device
        return fresh

    @property
    def class_names(self) -> list[str]:
        return self.vote.names

    def predict_single(self, text: str, *, return_probs: bool = False) -> dict[str, Any]:
        """Classify `text`: the tokens of a track in the model's grammar. Return {class_name, confidence}; with
        return_probs also {probabilities: {class: probability}}."""
        return self.predict_batch([text], return_probs=return_probs)[0]

    def predict_batch(self, texts: Sequence[str], *, return_probs: bool = False) -> list[dict[str, Any]]:
        return self._answers([in_points(without_class(text.split(), None)[0]) for text in texts], return_probs)

    def predict_track(self, points: Sequence[Mapping[str, Any]], *, return_probs: bool = False) -> dict[str, Any]:
        """Classify `points`: {time, lat, lon, sog, cog} each, heading optional, under any column name of a file. Raises
        InvalidDataError."""
        return self._answers([self.words_of(points)], return_probs)[0]

    def words_of(self, points: Sequence[Mapping[str, Any]]) -> Words:
        if not isinstance(points, (list, tuple)) or not points or not all(isinstance(each, Mapping) for each in points):
            raise InvalidDataError("program.points-form", "points: expected a list of {{time, lat, lon, sog, cog}}")
        names = dict.fromkeys(name for point in points for name in point)
        table = {name: [point.get(name) for point in points] for name in names}
        found = {ours: name for ours, name in find_columns(list(names)).items() if ours not in ("class", "type_code")}
        missing = [key for key in NEEDED if key not in found]
        if missing:
            raise InvalidDataError(
                "program.points-keys",
                "points lack {missing}; expected {{time, lat, lon, sog, cog}} each, with null for an unknown "
                "speed or course",
                missing=list(missing),
            )
        left_out = LeftOut()
        tracks = clean_rows(table, found, "one", left_out)
        if len(tracks) != 1 or len(tracks[0]) < 2:
            raise InvalidDataError(
                "program.points-tracks",
                "{points} points make {tracks} tracks{why}; expected two or more usable points of one ship",
                points=len(points),
                tracks=len(tracks),
                why=because(left_out.reasons()),
            )
        return as_texts([in_order(tracks[0])[0]], **self.vote.members[0].text)[0]

    def _answers(self, words: Sequence[Words], return_probs: bool) -> list[dict[str, Any]]:
        rows = [encode(each, self.vote.members[0].vocabulary, -1).ids() for each in words]
        for row in rows:
            if not 0 < len(row) <= LONGEST:
                raise InvalidDataError(
                    "program.text-length",
                    "text of {length} tokens; expected 1 to {limit}",
                    length=len(row),
                    limit=LONGEST,
                )
        with torch.no_grad():
            each = [probabilities_of(member.model, rows, self.device, multiple=1) for member in self.vote.members]
        return [answer(row, self.vote.names, with_all=return_probs) for row in put_together(self.vote, each)]
