"""What an engine with a queue is asked for: hosts for the attempts of a job. Pure types; backends/ implements them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Protocol, Union

from ascendrun.core.dataclass import dataclass
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.reasons import Reason


@dataclass(frozen=True)
class AllocationRequest:
    """Hosts for the attempts of one job. `key`: the run id of the first of them, by which a repeated request is known.
    `options`: of the engine, as in the settings, with the `container` of the job where it runs images. `nodes`: with
    the spares. `devices`: NPUs or GPUs of each host, 0: it uses none. `hosts`: only these, (): any; `exclude`: not
    these. `grace_s`: how long before its end its processes are told of it. `length_s`: how long it is needed, None: as
    long as the engine allows."""

    key: str
    name: str
    options: Mapping[str, Any]
    nodes: int
    devices: int
    grace_s: float
    hosts: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    length_s: float | None = None


@dataclass(frozen=True)
class Waiting:
    """`will_start` False: not before something is changed, as `reason` says."""

    reason: Reason
    will_start: bool = True


@dataclass(frozen=True)
class Granted:
    """The hosts are there. `ends_at_s`: UTC seconds, `length_s`: from its start to that; None: it has no limit."""

    hosts: tuple[Host, ...]
    ends_at_s: float | None = None
    length_s: float | None = None


@dataclass(frozen=True)
class Gone:
    """The allocation has ended, with every process in it. `cause`: cancelled, time-limit, node-failed, preempted,
    failed, or unknown (the engine does not know it any more). `hosts`: those that failed."""

    cause: str
    reason: Reason
    hosts: tuple[str, ...] = ()


AllocationState = Union[Waiting, Granted, Gone]


@dataclass(frozen=True)
class EngineFacts:
    """What an engine tells of itself. None: unknown. `tracking`: how it finds the processes of a job, exact if also
    those that leave their session. `kill_wait_s`: between its SIGTERM and SIGKILL. `devices`: how many its nodes have
    with `device_name`. `nodes`: that could be granted now. `limit_s`: for which a job gets its hosts, `longest_s`: at
    most. `state_on`: the file system of the state directory if that may be on another machine."""

    tracking: str | None = None
    is_tracking_exact: bool | None = None
    kill_wait_s: float | None = None
    devices: tuple[int, ...] = ()
    device_name: str = ""
    nodes: int = 0
    limit_s: float | None = None
    longest_s: float | None = None
    state_on: str | None = None


class EngineError(Exception):
    """An engine does not answer, or refuses a request. `is_final`: it would refuse it again."""

    def __init__(self, reason: Reason, *, is_final: bool = False) -> None:
        super().__init__(str(reason))
        self.reason, self.is_final = reason, is_final


Options = Mapping[str, Mapping[str, Any]]
"""Keys of allocations, each with the options of its engine, as in the settings."""


class Allocator(Protocol):
    """Allocations of one type of engines. Every call may block for seconds, and raises EngineError."""

    def request(self, wanted: AllocationRequest) -> Waiting | None:
        """Request an allocation, unless one with its key exists. Return why that is to be repeated later."""

    def poll(self, keys: Options) -> Mapping[str, AllocationState]:
        """Return the state of these allocations by one query. A key that was never requested is missing."""

    def all_of(self, prefix: str) -> Mapping[str, AllocationState]:
        """Return the state of every allocation whose key begins so: what is left of a head if its records are lost."""

    def release(self, keys: Options) -> None:
        """End these allocations with all their processes; repeatable."""

    def prune(self, options: Mapping[str, Any], is_over: Callable[[str], bool], *, dry_run: bool) -> Sequence[str]:
        """End the allocations of any head that nothing uses, and those of keys that are over. Return their names."""

    def facts(self, options: Mapping[str, Any]) -> EngineFacts:
        """Return what it tells of itself. `options`: of the engine, as in the settings."""
