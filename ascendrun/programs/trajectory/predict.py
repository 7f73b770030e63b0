"""A trained model in a file, and what it says of each track, one JSON line a track."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ascendrun.programs.trajectory.model import Classifier, make_model
from ascendrun.programs.trajectory.tracks import BadData, Track

MODEL_FILE = "model.pt"


@dataclass(frozen=True)
class Trained:
    """A model with all that is needed to use it on raw tracks. `text`: grammar and resolution of the words."""

    model: Classifier
    sizes: Dict[str, Any]
    vocabulary: Dict[str, int]
    names: Sequence[str]
    text: Dict[str, Any]


def save_trained(trained: Trained, folder: Path) -> Path:
    """Writes model.pt; readers never see half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    path, fresh = folder / MODEL_FILE, folder / f".{MODEL_FILE}.{os.getpid()}.tmp"
    weights = {name: tensor.detach().cpu() for name, tensor in trained.model.state_dict().items()}
    torch.save({"weights": weights, "sizes": trained.sizes, "vocabulary": trained.vocabulary,
                "names": list(trained.names), "text": trained.text}, fresh)
    os.replace(fresh, path)
    return path


def load_trained(path: Path) -> Trained:
    """From the file or its folder. Raises BadData when there is none."""
    file = path / MODEL_FILE if path.is_dir() else path
    if not file.is_file():
        raise BadData(f"{file}: no trained model here; --model takes the `best` folder of a training's output")
    saved = torch.load(file, map_location="cpu", weights_only=True)
    model = make_model(saved["sizes"], seed=0)
    model.load_state_dict(saved["weights"])
    return Trained(model, saved["sizes"], saved["vocabulary"], saved["names"], saved["text"])


def write_predictions(path: Path, tracks: Sequence[Track], probabilities: NDArray[np.float64],
                      names: Sequence[str]) -> None:
    """One line a track: its class_name and confidence, and the truth where it is known."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(fresh, "w", encoding="utf-8") as file:
        for track, row in zip(tracks, probabilities):
            file.write(json.dumps(prediction(track, row, names)) + "\n")
    os.replace(fresh, path)


def prediction(track: Track, row: NDArray[np.float64], names: Sequence[str]) -> Dict[str, Any]:
    best = int(row.argmax())
    said: Dict[str, Any] = {"track": track.id, "ship": track.ship, "class_name": names[best],
                            "confidence": round(float(row[best]), 4)}
    if track.label is not None:
        said["truth"] = track.label
    said["probabilities"] = {name: round(float(value), 4) for name, value in zip(names, row)}
    return said
