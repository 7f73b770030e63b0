"""Calibration of probabilities, and two parameters, chosen on validation ships, that improve it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ascendrun.programs.trajectory.evaluation.scores import score
from ascendrun.programs.trajectory.points.tracks import Floats

BINS = 10
TEMPERATURES = tuple(np.exp(np.linspace(np.log(0.3), np.log(3.0), 47)).tolist())
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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


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


def choose_adjustment(
    probabilities: Floats, truth: Sequence[int], priors: Sequence[float], names: Sequence[str], *, macro_share: float
) -> Adjustment:
    """Choose on validation tracks: the shift with the best mean of macro F1 (weight `macro_share`) and accuracy, the
    smallest on a tie, 0 for a negative weight; then the temperature with the lowest loss in nats."""

    def worth(shift: float) -> float:
        called = Adjustment(1.0, shift).apply(probabilities, priors).argmax(1).tolist()
        scores = score(truth, called, names)
        return macro_share * scores.macro_f1 + (1 - macro_share) * scores.accuracy

    shift = max(SHIFTS, key=lambda each: (smoothed(worth, each), -each)) if macro_share >= 0 else 0.0
    best = min(TEMPERATURES, key=lambda each: measure(Adjustment(each, shift).apply(probabilities, priors), truth).nll)
    return Adjustment(round(float(best), 4), float(shift))


def smoothed(worth: Any, shift: float) -> float:
    """Return the mean over adjacent shifts: with a few hundred validation ships, single values are noisy."""
    values: list[float] = [worth(each) for each in SHIFTS if abs(each - shift) < 0.11]
    return float(np.mean(values))
