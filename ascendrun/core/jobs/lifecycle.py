"""State machine of a job: the transition table, a single writer of the state, a pure step from input to actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable, get_args

from ascendrun.core.events import Event
from ascendrun.core.jobs import inputs, reasons
from ascendrun.core.jobs.inputs import Action, JobInput
from ascendrun.core.jobs.job import Cause, Job, NodeProgress, Phase, State
from ascendrun.core.jobs.reasons import FirstFailure
from ascendrun.text import Text

TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.CHECKING, State.STOPPING}),
    State.CHECKING: frozenset({State.STAGING, State.STOPPING}),
    State.STAGING: frozenset({State.STARTING, State.STOPPING}),
    State.STARTING: frozenset({State.RUNNING, State.STOPPING}),
    State.RUNNING: frozenset({State.SUCCEEDED, State.STOPPING}),
    State.STOPPING: frozenset({State.STOPPED, State.FAILED, State.BACKOFF}),
    State.BACKOFF: frozenset({State.QUEUED, State.STOPPING}),
    **dict.fromkeys((State.SUCCEEDED, State.STOPPED, State.FAILED), frozenset()),
}

FAILURE_GRACE_S = 2.0
"""Grace period of the other ranks after one has failed: a checkpoint without the failed rank would be incomplete."""

CONFIRM_S = 30.0
"""Seconds beyond the grace period that an unreachable node may keep a job in STOPPING; a reachable node, twice that."""


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
    draft = _Draft(job, now_s, recent)
    _HANDLERS[type(event)](draft, event)
    draft.settle()
    return Step(draft.job, tuple(draft.transitions), tuple(draft.events), tuple(draft.actions))


def resume(job: Job, *, now_s: float) -> Step:
    """Return the step of a new controller for a job of a previous controller.

    A start without GO is repeated as the next attempt: the nodes dropped their reservations with the connections of the
    old controller. After GO every action is repeatable and is sent again.
    """
    if job.state in (State.CHECKING, State.STAGING, State.STARTING) and job.go_sent_at_s is None:
        return advance(job, inputs.HeadRestarted(), now_s=now_s)
    job = restart_timers(job, now_s=now_s)
    if job.state is State.STARTING:
        return Step(job, actions=(inputs.StartNodes(),))
    if job.state is State.STOPPING or job.unconfirmed:
        return Step(job, actions=_stop_actions(job))
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
        if self.job.is_terminal:
            return
        if self.job.state is State.STOPPING:
            if now and not self.job.stop_now:
                self.job = replace(self.job, stop_now=True)
                self.actions += _stop_actions(self.job)
            return
        self.job = replace(self.job, cause=cause, stop_now=now)
        self.transition(State.STOPPING, reason)
        self.actions += _stop_actions(self.job)

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
            self._finish(State.SUCCEEDED, reasons.succeeded(self.job.world_size))
        if self.job.state is State.STOPPING:
            self._settle_stop()

    def _settle_start(self) -> None:
        if self.job.go_sent_at_s is None and _all_at_least(self.job, Phase.READY):
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
        if cause is Cause.HEAD_RESTARTED:
            self.transition(State.BACKOFF, self.job.reason)
            again = replace(self.job, attempt=self.job.attempt + 1, nodes=(), world_size=0, master_port=None)
            again = replace(again, go_sent_at_s=None, started_at_s=None, cause=None, stop_now=False, first_failure=None)
            self.job = again
            self.transition(State.QUEUED, reasons.next_attempt(self.job.attempt))
            return
        target = State.STOPPED if cause in (Cause.USER, Cause.NEED) else State.FAILED
        reason = self.job.reason
        if cause is Cause.FAILURE and self.job.first_failure:
            reason = self.job.first_failure.reason()
        self._finish(target, reason)

    def _finish(self, target: State, reason: Text) -> None:
        self.job = replace(self.job, ended_at_s=self.now_s)
        self.transition(target, reason)


def _place_of(reason: Text) -> tuple[Sequence[str], Sequence[int]]:
    """Return the hosts and ranks that a reason names."""
    host, rank = reason.values.get("host"), reason.values.get("rank")
    return reason.values.get("hosts") or ([host] if host else []), [] if rank is None else [rank]


def _all_at_least(job: Job, phase: Phase) -> bool:
    order = list(Phase)
    return bool(job.nodes) and all(order.index(node.phase) >= order.index(phase) for node in job.nodes)


def _stop_actions(job: Job) -> tuple[Action, ...]:
    actions: list[Action] = []
    if job.go_sent_at_s is None and job.nodes:
        actions.append(inputs.AbortNodes(job.run_id))
    hosts = tuple(node.host for node in job.nodes if node.may_run_processes)
    if hosts:
        actions.append(inputs.StopNodes(hosts, now=job.stop_now, grace_s=stop_grace_s(job)))
    return tuple(actions)


def stop_grace_s(job: Job) -> float:
    """Return the seconds that the ranks of a stopping job have to save a checkpoint."""
    if job.stop_now:
        return 0.0
    return job.grace_s if job.cause is Cause.USER or job.cause is Cause.LIMIT else FAILURE_GRACE_S


# One function for each input.


def _nodes_available(draft: _Draft, event: inputs.NodesAvailable) -> None:
    if draft.job.state is not State.QUEUED:
        return
    nodes = tuple(NodeProgress(host=host, node_rank=k) for k, host in enumerate(draft.job.hosts))
    draft.job = replace(draft.job, nodes=nodes, world_size=0, master_port=None, go_sent_at_s=None)
    draft.transition(State.CHECKING, reasons.nodes_available(len(nodes)))
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
    draft.set_node(event.host, clock_offset_s=event.clock_offset_s, boot_id=event.boot_id)
    if node.phase is Phase.PENDING:
        draft.set_node(event.host, phase=Phase.REPORTED)


def _checked(draft: _Draft, event: inputs.Checked) -> None:
    for finding, line in event.warnings:
        values = {"finding": finding.code, "values": finding.values, "warning": line}
        draft.record("preflight-warning", finding.hosts, values=values)


def _planned(draft: _Draft, event: inputs.Planned) -> None:
    for host, ranks in event.ranks.items():
        draft.set_node(host, ranks=ranks)
    draft.job = replace(draft.job, world_size=event.world_size)


def _node_staged(draft: _Draft, event: inputs.NodeStaged) -> None:
    if draft.job.node(event.host).phase is Phase.REPORTED:
        draft.set_node(event.host, phase=Phase.STAGED)


def _node_ready(draft: _Draft, event: inputs.NodeReady) -> None:
    if draft.job.go_sent_at_s is None and draft.job.state is not State.STARTING:
        draft.actions.append(inputs.AbortNodes(draft.job.run_id))  # stopped while this node was still preparing
        return
    if draft.job.state is not State.STARTING or draft.job.node(event.host).phase is not Phase.STAGED:
        return
    draft.set_node(event.host, phase=Phase.READY)
    if event.master_port is not None:
        draft.job = replace(draft.job, master_port=event.master_port)


def _refused(draft: _Draft, event: inputs.Refused) -> None:
    why = event.why if event.host is None else reasons.on_host(event.host, event.why)
    hosts = event.hosts or _hosts_named(why, draft.job.hosts)
    if draft.job.go_sent_at_s is None:
        draft.stop(Cause.REFUSED, reasons.preflight_failed(hosts, why))
    else:
        draft.stop(Cause.FAILURE, why if isinstance(why, Text) else reasons.legacy(why))


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
    if node.phase is Phase.GO_SENT and len(node.pids) + 1 >= len(node.ranks):
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
    if event.leftovers:
        draft.record(
            "processes-remain", [event.host], (), {"pids": list(event.leftovers), "count": len(event.leftovers)}
        )
    node = draft.job.node(event.host)
    if node.may_run_processes:
        draft.set_node(event.host, phase=Phase.ENDED)
    if event.host in draft.job.unconfirmed:
        rest = tuple(host for host in draft.job.unconfirmed if host != event.host)
        draft.job = replace(draft.job, unconfirmed=rest)
        draft.record("processes-gone", [event.host])
    if draft.job.state in (State.STARTING, State.RUNNING) and not _all_exited_zero(draft.job.node(event.host)):
        failure = draft.job.first_failure
        draft.stop(Cause.FAILURE, failure.reason() if failure else reasons.ranks_ended_early(event.host))


def _node_rebooted(draft: _Draft, event: inputs.NodeRebooted) -> None:
    if not draft.job.node(event.host).may_run_processes:
        return
    draft.set_node(event.host, phase=Phase.LOST)
    unconfirmed = tuple(host for host in draft.job.unconfirmed if host != event.host)
    draft.job = replace(draft.job, unconfirmed=unconfirmed)
    failure = FirstFailure("node-rebooted", event.host)
    if draft.job.first_failure is None and draft.job.state is not State.STOPPING:
        draft.job = replace(draft.job, first_failure=failure)
    draft.stop(Cause.NODE_LOST, failure.reason())


def _supervisor_lost(draft: _Draft, event: inputs.SupervisorLost) -> None:
    if draft.job.node(event.host).may_run_processes:
        draft.stop(Cause.NODE_LOST, reasons.supervisor_lost(event.host))


def _stop_started(draft: _Draft, event: inputs.StopStarted) -> None:
    if event.by == "limit":
        draft.stop(Cause.LIMIT, reasons.time_limit(event.host, event.why))


def _tick(draft: _Draft, event: inputs.Tick) -> None:
    job = draft.job
    if job.state is State.STARTING and job.go_sent_at_s is not None and draft.now_s - job.go_sent_at_s > job.start_s:
        late = [n for n in job.nodes if n.phase is Phase.GO_SENT]
        missing = sum(len(n.ranks) - len(n.pids) for n in late)
        draft.stop(Cause.START_TIMEOUT, reasons.start_timeout([n.host for n in late], missing, job.start_s))
    if job.state is State.STOPPING:
        _give_up_waiting(draft, event.reachable, waited_s=draft.now_s - job.since_s - stop_grace_s(job))


def _give_up_waiting(draft: _Draft, reachable: frozenset[str], *, waited_s: float) -> None:
    """Mark hosts that do not confirm the end in time as unconfirmed, so that the job can end."""
    waiting = [n.host for n in draft.job.nodes if n.may_run_processes and n.host not in draft.job.unconfirmed]
    unreachable = tuple(host for host in waiting if host not in reachable and waited_s > CONFIRM_S)
    stuck = tuple(host for host in waiting if host in reachable and waited_s > 2 * CONFIRM_S)
    if unreachable:
        draft.record("end-unconfirmed", unreachable)
    if stuck:
        draft.record("end-failed", stuck)
    if unreachable or stuck:
        draft.job = replace(draft.job, unconfirmed=(*draft.job.unconfirmed, *unreachable, *stuck))


def _all_exited_zero(node: NodeProgress) -> bool:
    return all(rank in node.exits and node.exits[rank].code == 0 for rank in node.ranks)


def find_first_failure(job: Job) -> FirstFailure | None:
    """Return the rank that failed first over all nodes, clock offsets removed; None: none failed."""
    failures = [
        (exit.at_ns - int((node.clock_offset_s or 0.0) * 1e9), rank, node.host, exit)
        for node in job.nodes
        for rank, exit in node.exits.items()
        if exit.is_failure
    ]
    if not failures:
        return None
    _, rank, host, first = min(failures, key=lambda failure: failure[:2])
    kind = "rank-killed" if first.signal is not None else "rank-exited"
    return FirstFailure(kind, host, rank, code=first.code, signal=first.signal)


_HANDLERS: Mapping[type[object], Callable[..., None]] = {
    inputs.NodesAvailable: _nodes_available,
    inputs.WaitingForNodes: _waiting_for_nodes,
    inputs.DependencyFailed: _dependency_failed,
    inputs.NodeReported: _node_reported,
    inputs.Checked: _checked,
    inputs.Planned: _planned,
    inputs.NodeStaged: _node_staged,
    inputs.NodeReady: _node_ready,
    inputs.Refused: _refused,
    inputs.RankStarted: _rank_started,
    inputs.RankExited: _rank_exited,
    inputs.RankHungAtExit: _rank_hung_at_exit,
    inputs.StartFailed: _start_failed,
    inputs.NodeEnded: _node_ended,
    inputs.NodeRebooted: _node_rebooted,
    inputs.SupervisorLost: _supervisor_lost,
    inputs.StopStarted: _stop_started,
    inputs.StopRequested: lambda draft, event: draft.stop(Cause.USER, reasons.stopped_by_user(), now=event.now),
    inputs.HeadRestarted: lambda draft, _: draft.stop(Cause.HEAD_RESTARTED, reasons.controller_restarted()),
    inputs.Tick: _tick,
}

assert set(_HANDLERS) == set(get_args(inputs.JobInput)), "an input without a handler"
