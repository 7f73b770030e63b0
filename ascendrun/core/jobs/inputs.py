"""The inputs that change a job, and the actions that a change causes: the two sides of `lifecycle.advance`.

Apart from the record (job.py), which every command that lists jobs loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union

from ascendrun.core.findings import Finding
from ascendrun.core.jobs.job import Exit
from ascendrun.core.jobs.reasons import Detail
from ascendrun.text import Text

# Inputs. Times are passed separately (`now_s`).


@dataclass(frozen=True)
class NodesAvailable:
    """No other job uses this job's hosts."""


@dataclass(frozen=True)
class WaitingForNodes:
    """Another job uses some of this job's hosts."""

    reason: Text


@dataclass(frozen=True)
class DependencyFailed:
    """The dependency of this job ended without success."""

    reason: Text


@dataclass(frozen=True)
class NodeReported:
    host: str
    boot_id: str
    clock_offset_s: float | None


@dataclass(frozen=True)
class Checked:
    """The nodes were checked before the start. `warnings`: findings that do not prevent it, each with its line."""

    warnings: tuple[tuple[Finding, Detail], ...] = ()


@dataclass(frozen=True)
class Planned:
    """The plan is complete: the ranks of each host."""

    ranks: Mapping[str, tuple[int, ...]]
    world_size: int


@dataclass(frozen=True)
class NodeStaged:
    host: str


@dataclass(frozen=True)
class NodeReady:
    """`master_port`: a free port of the rank-0 node; None from the others."""

    host: str
    master_port: int | None


@dataclass(frozen=True)
class Refused:
    """A node or the plan prevents the start. `host` None: the plan, or several hosts (`hosts`, as in `why`)."""

    host: str | None
    why: Detail
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankStarted:
    host: str
    rank: int
    pid: int
    local_rank: int = 0


@dataclass(frozen=True)
class RankExited:
    host: str
    rank: int
    exit: Exit


@dataclass(frozen=True)
class RankHungAtExit:
    """A rank did not exit after its work. `cause`: finished (its metrics have "done") or idle (another rank exited with
    0 and this rank is inactive); `after_s`: the exceeded limit, None: not recorded."""

    host: str
    rank: int
    cause: str
    after_s: float | None = None


@dataclass(frozen=True)
class StartFailed:
    host: str
    rank: int | None
    why: Detail


@dataclass(frozen=True)
class NodeEnded:
    """No process of the attempt is left on the host, except `leftovers` (pids that SIGKILL did not end)."""

    host: str
    leftovers: tuple[int, ...] = ()


@dataclass(frozen=True)
class NodeRebooted:
    """The host has another boot id: its processes are gone."""

    host: str


@dataclass(frozen=True)
class SupervisorLost:
    host: str


@dataclass(frozen=True)
class StopStarted:
    """The supervisor of a host started to end its ranks. `by`: limit, failure, user …; `at_s`: the host's clock."""

    host: str
    by: str
    why: Detail
    at_s: float


@dataclass(frozen=True)
class StopRequested:
    now: bool


@dataclass(frozen=True)
class HeadRestarted:
    """A new controller found the job in a start without GO from the previous controller."""


@dataclass(frozen=True)
class Tick:
    """Time passed. `reachable`: hosts that respond now."""

    reachable: frozenset[str] = frozenset()


JobInput = Union[
    Union[NodesAvailable, WaitingForNodes, DependencyFailed, NodeReported, Checked, Planned, NodeStaged, NodeReady],
    Union[Refused, RankStarted, RankExited, RankHungAtExit, StartFailed, NodeEnded, NodeRebooted, SupervisorLost],
    Union[StopStarted, StopRequested, HeadRestarted, Tick],
]


# Actions. Each may be repeated, since the controller can end between the decision and the action.


@dataclass(frozen=True)
class QueryNodes:
    """Connect to the hosts and probe them; when all have reported, make the plan."""


@dataclass(frozen=True)
class StageNodes:
    """Send the trees to every node that lacks them."""


@dataclass(frozen=True)
class PrepareNodes:
    """Request every node to check, reserve and report ready."""


@dataclass(frozen=True)
class StartNodes:
    """Send GO, with the port of the rank-0 node."""


@dataclass(frozen=True)
class AbortNodes:
    """Discard the preparation of the attempt of this run_id; nothing was started."""

    run_id: str


@dataclass(frozen=True)
class StopNodes:
    """End every process of the attempt on these hosts."""

    hosts: tuple[str, ...]
    now: bool
    grace_s: float


Action = Union[QueryNodes, StageNodes, PrepareNodes, StartNodes, AbortNodes, StopNodes]
