"""The inputs that change a job, and the actions that a change causes: the two sides of `lifecycle.advance`.

Apart from the record (job.py), which every command that lists jobs loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Union

from ascendrun.core.dataclass import dataclass
from ascendrun.core.findings import Finding
from ascendrun.core.jobs.checkpoints import Listed, ResumePoint
from ascendrun.core.jobs.job import Exit, Leftover, StageFiles
from ascendrun.core.jobs.reasons import Detail, FirstFailure, Reason
from ascendrun.core.jobs.restart import Failure
from ascendrun.text import Text

# Inputs. Times are passed separately (`now_s`).


class JobInput:
    """Something that happened, which `lifecycle.advance` takes."""


@dataclass(frozen=True)
class OfNode(JobInput):
    """From one node of the present attempt."""

    host: str


@dataclass(frozen=True)
class NodesFree(JobInput):
    """The attempt gets these hosts, in the order of their node ranks, and these spares. `replaced`: the files that a
    host requires (NodeProgress.replaces)."""

    hosts: tuple[str, ...]
    spares: tuple[str, ...] = ()
    replaced: Mapping[str, StageFiles] = field(default_factory=dict)


@dataclass(frozen=True)
class WaitingForNodes(JobInput):
    """The job is not placed, for this reason."""

    reason: Reason


@dataclass(frozen=True)
class DependencyFailed(JobInput):
    """The dependency of this job ended without success."""

    reason: Reason


@dataclass(frozen=True)
class NodeReported(OfNode):
    boot_id: str
    clock_offset_s: float | None
    machine_key: str | None = None
    incarnation: str | None = None


@dataclass(frozen=True)
class Checked(JobInput):
    """The nodes were checked before the start. `warnings`: findings that do not prevent it, each with its line."""

    warnings: tuple[tuple[Finding, Detail], ...] = ()


@dataclass(frozen=True)
class ResumeChosen(JobInput):
    """What the attempt resumes from. `incomplete`: newer checkpoints that are not complete, with their hosts."""

    point: ResumePoint
    incomplete: tuple[tuple[str, Listed], ...] = ()


@dataclass(frozen=True)
class ResumeLost(JobInput):
    """The newest checkpoint, of this step, is only on the disks of hosts that the attempt does not have."""

    step: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Planned(JobInput):
    """The plan is complete: the ranks of each host."""

    ranks: Mapping[str, tuple[int, ...]]
    world_size: int


@dataclass(frozen=True)
class NodeStaged(OfNode):
    pass


@dataclass(frozen=True)
class NodeReady(OfNode):
    """`master_port`: a free port of the rank-0 node; None from the others. `hccl`: the leased port blocks of HCCL by
    their first port; None: none was requested."""

    master_port: int | None
    hccl: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Refused(JobInput):
    """A node or the plan prevents the start. `host` None: the plan, or several hosts (`hosts`, (): none of them).
    `is_away`: the host is not reachable, which the job cannot have caused."""

    host: str | None
    why: Detail
    hosts: tuple[str, ...] = ()
    is_away: bool = False


@dataclass(frozen=True)
class TrainingRefused(JobInput):
    """The training would fail. `hosts`: on these hosts only, (): on any."""

    why: Detail
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageFilesMissing(JobInput):
    """The host does not see the files that it requires (NodeProgress.replaces)."""

    host: str


@dataclass(frozen=True)
class HoldChanged(JobInput):
    """A user holds the job in the queue; `by` None: a user ended that."""

    by: str | None


@dataclass(frozen=True)
class Held(JobInput):
    """Something else uses devices or ports of the job: a refusal that passes. `what`: as the node reports it; `by`: the
    run that leases them, None: unknown, or several. `hosts`: all of them, (): the one."""

    host: str
    what: Detail
    by: str | None = None
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankStarted(OfNode):
    rank: int
    pid: int
    local_rank: int = 0


@dataclass(frozen=True)
class ForkedRankStarted(OfNode):
    """A rank that the process of its node started itself, known by RANK in its environment."""

    rank: int
    pid: int


@dataclass(frozen=True)
class ForkedRankExited(OfNode):
    """`exit`: its code and signal are None where the node did not see them."""

    rank: int
    exit: Exit


@dataclass(frozen=True)
class RankExited(OfNode):
    rank: int
    exit: Exit


@dataclass(frozen=True)
class RankHungAtExit(OfNode):
    """A rank did not exit after its work. `cause`: finished (its metrics have "done") or idle (another rank exited with
    0 and this rank is inactive); `after_s`: the exceeded limit, None: not recorded."""

    rank: int
    cause: str
    after_s: float | None = None


@dataclass(frozen=True)
class StartFailed(OfNode):
    rank: int | None
    why: Text | str


@dataclass(frozen=True)
class NodeEnded(OfNode):
    """No process of the attempt is left on the host, except `leftovers`. `exits`: of all ranks as the supervisor saw
    them, more reliable than RankExited, which a rank could write itself; {}: not reported."""

    leftovers: tuple[Leftover, ...] = ()
    exits: Mapping[int, Exit] = field(default_factory=dict)


@dataclass(frozen=True)
class LeftoversGone(OfNode):
    """The processes that SIGKILL did not end are gone, by the node or by a person who released the host."""


@dataclass(frozen=True)
class NodeLost(OfNode):
    """The processes of the attempt on the host are gone. `why`: rebooted (another boot id), directory-gone (its records
    and all its processes are gone, with the same boot id) or by-user (a person released the host)."""

    why: str


@dataclass(frozen=True)
class HostGivenUp(JobInput):
    """A user reported that a host is gone for good, with its disks."""

    host: str
    by: str


@dataclass(frozen=True)
class SupervisorLost(OfNode):
    pass


@dataclass(frozen=True)
class StopStarted(OfNode):
    """The supervisor of a host started to end its ranks. `by`: head, limit, failure, node (it received SIGTERM), fence
    (its lease expired) or finished; `at_s`: the host's clock; `done`: the work of all its ranks was complete."""

    by: str
    why: Detail
    at_s: float
    done: bool = False


