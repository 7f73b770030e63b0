"""Actions that a step of a job's state machine requests. Each may be repeated, since the controller can end between the
decision and the action."""

from __future__ import annotations

from typing import Union

from ascendrun.core.dataclass import dataclass


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


@dataclass(frozen=True)
class ForgetReplies:
    """Release what the hosts replied for the start: it is large, and of no use once the ranks run or it has failed."""


Action = Union[QueryNodes, StageNodes, PrepareNodes, StartNodes, AbortNodes, StopNodes, Judge, ForgetReplies]
