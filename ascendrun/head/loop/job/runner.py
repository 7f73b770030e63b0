"""Runner of one job: executes its actions on its nodes, turns their replies into inputs of its lifecycle."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ascendrun.core.errors import AscendrunError
from ascendrun.core.jobs import actions, endings
from ascendrun.core.jobs.draft import stop_grace_s
from ascendrun.core.jobs.job import Cause, Job, Phase, State
from ascendrun.core.jobs.reconcile import node_stopped
from ascendrun.head.loop.job.copies import JobCopies
from ascendrun.head.loop.job.live_job import AGAIN_S, REPLY_S, LiveJob
from ascendrun.head.loop.job.start import JobStart
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.agent_events import make_event
from ascendrun.head.protocol.messages import Done
from ascendrun.head.protocol.remote import AgentConnection, Reply, boot_s
from ascendrun.head.survey.submission import Submission
from ascendrun.node.records import EVENTS

if TYPE_CHECKING:
    from ascendrun.head.loop.live_jobs import LiveJobs

RENEW_S = 10.0
"""Interval in which leases are renewed."""
MARGIN_S = 10.0
END_AGAIN_S = 1.0
PROOF_S = 15.0
"""Seconds after the grace period within which the proof of the end must arrive; then the request is repeated."""


class Leases:
    """The leases of one attempt (node/reap.py), by host: renewed while its nodes respond, expired when no rank is
    left. An earlier controller may have renewed a lease until
    this object was made. `_renewed_s`: seconds since boot; `_clocks`: what the nodes reported last; `_due`: monotonic.
    """

    def __init__(self, live: LiveJob) -> None:
        self._live, self._made_s = live, boot_s()
        self._renewed_s: dict[str, float] = {}
        self._clocks: dict[str, int] = {}
        self._due: dict[str, float] = {}

    def begin(self, host: str) -> None:
        """Note that GO is sent: the first lease begins when it arrives."""
        self._renewed_s[host] = boot_s()

    def forget(self, host: str) -> None:
        """Ask for the clock again: the host was away."""
        self._clocks.pop(host, None)
        self._due.pop(host, None)

    def renew_due(self, now: float) -> None:
        """Renew the leases of the nodes that end their ranks without the head; not of a job that is being stopped."""
        job = self._live.job
        if job.policy.on_unreachable_node != "fence" or job.state not in (State.STARTING, State.RUNNING):
            return
        for node in job.nodes:
            if node.may_run_processes and self._due.get(node.host, 0.0) <= now and self._live.link(node.host).is_up:
                self._renew(node.host, now)

    def _renew(self, host: str, now: float) -> None:
        at_ns = self._clocks.get(host)
        self._due[host] = now + RENEW_S
        if at_ns is not None:
            self._renewed_s[host] = boot_s()

        def replied(reply: Reply[agent.Pong]) -> None:
            if reply.error is None:
                self._clocks[host] = reply.message.at_ns
                if at_ns is None:
                    self._due[host] = 0.0

        self._live.call(host, agent.Renew(self._live.job.run_id, at_ns), deadline_s=RENEW_S, then=replied)

    def expired(self) -> frozenset[str]:
        """Return the hosts whose leases have expired: no process of the attempt is left there. The clock of a host may
        be slower by 2 %."""
        policy, now_s = self._live.job.policy, boot_s()
        if policy.on_unreachable_node != "fence":
            return frozenset()
        limit_s = policy.fence_after_s * 1.02 + MARGIN_S
        hosts = (node.host for node in self._live.job.nodes if node.may_run_processes)
        return frozenset(host for host in hosts if now_s - self._renewed_s.get(host, self._made_s) > limit_s)


class Ending:
    """Stops and ends of one attempt, by host: every record of an end is confirmed by its node."""

    def __init__(self, live: LiveJob, copies: JobCopies) -> None:
        self._live, self._copies = live, copies
        self._stop_due: dict[str, float] = {}
        self._ends: dict[str, endings.NodeEnded] = {}
        self._end_due: dict[str, float] = {}

    def tick(self, now: float) -> None:
        """Repeat due requests; called periodically. `now`: monotonic."""
        live = self._live
        for host in self._ends:
            if self._end_due[host] <= now and live.link(host).is_up:
                self._confirm(host)
        if live.job.state is not State.STOPPING and not live.job.held_hosts:
            return
        for host in [host for host, due in self._stop_due.items() if due <= now]:
            if live.job.node(host).may_run_processes and live.link(host).is_up:
                self.stop(host)

    def stop(self, host: str) -> None:
        """Request the stop. The proof is the event `ended`, also if the host never started anything: follow it."""
        job = self._live.job
        grace_s = stop_grace_s(job)
        self._copies.present.follow(host)
        self._stop_due[host] = time.monotonic() + grace_s + PROOF_S

        def replied(reply: Reply[Done]) -> None:
            if reply.error is not None:
                self._stop_due[host] = time.monotonic() + AGAIN_S

        events = self._copies.present.spool(host).offsets().get(EVENTS, {})
        why = "end-unknown" if job.cause is None else job.cause.value
        is_hung = job.cause is Cause.HUNG
        request = agent.Stop(job.run_id, job.stop_now, grace_s, why, events, is_hung, job.stopped_by or "controller")
        self._live.call(host, request, then=replied)

    def take_records(self, host: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take new records of a node; an end only when the node has confirmed it."""
        for line in lines:
            event = make_event(host, line)
            if isinstance(event, endings.NodeEnded):
                self._ends[host] = event
                self._confirm(host)
            elif isinstance(event, endings.LeftoversGone) and host in self._ends:
                self._ends[host] = replace(self._ends[host], leftovers=())
            elif event is not None:
                self._live.feed(event)

    def on_up(self, host: str) -> None:
        if host in self._ends:
            self._confirm(host)

    def _confirm(self, host: str) -> None:
        """Ask the node whether the attempt has ended: a rank can write the record too. Repeated until it is so and
        every record is here, since the last ones correct what a rank wrote."""
        self._end_due[host] = time.monotonic() + REPLY_S
        run_id = self._live.job.run_id

        def replied(reply: Reply[agent.ProcessesReply]) -> None:
            self._end_due[host] = time.monotonic() + AGAIN_S
            if reply.error is not None:
                return
            left = [process for process in reply.message.processes if not process.killed]
            if not left and (reply.message.processes or not reply.message.supervisor):
                if self._copies.present.spool(host).differs_from({EVENTS: reply.message.events}):
                    self._end_due[host] = time.monotonic() + END_AGAIN_S
                else:
                    self._copies.present.take_records(host)
                    self.take(host)
            elif reply.message.supervisor:
                self._end_due[host] = time.monotonic() + END_AGAIN_S
            else:
                self._live.record([node_stopped(host, run_id, "end-with-processes", time.time())])
                self._live.call(host, agent.Stop(run_id, True, 0.0, "end-with-processes"))

        self._live.call(host, agent.Processes(run_id), then=replied)

    def take(self, host: str) -> None:
        """Believe the newest record of the end, if there is one: the node has no process of the attempt."""
        if host in self._ends:
            self._live.feed(self._ends.pop(host))