@dataclass(frozen=True)
class NodeTrouble(OfNode):
    """A supervisor could not do something; no rank was ended. `code`: of the event; `at_ns`: the host's clock."""

    code: str
    values: Mapping[str, Any]
    at_ns: int


@dataclass(frozen=True)
class Hung(JobInput):
    """The job makes no progress, and is to be stopped (health/hang.py). `hosts`, `ranks`: those that the others wait
    for, (): unknown. `is_unreachable`: these hosts do not respond. `finding`: what was observed."""

    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    finding: Text
    is_unreachable: bool = False


@dataclass(frozen=True)
class TrainsSeparately(JobInput):
    """By the environment of its processes `world_size` ranks train on this host without the other hosts."""

    attempt: int
    host: str
    world_size: int


@dataclass(frozen=True)
class StopRequested(JobInput):
    now: bool


@dataclass(frozen=True)
class RetryRequested(JobInput):
    """A user started the next attempt of a job that had ended without success."""


@dataclass(frozen=True)
class Diagnosed(JobInput):
    """The failure of an attempt was diagnosed. `first`: what failed first, None: there is no diagnosis, or the attempt
    did not fail by itself. `last_step`: the newest step that it reported, None: unknown."""

    attempt: int
    failure: Failure
    last_step: int | None = None
    first: FirstFailure | None = None


@dataclass(frozen=True)
class HeadRestarted(JobInput):
    """A new controller found the job in a start without GO from the previous controller."""


@dataclass(frozen=True)
class Tick(JobInput):
    """Time passed. `reachable`: hosts that respond now. `fenced`: hosts whose leases have expired: they have ended the
    ranks by themselves. `quiet_s`: for how many seconds each of the others has been silent, as far as we could hear."""

    reachable: frozenset[str] = frozenset()
    fenced: frozenset[str] = frozenset()
    quiet_s: Mapping[str, float] = field(default_factory=dict)


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
    """Discard the preparation of the attempt of this run_id on its hosts; nothing was started."""

    run_id: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class StopNodes:
    """End every process of the attempt on these hosts. `hung`: the ranks first print their stacks and end by it."""

    hosts: tuple[str, ...]
    now: bool
    grace_s: float
    hung: bool = False


@dataclass(frozen=True)
class Judge:
    """Diagnose the failure of an attempt; the reply is Diagnosed."""

    attempt: int


Action = Union[QueryNodes, StageNodes, PrepareNodes, StartNodes, AbortNodes, StopNodes, Judge]
