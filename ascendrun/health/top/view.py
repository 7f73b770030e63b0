"""The view of `top` at one moment: jobs, hosts, devices and ranks, and their input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobs.reasons import Detail
from ascendrun.core.measurement import Column, metric
from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.text import Text


@dataclass(frozen=True)
class RankPlace:
    """Host and device of a rank. `device`: as planned, None: none. `is_over`: the rank has ended."""

    rank: int
    host: str
    device: int | None = None
    pid: int | None = None
    is_over: bool = False


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
    program were measured. `problems`: health, link, external, slow, unreachable, stale.
    """

    host: str
    device: int | None = None
    sample: DeviceSample | None = None
    external_pids: tuple[int, ...] | None = None
    age_s: float | None = None
    job: str | None = None
    job_name: str | None = None
    rank: int | None = None
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
