"""State machine of a job: the transition table, a single writer of the state, a pure step from input to actions."""

from __future__ import annotations

import signal
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Callable, get_args

from ascendrun.core.dataclass import dataclass
from ascendrun.core.events import Event
from ascendrun.core.jobs import inputs, reasons, restart
from ascendrun.core.jobs.inputs import Action, JobInput
from ascendrun.core.jobs.job import Cause, Exit, ForkedRank, Job, NodeProgress, Phase, State
from ascendrun.core.jobs.reasons import FirstFailure
from ascendrun.core.jobs.restart import Again, Failure, Kind, PastAttempt
from ascendrun.text import Text

TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.CHECKING, State.STOPPING}),
    State.CHECKING: frozenset({State.STAGING, State.STOPPING}),
    State.STAGING: frozenset({State.STARTING, State.STOPPING}),
    State.STARTING: frozenset({State.RUNNING, State.STOPPING}),
    State.RUNNING: frozenset({State.SUCCEEDED, State.STOPPING}),
    State.STOPPING: frozenset({State.STOPPED, State.FAILED, State.BACKOFF}),
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

RESTARTED = frozenset({Cause.FAILURE, Cause.NODE_LOST, Cause.START_TIMEOUT, Cause.PREEMPTED, Cause.HUNG, Cause.REFUSED})
"""Causes after which the restart policy decides; a refused first start is reported to the user who waits for it."""


_BEFORE_GO = (State.CHECKING, State.STAGING, State.STARTING)

_OF_NODES = (
    inputs.NodeReported,
    inputs.NodeStaged,
    inputs.NodeReady,
    inputs.RankStarted,
    inputs.RankExited,
    inputs.ForkedRankStarted,
    inputs.ForkedRankExited,
    inputs.RankHungAtExit,
    inputs.StartFailed,
    inputs.NodeEnded,
    inputs.LeftoversGone,
    inputs.NodeLost,
    inputs.SupervisorLost,
    inputs.StopStarted,
    inputs.NodeTrouble,
)
"""Inputs from one node of the present attempt."""


class InvalidTransitionError(AssertionError):
    """A programming error: transition not in the table. Carries the last events of the job."""


@dataclass(frozen=True)
class Transition:
    """A change of state with its time and reason."""

    source: State
    target: State
    at_s: float
    reason: Text


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


def advance(job: Job, event: JobInput, *, now_s: float, recent: Callable[[], Sequence[str]] = tuple) -> Step:
    """Return the next record of `job` after `event`, and the actions. Pure; a repeated event changes nothing.

    `recent` returns the last events of the job; used only for the message of InvalidTransitionError.
    """
    if isinstance(event, _OF_NODES) and all(node.host != event.host for node in job.nodes):
        return Step(job)  # of an attempt that is over: it arrived late
    draft = _Draft(job, now_s, recent)
    _HANDLERS[type(event)](draft, event)
    draft.settle()
    return Step(draft.job, tuple(draft.transitions), tuple(draft.events), tuple(draft.actions))


def resume(job: Job, *, now_s: float) -> Step:
    """Return the step of a new controller for a job of a previous controller.

    A start without GO is repeated as the next attempt: the nodes dropped their reservations with the connections of the
    old controller. After GO every action is repeatable and is sent again.
    """
    if job.state in _BEFORE_GO and job.go_sent_at_s is None:
        return advance(job, inputs.HeadRestarted(), now_s=now_s)
    job = restart_timers(job, now_s=now_s)
    if job.state is State.STARTING:
        return Step(job, actions=(inputs.StartNodes(),))
    if job.state is State.STOPPING or job.unconfirmed:
        return Step(job, actions=_stop_actions(job) + _judge_actions(job))
    return Step(job)


def restart_timers(job: Job, *, now_s: float) -> Job:
    """Restart the timeouts of a job after a time without a running controller (stopped or suspended)."""
    if job.state is State.STARTING and job.go_sent_at_s is not None:
        return replace(job, go_sent_at_s=now_s)
    return replace(job, since_s=now_s) if job.state is State.STOPPING else job


def state_changes(events: Iterable[Event]) -> tuple[tuple[float, State], ...]:
    """Return (UTC seconds, new state) of a job's events, in their order. A state of a later release is skipped."""
    changes = ((event.at_s, event.values.get("state")) for event in events if event.code == "state-changed")
    return tuple((at_s, State(name)) for at_s, name in changes if name in State.__members__)


