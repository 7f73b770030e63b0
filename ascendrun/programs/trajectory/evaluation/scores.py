"""Scores of predictions, as numbers and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascendrun.text import Text
from ascendrun.text.format import display_width, pad_left, pad_right

Matrix = NDArray[np.int64]
ACCURACY = Text("program.accuracy", "accuracy")


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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


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
    wide = max(display_width(Text("program.class", "class")), *(display_width(row.name) for row in model.classes))
    heads = (
        (Text("program.precision", "precision"), 9),
        (Text("program.recall", "recall"), 6),
        ("F1", 5),
        (Text("program.track-count", "tracks"), 6),
    )
    head = "  ".join(pad_left(text, room) for text, room in heads)
    lines = [f"{pad_right(Text('program.class', 'class'), wide)}  {head}"]
    lines += [
        f"{pad_right(row.name, wide)}  {row.precision:9.3f}  {row.recall:6.3f}  {row.f1:5.3f}  {row.support:6d}"
        for row in model.classes
    ]
    return "\n".join(lines)


def as_confusion(scores: Scores) -> str:
    """Format the confusion matrix with its title: rows are the truth, columns the predictions, by number of row."""
    names = [row.name for row in scores.classes]
    wide = max(display_width(name) for name in names) + 4
    title = Text("program.confusion", "rows: truth, columns: prediction")
    lines = [str(title), " " * wide + "".join(f"{i:>6}" for i in range(len(names)))]
    lines += [
        pad_right(f"{i} {names[i]}", wide) + "".join(f"{count:>6}" for count in row)
        for i, row in enumerate(scores.confusion)
    ]
    return "\n".join(lines)
