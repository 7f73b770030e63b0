"""The machines of a head node: compared with the records of its jobs, held while processes of ours may live there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError, ConflictError, NotFoundError
from ascendrun.core.events import Event
from ascendrun.core.hosts import Host
from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.jobs.job_copy import JobCopy
from ascendrun.core.jobs.reasons import Detail, because
from ascendrun.core.jobs.reconcile import AttemptState, NodeState, Verdict, compare
from ascendrun.core.jobs.restart import avoided_hosts, excluded_hosts
from ascendrun.core.jobs.schedule import Claim, Contender
from ascendrun.core.machines import (
    ADDRESS_KEY,
    TAKEN_S,
    Closure,
    Machine,
    MachineRecord,
    MachineState,
    address_of,
    held_machines,
    machine_id,
)
from ascendrun.head.agents.connections import Connections, dialled
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.control_messages import ChangeMachines
from ascendrun.head.protocol.messages import Done
from ascendrun.head.protocol.remote import AgentConnection, Reply
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.head.state.store import Store
from ascendrun.node.layout import make_run, split_tag
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.loop.job.runner import JobRunner

LOOK_S = 60.0
"""Interval in which nodes are compared with the records; also at every new connection."""
DEADLINE_S = 30.0
CONNECT_S = 20.0
FOUND_GRACE_S = 30.0
"""Grace period of an attempt whose job file is unknown: the default of `checkpoint.grace_period_s`."""


@dataclass(frozen=True)
class JobAccess:
    """What the comparison uses of the live jobs. `runners` iterates over a copy; `find` returns a job by its id, None:
    unknown; `feed` and `record` give an input or events to a job with a runner; `settle` handles and stores all inputs.
    `adopt` makes a job of the copy and the number of an attempt that runs."""

    runners: Callable[[], Iterator[JobRunner]]
    find: Callable[[str], Job | None]
    feed: Callable[[str, inputs.JobInput], None]
    record: Callable[[str, Sequence[Event]], None]
    settle: Callable[[], None]
    adopt: Callable[[JobCopy, int], None]


class Machines:
    """Use from the controller's thread. `post` runs a call there."""

    def __init__(
        self, store: Store, links: Connections, jobs: JobAccess, *, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self._store, self._links, self._jobs, self._post = store, links, jobs, post
        self._records = {record.key: record for record in store.machines.all()}
        self._unsaved: set[str] = set()
        self._events: list[Event] = []
        self.version = 0
        self._due_mono = 0.0
        self._releases: list[Callable[[], None]] = []
        self._strays: dict[tuple[int, str], float] = {}

    @property
    def has_found(self) -> bool:
        return any(record.found for record in self._records.values())

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved or self._events)

    # What nodes report

    def on_up(self, link: AgentConnection) -> None:
        """Compare a node that responds (again) with the records, before anything is requested from it."""
        info = link.info
        seen = NodeState(info.boot_id, info.incarnation, None if info.live is None else frozenset(info.live))
        self._note(link, seen)
        self._compare_all(link, seen)

    def tick(self) -> None:
        """Query due nodes, and store what changed. May be called at any rate."""
        releases, self._releases = self._releases, []
        for again in releases:
            again()
        if time.monotonic() >= self._due_mono:
            self._due_mono = time.monotonic() + LOOK_S
            for link in self._used_links():
                if link.is_up:
                    link.call(agent.Live(), deadline_s=DEADLINE_S, done=partial(self._take_live, link))
        self._save()  # last: without space the nodes are compared all the same

    def _save(self) -> None:
        """Store what changed. Raises StoreUnusableError: it remains to be stored."""
        if self.has_unsaved:
            self._store.machines.save([self._records[key] for key in self._unsaved], self._events)
            self._unsaved.clear()
            self._events.clear()

    def save_all(self) -> None:
        """Store every machine with the next tick: the store may have been rebuilt."""
        self._unsaved |= set(self._records)

    def _used_links(self) -> tuple[AgentConnection, ...]:
        """Return the connections to hosts where processes of ours may live."""
        links = {id(link): link for runner in self._jobs.runners() for link in runner.started_links()}
        for record in self._records.values():
            for host in record.hosts if record.found else ():
                link = self._links.get(host)
                links[id(link)] = link
        return tuple(links.values())

    def _take_live(self, link: AgentConnection, reply: Reply[agent.LiveReply]) -> None:
        if reply.error is None:
            told = reply.message
            seen = NodeState(told.boot_id, told.incarnation, None if told.live is None else frozenset(told.live))
            self._post(lambda: self._compare_all(link, seen))

    def _note(self, link: AgentConnection, seen: NodeState) -> None:
        """Keep how a machine is reached, if a job uses it."""
        record = replace(self._record_of(link), boot_id=seen.boot_id, incarnation=seen.incarnation)
        is_used = bool(record.key) and any(runner.uses(link) for runner in self._jobs.runners())
        if is_used and record != self._records.get(record.key):
            self._keep(record)

    def _keep(self, record: MachineRecord) -> None:
        self._records[record.key] = replace(record, heard_at_s=time.time())
        self.version += 1
        self._unsaved.add(record.key)

    # Comparison with the records

    def _compare_all(self, link: AgentConnection, seen: NodeState) -> None:
        tags = {
            runner.job.run_id
            for runner in self._jobs.runners()
            if runner.job.go_sent_at_s is not None and runner.uses(link)
        }
        for tag in seen.live or ():
            if self._job_id(tag) is not None:
                tags.add(tag)
        for tag in sorted(tags):
            self._compare(link, tag, seen, None)
        if seen.live is not None:
            record = self._record_of(link)
            self._forget_found(record, set(record.found) - seen.live)

    def _job_id(self, tag: str) -> str | None:
        """Return the job of a tag, None: not a tag, or of another head node."""
        try:
            run, _ = split_tag(tag)
        except ValueError:
            return None
        prefix = make_run(self._store.head_id, "")
        return run[len(prefix) :] if run.startswith(prefix) else None

    def _compare(self, link: AgentConnection, tag: str, seen: NodeState, attempt: AttemptState | None) -> None:
        job_id = self._job_id(tag)
        assert job_id is not None, "a tag of this head node"
        job = self._jobs.find(job_id)
        runner = next((one for one in self._jobs.runners() if one.job.id == job_id), None)
        name = runner.uses(link) if runner is not None else link.host.name
        host = name if job is not None and name in job.hosts else None
        verdict = compare(job, host, tag, seen, attempt)
        if verdict is not Verdict.FOUND:
            self._forget_found(self._record_of(link), {tag})
        if verdict is Verdict.AGREES:
            if runner is not None and host is not None and tag in (seen.live or ()):
                self._complete(runner, host, link, seen)
            return
        if verdict is Verdict.QUERY:
            self._query(link, tag, seen)
        elif verdict is Verdict.FOUND:
            self._add_found(link, tag)
            self._query_copy(link, tag)
        elif verdict is Verdict.STOP and (attempt is None or self._is_twice(link, tag)):
            self._stop(link, tag, seen)
        elif verdict is Verdict.ABORT:
            self._abort(link, tag, seen)
        elif runner is not None and host is not None:
            self._act(runner, host, verdict)
            if verdict is Verdict.REBOOTED and tag in (seen.live or ()):
                self._stop(link, tag, seen)  # its disk has survived: the end is recorded there, and copied

    def _complete(self, runner: JobRunner, host: str, link: AgentConnection, seen: NodeState) -> None:
        """Give a job that was rebuilt without it the identity of the node that runs it: its next reboot is then one."""
        node = runner.job.node(host)
        if node.may_run_processes and node.boot_id is None:
            identity = {"machine_key": link.info.machine_key, "incarnation": seen.incarnation}
            change = inputs.NodeReported(host, seen.boot_id, node.clock_offset_s, **identity)
            self._jobs.feed(runner.job.id, change)

    def _is_twice(self, link: AgentConnection, tag: str) -> bool:
        """Return whether an attempt was without its directory at the previous look too: a home that is not mounted for
        a moment must not end ranks."""
        now = time.monotonic()
        self._strays = {key: at for key, at in self._strays.items() if now - at < 3 * LOOK_S}
        return now - self._strays.setdefault((id(link), tag), now) > LOOK_S / 2

    def _act(self, runner: JobRunner, host: str, verdict: Verdict) -> None:
        if verdict is Verdict.GO:
            runner.send_go(host)
            return
        lost = {Verdict.REBOOTED: "rebooted", Verdict.GONE: "directory-gone"}.get(verdict)
        if lost is not None:
            runner.ending.take(host)
        self._jobs.feed(runner.job.id, inputs.LeftoversGone(host) if lost is None else inputs.NodeLost(host, lost))
        runner.copies.present.follow_later(
            host, wait_s=0.0
        )  # its disk may have survived, with the last lines of the logs

    def _query(self, link: AgentConnection, tag: str, seen: NodeState) -> None:
        def take(reply: Reply[agent.ProcessesReply]) -> None:
            if reply.error is None:
                told = reply.message
                attempt = AttemptState(told.phase, bool(told.processes) or told.supervisor)
                self._post(lambda: self._compare(link, tag, seen, attempt))

        link.call(agent.Processes(tag), deadline_s=DEADLINE_S, done=take)

    def _stop(self, link: AgentConnection, tag: str, seen: NodeState) -> None:
        """End an attempt by its tag. The node's answer, or the next look, shows whether it has gone."""

        def take(reply: Reply[agent.ProcessesReply]) -> None:
            if reply.error is None and not reply.message.processes and not reply.message.supervisor:
                gone = replace(seen, live=(seen.live or frozenset()) - {tag})
                self._post(lambda: self._compare(link, tag, gone, AttemptState(None, processes=False)))

        def query(reply: Reply[Done]) -> None:
            link.call(agent.Processes(tag), deadline_s=DEADLINE_S, done=take)

        link.call(agent.Stop(tag, True, 0.0), deadline_s=DEADLINE_S, done=query)

    def _abort(self, link: AgentConnection, tag: str, seen: NodeState) -> None:
        """Remove a prepared attempt; end it if it was started all the same."""

        def take(reply: Reply[Done]) -> None:
            if reply.error is not None and reply.error.code == "attempt-running":
                self._post(lambda: self._stop(link, tag, seen))

        link.call(agent.Abort(tag), deadline_s=DEADLINE_S, done=take)

    # Attempts that no record explains

    def _add_found(self, link: AgentConnection, tag: str) -> None:
        record = self._record_of(link)
        if record.key and tag not in record.found:
            self._keep(replace(record, found={**record.found, tag: time.time()}))

    def _record_of(self, link: AgentConnection) -> MachineRecord:
        """Return the record of the machine, a new one if it has none, with the address of this connection.

        The key is "" if its agent is of a release that reports none.
        """
        key = machine_id(link.host, link.info.machine_key) or ""
        record = self._records.get(key) or MachineRecord(key, ())
        return (
            record if address_of(link.host) in record.addresses else replace(record, hosts=(*record.hosts, link.host))
        )

    def _forget_found(self, record: MachineRecord, tags: Set[str]) -> None:
        if not tags.isdisjoint(record.found):
            self._keep(replace(record, found={tag: at_s for tag, at_s in record.found.items() if tag not in tags}))

    def _query_copy(self, link: AgentConnection, tag: str) -> None:
        """Adopt the attempt if the node has a copy of its job."""

        def take(reply: Reply[agent.CopyReply]) -> None:
            if reply.error is None and reply.message.job is not None:
                self._post(partial(self._adopt, tag, reply.message.job))

        link.call(agent.Copy(tag), deadline_s=DEADLINE_S, done=take)

    def _adopt(self, tag: str, values: Mapping[str, Any]) -> None:
        run, attempt = split_tag(tag)
        try:
            copy = JobCopy.from_json(values)
        except ValueError:
            return  # it stays found
        known = self._jobs.find(copy.id)
        is_old = known is not None and (known.go_sent_at_s is not None or known.attempt > attempt or known.is_terminal)
        if copy.run == run and not is_old:
            self._jobs.adopt(copy, attempt)
            for record in tuple(self._records.values()):
                self._forget_found(record, {tag})

    def stop_found(self, ref: str, *, now: bool) -> bool:
        """Stop the found attempts with this tag or job id, on all machines; False: there are none.

        They are listed until the nodes have recorded their end.
        """
        found = [
            (self._links.get(host), tag)
            for record in self._records.values()
            for tag in record.found
            if ref in (tag, self._job_id(tag))
            for host in record.hosts
        ]
        for link, tag in found:
            link.call(agent.Stop(tag, now, FOUND_GRACE_S), deadline_s=DEADLINE_S, done=self._look_soon)
        return bool(found)

    def _look_soon(self, reply: object) -> None:
        self._due_mono = 0.0  # any thread: the next tick looks

    # Release

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
        links = [link for link in self._used_links() if machine.is_at(link.host, None)]
        link = next((link for link in links if link.is_up), None)
        if link is None and any(not link.failures for link in links) and time.monotonic() < until_mono:
            self._releases.append(lambda: self.release(name, by, done, until_mono=until_mono))
            return
        if link is None:
            done(self._end_holds(machine, by))
            return
        waiting = {hold.tag for hold in machine.holds}
        alive: list[agent.Process] = []

        def take(tag: str, reply: Reply[agent.ProcessesReply]) -> None:
            waiting.discard(tag)
            alive.extend(reply.message.processes if reply.error is None else ())
            if waiting:
                return
            done(_refusal(name, alive[0], len(alive)) if alive else self._end_holds(machine, by))

        for tag in tuple(waiting):
            link.call(
                agent.Processes(tag),
                deadline_s=DEADLINE_S,
                done=lambda reply, tag=tag: self._post(partial(take, tag, reply)),  # type: ignore[misc]
            )

    def _end_holds(self, machine: Machine, by: str) -> StoreUnusableError | None:
        """Store that nothing holds the machine any more; return why that was not possible."""
        try:
            self._free(machine, by)
            self._save()
        except StoreUnusableError as error:
            return error
        self._jobs.settle()
        return None

    def _free(self, machine: Machine, by: str) -> None:
        for hold in machine.holds:
            if hold.is_found:
                continue
            gone = hold.state is MachineState.LEFTOVERS
            values, attempt = {"by": by, "state": hold.state.value}, split_tag(hold.tag)[1]
            event = Event("host-released", values, (hold.host,), attempt=attempt, at_s=time.time())
            self._jobs.record(hold.job, [event])
            change = inputs.LeftoversGone(hold.host) if gone else inputs.NodeLost(hold.host, "by-user")
            self._jobs.feed(hold.job, change)
        record = self._records.get(machine.key or "")
        if record is not None and record.found:
            self._keep(replace(record, found={}))

    # Drain, quarantine, loss

    def change(self, request: ChangeMachines) -> None:
        """Drain hosts, open them again, or believe the user that they are gone. On return it is on disk.

        Raises ConflictError if a host that is said to be gone responds, and StoreUnusableError; nothing is changed
        then.
        """
        links = [self._links.get(host) for host in request.hosts if request.change == "lost"]
        for link in links:
            if link.is_up:
                message = Text("lost.responds", "{host} responds; it is not lost", host=link.host.name)
                raise ConflictError(message, hint=f"ascendrun drain {link.host.name}")
        is_lost = request.change == "lost"
        reason = request.reason or (Text("machine.lost", "reported as lost") if is_lost else "")
        drain = Closure(MachineState.DRAINED, reason, request.by, time.time(), request.until_s, is_lost)
        before = dict(self._records), set(self._unsaved), list(self._events)
        try:
            if request.change in ("undrain", "deep"):
                self._open(request)
            else:
                self._drain(request.hosts, drain)
            self._save()
        except StoreUnusableError:
            self._records, self._unsaved, self._events = before
            raise
        for host in request.hosts:
            if is_lost:
                self._believe_lost(host, request.by)
            if request.now:
                self._move_jobs(host, drain)
        self._save()

    def _drain(self, hosts: Sequence[Host], drain: Closure) -> None:
        for host in hosts:
            for record in self._records_at(host):
                self._keep(replace(record, drain=drain))
            self._record_closed(host, drain)

    def _open(self, request: ChangeMachines) -> None:
        """End what closes the hosts: all of it, or after a passed deep examination their quarantine only."""
        for host in request.hosts:
            for record in self._records_at(host):
                is_user = request.change == "undrain"
                is_open = record.quarantine is None and (record.drain is None or not is_user)
                drain = None if is_user else record.drain
                memory = {} if is_user else record.idle_memory
                opened = replace(record, drain=drain, quarantine=None, quarantines=0, strikes=(), finding=None)
                self._keep(replace(opened, idle_memory=memory, taken_since_s=None))
                if not is_open:
                    values = {"by": request.by, "how": request.change}
                    self._announce(Event("host-opened", values, (host.name,), at_s=time.time()))

    def _record_closed(self, host: Host, closure: Closure) -> None:
        values = {
            "state": closure.state.value,
            "by": closure.by or "controller",
            "reason": closure.reason or "-",
            "until_s": closure.until_s,
        }
        self._announce(Event("host-closed", values, (host.name,), at_s=closure.since_s))

    def _announce(self, event: Event) -> None:
        """Store an event that belongs to no job, with the next tick."""
        self._events.append(event)

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
        for record in self._records_at(host):
            if not record.closures(time.time()):
                self._keep(record.quarantined(reason, time.time()))
                self._note_quarantine(host, record)

    def strike(self, host: Host, reason: Text) -> None:
        """Count a failure that blames a machine alone; the second one puts it into quarantine."""
        for record in self._records_at(host):
            struck = record.struck(reason, time.time())
            if struck != record:
                values = {"reason": reason, "count": len(struck.strikes) or len(record.strikes) + 1}
                self._announce(Event("host-strike", values, (host.name,), at_s=time.time()))
                self._keep(struck)
                self._note_quarantine(host, record)

    def _note_quarantine(self, host: Host, before: MachineRecord) -> None:
        closure = self._records[before.key].quarantine
        if closure is not None and closure != before.quarantine:
            self._record_closed(host, closure)

    # Examination in the background

    @property
    def count(self) -> int:
        """Known machines, closed ones too."""
        return len(self._records)

    def idle_hosts(self) -> tuple[Host, ...]:
        """Return the known machines that no job uses or holds and that nothing closes."""
        now_s = time.time()
        used = {address for machine in self.held() for address in machine.addresses}
        for runner in self._jobs.runners():
            if not runner.job.is_terminal:
                names = {*runner.job.hosts, *runner.job.spares}
                used |= {address_of(host) for host in runner.hosts if host.name in names}
        return tuple(
            record.hosts[-1]
            for record in self._records.values()
            if record.hosts and not record.closures(now_s) and not record.addresses & used
        )

    def idle_memory(self, host: Host) -> Mapping[int, int]:
        """Return the least MB that were in use on each device of the machine before a start."""
        found = [record.idle_memory for record in self._records_at(host)]
        return {int(device): mb for memory in found for device, mb in memory.items()}

    def note_memory(self, host: Host, memory: Mapping[int, int], taken: Text | None) -> None:
        """Note the MB that are in use on each device before a start. `taken`: memory that was not released, None: all
        was; after TAKEN_S the machine goes into quarantine."""
        if not memory:
            return
        now_s = time.time()
        for record in self._records_at(host):
            known = record.idle_memory
            noted = replace(record, taken_since_s=record.taken_since_s or now_s)
            if taken is None:
                least = {str(device): min(mb, known.get(str(device), mb)) for device, mb in memory.items()}
                noted = replace(record, idle_memory={**known, **least}, taken_since_s=None)
            if noted != record:
                self._keep(noted)
            if noted.taken_since_s is not None and now_s - noted.taken_since_s > TAKEN_S and taken is not None:
                self.quarantine(host, taken)

    def take_examination(self, host: Host, finding: Text | None, *, is_strike: bool) -> None:
        """Note what a light examination found, None: the machine is ready. `is_strike`: it blames this machine."""
        for record in self._records_at(host):
            self._keep(replace(record, examined_at_s=time.time(), finding=finding))
        if finding is not None and is_strike:
            self.strike(host, finding)

    def _records_at(self, host: Host) -> tuple[MachineRecord, ...]:
        """Return the records of a host; a new one, known by its address, if there is none."""
        link = next((link for link in self._links if dialled(link.host) == dialled(host) and link.is_up), None)
        key = None if link is None else machine_id(host, link.info.machine_key)
        address = address_of(host)
        found = [one for one in self._records.values() if address in one.addresses or one.key == key]
        return tuple(found) or (MachineRecord(key or ADDRESS_KEY + address, (host,)),)

    def _places_of(self, host: Host) -> set[str]:
        """Return the keys and addresses of the machine of a host."""
        return {place for record in self._records_at(host) for place in (record.key, *record.addresses)}

    def _runners_at(self, host: Host) -> Iterator[tuple[JobRunner, str]]:
        """Yield the jobs that may run processes on a machine, with their name of it."""
        places = self._places_of(host)
        for runner in self._jobs.runners():
            for own in runner.hosts:
                node = next((node for node in runner.job.nodes if node.host == own.name), None)
                if node is not None and node.may_run_processes:
                    if {address_of(own), machine_id(own, node.machine_key)} & places:
                        yield runner, own.name

    def _believe_lost(self, host: Host, by: str) -> None:
        places = self._places_of(host)
        for runner in self._jobs.runners():
            for own in runner.hosts:
                if address_of(own) in places:
                    self._jobs.feed(runner.job.id, inputs.HostGivenUp(own.name, by))
        for runner, name in tuple(self._runners_at(host)):
            self._jobs.feed(runner.job.id, inputs.NodeLost(name, "by-user"))
        for machine in self.held():
            if machine.is_at(host, None):
                self._end_holds(machine, by)

    def _move_jobs(self, host: Host, drain: Closure) -> None:
        """Stop the jobs of a machine that restart elsewhere, with time to save."""
        for runner, name in tuple(self._runners_at(host)):
            if runner.job.policy.max_restarts > 0:
                self._jobs.feed(runner.job.id, inputs.StopStarted(name, "node", drain.message(), drain.since_s))

    # What is held

    def held(self) -> tuple[Machine, ...]:
        """Return the machines that no job may use."""
        jobs = [(runner.job, runner.hosts) for runner in self._jobs.runners() if runner.job.held_hosts]
        return held_machines(jobs, self._records.values()) if jobs or self.has_found else ()

    def contenders(
        self, jobs: Sequence[tuple[Job, Sequence[Host]]], claims: Mapping[str, Mapping[str, Claim]]
    ) -> tuple[Contender, ...]:
        """Return the jobs for the scheduler. `jobs`: with the hosts of their pools; `claims`: of each by its id."""
        held, now_s = self.held(), time.time()
        links = {dialled(link.host): link for link in self._links}
        records = self._records.values()
        barred = {False: _Barred(held, records, links.values(), now_s)}
        if any(job.request.examines for job, _ in jobs):
            opened = [replace(record, drain=None, quarantine=None) for record in records]
            barred[True] = _Barred(held, opened, links.values(), now_s)
        return tuple(
            self._contender(
                job, hosts, claims[job.id], barred[job.request.examines], links, now_s, is_any_held=bool(held)
            )
            for job, hosts in jobs
        )

    def _contender(
        self,
        job: Job,
        pool: Sequence[Host],
        claims: Mapping[str, Claim],
        barred: _Barred,
        links: Mapping[Host, AgentConnection],
        now_s: float,
        *,
        is_any_held: bool,
    ) -> Contender:
        is_queued = job.state is State.QUEUED
        used = {*job.hosts, *job.spares}
        hosts = [host for host in pool if is_queued or host.name in used]
        places = {host.name: barred.place(host) for host in hosts}
        if not is_queued:
            return Contender(job, claims, places=places)
        unusable: dict[str, Detail] = {host.name: why for host in hosts if (why := barred.why(host)) is not None}
        excluded = excluded_hosts(job.policy, job.past)
        unusable.update((name, because("host-excluded")) for name in excluded)
        for name, until_s in job.passed_over.items():
            if until_s > now_s:
                unusable.setdefault(name, because("host-passed-over", until_s=until_s))
        away: dict[str, Detail] = {}
        unknown: list[Host] = []
        for host in hosts if links or is_any_held else ():
            link = links.get(dialled(host))
            if host.name in unusable or (link is not None and link.is_up):
                continue
            if link is not None and link.failures:
                away[host.name] = because("host-away", why=link.last_error.message if link.last_error else None)
            elif is_any_held and not barred.is_known(host):
                unknown.append(host)
        if len(hosts) - len(unusable) - len(away) - len(unknown) < job.request.nodes:
            for host in unknown:
                self._links.get(host)  # it connects
        unusable.update((host.name, because("host-unidentified")) for host in unknown)
        lost = frozenset(host.name for host in hosts if barred.is_lost(host))
        return Contender(job, claims, unusable, away, avoided_hosts(job.past, now_s), places, lost)