class _Draft:
    """A job during `advance`: the only writer of its state."""

    def __init__(self, job: Job, now_s: float, recent: Callable[[], Sequence[str]]) -> None:
        self.job = job
        self.now_s = now_s
        self.transitions: list[Transition] = []
        self.events: list[Event] = []
        self.actions: list[Action] = []
        self.fenced: frozenset[str] = frozenset()
        self._recent = recent

    def record(
        self, code: str, hosts: Sequence[str] = (), ranks: Sequence[int] = (), values: Mapping[str, Any] | None = None
    ) -> None:
        self.events.append(Event(code, values or {}, tuple(hosts), tuple(ranks), self.job.attempt, self.now_s))

    def transition(self, target: State, reason: Text) -> None:
        if target not in TRANSITIONS[self.job.state]:
            past = "; ".join(self._recent()) or "no past recorded"
            raise InvalidTransitionError(
                f"{self.job.id}: {self.job.state.value} -> {target.value} ({reason}). Events: {past}"
            )
        self.transitions.append(Transition(self.job.state, target, self.now_s, reason))
        cause = self.job.cause.value if self.job.cause is not None else None
        values = {"state": target.value, "previous": self.job.state.value, "reason": reason, "cause": cause}
        self.record("state-changed", *_place_of(reason), values)
        self.job = replace(self.job, state=target, reason=reason, since_s=self.now_s)

    def set_node(self, host: str, **changes: Any) -> None:
        nodes = tuple(replace(n, **changes) if n.host == host else n for n in self.job.nodes)
        self.job = replace(self.job, nodes=nodes)

    def stop(self, cause: Cause, reason: Text, *, now: bool = False) -> None:
        """Go to STOPPING, with its actions; a later request to stop now applies as well."""
        if self.job.is_terminal or (self.job.state is State.BACKOFF and cause is not Cause.USER):
            return  # the attempt is over: late reports of its nodes change nothing
        if self.job.state is State.STOPPING:
            if cause is Cause.USER and (self.job.cause is Cause.HELD or may_restart(self.job)):
                self.job = replace(self.job, cause=cause, reason=reason)  # else it would start again
            if now and not self.job.stop_now:
                self.job = replace(self.job, stop_now=True)
                self.actions += _stop_actions(self.job)
            return
        self.job = replace(self.job, cause=cause, stop_now=now)
        self.transition(State.STOPPING, reason)
        self.actions += _stop_actions(self.job) + _judge_actions(self.job)

    def settle(self) -> None:
        """Make every transition that the record allows."""
        job = self.job
        if job.state is State.CHECKING and job.world_size and _all_at_least(job, Phase.REPORTED):
            self.transition(State.STAGING, reasons.checked(len(job.nodes), self.now_s - job.since_s))
            self.actions.append(inputs.StageNodes())
        if self.job.state is State.STAGING and _all_at_least(self.job, Phase.STAGED):
            self.transition(State.STARTING, reasons.staged(len(job.nodes), self.now_s - self.job.since_s))
            self.actions.append(inputs.PrepareNodes())
        if self.job.state is State.STARTING:
            self._settle_start()
        if self.job.state is State.RUNNING and all(n.phase is Phase.ENDED for n in self.job.nodes):
            self._finish(State.SUCCEEDED, reasons.succeeded(self.job.rank_count))
        if self.job.state is State.STOPPING:
            self._settle_stop()
        if self.job.state is State.BACKOFF and self.now_s >= (self.job.not_before_s or 0.0):
            self._settle_backoff()

    def _settle_start(self) -> None:
        if self.job.go_sent_at_s is None and _all_at_least(self.job, Phase.READY):
            blocks = [set(n.hccl) for n in self.job.nodes if n.hccl is not None]
            common = set.intersection(*blocks) if blocks else set()
            if blocks and not common:
                _hold(self, reasons.no_common_ports([n.host for n in self.job.nodes]), self.job.hosts, None)
                return
            self.job = replace(self.job, hccl_base=min(common, default=None), refusals=0)
            nodes = tuple(replace(n, phase=Phase.GO_SENT) for n in self.job.nodes)
            self.job = replace(self.job, nodes=nodes, go_sent_at_s=self.now_s)
            self.actions.append(inputs.StartNodes())
        if all(n.phase in (Phase.STARTED, Phase.ENDED) for n in self.job.nodes):
            self.job = replace(self.job, started_at_s=self.now_s)
            self.transition(State.RUNNING, reasons.running(self.job.world_size))

    def _settle_stop(self) -> None:
        waiting = tuple(n.host for n in self.job.nodes if n.may_run_processes and n.host not in self.job.unconfirmed)
        if waiting:
            return
        cause = self.job.cause
        if cause in (Cause.HEAD_RESTARTED, Cause.PASSED_OVER):
            self.back_off(self.job.reason, self.now_s, counted=False)
            return
        if cause is Cause.HELD:
            self._wait_for_others()
            return
        reason = self.job.reason
        if cause is Cause.FAILURE and self.job.first_failure:
            reason = self.job.first_failure.reason()
        if may_restart(self.job):
            self._decide_restart(reason)
        else:
            self._finish(State.STOPPED if cause in (Cause.USER, Cause.NEED) else State.FAILED, reason)

    def _decide_restart(self, why: Text) -> None:
        """End the job, or let it wait for its next attempt. Waits for the diagnosis."""
        job = self.job
        failure = judge_quickly(job) if job.cause is Cause.REFUSED else job.failure
        if failure is None:
            return
        self.job = job = replace(job, failure=failure)
        past = (*job.past, self.this_attempt())
        decision = restart.decide(job.policy, past, failure, self.now_s, job.run_id)
        used = restart.restarts_used(job.policy, job.past, self.now_s)
        values = {
            "kind": failure.kind.value,
            "finding": failure.code,
            "confidence": failure.confidence,
            "rule": decision.rule,
            "used": used,
            "limit": job.policy.max_restarts,
            "window_s": job.policy.window_s,
            "stalled": restart.attempts_without_progress(past),
            "last_step": job.last_step,
        }
        if isinstance(decision, Again):
            pause_s = round(decision.not_before_s - self.now_s, 1)
            counted = decision.rule == "again"
            more = {"pause_s": pause_s, "avoid": decision.avoid, "quarantine": decision.quarantine}
            self.record("restarting", failure.hosts, failure.ranks, {**values, **more})
            number = used + 1 if counted else None
            reason = reasons.restarting(number, job.policy.max_restarts, decision.not_before_s, why)
            self.back_off(reason, decision.not_before_s, counted=counted, avoid=decision.avoid)
            return
        self.record("gave-up", failure.hosts, failure.ranks, values)
        self._finish(State.FAILED, reasons.not_restarted(why, restart.rule_text(decision.rule, values)))

    def back_off(self, reason: Text, not_before_s: float, *, counted: bool = True, avoid: Sequence[str] = ()) -> None:
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
        reason = reasons.waiting_for_end(hosts, self.job.attempt)
        if self.job.reason != reason:
            self.job = replace(self.job, reason=reason)
            self.record("restart-waits", hosts, values={"reason": reason})

    def _requeue(self) -> None:
        """Leave BACKOFF: queue the next attempt."""
        self.job = replace(
            self.job,
            attempt=self.job.attempt + 1,
            unstarted=self.job.unstarted + (self.job.go_sent_at_s is None),
            hosts=(),
            nodes=(),
            world_size=0,
            master_port=None,
            hccl_base=None,
            go_sent_at_s=None,
            started_at_s=None,
            cause=None,
            stop_now=False,
            first_failure=None,
            failure=None,
            last_step=None,
            unconfirmed=(),
            not_before_s=None,
            resume=None,
        )
        self.transition(State.QUEUED, reasons.next_attempt(self.job.attempt))

    def _finish(self, target: State, reason: Text) -> None:
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


