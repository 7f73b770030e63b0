"""The report of one job as plain data, the source of the page, the image and the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from statistics import median
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.jobs.lifecycle import state_changes
from ascendrun.core.jobs.reasons import Detail
from ascendrun.core.jobs.restart import Failure
from ascendrun.core.metrics import MetricsLine
from ascendrun.core.samples import DeviceSample, HostSample
from ascendrun.health.diagnosis.result import Diagnosis
from ascendrun.health.report.charts import DURATIONS, Chart, is_step, make_charts
from ascendrun.health.report.cost import Cost, count_cost, count_devices
from ascendrun.health.report.time_use import Accounting, AttemptSteps, Stay, account, find_stays
from ascendrun.text import Text

MOST_SPANS = 600
"""The most spans of the timeline; of more, the shortest are dropped."""


@dataclass(frozen=True)
class Material:
    """The input of a report. `lines`: by attempt the metrics of rank 0, with times of the head node.

    `devices` and `hosts`: samples in order of time, only of the job's devices. `every`: by attempt, every n-th step
    line was read (1: all). `placements`: by attempt its hosts, for those that the record of the job no longer has.
    """

    job: Job
    spec: Mapping[str, Any]
    file: str | None
    events: Sequence[Event]
    lines: Mapping[int, Sequence[MetricsLine]]
    devices: Sequence[DeviceSample]
    hosts: Sequence[HostSample]
    every: Mapping[int, int] = field(default_factory=dict)
    placements: Mapping[int, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class TimeUse:
    """One use of time. `use`: one of time_use.USES. `ratio`: of the wall time, 0 to 1."""

    use: str
    seconds: float
    ratio: float


@dataclass(frozen=True)
class UseSpan:
    """One use of a span of the job's time. Times are UTC seconds."""

    started_at_s: float
    ended_at_s: float
    use: str
    attempt: int


@dataclass(frozen=True)
class AttemptRow:
    """One attempt. `resumed`: the step it resumed from. `kept_s`: its training whose result was kept. `ran_s`: from the
    start of its ranks to their end. `lost_steps`: its steps that were repeated or never kept, None: unknown.
    `failure`: None: it did not fail, or was not diagnosed."""

    attempt: int
    started_at_s: float
    ended_at_s: float | None
    first_step: int | None
    last_step: int | None
    resumed: int | None
    kept_s: float
    reason: Detail
    hosts: tuple[str, ...] = ()
    ran_s: float = 0.0
    lost_steps: int | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class DeviceRow:
    """One device of the job: means, but maxima of temperature and memory."""

    host: str
    device: int
    name: str | None
    utilisation: float | None
    power_w: float | None
    temperature_c: float | None
    memory_used_bytes: float | None


@dataclass(frozen=True)
class JobMetrics:
    """Metrics of the job, as medians over the lines of its first rank. None: not reported."""

    steps: int | None
    total_steps: int | None
    loss: float | None
    step_s: float | None
    tokens_per_s: float | None
    samples_per_s: float | None
    mfu: float | None
    evals: Mapping[str, float]


@dataclass(frozen=True)
class StageRow:
    """One stage of a pipeline: the newest job of its name. `ran_s`: of all its attempts. `tokens_per_s` and `mfu`:
    medians of its steps. `scores`: its final ones, else those of its last evaluation."""

    stage: str
    job: str
    state: str
    ran_s: float
    device_hours: float | None
    steps: int | None
    tokens_per_s: float | None
    mfu: float | None
    loss: float | None
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Caveat:
    """A limitation of the numbers: a code and its values."""

    code: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fewer:
    """A run of the same training on fewer ranks. `ratio`: tokens/s and rank of this job, divided by those of that."""

    job: str
    ranks: int
    ratio: float