class _Barred:
    """Machines that no job may use now, by their names in hostfiles."""

    def __init__(
        self, held: Sequence[Machine], records: Iterable[MachineRecord], links: Iterable[AgentConnection], now_s: float
    ) -> None:
        self._keys: dict[str, str] = {}
        self._why: dict[str, Text] = {}
        self._lost: set[str] = set()
        for record in records:
            if record.is_identified:
                self._keys.update(dict.fromkeys(record.addresses, record.key))
            for closure in record.closures(now_s)[:1]:
                self._why.update(dict.fromkeys((record.key, *record.addresses), closure.message()))
            if any(closure.is_lost for closure in record.closures(now_s)):
                self._lost |= {record.key, *record.addresses}
        for link in links:
            key = machine_id(link.host, link.info.machine_key) if link.is_up else None
            if key is not None:
                self._keys[address_of(link.host)] = key
        for machine in held:
            places = (*machine.addresses, *([] if machine.key is None else [machine.key]))
            self._why.update(dict.fromkeys(places, machine.holds[0].reason()))

    def is_known(self, host: Host) -> bool:
        """Return whether the host has been identified as a certain machine."""
        address = address_of(host)
        return address in self._keys or address in self._why

    def place(self, host: Host) -> str:
        """Return the machine of a host, equal for all its names; its address if the machine is not known."""
        address = address_of(host)
        return self._keys.get(address, address)

    def is_lost(self, host: Host) -> bool:
        """Return whether a user has given up the machine with its disks."""
        return bool({address_of(host), self.place(host)} & self._lost)

    def why(self, host: Host) -> Text | None:
        """Return why no job may use the host, None: jobs may."""
        return self._why.get(address_of(host)) or self._why.get(self.place(host))


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