def can_restart_without(job: Job, silent: Sequence[str], fenced: frozenset[str] = frozenset()) -> bool:
    """Return whether the next attempt may start while processes of this one may live on the hosts `silent`.

    It must not use these hosts, and the old processes must not be able to change its checkpoints: those on the hosts
    `fenced` have ended.
    """
    mode = job.policy.on_unreachable_node
    if not (mode == "auto" and job.policy.has_epochs or mode == "fence" and set(silent) <= fenced):
        return False
    if not set(silent) <= set(job.unconfirmed):
        return False  # the host responds: its end is on the way, or its leftovers hold its devices
    return len(set(job.pool) - set(silent)) >= len(job.nodes)


def _judge_actions(job: Job) -> tuple[Action, ...]:
    is_open = may_restart(job) and job.cause is not Cause.REFUSED and job.failure is None
    return (inputs.Judge(job.attempt),) if is_open else ()


def _place_of(reason: Text) -> tuple[Sequence[str], Sequence[int]]:
    """Return the hosts and ranks that a reason names, itself or in the reason inside it."""
    inner = reason.values.get("why")
    if isinstance(inner, Text) and not {"host", "hosts"} & set(reason.values):
        return _place_of(inner)
    host, rank, ranks = (reason.values.get(name) for name in ("host", "rank", "ranks"))
    named = ranks if isinstance(ranks, (list, tuple)) else [] if rank is None else [rank]
    return reason.values.get("hosts") or ([host] if host else []), named


def _all_at_least(job: Job, phase: Phase) -> bool:
    order = list(Phase)
    return bool(job.nodes) and all(order.index(node.phase) >= order.index(phase) for node in job.nodes)