@dataclass(frozen=True)
class Report:
    """The report. `time` sums to `wall_s` to the millisecond. `effective_ratio`: training ratio, None: unknown.

    `diagnosis`: why the job failed, None: it did not fail. `planned`: lowest and highest value by the name in
    `measured`. `fewer` None: no run to compare with. `stages`: of the pipeline that was asked for, else ().
    """

    made_at_s: float
    id: str
    name: str
    state: str
    reason: Detail
    is_terminal: bool
    file: str | None
    hosts: tuple[str, ...]
    world_size: int
    created_at_s: float
    ended_at_s: float | None
    wall_s: float
    effective_ratio: float | None
    time: tuple[TimeUse, ...]
    timeline: tuple[UseSpan, ...]
    cost: Cost
    metrics: JobMetrics
    attempts: tuple[AttemptRow, ...]
    devices: tuple[DeviceRow, ...]
    events: tuple[Event, ...]
    charts: tuple[Chart, ...]
    caveats: tuple[Caveat, ...]
    diagnosis: Diagnosis | None = None
    planned: Mapping[str, Sequence[float]] = field(default_factory=dict)
    fewer: Fewer | None = None
    stages: tuple[StageRow, ...] = ()

    @property
    def measured(self) -> dict[str, float | None]:
        """What a plan is compared with: memory of the fullest device, tokens/s, hours of training."""
        memory = [device.memory_used_bytes for device in self.devices if device.memory_used_bytes is not None]
        hours = sum(use.seconds for use in self.time if use.use == "training") / 3600
        tokens_per_s = self.metrics.tokens_per_s
        return {"memory_bytes": max(memory, default=None), "tokens_per_s": tokens_per_s, "hours": hours or None}


def make_report(material: Material, *, now_s: float) -> Report:
    """Return the report; of a live job up to now."""
    job = material.job
    until_s = job.ended_at_s if job.ended_at_s is not None else now_s
    stays = find_stays(state_changes(material.events), created_s=job.created_at_s, until_s=until_s)
    lines = {
        number: [_completed(one, material.lines[number]) for one in material.lines[number]]
        for number in sorted(material.lines)
    }
    attempts = {number: _attempt_steps(found) for number, found in lines.items() if found}
    time = account(stays, attempts)
    span = (stays[0].start_ms / 1000, max(stay.end_ms for stay in stays) / 1000) if stays else None
    family = str(material.spec.get("devices", {}).get("type") or "auto")
    family = material.devices[0].device_type if material.devices else "cpu" if family == "auto" else family
    cost = count_cost(
        stays, devices=count_devices(material.spec, job, job.attempt), device_type=family, samples=material.devices
    )
    same = ("id", "name", "reason", "is_terminal", "hosts", "world_size", "created_at_s", "ended_at_s")
    return Report(
        **{name: getattr(job, name) for name in same},
        made_at_s=now_s,
        state=job.state.value,
        file=material.file,
        wall_s=time.wall_ms / 1000,
        effective_ratio=time.effective,
        time=tuple(
            TimeUse(use, ms / 1000, ms / time.wall_ms if time.wall_ms else 0.0) for use, ms in time.spent_ms.items()
        ),
        timeline=_timeline(time),
        cost=cost,
        metrics=_job_metrics([one for found in lines.values() for one in found]),
        attempts=_attempt_rows(material, stays, attempts, time),
        devices=_device_rows(material.devices),
        events=tuple(material.events),
        charts=make_charts(lines, material.devices, material.hosts, span),
        caveats=tuple(_caveats(material, time, cost, lines)),
    )


def stage_row(stage: str, report: Report) -> StageRow:
    metrics = report.metrics
    finals = {name: value for name, value in metrics.evals.items() if name.startswith("final_")}
    scores = {name.partition("_")[2]: value for name, value in (finals or metrics.evals).items()}
    return StageRow(
        stage=stage,
        job=report.id,
        state=report.state,
        ran_s=sum(row.ran_s for row in report.attempts),
        device_hours=report.cost.device_hours,
        **{name: getattr(metrics, name) for name in ("steps", "tokens_per_s", "mfu", "loss")},
        scores=scores,
    )


def of_pipeline(report: Report, by_stage: Mapping[str, Report]) -> Report:
    """Return the report of a stage with the time and cost of all of them. A stage waits in the queue while another
    runs: queue is the time in which none did."""
    stages = list(by_stage.values())
    uses = [use for each in stages for use in each.time]
    spent = {use.use: sum(one.seconds for one in uses if one.use == use.use) for use in report.time}
    began_s = min(each.created_at_s for each in stages)
    worked_s = sum(spent.values()) - spent.get("queue", 0.0)
    spent["queue"] = max(0.0, max(each.created_at_s + each.wall_s for each in stages) - began_s - worked_s)
    wall_s = worked_s + spent["queue"]
    sums: dict[str, Any] = {}
    for name in ("held_s", "device_hours", "energy_kwh"):
        values = [getattr(each.cost, name) for each in stages]
        sums[name] = None if None in values else sum(values)
    return replace(
        report,
        stages=tuple(stage_row(name, each) for name, each in by_stage.items()),
        created_at_s=began_s,
        wall_s=wall_s,
        effective_ratio=None if report.effective_ratio is None or not wall_s else spent["training"] / wall_s,
        time=tuple(TimeUse(use, seconds, seconds / wall_s if wall_s else 0.0) for use, seconds in spent.items()),
        cost=replace(report.cost, **sums),
    )


