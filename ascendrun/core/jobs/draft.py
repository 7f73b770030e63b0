"""A job during one step of its state machine: its transition table, and the only writer of its state."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Callable, TypeVar

from ascendrun.core.dataclass import dataclass
from ascendrun.core.events import Event
from ascendrun.core.jobs import restart
from ascendrun.core.jobs.actions import (
    AbortNodes,
    Action,
    ForgetReplies,
    Judge,
    PrepareNodes,
    StageNodes,
    StartNodes,
    StopNodes,
)
from ascendrun.core.jobs.job import BEFORE_GO, Cause, Job, NodeProgress, Phase, State
from ascendrun.core.jobs.outcome import completing_ranks, judge_quickly
from ascendrun.core.jobs.reasons import Reason, because
from ascendrun.core.jobs.restart import Again, PastAttempt

T = TypeVar("T", Job, NodeProgress)
TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.CHECKING, State.STOPPING}),
    State.CHECKING: frozenset({State.STAGING, State.STOPPING}),
    State.STAGING: frozenset({State.STARTING, State.STOPPING}),
    State.STARTING: frozenset({State.RUNNING, State.STOPPING}),
    State.RUNNING: frozenset({State.SUCCEEDED, State.STOPPING}),
    State.STOPPING: frozenset({State.SUCCEEDED, State.STOPPED, State.FAILED, State.BACKOFF}),
    State.BACKOFF: frozenset({State.QUEUED, State.STOPPING}),
    State.SUCCEEDED: frozenset(),
    State.STOPPED: frozenset({State.BACKOFF}),
    State.FAILED: frozenset({State.BACKOFF}),
}

FAILURE_GRACE_S = 2.0
"""Grace period of the other ranks after one has failed: a checkpoint without the failed rank would be incomplete."""

HELD_S = (5.0, 300.0)
"""Seconds until a job tries again whose devices or ports are in use: the first pause, doubled up to the second."""
HUNG_GRACE_S = 5.0
"""Seconds that the ranks of a hung job have to print their stacks."""
PASSED_OVER_S = 600.0
"""Seconds in which a job does not use a host that was not ready for it."""

CONFIRM_S = 30.0
"""Seconds beyond the grace period that an unreachable node may keep a job in STOPPING; a reachable node, twice that."""

JUDGE_S = 120.0
"""Seconds of STOPPING beyond the grace period after which a diagnosis is no longer awaited."""

ENGINE_S = 15.0
"""Seconds for which a job whose nodes report their end waits for what its engine says of the allocation."""

_ENDS: Mapping[Cause | None, State] = {
    Cause.USER: State.STOPPED,
    Cause.NEED: State.STOPPED,
    Cause.COMPLETED: State.SUCCEEDED,
}
RESTARTED = frozenset({Cause.FAILURE, Cause.NODE_LOST, Cause.START_TIMEOUT, Cause.PREEMPTED, Cause.HUNG, Cause.REFUSED})
"""Causes after which the restart policy decides; a refused first start is reported to the user who waits for it."""
PAUSES = frozenset({Cause.HELD, Cause.HEAD_RESTARTED, Cause.PASSED_OVER, Cause.RESIZED, Cause.REQUEUED})
"""Causes after which the job is queued again, whatever its policy."""
SAVING = frozenset({Cause.USER, Cause.LIMIT, Cause.PREEMPTED, Cause.COMPLETED, Cause.RESIZED, Cause.REQUEUED})
"""Causes with which ranks get the grace period of the job to save a checkpoint."""


class InvalidTransitionError(AssertionError):
    """A programming error: transition not in the table. Carries the last events of the job."""


@dataclass(frozen=True)
class Transition:
    """A change of state with its time and reason."""

    source: State
    target: State
    at_s: float
    reason: Reason


@dataclass(frozen=True)
class Step:
    """Result of one input: the next record, state changes, events to store, actions to perform."""

    job: Job
    transitions: tuple[Transition, ...] = ()
    events: tuple[Event, ...] = ()
    actions: tuple[Action, ...] = ()

    def then(self, later: Step) -> Step:
        """Return both steps as one, for events that arrived together."""
        return Step(
            later.job, self.transitions + later.transitions, self.events + later.events, self.actions + later.actions
        )


class Draft:
    """A job during `advance`: the only writer of its state."""

    def __init__(self, job: Job, now_s: float, recent: Callable[[], Sequence[str]]) -> None:
        self.job = job
        self.now_s = now_s
        self.transitions: list[Transition] = []
        self.events: list[Event] = []
        self.actions: list[Action] = []
        self.fenced: frozenset[str] = frozenset()
        self._recent = recent
        self._changed = 0
        """The position of a node: the one that was changed last."""

    def record(
        self, code: str, hosts: Sequence[str] = (), ranks: Sequence[int] = (), values: Mapping[str, Any] | None = None
    ) -> None:
        self.events.append(Event(code, values or {}, tuple(hosts), tuple(ranks), self.job.attempt, self.now_s))

    def transition(self, target: State, reason: Reason) -> None:
        if target not in TRANSITIONS[self.job.state]:
            past = "; ".join(self._recent()) or "no past recorded"
            raise InvalidTransitionError(
                f"{self.job.id}: {self.job.state.value} -> {target.value} ({reason}). Events: {past}"
            )
        self.transitions.append(Transition(self.job.state, target, self.now_s, reason))
        cause = self.job.cause.value if self.job.cause is not None else None
        values = {"state": target.value, "previous": self.job.state.value, "reason": reason, "cause": cause}
        values["confidence"] = self.job.confidence
        if self.job.state in BEFORE_GO and target not in BEFORE_GO:
            self.actions.append(ForgetReplies())
        self.record("state-changed", reason.hosts, reason.ranks, values)
        self.job = replace(self.job, state=target, reason=reason, since_s=self.now_s)

    def set_node(self, host: str, **changes: Any) -> None:
        at, nodes = self.job.place_of(host), self.job.nodes
        if at is not None:
            changed = _copy(nodes[at], changes)
            self.job, self._changed = _copy(self.job, {"nodes": (*nodes[:at], changed, *nodes[at + 1 :])}), at

    def _are_all(self, *phases: Phase) -> bool:
        """Return whether all nodes are in one of these phases. Of a thousand inputs in a row most change one node, and
        it shows already that they are not."""
        nodes = self.job.nodes
        of_changed = nodes[self._changed : self._changed + 1]
        return all(node.phase in phases for node in of_changed) and all(node.phase in phases for node in nodes)

    def stop(self, cause: Cause, reason: Reason, *, now: bool = False) -> None:
        """Go to STOPPING, with its actions; a later request to stop now applies as well."""
        if self.job.is_terminal or (self.job.state is State.BACKOFF and cause is not Cause.USER):
            return  # the attempt is over: late reports of its nodes change nothing
        if self.job.state is State.STOPPING:
            if cause is Cause.USER and (self.job.cause in PAUSES or may_restart(self.job)):
                self.job = replace(self.job, cause=cause, reason=reason)  # else it would start again
            if now and not self.job.stop_now:
                self.job = replace(self.job, stop_now=True)
                self.actions += stop_actions(self.job)
            return
        self.job = replace(self.job, cause=cause, stop_now=now)
        self.transition(State.STOPPING, reason)
        self.actions += stop_actions(self.job) + judge_actions(self.job)

    def wait_for(self, reason: Reason) -> None:
        """Show what the job waits for in its present state, and record it once."""
        if self.job.reason != reason:
            self.job = replace(self.job, reason=reason)
            self.record("waiting", values={"reason": reason})

    def hold(self, reason: Reason, hosts: Sequence[str], by: str | None) -> None:
        self.record("held", hosts, values={"reason": reason, "by": by})
        self.stop(Cause.HELD, reason)

    def settle(self) -> None:
        """Make every transition that the record allows."""
        job = self.job
        if job.state is State.CHECKING and job.world_size and all_at_least(job, Phase.REPORTED):
            self.transition(
                State.STAGING, because("checked", count=len(job.nodes), seconds=round(self.now_s - job.since_s, 3))
            )
            self.actions.append(StageNodes())
        if self.job.state is State.STAGING and all_at_least(self.job, Phase.STAGED):
            seconds = round(self.now_s - self.job.since_s, 3)
            self.transition(State.STARTING, because("staged", count=len(job.nodes), seconds=seconds))
            self.actions.append(PrepareNodes())
        if self.job.state is State.STARTING:
            self._settle_start()
        if self.job.state is State.RUNNING and self._are_all(Phase.ENDED):
            self._finish(State.SUCCEEDED, because("succeeded", count=self.job.rank_count))
        self._settle_completion()
        if self.job.state is State.STOPPING:
            self._settle_stop()
        if self.job.state is State.BACKOFF and self.now_s >= (self.job.not_before_s or 0.0):
            self._settle_backoff()

    def _settle_start(self) -> None:
        if self.job.go_sent_at_s is None and all_at_least(self.job, Phase.READY):
            blocks = [set(n.hccl) for n in self.job.nodes if n.hccl is not None]
            common = set.intersection(*blocks) if blocks else set()
            if blocks and not common:
                self.hold(because("no-common-ports", self.job.hosts), self.job.hosts, None)
                return
            self.job = replace(self.job, hccl_base=min(common, default=None), refusals=0)
            nodes = tuple(replace(n, phase=Phase.GO_SENT) for n in self.job.nodes)
            self.job = replace(self.job, nodes=nodes, go_sent_at_s=self.now_s)
            self.actions.append(StartNodes())
        if self._are_all(Phase.STARTED, Phase.ENDED):
            self.job = replace(self.job, started_at_s=self.now_s)
            self.transition(State.RUNNING, because("running", count=self.job.world_size))

    def _settle_completion(self) -> None:
        """Stop the nodes that only serve, when the others have ended with success; also where one of them ended by that
        before its stop, and its end arrived first."""
        is_early = self.job.state is State.STOPPING and self.job.cause in (Cause.FAILURE, Cause.NODE_LOST)
        ranks = completing_ranks(self.job) if is_early or self.job.state is State.RUNNING else ()
        reason = because("completed", count=len(ranks))
        if not ranks:
            return
        if is_early:
            self.job = replace(self.job, cause=Cause.COMPLETED, reason=reason, first_failure=None, failure=None)
            self.record("completed", values={"reason": reason})
        else:
            self.stop(Cause.COMPLETED, reason)

    def _settle_stop(self) -> None:
        waiting = tuple(n.host for n in self.job.nodes if n.may_run_processes and n.host not in self.job.unconfirmed)
        if waiting:
            return
        cause = self.job.cause
        if cause is Cause.PREEMPTED and self.job.allocation and self.now_s - self.job.since_s < ENGINE_S:
            return
        if cause in PAUSES - {Cause.HELD}:
            self.back_off(self.job.reason, self.now_s, counted=False)
            return
        if cause is Cause.HELD:
            self._wait_for_others()
            return
        reason = self.job.reason
        if cause is Cause.FAILURE and self.job.first_failure:
            reason = self.job.first_failure.reason
        if may_restart(self.job):
            self._decide_restart(reason)
        else:
            self._finish(_ENDS.get(cause, State.FAILED), reason)

    def _decide_restart(self, why: Reason) -> None:
        """End the job, or let it wait for its next attempt. Waits for the diagnosis."""
        job = self.job
        failure = judge_quickly(job) if job.cause is Cause.REFUSED else job.failure
        if failure is None:
            return
        self.job = job = replace(job, failure=failure)
        past = (*job.past, self.this_attempt())
        decision = restart.decide(job.policy, past, failure, self.now_s, job.run_id)
        used = restart.restarts_used(job.policy, job.past, self.now_s)
        values: dict[str, Any] = {
            "kind": failure.kind.value,
            "finding": failure.code,
            "confidence": failure.confidence,
            "rule": decision.rule,
            "used": used,
            "limit": job.policy.max_restarts,
            "window_s": job.policy.window_s,
            "stalled": restart.attempts_without_progress(past),
            "last_step": job.last_step,
            "saved_step": job.saved_step,
        }
        if isinstance(decision, Again):
            pause_s = round(decision.not_before_s - self.now_s, 1)
            counted = decision.rule == "again"
            more = {"pause_s": pause_s, "avoid": decision.avoid, "quarantine": decision.quarantine}
            self.record("restarting", failure.hosts, failure.ranks, {**values, **more})
            code = "restarting" if counted else "restarting-uncounted"
            limit = job.policy.max_restarts
            reason = because(code, why=why, number=used + 1, limit=limit, at_s=decision.not_before_s)
            self.back_off(reason, decision.not_before_s, counted=counted, avoid=decision.avoid)
            return
        self.record("gave-up", failure.hosts, failure.ranks, values)
        rule = because(f"rule-{decision.rule}", **values)
        self._finish(State.FAILED, because("not-restarted", why=why, rule=rule))

    def back_off(self, reason: Reason, not_before_s: float, *, counted: bool = True, avoid: Sequence[str] = ()) -> None:
        """Go from STOPPING to BACKOFF, until `not_before_s`. `counted`: this uses one of the job's restarts; `avoid`:
        hosts that the next attempt uses last."""
        attempt = replace(self.this_attempt(), counted=counted, avoid=tuple(avoid))
        self.job = replace(
            self.job, past=restart.keep((*self.job.past, attempt), self.job.policy), not_before_s=not_before_s
        )
        self.transition(State.BACKOFF, reason)

    def _wait_for_others(self) -> None:
        """Back off since devices or ports are in use; an attempt without GO is no past attempt."""
        past, run_id = self.job.past, self.job.run_id
        pause_s = min(HELD_S[1], HELD_S[0] * 2.0**self.job.refusals)
        spread = 0.75 + zlib.crc32(run_id.encode("utf-8")) % 1000 / 2000  # of jobs that hold parts of each other's
        self.back_off(self.job.reason, self.now_s + pause_s * spread, counted=False)
        self.job = replace(self.job, refusals=self.job.refusals + 1)
        if self.job.go_sent_at_s is None:
            self.job = replace(self.job, past=past)

    def this_attempt(self) -> PastAttempt:
        """Return the present attempt as one that ends now."""
        job = self.job
        return PastAttempt(
            job.attempt,
            job.hosts,
            job.started_at_s,
            self.now_s,
            job.failure,
            last_step=job.last_step,
            saved_step=job.saved_step,
            resumed_step=job.resume.step if job.resume else None,
            older_step=job.resume.older if job.resume else None,
        )

    def _settle_backoff(self) -> None:
        """Queue the next attempt when no process of this one can be left; else say on which hosts that is unknown."""
        hosts = unproven_hosts(self.job)
        if not hosts or can_restart_without(self.job, hosts, self.fenced):
            if hosts:
                by = "lease" if self.job.policy.on_unreachable_node == "fence" else "epoch"
                self.record("host-fenced", hosts, values={"by": by})
            self._requeue()
            return
        power = next((node.power for node in self.job.nodes if node.host in hosts and node.power is not None), None)
        code = "waiting-for-end" if power is None else "waiting-for-power"
        reason = because(code, hosts, why=power, attempt=self.job.attempt)
        if self.job.reason != reason:
            self.job = replace(self.job, reason=reason)
            self.record("restart-waits", hosts, values={"reason": reason})

    def _requeue(self) -> None:
        """Leave BACKOFF: queue the next attempt."""
        self.job = replace(
            self.job,
            attempt=self.job.attempt + 1,
            hosts=(),
            nodes=(),
            world_size=0,
            hccl_base=None,
            go_sent_at_s=None,
            started_at_s=None,
            cause=None,
            stop_now=False,
            stopped_by=None,
            first_failure=None,
            failure=None,
            last_step=None,
            saved_step=None,
            unconfirmed=(),
            not_before_s=None,
            resume=None,
            grows_after=None,
        )
        self.transition(State.QUEUED, because("next-attempt", attempt=self.job.attempt))

    def _finish(self, target: State, reason: Reason) -> None:
        self.job = replace(self.job, ended_at_s=self.now_s)
        self.transition(target, reason)


def may_restart(job: Job) -> bool:
    """Return whether the restart policy decides how a stopping job ends."""
    if job.policy.max_restarts <= 0 or job.cause not in RESTARTED:
        return False
    return job.cause is not Cause.REFUSED or job.attempt > 1


def unproven_hosts(job: Job) -> tuple[str, ...]:
    """Return the hosts on which processes of the job's attempt may still live."""
    return tuple(node.host for node in job.nodes if node.may_run_processes or node.leftovers)


