"""How the state machine of a job takes the ends of ranks and nodes, and the diagnosis of what failed first."""

from __future__ import annotations

from dataclasses import asdict, replace

from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.draft import Draft
from ascendrun.core.jobs.job import Cause, ForkedRank, Job, NodeProgress, Phase, State
from ascendrun.core.jobs.outcome import first_failure, judge_quickly
from ascendrun.core.jobs.reasons import LOST, FirstFailure, because, hung_at_exit


def rank_exited(draft: Draft, event: inputs.RankExited) -> None:
    node = draft.job.node(event.host)
    if event.rank in node.exits:
        return
    draft.set_node(event.host, exits={**node.exits, event.rank: event.exit})
    if event.exit.killed_at_exit:
        draft.record("rank-killed-at-exit", [event.host], [event.rank])
    if event.exit.is_failure:
        failure = _first_failure(draft.job)
        assert failure is not None, "this rank has failed"
        if draft.job.first_failure is None or draft.job.first_failure.is_preliminary:
            draft.job = replace(draft.job, first_failure=failure)
        draft.stop(Cause.FAILURE, failure.reason)


def _first_failure(job: Job) -> FirstFailure | None:
    clocks = {node.host: node.clock_offset_s for node in job.nodes}
    found = first_failure(job.nodes, clocks, forks=job.forks)
    return None if found is None else FirstFailure(found)


def forked_rank_started(draft: Draft, event: inputs.ForkedRankStarted) -> None:
    forked = draft.job.node(event.host).forked
    if event.rank not in forked or forked[event.rank].pid != event.pid:
        draft.set_node(event.host, forked={**forked, event.rank: ForkedRank(event.pid)})


def forked_rank_exited(draft: Draft, event: inputs.ForkedRankExited) -> None:
    forked = draft.job.node(event.host).forked
    rank = forked.get(event.rank)
    if rank is not None and rank.exit is None:
        draft.set_node(event.host, forked={**forked, event.rank: replace(rank, exit=event.exit)})


def rank_hung_at_exit(draft: Draft, event: inputs.RankHungAtExit) -> None:
    node = draft.job.node(event.host)
    if event.rank not in node.lingering:
        draft.set_node(event.host, lingering=(*node.lingering, event.rank))
        values = {"cause": event.cause, "why": hung_at_exit(event.cause, event.after_s)}
        draft.record("rank-hung-at-exit", [event.host], [event.rank], values)


def start_failed(draft: Draft, event: inputs.StartFailed) -> None:
    code, ranks = ("host-start-failed", ()) if event.rank is None else ("rank-start-failed", (event.rank,))
    reason = because(code, [event.host], ranks, event.why)
    if draft.job.first_failure is None:
        draft.job = replace(draft.job, first_failure=FirstFailure(reason))
    draft.stop(Cause.FAILURE, reason)


def node_ended(draft: Draft, event: inputs.NodeEnded) -> None:
    node = draft.job.node(event.host)
    if node.may_run_processes:
        exits = {**node.exits, **{rank: e for rank, e in event.exits.items() if not e.agrees(node.exits.get(rank))}}
        draft.set_node(event.host, phase=Phase.ENDED, leftovers=event.leftovers, exits=exits)
        if draft.job.first_failure is None:
            draft.job = replace(draft.job, first_failure=_first_failure(draft.job))
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
        draft.stop(Cause.FAILURE, failure.reason if failure else because("ranks-ended-early", [event.host]))


def node_lost(draft: Draft, event: inputs.NodeLost) -> None:
    if not draft.job.node(event.host).may_run_processes:
        return
    draft.set_node(event.host, phase=Phase.LOST, lost=event.why)
    draft.record("node-lost", [event.host], values={"why": event.why})
    unconfirmed = tuple(host for host in draft.job.unconfirmed if host != event.host)
    draft.job = replace(draft.job, unconfirmed=unconfirmed)
    if draft.job.state in (State.STARTING, State.RUNNING):
        reason = because(LOST[event.why], [event.host])
        if draft.job.first_failure is None:
            draft.job = replace(draft.job, first_failure=FirstFailure(reason))
        draft.stop(Cause.NODE_LOST, reason)


def supervisor_lost(draft: Draft, event: inputs.SupervisorLost) -> None:
    if draft.job.node(event.host).may_run_processes:
        draft.stop(Cause.NODE_LOST, because("supervisor-lost", [event.host]))


def diagnosed(draft: Draft, event: inputs.Diagnosed) -> None:
    """Take what failed first by the diagnosis, also after the end; a later one, with more evidence, replaces it."""
    job = draft.job
    if event.attempt != job.attempt:
        past = (replace(one, failure=event.failure) if one.number == event.attempt else one for one in job.past)
        draft.job = replace(job, past=tuple(past))
    elif job.state in (State.STOPPING, State.BACKOFF, State.FAILED):
        failure = judge_quickly(job) if job.cause is Cause.HUNG else event.failure  # what was seen before
        draft.job = _with_first(replace(job, failure=failure, last_step=event.last_step), event.first)
        if event.first is not None and event.first != job.first_failure:
            first = event.first
            values = {"reason": first.reason, "finding": event.failure.code, "confidence": first.confidence}
            draft.record("diagnosed", first.reason.hosts, first.reason.ranks, values)


def _with_first(job: Job, found: FirstFailure | None) -> Job:
    """Return the job with what failed first, also in its reason. `found` None: there is no better answer than that of
    its records."""
    before = job.first_failure
    if found is None or before is None:
        return replace(job, first_failure=found if before is None else replace(before, confidence="unknown"))
    reason = job.reason
    if reason == before.reason:
        reason = found.reason
    elif reason.why == before.reason:
        reason = because(reason.code, why=found.reason, **reason.values)
    return replace(job, first_failure=found, reason=reason)


def _all_succeeded(node: NodeProgress) -> bool:
    ranks = all(rank in node.exits and node.exits[rank].is_success for rank in node.ranks)
    return ranks and not any(exit.is_failure for exit in node.exits.values())
