"""Metrics of a training: the time of each phase of a step, the fraction of the device's peak."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ascendrun.programs.trainer.devices.accelerator import Accelerator, Stamp
from ascendrun.text import Text

PHASES = ("data_s", "forward_s", "backward_s", "optimizer_s", "comm_s")


class StepClock:
    """Seconds of each phase of a step, from the device's work queue if it has one (no synchronization in between).

    data_s       waiting for the loader and copying to the device
    forward_s    forward passes; under FSDP2 and ZeRO-3 with the weight gathering that does not overlap with compute
    backward_s   backward passes, until this rank's own gradients are ready
    comm_s       from then until the sums over all ranks are ready: transfers without overlap, and waiting for slower
                 ranks. DDP marks its last bucket; for sharded models it covers only the exchange of the loss at the
                 end of the step. A rank that is slow itself has a long backward_s and a short comm_s
    optimizer_s  clipping and the step
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.marks: list[tuple[str, Stamp]] = []
        self.steps: list[tuple[float, list[tuple[str, Stamp]]]] = []

    def begin(self) -> None:
        self.marks = [("", self.accelerator.stamp())]

    def mark(self, phase: str, stamp: Stamp | None = None) -> None:
        """Attribute the time since the last mark to `phase`, until now or until `stamp`, an earlier time."""
        self.marks.append((phase, stamp or self.accelerator.stamp()))

    def end(self) -> None:
        self.steps.append((time.perf_counter() - self.marks[0][1].host_s, self.marks))
        self.marks = []

    def mean(self) -> dict[str, float]:
        """Return mean seconds by phase, and step_s, since the last call. The device must be synchronized."""
        steps, self.steps = self.steps, []
        seconds = dict.fromkeys(("step_s", *PHASES), 0.0)
        for whole_s, marks in steps:
            seconds["step_s"] += whole_s
            for (_, before), (phase, after) in zip(marks, marks[1:]):
                seconds[phase] += max(0.0, before.seconds_until(after))
        return {name: round(value / max(1, len(steps)), 6) for name, value in seconds.items()}


@dataclass
class Meter:
    """Totals since the last line, over all ranks. `parts`: summed loss, weight and samples by name. `grad_norm`:
    of the last step; None: that step was skipped."""

    loss: float = 0.0
    weight: float = 0.0
    tokens: float = 0.0
    samples: float = 0.0
    steps: int = 0
    grad_norm: float | None = None
    parts: dict[str, list[float]] = field(default_factory=dict)
    since_s: float = field(default_factory=time.monotonic)

    def per_second(self, count: float) -> float:
        return count / max(time.monotonic() - self.since_s, 1e-9)


def flops_per_token(
    *, parameters: int, trainable: int, layers: int, hidden: int, mean_length: float, embedding: int = 0
) -> float:
    """Return FLOPs of forward and backward, without recomputation: the work that counts for MFU.

    2 per weight forward, 2 for the gradient of the activations, 2 for that of the weight if it is trained;
    attention adds 12 x layers x hidden x length, halved because causal attention covers half of it on average.
    `embedding`: number of weights that are only indexed, so without arithmetic.
    """
    dense = parameters - embedding
    return 4.0 * dense + 2.0 * max(0, trainable - embedding) + 6.0 * layers * hidden * mean_length


def peak_flops(accelerator: Accelerator, override_tflops: float = 0.0) -> float | None:
    """Return the peak of one device: the override, else the chip table; None: unknown, so no MFU is reported."""
    if override_tflops:
        return override_tflops * 1e12
    chip = accelerator.chip
    return None if chip is None or chip.peak_tflops is None else chip.peak_tflops * 1e12


def mfu(tokens_per_s: float, flops_a_token: float, peak: float | None, world_size: int) -> float | None:
    """Return the fraction of the peak of all devices together; None: peak or work unknown."""
    if not peak or not flops_a_token:
        return None
    return tokens_per_s * flops_a_token / (peak * world_size)


def mfu_words(share: float | None) -> str:
    """Format the MFU for the line of a step; empty: unknown."""
    if share is None:
        return ""
    return f" MFU {share:.1%}" + (
        str(Text("program.mfu-impossible", ", impossible: check --peak_tflops and the clock")) if share > 1 else ""
    )