def _stop_actions(job: Job) -> tuple[Action, ...]:
    actions: list[Action] = []
    if job.go_sent_at_s is None and job.nodes:
        actions.append(inputs.AbortNodes(job.run_id, job.hosts))
    hosts = tuple(node.host for node in job.nodes if node.may_run_processes)
    if hosts:
        actions.append(inputs.StopNodes(hosts, job.stop_now, stop_grace_s(job), hung=job.cause is Cause.HUNG))
    return tuple(actions)


def stop_grace_s(job: Job) -> float:
    """Return the seconds that the ranks of a stopping job have to save a checkpoint."""
    if job.stop_now:
        return 0.0
    if job.cause is Cause.HUNG:
        return HUNG_GRACE_S
    return job.grace_s if job.cause in (Cause.USER, Cause.LIMIT, Cause.PREEMPTED) else FAILURE_GRACE_S


# One function for each input.


def _nodes_free(draft: _Draft, event: inputs.NodesFree) -> None:
    if draft.job.state is not State.QUEUED:
        return
    nodes = tuple(NodeProgress(host, k, replaces=event.replaced.get(host)) for k, host in enumerate(event.hosts))
    lost = tuple(host for host in draft.job.lost_hosts if host not in event.hosts)
    placed = replace(draft.job, hosts=event.hosts, spares=event.spares, nodes=nodes, lost_hosts=lost)
    draft.job = replace(placed, world_size=0, master_port=None, go_sent_at_s=None)
    draft.transition(State.CHECKING, reasons.nodes_available(len(nodes)))
    if len(event.spares) < draft.job.request.spares:
        draft.record("spares-missing", values={"found": len(event.spares), "count": draft.job.request.spares})
    draft.actions.append(inputs.QueryNodes())


def _waiting_for_nodes(draft: _Draft, event: inputs.WaitingForNodes) -> None:
    if draft.job.state is State.QUEUED and draft.job.reason != event.reason:
        draft.job = replace(draft.job, reason=event.reason)
        draft.record("waiting", values={"reason": event.reason})


def _dependency_failed(draft: _Draft, event: inputs.DependencyFailed) -> None:
    if draft.job.state is State.QUEUED:
        draft.stop(Cause.NEED, event.reason)


def _node_reported(draft: _Draft, event: inputs.NodeReported) -> None:
    node = draft.job.node(event.host)
    identity = {"boot_id": event.boot_id, "machine_key": event.machine_key, "incarnation": event.incarnation}
    draft.set_node(event.host, clock_offset_s=event.clock_offset_s, **identity)
    if node.phase is Phase.PENDING:
        draft.set_node(event.host, phase=Phase.REPORTED)


def _checked(draft: _Draft, event: inputs.Checked) -> None:
    for finding, line in event.warnings:
        values = {"finding": finding.code, "values": finding.values, "warning": line}
        draft.record("preflight-warning", finding.hosts, values=values)


def _resume_chosen(draft: _Draft, event: inputs.ResumeChosen) -> None:
    if draft.job.state is not State.CHECKING:
        return
    point = event.point
    draft.job = replace(draft.job, resume=point)
    for host, one in event.incomplete:
        draft.record("checkpoint-incomplete", [host], values={"path": one.path, "why": one.why, "file": one.file})
    if point.skip:
        draft.record("checkpoint-set-aside", values={"steps": list(point.skip)})
    if point.step:
        values = {"step": point.step, "format": point.format, "path": next(iter(point.paths.values()))}
        draft.record("resume-chosen", values=values)


def _resume_lost(draft: _Draft, event: inputs.ResumeLost) -> None:
    if draft.job.state is State.CHECKING:
        _hold(draft, reasons.only_copy(event.step, event.hosts), event.hosts, None)


def _planned(draft: _Draft, event: inputs.Planned) -> None:
    for host, ranks in event.ranks.items():
        draft.set_node(host, ranks=ranks)
    draft.job = replace(draft.job, world_size=event.world_size)


def _node_staged(draft: _Draft, event: inputs.NodeStaged) -> None:
    if draft.job.node(event.host).phase is Phase.REPORTED:
        draft.set_node(event.host, phase=Phase.STAGED)


def _node_ready(draft: _Draft, event: inputs.NodeReady) -> None:
    if draft.job.go_sent_at_s is None and draft.job.state is not State.STARTING:
        draft.actions.append(inputs.AbortNodes(draft.job.run_id, (event.host,)))  # stopped while it was preparing
        return
    if draft.job.state is not State.STARTING or draft.job.node(event.host).phase is not Phase.STAGED:
        return
    draft.set_node(event.host, phase=Phase.READY, hccl=event.hccl)
    if event.master_port is not None:
        draft.job = replace(draft.job, master_port=event.master_port)


