"""What closes a machine for new jobs: a drain or the loss that a user reports, and the quarantine after failures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ascendrun.core.errors import ConflictError
from ascendrun.core.events import Event
from ascendrun.core.hosts import Host
from ascendrun.core.jobs import inputs
from ascendrun.core.machines import Closure, MachineRecord, MachineState, address_of, machine_id
from ascendrun.head.agents.connections import Connections
from ascendrun.head.loop.machine.holds import Holds
from ascendrun.head.loop.machine.job_access import JobAccess
from ascendrun.head.loop.machine.records import MachineRecords
from ascendrun.head.protocol.control_messages import ChangeMachines
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.loop.job.runner import JobRunner


class Closures:
    """The closures of machines."""

    def __init__(self, records: MachineRecords, links: Connections, jobs: JobAccess, holds: Holds) -> None:
        self._records, self._links, self._jobs, self._holds = records, links, jobs, holds

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
        with self._records.reverting():
            if request.change in ("undrain", "deep"):
                self._open(request)
            else:
                self._drain(request.hosts, drain)
            self._records.save()
        for host in request.hosts:
            if is_lost:
                self._believe_lost(host, request.by)
            if request.now:
                self._move_jobs(host, drain)
        self._records.save()

    def _drain(self, hosts: Sequence[Host], drain: Closure) -> None:
        for host in hosts:
            for record in self._records.at(host):
                self._records.keep(replace(record, drain=drain))
            self._record_closed(host, drain)

    def _open(self, request: ChangeMachines) -> None:
        """End what closes the hosts: all of it, or after a passed deep examination their quarantine only."""
        for host in request.hosts:
            for record in self._records.at(host):
                is_user = request.change == "undrain"
                is_open = record.quarantine is None and (record.drain is None or not is_user)
                drain = None if is_user else record.drain
                memory = {} if is_user else record.idle_memory
                opened = replace(record, drain=drain, quarantine=None, quarantines=0, strikes=(), finding=None)
                self._records.keep(replace(opened, idle_memory=memory, taken_since_s=None))
                if not is_open:
                    values = {"by": request.by, "how": request.change}
                    self._records.announce(Event("host-opened", values, (host.name,), at_s=time.time()))

    def _record_closed(self, host: Host, closure: Closure) -> None:
        values = {
            "state": closure.state.value,
            "by": closure.by or "controller",
            "reason": closure.reason or "-",
            "until_s": closure.until_s,
        }
        self._records.announce(Event("host-closed", values, (host.name,), at_s=closure.since_s))

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
        for record in self._records.at(host):
            if not record.closures(time.time()):
                self._records.keep(record.quarantined(reason, time.time()))
                self._note_quarantine(host, record)

    def strike(self, host: Host, reason: Text) -> None:
        """Count a failure that blames a machine alone; the second one puts it into quarantine."""
        for record in self._records.at(host):
            struck = record.struck(reason, time.time())
            if struck != record:
                values = {"reason": reason, "count": len(struck.strikes) or len(record.strikes) + 1}
                self._records.announce(Event("host-strike", values, (host.name,), at_s=time.time()))
                self._records.keep(struck)
                self._note_quarantine(host, record)

    def _note_quarantine(self, host: Host, before: MachineRecord) -> None:
        record = self._records.get(before.key)
        closure = None if record is None else record.quarantine
        if closure is not None and closure != before.quarantine:
            self._record_closed(host, closure)

    def take_examination(self, host: Host, finding: Text | None, *, is_strike: bool) -> None:
        """Note what a light examination found, None: the machine is ready. `is_strike`: it blames this machine."""
        for record in self._records.at(host):
            self._records.keep(replace(record, examined_at_s=time.time(), finding=finding))
        if finding is not None and is_strike:
            self.strike(host, finding)

    def _runners_at(self, host: Host) -> Iterator[tuple[JobRunner, str]]:
        """Yield the jobs that may run processes on a machine, with their name of it."""
        places = self._records.places_of(host)
        for runner in self._jobs.runners():
            for own in runner.hosts:
                node = next((node for node in runner.job.nodes if node.host == own.name), None)
                if node is not None and node.may_run_processes:
                    if {address_of(own), machine_id(own, node.machine_key)} & places:
                        yield runner, own.name

    def _believe_lost(self, host: Host, by: str) -> None:
        places = self._records.places_of(host)
        for runner in self._jobs.runners():
            for own in runner.hosts:
                if address_of(own) in places:
                    self._jobs.feed(runner.job.id, inputs.HostGivenUp(own.name, by))
        for runner, name in tuple(self._runners_at(host)):
            self._jobs.feed(runner.job.id, inputs.NodeLost(name, "by-user"))
        for machine in self._holds.held():
            if machine.is_at(host, None):
                self._holds.end(machine, by)

    def _move_jobs(self, host: Host, drain: Closure) -> None:
        """Stop the jobs of a machine that restart elsewhere, with time to save."""
        for runner, name in tuple(self._runners_at(host)):
            if runner.job.policy.max_restarts > 0:
                self._jobs.feed(runner.job.id, inputs.StopStarted(name, "node", drain.message(), drain.since_s))
