"""Names and values in a line of progress, under the names of metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]
NUM = r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)\b"

_BEFORE = re.compile(
    r"\[[^\[\]]{0,80}\]|\d[\d:.,/TZ+-]*|\b(?:INFO|DEBUG|WARNING|NOTICE)\b(?::[\w.]+:)?|\b(?:rank|gpu)[ _]?\d*"
    r"|\b(?:train(?:ing)?|global|epoch)\b|\b[\w.]+ [-|] |\(\w+ pid=\d+[^)]*\)",
    re.I,
)
"""What loggers write before the text of a line, and an epoch before the step."""
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


def is_prefix(text: str) -> bool:
    """Whether a text is only what a logger writes before a message."""
    return not re.search(r"[^\W\d_]", _BEFORE.sub("", text))


def is_record(text: str) -> bool:
    """Whether the text before the loss is names and values: a sentence has more words than numbers."""
    before = re.sub(r"[\w/.@-]+[:=](?=\s?[-+.\d])", " ", re.split(r"loss", text, maxsplit=1, flags=re.I)[0])
    return len(re.findall(r"[A-Za-z]{2,}", before)) <= 2 * len(re.findall(r"\d+", before)) + 1


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


class EpochHeading:
    """The line `Epoch 2/3` above the counter of an epoch. Another counter below it is that of an evaluation."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._first, self._epochs, self._total = 0, 0, 0
        self._last, self._before = 0, 0
        """The newest counts of this epoch and of the one before, 0: none."""
        self._is_per_epoch = self._is_over = self._is_lost = False

    def begin(self, number: int, epochs: int) -> None:
        if self.number is None:
            self._first = min(number, 1)  # an output that counts from 0 has an epoch 0
        else:
            self._is_lost |= number <= self.number  # a second training
        self.number, self._epochs = number, epochs
        self._before, self._last, self._is_over = self._last, 0, False

    def omit(self) -> None:
        """Output was not read in which other headings may be."""
        self._last, self._is_over = 0, True

    def place(self, count: int, total: int, *, is_bar: bool) -> Row | None:
        """Return the step over all epochs and the total, each only if known; None: it does not count the training's.
        `is_bar`: drawn as a bar, which never counts over several epochs."""
        if self.number is None or self._is_over or count < 1 or self._total not in (0, total):
            return None
        if count < self._last:
            self._is_over = True
            return None
        at = self.number - self._first
        self._is_per_epoch |= is_bar or bool(self._before and not self._last and count <= self._before)
        self._is_per_epoch |= count == total and at + 1 < self._epochs
        self._total, self._last, self._is_over = total, count, count == total
        if self._is_lost or (at and not self._is_per_epoch and not self._before):
            return {"step": None}
        if not self._is_per_epoch:
            return {"step": count, **({"total_steps": total} if at or self._epochs == 1 else {})}
        return {"step": at * total + count, **({"total_steps": self._epochs * total} if self._first else {})}
