"""The words of `top`: what it is made from, and every host, device, rank and job that it shows at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ascendrun.core.samples import DeviceSample, HostSample


@dataclass(frozen=True)
class RankPlace:
    """Where a rank of a live job runs. `device`: what it was given, None: none. `is_over`: it has ended."""

    rank: int
    host: str
    device: int | None = None
    pid: int | None = None
    is_over: bool = False


@dataclass(frozen=True)
class Progress:
    """The newest that one rank's program said. `step_s`: the median of its newest steps; `own_s`: the same without
    the time in which it waited for other ranks, where the program tells that apart. `at_s`: by the node's clock."""

    at_s: float | None = None
    step: int | None = None
    total_steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    step_s: float | None = None
    own_s: float | None = None


@dataclass(frozen=True)
class Slow:
    """A straggler: its steps take `slower_by` times as long as the others' (1.18: 18 % longer; None: not told here),
    with the likeliest sign: frequency, temperature, link, data, cpu, shared, health; None: none seen."""

    slower_by: float | None = None
    sign: str | None = None
    since_s: float | None = None


@dataclass(frozen=True)
class JobSeen:
    """A job as `top` needs it.

    `ended_at_s` None: it is live. `places`: () before it has a plan. `liveness`: by host, of those that are known.
    """

    id: str
    name: str
    state: str
    reason: str
    attempt: int
    hosts: tuple[str, ...]
    world_size: int
    started_at_s: float | None = None
    ended_at_s: float | None = None
    places: tuple[RankPlace, ...] = ()
    progress: Mapping[int, Progress] = field(default_factory=dict)
    slow: Mapping[int, Slow] = field(default_factory=dict)
    liveness: Mapping[str, str] = field(default_factory=dict)


_NO_DEVICE_FIGURES = DeviceSample(at_s=0.0, host="", device=-1, family="")
_NO_HOST_FIGURES = HostSample(at_s=0.0, host="")


@dataclass(frozen=True)
class TopRow:
    """One rank on one device; a device without a rank; a rank without a device; or a host with neither. None: not
    known, never 0.

    `sample`: the device's newest, None: it was not measured. `foreign_pids`: processes on the device that belong to no
    rank of ours, None: cannot be told. `progress`: what the rank's program told. `slower_by`: the own step time by the
    median of the job's other ranks. Ages in seconds: of the device's, the rank's, the program's figures.
    `problems`: health, link, foreign, slow, silent, stale.
    """

    host: str
    device: int | None = None
    sample: DeviceSample | None = None
    foreign_pids: tuple[int, ...] | None = None
    age_s: float | None = None
    job: str | None = None
    job_name: str | None = None
    rank: int | None = None
    pid: int | None = None
    cpu: float | None = None
    rss_bytes: int | None = None
    rank_age_s: float | None = None
    progress: Progress = Progress()
    slower_by: float | None = None
    slow_sign: str | None = None
    metrics_age_s: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def figures(self) -> DeviceSample:
        """What was measured of the device; without a sample every figure is None, and the rest says nothing."""
        return _NO_DEVICE_FIGURES if self.sample is None else self.sample

    @property
    def family(self) -> str | None:
        """npu or cuda; None: the device was not measured."""
        return None if self.sample is None else self.sample.family


@dataclass(frozen=True)
class HostRow:
    """One host. `devices`: how many it has, None: not known. `sample`: its newest, None: none. `age_s`: of that, or
    else of its devices' and ranks' newest. `why`: why there are no figures of it now (a word of WHY), None: there are;
    `detail`: what was said of that."""

    host: str
    devices: int | None
    jobs: tuple[str, ...]
    liveness: str | None = None
    sample: HostSample | None = None
    age_s: float | None = None
    why: str | None = None
    detail: str | None = None

    @property
    def figures(self) -> HostSample:
        """What was measured of it; without a sample every figure is None, and the rest says nothing."""
        return _NO_HOST_FIGURES if self.sample is None else self.sample


WHY = ("unreachable", "no-answer", "starting", "no-samples", "not-asked")


@dataclass(frozen=True)
class JobRow:
    """One live job. `progress`: each figure of its lowest rank that says it, the step time the median of all ranks.
    `slowest`: the rank whose steps take longest beside the others', `slower_by` times as long."""

    job: JobSeen
    progress: Progress
    slowest: int | None = None
    slower_by: float | None = None
    stragglers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Totals:
    """Counted over devices. `busy`: with a rank or other processes; `bad`: not well; `unknown`: health not known.
    `power_w`: of those that tell it, None: none does."""

    hosts: int
    hosts_without: int
    devices: int
    busy: int
    bad: int
    unknown: int
    power_w: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None


@dataclass(frozen=True)
class TopView:
    """`trouble`: why there are no samples, where they could not be read."""

    at_s: float
    totals: Totals
    jobs: tuple[JobRow, ...]
    hosts: tuple[HostRow, ...]
    rows: tuple[TopRow, ...]
    trouble: str | None = None
