"""Which layout of a training fits, and which change of its options helps if none does: each is tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ascendrun.planner import cost
from ascendrun.planner.cost import Choice, Devices, Option
from ascendrun.planner.models import Workload
from ascendrun.planner.rules import compute_bytes, scales
from ascendrun.planner.training import AUTO, PlanProblem, Training, judge, rules_of
from ascendrun.text import Text, listed

Change = Mapping[str, Any]
MOST_RANKS = 4096
SHORTEST = 64
"""Tokens: no shorter cutoff_len is proposed."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro_batch_size that was tried. `option`: its fastest layout; `passes`: of a step of one rank. `time`: of a
    sample, as a fraction of that with the smallest size; None: times are not known. `fits`: even if the estimate is
    too low."""

    size: int
    passes: int
    option: Option
    time: float | None
    fits: bool

    @property
    def rank(self) -> tuple[bool, float, int, int]:
        """The least is chosen: the fastest that fits, of equally fast ones that with the fewest passes."""
        return not self.fits, self.time or 1.0, self.passes, self.size


def settle(training: Training) -> tuple[Training, tuple[MicroBatch, ...]]:
    """Return the training with the micro_batch_size that `auto` chooses, and what was tried, the chosen one first; ():
    it is a number, or unknown, and 1 then. The same training on the same devices has the same choice: no recorded run
    changes it."""
    if training.options.get("micro_batch_size") != AUTO:
        return training, ()
    program, devices = rules_of(training.program), devices_of(training)
    fixed = {name: training.options[name] for name in ("global_batch_size",) if name in training.options}
    tried: list[MicroBatch] = []
    size, most = 1, 1
    while size <= most and devices.memory_bytes is not None:
        changed = _with(training, {**fixed, "micro_batch_size": size}, devices.ranks)
        work = program.workload(changed)
        if work is None or not work.is_exact:
            break
        most = work.micro_batches if size == 1 else most
        choice = make_choice(changed, work, devices)
        if choice.options and not any(each.is_fatal for each in judge(changed, program.RULES)):
            option = choice.chosen or choice.options[0]
            slowest = tried[0].option.step_s if tried else option.step_s
            time = option.step_s.high / slowest.high if option.step_s and slowest else None
            fits = choice.chosen is not None and option.memory.range.high <= devices.memory_bytes
            tried.append(MicroBatch(size, work.micro_batches, option, time, fits))
        size = most if size < most < 2 * size else 2 * size
    tried.sort(key=lambda each: each.rank)
    return _with(training, {**fixed, "micro_batch_size": tried[0].size if tried else 1}, devices.ranks), tuple(tried)


def devices_of(training: Training) -> Devices:
    """Return the devices of a training."""
    return Devices(
        training.family,
        training.ranks,
        training.ranks_per_host,
        None if training.chip is None else training.chip.peak_flops,
        None if training.family == "cpu" else training.memory_bytes,
        compute_bytes(training),
        host_bytes=training.host_bytes,
    )


def has_choice(training: Training) -> bool:
    """Return whether the strategy is chosen: it is `auto`, or there is no other rank to shard the model with."""
    requested = str(training.options.get("strategy", "ddp"))
    return requested == "auto" or (requested in cost.SHARDED and training.ranks == 1)


def make_choice(training: Training, work: Workload, devices: Devices) -> Choice:
    options = training.options
    requested = str(options.get("strategy", "ddp"))
    has_zero3 = training.has_deepspeed and options.get("compile", "none") == "none" and not work.has_muon
    usable = cost.strategies_for(devices, scales=scales(training), has_deepspeed=has_zero3)
    usable = ("ddp",) if options.get("auto_find_batch_size") else usable
    strategies = usable if has_choice(training) else (requested,)
    found = cost.layouts(
        strategies,
        recompute=options.get("gradient_checkpointing", False),
        offload=bool(options.get("cpu_offload", False)),
    )
    return cost.compare(work, devices, found, shard_size=int(options.get("shard_size") or 0))


def memory_problems(training: Training, work: Workload, choice: Choice, devices: Devices) -> Iterator[PlanProblem]:
    """Report that no layout fits, or that the chosen one may not."""
    limit, chosen = devices.memory_bytes, choice.chosen
    if choice.options and chosen is None:
        yield _does_not_fit(choice.options, devices, remedy(training, work, devices))
    elif chosen is not None and limit is not None and chosen.memory.range.high > limit:
        need, values = chosen.memory.range, {"layout": chosen.layout.text(), "limit": limit}
        hint = remedy(training, work, devices, surely=True)
        yield PlanProblem.of(
            "may-not-fit", "strategy", is_fatal=False, hint=hint, low=need.low, high=need.high, **values
        )


def _does_not_fit(options: Sequence[Option], devices: Devices, hint: Text) -> PlanProblem:
    """Report the layout that lacks least: of the devices, if the memory of the hosts suffices for any."""
    host_bytes = devices.host_bytes

    def on_host(option: Option) -> int:
        return cost.of_host(option.memory, devices)

    on_device = [option for option in options if host_bytes is None or on_host(option) <= host_bytes]
    least = min(on_device, key=lambda option: option.memory.total) if on_device else min(options, key=on_host)
    need, limit = (least.memory.total, devices.memory_bytes) if on_device else (on_host(least), host_bytes)
    code = "does-not-fit" if on_device else "host-too-small"
    return PlanProblem.of(code, "strategy", hint=hint, layout=least.layout.text(), need=need, limit=limit)


def remedy(training: Training, work: Workload, devices: Devices, *, surely: bool = False) -> Text:
    """Return what makes the training fit: one change of several, changes together, or more devices. `surely`: also if
    the estimate is too low."""

    def helps(change: Change, ranks: int = devices.ranks) -> bool:
        return _fits(_with(training, change, ranks), work, replace(devices, ranks=ranks), surely=surely)

    steps = [found for found in map(list, _changes(training)) if found]
    alone = [next((change for change in each if helps(change)), None) for each in steps]
    if any(alone):
        return listed("plan.change-one", changes=[_written(change) for change in alone if change])
    together: dict[str, Any] = {}
    for each in steps:
        together.update(each[-1])
        if helps(together):
            return listed("plan.change-all", changes=_written(together))
    ranks = devices.ranks * 2
    while ranks <= MOST_RANKS:
        if helps({"strategy": "auto"} if "strategy" in training.options else {}, ranks):
            return listed("plan.more-devices", ranks=ranks)
        ranks *= 2
    return listed("plan.fits-nowhere")


def _changes(training: Training) -> Iterator[Iterator[Change]]:
    """Yield the changes that need less memory, none of which the training has already: of each kind the mildest
    first."""
    options = training.options
    micro, cutoff = int(options.get("micro_batch_size") or 2), int(options.get("cutoff_len") or 0)
    if "micro_batch_size" in options:
        yield ({"micro_batch_size": size} for size in _halves(micro, 1))
    if options.get("gradient_checkpointing", True) is not True:
        yield iter([{"gradient_checkpointing": True}])
    if options.get("strategy", "auto") not in ("auto", *cost.SHARDED):
        yield iter([{"strategy": "fsdp2"}])
    if not options.get("cpu_offload", True):
        yield iter([{"cpu_offload": True}])
    if cutoff:
        yield ({"cutoff_len": length} for length in _halves(cutoff, SHORTEST))


def _halves(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value


def _with(training: Training, change: Change, ranks: int) -> Training:
    options = {**training.options, **change}
    return replace(training, options=options, ranks=ranks, given=training.given | set(change))


def _fits(training: Training, work: Workload, devices: Devices, *, surely: bool) -> bool:
    changed = rules_of(training.program).workload(training)
    choice = make_choice(training, work if changed is None else changed, devices)
    if choice.chosen is None:
        return False
    limit = devices.memory_bytes
    return not surely or limit is None or choice.chosen.memory.range.high <= limit


def _written(change: Change) -> str:
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in change.items())
