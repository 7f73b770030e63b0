"""What holds a machine: attempts whose end is not confirmed, leftovers, found attempts. A user may end holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from ascendrun.core.errors import AscendrunError, ConflictError, NotFoundError
from ascendrun.core.events import Event
from ascendrun.core.jobs import inputs
from ascendrun.core.machines import Machine, MachineState, held_machines
from ascendrun.head.loop.machine.job_access import JobAccess
from ascendrun.head.loop.machine.reconcile import DEADLINE_S
from ascendrun.head.loop.machine.records import MachineRecords
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.remote import AgentConnection, Reply
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.node.layout import split_tag
from ascendrun.text import Text

CONNECT_S = 20.0


class Holds:
    """The holds of machines. `links_in_use`: connections to hosts where processes of ours may live."""

    def __init__(
        self,
        records: MachineRecords,
        jobs: JobAccess,
        *,
        links_in_use: Callable[[], Iterable[AgentConnection]],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._records, self._jobs, self._links_in_use, self._post = records, jobs, links_in_use, post
        self._releases: list[Callable[[], None]] = []

    def tick(self) -> None:
        """Try the releases again that wait for a connection."""
        releases, self._releases = self._releases, []
        for again in releases:
            again()

    def held(self) -> tuple[Machine, ...]:
        """Return the machines that no job may use."""
        jobs = [(runner.job, runner.hosts) for runner in self._jobs.runners() if runner.job.held_hosts]
        return held_machines(jobs, self._records.all()) if jobs or self._records.has_found else ()

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
        links = [link for link in self._links_in_use() if machine.is_at(link.host, None)]
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
            link.call(
                agent.Processes(tag),
                deadline_s=DEADLINE_S,
                done=lambda reply, tag=tag: self._post(partial(take, tag, reply)),  # type: ignore[misc]
            )

    def end(self, machine: Machine, by: str) -> StoreUnusableError | None:
        """Store that nothing holds the machine any more; return why that was not possible."""
        try:
            self._free(machine, by)
            self._records.save()
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
            self._records.keep(replace(record, found={}))


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
