"""Leases of an attempt (node/stopping.py): renewed while its nodes respond, expired when no rank is left."""

from __future__ import annotations

from ascendrun.core.jobs.job import State
from ascendrun.head.loop.job.live_job import LiveJob
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.remote import Reply, boot_s

RENEW_S = 10.0
"""Interval in which leases are renewed."""
MARGIN_S = 10.0


class Leases:
    """What the head knows of the leases of one attempt, by host. An earlier controller may have renewed a lease until
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
