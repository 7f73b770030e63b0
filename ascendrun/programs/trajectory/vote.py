"""Class probabilities of several models together: their mean, adjusted, and the reply format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory.data import Options
from ascendrun.programs.trajectory.evaluation.calibrate import Adjustment
from ascendrun.programs.trajectory.evaluation.evaluate import predict
from ascendrun.programs.trajectory.points.tracks import Floats
from ascendrun.programs.trajectory.store import Vote
from ascendrun.programs.trajectory.tokens import Encoded, check_known
from ascendrun.text import Text


def vote_on(vote: Vote, samples: Sequence[Encoded], here: Runtime, options: Options) -> Floats:
    """Return the mean over the members, adjusted; the same on every rank."""
    return put_together(vote, each_member_on(vote, samples, here, options))


def each_member_on(vote: Vote, samples: Sequence[Encoded], here: Runtime, options: Options) -> list[Floats]:
    if not samples:
        raise InvalidDataError("program.nothing-to-classify", "no track to classify")
    return [predict(member.model, samples, here, options) for member in vote.members]


def put_together(vote: Vote, each: Sequence[Floats]) -> Floats:
    mean: Floats = np.mean(each, axis=0)
    return Adjustment(vote.temperature, vote.prior_shift).apply(mean, vote.members[0].priors)


def check_vocabulary(vote: Vote, samples: Sequence[Encoded], here: Runtime) -> None:
    """Warn if the models have not seen some of the tokens. Raises InvalidDataError if they have not seen most."""
    vocabulary = vote.members[0].vocabulary
    warning = check_known(samples, vocabulary, vocabulary, model=Text("program.the-model", "the model"))
    if warning is not None:
        here.log("program.warning", "warning: {text}", text=warning)


def ids_of(vote: Vote) -> dict[str, int]:
    return {name: i for i, name in enumerate(vote.names)}


def answer(row: Floats, names: Sequence[str], *, with_all: bool) -> dict[str, Any]:
    best = int(row.argmax())
    reply: dict[str, Any] = {"class_name": names[best], "confidence": round(float(row[best]), 4)}
    if with_all:
        reply["probabilities"] = {name: round(float(value), 4) for name, value in zip(names, row)}
    return reply