def can_restart_without(
    job: Job, silent: Sequence[str], fenced: frozenset[str] = frozenset(), *, switchable: frozenset[str] = frozenset()
) -> bool:
    """Return whether the next attempt may start while processes of this one may live on the hosts `silent`.

    It must not use these hosts, and the old processes must not be able to change its checkpoints: those on the hosts
    `fenced` have ended, those on the hosts `switchable` can be ended.
    """
    mode = job.policy.on_unreachable_node
    is_fenced = mode == "auto" and job.policy.has_epochs or mode == "fence" and set(silent) <= fenced
    if not (is_fenced or (silent and set(silent) <= switchable)):
        return False
    if not set(silent) <= set(job.unconfirmed):
        return False  # the host responds: its end is on the way, or its leftovers hold its devices
    return len(set(job.pool) - set(silent)) >= fewest_hosts(job)


def fewest_hosts(job: Job) -> int:
    """Return how many hosts the next attempt of a job that has run needs at least."""
    return min(job.request.min_nodes or len(job.nodes), len(job.nodes))


def judge_actions(job: Job) -> tuple[Action, ...]:
    """Return the request for the diagnosis of an attempt that failed after its start and has none."""
    is_open = job.cause in RESTARTED and job.cause is not Cause.REFUSED and job.failure is None
    return (Judge(job.attempt),) if is_open else ()


