"""Methods beside each other on the same pieces: scores with intervals by ship, and the difference to this model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.trajectory.evaluation.calibrate import measure
from ascendrun.programs.trajectory.points.tracks import Floats
from ascendrun.text import Text
from ascendrun.text.format import display_width, pad_left, pad_right

MODEL = "model"
DRAWS = 1000
LEVEL = (2.5, 97.5)
"""Percentiles of the draws between which an interval lies."""
SCORES = ("macro_f1", "accuracy")
NAMES = {
    MODEL: Text("program.this-model", "this model"),
    "majority": Text("program.majority-class", "majority class"),
    "forest": Text("program.forest", "random forest"),
    "boosting": Text("program.boosting", "gradient boosting"),
    "tokens": Text("program.token-regression", "regression on tokens"),
    "network": Text("program.no-trees", "this model, no trees"),
    "no_place": Text("program.no-place-input", "this model, no place"),
    "no_size": Text("program.no-size-input", "this model, no size"),
    "other": Text("program.other-model", "the other model"),
}
VERDICTS = {
    "better": Text("program.better", "better"),
    "equal": Text("program.equal", "equal within the interval"),
    "worse": Text("program.worse", "worse"),
}
RIVALS = ("majority", "forest", "boosting", "tokens", "other")


@dataclass(frozen=True)
class Interval:
    """A score, and the range that contains it for 95 % of the draws of as many ships."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Compared:
    """One method. `pieces`, `ships`: its scores, by piece and by the vote of a ship's pieces. `ahead`: by how much this
    model is better, by ship; `verdict`: better, equal or worse in macro F1; None for this model."""

    pieces: dict[str, Interval]
    ships: dict[str, Interval]
    ahead: dict[str, Interval] | None
    verdict: str | None
    ece: float
    nll: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    probabilities: Mapping[str, Floats], truth: Sequence[int], ships: Sequence[str], *, seed: int = 0
) -> dict[str, Compared]:
    """Compare the methods; one of them is MODEL. All see the same draws of ships, so differences are paired."""
    classes = probabilities[MODEL].shape[1]
    numbers = np.unique(np.asarray(ships), return_inverse=True)[1].reshape(-1)
    count = int(numbers.max()) + 1
    draws = np.random.default_rng([7, seed]).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    draws = np.vstack([np.ones(count, dtype=draws.dtype), draws])  # the first is the data itself
    of_ship = np.zeros(count, dtype=np.int64)
    of_ship[numbers] = truth
    of_pieces, of_ships = {}, {}
    for name, rows in probabilities.items():
        of_pieces[name] = scores_of_draws(numbers, truth, rows.argmax(1), draws, classes)
        votes = np.stack([np.bincount(numbers, weights=rows[:, i], minlength=count) for i in range(classes)], 1)
        of_ships[name] = scores_of_draws(np.arange(count), of_ship, votes.argmax(1), draws, classes)
    found = {}
    for name, rows in probabilities.items():
        ahead = None
        if name != MODEL:
            ahead = {score: interval(of_ships[MODEL][score] - of_ships[name][score]) for score in SCORES}
        calibration = measure(rows, truth)
        found[name] = Compared(
            {score: interval(values) for score, values in of_pieces[name].items()},
            {score: interval(values) for score, values in of_ships[name].items()},
            ahead,
            verdict_of(ahead["macro_f1"]) if ahead else None,
            calibration.ece,
            calibration.nll,
        )
    return found


def scores_of_draws(
    ships: NDArray[np.int64], truth: Any, called: Any, draws: NDArray[np.int64], classes: int
) -> dict[str, Floats]:
    """Return the scores of each draw; `draws`: how often each ship is in it."""
    counts = np.zeros((draws.shape[1], classes, classes))
    np.add.at(counts, (ships, np.asarray(truth), np.asarray(called)), 1)
    matrix = (draws @ counts.reshape(len(counts), -1)).reshape(-1, classes, classes)
    hits, support, calls = np.einsum("dcc->dc", matrix), matrix.sum(2), matrix.sum(1)
    f1 = 2 * hits / np.maximum(support + calls, 1)
    present = support > 0
    return {
        "macro_f1": (f1 * present).sum(1) / np.maximum(present.sum(1), 1),
        "accuracy": hits.sum(1) / np.maximum(support.sum(1), 1),
    }


def interval(draws: Floats) -> Interval:
    """Return the first value, that of the data itself, with the range of the others."""
    low, high = np.percentile(draws[1:], LEVEL)
    return Interval(round(float(draws[0]), 4), round(float(low), 4), round(float(high), 4))


def verdict_of(ahead: Interval) -> str:
    return "better" if ahead.low > 0 else "worse" if ahead.high < 0 else "equal"


def as_lines(compared: Mapping[str, Compared]) -> list[str]:
    """Format a row for each method, and the verdict."""
    wide = max(display_width(NAMES[name]) for name in compared)
    has_votes = any(each.ships != each.pieces for each in compared.values())
    columns = [("pieces", score) for score in SCORES] + ([("ships", score) for score in SCORES] if has_votes else [])
    titles = {
        ("pieces", "macro_f1"): Text("program.macro-f1", "macro F1"),
        ("pieces", "accuracy"): Text("program.accuracy", "accuracy"),
        ("ships", "macro_f1"): Text("program.macro-f1-ships", "macro F1 by ship"),
        ("ships", "accuracy"): Text("program.accuracy-ships", "accuracy by ship"),
    }
    heads = [*(pad_right(titles[column], 17) for column in columns), pad_left("ECE", 5)]
    lines = ["  ".join([" " * wide, *heads, str(Text("program.this-model-is", "this model is"))])]
    for name, each in compared.items():
        cells = [getattr(each, kind)[score] for kind, score in columns]
        row = [pad_right(NAMES[name], wide), *(f"{cell.value:.3f} [{cell.low:.3f} {cell.high:.3f}]" for cell in cells)]
        verdict = str(VERDICTS[each.verdict]) if each.verdict and name in RIVALS else ""
        lines.append("  ".join([*row, f"{each.ece:5.3f}", verdict]).rstrip())
    return lines


def summary_line(compared: Mapping[str, Compared]) -> Text | None:
    """Return the line that says what this model is compared with the others; None: there is no other."""
    said = [
        Text(
            "program.compared-with",
            "{name}: {verdict} ({ahead:+.3f}, {low:+.3f} to {high:+.3f})",
            name=NAMES[name],
            verdict=VERDICTS[str(each.verdict)],
            ahead=each.ahead["macro_f1"].value,
            low=each.ahead["macro_f1"].low,
            high=each.ahead["macro_f1"].high,
        )
        for name, each in compared.items()
        if each.ahead is not None and name in RIVALS
    ]
    return Text("program.comparison", "macro F1 by ship, this model against {methods}", methods=said) if said else None
