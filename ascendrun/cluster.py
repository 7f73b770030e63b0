"""The Python API: everything the command line can do, as plain calls. The CLI and the dashboard stand on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Optional, Sequence, Tuple

from ascendrun.core.hosts import Host
from ascendrun.head.settings import Settings

if TYPE_CHECKING:
    from ascendrun.core.plan import LaunchPlan


@dataclass(frozen=True)
class NodeView:
    """One node of one job. `liveness`: ALIVE, SUSPECT, UNREACHABLE, or UNKNOWN when no controller looks."""

    host: str
    node_rank: int
    ranks: Tuple[int, ...]
    liveness: str
    phase: str


@dataclass(frozen=True)
class RankView:
    """How one rank stands. `exit_code` for an exit, `signal` for a death by signal; both None: it runs or never ran.
    `stopped`: it ended after ascendrun had told it to stop. `lingers`: it finished its work but does not exit."""

    rank: int
    host: str
    pid: Optional[int]
    exit_code: Optional[int]
    signal: Optional[int]
    exited_at_s: Optional[float]
    stopped: bool
    lingers: bool


@dataclass(frozen=True)
class EventView:
    """One line of a job's story, in order of `seq`."""

    seq: int
    at_s: float
    kind: str
    text: str


@dataclass(frozen=True)
class JobView:
    """A job as `ps` shows it. `state` is a name of core/lifecycle.State; `reason` is never empty while the job waits,
    stops or has failed. `progress`: the newest metrics line of rank 0, None: none yet."""

    id: str
    name: str
    state: str
    reason: str
    attempt: int
    hosts: Tuple[str, ...]
    world_size: int
    created_at_s: float
    started_at_s: Optional[float]
    ended_at_s: Optional[float]
    exit_code: Optional[int]
    file: Optional[str]
    progress: Optional[Mapping[str, Any]]


@dataclass(frozen=True)
class JobDetail:
    """A job as `show` shows it. `first_failure`: the sentence naming the first failing rank, None: none failed.
    `unconfirmed`: hosts whose processes could not be confirmed gone when the job ended."""

    job: JobView
    nodes: Tuple[NodeView, ...]
    ranks: Tuple[RankView, ...]
    events: Tuple[EventView, ...]
    first_failure: Optional[str]
    unconfirmed: Tuple[str, ...]
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class ExecResult:
    """One host's answer to `exec`. `exit_code` None with `error` set: it did not run or did not end in time."""

    host: str
    exit_code: Optional[int]
    stdout: bytes
    stderr: bytes
    error: Optional[str]
    wall_s: float


@dataclass(frozen=True)
class HostStatus:
    """One host as `nodes` shows it: reached or why not, and what it says of itself (None: not asked or unreached)."""

    host: str
    reachable: bool
    error: Optional[str]
    hint: Optional[str]
    hostname: Optional[str]
    python_version: Optional[str]
    cpus: Optional[int]
    memory_bytes: Optional[int]
    free_bytes: Optional[int]
    clock_offset_s: Optional[float]
    job: Optional[str]


class Cluster:
    """One state dir: its store, its controller (started when a call needs it), its jobs.

    Every call raises children of AscendrunError only.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def submit(self, job_file: Path, *, overrides: Sequence[str] = (), hostfile: Optional[Path] = None,
               key: Optional[str] = None) -> JobView:
        """Checks the file completely, stages its folders, stores the job. When this returns the job survives a crash.
        `overrides`: "args.lr=1e-4" texts. `key`: repeat a call with the same key and get the same job."""
        raise NotImplementedError

    def plan(self, job_file: Path, *, overrides: Sequence[str] = (), hostfile: Optional[Path] = None) -> "LaunchPlan":
        """Exactly what `submit` would start: asks the nodes, starts nothing."""
        raise NotImplementedError

    def jobs(self, *, everything: bool = False) -> Tuple[JobView, ...]:
        """Live jobs, newest first; with `everything` the ended ones too."""
        raise NotImplementedError

    def job(self, ref: str) -> JobDetail:
        """By id, name (the newest of that name) or unambiguous start of an id. Raises NotFound."""
        raise NotImplementedError

    def stop(self, ref: str, *, now: bool = False) -> JobView:
        """Asks for a stop and returns at once; `now` skips the grace. Raises NotFound; Conflict when it has ended."""
        raise NotImplementedError

    def wait(self, ref: str, *, timeout_s: Optional[float] = None) -> JobDetail:
        """Returns when the job has ended. Raises DeadlineExceeded."""
        raise NotImplementedError

    def execute(self, hosts: Sequence[Host], argv: Sequence[str], *, timeout_s: float) -> Iterator[ExecResult]:
        """Runs argv on every host at once; results come as hosts answer, one for every host."""
        raise NotImplementedError

    def nodes(self, hosts: Sequence[Host], *, timeout_s: float = 15.0) -> Iterator[HostStatus]:
        """Asks every host how it is; results come as hosts answer, one for every host."""
        raise NotImplementedError

    def ensure_controller(self) -> None:
        """Starts the controller when none runs. Raises CannotConnect when it does not come up."""
        raise NotImplementedError
