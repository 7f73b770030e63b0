"""Names and values in a line of progress, under the names of metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]
NUM = r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)\b"

_UNIT = re.compile(r"^\S+/\S+\s+(?=\S)")
"""The unit of the number before a name: `0.53 samples/s lr: 1e-4`."""

_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate", "lr"), "learning_rate"),
    **dict.fromkeys(("grad_norm", "gradient_norm", "gnorm", "total_norm"), "grad_norm"),
    **dict.fromkeys(("samples_per_second", "samples/sec", "samples/s", "samples_per_s"), "samples_per_s"),
    **dict.fromkeys(
        ("tokens_per_second", "tokens_per_sec", "tokens/sec", "tokens/s", "tok/s", "tokens_per_s"), "tokens_per_s"
    ),
    **dict.fromkeys(("step", "global_step", "current_steps"), "step"),
    **dict.fromkeys(("total_steps", "max_steps"), "total_steps"),
    "epoch": "epoch",
}
_LOSSES = (
    "loss",
    "lm_loss",
    "train_loss",
    "training_loss",
    "train_loss_step",
    "loss_step",
    "total_loss",
    "step_loss",
    "avr_loss",
    "avg_loss",
    "mean_loss",
    "closs",
    "reduced_train_loss",
    "pg_loss",
)
"""Names of the loss of training; of several in one line the first of these counts."""


_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}


def number(text: str) -> float | None:
    """Return the number of a text like `1,500`, `nan` or `22.8K`, None for another text."""
    text = text.strip().replace(",", "")
    factor = _PREFIXES.get(text[-1:].lower(), 1.0)
    try:
        return float(text) if factor == 1.0 else float(text[:-1]) * factor
    except ValueError:
        return None


def named(pairs: list[tuple[str, str]]) -> Row:
    """Return the values of a line by the names of metrics."""
    row: Row = {}
    losses: dict[str, float] = {}
    for key, text in pairs:
        name = re.sub(r"[\s_]+", "_", _UNIT.sub("", key.strip().lower()))
        name = name[6:] if name[:6] in ("train/", "actor/") else name
        value = number(text)
        if value is None:
            continue
        if name in _LOSSES:
            losses.setdefault(name, value)
        elif name in _KEYS:
            row.setdefault(_KEYS[name], value)
        elif name.startswith("eval_") and name.endswith(("loss", "accuracy", "acc")):
            row[name] = value
    loss = next((losses[name] for name in _LOSSES if name in losses), None)
    return row if loss is None else {**row, "loss": loss}


class StepCounter:
    """Steps over all epochs, of a counter that may begin again in each."""

    def __init__(self) -> None:
        self._epoch, self._first, self._last = -1.0, 0.0, -1
        self._begins_again = False

    def over_all(self, step: int, epoch: float, total: int | None) -> int | None:
        """Return the step that a line states for an epoch, counted over all of them; `total`: of an epoch, None: not
        stated. None: the counter began again after an epoch of unknown length."""
        if self._epoch < 0:
            self._first = min(epoch, 1.0)  # an output that counts from 0 has an epoch 0
        elif epoch > self._epoch and step <= self._last:
            self._begins_again = True
        self._epoch, self._last = epoch, step
        if not self._begins_again:
            return step
        return None if total is None else step + int(epoch - self._first) * total
