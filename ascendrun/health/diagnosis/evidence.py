"""Evidence about one attempt: the input of a diagnosis, and its times on one clock."""

from __future__ import annotations

import re
from calendar import timegm
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from ascendrun.core.dataclass import dataclass
from ascendrun.core.events import Event
from ascendrun.core.jobs.reasons import Reason
from ascendrun.health.flight_recorder import Recorded
from ascendrun.text import Text


class Line(NamedTuple):
    """One line of a file. `at_s`: arrival, on its node's clock, None: not recorded. `stream`: out, err, plog,
    error (torch elastic's file), dmesg. `file` and `offset`: its place in the attempt's spool."""

    text: str
    file: str
    offset: int | None = None
    at_s: float | None = None
    stream: str = "err"


class Clock(Protocol):
    """A host's clock. `error_s`: uncertainty, None: never measured."""

    @property
    def error_s(self) -> float | None: ...

    def to_head_s(self, node_s: float) -> float: ...


@dataclass(frozen=True)
class FixedClock:
    """A clock with a constant offset to the head node's. `error_s` None: `offset_s` is a guess."""

    offset_s: float = 0.0
    error_s: float | None = None

    def to_head_s(self, node_s: float) -> float:
        return node_s - self.offset_s


@dataclass(frozen=True)
class RankEvidence:
    """One process and its output. All times are by its node's clock.

    `code`, `signal`, `exited_at_s`: all None: no exit was recorded. `stopped`: it ended after ascendrun stopped it.
    `start_failed`: why it could not be started. `device`: its number on the host. `error`: the lines of torch elastic's
    error file. `plog`: CANN's log for its pid; () none found; None: not collected. `last_step`: of its metrics.
    `inner`: it runs under a separate launcher (torchrun, deepspeed), whose summary named it.
    """

    rank: int
    host: str
    pid: int | None = None
    device: int | None = None
    code: int | None = None
    signal: int | None = None
    exited_at_s: float | None = None
    stopped: bool = False
    lingers: str | None = None
    start_failed: Text | str | None = None
    lines: tuple[Line, ...] = ()
    error: tuple[Line, ...] = ()
    plog: tuple[Line, ...] | None = None
    last_output_s: float | None = None
    last_step: int | None = None
    inner: bool = False

    @property
    def has_ended(self) -> bool:
        return self.code is not None or self.signal is not None

    @property
    def has_failed(self) -> bool:
        """Return whether it failed by itself."""
        return self.start_failed is not None or (not self.stopped and (self.signal is not None or bool(self.code)))


@dataclass(frozen=True)
class DeviceFact:
    """A problem of one device that a device tool reported after the failure."""

    device: int
    problem: str | Text
    file: str | None = None


