"""How a job lives: a literal table of transitions, one writer of the state, and one pure step from event to actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable, get_args

from ascendrun.core.jobs import job as w
from ascendrun.core.jobs.job import Action, Cause, Job, JobInput, NodeProgress, Phase, State

TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.CHECKING, State.STOPPING}),
    State.CHECKING: frozenset({State.STAGING, State.STOPPING}),
    State.STAGING: frozenset({State.STARTING, State.STOPPING}),
    State.STARTING: frozenset({State.RUNNING, State.STOPPING}),
    State.RUNNING: frozenset({State.SUCCEEDED, State.STOPPING}),
    State.STOPPING: frozenset({State.STOPPED, State.FAILED, State.BACKOFF}),
    State.BACKOFF: frozenset({State.QUEUED, State.STOPPING}),
    State.SUCCEEDED: frozenset(),
    State.STOPPED: frozenset(),
    State.FAILED: frozenset(),
}

FAILURE_GRACE_S = 2.0
"""How long the other ranks get after one has failed: they have nothing left to save that the failed one had not."""

CONFIRM_S = 30.0
"""How long, beyond the grace, an unreachable node may keep a job in STOPPING; one that answers, twice as long."""


class InvalidTransitionError(AssertionError):
    """A mistake of ours: the table has no such arrow. Carries the job's story."""


@dataclass(frozen=True)
class Transition:
    """One arrow taken: when, and why."""

    source: State
    target: State
    at_s: float
    reason: str


@dataclass(frozen=True)
class Step:
    """What one event led to: the next record, the arrows taken, the words for the job's story, the deeds."""

    job: Job
    transitions: tuple[Transition, ...] = ()
    notes: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()

    def then(self, later: Step) -> Step:
        """Both steps as one, for events that came together."""
        return Step(
            later.job, self.transitions + later.transitions, self.notes + later.notes, self.actions + later.actions
        )


def advance(job: Job, event: JobInput, *, now_s: float, story: Callable[[], Sequence[str]] = tuple) -> Step:
    """The next record of `job` after `event`, and what to do. Pure; an event that comes twice changes nothing.

    `story` tells the job's past; asked only for the message of InvalidTransitionError.
    """
    draft = _Draft(job, now_s, story)
    _HANDLERS[type(event)](draft, event)
    draft.settle()
    return Step(draft.job, tuple(draft.transitions), tuple(draft.notes), tuple(draft.actions))


def resume(job: Job, *, now_s: float) -> Step:
    """What a new controller does about a job that an earlier one left behind.

    A start without GO is given up and begun again as the next attempt: what the nodes had reserved for it died
    with the old controller's connections. After GO everything is repeatable and simply said again.
    """
    if job.state in (State.CHECKING, State.STAGING, State.STARTING) and job.go_sent_at_s is None:
        return advance(job, w.HeadRestarted(), now_s=now_s)
    job = restart_timers(job, now_s=now_s)
    if job.state is State.STARTING:
        return Step(job, actions=(w.StartNodes(),))
    if job.state is State.STOPPING or job.unconfirmed:
        return Step(job, actions=_stop_actions(job))
    return Step(job)


def restart_timers(job: Job, *, now_s: float) -> Job:
    """The job as a head sees it that could not look for a while (it was away, or asleep): its waits begin anew."""
    if job.state is State.STARTING and job.go_sent_at_s is not None:
        return replace(job, go_sent_at_s=now_s)
    return replace(job, since_s=now_s) if job.state is State.STOPPING else job


