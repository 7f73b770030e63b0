"""The view of `top` at one moment: jobs, hosts, devices and ranks, and their input; selection and order of rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from operator import attrgetter
from typing import Any, Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobs.reasons import Detail
from ascendrun.core.measurement import Column, metric, metrics_of
from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.text import Text


@dataclass(frozen=True)
class RankPlace:
    """Host and device of a rank. `device`: as planned, None: none. `is_over`: the rank has ended. `label`: its name in
    its role, None: the job has no roles."""

    rank: int
    host: str
    device: int | None = None
    pid: int | None = None
    is_over: bool = False
    label: str | None = None


@dataclass(frozen=True)
class Progress:
    """The latest metrics that the program of one rank reported.

    `own_s`: as `step_s`, without waiting for other ranks, None: not reported.
    `at_s`: by the clock of the node. `phase`: what it does instead of steps, like evaluation; None: steps, or unknown.
    """

    at_s: float | None = None
    step: int | None = metric(
        "latest step",
        prometheus=("ascendrun_rank_step", "ascendrun_job_step"),
        column=Column("step", Text("top.column-step", "STEP"), 58, job_weight=90),
        beside="total_steps",
        detail=Text("top.metric-step", "step"),
    )
    total_steps: int | None = metric("steps that the program will run", prometheus=("ascendrun_job_total_steps",))
    epoch: float | None = metric("epochs done", prometheus=("ascendrun_job_epoch",))
    loss: float | None = metric(
        "latest loss; NaN where the program reports it",
        prometheus=("ascendrun_job_loss",),
        column=Column("loss", "LOSS", 30, job_weight=70),
        detail="loss",
    )
    step_s: float | None = metric(
        "median time of the latest steps; of a job, over all ranks",
        "s",
        prometheus=("ascendrun_rank_step_seconds", "ascendrun_job_step_seconds"),
        column=Column("step_s", Text("top.column-step-s", "S/STEP"), 64, job_weight=75),
        detail=Text("top.metric-step-s", "s/step"),
    )
    tokens_per_s: float | None = metric(
        "tokens per second",
        prometheus=("ascendrun_job_tokens_per_second",),
        column=Column("tokens", "TOK/S", 25, job_weight=65),
        detail="tokens/s",
    )
    mfu: float | None = metric(
        "model FLOPS utilisation from 0 to 1",
        "ratio",
        prometheus=("ascendrun_job_mfu_ratio",),
        column=Column("mfu", "MFU", 28, job_weight=60),
    )
    own_s: float | None = None
    phase: str | None = None


@dataclass(frozen=True)
class Slow:
    """A straggler. `slower_by`: its step time divided by the others' (1.18: 18% longer), None: unknown.

    `cause`: the likely cause: frequency, temperature, link, data, cpu, shared, health; None: unknown.
    """

    slower_by: float | None = None
    cause: str | None = None
    since_s: float | None = None


@dataclass(frozen=True)
class TopJob:
    """A job for `top`.

    `ended_at_s` None: it is live. `places`: () before it has a plan. `liveness`: by host, if known.
    `last_state`: the newest stored state, "" if `state` is that; it differs while `state` is UNKNOWN.
    """

    id: str
    name: str
    state: str
    reason: Detail
    attempt: int
    hosts: tuple[str, ...]
    world_size: int
    started_at_s: float | None = None
    ended_at_s: float | None = None
    places: tuple[RankPlace, ...] = ()
    progress: Mapping[int, Progress] = field(default_factory=dict)
    slow: Mapping[int, Slow] = field(default_factory=dict)
    liveness: Mapping[str, str] = field(default_factory=dict)
    last_state: str = ""


_NO_DEVICE = DeviceSample(at_s=0.0, host="", device=-1, device_type="")
_NO_HOST = HostSample(at_s=0.0, host="")
_NO_RANK = RankSample(at_s=0.0, host="", job="", attempt=0, rank=0)


@dataclass(frozen=True)
class TopRow:
    """One rank on one device; a device without a rank; a rank without a device; or a host with neither.

    None: unknown, never 0. `sample`, `rank_sample`: the latest of the device and of the rank, None: not measured.
    `external_pids`: processes on the device that belong to no rank. `slower_by`: its own step time divided by the
    median of the job's other ranks. `age_s`, `rank_age_s`, `metrics_age_s`: seconds since the device, the rank and the
    program were measured. `problems`: health, link, external, slow, unreachable, stale. `rank_label`: see RankPlace.
    """

    host: str
    device: int | None = None
    sample: DeviceSample | None = None
    external_pids: tuple[int, ...] | None = None
    age_s: float | None = None
    job: str | None = None
    job_name: str | None = None
    rank: int | None = None
    rank_label: str | None = None
    pid: int | None = None
    rank_sample: RankSample | None = None
    rank_age_s: float | None = None
    progress: Progress = Progress()
    slower_by: float | None = None
    slow_cause: str | None = None
    metrics_age_s: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def metrics(self) -> DeviceSample:
        """Return the sample of the device; without a sample every measured field is None."""
        return _NO_DEVICE if self.sample is None else self.sample

    @property
    def rank_metrics(self) -> RankSample:
        """Return the sample of the rank; without a sample every measured field is None."""
        return _NO_RANK if self.rank_sample is None else self.rank_sample

    @property
    def device_type(self) -> str | None:
        """Return npu or cuda; None: the device was not measured."""
        return None if self.sample is None else self.sample.device_type


@dataclass(frozen=True)
class HostRow:
    """One host. `devices`: their number. `sample`: the latest. `age_s`: of that, else of its devices and ranks.

    `why`: why there is no recent data, None: there is; one of unreachable, no-reply, starting, no-samples,
    not-queried. `detail`: the observation.
    """

    host: str
    devices: int | None
    jobs: tuple[str, ...]
    liveness: str | None = None
    sample: HostSample | None = None
    age_s: float | None = None
    why: str | None = None
    detail: str | Text | None = None

    @property
    def metrics(self) -> HostSample:
        """Return the sample of the host; without a sample every measured field is None."""
        return _NO_HOST if self.sample is None else self.sample


@dataclass(frozen=True)
class JobRow:
    """One live job. `progress`: each metric of the lowest rank that reports it, the step time as median of all ranks.

    `slowest`: the rank with the longest step time compared with the others, `slower_by` times as long.
    """

    job: TopJob
    progress: Progress
    slowest: int | None = None
    slower_by: float | None = None
    stragglers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Totals:
    """Counts over all devices. `busy`: with a rank or other processes. `unknown`: of unknown health."""

    hosts: int
    hosts_without_data: int
    devices: int
    busy: int
    unhealthy: int
    unknown: int
    power_w: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None


@dataclass(frozen=True)
class TopView:
    """The complete view of `top`. `samples_error`: why the samples could not be read, None: no error."""

    at_s: float
    totals: Totals
    jobs: tuple[JobRow, ...]
    hosts: tuple[HostRow, ...]
    rows: tuple[TopRow, ...]
    samples_error: str | Text | None = None


# ---------------------------------------------------------------- selection and order of rows


def place_key(row: TopRow) -> tuple[object, ...]:
    """Return a sort key: host in natural order (npu2 before npu10), device, rank."""
    return natural_key(row.host), row.device is None, row.device or 0, row.rank is None, row.rank or 0


@lru_cache(maxsize=1 << 16)
def natural_key(name: str) -> tuple[object, ...]:
    """Return a sort key: npu2 before npu10. Strings and numbers alternate, so keys are always comparable."""
    return tuple(int(piece) if piece.isdigit() else piece for piece in _NUMBERS.split(name))


_NUMBERS = re.compile(r"([0-9]+)")


IDLE_PERCENT = 5.0
FOLD_FROM = 3
"""Minimum number of similar idle hosts that are folded to one line."""

SORTS: Mapping[str, Callable[[TopRow], Any]] = {
    "host": lambda row: None,
    **{
        row.column.key: attrgetter(f"metrics.{name}")
        for name, row in metrics_of(DeviceSample).items()
        if row.column is not None and row.column.sorts
    },
    "step": lambda row: row.slower_by if row.slower_by is not None else row.progress.step_s,
    "job": lambda row: None if row.job is None else (natural_key(row.job), row.rank or 0),
    "age": lambda row: row.age_s,
}
"""Sort orders: metrics descending, hosts and names ascending, unknown values always last."""
ASCENDING = ("host", "job")


@dataclass(frozen=True)
class Order:
    """Sort order. `by`: a name of SORTS. `by_host`: one line per host."""

    by: str = "host"
    is_reversed: bool = False
    by_host: bool = False


@dataclass(frozen=True)
class Choice:
    """Row filter: of this job, on these hosts (names or globs), with problems, with a job, with this text."""

    job: str | None = None
    hosts: tuple[str, ...] = ()
    only_problems: bool = False
    only_busy: bool = False
    text: str = ""


@dataclass(frozen=True)
class IdleHosts:
    """Hosts with the same number and kind of devices, all idle and healthy. `samples`: of all their devices."""

    hosts: tuple[str, ...]
    devices: tuple[int, ...]
    samples: tuple[DeviceSample, ...]
    age_s: float | None
    problems: tuple[str, ...] = ()


def choose_rows(rows: Sequence[TopRow], choice: Choice) -> tuple[TopRow, ...]:
    return tuple(
        row
        for row in rows
        if (choice.job is None or choice.job in (row.job, row.job_name))
        and (not choice.only_problems or row.problems)
        and (not choice.only_busy or row.job is not None)
        and matches_host(row.host, choice.hosts)
        and (not choice.text or matches_text(row, choice.text))
    )


def matches_host(host: str, requested: Collection[str]) -> bool:
    """Return whether a name or glob matches the host; without any, every host matches."""
    return not requested or any(fnmatchcase(host, one) for one in requested)


def matches_text(row: TopRow, text: str) -> bool:
    """Return whether the text is in, or a glob for, the host, job, job name, chip, health or a problem of the row."""
    names = (row.host, row.job, row.job_name, row.metrics.name, row.metrics.health, *row.problems)
    values = [name for name in names if name]
    if row.rank is not None:
        values.append(f"rank{row.rank}")
    requested = text.lower()
    has_glob = any(character in requested for character in "*?[")
    return any(fnmatchcase(value.lower(), requested) if has_glob else requested in value.lower() for value in values)


def sort_rows(rows: Sequence[TopRow], by: str, *, reverse: bool = False) -> tuple[TopRow, ...]:
    """Sort by one of SORTS. Rows without the value are last, also in reverse."""
    if by == "host":
        return tuple(sorted(rows, key=place_key, reverse=reverse))
    value = SORTS[by]
    placed = sorted(rows, key=place_key)
    known = [row for row in placed if value(row) is not None]
    known.sort(key=value, reverse=(by in ASCENDING) == reverse)
    return (*known, *(row for row in placed if value(row) is None))


@dataclass(frozen=True)
class HostLine:
    """A host with all its rows, and its host row."""

    host: str
    rows: tuple[TopRow, ...]
    itself: HostRow


def rows_by_host(rows: Sequence[TopRow], hosts: Sequence[HostRow] = ()) -> tuple[HostLine, ...]:
    """Return hosts in the order of their first rows."""
    known = {one.host: one for one in hosts}
    found: dict[str, list[TopRow]] = {}
    for row in rows:
        found.setdefault(row.host, []).append(row)
    return tuple(
        HostLine(host, tuple(here), known.get(host) or HostRow(host, None, ())) for host, here in found.items()
    )


def fold_idle(rows: Sequence[TopRow]) -> tuple[TopRow | IdleHosts, ...]:
    """Fold each group of FOLD_FROM or more similar idle hosts to one line at the end."""
    alike: dict[tuple[Any, ...], list[HostLine]] = {}
    for line in rows_by_host(rows):
        if all(_is_idle(row) for row in line.rows):
            first, metrics = line.rows[0], line.rows[0].metrics
            kind = (first.device_type, metrics.name, metrics.memory_total_bytes, metrics.link_up, first.problems)
            alike.setdefault((kind, tuple(row.device for row in line.rows)), []).append(line)
    groups = [group for group in alike.values() if len(group) >= FOLD_FROM]
    folded = {line.host for group in groups for line in group}
    return (*(row for row in rows if row.host not in folded), *map(_fold, groups))


def _is_idle(row: TopRow) -> bool:
    metrics = row.metrics
    return (
        row.job is None
        and row.device is not None
        and set(row.problems) <= {"stale"}
        and metrics.health is not None
        and metrics.utilisation is not None
        and metrics.utilisation <= IDLE_PERCENT
    )


def _fold(group: Sequence[HostLine]) -> IdleHosts:
    rows = [row for line in group for row in line.rows]
    ages = [row.age_s for row in rows if row.age_s is not None]
    return IdleHosts(
        hosts=tuple(line.host for line in group),
        devices=tuple(row.device for row in group[0].rows if row.device is not None),
        samples=tuple(row.metrics for row in rows),
        age_s=max(ages) if ages else None,
        problems=rows[0].problems,
    )


def choose_view(view: TopView, choice: Choice) -> TopView:
    """Return the view with the chosen rows, and with matching hosts and jobs without rows."""
    rows = choose_rows(view.rows, choice)
    shown = {row.host for row in rows}
    jobs = tuple(row for row in view.jobs if choice.job is None or choice.job in (row.job.id, row.job.name))
    requested = {row.job.id for row in jobs}
    hosts = tuple(host for host in view.hosts if host.host in shown or _is_shown_without_rows(host, choice, requested))
    return replace(view, rows=rows, hosts=hosts, jobs=jobs)


def _is_shown_without_rows(host: HostRow, choice: Choice, jobs: Collection[str]) -> bool:
    """Return whether a host without a shown row is shown because it has no data."""
    if host.why is None or not matches_host(host.host, choice.hosts):
        return False
    if (choice.job is not None or choice.only_busy) and not set(jobs) & set(host.jobs):
        return False
    if choice.only_problems and host.why not in ("unreachable", "no-reply"):
        return False
    return choice.text.lower() in host.host.lower()


def arrange(view: TopView, choice: Choice, order: Order) -> TopView:
    """Return the chosen rows in the requested order."""
    chosen = choose_view(view, choice)
    return replace(chosen, rows=sort_rows(chosen.rows, order.by, reverse=order.is_reversed))