def _refused(draft: _Draft, event: inputs.Refused) -> None:
    why = event.why if event.host is None else reasons.on_host(event.host, event.why)
    job = draft.job
    hosts = event.hosts or _hosts_named(why, job.hosts)
    if job.go_sent_at_s is not None:
        draft.stop(Cause.FAILURE, why if isinstance(why, Text) else reasons.legacy(why))
    elif job.state in _BEFORE_GO and _can_pass_over(job, hosts, draft.now_s, is_away=event.is_away):
        until_s = draft.now_s + PASSED_OVER_S
        draft.record("host-passed-over", hosts, values={"why": event.why, "until_s": until_s})
        draft.job = replace(job, passed_over={**job.passed_over, **dict.fromkeys(hosts, until_s)})
        draft.stop(Cause.PASSED_OVER, reasons.passed_over(hosts, event.why))
    elif job.state is not State.QUEUED or (event.host, event.hosts) == (None, ()):  # else of an attempt given up
        draft.stop(Cause.REFUSED, reasons.preflight_failed(hosts, why))


def _stage_files_missing(draft: _Draft, event: inputs.StageFilesMissing) -> None:
    files = draft.job.node(event.host).replaces
    if files is not None and draft.job.state in _BEFORE_GO:
        reason = reasons.stage_files_lost(event.host, files.host, files.stage, draft.job.pipeline)
        draft.stop(Cause.FILES_LOST, reason)


def _can_pass_over(job: Job, hosts: Sequence[str], now_s: float, *, is_away: bool) -> bool:
    """Return whether the job is placed again, without these hosts: if there are others, or if it has run before.

    What most of its hosts refuse, or three of them in turn, is wrong with the job.
    """
    passed = {host for host, until_s in job.passed_over.items() if until_s > now_s} | set(hosts)
    is_of_job = 2 * len(hosts) > len(job.hosts) if len(job.hosts) > 1 else len(passed) > 2
    has_run = any(attempt.started_at_s is not None for attempt in job.past)
    has_others = len(job.pool) - len(passed) >= job.request.nodes
    return bool(hosts) and (is_away or not is_of_job) and (has_others or has_run)


def _hold_changed(draft: _Draft, event: inputs.HoldChanged) -> None:
    if not draft.job.is_terminal and draft.job.held_by != event.by:
        draft.record("hold-ended" if event.by is None else "hold-started", values={"by": event.by or draft.job.held_by})
        draft.job = replace(draft.job, held_by=event.by)


def _held(draft: _Draft, event: inputs.Held) -> None:
    if draft.job.state in (State.CHECKING, State.STAGING, State.STARTING):
        hosts = _hosts_named(event.what, draft.job.hosts) or (event.host,)
        _hold(draft, reasons.held(event.host, event.what), hosts, event.by)


def _hold(draft: _Draft, reason: Text, hosts: Sequence[str], by: str | None) -> None:
    draft.record("held", hosts, values={"reason": reason, "by": by})
    draft.stop(Cause.HELD, reason)


