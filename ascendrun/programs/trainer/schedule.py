"""Rates of a training as functions of the step, counted from 0, so that a run may be resumed and prolonged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Callable, Union

Schedule = Callable[[int], float]
Value = Union[float, Schedule]
"""A number, or a function of the step."""


def value_at(value: Value, step: int) -> float:
    return value(step) if callable(value) else value


def scaled(peak: float, shape: Schedule) -> Schedule:
    """Return `peak` times a shape, most of which have a maximum of 1."""
    return lambda step: peak * shape(step)


def warmed(warmup: int, rest: Schedule) -> Schedule:
    """Rise linearly to 1 over the first `warmup` steps; then `rest`."""
    return lambda step: (step + 1) / warmup if step < warmup else rest(step)


def falling(steps: int, warmup: int, floor: float, fall: Schedule) -> Schedule:
    """Warm up, then fall from 1 to `floor` as `fall` does from 1 to 0 while its argument goes from 0 to 1. A step
    beyond `steps`, of a training that was prolonged, stays at the floor."""

    def rest(step: int) -> float:
        return floor + (1 - floor) * fall(min(1.0, (step - warmup) / max(1, steps - warmup)))  # type: ignore[arg-type]

    return warmed(warmup, rest)


def constant(*, warmup: int = 0) -> Schedule:
    return warmed(warmup, lambda step: 1.0)


def linear(steps: int, *, warmup: int = 0, floor: float = 0.0) -> Schedule:
    return falling(steps, warmup, floor, lambda way: 1 - way)


def cosine(steps: int, *, warmup: int = 0, floor: float = 0.0) -> Schedule:
    return falling(steps, warmup, floor, lambda way: 0.5 * (1 + math.cos(math.pi * way)))


def trapezoid(steps: int, *, warmup: int = 0, warmdown: float = 0.2, floor: float = 0.0) -> Schedule:
    """Warm up, stay at 1, and fall linearly to `floor` over the last part: `warmdown`, a fraction of `steps`."""
    down = round(warmdown * steps)

    def rest(step: int) -> float:
        left = max(0, steps - step) / max(1, down)
        return 1.0 if left >= 1 else left + (1 - left) * floor

    return warmed(warmup, rest)


def ramp(first: float, last: float, steps: int) -> Schedule:
    """Change linearly from `first` to `last` over `steps` steps, then stay: a momentum, or a weight decay."""
    return lambda step: first + (last - first) * min(1.0, step / max(1, steps))


def onecycle(steps: int, *, rise: float = 0.3) -> Schedule:
    """Rise from 1 / 25 to 1 over the fraction `rise` of the steps, then fall to 1 / 250,000, both as a cosine: torch's
    OneCycleLR with its usual factors, as fractions of its max_lr."""
    top, end = rise * steps - 1, steps - 1
    first = 1 / 25
    last = first / 1e4

    def between(start: float, stop: float, way: float) -> float:
        return stop + (start - stop) / 2 * (1 + math.cos(math.pi * way))

    def at(step: int) -> float:
        if step <= top:
            return between(first, 1.0, step / top if top else 1.0)
        return between(1.0, last, min(1.0, (step - top) / (end - top)) if end > top else 1.0)

    return at


SHAPES: Mapping[str, Callable[..., Schedule]] = {
    "cosine": cosine,
    "linear": linear,
    "constant": lambda steps, *, warmup, floor: constant(warmup=warmup),
}


def of_options(options: Mapping[str, Any], steps: int, *, warmup: int, floor: float = 0.0) -> Schedule:
    """Return the learning rate that a program's options ask for: `learning_rate` and, if there, `lr_scheduler_type`."""
    shape = SHAPES[options.get("lr_scheduler_type", "cosine")]
    return scaled(options["learning_rate"], shape(steps, warmup=warmup, floor=floor))


def warmup_of(options: Mapping[str, Any], steps: int) -> int:
    """Return the warm-up steps of a training: `warmup_steps`, or the fraction `warmup_ratio` if that is None."""
    given = options["warmup_steps"]
    return min(steps, round(steps * options["warmup_ratio"]) if given is None else int(given))
