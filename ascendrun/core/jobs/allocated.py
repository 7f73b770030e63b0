"""The inputs of a job whose hosts an engine grants, each with its change."""

from __future__ import annotations

from dataclasses import replace

from ascendrun.core.hosts import Host
from ascendrun.core.jobs.draft import Draft
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import BEFORE_GO, Cause, Job, Phase, State
from ascendrun.core.jobs.reasons import FirstFailure, Reason, because
from ascendrun.core.jobs.restart import Failure, Kind

MARGIN_S = 30.0
"""Seconds beyond the grace period before the end of an allocation at which its ranks are stopped."""


class AllocationRequested(JobInput):
    """An allocation with this key is requested: stored before it is."""

    key: str

    def apply(self, draft: Draft) -> None:
        if draft.job.state is State.QUEUED and draft.job.allocation is None:
            draft.job = replace(draft.job, allocation=self.key, pool=())


class AllocationWaiting(JobInput):
    """The engine grants nothing yet, for this reason. `will_start` False: not before something is changed."""

    reason: Reason
    will_start: bool = True

    def apply(self, draft: Draft) -> None:
        job = draft.job
        if job.state is State.QUEUED and not job.pool and job.reason != self.reason:
            draft.job = replace(job, reason=self.reason)
            draft.record("waiting" if self.will_start else "allocation-never", values={"reason": self.reason})


class AllocationGranted(JobInput):
    """The hosts are there for `length_s` (None: without a limit); the job is placed on them."""

    hosts: tuple[Host, ...]
    length_s: float | None = None

    def apply(self, draft: Draft) -> None:
        job, names = draft.job, tuple(host.name for host in self.hosts)
        if job.state is not State.QUEUED or job.allocation is None or job.pool or not names:
            return
        earlier = tuple(host for host in job.granted if host.name not in names)
        draft.job = replace(job, pool=names, granted=(*earlier, *self.hosts), passed_over={})
        draft.record("allocation-granted", names, values={"allocation": self.hosts[0].allocation})
        least_s = job.grace_s + MARGIN_S
        if self.length_s is not None and self.length_s <= least_s:  # each one like it would be as short
            draft.stop(Cause.LIMIT, because("allocation-too-short", length_s=self.length_s, least_s=least_s))


class AllocationRefused(JobInput):
    """The engine refuses the request, and would do so again."""

    reason: Reason

    def apply(self, draft: Draft) -> None:
        if draft.job.state is State.QUEUED:
            draft.job = replace(draft.job, allocation=None)
            draft.stop(Cause.LIMIT, because("allocation-refused", why=self.reason))


class AllocationEnding(JobInput):
    """The allocation ends at `at_s` (UTC seconds): the ranks have their grace period to save, and none starts in it."""

    at_s: float

    def apply(self, draft: Draft) -> None:
        if draft.job.allocation is None:
            return
        draft.job = replace(draft.job, pool=())
        if draft.job.state in (State.STARTING, State.RUNNING):
            draft.stop(Cause.PREEMPTED, because("allocation-ends", draft.job.hosts, at_s=self.at_s))


class AllocationGone(JobInput):
    """The allocation has ended, with every process in it (allocations.Gone). `is_ours`: it was released by us."""

    cause: str
    reason: Reason
    hosts: tuple[str, ...] = ()
    is_ours: bool = False

    def apply(self, draft: Draft) -> None:
        before, state = draft.job, draft.job.state
        if before.allocation is None:
            return
        if not self.is_ours:
            draft.record("allocation-gone", self.hosts, values={"cause": self.cause, "reason": self.reason})
        for node in before.nodes:
            lost = {"phase": Phase.LOST, "lost": "allocation"} if node.may_run_processes else {}
            draft.set_node(node.host, leftovers=(), **lost)
        draft.job = replace(draft.job, allocation=None, pool=(), unconfirmed=(), spares=())
        reason = because("allocation-gone", self.hosts, why=self.reason)
        if self.is_ours:
            self._request_again(draft, before)
        elif self.cause == "cancelled" and state is State.STOPPING:
            draft.job = replace(draft.job, cause=Cause.USER, reason=reason)
        elif self.cause == "cancelled":
            draft.stop(Cause.USER, reason)
        elif state is State.QUEUED and self.cause in ("failed", *(() if before.pool else ("time-limit",))):
            draft.stop(Cause.LIMIT, reason)  # the same request would meet it again
        elif state is State.QUEUED and before.pool:
            self._request_again(draft, before)
        elif state is State.QUEUED or state in BEFORE_GO or state is State.RUNNING:
            # its nodes have no more to tell: no diagnosis is awaited
            is_preempted = self.cause in ("time-limit", "preempted")
            failure = Failure(Kind.PREEMPTED if is_preempted else Kind.INFRA, reason.code, self.hosts, (), "certain")
            draft.job = replace(draft.job, failure=failure, first_failure=FirstFailure(reason, "certain"))
            draft.stop(Cause.PREEMPTED if is_preempted else Cause.NODE_LOST, reason)

    def _request_again(self, draft: Draft, before: Job) -> None:
        """Let a queued job request by another key than that of the allocation that ended: the engine still lists it."""
        if before.state is State.QUEUED and before.allocation == before.run_id:
            draft.job = replace(draft.job, attempt=before.attempt + 1)