def _completed(line: MetricsLine, lines: Sequence[MetricsLine]) -> MetricsLine:
    """Add throughput and MFU if the start line has the input for them."""
    step_s = line.step_s
    if not is_step(line) or not step_s:
        return line
    start = next((one for one in lines if one.event != "phase"), line)
    if start.event != "start":
        return line
    if line.tokens_per_s is None and start.tokens_per_step is not None:
        line = replace(line, tokens_per_s=start.tokens_per_step / step_s)
    if line.mfu is None and start.flops_per_step and start.peak_flops and start.world_size:
        line = replace(line, mfu=start.flops_per_step / step_s / (start.peak_flops * start.world_size))
    return line


def _attempt_steps(lines: Sequence[MetricsLine]) -> AttemptSteps:
    steps = [line for line in lines if is_step(line)]
    before = lines[: lines.index(steps[0])] if steps else lines
    resumed = [line.step for line in before if line.event == "resume" and line.step is not None]
    starts = [line.at_s for line in before if line.event in ("start", "resume") and line.at_s is not None]
    saves = [
        (line.at_s - (line.seconds or 0.0), line.at_s, line.step)
        for line in lines
        if line.event == "checkpoint" and line.at_s is not None
    ]
    started_s = None
    if steps and steps[0].at_s is not None and steps[0].step is not None:
        so_far = max(1, steps[0].step - (resumed[-1] if resumed else 0))
        started_s = steps[0].at_s - (steps[0].step_s or 0.0) * (so_far if so_far <= 1000 else 1)
        started_s = max([started_s, *starts[-1:]])
    return AttemptSteps(
        tuple((line.at_s, line.step) for line in steps if line.step is not None),
        started_s,
        resumed[-1] if resumed else None,
        tuple(saves),
    )


def _attempt_rows(
    material: Material, stays: Sequence[Stay], attempts: Mapping[int, AttemptSteps], time: Accounting
) -> tuple[AttemptRow, ...]:
    job = material.job
    past = {one.number: one for one in job.past}
    kept: dict[int, int] = {}
    for piece in time.pieces:
        if piece.use == "training":
            kept[piece.attempt] = kept.get(piece.attempt, 0) + piece.end_ms - piece.start_ms
    rows = []
    for number in sorted({stay.attempt for stay in stays}):
        mine = [stay for stay in stays if stay.attempt == number and stay.state is not State.BACKOFF]
        if not mine:
            continue
        steps = attempts.get(number, AttemptSteps())
        is_open = mine[-1].after is None
        first, last = (steps.steps[0][1], steps.steps[-1][1]) if steps.steps else (None, None)
        before, is_present = past.get(number), number == job.attempt
        hosts = before.hosts if before is not None else material.placements.get(number) or ()
        ran_ms = sum(stay.end_ms - stay.start_ms for stay in mine if stay.state in (State.RUNNING, State.STOPPING))
        has_run = any(stay.state is State.RUNNING for stay in mine)
        rows.append(
            AttemptRow(
                number,
                mine[0].start_ms / 1000,
                None if is_open else mine[-1].end_ms / 1000,
                first,
                last,
                steps.resumed,
                kept.get(number, 0) / 1000,
                _reason(mine, material.events),
                tuple(hosts or (job.hosts if is_present else ())),
                ran_ms / 1000 if has_run else 0.0,
                None if is_open else _lost_steps(job, number, attempts),
                before.failure if before is not None else job.failure if is_present else None,
            )
        )
    return tuple(rows)


