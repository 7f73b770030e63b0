"""The end of an attempt: the stop is requested, every record of an end is confirmed by its node."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.draft import stop_grace_s
from ascendrun.core.jobs.job import Cause, State
from ascendrun.head.loop.job.copies import JobCopies
from ascendrun.head.loop.job.live_job import AGAIN_S, REPLY_S, LiveJob
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.agent_events import make_event
from ascendrun.head.protocol.messages import Done
from ascendrun.head.protocol.remote import Reply
from ascendrun.node.records import EVENTS

END_AGAIN_S = 1.0
PROOF_S = 15.0
"""Seconds after the grace period within which the proof of the end must arrive; then the request is repeated."""


class Ending:
    """Stops and ends of one attempt, by host."""

    def __init__(self, live: LiveJob, copies: JobCopies) -> None:
        self._live, self._copies = live, copies
        self._stop_due: dict[str, float] = {}
        self._ends: dict[str, inputs.NodeEnded] = {}
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
        request = agent.Stop(job.run_id, job.stop_now, grace_s, events, job.cause is Cause.HUNG)
        self._live.call(host, request, then=replied)

    def take_records(self, host: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take new records of a node; an end only when the node has confirmed it."""
        for line in lines:
            event = make_event(host, line)
            if isinstance(event, inputs.NodeEnded):
                self._ends[host] = event
                self._confirm(host)
            elif isinstance(event, inputs.LeftoversGone) and host in self._ends:
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
                self._live.call(host, agent.Stop(run_id, True, 0.0))

        self._live.call(host, agent.Processes(run_id), then=replied)

    def take(self, host: str) -> None:
        """Believe the newest record of the end, if there is one: the node has no process of the attempt."""
        if host in self._ends:
            self._live.feed(self._ends.pop(host))
