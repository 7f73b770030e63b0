"""The plan of one training: problems, strategy, memory, time and disk; and its text, one for all commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ascendrun.planner import cost
from ascendrun.planner.cost import PARTS, Choice, Devices, Range
from ascendrun.planner.fitting import MicroBatch, make_choice, memory_problems
from ascendrun.planner.models import Workload
from ascendrun.planner.rules import checkpoint_problems
from ascendrun.planner.training import PlanProblem, Training, judge, rules_of
from ascendrun.text import Text, listed


@dataclass(frozen=True)
class Disk:
    """Directory for checkpoints of a host. `free_bytes` None: unknown. `error`: why it cannot be written."""

    path: str
    free_bytes: int | None = None
    error: Text | str | None = None


@dataclass(frozen=True)
class Cost:
    """Cost of the whole training; None: unknown. `kept_bytes`: of the checkpoints that are kept at the same time."""

    step_s: Range | None
    tokens_per_s: Range | None
    seconds: Range | None
    device_hours: Range | None
    checkpoints: int | None
    checkpoint_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class TrainingPlan:
    """The plan of one stage. `work`, `choice`, `cost` None: no training, or unknown; `unknown` has the reasons.

    `speed_source`: a code of SOURCES. `ranks` 0: the stage has no program with rules.
    """

    stage: str | None
    program: str | None
    hosts: tuple[str, ...]
    ranks: int
    problems: tuple[PlanProblem, ...] = ()
    unknown: tuple[Text, ...] = ()
    work: Workload | None = None
    choice: Choice | None = None
    cost: Cost | None = None
    speed_source: str = "unknown"
    memory_bytes: int | None = None
    links: tuple[float, float] | None = None
    """Bytes per second and rank inside a host and between hosts, where they are assumed and are part of the times."""
    tried: tuple[MicroBatch, ...] = ()
    """Of `micro_batch_size: auto`, the chosen one first."""

    @property
    def fatal(self) -> tuple[PlanProblem, ...]:
        return tuple(problem for problem in self.problems if problem.is_fatal)


SOURCES = {
    "recorded": listed("plan.source-recorded"),
    "assumed": listed("plan.source-assumed"),
    "unknown": listed("plan.source-unknown"),
}


def make_plan(
    training: Training,
    devices: Devices,
    *,
    work: Workload | None,
    stage: str | None = None,
    disks: Mapping[str, Disk] = {},
    unknown: Sequence[Text] = (),
) -> TrainingPlan:
    """Make the plan. `work`: of the program, None: unknown, or no training."""
    program = rules_of(training.program)
    is_training = training.mode in program.TRAINS
    problems = judge(training, (*program.RULES, *([checkpoint_problems] if is_training else [])))
    place = (stage, training.program, training.hosts, training.ranks)
    plan = TrainingPlan(*place, problems, tuple(unknown), memory_bytes=devices.memory_bytes)
    if not is_training:
        return plan
    if work is None:
        reason = listed("plan.model-unknown")
        return replace(plan, unknown=(*plan.unknown, reason))
    choice = make_choice(training, work, devices)
    costs = make_cost(training, work, choice, devices)
    more = (*memory_problems(training, work, choice, devices), *_disk_problems(costs, disks))
    unknowns = [*plan.unknown]
    if devices.memory_bytes is None and training.family != "cpu":
        unknowns.append(listed("plan.memory-unknown"))
    if work.steps is None:
        unknowns.append(listed("plan.steps-unknown"))
    if costs.step_s is None:
        unknowns.append(listed("plan.time-unknown", program=training.program))
    source = "recorded" if devices.recorded is not None else "unknown" if devices.speed is None else "assumed"
    return replace(
        plan,
        problems=tuple(sorted((*problems, *more), key=lambda problem: not problem.is_fatal)),
        unknown=tuple(unknowns),
        work=work,
        choice=choice,
        cost=costs,
        speed_source=source,
        links=devices.links if costs.step_s is not None and _uses_assumed_links(choice, devices) else None,
    )


def _uses_assumed_links(choice: Choice, devices: Devices) -> bool:
    """Return whether the times have the bandwidths of a table: recorded runs of the same strategy had the exchange."""
    is_replicated = all(option.layout.strategy not in cost.SHARDED for option in choice.options)
    is_recorded = devices.recorded is not None and is_replicated
    return devices.ranks > 1 and not is_recorded and not devices.are_links_measured


def choose_micro_batch(plan: TrainingPlan, tried: Sequence[MicroBatch], *, is_final: bool) -> TrainingPlan:
    """Return the plan of a training whose micro_batch_size is `auto`. `is_final`: nothing more will be known."""
    if tried or plan.fatal:
        return replace(plan, tried=tuple(tried))
    if is_final:
        return replace(plan, problems=(PlanProblem.of("micro-auto", "micro_batch_size"), *plan.problems))
    return replace(plan, unknown=(*plan.unknown, listed("plan.micro-unknown")))


def make_cost(training: Training, work: Workload, choice: Choice, devices: Devices) -> Cost:
    options = training.options
    option = choice.chosen or (choice.options[0] if choice.options else None)
    step = option.step_s if option is not None else None
    seconds = step.times(work.steps) if step is not None and work.steps is not None else None
    every = int(options.get("save_steps") or 0)
    count = None if work.steps is None else 1 + ((work.steps - 1) // every if every else 0)
    kept = int(options.get("save_total_limit") or 0) + 1
    return Cost(
        step,
        None if step is None else step.over(work.tokens_per_step),
        seconds,
        None if seconds is None else seconds.times(devices.ranks / 3600),
        count,
        work.checkpoint_bytes,
        (kept if count is None else min(kept, count)) * work.checkpoint_bytes + work.weight_bytes_saved,
    )


def _disk_problems(costs: Cost, disks: Mapping[str, Disk]) -> Iterator[PlanProblem]:
    for host, disk in disks.items():
        if disk.error is not None:
            yield PlanProblem.of("not-writable", None, (host,), path=disk.path, reason=disk.error)
        elif disk.free_bytes is not None and disk.free_bytes < costs.kept_bytes:
            is_fatal, free, need = disk.free_bytes < costs.checkpoint_bytes, disk.free_bytes, costs.kept_bytes
            yield PlanProblem.of("disk-full", None, (host,), is_fatal=is_fatal, path=disk.path, free=free, need=need)


# --- text ---


def render(plan: TrainingPlan) -> list[Text]:
    """Return the lines of a plan: warnings, the estimate, what is not known. A plan with an error has no estimate, but
    the memory of layouts that do not fit, and ends with its errors."""
    warnings = [problem for problem in plan.problems if not problem.is_fatal]
    lines = [line for problem in warnings for line in render_problem(problem)]
    if plan.work is not None and plan.choice is not None and plan.cost is not None:
        if not plan.fatal:
            lines += _render_estimate(plan, plan.work, plan.choice, plan.cost)
        elif plan.choice.chosen is None:
            lines += render_choice(plan.choice, plan.memory_bytes)
    lines += [listed("plan.unknown", what=what) for what in plan.unknown]
    if not plan.problems and plan.ranks:
        lines.insert(0, listed("plan.valid", hosts=plan.hosts))
    if not plan.ranks:
        lines.append(listed("plan.no-rules"))
    return [*lines, *(line for problem in plan.fatal for line in render_problem(problem))]


def render_problem(problem: PlanProblem) -> list[Text]:
    """Return the message with its severity and hosts, and the hint."""
    what = problem.message
    if problem.hosts:
        what = listed("plan.on-hosts", hosts=problem.hosts, message=what)
    line = listed("plan.error", message=what) if problem.is_fatal else listed("plan.warning", message=what)
    return [line, *([listed("plan.hint", hint=problem.hint)] if problem.hint else [])]


def _render_estimate(plan: TrainingPlan, work: Workload, choice: Choice, costs: Cost) -> list[Text]:
    millions = {"weights": work.weights / 1e6, "trained": work.trained / 1e6}
    of_step = {"samples": work.samples_per_step, "tokens": work.tokens_per_step}
    lines = [
        listed("plan.model", **millions),
        listed("plan.steps", steps=work.steps, **of_step),
        *_render_tried(plan.tried),
        *render_choice(choice, plan.memory_bytes),
    ]
    if costs.tokens_per_s is not None:
        speed = {"source": SOURCES[plan.speed_source], **vars(costs.tokens_per_s)}
        lines.append(listed("plan.speed", **speed))
    if plan.links is not None:
        lines.append(listed("plan.links", in_host=plan.links[0] / 1e9, between=plan.links[1] / 1e9))
    if costs.seconds is not None and costs.device_hours is not None:
        lines.append(
            listed(
                "plan.time", **vars(costs.seconds), low_hours=costs.device_hours.low, high_hours=costs.device_hours.high
            )
        )
    on_disk = {"count": costs.checkpoints, "each": costs.checkpoint_bytes, "kept": costs.kept_bytes}
    message = listed("plan.disk", **on_disk)
    return [*lines, message]


def _render_tried(tried: Sequence[MicroBatch]) -> Iterator[Text]:
    """Return the chosen micro-batch with its reason, and the table of all."""
    if not tried:
        return
    chosen = tried[0]
    reason = listed("plan.micro-fastest")
    if any(each.time == chosen.time and each.fits for each in tried[1:]):
        reason = listed("plan.micro-passes")
    yield listed("plan.micro", size=chosen.size, reason=reason if chosen.fits else listed("plan.micro-least"))
    for each in sorted(tried, key=lambda each: each.size):
        memory, layout = each.option.memory, each.option.layout.text()
        time = "" if each.time is None else listed("plan.micro-time", time=each.time)
        over = "" if each.fits else listed("plan.micro-over")
        low, high = memory.range.low, memory.range.high
        yield listed("plan.micro-row", size=each.size, layout=layout, low=low, high=high, time=time, over=over)


def render_choice(choice: Choice, limit: int | None) -> list[Text]:
    """Return the chosen layout with its reason, and the memory of all. `limit`: bytes of a device, None: unknown."""
    lines = []
    if choice.chosen is not None:
        layout = choice.chosen.layout.text()
        lines.append(listed("plan.strategy", layout=layout, reason=_reason(choice)))
    lines.append(listed("plan.memory"))
    of_limit: Text | str = listed("plan.of-limit", limit=limit) if limit else ""
    for option in choice.options:
        memory, time = option.memory, option.step_s
        host = listed("program.memory-host", host=memory.host)
        parts = [listed("plan.part", part=PARTS[name], size=size) for name, size in memory.parts.items() if size]
        lines.append(
            listed(
                "plan.option",
                layout=option.layout.text(),
                total=memory.total,
                limit=of_limit,
                host=host if memory.host else "",
                parts=parts,
                time=listed("plan.option-time", **vars(time)) if time else "",
            )
        )
    return lines


def _reason(choice: Choice) -> Text:
    if len({option.layout.strategy for option in choice.options}) == 1:
        return listed("plan.only-one")
    if choice.chosen is not None and choice.chosen.step_s is None:
        return listed("plan.first-fits")
    return listed("plan.cheapest")