class _Draft:
    """A job being advanced: the one place where a state is written."""

    def __init__(self, job: Job, now_s: float, story: Callable[[], Sequence[str]]) -> None:
        self.job = job
        self.now_s = now_s
        self.transitions: list[Transition] = []
        self.notes: list[str] = []
        self.actions: list[Action] = []
        self._story = story

    def transition(self, target: State, reason: str) -> None:
        if target not in TRANSITIONS[self.job.state]:
            past = "; ".join(self._story()) or "no past recorded"
            raise InvalidTransitionError(
                f"{self.job.id}: {self.job.state.value} -> {target.value} ({reason}). Story: {past}"
            )
        self.transitions.append(Transition(self.job.state, target, self.now_s, reason))
        self.job = replace(self.job, state=target, reason=reason, since_s=self.now_s)

    def set_node(self, host: str, **changes: Any) -> None:
        nodes = tuple(replace(n, **changes) if n.host == host else n for n in self.job.nodes)
        self.job = replace(self.job, nodes=nodes)

    def stop(self, cause: Cause, reason: str, *, now: bool = False) -> None:
        """Into STOPPING, with what that asks for; a user's second, harsher wish is heard as well."""
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
        """Takes every arrow that the record now allows."""
        job = self.job
        if job.state is State.CHECKING and job.world_size and _all_at_least(job, Phase.REPORTED):
            self.transition(State.STAGING, "all nodes reported")
            self.actions.append(w.StageNodes())
        if self.job.state is State.STAGING and _all_at_least(self.job, Phase.STAGED):
            self.transition(State.STARTING, "all nodes hold the same code")
            self.actions.append(w.PrepareNodes())
        if self.job.state is State.STARTING:
            self._settle_start()
        if self.job.state is State.RUNNING and all(n.phase is Phase.ENDED for n in self.job.nodes):
            self._finish(State.SUCCEEDED, f"all {self.job.world_size} ranks exited 0")
        if self.job.state is State.STOPPING:
            self._settle_stop()

    def _settle_start(self) -> None:
        if self.job.go_sent_at_s is None and _all_at_least(self.job, Phase.READY):
            nodes = tuple(replace(n, phase=Phase.GO_SENT) for n in self.job.nodes)
            self.job = replace(self.job, nodes=nodes, go_sent_at_s=self.now_s)
            self.actions.append(w.StartNodes())
        if all(n.phase in (Phase.STARTED, Phase.ENDED) for n in self.job.nodes):
            self.job = replace(self.job, started_at_s=self.now_s)
            self.transition(State.RUNNING, f"all {self.job.world_size} ranks are alive")

    def _settle_stop(self) -> None:
        waiting = tuple(n.host for n in self.job.nodes if n.may_run_processes and n.host not in self.job.unconfirmed)
        if waiting:
            return
        cause = self.job.cause
        if cause is Cause.HEAD_RESTARTED:
            self.transition(State.BACKOFF, self.job.reason)
            self._requeue()
            return
        target = State.STOPPED if cause in (Cause.USER, Cause.NEED) else State.FAILED
        reason = self.job.reason
        if cause is Cause.FAILURE and self.job.first_failure:
            reason = self.job.first_failure
        self._finish(target, reason)

    def _requeue(self) -> None:
        self.job = replace(
            self.job,
            attempt=self.job.attempt + 1,
            nodes=(),
            world_size=0,
            master_port=None,
            go_sent_at_s=None,
            started_at_s=None,
            cause=None,
            stop_now=False,
            first_failure=None,
        )
        self.transition(State.QUEUED, f"attempt {self.job.attempt} waits for its nodes")

    def _finish(self, target: State, reason: str) -> None:
        self.job = replace(self.job, ended_at_s=self.now_s)
        self.transition(target, reason)


def _all_at_least(job: Job, phase: Phase) -> bool:
    order = list(Phase)
    return bool(job.nodes) and all(order.index(node.phase) >= order.index(phase) for node in job.nodes)


def _stop_actions(job: Job) -> tuple[Action, ...]:
    actions: list[Action] = []
    if job.go_sent_at_s is None and job.nodes:
        actions.append(w.AbortNodes(job.run_id))
    hosts = tuple(node.host for node in job.nodes if node.may_run_processes)
    if hosts:
        actions.append(w.StopNodes(hosts, now=job.stop_now, grace_s=stop_grace_s(job)))
    return tuple(actions)


def stop_grace_s(job: Job) -> float:
    """How long the ranks of a job that is being stopped have to save."""
    if job.stop_now:
        return 0.0
    return job.grace_s if job.cause is Cause.USER or job.cause is Cause.LIMIT else FAILURE_GRACE_S


# One small function for each event.


def _nodes_free(draft: _Draft, event: w.NodesAvailable) -> None:
    if draft.job.state is not State.QUEUED:
        return
    nodes = tuple(NodeProgress(host=host, node_rank=k) for k, host in enumerate(draft.job.hosts))
    draft.job = replace(draft.job, nodes=nodes, world_size=0, master_port=None, go_sent_at_s=None)
    draft.transition(State.CHECKING, "its nodes are free")
    draft.actions.append(w.QueryNodes())


def _held_by(draft: _Draft, event: w.WaitingForNodes) -> None:
    if draft.job.state is State.QUEUED and draft.job.reason != event.text:
        draft.job = replace(draft.job, reason=event.text)
        draft.notes.append(event.text)


def _need_failed(draft: _Draft, event: w.DependencyFailed) -> None:
    if draft.job.state is State.QUEUED:
        draft.stop(Cause.NEED, event.text)


