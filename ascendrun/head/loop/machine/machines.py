"""The machines of a head node: held while processes of ours may live there, closed by users and after failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ascendrun.core import machines
from ascendrun.core.errors import AscendrunError, ConflictError, NotFoundError
from ascendrun.core.events import Event
from ascendrun.core.hosts import Host
from ascendrun.core.jobs import endings, inputs
from ascendrun.core.jobs.job_copy import JobCopy
from ascendrun.head.agents.connections import Connections, ask
from ascendrun.head.loop.machine.reconcile import DEADLINE_S, MachineRecords, Reconciler
from ascendrun.head.loop.steps import JobSteps
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.control_messages import ChangeMachines
from ascendrun.head.protocol.remote import AgentConnection, Reply
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.head.state.store import Store
from ascendrun.node.layout import split_tag
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.loop.job.runner import JobRunner

CONNECT_S = 20.0
ANSWER_S = 5.0
"""Seconds for the answer of a host that a user says is gone: its connection may not have noticed."""
SAVE_S = 0.1
"""Seconds of one beat for storing machines: each has a file that is synced, and a thousand take many seconds."""


class Machines:
    """Use from the controller's thread. `adopt`: takes over an attempt by the copy of its job. What holds a machine:
    attempts whose end is not confirmed, leftovers, found attempts. What closes it: a drain or the loss that a user
    reports, and the quarantine after failures."""

    def __init__(self, store: Store, links: Connections, jobs: JobSteps, adopt: Callable[[JobCopy, int], bool]) -> None:
        self.records = MachineRecords(store.machines, links)
        self.reconciler = Reconciler(self.records, links, jobs, adopt, head_id=store.head_id)
        self._links, self._jobs = links, jobs
        self._releases: list[Callable[[], None]] = []

    def tick(self) -> None:
        """Query due nodes, and store what changed. May be called at any rate."""
        releases, self._releases = self._releases, []
        for again in releases:  # those that wait for a connection
            again()
        self.reconciler.tick()
        self.records.save(within_s=SAVE_S)  # last: without space the nodes are compared all the same

    # Holds

    def held(self) -> tuple[machines.Machine, ...]:
        """Return the machines that no job may use."""
        jobs = [(runner.job, runner.hosts) for runner in self._jobs if runner.job.held_hosts]
        return machines.held_machines(jobs, self.records.all()) if jobs or self.records.has_found else ()

    def release(
        self, name: str, by: str, done: Callable[[AscendrunError | None], None], *, until_mono: float | None = None
    ) -> None:
        """End what holds a machine by the word of `by`; refused while the machine shows processes.

        `done` gets None when it is on disk, or NotFoundError (it is free), ConflictError or StoreUnusableError.
        `until_mono`: when not to wait any longer for a connection that is being made; None: in CONNECT_S.
        """
        until_mono = time.monotonic() + CONNECT_S if until_mono is None else until_mono
        machine = next((one for one in self.held() if name in one.names), None)
        if machine is None:
            done(NotFoundError(Text("release.free", "{host} is not held", host=name), hint="ascendrun nodes"))
            return
        links = [link for link in self.reconciler.used_links() if machine.is_at(link.host, None)]
        link = next((link for link in links if link.is_up), None)
        if link is None and any(not link.failures for link in links) and time.monotonic() < until_mono:
            self._releases.append(lambda: self.release(name, by, done, until_mono=until_mono))
            return
        if link is None:
            done(self.end(machine, by))
            return
        waiting = {hold.tag for hold in machine.holds}
        alive: list[agent.Process] = []

        def take(tag: str, reply: Reply[agent.ProcessesReply]) -> None:
            waiting.discard(tag)
            alive.extend(reply.message.processes if reply.error is None else ())
            if waiting:
                return
            done(_refusal(name, alive[0], len(alive)) if alive else self.end(machine, by))

        for tag in tuple(waiting):
            ask(self._links, link.host, agent.Processes(tag), deadline_s=DEADLINE_S, then=partial(take, tag))

    def end(self, machine: machines.Machine, by: str) -> StoreUnusableError | None:
        """Store that nothing holds the machine any more; return why that was not possible."""
        try:
            self._free(machine, by)
            self.records.save()
        except StoreUnusableError as error:
            return error
        self._jobs.work_off()
        return None

    def _free(self, machine: machines.Machine, by: str) -> None:
        for hold in machine.holds:
            if hold.is_found:
                continue
            gone = hold.state is machines.MachineState.LEFTOVERS
            values, attempt = {"by": by, "state": hold.state.value}, split_tag(hold.tag)[1]
            event = Event("host-released", values, (hold.host,), attempt=attempt, at_s=time.time())
            self._jobs.record(hold.job, [event])
            change = endings.LeftoversGone(hold.host) if gone else endings.NodeLost(hold.host, "by-user")
            self._jobs.feed(hold.job, change)
        record = self.records.get(machine.key or "")
        if record is not None and record.found:
            self.records.keep(replace(record, found={}))

    def idle_hosts(self) -> tuple[Host, ...]:
        """Return the known machines that no job uses or holds and that nothing closes."""
        now_s = time.time()
        used = {address for machine in self.held() for address in machine.addresses}
        for runner in self._jobs:
            if not runner.job.is_terminal:
                names = {*runner.job.hosts, *runner.job.spares}
                used |= {machines.address_of(host) for host in runner.hosts if host.name in names}
        return tuple(
            record.hosts[-1]
            for record in self.records.all()
            if record.hosts and not record.closures(now_s) and not record.addresses & used
        )

    # Closures

    def change(self, request: ChangeMachines, done: Callable[[AscendrunError | None], None]) -> None:
        """Drain hosts, open them again, or believe the user that they are gone.

        `done` gets None when it is on disk, else nothing has changed: ConflictError if a host that is said to be gone
        answers now, StoreUnusableError.
        """
        is_asked = request.change == "lost" and not request.force
        waiting = [link for link in map(self._links.get, request.hosts) if link.is_up and is_asked]
        alive: list[str] = []

        def finish() -> None:
            if alive:
                message = Text("lost.responds", "{hosts:hosts} responded just now: not lost", hosts=alive)
                hint = Text(
                    "lost.responds.hint", "ascendrun drain {hosts:hosts}; off all the same: --force", hosts=alive
                )
                done(ConflictError(message, hint=hint))
                return
            try:
                self._change(request)
            except StoreUnusableError as error:
                done(error)
                return
            self._jobs.work_off()
            done(None)

        def take(link: AgentConnection, reply: Reply[agent.Pong]) -> None:
            waiting.remove(link)
            alive.extend([link.host.name] if reply.error is None else [])
            if not waiting:
                finish()

        asked = tuple(waiting)
        for link in asked:
            ask(self._links, link.host, agent.Ping(), deadline_s=ANSWER_S, then=partial(take, link))
        if not asked:
            finish()

    def _change(self, request: ChangeMachines) -> None:
        is_lost = request.change == "lost"
        reason = request.reason or (Text("machine.lost", "reported as lost") if is_lost else "")
        drain = machines.Closure(
            machines.MachineState.DRAINED,
            reason,
            request.by,
            time.time(),
            request.until_s,
            is_lost,
            request.at_s,
            request.now,
        )
        with self.records.reverting():
            if request.change in ("undrain", "deep"):
                self._open(request)
            else:
                self._drain(request.hosts, drain)
            self.records.save()
        for host in request.hosts:
            if is_lost:
                self._believe_lost(host, request.by)
            self._move_jobs(host, drain)
        self.records.save()

    def take_drains(self, drains: Sequence[machines.QueueDrain]) -> None:
        """Close the machines that administrators of the shared queue have drained, and open those again: those that
        have records or connections here."""
        known = {record.key: record for record in self.records.all()} if drains else {}
        for link in self._links if drains else ():
            known.update((record.key, record) for record in self.records.at(link.host))
        for record in machines.with_drains(known.values(), drains, time.time()):
            before, drain = known.get(record.key), record.queue_drain
            if before is not None and drain is not None and drain != before.queue_drain:
                self.records.keep(record)
                if drain.is_open(time.time()):
                    self._record_opened(record.hosts[-1], drain.by, "undrain")
                elif drain.starts_at_s is None:
                    self._record_closed(record.hosts[-1], drain)
                self._move_jobs(record.hosts[-1], drain)

    def _move_jobs(self, host: Host, drain: machines.Closure) -> None:
        for runner, name in tuple(self.runners_at(host)) if drain.moves else ():
            if runner.job.policy.max_restarts > 0:  # it restarts elsewhere, with time to save
                self._jobs.feed(runner.job.id, endings.StopStarted(name, "node", drain.message(), drain.since_s))

    def _drain(self, hosts: Sequence[Host], drain: machines.Closure) -> None:
        for host in hosts:
            for record in self.records.at(host):
                self.records.keep(replace(record, drain=drain))
            if drain.starts_at_s is None:
                self._record_closed(host, drain)

    def _open(self, request: ChangeMachines) -> None:
        """End what closes the hosts: all of it, or after a passed deep examination their quarantine only."""
        for host in request.hosts:
            for record in self.records.at(host):
                is_user = request.change == "undrain"
                is_open = record.quarantine is None and (record.drain is None or not is_user)
                drain = None if is_user else record.drain
                memory = {} if is_user else record.idle_memory
                opened = replace(record, drain=drain, quarantine=None, quarantines=0, strikes=(), finding=None)
                self.records.keep(replace(opened, idle_memory=memory, taken_since_s=None))
                if not is_open:
                    self._record_opened(host, request.by, request.change)

    def _record_opened(self, host: Host, by: str, how: str) -> None:
        self.records.announce(Event("host-opened", {"by": by, "how": how}, (host.name,), at_s=time.time()))

    def _record_closed(self, host: Host, closure: machines.Closure) -> None:
        values = {
            "state": closure.state.value,
            "by": closure.by or "controller",
            "reason": closure.reason or "-",
            "until_s": closure.until_s,
        }
        self.records.announce(Event("host-closed", values, (host.name,), at_s=closure.since_s))

    def note_failure(self, runner: JobRunner, event: Event) -> None:
        """Close the machines that the decision about a restart puts into quarantine; a strike for a link or a device
        that is blamed alone."""
        values = event.values
        reason = Text("machine.failed", "{kind} failure of {job}", kind=values["kind"], job=runner.job.id)
        hosts = {host.name: host for host in runner.hosts}
        closed = values.get("quarantine") or ()
        for name in closed:
            if name in hosts:
                self.quarantine(hosts[name], reason)
        is_credible = values["confidence"] in ("certain", "likely")
        alone = hosts.get(event.hosts[0]) if len(event.hosts) == 1 and not closed else None
        if alone is not None and is_credible and values["kind"] in ("device", "hccl"):
            self.strike(alone, reason)

    def quarantine(self, host: Host, reason: Text) -> None:
        """Close a machine that failed, until its time is over or `undrain`."""
        for record in self.records.at(host):
            if not record.closures(time.time()):
                self._keep_closed(host, record, record.quarantined(reason, time.time()))

    def strike(self, host: Host, reason: Text) -> None:
        """Count a failure that blames a machine alone; the second one puts it into quarantine."""
        for record in self.records.at(host):
            struck = record.struck(reason, time.time())
            if struck != record:
                values = {"reason": reason, "count": len(struck.strikes) or len(record.strikes) + 1}
                self.records.announce(Event("host-strike", values, (host.name,), at_s=time.time()))
                self._keep_closed(host, record, struck)

    def _keep_closed(self, host: Host, before: machines.MachineRecord, record: machines.MachineRecord) -> None:
        self.records.keep(record)
        if record.quarantine is not None and record.quarantine != before.quarantine:
            self._record_closed(host, record.quarantine)

    def take_examination(self, host: Host, finding: Text | None, *, is_strike: bool) -> None:
        """Note what a light examination found, None: the machine is ready. `is_strike`: it blames this machine."""
        for record in self.records.at(host):
            self.records.keep(replace(record, examined_at_s=time.time(), finding=finding))
        if finding is not None and is_strike:
            self.strike(host, finding)

    def runners_at(self, host: Host) -> Iterator[tuple[JobRunner, str]]:
        """Yield the jobs that may run processes on a machine, with their name of it."""
        places = self.records.places_of(host)
        for runner in self._jobs:
            for own in runner.hosts:
                node = next((node for node in runner.job.nodes if node.host == own.name), None)
                if node is not None and node.may_run_processes:
                    if {machines.address_of(own), machines.machine_id(own, node.machine_key)} & places:
                        yield runner, own.name

    def _believe_lost(self, host: Host, by: str) -> None:
        places = self.records.places_of(host)
        for runner in self._jobs:
            for own in runner.hosts:
                if machines.address_of(own) in places:
                    self._jobs.feed(runner.job.id, inputs.HostGivenUp(own.name, by))
        for runner, name in tuple(self.runners_at(host)):
            self._jobs.feed(runner.job.id, endings.NodeLost(name, "by-user"))
        for machine in self.held():
            if machine.is_at(host, None):
                self.end(machine, by)

    # Memory that is in use on the devices of idle machines

    def idle_memory(self, host: Host) -> Mapping[int, int]:
        """Return the least MB that were in use on each device of the machine before a start."""
        found = [record.idle_memory for record in self.records.at(host)]
        return {int(device): mb for memory in found for device, mb in memory.items()}

    def note_memory(self, host: Host, memory: Mapping[int, int], taken: Text | None) -> None:
        """Note the MB that are in use on each device before a start. `taken`: memory that was not released, None: all
        was; after TAKEN_S the machine goes into quarantine."""
        if not memory:
            return
        now_s = time.time()
        for record in self.records.at(host):
            known = record.idle_memory
            noted = replace(record, taken_since_s=record.taken_since_s or now_s)
            if taken is None:
                least = {str(device): min(mb, known.get(str(device), mb)) for device, mb in memory.items()}
                noted = replace(record, idle_memory={**known, **least}, taken_since_s=None)
            if noted != record:
                self.records.keep(noted)
            if noted.taken_since_s is not None and now_s - noted.taken_since_s > machines.TAKEN_S and taken is not None:
                self.quarantine(host, taken)


def _refusal(host: str, process: agent.Process, count: int) -> ConflictError:
    message = Text(
        "release.processes",
        "{host} responds and shows {count:plural process processes} of a job: pid {pid} ({comm}), state {state},"
        " waits in {channel}",
        host=host,
        count=count,
        pid=process.pid,
        comm=process.comm,
        state=process.state,
        channel=process.wait_channel or "-",
    )
    hint = Text("release.processes.hint", "reboot the host; it is free when the processes are gone")
    return ConflictError(message, hint=hint)
