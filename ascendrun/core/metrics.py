"""Lines of a program's metrics file: arbitrary JSON as validated numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import field
from math import isfinite
from typing import Any

from ascendrun.core.dataclass import dataclass

LINE_LIMIT_BYTES = 64 * 1024
EVENTS = ("start", "resume", "checkpoint", "phase", "end")
_MAY_DIVERGE = ("loss", "grad_norm")
_NOT_FINITE = re.compile(r"^[+-]?(nan|inf(inity)?)$", re.IGNORECASE)


@dataclass(frozen=True)
class MetricsLine:
    """One line, as its rank wrote it. None: missing in the line, or not a number.

    `at_s`: UTC by the node's clock. `event`: one of EVENTS, None on the line of a step. `loss` and `grad_norm` may be
    nan or infinite, as written; every other number is finite. Durations are of one step, in seconds;
    `step_s`: total, `data_s`: waiting for input, `comm_s`: waiting for other ranks and their data. `evals`: eval_*
    and, at the end of a program, final_*, by full name; `own`: other numbers of a step, by their names. `seconds`,
    `bytes`, `path`: of a checkpoint; on "resume", `path` is the checkpoint.
    `phase`: name on "phase": a part of the run without steps, like evaluation, which begins (`begins`) or ends.
    `flops_per_step`: of all ranks together; `peak_flops`: of one device.
    """

    at_s: float | None = None
    event: str | None = None
    step: int | None = None
    total_steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    mfu: float | None = None
    step_s: float | None = None
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    comm_s: float | None = None
    memory_bytes: float | None = None
    world_size: int | None = None
    parameters: float | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None
    tokens_per_step: float | None = None
    seconds: float | None = None
    bytes: float | None = None
    path: str | None = None
    phase: str | None = None
    begins: bool = False
    evals: Mapping[str, float] = field(default_factory=dict)
    own: Mapping[str, float] = field(default_factory=dict)

    @property
    def diverged(self) -> bool:
        """Whether the program wrote a loss or a gradient norm that is not finite."""
        return any(value is not None and not isfinite(value) for value in (self.loss, self.grad_norm))


_SCORES = ("eval_", "final_")
_WHOLE = ("step", "total_steps", "world_size")
_OTHERS = ("event", "path", "phase", "begins", "evals", "own")
_NUMBERS = tuple(name for name in MetricsLine.__annotations__ if name not in (*_WHOLE, *_OTHERS))
_NAMES: Mapping[str, tuple[str, ...]] = {
    "at_s": ("timestamp", "at_s"),
    "lr": ("learning_rate", "lr"),
    "memory_bytes": ("device_memory_bytes", "memory_bytes"),
    "seconds": ("duration_s", "seconds"),
    "bytes": ("size_bytes", "bytes"),
    "tokens_per_s": ("tokens_per_s", "train_tokens_per_second"),
    "samples_per_s": ("samples_per_s", "train_samples_per_second"),
}
"""Names of a number in a file, the first found counts: the current name, that of older programs, Hugging Face's. Other
numbers have one name."""
_NAME_OF = {written: name for name in (*_NUMBERS, *_WHOLE) for written in _NAMES.get(name, (name,))}
_EARLIER = {written: names[:at] for names in _NAMES.values() for at, written in enumerate(names) if at}
"""The names that count in place of one, if a line has them."""
ROW_NAMES = frozenset(_NAMES.get(name, (name,))[0] for name in (*_NUMBERS, *_WHOLE))
"""Names of docs/metrics.md. Any other name of a number in a row is the program's own."""
_READ = frozenset((*_NUMBERS, *_WHOLE, "event", "path", "phase", "steps", *_NAME_OF))
_NEVER_NEGATIVE = frozenset(_NUMBERS + _WHOLE) - {"loss", "lr", "epoch"}


def as_row(line: MetricsLine) -> dict[str, Any]:
    """Return the values of a line that are known, under the names of docs/metrics.md."""
    row = {
        name: value
        for name, value in vars(line).items()
        if value is not None and name not in ("begins", "evals", "own")
    }
    return {**line.own, **{_NAMES.get(name, (name,))[0]: value for name, value in row.items()}, **line.evals}


def parse_object(line: bytes, *, most_bytes: int | None = LINE_LIMIT_BYTES) -> dict[str, Any] | None:
    """Return the JSON object of a line; None: incomplete, too long, or not an object. `most_bytes` None: any length."""
    if most_bytes is not None and len(line) > most_bytes:
        return None
    try:
        values = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def parse_line(line: bytes) -> MetricsLine | None:
    """Return the values of a line; None: not readable."""
    values = parse_object(line)
    return None if values is None else read_values(values)


def seconds_left(step: Any, total_steps: Any, step_s: Any) -> float | None:
    """Return the time of the steps that are left at the pace of the latest; None: not known, or none is left."""
    if not all(isinstance(one, (int, float)) for one in (step, total_steps, step_s)) or total_steps <= step:
        return None
    left_s = float((total_steps - step) * step_s)
    return left_s if isfinite(left_s) else None


def read_values(values: Mapping[str, Any]) -> MetricsLine:
    """Return the values of a parsed object. A value of the wrong type counts as missing."""
    found: dict[str, Any] = {}
    evals: dict[str, float] = {}
    own: dict[str, float] = {}
    for written, value in values.items():
        name = _NAME_OF.get(written)
        if name is not None:
            earlier = _EARLIER.get(written)
            if earlier is None or not any(map(values.__contains__, earlier)):
                found[name] = _number(name, value)
        elif written not in _READ:
            number = _number(written, value)
            if number is not None:
                (evals if written.startswith(_SCORES) else own)[written] = number
    for name in _WHOLE:
        number = found.get(name)
        if number is not None:
            found[name] = int(number) if number.is_integer() else None
    found["event"], found["path"] = _event(values)
    if found["event"] == "phase" and isinstance(values.get("phase"), str):
        found["phase"], found["begins"] = values["phase"], values.get("state") == "begin"
    if found.get("total_steps") is None and "steps" in values:  # its name in older programs
        number = _number("total_steps", values["steps"])
        found["total_steps"] = None if number is None else int(number)
    found["evals"] = evals
    if found["event"] is None and found.get("step") is not None:
        found["own"] = own
    return MetricsLine(**found)


def _event(values: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return (event, path), also from the names of older programs: {"checkpoint": PATH} and {"done": true}."""
    name = values.get("event")
    event = name if isinstance(name, str) and name in EVENTS else None
    path = values.get("checkpoint") if event in (None, "resume") else None
    path = values.get("path") if path is None and event is not None else path
    if not isinstance(path, str):
        path = None
    if event is None and "event" not in values:
        event = "checkpoint" if path is not None else "end" if values.get("done") is True else None
    return event, path


def _number(name: str, value: Any) -> float | None:
    if isinstance(value, str) and name in _MAY_DIVERGE and _NOT_FINITE.match(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if not isfinite(number):
        return number if name in _MAY_DIVERGE else None
    return None if number < 0 and name in _NEVER_NEGATIVE else number


PROGRESS_NAMES = (
    "step",
    "total_steps",
    "loss",
    "learning_rate",
    "grad_norm",
    "epoch",
    "samples_per_s",
    "tokens_per_s",
    "step_s",
)
"""Names of the groups of `progress.pattern`."""


def progress_pattern(spec: Mapping[str, Any]) -> str | None:
    """Return the pattern of a stored job specification, None: it has none, the known ones count."""
    section = spec.get("progress")
    pattern = section.get("pattern") if isinstance(section, Mapping) else None
    return pattern if isinstance(pattern, str) else None
