"""Machines that jobs have used, and what holds them: processes that may live there, so that no job may start.

What holds a machine follows from the records of jobs, and from attempts that no record explains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from enum import Enum
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.job import Job, Leftover
from ascendrun.text import Text


class MachineState(str, Enum):
    """State of a machine for new placements, worst first. UNCONFIRMED: the end of all processes of a job is unknown
    there. LEFTOVERS: processes are known to live there. QUARANTINED: closed since it failed. DRAINED: closed by a user;
    DRAINING: and a job still uses it. HELD, SPARE: a job uses it, or keeps it as a replacement."""

    UNCONFIRMED = "unconfirmed"
    LEFTOVERS = "leftovers"
    QUARANTINED = "quarantined"
    DRAINED = "drained"
    DRAINING = "draining"
    HELD = "held"
    SPARE = "spare"
    FREE = "free"


NEVER = float("inf")
ADDRESS_KEY = "address "
STRIKE_S = 60.0
TAKEN_S = 60.0
"""Seconds after which a machine with memory of its devices in use by no known process goes into quarantine."""
STRIKES_S = 7 * 86_400.0
"""Seconds in which two failures that blame a machine alone put it into quarantine."""
QUARANTINE_S = 86_400.0
"""Length of the first quarantine, doubled with each further one up to STRIKES_S."""


@dataclass(frozen=True)
class Closure:
    """Why no job is placed on a machine, until `until_s` (UTC; None: without limit). `state`: DRAINED or QUARANTINED.
    `reason`: what the user gave, or why it was put into quarantine. `by`: the user, "": the controller. `is_lost`: the
    user has given up the machine with its disks. `starts_at_s`: when it begins, None: at once. `moves`: jobs there that
    may restart are stopped, and continue elsewhere."""

    state: MachineState
    reason: Text | str
    by: str
    since_s: float
    until_s: float | None = None
    is_lost: bool = False
    starts_at_s: float | None = None
    moves: bool = False

    def is_planned(self, now_s: float) -> bool:
        return self.starts_at_s is not None and now_s < self.starts_at_s

    def is_open(self, now_s: float) -> bool:
        """Return whether its time is over."""
        return self.until_s is not None and now_s >= self.until_s

    def bars(self, now_s: float, end_s: float) -> bool:
        """Return whether it is in the way of a job that starts now and ends at `end_s`."""
        return not self.is_open(now_s) and (not self.is_planned(now_s) or (self.starts_at_s or 0.0) < end_s)

    def message(self, now_s: float = NEVER) -> Text:
        """Return it as text; `now_s`: as it is then, by default after its start."""
        values = {"by": self.by, "reason": self.reason or "-", "since_s": self.since_s, "until_s": self.until_s}
        if self.starts_at_s is not None and self.is_planned(now_s):
            return Text(
                "machine.drain-planned",
                "to be drained at {at_s:clock} by {by}: {reason}",
                at_s=self.starts_at_s,
                **values,
            )
        if self.state is MachineState.QUARANTINED:
            return Text("machine.quarantined", "quarantined until {until_s:clock}: {reason}", **values)
        if self.until_s is None:
            return Text("machine.drained", "drained by {by}: {reason}", **values)
        return Text("machine.drained-until", "drained by {by} until {until_s:clock}: {reason}", **values)


@dataclass(frozen=True)
class Hold:
    """Why no job is placed on a machine. `host`: its name in the job `job`; `since_s`: UTC seconds.

    `processes`: (), if they are not known one by one. `is_found`: the attempt `tag` runs, and no record explains it.
    """

    host: str
    state: MachineState
    job: str
    tag: str
    since_s: float
    processes: tuple[Leftover, ...] = ()
    is_found: bool = False

    def reason(self) -> Text:
        values: dict[str, Any] = {"host": self.host, "job": self.job, "since_s": self.since_s}
        if self.is_found:
            return Text(
                "machine.found", "attempt {tag} of an unknown job, found at {since_s:clock}", tag=self.tag, **values
            )
        if not self.processes:
            return Text(
                "machine.unconfirmed", "unconfirmed since {since_s:clock} that the processes of {job} exited", **values
            )
        one = self.processes[0]
        values.update(pid=one.pid, comm=one.comm or "-", state=one.state or "-", channel=one.wait_channel or "-")
        return Text(
            "machine.leftovers",
            "process {pid} ({comm}) of {job} survives SIGKILL since {since_s:clock}: state {state} in {channel}",
            **values,
        )


@dataclass(frozen=True)
class MachineRecord:
    """What is stored of a machine. `key`: see `machine_id`. `hosts`: how it was reached, one for each address.
    `boot_id`, `incarnation`: as last reported, at `heard_at_s`. `found`: by tag of each attempt that no record
    explains, when it was first seen. `drain`, `quarantine`: what closes it, None: nothing. `queue_drain`: the newest
    one of an administrator of the shared queue, also if it has ended. `strikes`: when failures blamed it alone, UTC
    seconds. `quarantines`: how often it was in quarantine since a user or an examination ended
    one. `examined_at_s`: newest light examination in the background, None: none; `finding`: what it found, None: it
    is ready. `idle_memory`: by device, the least MB of its memory in use before a start by no listed process.
    `taken_since_s`: since when a device has much more in use, None: it has not."""

    key: str
    hosts: tuple[Host, ...]
    boot_id: str | None = None
    incarnation: str | None = None
    heard_at_s: float = 0.0
    found: Mapping[str, float] = field(default_factory=dict)
    drain: Closure | None = None
    queue_drain: Closure | None = None
    quarantine: Closure | None = None
    strikes: tuple[float, ...] = ()
    quarantines: int = 0
    examined_at_s: float | None = None
    finding: Text | None = None
    idle_memory: Mapping[str, int] = field(default_factory=dict)
    taken_since_s: float | None = None

    def closures(self, now_s: float) -> tuple[Closure, ...]:
        """Return what closes the machine now, the worst first."""
        known = self.quarantine, self.queue_drain, self.drain
        found = (one for one in known if one is not None and not one.is_open(now_s))
        return tuple(one for one in found if not one.is_planned(now_s))

    def planned(self, now_s: float) -> Closure | None:
        """Return the drain that begins later, the first of them, None: there is none."""
        found = [one for one in (self.queue_drain, self.drain) if one is not None and one.is_planned(now_s)]
        found = [one for one in found if not one.is_open(now_s)]
        return min(found, key=lambda one: one.starts_at_s or 0.0, default=None)

    def opened_for(self, users: Collection[str | None]) -> MachineRecord:
        """Return the record as examinations of these users see it: what another one drained for all is closed."""
        of_queue = None if self.queue_drain is None or self.queue_drain.by in users else self.queue_drain
        return replace(self, drain=None, queue_drain=of_queue, quarantine=None)

    def quarantined(self, reason: Text, now_s: float) -> MachineRecord:
        """Return the record in quarantine, longer each time."""
        length_s = min(QUARANTINE_S * 2**self.quarantines, STRIKES_S)
        closure = Closure(MachineState.QUARANTINED, reason, "", now_s, now_s + length_s)
        return replace(self, quarantine=closure, quarantines=self.quarantines + 1, strikes=())

    def struck(self, reason: Text, now_s: float) -> MachineRecord:
        """Return the record after a failure that blames the machine alone; the second one quarantines it. Several
        within STRIKE_S are one failure, which several jobs report."""
        if self.strikes and now_s - self.strikes[-1] < STRIKE_S:
            return self
        strikes = (*(at_s for at_s in self.strikes if now_s - at_s < STRIKES_S), now_s)
        return replace(self, strikes=strikes) if len(strikes) < 2 else self.quarantined(reason, now_s)

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(map(address_of, self.hosts))

    @property
    def is_identified(self) -> bool:
        """Return whether `key` is of the machine; before its agent has reported one, it is the address."""
        return not self.key.startswith(ADDRESS_KEY)


def absorb(record: MachineRecord, others: Iterable[MachineRecord]) -> MachineRecord:
    """Return the record of a machine with what was noted at its addresses before they had a machine."""
    for one in others if record.is_identified else ():
        if not one.is_identified and one.addresses & record.addresses:
            drain, quarantine = record.drain or one.drain, record.quarantine or one.quarantine
            strikes, of_queue = tuple(sorted({*record.strikes, *one.strikes})), record.queue_drain or one.queue_drain
            record = replace(record, drain=drain, queue_drain=of_queue, quarantine=quarantine, strikes=strikes)
    return record


@dataclass(frozen=True)
class QueueDrain:
    """What an administrator of a shared queue has decided last about a machine: a drain, which has ended at once if it
    was `undrain`. `key`: see `machine_id`, None: not known; `hosts`: its addresses, without logins."""

    key: str | None
    hosts: tuple[Host, ...]
    closure: Closure

    @property
    def places(self) -> frozenset[str]:
        """Return its key and addresses."""
        return frozenset((*([] if self.key is None else [self.key]), *map(address_of, self.hosts)))

    @classmethod
    def of(cls, host: Host, records: Iterable[MachineRecord], closure: Closure) -> QueueDrain:
        """Make the drain of a host with what is known of its machine."""
        at = [record for record in records if address_of(host) in record.addresses]
        key = next((record.key for record in at if record.is_identified), None)
        hosts = {address_of(one): one for one in (host, *(one for record in at for one in record.hosts))}
        return cls(key, tuple(Host(one.name, addr=one.addr, port=one.port) for one in hosts.values()), closure)


def queue_drains(records: Iterable[MachineRecord]) -> list[QueueDrain]:
    """Return the drains of administrators that records have."""
    return [
        QueueDrain.of(one.hosts[-1], (one,), one.queue_drain)
        for one in records
        if one.queue_drain is not None and one.hosts
    ]


def merge_drains(known: Sequence[QueueDrain], new: Sequence[QueueDrain]) -> tuple[QueueDrain, ...]:
    """Return drains of a queue with newer ones, which have all places of those that they replace."""
    for one in new:
        old = [each for each in known if each.places & one.places]
        hosts = {address_of(host): host for each in (*old, one) for host in each.hosts}
        key = one.key or next((each.key for each in old if each.key), None)
        known = (*(each for each in known if each not in old), replace(one, key=key, hosts=tuple(hosts.values())))
    return tuple(known)


def with_drains(
    records: Iterable[MachineRecord], drains: Iterable[QueueDrain], now_s: float
) -> tuple[MachineRecord, ...]:
    """Return records of machines with the newest drains of their queue; drained machines that have none get one."""
    found: list[MachineRecord] = []
    newest = {place: one for one in sorted(drains, key=lambda one: one.closure.since_s) for place in one.places}
    unknown = {id(one): one for one in newest.values()}
    for record in records:
        at = [newest[place] for place in (record.key, *record.addresses) if place in newest]
        for one in sorted(at, key=lambda one: one.closure.since_s):
            unknown.pop(id(one), None)
            if record.queue_drain is None or record.queue_drain.since_s < one.closure.since_s:
                record = replace(record, queue_drain=one.closure)
        found.append(record)
    for one in (one for one in unknown.values() if not one.closure.is_open(now_s)):
        key = one.key or ADDRESS_KEY + address_of(one.hosts[0])
        found.append(MachineRecord(key, one.hosts, queue_drain=one.closure))
    return tuple(found)


@dataclass(frozen=True)
class Machine:
    """A machine that is not free. `key` None: it has not reported one. `names`: in hostfiles."""

    key: str | None
    names: tuple[str, ...]
    addresses: frozenset[str]
    holds: tuple[Hold, ...]

    @property
    def state(self) -> MachineState:
        states = {hold.state for hold in self.holds}
        return MachineState.LEFTOVERS if MachineState.LEFTOVERS in states else MachineState.UNCONFIRMED

    def is_at(self, host: Host, key: str | None) -> bool:
        """Return whether `host` of some hostfile is this machine. `key`: what it reported, None: nothing yet."""
        return address_of(host) in self.addresses or (self.key is not None and machine_id(host, key) == self.key)


def address_of(host: Host) -> str:
    """Return the address of a host, equal for hosts that are certainly one machine. An engine gives the address of a
    host that has gone to another one."""
    address = host.name if host.engine else host.addr or host.name
    return f"local/{host.name}" if host.is_local else f"{address.lower()}:{host.port or 22}"


def machine_id(host: Host, key: str | None) -> str | None:
    """Return the key of a machine; hosts with `addr=local` are machines of their own, with their own directories."""
    return f"{key}/{host.name}" if key is not None and host.is_local else key


def held_machines(jobs: Iterable[tuple[Job, Sequence[Host]]], records: Iterable[MachineRecord]) -> tuple[Machine, ...]:
    """Return the machines that are not free. `jobs`: with their hosts; jobs that hold nothing do no harm."""
    records = tuple(records)
    keys = {address: record.key for record in records if record.is_identified for address in record.addresses}
    found: dict[str, Machine] = {
        record.key: _machine(record, [_found(record, tag, since_s) for tag, since_s in sorted(record.found.items())])
        for record in records
        if record.found
    }
    for job, hosts in jobs:
        for hold in job_holds(job):
            host = next((one for one in hosts if one.name == hold.host), Host(hold.host))
            key = machine_id(host, job.node(hold.host).machine_key) or keys.get(address_of(host))
            place = key or address_of(host)
            if place not in found:
                record = next((one for one in records if one.key == key), MachineRecord(place, (host,)))
                found[place] = replace(_machine(record, []), key=key)
            one = found[place]
            found[place] = replace(
                one,
                names=tuple(dict.fromkeys((*one.names, host.name))),
                addresses=one.addresses | {address_of(host)},
                holds=(*one.holds, hold),
            )
    return tuple(found.values())


def _machine(record: MachineRecord, holds: Sequence[Hold]) -> Machine:
    return Machine(record.key, tuple(dict.fromkeys(host.name for host in record.hosts)), record.addresses, tuple(holds))


def _found(record: MachineRecord, tag: str, since_s: float) -> Hold:
    job = tag.rpartition(".")[0].partition("-")[2]
    return Hold(record.hosts[0].name, MachineState.LEFTOVERS, job, tag, since_s, is_found=True)


def job_holds(job: Job) -> tuple[Hold, ...]:
    """Return what the job holds after its end. While it lives its claims hold its hosts."""
    held = job.held_hosts
    since_s = job.since_s if job.ended_at_s is None else job.ended_at_s
    return tuple(
        Hold(
            node.host,
            MachineState.LEFTOVERS if node.leftovers else MachineState.UNCONFIRMED,
            job.id,
            job.run_id,
            min((one.since_ns / 1e9 for one in node.leftovers if one.since_ns is not None), default=since_s),
            node.leftovers,
        )
        for node in job.nodes
        if node.host in held
    )