def _copy(record: T, changes: Mapping[str, Any]) -> T:
    """Return a changed copy, as `replace` does: that reads fifty fields of a job one by one, for each of its ranks."""
    changed = copy(record)
    for name, value in changes.items():
        assert hasattr(record, name), name
        object.__setattr__(changed, name, value)
    return changed


def all_at_least(job: Job, phase: Phase) -> bool:
    order = list(Phase)
    return bool(job.nodes) and all(order.index(node.phase) >= order.index(phase) for node in job.nodes)


def stop_actions(job: Job) -> tuple[Action, ...]:
    actions: list[Action] = []
    if job.go_sent_at_s is None and job.nodes:
        actions.append(AbortNodes(job.run_id, job.hosts))
    hosts = tuple(node.host for node in job.nodes if node.may_run_processes)
    if hosts:
        actions.append(StopNodes(hosts, job.stop_now, stop_grace_s(job), hung=job.cause is Cause.HUNG))
    return tuple(actions)


def stop_grace_s(job: Job) -> float:
    """Return the seconds that the ranks of a stopping job have to save a checkpoint."""
    if job.stop_now:
        return 0.0
    if job.cause is Cause.HUNG:
        return HUNG_GRACE_S
    return job.grace_s if job.cause in SAVING else FAILURE_GRACE_S