def _node_reported(draft: _Draft, event: w.NodeReported) -> None:
    node = draft.job.node(event.host)
    draft.set_node(event.host, clock_offset_s=event.clock_offset_s, boot_id=event.boot_id)
    if node.phase is Phase.PENDING:
        draft.set_node(event.host, phase=Phase.REPORTED)


def _checked(draft: _Draft, event: w.Checked) -> None:
    draft.notes += [f"warning: {text}" for text in event.warnings]


def _planned(draft: _Draft, event: w.Planned) -> None:
    for host, ranks in event.ranks.items():
        draft.set_node(host, ranks=ranks)
    draft.job = replace(draft.job, world_size=event.world_size)


def _node_staged(draft: _Draft, event: w.NodeStaged) -> None:
    if draft.job.node(event.host).phase is Phase.REPORTED:
        draft.set_node(event.host, phase=Phase.STAGED)


def _node_ready(draft: _Draft, event: w.NodeReady) -> None:
    if draft.job.go_sent_at_s is None and draft.job.state is not State.STARTING:
        draft.actions.append(w.AbortNodes(draft.job.run_id))  # it was stopped while this node was still preparing
        return
    if draft.job.state is not State.STARTING or draft.job.node(event.host).phase is not Phase.STAGED:
        return
    draft.set_node(event.host, phase=Phase.READY)
    if event.master_port is not None:
        draft.job = replace(draft.job, master_port=event.master_port)


def _refused(draft: _Draft, event: w.Refused) -> None:
    named = event.host is None or event.text.startswith(f"{event.host}: ")
    text = event.text if named else f"{event.host}: {event.text}"
    if draft.job.go_sent_at_s is None:
        draft.stop(Cause.REFUSED, f"nothing was started: {text}")
    else:
        draft.stop(Cause.FAILURE, text)


def _rank_started(draft: _Draft, event: w.RankStarted) -> None:
    node = draft.job.node(event.host)
    if event.rank in node.pids:
        return
    draft.set_node(event.host, pids={**node.pids, event.rank: event.pid})
    if node.phase is Phase.GO_SENT and len(node.pids) + 1 >= len(node.ranks):
        draft.set_node(event.host, phase=Phase.STARTED)


def _rank_exited(draft: _Draft, event: w.RankExited) -> None:
    node = draft.job.node(event.host)
    if event.rank in node.exits:
        return
    draft.set_node(event.host, exits={**node.exits, event.rank: event.exit})
    if event.exit.note:
        draft.notes.append(f"rank {event.rank} on {event.host}: {event.exit.note}")
    if event.exit.is_failure:
        draft.job = replace(draft.job, first_failure=describe_first_failure(draft.job))
        draft.stop(Cause.FAILURE, draft.job.first_failure or "a rank failed")


def _rank_lingers(draft: _Draft, event: w.RankHungAtExit) -> None:
    node = draft.job.node(event.host)
    if event.rank not in node.lingering:
        draft.set_node(event.host, lingering=(*node.lingering, event.rank))
        draft.notes.append(f"rank {event.rank} on {event.host} has finished but does not exit: {event.why}")


def _start_failed(draft: _Draft, event: w.StartFailed) -> None:
    who = event.host if event.rank is None else f"rank {event.rank} on {event.host}"
    text = f"{who} could not be started: {event.text}"
    if draft.job.first_failure is None:
        draft.job = replace(draft.job, first_failure=text)
    draft.stop(Cause.FAILURE, text)


def _node_ended(draft: _Draft, event: w.NodeEnded) -> None:
    if event.leftovers:
        pids = ", ".join(str(pid) for pid in event.leftovers)
        draft.notes.append(
            f"{event.host}: processes {pids} survive even SIGKILL (usually stuck in a driver or on NFS);"
            " reboot the node"
        )
    node = draft.job.node(event.host)
    if node.may_run_processes:
        draft.set_node(event.host, phase=Phase.ENDED)
    if event.host in draft.job.unconfirmed:
        rest = tuple(host for host in draft.job.unconfirmed if host != event.host)
        draft.job = replace(draft.job, unconfirmed=rest)
        draft.notes.append(f"{event.host} answers again: nothing of the job is left there")
    if draft.job.state in (State.STARTING, State.RUNNING) and not _all_exited_zero(draft.job.node(event.host)):
        draft.stop(Cause.FAILURE, draft.job.first_failure or f"{event.host}: its ranks ended before they had finished")


