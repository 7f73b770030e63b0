"""The records of machines; what nodes report is compared with those of jobs: attempts that must end, or are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from ascendrun.core.events import Event
from ascendrun.core.hosts import Host
from ascendrun.core.jobs import endings, inputs
from ascendrun.core.jobs.job_copy import JobCopy
from ascendrun.core.jobs.reconcile import AttemptState, NodeState, Verdict, compare, node_stopped
from ascendrun.core.machines import ADDRESS_KEY, MachineRecord, absorb, address_of, machine_id
from ascendrun.head.agents.connections import Connections, ask
from ascendrun.head.loop.steps import JobSteps
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.messages import Done, R, Request
from ascendrun.head.protocol.remote import AgentConnection, Reply
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.head.state.store import MachineTable
from ascendrun.node.layout import make_run, split_tag

if TYPE_CHECKING:
    from ascendrun.head.loop.job.runner import JobRunner

SAVED_AT_ONCE = 8
LOOK_S = 60.0
"""Interval in which nodes are compared with the records; also at every new connection."""
DEADLINE_S = 30.0
FOUND_GRACE_S = 30.0
"""Grace period of an attempt whose job file is unknown: the default of `checkpoint.grace_period_s`."""


class MachineRecords:
    """The known machines. `version` changes with every record."""

    def __init__(self, table: MachineTable, links: Connections) -> None:
        self._table, self._links = table, links
        self._records = {record.key: record for record in table.all()}
        self._keys: dict[str, set[str]] = {}
        """Keys of records by address; a record may have left."""
        self._index(self._records.values())
        self._unsaved: set[str] = set() if table.has_files else set(self._records)
        self._gone: set[str] = set()
        """Keys of records that are part of another one now."""
        self._events: list[Event] = []
        self.version = 0
        for record in self.all():  # an earlier release kept two records of a machine
            if any(ADDRESS_KEY + address in self._records for address in record.addresses if record.is_identified):
                self.keep(absorb(record, self.all()))

    def __len__(self) -> int:
        return len(self._records)

    def all(self) -> tuple[MachineRecord, ...]:
        """Return all records, those of closed machines too."""
        return tuple(self._records.values())

    def get(self, key: str) -> MachineRecord | None:
        """Return the record with this key, None: there is none."""
        return self._records.get(key)

    @property
    def has_found(self) -> bool:
        """Whether any machine runs attempts that no job explains."""
        return any(record.found for record in self._records.values())

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved or self._events or self._gone)

    def save(self, *, within_s: float = float("inf")) -> None:
        """Store what changed, for about `within_s`. Raises StoreUnusableError: it remains to be stored."""
        until_mono = time.monotonic() + within_s
        while self.has_unsaved:
            keys = tuple(islice(self._unsaved, SAVED_AT_ONCE if within_s < float("inf") else None))
            self._table.save([self._records[key] for key in keys], self._events, self._gone)
            self._unsaved.difference_update(keys)
            self._events.clear()
            self._gone.clear()
            if time.monotonic() >= until_mono:
                return

    def keep_all(self) -> None:
        """Store every machine with the next `save`: the store may have been rebuilt."""
        self._unsaved |= set(self._records)

    def keep(self, record: MachineRecord) -> None:
        """Replace a record, heard now, and what was noted at its addresses before; it is stored by `save`."""
        for address in record.addresses if record.is_identified else ():
            if self._records.pop(ADDRESS_KEY + address, None) is not None:
                self._unsaved.discard(ADDRESS_KEY + address)
                self._gone.add(ADDRESS_KEY + address)
        self._records[record.key] = replace(record, heard_at_s=time.time())
        self._index((record,))
        self._gone.discard(record.key)
        self.version += 1
        self._unsaved.add(record.key)

    def _index(self, records: Iterable[MachineRecord]) -> None:
        for record in records:
            for address in record.addresses:
                self._keys.setdefault(address, set()).add(record.key)

    def forget_found(self, record: MachineRecord, tags: Set[str]) -> None:
        """Remove found attempts from a record."""
        if not tags.isdisjoint(record.found):
            self.keep(replace(record, found={tag: at_s for tag, at_s in record.found.items() if tag not in tags}))

    def announce(self, event: Event) -> None:
        """Store an event that belongs to no job, with the next tick."""
        self._events.append(event)

    def of(self, link: AgentConnection) -> MachineRecord:
        """Return the record of the machine, a new one if it has none, with the address of this connection.

        The key is "" if its agent is of a release that reports none.
        """
        key = machine_id(link.host, link.info.machine_key) or ""
        return self._with_host(self._records.get(key) or MachineRecord(key, ()), link.host)

    def _with_host(self, record: MachineRecord, host: Host) -> MachineRecord:
        """Return the record with the address of a host, and what was noted there."""
        address = address_of(host)
        if address not in record.addresses:
            record = replace(record, hosts=(*record.hosts, host))
        noted = self._records.get(ADDRESS_KEY + address)
        return record if noted is None else absorb(record, [noted])

    def at(self, host: Host) -> tuple[MachineRecord, ...]:
        """Return the records of a host; a new one, known by its address, if there is none."""
        link = self._links.find(host)
        key = None if link is None or not link.is_up else machine_id(host, link.info.machine_key)
        address = address_of(host)
        keys = sorted({*self._keys.get(address, ()), *([key] if key else [])})
        records = [self._records[one] for one in keys if one in self._records]
        found = [one for one in records if address in one.addresses or one.key == key]
        known = [one for one in found if one.is_identified] or ([MachineRecord(key, ())] if key else [])
        return tuple(self._with_host(one, host) for one in known or found or [MachineRecord(ADDRESS_KEY + address, ())])

    def places_of(self, host: Host) -> set[str]:
        """Return the keys and addresses of the machine of a host."""
        return {place for record in self.at(host) for place in (record.key, *record.addresses)}

    @contextmanager
    def reverting(self) -> Iterator[None]:
        """Forget the changes of the block if they cannot be stored."""
        before = dict(self._records), set(self._unsaved), list(self._events), set(self._gone)
        try:
            yield
        except StoreUnusableError:
            self._records, self._unsaved, self._events, self._gone = before
            raise


class Reconciler:
    """Comparison of nodes with records. `adopt`: takes over an attempt by the copy of its job, False: not yet."""

    def __init__(
        self,
        records: MachineRecords,
        links: Connections,
        jobs: JobSteps,
        adopt: Callable[[JobCopy, int], bool],
        *,
        head_id: str,
    ) -> None:
        self._records, self._links, self._jobs, self._take_over = records, links, jobs, adopt
        self.head_id = head_id
        self._due_mono = 0.0
        self._strays: dict[tuple[int, str], float] = {}

    def on_up(self, link: AgentConnection) -> None:
        """Compare a node that responds (again) with the records, before anything is requested from it."""
        info = link.info
        seen = NodeState(info.boot_id, info.incarnation, None if info.live is None else frozenset(info.live))
        self._note(link, seen)
        self._compare_all(link, seen)

    def used_links(self) -> tuple[AgentConnection, ...]:
        """Return the connections to hosts where processes of ours may live."""
        links = {id(link): link for runner in self._jobs for link in runner.started_links()}
        for record in self._records.all():
            for host in record.hosts if record.found else ():
                link = self._links.get(host)
                links[id(link)] = link
        return tuple(links.values())

    def tick(self) -> None:
        """Query the nodes if they are due."""
        if time.monotonic() >= self._due_mono:
            self._due_mono = time.monotonic() + LOOK_S
            for link in self.used_links():
                if link.is_up:
                    self._ask(link, agent.Live(), partial(self._take_live, link))

    def _ask(self, link: AgentConnection, request: Request[R], then: Callable[[R], None]) -> None:
        """Send a request; `then` runs in the controller's thread if the node replies."""

        def take(reply: Reply[R]) -> None:
            if reply.error is None:
                then(reply.message)

        ask(self._links, link.host, request, deadline_s=DEADLINE_S, then=take)

    def _take_live(self, link: AgentConnection, told: agent.LiveReply) -> None:
        live = None if told.live is None else frozenset(told.live)
        self._compare_all(link, NodeState(told.boot_id, told.incarnation, live))

    def _note(self, link: AgentConnection, seen: NodeState) -> None:
        """Keep how a machine is reached, if a job uses it."""
        record = replace(self._records.of(link), boot_id=seen.boot_id, incarnation=seen.incarnation)
        is_used = bool(record.key) and any(runner.uses(link) for runner in self._jobs)
        if is_used and record != self._records.get(record.key):
            self._records.keep(record)

    def _compare_all(self, link: AgentConnection, seen: NodeState) -> None:
        tags = {runner.job.run_id for runner in self._jobs if runner.job.go_sent_at_s is not None and runner.uses(link)}
        for tag in seen.live or ():
            if self._job_id(tag) is not None:
                tags.add(tag)
        for tag in sorted(tags):
            self._compare(link, tag, seen, None)
        if seen.live is not None:
            record = self._records.of(link)
            self._records.forget_found(record, set(record.found) - seen.live)

    def _job_id(self, tag: str) -> str | None:
        """Return the job of a tag, None: not a tag, or of another head node."""
        try:
            run, _ = split_tag(tag)
        except ValueError:
            return None
        prefix = make_run(self.head_id, "")
        return run[len(prefix) :] if run.startswith(prefix) else None

    def _compare(self, link: AgentConnection, tag: str, seen: NodeState, attempt: AttemptState | None) -> None:
        job_id = self._job_id(tag)
        assert job_id is not None, "a tag of this head node"
        job = self._jobs.find(job_id)
        runner = self._jobs.runners.get(job_id)
        name = runner.uses(link) if runner is not None else link.host.name
        host = name if job is not None and name in job.hosts else None
        verdict = compare(job, host, tag, seen, attempt)
        if verdict is not Verdict.FOUND:
            self._records.forget_found(self._records.of(link), {tag})
        if verdict is Verdict.AGREES:
            if runner is not None and host is not None and tag in (seen.live or ()):
                self._complete(runner, host, link, seen)
            return
        if verdict is Verdict.QUERY:
            self._query(link, tag, seen)
        elif verdict is Verdict.FOUND:
            record = self._records.of(link)
            if record.key and tag not in record.found:
                self._records.keep(replace(record, found={**record.found, tag: time.time()}))
            self._ask(link, agent.Copy(tag), partial(self._adopt, tag))
        elif verdict is Verdict.STOP and (attempt is None or self._is_twice(link, tag)):
            is_old = job is not None and (job.is_terminal or job.run_id != tag)
            self._stop(link, tag, seen, "attempt-over" if is_old else "records-gone")
        elif verdict is Verdict.ABORT:
            self._abort(link, tag, seen)
        elif runner is not None and host is not None:
            self._act(runner, host, verdict)
            if verdict is Verdict.REBOOTED and tag in (seen.live or ()):
                self._stop(
                    link, tag, seen, "host-rebooted"
                )  # its disk has survived: the end is recorded there, and copied

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
        self._jobs.feed(runner.job.id, endings.LeftoversGone(host) if lost is None else endings.NodeLost(host, lost))
        # Its disk may have survived, with the last lines of the logs.
        runner.copies.present.follow_later(host, wait_s=0.0)

    def _query(self, link: AgentConnection, tag: str, seen: NodeState) -> None:
        def take(told: agent.ProcessesReply) -> None:
            self._compare(link, tag, seen, AttemptState(told.phase, bool(told.processes) or told.supervisor))

        self._ask(link, agent.Processes(tag), take)

    def _stop(self, link: AgentConnection, tag: str, seen: NodeState, why: str) -> None:
        """End an attempt by its tag. The node's answer, or the next look, shows whether it has gone."""
        job_id = self._job_id(tag)
        if job_id is not None:
            self._jobs.record(job_id, [node_stopped(link.host.name, tag, why, time.time())])

        def take(told: agent.ProcessesReply) -> None:
            if not told.processes and not told.supervisor:
                gone = replace(seen, live=(seen.live or frozenset()) - {tag})
                self._compare(link, tag, gone, AttemptState(None, processes=False))

        def query(reply: Reply[Done]) -> None:
            self._ask(link, agent.Processes(tag), take)

        link.call(agent.Stop(tag, True, 0.0, why), deadline_s=DEADLINE_S, done=query)

    def _abort(self, link: AgentConnection, tag: str, seen: NodeState) -> None:
        """Remove a prepared attempt; end it if it was started all the same."""

        def take(reply: Reply[Done]) -> None:
            if reply.error is not None and reply.error.code == "attempt-running":
                self._links.post(lambda: self._stop(link, tag, seen, "attempt-over"))

        link.call(agent.Abort(tag), deadline_s=DEADLINE_S, done=take)

    def _adopt(self, tag: str, told: agent.CopyReply) -> None:
        """Adopt the attempt if the node has a copy of its job."""
        run, attempt = split_tag(tag)
        try:
            copy = JobCopy.from_json(told.job)
        except ValueError:
            return  # it stays found
        known = self._jobs.find(copy.id)
        is_old = known is not None and (known.go_sent_at_s is not None or known.attempt > attempt or known.is_terminal)
        if copy.run == run and not is_old and self._take_over(copy, attempt):
            for record in self._records.all():
                self._records.forget_found(record, {tag})

    def stop_found(self, ref: str, by: str, *, now: bool) -> bool:
        """Stop the found attempts with this tag or job id, on all machines, for a user; False: there are none.

        They are listed until the nodes have recorded their end.
        """
        found = [
            (self._links.get(host), tag)
            for record in self._records.all()
            for tag in record.found
            if ref in (tag, self._job_id(tag))
            for host in record.hosts
        ]
        for link, tag in found:
            request = agent.Stop(tag, now, FOUND_GRACE_S, "user", by=by)
            link.call(request, deadline_s=DEADLINE_S, done=self._look_soon)
        return bool(found)

    def _look_soon(self, reply: object) -> None:
        self._due_mono = 0.0  # any thread: the next tick looks
