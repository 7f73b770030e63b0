"""The words of `top`: what it is made from, and every host, device, rank and job that it shows at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Optional, Tuple

from ascendrun.core.samples import DeviceSample, HostSample


@dataclass(frozen=True)
class RankPlace:
    """Where a rank of a live job runs. `device`: what it was given, None: none. `is_over`: it has ended."""

    rank: int
    host: str
    device: Optional[int] = None
    pid: Optional[int] = None
    is_over: bool = False


@dataclass(frozen=True)
class Progress:
    """The newest that one rank's program said. `step_s`: the median of its newest steps; `own_s`: the same without
    the time in which it waited for other ranks, where the program tells that apart. `at_s`: by the node's clock."""

    at_s: Optional[float] = None
    step: Optional[int] = None
    total_steps: Optional[int] = None
    epoch: Optional[float] = None
    loss: Optional[float] = None
    tokens_per_s: Optional[float] = None
    mfu: Optional[float] = None
    step_s: Optional[float] = None
    own_s: Optional[float] = None


@dataclass(frozen=True)
class Slow:
    """A straggler: its steps take `slower_by` times as long as the others' (1.18: 18 % longer; None: not told here),
    with the likeliest sign: frequency, temperature, link, data, cpu, shared, health; None: none seen."""

    slower_by: Optional[float] = None
    sign: Optional[str] = None
    since_s: Optional[float] = None


@dataclass(frozen=True)
class JobSeen:
    """A live job as top needs it. `places`: () before it has a plan. `liveness`: by host, of those that are known."""

    id: str
    name: str
    state: str
    reason: str
    attempt: int
    hosts: Tuple[str, ...]
    world_size: int
    started_at_s: Optional[float] = None
    places: Tuple[RankPlace, ...] = ()
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
    device: Optional[int] = None
    sample: Optional[DeviceSample] = None
    foreign_pids: Optional[Tuple[int, ...]] = None
    age_s: Optional[float] = None
    job: Optional[str] = None
    job_name: Optional[str] = None
    rank: Optional[int] = None
    pid: Optional[int] = None
    cpu: Optional[float] = None
    rss_bytes: Optional[int] = None
    rank_age_s: Optional[float] = None
    progress: Progress = Progress()
    slower_by: Optional[float] = None
    slow_sign: Optional[str] = None
    metrics_age_s: Optional[float] = None
    problems: Tuple[str, ...] = ()

    @property
    def figures(self) -> DeviceSample:
        """What was measured of the device; without a sample every figure is None, and the rest says nothing."""
        return _NO_DEVICE_FIGURES if self.sample is None else self.sample

    @property
    def family(self) -> Optional[str]:
        """npu or cuda; None: the device was not measured."""
        return None if self.sample is None else self.sample.family


@dataclass(frozen=True)
class HostRow:
    """One host. `devices`: how many it has, None: not known. `sample`: its newest, None: none. `age_s`: of that, or
    else of its devices' and ranks' newest. `why`: why there are no figures of it now (a word of WHY), None: there are;
    `detail`: what was said of that."""

    host: str
    devices: Optional[int]
    jobs: Tuple[str, ...]
    liveness: Optional[str] = None
    sample: Optional[HostSample] = None
    age_s: Optional[float] = None
    why: Optional[str] = None
    detail: Optional[str] = None

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
    slowest: Optional[int] = None
    slower_by: Optional[float] = None
    stragglers: Tuple[int, ...] = ()


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
    power_w: Optional[float]
    memory_used_bytes: Optional[int]
    memory_total_bytes: Optional[int]


@dataclass(frozen=True)
class TopView:
    """`trouble`: why there are no samples, where they could not be read."""

    at_s: float
    totals: Totals
    jobs: Tuple[JobRow, ...]
    hosts: Tuple[HostRow, ...]
    rows: Tuple[TopRow, ...]
    trouble: Optional[str] = None