class JobRunner(LiveJob):
    """One live job with the parts of its work. `leases` and `ending` are of the present attempt.

    Every method runs in the controller's thread, except those of `copies` that say otherwise.
    """

    def __init__(self, job: Job, submission: Submission, jobs: LiveJobs) -> None:
        super().__init__(job, submission, jobs)
        self.copies = JobCopies(self, lambda host, lines: self.ending.take_records(host, lines))
        self.start = JobStart(self, self.copies)
        self.leases, self.ending = Leases(self), Ending(self, self.copies)

    def begin_attempt(self) -> None:
        """Begin with nothing after the record has moved to a new attempt; files of the old one are still copied."""
        self.copies.begin_attempt()
        self.leases, self.ending = Leases(self), Ending(self, self.copies)

    def perform(self, action: actions.Action) -> None:
        self.do(partial(self._perform, action))

    def _perform(self, action: actions.Action) -> None:
        if isinstance(action, actions.QueryNodes):
            self.start.survey()
        elif isinstance(action, actions.StageNodes):
            self.start.stage()
        elif isinstance(action, actions.PrepareNodes):
            for host in self.job.hosts:
                self.start.prepare(host)
        elif isinstance(action, actions.StartNodes):
            self.start.record_placement()
            for host in self.job.hosts:
                self.send_go(host)
        elif isinstance(action, actions.AbortNodes):
            for host in action.hosts:
                if self.link(host).is_up:
                    abort = agent.Abort(action.run_id)
                    self.link(host).call(abort, deadline_s=REPLY_S, done=lambda reply: None)
        elif isinstance(action, actions.StopNodes):
            for host in action.hosts:
                self.ending.stop(host)
        elif isinstance(action, actions.ForgetReplies):
            self.start.forget()

    def send_go(self, host: str) -> None:
        self.leases.begin(host)
        self.start.go(host)

    def tick(self) -> None:
        """Repeat due requests; called periodically."""
        now = time.monotonic()
        self.copies.tick()
        self.leases.renew_due(now)
        self.ending.tick(now)

    def on_up(self, host: str) -> None:
        """Handle an agent that responds (again), after the comparison of head/loop/machine/reconcile.py: resend what
        it may have missed."""
        self.start.on_up()
        self.copies.on_up(host)
        node = next((node for node in self.job.nodes if node.host == host), None)
        if node is None or self.job.go_sent_at_s is None:
            return
        boot_id = self.link(host).info.boot_id
        if node.may_run_processes and node.boot_id and boot_id != node.boot_id:
            return  # nothing must be started there
        self.ending.on_up(host)
        if self.job.state is State.STARTING and node.phase is Phase.GO_SENT:
            self.send_go(host)
        elif node.may_run_processes and (self.job.state is State.STOPPING or host in self.job.unconfirmed):
            self.ending.stop(host)
        else:
            self.copies.present.follow(host)

    def on_down(self, host: str, link: AgentConnection, error: AscendrunError) -> None:
        """Handle a lost connection. Unreachable is not failed: only a job that is still CHECKING takes notice."""
        self.leases.forget(host)
        self.copies.on_down(host)
        self.start.on_down(link, error)