def _node_rebooted(draft: _Draft, event: w.NodeRebooted) -> None:
    if not draft.job.node(event.host).may_run_processes:
        return
    draft.set_node(event.host, phase=Phase.LOST)
    unconfirmed = tuple(host for host in draft.job.unconfirmed if host != event.host)
    draft.job = replace(draft.job, unconfirmed=unconfirmed)
    text = f"{event.host} was rebooted: its ranks are gone"
    if draft.job.first_failure is None and draft.job.state is not State.STOPPING:
        draft.job = replace(draft.job, first_failure=text)
    draft.stop(Cause.NODE_LOST, text)


def _supervisor_lost(draft: _Draft, event: w.SupervisorLost) -> None:
    if draft.job.node(event.host).may_run_processes:
        draft.stop(Cause.NODE_LOST, f"{event.host}: the job's supervisor was killed, its ranks are without a keeper")


def _limit_reached(draft: _Draft, event: w.LimitReached) -> None:
    draft.stop(Cause.LIMIT, event.text)


def _stop_requested(draft: _Draft, event: w.StopRequested) -> None:
    draft.stop(Cause.USER, "stop was asked for", now=event.now)


def _head_restarted(draft: _Draft, event: w.HeadRestarted) -> None:
    draft.stop(Cause.HEAD_RESTARTED, "the controller was restarted before GO; nothing had been started")


def _tick(draft: _Draft, event: w.Tick) -> None:
    job = draft.job
    if job.state is State.STARTING and job.go_sent_at_s is not None and draft.now_s - job.go_sent_at_s > job.start_s:
        late = ", ".join(n.host for n in job.nodes if n.phase is Phase.GO_SENT)
        draft.stop(Cause.START_TIMEOUT, f"{late}: ranks not alive {job.start_s:g} s after GO (timeouts.start_s)")
    if job.state is State.STOPPING:
        _give_up_waiting(draft, event.reachable, waited_s=draft.now_s - job.since_s - stop_grace_s(job))


def _give_up_waiting(draft: _Draft, reachable: frozenset[str], *, waited_s: float) -> None:
    """Hosts that owe the proof of the end for too long are held as unconfirmed, so that the job can end."""
    waiting = [n.host for n in draft.job.nodes if n.may_run_processes and n.host not in draft.job.unconfirmed]
    silent = tuple(host for host in waiting if host not in reachable and waited_s > CONFIRM_S)
    stuck = tuple(host for host in waiting if host in reachable and waited_s > 2 * CONFIRM_S)
    if silent:
        draft.notes.append(
            f"{', '.join(silent)}: unreachable, not confirmed that the job is gone there; "
            "it will be stopped when the node answers"
        )
    if stuck:
        draft.notes.append(
            f"{', '.join(stuck)}: answers, but cannot end the job (a full or dead disk?); it is asked again and again"
        )
    if silent or stuck:
        draft.job = replace(draft.job, unconfirmed=(*draft.job.unconfirmed, *silent, *stuck))


def _all_exited_zero(node: NodeProgress) -> bool:
    return all(rank in node.exits and node.exits[rank].code == 0 for rank in node.ranks)


def describe_first_failure(job: Job) -> str | None:
    """The sentence that names the rank which failed first over all nodes, clock offsets removed; None: none failed."""
    failures = [
        (exit.at_ns - int((node.clock_offset_s or 0.0) * 1e9), rank, node.host, exit)
        for node in job.nodes
        for rank, exit in node.exits.items()
        if exit.is_failure
    ]
    if not failures:
        return None
    _, rank, host, first = min(failures, key=lambda failure: failure[:2])
    how = f"was killed by signal {first.signal}" if first.signal is not None else f"exited with code {first.code}"
    return f"rank {rank} on {host} {how}"


_HANDLERS: Mapping[type[object], Callable[..., None]] = {
    w.NodesAvailable: _nodes_free,
    w.WaitingForNodes: _held_by,
    w.DependencyFailed: _need_failed,
    w.NodeReported: _node_reported,
    w.Checked: _checked,
    w.Planned: _planned,
    w.NodeStaged: _node_staged,
    w.NodeReady: _node_ready,
    w.Refused: _refused,
    w.RankStarted: _rank_started,
    w.RankExited: _rank_exited,
    w.RankHungAtExit: _rank_lingers,
    w.StartFailed: _start_failed,
    w.NodeEnded: _node_ended,
    w.NodeRebooted: _node_rebooted,
    w.SupervisorLost: _supervisor_lost,
    w.LimitReached: _limit_reached,
    w.StopRequested: _stop_requested,
    w.HeadRestarted: _head_restarted,
    w.Tick: _tick,
}

assert set(_HANDLERS) == set(get_args(w.JobInput)), "an event without a handler"