def _lost_steps(job: Job, number: int, attempts: Mapping[int, AttemptSteps]) -> int | None:
    """Return how many steps of an ended attempt no checkpoint kept, or a later attempt repeated; None: unknown."""
    own = attempts.get(number, AttemptSteps())
    if not own.steps:
        return None
    last = own.steps[-1][1]
    kept = [steps.first_kept for other, steps in attempts.items() if other > number]
    kept += [one.resumed_step for one in job.past if one.number > number]
    known = [step for step in kept if step is not None]
    if not known and number == job.attempt and job.state is State.FAILED:
        known = [step for _, _, step in own.saves if step is not None][-1:] or [own.first_kept or 0]
    if not known:
        return 0 if number == job.attempt and job.is_terminal else None
    return max(0, last - max(min(known), own.first_kept or 0))


def _reason(mine: Sequence[Stay], events: Sequence[Event]) -> Text | str:
    """Return why it ended: the reason of its last state transition."""
    start_s, end_s = mine[0].start_ms / 1000 - 0.001, mine[-1].end_ms / 1000 + 0.001
    found = [
        event.values.get("reason")
        for event in events
        if event.code == "state-changed"
        and start_s <= event.at_s <= end_s
        and event.values.get("state") in ("STOPPING", "SUCCEEDED", "FAILED", "STOPPED")
    ]
    return (found[-1] or "") if found else ""


def _job_metrics(lines: Sequence[MetricsLine]) -> JobMetrics:
    steps = [line for line in lines if is_step(line)]
    losses = [line.loss for line in steps if line.loss is not None]
    totals = [line.total_steps for line in lines if line.total_steps is not None]
    evals: dict[str, float] = {}
    for line in lines:
        evals.update({name: value for name, value in line.evals.items() if not name.endswith(DURATIONS)})

    names = ("step_s", "tokens_per_s", "samples_per_s", "mfu")
    known = {name: [value for value in (getattr(line, name) for line in steps) if value is not None] for name in names}
    return JobMetrics(
        max((line.step for line in steps if line.step is not None), default=None),
        totals[-1] if totals else None,
        losses[-1] if losses else None,
        evals=evals,
        **{name: median(values) if values else None for name, values in known.items()},
    )


def _device_rows(samples: Sequence[DeviceSample]) -> tuple[DeviceRow, ...]:
    by_device: dict[tuple[str, int], list[DeviceSample]] = {}
    for one in samples:
        by_device.setdefault((one.host, one.device), []).append(one)
    rows = []
    for (host, device), found in sorted(by_device.items()):
        values = {
            name: [value for value in (getattr(one, name) for one in found) if value is not None]
            for name in ("utilisation", "power_w", "temperature_c", "memory_used_bytes")
        }
        means = {name: round(sum(known) / len(known), 1) if known else None for name, known in values.items()}
        most = {name: max(known, default=None) for name, known in values.items()}
        row = (found[-1].name, means["utilisation"], means["power_w"], most["temperature_c"], most["memory_used_bytes"])
        rows.append(DeviceRow(host, device, *row))
    return tuple(rows)


def _timeline(time: Accounting) -> tuple[UseSpan, ...]:
    pieces = list(time.pieces)
    if len(pieces) > MOST_SPANS:
        least = sorted(piece.end_ms - piece.start_ms for piece in pieces)[-MOST_SPANS // 2]
        kept = [piece for piece in pieces if piece.end_ms - piece.start_ms > least or piece.use == "lost"]
        pieces = kept[-MOST_SPANS:] if len(kept) > MOST_SPANS else kept
    return tuple(UseSpan(piece.start_ms / 1000, piece.end_ms / 1000, piece.use, piece.attempt) for piece in pieces)


def _caveats(
    material: Material, time: Accounting, cost: Cost, lines: Mapping[int, Sequence[MetricsLine]]
) -> Iterable[Caveat]:
    for code in time.caveats:
        yield Caveat(code)
    diverged = [line for several in lines.values() for line in several if line.diverged]
    if diverged:
        yield Caveat("diverged", {"lines": len(diverged), "step": diverged[0].step})
    if cost.energy_known is not None and cost.energy_kwh is not None and cost.energy_known < 0.98:
        yield Caveat("energy-partly", {"known": cost.energy_known})
    if cost.energy_kwh is None and cost.device_type != "cpu":
        yield Caveat("energy-unknown")
    thinned = max(material.every.values(), default=1)
    if thinned > 1:
        yield Caveat("thinned", {"every": thinned})
