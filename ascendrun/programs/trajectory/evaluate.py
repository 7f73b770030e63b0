"""How good the predictions are, beside always saying the most common class."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import torch
from numpy.typing import NDArray

from ascendrun.programs.trainer.start import Runtime
from ascendrun.programs.trajectory.model import Classifier, pad
from ascendrun.programs.trajectory.tokens import Encoded
from ascendrun.programs.trajectory.tracks import Floats

Matrix = NDArray[np.int64]


@dataclass(frozen=True)
class ClassScore:
    """One class: of those called so, how many were (precision); of those that were, how many were found (recall)."""

    name: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class Scores:
    """Macro F1 is the mean over the classes that occur in the truth. `confusion[t][p]`: truth t called p."""

    accuracy: float
    macro_f1: float
    classes: Tuple[ClassScore, ...]
    confusion: Tuple[Tuple[int, ...], ...]

    def as_json(self) -> Dict[str, Any]:
        return asdict(self)


def score(truth: Sequence[int], called: Sequence[int], names: Sequence[str]) -> Scores:
    """Both sequences hold class ids. A class that is never called has precision 0."""
    matrix: Matrix = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(matrix, (np.asarray(truth, dtype=np.int64), np.asarray(called, dtype=np.int64)), 1)
    rows = []
    for i, name in enumerate(names):
        hits, support, calls = int(matrix[i, i]), int(matrix[i].sum()), int(matrix[:, i].sum())
        rows.append(ClassScore(name, hits / calls if calls else 0.0, hits / support if support else 0.0,
                               2 * hits / (calls + support) if calls + support else 0.0, support))
    present = [row.f1 for row in rows if row.support]
    accuracy = float(np.trace(matrix) / max(1, matrix.sum()))
    return Scores(accuracy, float(np.mean(present)) if present else 0.0, tuple(rows),
                  tuple(tuple(int(count) for count in row) for row in matrix))


def majority(train: Sequence[int], truth: Sequence[int], names: Sequence[str]) -> Scores:
    """What one gets by always saying the class that is most common in training."""
    return score(truth, [int(np.bincount(train).argmax())] * len(truth), names)


def predict(model: Classifier, samples: Sequence[Encoded], runtime: Runtime, *, batch_size: int,
            multiple: int) -> Floats:
    """Class probabilities, one row a sample, the same on every rank. All ranks must call it together.

    Each rank takes every world_size-th sample by length, so the work is even, no sample is counted twice, and ranks
    with fewer batches than others do not wait inside the model.
    """
    order = sorted(range(len(samples)), key=lambda i: (len(samples[i]), i))
    mine = order[runtime.rank::runtime.world_size]
    rows: List[Floats] = []
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for start in range(0, len(mine), batch_size):
            ids, lengths = pad([samples[i].ids() for i in mine[start:start + batch_size]], multiple=multiple)
            logits = model(ids.to(runtime.device), lengths.to(runtime.device))
            rows += list(torch.softmax(logits.float(), -1).double().cpu().numpy())
    model.train(was_training)
    return merge(runtime.gather((mine, rows)), len(samples), model.head.out_features)


def merge(parts: Sequence[Tuple[List[int], List[Floats]]], count: int, classes: int) -> Floats:
    """All ranks' rows in sample order; every sample must be there exactly once."""
    numbers = [i for mine, _ in parts for i in mine]
    assert sorted(numbers) == list(range(count)), "samples lost or counted twice"
    whole = np.zeros((count, classes))
    for mine, rows in parts:
        if mine:
            whole[mine] = np.stack(rows)
    return whole


def as_table(model: Scores, baseline: Scores) -> str:
    """What a person reads at the end: each class, then the two that matter beside the majority-class baseline."""
    wide = max(len("majority class"), *(len(row.name) for row in model.classes))
    lines = [f"{'class':<{wide}}  precision  recall     F1  tracks"]
    lines += [f"{row.name:<{wide}}  {row.precision:9.3f}  {row.recall:6.3f}  {row.f1:5.3f}  {row.support:6d}"
              for row in model.classes]
    lines += ["", f"{'':<{wide}}  macro F1  accuracy",
              f"{'this model':<{wide}}  {model.macro_f1:8.3f}  {model.accuracy:8.3f}",
              f"{'majority class':<{wide}}  {baseline.macro_f1:8.3f}  {baseline.accuracy:8.3f}"]
    return "\n".join(lines)


def as_confusion(scores: Scores) -> str:
    """The confusion matrix as text: rows are the truth, columns what the model said, numbered as the rows are."""
    names = [row.name for row in scores.classes]
    wide = max(len(name) for name in names) + 4
    lines = [" " * wide + "".join(f"{i:>6}" for i in range(len(names)))]
    lines += [f"{f'{i} {names[i]}':<{wide}}" + "".join(f"{count:>6}" for count in row)
              for i, row in enumerate(scores.confusion)]
    return "\n".join(lines)
