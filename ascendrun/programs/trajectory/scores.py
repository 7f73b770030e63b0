"""Scores of predictions, their calibration, and methods beside each other: as numbers and as text.

Intervals are by ship: from draws of as many ships.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.trajectory.points.tracks import Floats
from ascendrun.text import Text, listed
from ascendrun.text.format import display_width, pad_left, pad_right

Matrix = NDArray[np.int64]
ACCURACY = listed("program.accuracy")


@dataclass(frozen=True)
class ClassScore:
    """One class: precision (correct fraction of its predictions) and recall (fraction of its tracks that is found)."""

    name: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class Scores:
    """Macro F1 is the mean over the classes that occur in the truth; weighted F1 that over the tracks.
    `confusion[t][p]`: number of tracks of class t predicted as p."""

    accuracy: float
    macro_f1: float
    weighted_f1: float
    classes: tuple[ClassScore, ...]
    confusion: tuple[tuple[int, ...], ...]


def score(truth: Sequence[int], called: Sequence[int], names: Sequence[str]) -> Scores:
    """Compute scores; both sequences hold class ids. A class that is never predicted has precision 0."""
    matrix: Matrix = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(matrix, (np.asarray(truth, dtype=np.int64), np.asarray(called, dtype=np.int64)), 1)
    rows = []
    for i, name in enumerate(names):
        hits, support, calls = int(matrix[i, i]), int(matrix[i].sum()), int(matrix[:, i].sum())
        rows.append(
            ClassScore(
                name,
                hits / calls if calls else 0.0,
                hits / support if support else 0.0,
                2 * hits / (calls + support) if calls + support else 0.0,
                support,
            )
        )
    present = [row.f1 for row in rows if row.support]
    accuracy = float(np.trace(matrix) / max(1, matrix.sum()))
    weighted = sum(row.f1 * row.support for row in rows) / max(1, int(matrix.sum()))
    return Scores(
        accuracy,
        float(np.mean(present)) if present else 0.0,
        weighted,
        tuple(rows),
        tuple(tuple(int(count) for count in row) for row in matrix),
    )


def as_table(model: Scores) -> str:
    """Format precision, recall, F1 and number of tracks of each class."""
    wide = max(display_width(listed("program.class")), *(display_width(row.name) for row in model.classes))
    heads = (
        (listed("program.precision"), 9),
        (listed("program.recall"), 6),
        ("F1", 5),
        (listed("program.track-count"), 6),
    )
    head = "  ".join(pad_left(text, room) for text, room in heads)
    lines = [f"{pad_right(listed('program.class'), wide)}  {head}"]
    lines += [
        f"{pad_right(row.name, wide)}  {row.precision:9.3f}  {row.recall:6.3f}  {row.f1:5.3f}  {row.support:6d}"
        for row in model.classes
    ]
    return "\n".join(lines)


def as_confusion(scores: Scores) -> str:
    """Format the confusion matrix with its title: rows are the truth, columns the predictions, by number of row."""
    names = [row.name for row in scores.classes]
    wide = max(display_width(name) for name in names) + 4
    title = listed("program.confusion")
    lines = [str(title), " " * wide + "".join(f"{i:>6}" for i in range(len(names)))]
    lines += [
        pad_right(f"{i} {names[i]}", wide) + "".join(f"{count:>6}" for count in row)
        for i, row in enumerate(scores.confusion)
    ]
    return "\n".join(lines)


BINS = 10
TEMPERATURES = tuple(np.exp(np.linspace(np.log(0.3), np.log(6.0), 61)).tolist())
STEADIED = 1.0
"""Nats that a temperature of e, or of 1/e, has to save over all ships: few ships leave it near 1."""
SHIFTS = tuple(np.round(np.arange(0.0, 1.01, 0.05), 2).tolist())


@dataclass(frozen=True)
class Bin:
    """Predictions of similar confidence: mean confidence, accuracy, number."""

    confidence: float
    accuracy: float
    count: int


@dataclass(frozen=True)
class Calibration:
    """`ece`: mean distance of confidence from accuracy over the bins. `nll`: nats per track. `brier`: 0 is perfect."""

    ece: float
    nll: float
    brier: float
    bins: tuple[Bin, ...]


def measure(probabilities: Floats, truth: Sequence[int]) -> Calibration:
    right = np.asarray(truth)
    sure, called = probabilities.max(1), probabilities.argmax(1)
    place = np.minimum((sure * BINS).astype(int), BINS - 1)
    bins = [
        Bin(float(sure[inside].mean()), float((called[inside] == right[inside]).mean()), int(inside.sum()))
        for inside in (place == i for i in range(BINS))
        if inside.any()
    ]
    ece = sum(each.count * abs(each.confidence - each.accuracy) for each in bins) / max(1, len(right))
    of_truth = probabilities[np.arange(len(right)), right]
    ideal = np.eye(probabilities.shape[1])[right]
    return Calibration(
        float(ece),
        float(-np.log(np.maximum(of_truth, 1e-12)).mean()),
        float(((probabilities - ideal) ** 2).sum(1).mean()),
        tuple(bins),
    )


@dataclass(frozen=True)
class Adjustment:
    """`prior_shift` 0 to 1: how strongly class frequencies are removed, so that rare classes are predicted more often;
    `temperature` above 1 makes the probabilities less confident."""

    temperature: float = 1.0
    prior_shift: float = 0.0

    def apply(self, probabilities: Floats, priors: Sequence[float]) -> Floats:
        logits = np.log(np.maximum(probabilities, 1e-12))
        logits = (logits - self.prior_shift * np.log(np.maximum(np.asarray(priors), 1e-12))) / self.temperature
        raised = np.exp(logits - logits.max(1, keepdims=True))
        answer: Floats = raised / raised.sum(1, keepdims=True)
        return answer


def nats_of_ships(probabilities: Floats, truth: Sequence[int], ships: Sequence[str]) -> Floats:
    """Return the loss of each ship, the mean over its pieces."""
    numbers = np.unique(np.asarray(ships), return_inverse=True)[1].reshape(-1)
    nats = -np.log(np.maximum(probabilities[np.arange(len(numbers)), truth], 1e-12))
    return np.asarray(np.bincount(numbers, weights=nats) / np.bincount(numbers))


def fit_temperature(probabilities: Floats, truth: Sequence[int], ships: Sequence[str]) -> float:
    """Return the temperature of the lowest loss by ship, drawn towards 1."""
    return best_temperature(lambda each: Adjustment(each).apply(probabilities, [1.0]), truth, ships)


def best_temperature(answers: Callable[[float], Floats], truth: Sequence[int], ships: Sequence[str]) -> float:
    """Return the temperature at which the answers have the lowest loss by ship, drawn towards 1."""

    def loss(temperature: float) -> float:
        nats = nats_of_ships(answers(temperature), truth, ships)
        return float(nats.sum()) + STEADIED * float(np.log(temperature)) ** 2

    return round(float(min(TEMPERATURES, key=loss)), 4)


def choose_adjustment(
    probabilities: Floats,
    truth: Sequence[int],
    ships: Sequence[str],
    priors: Sequence[float],
    names: Sequence[str],
    *,
    macro_share: float,
) -> Adjustment:
    """Choose on validation tracks: the shift with the best mean of macro F1 (weight `macro_share`) and accuracy, the
    smallest on a tie, 0 for a negative weight; then the temperature."""

    def worth(shift: float) -> float:
        called = Adjustment(1.0, shift).apply(probabilities, priors).argmax(1).tolist()
        scores = score(truth, called, names)
        return macro_share * scores.macro_f1 + (1 - macro_share) * scores.accuracy

    shift = max(SHIFTS, key=lambda each: (smoothed(worth, each), -each)) if macro_share >= 0 else 0.0
    shifted = Adjustment(1.0, shift).apply(probabilities, priors)
    return Adjustment(fit_temperature(shifted, truth, ships), float(shift))


def smoothed(worth: Callable[[float], float], shift: float) -> float:
    """Return the mean over adjacent shifts: with a few hundred validation ships, single values are noisy."""
    values = [worth(each) for each in SHIFTS if abs(each - shift) < 0.11]
    return float(np.mean(values))


MODEL = "model"
DRAWS = 1000
LEVEL = (2.5, 97.5)
"""Percentiles of the draws between which an interval lies."""
SCORES = ("macro_f1", "accuracy")
NAMES = {
    MODEL: listed("program.this-model"),
    "majority": listed("program.majority-class"),
    "forest": listed("program.forest"),
    "boosting": listed("program.boosting"),
    "tokens": listed("program.token-regression"),
    "network": listed("program.no-trees"),
    "no_place": listed("program.no-place-input"),
    "no_size": listed("program.no-size-input"),
    "other": listed("program.other-model"),
}
VERDICTS = {"better": listed("program.better"), "equal": listed("program.equal"), "worse": listed("program.worse")}
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
        ahead = verdict = None
        if name != MODEL:
            ahead = {score: interval(of_ships[MODEL][score] - of_ships[name][score]) for score in SCORES}
            verdict = verdict_of(ahead["macro_f1"])
        calibration = measure(rows, truth)
        found[name] = Compared(
            {score: interval(values) for score, values in of_pieces[name].items()},
            {score: interval(values) for score, values in of_ships[name].items()},
            ahead,
            verdict,
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
        ("pieces", "macro_f1"): listed("program.macro-f1"),
        ("pieces", "accuracy"): listed("program.accuracy"),
        ("ships", "macro_f1"): listed("program.macro-f1-ships"),
        ("ships", "accuracy"): listed("program.accuracy-ships"),
    }
    heads = [*(pad_right(titles[column], 17) for column in columns), pad_left("ECE", 5)]
    lines = ["  ".join([" " * wide, *heads, str(listed("program.this-model-is"))])]
    for name, each in compared.items():
        cells = [getattr(each, kind)[score] for kind, score in columns]
        row = [pad_right(NAMES[name], wide), *(f"{cell.value:.3f} [{cell.low:.3f} {cell.high:.3f}]" for cell in cells)]
        verdict = str(VERDICTS[each.verdict]) if each.verdict and name in RIVALS else ""
        lines.append("  ".join([*row, f"{each.ece:5.3f}", verdict]).rstrip())
    return lines


def summary_line(compared: Mapping[str, Compared]) -> Text | None:
    """Return the line that says what this model is compared with the others; None: there is no other."""
    said = [
        listed(
            "program.compared-with",
            name=NAMES[name],
            verdict=VERDICTS[str(each.verdict)],
            ahead=each.ahead["macro_f1"].value,
            low=each.ahead["macro_f1"].low,
            high=each.ahead["macro_f1"].high,
        )
        for name, each in compared.items()
        if each.ahead is not None and name in RIVALS
    ]
    return listed("program.comparison", methods=said) if said else None
