"""State machine of a job: a pure step from one input to the next record and the actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Callable

from ascendrun.core.events import Event
from ascendrun.core.jobs import endings, inputs
from ascendrun.core.jobs.draft import (
    CONFIRM_S,
    JUDGE_S,
    PASSED_OVER_S,
    Draft,
    Step,
    can_restart_without,
    judge_actions,
    may_restart,
    stop_actions,
    stop_grace_s,
)
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import Cause, Job, NodeProgress, Phase, State
from ascendrun.core.jobs.outcome import judge_quickly
from ascendrun.core.jobs.reasons import Detail, FirstFailure, Reason, because
from ascendrun.core.jobs.restart import Failure, Kind

_BEFORE_GO = (State.CHECKING, State.STAGING, State.STARTING)


def advance(job: Job, event: JobInput, *, now_s: float, recent: Callable[[], Sequence[str]] = tuple) -> Step:
    """Return the next record of `job` after `event`, and the actions. Pure; a repeated event changes nothing.

    `recent` returns the last events of the job; used only for the message of InvalidTransitionError.
    """
    if isinstance(event, inputs.OfNode) and all(node.host != event.host for node in job.nodes):
        return Step(job)  # of an attempt that is over: it arrived late
    draft = Draft(job, now_s, recent)
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
    if job.state is State.STOPPING or job.unconfirmed or job.state is State.FAILED:
        return Step(job, actions=stop_actions(job) + judge_actions(job))
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


def _nodes_free(draft: Draft, event: inputs.NodesFree) -> None:
    if draft.job.state is not State.QUEUED:
        return
    nodes = tuple(NodeProgress(host, k, replaces=event.replaced.get(host)) for k, host in enumerate(event.hosts))
    lost = tuple(host for host in draft.job.lost_hosts if host not in event.hosts)
    placed = replace(draft.job, hosts=event.hosts, spares=event.spares, nodes=nodes, lost_hosts=lost)
    draft.job = replace(placed, world_size=0, master_port=None, go_sent_at_s=None)
    draft.transition(State.CHECKING, because("nodes-available", count=len(nodes)))
    if len(event.spares) < draft.job.request.spares:
        draft.record("spares-missing", values={"found": len(event.spares), "count": draft.job.request.spares})
    draft.actions.append(inputs.QueryNodes())


def _waiting_for_nodes(draft: Draft, event: inputs.WaitingForNodes) -> None:
    if draft.job.state is State.QUEUED and draft.job.reason != event.reason:
        draft.job = replace(draft.job, reason=event.reason)
        draft.record("waiting", values={"reason": event.reason})


def _dependency_failed(draft: Draft, event: inputs.DependencyFailed) -> None:
    if draft.job.state is State.QUEUED:
        draft.stop(Cause.NEED, event.reason)


def _node_reported(draft: Draft, event: inputs.NodeReported) -> None:
    node = draft.job.node(event.host)
    identity = {"boot_id": event.boot_id, "machine_key": event.machine_key, "incarnation": event.incarnation}
    draft.set_node(event.host, clock_offset_s=event.clock_offset_s, **identity)
    if node.phase is Phase.PENDING:
        draft.set_node(event.host, phase=Phase.REPORTED)


def _checked(draft: Draft, event: inputs.Checked) -> None:
    for finding, line in event.warnings:
        values = {"finding": finding.code, "values": finding.values, "warning": line}
        draft.record("preflight-warning", finding.hosts, values=values)


def _resume_chosen(draft: Draft, event: inputs.ResumeChosen) -> None:
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


def _resume_lost(draft: Draft, event: inputs.ResumeLost) -> None:
    if draft.job.state is State.CHECKING:
        draft.hold(because("only-copy", event.hosts, step=event.step), event.hosts, None)


def _planned(draft: Draft, event: inputs.Planned) -> None:
    for host, ranks in event.ranks.items():
        draft.set_node(host, ranks=ranks)
    draft.job = replace(draft.job, world_size=event.world_size)


def _node_staged(draft: Draft, event: inputs.NodeStaged) -> None:
    if draft.job.node(event.host).phase is Phase.REPORTED:
        draft.set_node(event.host, phase=Phase.STAGED)


def _node_ready(draft: Draft, event: inputs.NodeReady) -> None:
    if draft.job.go_sent_at_s is None and draft.job.state is not State.STARTING:
        draft.actions.append(inputs.AbortNodes(draft.job.run_id, (event.host,)))  # stopped while it was preparing
        return
    if draft.job.state is not State.STARTING or draft.job.node(event.host).phase is not Phase.STAGED:
        return
    draft.set_node(event.host, phase=Phase.READY, hccl=event.hccl)
    if event.master_port is not None:
        draft.job = replace(draft.job, master_port=event.master_port)


def _refused(draft: Draft, event: inputs.Refused) -> None:
    job = draft.job
    hosts = event.hosts or (() if event.host is None else (event.host,))
    why = event.why if event.host is None else because("on-host", hosts, why=event.why)
    if job.go_sent_at_s is not None:
        draft.stop(Cause.FAILURE, why if isinstance(why, Reason) else because("rejected", hosts, why=why))
    elif job.state in _BEFORE_GO and _can_pass_over(job, hosts, draft.now_s, is_away=event.is_away):
        _pass_over(draft, hosts, event.why)
    elif job.state is not State.QUEUED or (event.host, event.hosts) == (None, ()):  # else of an attempt given up
        draft.stop(Cause.REFUSED, because("preflight-failed", hosts, why=why))


def _pass_over(draft: Draft, hosts: Sequence[str], why: Detail) -> None:
    until_s = draft.now_s + PASSED_OVER_S
    draft.record("host-passed-over", hosts, values={"why": why, "until_s": until_s})
    draft.job = replace(draft.job, passed_over={**draft.job.passed_over, **dict.fromkeys(hosts, until_s)})
    draft.stop(Cause.PASSED_OVER, because("passed-over", hosts, why=why))


def _training_refused(draft: Draft, event: inputs.TrainingRefused) -> None:
    """Place the job on other hosts if only these lack something and there are others; else nothing but a change by the
    user helps."""
    job = draft.job
    if job.state is not State.CHECKING:
        return
    others = set(job.pool) - set(event.hosts) - {host for host, at_s in job.passed_over.items() if at_s > draft.now_s}
    is_enough = len(others) >= job.request.nodes
    if is_enough and _can_pass_over(job, event.hosts, draft.now_s, is_away=False):
        _pass_over(draft, event.hosts, event.why)
        return
    draft.job = replace(job, failure=Failure(Kind.USER, "training-refused", event.hosts, confidence="certain"))
    draft.stop(Cause.TRAINING, because("training-refused", event.hosts, why=event.why))


def _stage_files_missing(draft: Draft, event: inputs.StageFilesMissing) -> None:
    files = draft.job.node(event.host).replaces
    if files is not None and draft.job.state in _BEFORE_GO:
        pipeline = draft.job.pipeline
        reason = because("stage-files-lost", [event.host], lost=files.host, stage=files.stage, pipeline=pipeline)
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


def _hold_changed(draft: Draft, event: inputs.HoldChanged) -> None:
    if not draft.job.is_terminal and draft.job.held_by != event.by:
        draft.record("hold-ended" if event.by is None else "hold-started", values={"by": event.by or draft.job.held_by})
        draft.job = replace(draft.job, held_by=event.by)


def _held(draft: Draft, event: inputs.Held) -> None:
    if draft.job.state in (State.CHECKING, State.STAGING, State.STARTING):
        hosts = (event.host, *(host for host in event.hosts if host != event.host))
        draft.hold(because("held", hosts, why=event.what), hosts, event.by)


def _rank_started(draft: Draft, event: inputs.RankStarted) -> None:
    node = draft.job.node(event.host)
    if event.rank in node.pids:
        return
    draft.set_node(event.host, pids={**node.pids, event.rank: event.pid})
    if node.phase is Phase.GO_SENT and {*node.pids, event.rank} >= set(node.ranks):
        draft.set_node(event.host, phase=Phase.STARTED)


def _host_given_up(draft: Draft, event: inputs.HostGivenUp) -> None:
    """Wait no longer for checkpoints that only this host has."""
    job = draft.job
    if job.is_terminal or event.host in job.lost_hosts or event.host not in job.used_hosts:
        return
    draft.record("host-given-up", [event.host], values={"by": event.by})
    draft.job = replace(job, lost_hosts=(*job.lost_hosts, event.host))
    if job.state is State.BACKOFF and job.cause is Cause.HELD:
        draft.job = replace(draft.job, not_before_s=draft.now_s)


def _leftovers_gone(draft: Draft, event: inputs.LeftoversGone) -> None:
    if draft.job.node(event.host).leftovers:
        draft.set_node(event.host, leftovers=())
        draft.record("leftovers-gone", [event.host])


def _stop_started(draft: Draft, event: inputs.StopStarted) -> None:
    if event.by == "limit":
        draft.stop(Cause.LIMIT, because("time-limit", [event.host], why=event.why))
    if event.by in ("node", "fence") and not event.done:
        draft.stop(Cause.PREEMPTED, because("preempted", [event.host], why=event.why))


def _hung(draft: Draft, event: inputs.Hung) -> None:
    if draft.job.state is State.RUNNING:
        code = "hung-without-host" if event.is_unreachable else "hung"
        draft.stop(Cause.HUNG, because(code, event.hosts, event.ranks, event.finding))


def _trains_separately(draft: Draft, event: inputs.TrainsSeparately) -> None:
    """Fail the job, without a restart: the next attempt would do the same."""
    job = draft.job
    if job.state not in (State.STARTING, State.RUNNING) or event.attempt != job.attempt:
        return
    failure = Failure(Kind.USER, "separate-trainings", (event.host,), (), "certain")
    reason = because("separate-trainings", [event.host], world_size=event.world_size)
    draft.job = replace(job, failure=failure, first_failure=FirstFailure(reason, "certain"))
    draft.stop(Cause.FAILURE, reason)


def _node_trouble(draft: Draft, event: inputs.NodeTrouble) -> None:
    if event.at_ns > draft.job.node(event.host).trouble_ns:
        draft.set_node(event.host, trouble_ns=event.at_ns)
        draft.record(event.code, [event.host], values=event.values)


def _retry_requested(draft: Draft, event: inputs.RetryRequested) -> None:
    job = draft.job
    if job.state not in (State.FAILED, State.STOPPED):
        return
    draft.job = replace(job, past=tuple(replace(one, counted=False) for one in job.past))
    draft.back_off(because("retried-by-user"), draft.now_s, counted=False)
    *past, last = draft.job.past
    past.append(replace(last, ended_at_s=job.ended_at_s or draft.now_s))
    draft.job = replace(draft.job, past=tuple(past), ended_at_s=None)


def _tick(draft: Draft, event: inputs.Tick) -> None:
    job, draft.fenced = draft.job, event.fenced
    if job.state is State.STARTING and job.go_sent_at_s is not None and draft.now_s - job.go_sent_at_s > job.start_s:
        late = [n for n in job.nodes if n.phase is Phase.GO_SENT]
        missing = sum(len(set(n.ranks) - set(n.pids)) for n in late)
        hosts = [node.host for node in late]
        draft.stop(Cause.START_TIMEOUT, because("start-timeout", hosts, count=missing, limit_s=job.start_s))
    if job.state is State.STOPPING:
        waited_s = draft.now_s - job.since_s - stop_grace_s(job)
        _give_up_waiting(draft, event, waited_s=waited_s)
        if waited_s > JUDGE_S and may_restart(job) and job.failure is None:
            draft.job = replace(draft.job, failure=judge_quickly(job))


def _give_up_waiting(draft: Draft, tick: inputs.Tick, *, waited_s: float) -> None:
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
    inputs.TrainingRefused: _training_refused,
    inputs.Held: _held,
    inputs.HoldChanged: _hold_changed,
    inputs.RankStarted: _rank_started,
    inputs.RankExited: endings.rank_exited,
    inputs.ForkedRankStarted: endings.forked_rank_started,
    inputs.ForkedRankExited: endings.forked_rank_exited,
    inputs.RankHungAtExit: endings.rank_hung_at_exit,
    inputs.StartFailed: endings.start_failed,
    inputs.NodeEnded: endings.node_ended,
    inputs.NodeLost: endings.node_lost,
    inputs.HostGivenUp: _host_given_up,
    inputs.LeftoversGone: _leftovers_gone,
    inputs.SupervisorLost: endings.supervisor_lost,
    inputs.StopStarted: _stop_started,
    inputs.NodeTrouble: _node_trouble,
    inputs.Hung: _hung,
    inputs.TrainsSeparately: _trains_separately,
    inputs.StopRequested: lambda draft, event: draft.stop(Cause.USER, because("stopped-by-user"), now=event.now),
    inputs.RetryRequested: _retry_requested,
    inputs.Diagnosed: endings.diagnosed,
    inputs.HeadRestarted: lambda draft, _: draft.stop(Cause.HEAD_RESTARTED, because("controller-restarted")),
    inputs.Tick: _tick,
}

assert {inputs.OfNode, *_HANDLERS} == {*JobInput.__subclasses__(), *inputs.OfNode.__subclasses__()}
