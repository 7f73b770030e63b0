"""Metrics of a training: the time of each phase of a step, the fraction of the device's peak, a trace."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import torch

from ascendrun.programs.devices.accelerator import Accelerator, Stamp
from ascendrun.programs.trainer.data import Share
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.task import Part, Settings
from ascendrun.text import Text, listed

SHOWN_SAMPLES = 8
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
    """Totals since the last line, over all ranks. `sums`: as StepTotals.take has them. `weight`: of the loss.
    `grad_norm`: of the last step; None: that step was skipped."""

    sums: list[float]
    weight: float = 0.0
    grad_norm: float | None = None
    since_s: float = field(default_factory=time.monotonic)

    def per_second(self, count: float) -> float:
        return count / max(time.monotonic() - self.since_s, 1e-9)


@dataclass(frozen=True)
class Problem:
    """A loss or a gradient norm of this rank that is no number."""

    step: int
    rank: int
    is_of_loss: bool
    value: float
    samples: tuple[int, ...]

    def text(self) -> Text:
        what = (
            listed("program.bad-loss", loss=self.value)
            if self.is_of_loss
            else listed("program.bad-norm", norm=self.value)
        )
        shown: list[int | str] = list(self.samples[:SHOWN_SAMPLES])
        return listed(
            "program.bad-on-rank",
            what=what,
            rank=self.rank,
            samples=shown + (["…"] if len(self.samples) > SHOWN_SAMPLES else []),
        )


class StepTotals:
    """What the steps of this rank add up to. Numbers of the device are copied while it works, and read a step later.

    `scales`: of float16, whose search for a scale meets norms that are no numbers.
    """

    def __init__(self, here: Runtime, parts: Sequence[str], *, scales: bool) -> None:
        self.here, self.names, self.scales = here, parts, scales
        self.waiting: list[tuple[Share, float, list[list[float]], Callable[[], list[float]]]] = []
        self.problem: Problem | None = None
        """The first one."""
        self.grad_norm: float | None = None
        self.weight, self.steps = 0.0, 0
        self.sums = [0.0] * (3 + 3 * len(parts))

    @property
    def has_steps(self) -> bool:
        return bool(self.waiting or self.steps)

    def add(
        self, share: Share, passes: Sequence[tuple[torch.Tensor, Mapping[str, Part]]], norm: torch.Tensor, weight: float
    ) -> None:
        """Add a step. `weight`: of all ranks together."""
        device = passes[0][0].device
        numbers = [torch.stack([total for total, _ in passes]).sum().float(), norm.to(device).float()]
        places: list[list[float]] = []
        """Of every part: its samples and weight so far as the host knows them, then where numbers has the rest."""
        for name in self.names:
            mine = [parts[name] for _, parts in passes if name in parts]
            known = sum(float(each) for _, each in mine if not isinstance(each, torch.Tensor))
            losses = [part.float() for part, _ in mine]
            weights = [each.float() for _, each in mine if isinstance(each, torch.Tensor)]
            places.append([share.groups.get(name, 0.0), known, len(losses), len(weights)])
            numbers += losses + weights
        read = self.here.accelerator.start_copy(torch.stack(numbers).detach())
        self.waiting.append((share, weight, places, read))

    def read(self, *, everything: bool = False) -> None:
        """Read the steps before the last one, or all of them, which waits for the device."""
        while len(self.waiting) > (0 if everything else 1):
            share, weight, places, finish = self.waiting.pop(0)
            loss, norm, *rest = finish()
            self._check(share, loss, norm)
            self.steps, self.weight = self.steps + 1, self.weight + weight
            self.grad_norm = norm if math.isfinite(norm) else None
            found = [loss if math.isfinite(loss) else 0.0, float(share.tokens), float(share.samples)]
            for samples, known, losses, weights in places:
                part, more, rest = (
                    rest[: int(losses)],
                    rest[int(losses) :][: int(weights)],
                    rest[int(losses + weights) :],
                )
                found += [sum(part), known + sum(more), samples]
            self.sums = [old + new for old, new in zip(self.sums, found)]

    def _check(self, share: Share, loss: float, norm: float) -> None:
        if self.problem is not None:
            return
        is_of_loss = not math.isfinite(loss)
        if is_of_loss or not (math.isfinite(norm) or self.scales):
            samples = tuple(number for unit in share.units for number in unit)
            self.problem = Problem(share.step, self.here.rank, is_of_loss, loss if is_of_loss else norm, samples)

    def take(self) -> list[float]:
        """Return the sums since the last call: loss, tokens, samples; loss, weight and samples of each part."""
        sums, self.sums = self.sums, [0.0] * len(self.sums)
        return sums


class Reporter:
    """The lines of a training: metrics files of all ranks, and a line on rank 0's output."""

    def __init__(self, here: Runtime, settings: Settings, *, parts: Sequence[str], steps_per_epoch: int) -> None:
        self.here, self.settings, self.parts, self.steps_per_epoch = here, settings, parts, steps_per_epoch
        self.clock = StepClock(here.accelerator)
        self.peak = peak_flops(here.accelerator, settings.peak_tflops)
        self.meter = self.new_meter()

    def new_meter(self) -> Meter:
        return Meter([0.0] * (3 + 3 * len(self.parts)))

    def start(self, step: int, trained: int, tokens: float) -> None:
        """Record the start. `tokens`: of the first step, used as typical number. `trained`: number of weights."""
        self.here.record(
            event="start",
            step=step,
            total_steps=self.settings.steps,
            parameters=trained,
            world_size=self.here.world_size,
            tokens_per_step=tokens,
            flops_per_step=tokens * self.settings.flops_per_token or None,
            peak_flops=self.peak,
            **self.here.announced,
        )
        self.meter = self.new_meter()

    def count(self, sums: Sequence[float], totals: StepTotals) -> None:
        """Count the sums of all ranks, as StepTotals.take has those of one."""
        meter = self.meter
        meter.sums = [old + new for old, new in zip(meter.sums, sums)]
        meter.weight, meter.grad_norm = meter.weight + totals.weight, totals.grad_norm
        totals.weight, totals.steps = 0.0, 0

    def report(self, step: int, rate: float) -> None:
        """Write one metrics line on every rank, and print one line on rank 0."""
        self.here.accelerator.synchronize()
        meter, self.meter = self.meter, self.new_meter()
        times = self.clock.mean()
        steps, epoch = self.settings.steps, step / self.steps_per_epoch
        if not self.here.is_first:
            self.here.record(step=step, **times, device_memory_bytes=self.here.accelerator.memory_bytes())
            return
        total, tokens, samples, *rest = meter.sums
        parts = {name: rest[3 * i : 3 * i + 3] for i, name in enumerate(self.parts)}
        loss = total / meter.weight if meter.weight else None
        tokens_per_s = meter.per_second(tokens)
        used = mfu(tokens_per_s, self.settings.flops_per_token, self.peak, self.here.world_size)
        self.here.record(
            step=step,
            total_steps=steps,
            epoch=round(epoch, 3),
            loss=loss,
            learning_rate=rate,
            grad_norm=meter.grad_norm,
            tokens_per_s=tokens_per_s,
            samples_per_s=meter.per_second(samples),
            device_memory_bytes=self.here.accelerator.memory_bytes(),
            **({} if used is None else {"mfu": used}),
            **times,
            **{f"loss_{name}": part[0] / part[1] for name, part in parts.items() if part[1]},
            **{f"samples_{name}": part[2] for name, part in parts.items()},
        )
        line = listed(
            "program.progress",
            step=step,
            steps=steps,
            epoch=epoch,
            loss="-" if loss is None else f"{loss:.4f}",
            rate=rate,
            speed=tokens_per_s,
        )
        print(f"{line}{mfu_words(used)}", flush=True)

    def evaluation(self, step: int, scores: Mapping[str, float], seconds: float, *, is_best: bool) -> None:
        """Record and print an evaluation, which took `seconds`."""
        self.here.record(
            step=step, eval_duration_s=seconds, **{f"eval_{name}": value for name, value in scores.items()}
        )
        self.here.log(
            listed(
                "program.evaluation",
                step=step,
                steps=self.settings.steps,
                scores=" ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items()),
                note=listed("program.best-so-far") if is_best else "",
            )
        )

    def exclude(self, seconds: float) -> None:
        """Do not count the last `seconds` as training."""
        self.meter.since_s += seconds


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
    return f" MFU {share:.1%}" + (str(listed("program.mfu-impossible")) if share > 1 else "")


SKIPPED_STEPS = 3
"""The first steps open connections and compile; they are not representative."""


@contextlib.contextmanager
def open_profiler(folder: str, here: Runtime, *, steps: int) -> Iterator[Callable[[], None]]:
    """Write a trace of a few steps by torch's or torch_npu's profiler, for TensorBoard and MindStudio, of every rank.
    Yields what is called after each step. Empty `folder`: no trace."""
    if not folder:
        yield lambda: None
        return
    module: Any = torch.profiler
    if here.family == "npu":
        import torch_npu

        module = torch_npu.profiler
    path = Path(folder) / f"rank-{here.rank:05d}"
    path.mkdir(parents=True, exist_ok=True)
    schedule = module.schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=steps, repeat=1)
    with module.profile(
        schedule=schedule,
        on_trace_ready=module.tensorboard_trace_handler(str(path)),
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        here.log(listed("program.profile", first=SKIPPED_STEPS + 1, last=SKIPPED_STEPS + steps, directory=folder))
        yield profiler.step
