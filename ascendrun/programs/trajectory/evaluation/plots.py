"""The report as a picture: the confusion matrix, and how often the model is right beside how sure it was."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from ascendrun.programs.trainer.files import replacing
from ascendrun.programs.trajectory.evaluation.calibrate import Calibration
from ascendrun.programs.trajectory.evaluation.scores import Scores
from ascendrun.text import Text


def draw(output: Path, scores: Scores, calibration: Calibration) -> Text:
    """report.png, where matplotlib is installed; what came of it."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # how it keeps its fonts is no line of a job's log
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return Text("program.no-matplotlib", "no report.png: matplotlib is not installed")
    figure = Figure(figsize=(11, 5), layout="constrained")
    matrix, reliability = figure.subplots(1, 2)
    names = [row.name for row in scores.classes]
    counts = np.asarray(scores.confusion, dtype=float)
    matrix.imshow(counts / np.maximum(counts.sum(1, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1)
    matrix.set_xticks(range(len(names)), names, rotation=45, ha="right")
    matrix.set_yticks(range(len(names)), names)
    matrix.set_xlabel("prediction")
    matrix.set_ylabel("truth")
    for place, count in np.ndenumerate(counts):
        matrix.text(place[1], place[0], int(count), ha="center", va="center", fontsize=8)
    matrix.set_title(f"macro F1 {scores.macro_f1:.3f}, accuracy {scores.accuracy:.3f}")
    reliability.plot([0, 1], [0, 1], color="grey", linewidth=1)
    reliability.plot([each.confidence for each in calibration.bins], [each.accuracy for each in calibration.bins], "o-")
    reliability.set_xlabel("confidence")
    reliability.set_ylabel("accuracy")
    reliability.set_title(f"ECE {calibration.ece:.3f}")
    with replacing(output / "report.png") as fresh:
        figure.savefig(fresh, dpi=120, format="png")
    return Text("program.plot", "plot: {path}", path=output / "report.png")