@dataclass(frozen=True)
class HostEvidence:
    """One host. `stopped_at_s`: when its supervisor started to stop the ranks, on its clock; `stopped_by`: origin of
    the request. `lost`: why its ranks are gone (endings.NodeLost), None: not lost. `dmesg`: lines since the start;
    None: unreadable. `reachable` None: not monitored. `memory_free_bytes`, `disk_free_bytes`: minimum around the end.
    `missing`: unreadable items, with reasons. `facts`: of the start (survey.recorded_facts). `recorded`: by rank, the
    last collectives by the dump of its flight recorder. `groups`: of the hostfile, such as its rack.
    """

    host: str
    clock: Clock = field(default_factory=FixedClock)
    addresses: tuple[str, ...] = ()
    device_addresses: Mapping[str, int] = field(default_factory=dict)
    dmesg: tuple[Line, ...] | None = None
    devices: tuple[DeviceFact, ...] = ()
    stopped_at_s: float | None = None
    stopped_by: str | None = None
    lost: str | None = None
    supervisor_lost: bool = False
    reachable: bool | None = None
    has_ended: bool = False
    memory_free_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_free_bytes: int | None = None
    missing: tuple[Text, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    recorded: Mapping[int, Sequence[Recorded]] = field(default_factory=dict)
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """One attempt of one job. `state`: of the job; `cause`: why it was stopped (core.job.Cause), None: not stopped.
    `launcher`: spawn, ray, or the launcher whose process on each node is in `ranks` instead of its ranks. `world_size`:
    expected ranks. Timeouts: HCCL's effective values. `events`: of this attempt. `needs`: the job that it requires, "":
    none. `labels`: names of the ranks of roles.
    """

    job: str
    state: str
    attempt: int = 1
    name: str = ""
    reason: Reason | None = None
    cause: str | None = None
    device_type: str = "cpu"
    launcher: str = "spawn"
    world_size: int = 0
    connect_timeout_s: float = 120.0
    exec_timeout_s: float = 1836.0
    now_s: float = 0.0
    started_at_s: float | None = None
    ended_at_s: float | None = None
    ranks: tuple[RankEvidence, ...] = ()
    hosts: tuple[HostEvidence, ...] = ()
    events: tuple[Event, ...] = ()
    slow: tuple[Text, ...] = ()
    missing: tuple[Text, ...] = ()
    needs: str = ""
    labels: Mapping[int, str] = field(default_factory=dict)

    def host(self, name: str) -> HostEvidence:
        """Return a host's evidence; never fails, since it may be empty."""
        return self._by_name.get(name) or HostEvidence(name)

    @cached_property
    def _by_name(self) -> Mapping[str, HostEvidence]:
        return {one.host: one for one in reversed(self.hosts)}

    @property
    def silent_hosts(self) -> tuple[str, ...]:
        """Return the unreachable hosts whose end is not known."""
        return tuple(one.host for one in self.hosts if one.reachable is False and not one.has_ended)

    @cached_property
    def _by_address(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for one in reversed(self.hosts):
            found.update((address, one.host) for address in (*one.addresses, *one.device_addresses))
        return {**found, **{one.host: one.host for one in self.hosts}}

    def host_at(self, address: str) -> str | None:
        """Return the job's host with this name (domain optional) or address; None: not a host of the job."""
        return self._by_address.get(address) or self._by_address.get(address.partition(".")[0])

    def ranks_of(self, host: str) -> tuple[RankEvidence, ...]:
        return tuple(rank for rank in self.ranks if rank.host == host)


UNKNOWN_CLOCK_S = 180.0
"""Maximum assumed error of a clock that was never measured; doctor rejects larger errors."""
_STAMP = re.compile(r"([1-9]\d{3})-(0[1-9]|1[0-2])-(\d\d)[-T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d{3})(?:\.?(\d{3}))?)?")


@dataclass(frozen=True)
class Moment:
    """A time. `at_s`: by the head node's clock, +-`error_s`; times of one host are compared without error."""

    at_s: float
    error_s: float
    host: str

    def is_before(self, other: Moment, *, by_s: float = 0.0) -> bool:
        """Return whether it is certainly earlier, by more than `by_s`."""
        error_s = 0.0 if self.host == other.host else self.error_s + other.error_s
        return self.at_s + error_s + by_s < other.at_s


def moment(evidence: Evidence, host: str, node_s: float | None) -> Moment | None:
    """Return the node's time without the host's clock offset; None for None."""
    if node_s is None:
        return None
    clock = evidence.host(host).clock
    error_s = UNKNOWN_CLOCK_S if clock.error_s is None else clock.error_s
    return Moment(clock.to_head_s(node_s), error_s, host)


def surely_before(one: Moment | None, other: Moment | None, *, by_s: float = 0.0) -> bool:
    """Return whether both times are known, and the first is certainly earlier."""
    return one is not None and other is not None and one.is_before(other, by_s=by_s)


def earliest(moments: Iterable[Moment | None]) -> Moment | None:
    known = [one for one in moments if one is not None]
    return min(known, key=lambda one: one.at_s, default=None)


def stamp_of(text: str) -> float | None:
    """Return the time in a log line, interpreted as UTC; None: not found."""
    found = _STAMP.search(text[:200])
    if found is None:
        return None
    return timegm(tuple(map(int, found.groups()[:6]))) + int(found.group(7) or 0) / 1e3 + int(found.group(8) or 0) / 1e6


def with_stamps(lines: Sequence[Line], *, until_s: float | None) -> list[Line]:
    """Return lines of a log in its node's local time, with that time as `at_s`.

    The zone is not logged. The last line is shortly before the end of the process, which determines the zone as a
    multiple of 15 minutes. Without `until_s` the zone is assumed to be UTC.
    """
    stamps = [stamp_of(line.text) for line in lines]
    last = max((stamp for stamp in stamps if stamp is not None), default=None)
    shift_s = 0.0
    if last is not None and until_s is not None:
        shift_s = 900.0 * round((until_s - last) / 900.0)
    return [line if stamp is None else line._replace(at_s=stamp + shift_s) for line, stamp in zip(lines, stamps)]