def _hosts_named(why: object, hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts of the job among the values of a text."""
    if not isinstance(why, Text):
        return ()
    found: set[str] = set()
    for value in why.values.values():
        names = value if isinstance(value, (list, tuple)) else [value]
        found.update(name for name in names if isinstance(name, str) and name in hosts)
        found.update(name for text in names for name in _hosts_named(text, hosts))
    return tuple(sorted(found))


def _rank_started(draft: _Draft, event: inputs.RankStarted) -> None:
    node = draft.job.node(event.host)
    if event.rank in node.pids:
        return
    draft.set_node(event.host, pids={**node.pids, event.rank: event.pid})
    if node.phase is Phase.GO_SENT and {*node.pids, event.rank} >= set(node.ranks):
        draft.set_node(event.host, phase=Phase.STARTED)


def _rank_exited(draft: _Draft, event: inputs.RankExited) -> None:
    node = draft.job.node(event.host)
    if event.rank in node.exits:
        return
    draft.set_node(event.host, exits={**node.exits, event.rank: event.exit})
    if event.exit.killed_at_exit:
        draft.record("rank-killed-at-exit", [event.host], [event.rank])
    if event.exit.is_failure:
        failure = find_first_failure(draft.job)
        assert failure is not None, "this rank has failed"
        draft.job = replace(draft.job, first_failure=failure)
        draft.stop(Cause.FAILURE, failure.reason())


def _forked_rank_started(draft: _Draft, event: inputs.ForkedRankStarted) -> None:
    forked = draft.job.node(event.host).forked
    if event.rank not in forked or forked[event.rank].pid != event.pid:
        draft.set_node(event.host, forked={**forked, event.rank: ForkedRank(event.pid)})


def _forked_rank_exited(draft: _Draft, event: inputs.ForkedRankExited) -> None:
    forked = draft.job.node(event.host).forked
    rank = forked.get(event.rank)
    if rank is not None and rank.exit is None:
        draft.set_node(event.host, forked={**forked, event.rank: replace(rank, exit=event.exit)})


def _rank_hung_at_exit(draft: _Draft, event: inputs.RankHungAtExit) -> None:
    node = draft.job.node(event.host)
    if event.rank not in node.lingering:
        draft.set_node(event.host, lingering=(*node.lingering, event.rank))
        values = {"cause": event.cause, "why": reasons.hung_at_exit(event.cause, event.after_s)}
        draft.record("rank-hung-at-exit", [event.host], [event.rank], values)


def _start_failed(draft: _Draft, event: inputs.StartFailed) -> None:
    failure = FirstFailure("start-failed", event.host, event.rank, detail=event.why)
    if draft.job.first_failure is None:
        draft.job = replace(draft.job, first_failure=failure)
    draft.stop(Cause.FAILURE, failure.reason())


def _node_ended(draft: _Draft, event: inputs.NodeEnded) -> None:
    node = draft.job.node(event.host)
    if node.may_run_processes:
        exits = {**node.exits, **{rank: e for rank, e in event.exits.items() if not e.agrees(node.exits.get(rank))}}
        draft.set_node(event.host, phase=Phase.ENDED, leftovers=event.leftovers, exits=exits)
        if draft.job.first_failure is None:
            draft.job = replace(draft.job, first_failure=find_first_failure(draft.job))
        if event.leftovers:
            values = {
                "pids": [one.pid for one in event.leftovers],
                "count": len(event.leftovers),
                "processes": [asdict(one) for one in event.leftovers],
            }
            draft.record("processes-remain", [event.host], values=values)
    if event.host in draft.job.unconfirmed:
        rest = tuple(host for host in draft.job.unconfirmed if host != event.host)
        draft.job = replace(draft.job, unconfirmed=rest)
        draft.record("processes-gone", [event.host])
    if draft.job.state in (State.STARTING, State.RUNNING) and not _all_succeeded(draft.job.node(event.host)):
        failure = draft.job.first_failure
        draft.stop(Cause.FAILURE, failure.reason() if failure else reasons.ranks_ended_early(event.host))


def _node_lost(draft: _Draft, event: inputs.NodeLost) -> None:
    if not draft.job.node(event.host).may_run_processes:
        return
    draft.set_node(event.host, phase=Phase.LOST, lost=event.why)
    draft.record("node-lost", [event.host], values={"why": event.why})
    unconfirmed = tuple(host for host in draft.job.unconfirmed if host != event.host)
    draft.job = replace(draft.job, unconfirmed=unconfirmed)
    failure = FirstFailure(reasons.LOST[event.why], event.host)
    if draft.job.state in (State.STARTING, State.RUNNING):
        if draft.job.first_failure is None:
            draft.job = replace(draft.job, first_failure=failure)
        draft.stop(Cause.NODE_LOST, failure.reason())


def _host_given_up(draft: _Draft, event: inputs.HostGivenUp) -> None:
    """Wait no longer for checkpoints that only this host has."""
    job = draft.job
    if job.is_terminal or event.host in job.lost_hosts or event.host not in job.used_hosts:
        return
    draft.record("host-given-up", [event.host], values={"by": event.by})
    draft.job = replace(job, lost_hosts=(*job.lost_hosts, event.host))
    if job.state is State.BACKOFF and job.cause is Cause.HELD:
        draft.job = replace(draft.job, not_before_s=draft.now_s)


def _leftovers_gone(draft: _Draft, event: inputs.LeftoversGone) -> None:
    if draft.job.node(event.host).leftovers:
        draft.set_node(event.host, leftovers=())
        draft.record("leftovers-gone", [event.host])


def _supervisor_lost(draft: _Draft, event: inputs.SupervisorLost) -> None:
    if draft.job.node(event.host).may_run_processes:
        draft.stop(Cause.NODE_LOST, reasons.supervisor_lost(event.host))


def _stop_started(draft: _Draft, event: inputs.StopStarted) -> None:
    if event.by == "limit":
        draft.stop(Cause.LIMIT, reasons.time_limit(event.host, event.why))
    if event.by in ("node", "fence") and not event.done:
        draft.stop(Cause.PREEMPTED, reasons.preempted(event.host, event.why))


def _hung(draft: _Draft, event: inputs.Hung) -> None:
    if draft.job.state is State.RUNNING:
        reason = reasons.hung_without_host if event.is_unreachable else reasons.hung
        draft.stop(Cause.HUNG, reason(event.hosts, event.ranks, event.finding))


def _trains_separately(draft: _Draft, event: inputs.TrainsSeparately) -> None:
    """Fail the job, without a restart: the next attempt would do the same."""
    job = draft.job
    if job.state not in (State.STARTING, State.RUNNING) or event.attempt != job.attempt:
        return
    failure = Failure(Kind.USER, "separate-trainings", (event.host,), (), "certain")
    draft.job = replace(job, failure=failure)
    draft.stop(Cause.FAILURE, reasons.separate_trainings(event.host, event.world_size))


def _node_trouble(draft: _Draft, event: inputs.NodeTrouble) -> None:
    if event.at_ns > draft.job.node(event.host).trouble_ns:
        draft.set_node(event.host, trouble_ns=event.at_ns)
        draft.record(event.code, [event.host], values=event.values)


def _retry_requested(draft: _Draft, event: inputs.RetryRequested) -> None:
    job = draft.job
    if job.state not in (State.FAILED, State.STOPPED):
        return
    draft.job = replace(job, past=tuple(replace(one, counted=False) for one in job.past))
    draft.back_off(reasons.retried_by_user(), draft.now_s, counted=False)
    *past, last = draft.job.past
    past.append(replace(last, ended_at_s=job.ended_at_s or draft.now_s))
    draft.job = replace(draft.job, past=tuple(past), ended_at_s=None)


def _diagnosed(draft: _Draft, event: inputs.Diagnosed) -> None:
    if draft.job.state is State.STOPPING and event.attempt == draft.job.attempt and draft.job.failure is None:
        failure = judge_quickly(draft.job) if draft.job.cause is Cause.HUNG else event.failure  # what was seen before
        draft.job = replace(draft.job, failure=failure, last_step=event.last_step)


def _tick(draft: _Draft, event: inputs.Tick) -> None:
    job, draft.fenced = draft.job, event.fenced
    if job.state is State.STARTING and job.go_sent_at_s is not None and draft.now_s - job.go_sent_at_s > job.start_s:
        late = [n for n in job.nodes if n.phase is Phase.GO_SENT]
        missing = sum(len(set(n.ranks) - set(n.pids)) for n in late)
        draft.stop(Cause.START_TIMEOUT, reasons.start_timeout([n.host for n in late], missing, job.start_s))
    if job.state is State.STOPPING:
        waited_s = draft.now_s - job.since_s - stop_grace_s(job)
        _give_up_waiting(draft, event, waited_s=waited_s)
        if waited_s > JUDGE_S and may_restart(job) and job.failure is None:
            draft.job = replace(draft.job, failure=judge_quickly(job))


def _give_up_waiting(draft: _Draft, tick: inputs.Tick, *, waited_s: float) -> None:
    """Mark hosts that do not confirm the end in time as unconfirmed, so that the job can end. One that was silent long
    before is not waited for again."""
    waiting = [n.host for n in draft.job.nodes if n.may_run_processes and n.host not in draft.job.unconfirmed]
    silent = tuple(host for host in waiting if host not in tick.reachable)
    is_fenced = bool(silent) and can_restart_without(replace(draft.job, unconfirmed=silent), silent)
    patience_s = 0.0 if is_fenced and may_restart(draft.job) else CONFIRM_S
    waits_s = {host: waited_s if waited_s <= 0 else max(waited_s, tick.quiet_s.get(host, 0.0)) for host in silent}
    unreachable = tuple(host for host in silent if waits_s[host] > patience_s)
    stuck = tuple(host for host in waiting if host in tick.reachable and waited_s > 2 * CONFIRM_S)
    if unreachable:
        draft.record("end-unconfirmed", unreachable)
    if stuck:
        draft.record("end-failed", stuck)
    if unreachable or stuck:
        draft.job = replace(draft.job, unconfirmed=(*draft.job.unconfirmed, *unreachable, *stuck))


def _all_succeeded(node: NodeProgress) -> bool:
    ranks = all(rank in node.exits and node.exits[rank].is_success for rank in node.ranks)
    return ranks and not any(exit.is_failure for exit in node.exits.values())


def find_first_failure(job: Job) -> FirstFailure | None:
    """Return the rank, or what starts the ranks of a node, that failed first, clock offsets removed; None: none did."""
    failures = [
        (exit.at_ns - int((node.clock_offset_s or 0.0) * 1e9), rank, node.host, exit)
        for node in job.nodes
        for rank, exit in node.exits.items()
        if exit.is_failure
    ]
    if not failures:
        return None
    _, rank, host, first = min(failures, key=lambda failure: (failure[1] < 0, *failure[:2]))  # a launcher follows
    forked = _first_forked_failure(job)
    if forked is not None:
        rank, host, first = forked
    elif rank < 0 or job.forks:
        kind = "launcher-killed" if first.signal is not None else "launcher-exited"
        return FirstFailure(kind, host, code=first.code, signal=first.signal)
    kind = "rank-killed" if first.signal is not None else "rank-exited"
    return FirstFailure(kind, host, rank, code=first.code, signal=first.signal)


def _first_forked_failure(job: Job) -> tuple[int, str, Exit] | None:
    """Return the rank that failed first of those that the processes of the nodes started; None: not known for certain.

    SIGTERM is how a launcher ends the other ranks.
    """
    failures = [
        (one.exit.at_ns - int((node.clock_offset_s or 0.0) * 1e9), number, node.host, one.exit)
        for node in job.nodes
        for number, one in node.forked.items()
        if one.exit is not None and one.exit.is_failure and one.exit.signal != signal.SIGTERM
    ]
    _, rank, host, first = min(failures, key=lambda failure: failure[:2], default=(0, 0, "", None))
    return None if first is None or (first.code, first.signal) == (None, None) else (rank, host, first)


def judge_quickly(job: Job) -> Failure:
    """Return the failure of an attempt by its records alone, without a diagnosis."""
    first = job.first_failure
    if job.cause is Cause.PREEMPTED:
        return Failure(Kind.PREEMPTED, "preempted", confidence="certain")
    if job.cause is Cause.REFUSED:
        return Failure(Kind.INFRA, "preflight-failed", tuple(job.reason.values.get("hosts") or ()))
    if job.cause is Cause.HUNG:
        kind = Kind.INFRA if job.reason.key == "reason.hung-without-host" else Kind.HANG
        hosts, ranks = (tuple(job.reason.values.get(name) or ()) for name in ("hosts", "ranks"))
        return Failure(kind, "hang", hosts, ranks, "likely")
    if job.cause is Cause.START_TIMEOUT:
        return Failure(Kind.INFRA, "start-timeout", tuple(job.reason.values.get("hosts") or ()))
    if first is None:
        is_lost = job.cause is Cause.NODE_LOST
        return Failure(Kind.INFRA, "supervisor-lost") if is_lost else Failure(Kind.UNKNOWN, "unknown")
    ranks = () if first.rank is None else (first.rank,)
    if first.kind in reasons.LOST.values():
        return Failure(Kind.INFRA, first.kind, (first.host,), ranks, "certain")
    if first.kind == "start-failed":
        return Failure(Kind.USER, first.kind, (first.host,), ranks, "likely")
    return Failure(Kind.UNKNOWN, first.kind, (first.host,), ranks)


_HANDLERS: Mapping[type[object], Callable[..., None]] = {
    inputs.NodesFree: _nodes_free,
    inputs.WaitingForNodes: _waiting_for_nodes,
    inputs.DependencyFailed: _dependency_failed,
    inputs.NodeReported: _node_reported,
    inputs.Checked: _checked,
    inputs.ResumeChosen: _resume_chosen,
    inputs.ResumeLost: _resume_lost,
    inputs.Planned: _planned,
    inputs.NodeStaged: _node_staged,
    inputs.NodeReady: _node_ready,
    inputs.Refused: _refused,
    inputs.StageFilesMissing: _stage_files_missing,
    inputs.Held: _held,
    inputs.HoldChanged: _hold_changed,
    inputs.RankStarted: _rank_started,
    inputs.RankExited: _rank_exited,
    inputs.ForkedRankStarted: _forked_rank_started,
    inputs.ForkedRankExited: _forked_rank_exited,
    inputs.RankHungAtExit: _rank_hung_at_exit,
    inputs.StartFailed: _start_failed,
    inputs.NodeEnded: _node_ended,
    inputs.NodeLost: _node_lost,
    inputs.HostGivenUp: _host_given_up,
    inputs.LeftoversGone: _leftovers_gone,
    inputs.SupervisorLost: _supervisor_lost,
    inputs.StopStarted: _stop_started,
    inputs.NodeTrouble: _node_trouble,
    inputs.Hung: _hung,
    inputs.TrainsSeparately: _trains_separately,
    inputs.StopRequested: lambda draft, event: draft.stop(Cause.USER, reasons.stopped_by_user(), now=event.now),
    inputs.RetryRequested: _retry_requested,
    inputs.Diagnosed: _diagnosed,
    inputs.HeadRestarted: lambda draft, _: draft.stop(Cause.HEAD_RESTARTED, reasons.controller_restarted()),
    inputs.Tick: _tick,
}

assert set(_HANDLERS) == set(get_args(inputs.JobInput)), "an input without a handler"
