"""The inputs of what ends or disturbs a job, each with its change: ranks, nodes, and the diagnosis of its failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field, replace
from typing import Any

from ascendrun.core.jobs.draft import Draft
from ascendrun.core.jobs.inputs import JobInput, OfNode
from ascendrun.core.jobs.job import Cause, Exit, ForkedRank, Job, Leftover, Phase, State
from ascendrun.core.jobs.outcome import first_failure, judge_quickly
from ascendrun.core.jobs.reasons import LOST, Detail, FirstFailure, Reason, because, hung_at_exit
from ascendrun.core.jobs.restart import Failure, Kind
from ascendrun.core.jobs.roles import named_rank, rank_labels
from ascendrun.text import Text


class Preempted(JobInput):
    """A job of a higher priority gets the hosts: this one saves, and is queued again."""

    reason: Reason

    def apply(self, draft: Draft) -> None:
        if draft.job.state is State.RUNNING:
            draft.stop(Cause.REQUEUED, self.reason)


class RankExited(OfNode):
    rank: int
    exit: Exit

    def apply(self, draft: Draft) -> None:
        node = draft.job.node(self.host)
        if self.rank in node.exits:
            return
        draft.set_node(self.host, exits={**node.exits, self.rank: self.exit})
        if self.exit.killed_at_exit:
            draft.record("rank-killed-at-exit", [self.host], [self.rank])
        failure = _first_failure(draft.job) if self.exit.is_failure else None
        if failure is not None:
            if draft.job.first_failure is None or draft.job.first_failure.is_preliminary:
                draft.job = replace(draft.job, first_failure=failure)
            draft.stop(Cause.FAILURE, failure.reason)


class ForkedRankStarted(OfNode):
    """A rank that the process of its node started itself, known by RANK in its environment."""

    rank: int
    pid: int

    def apply(self, draft: Draft) -> None:
        forked = draft.job.node(self.host).forked
        if self.rank not in forked or forked[self.rank].pid != self.pid:
            draft.set_node(self.host, forked={**forked, self.rank: ForkedRank(self.pid)})


class ForkedRankExited(OfNode):
    """`exit`: its code and signal are None where the node did not see them."""

    rank: int
    exit: Exit

    def apply(self, draft: Draft) -> None:
        forked = draft.job.node(self.host).forked
        rank = forked.get(self.rank)
        if rank is not None and rank.exit is None:
            draft.set_node(self.host, forked={**forked, self.rank: replace(rank, exit=self.exit)})


class RankHungAtExit(OfNode):
    """A rank did not exit after its work. `cause`: finished (its metrics have "done") or idle (another rank exited with
    0 and this rank is inactive); `after_s`: the exceeded limit, None: not recorded."""

    rank: int
    cause: str
    after_s: float | None = None

    def apply(self, draft: Draft) -> None:
        node = draft.job.node(self.host)
        if self.rank not in node.lingering:
            draft.set_node(self.host, lingering=(*node.lingering, self.rank))
            values = {"cause": self.cause, "why": hung_at_exit(self.cause, self.after_s)}
            draft.record("rank-hung-at-exit", [self.host], [self.rank], values)


class StartFailed(OfNode):
    rank: int | None
    why: Text | str

    def apply(self, draft: Draft) -> None:
        code, ranks = ("host-start-failed", ()) if self.rank is None else ("rank-start-failed", (self.rank,))
        reason = because(code, [self.host], ranks, self.why, **named_rank(ranks, rank_labels(draft.job.nodes)))
        if draft.job.first_failure is None:
            draft.job = replace(draft.job, first_failure=FirstFailure(reason))
        draft.stop(Cause.FAILURE, reason)


class NodeEnded(OfNode):
    """No process of the attempt is left on the host, except `leftovers`. `exits`: of all ranks as the supervisor saw
    them, more reliable than RankExited, which a rank could write itself; {}: not reported."""

    leftovers: tuple[Leftover, ...] = ()
    exits: Mapping[int, Exit] = field(default_factory=dict)

    def apply(self, draft: Draft) -> None:
        node = draft.job.node(self.host)
        if node.may_run_processes:
            exits = {**node.exits, **{rank: e for rank, e in self.exits.items() if not e.agrees(node.exits.get(rank))}}
            draft.set_node(self.host, phase=Phase.ENDED, leftovers=self.leftovers, exits=exits)
            if draft.job.first_failure is None:
                draft.job = replace(draft.job, first_failure=_first_failure(draft.job))
            if self.leftovers:
                values = {
                    "pids": [one.pid for one in self.leftovers],
                    "count": len(self.leftovers),
                    "processes": [asdict(one) for one in self.leftovers],
                }
                draft.record("processes-remain", [self.host], values=values)
        if self.host in draft.job.unconfirmed:
            rest = tuple(host for host in draft.job.unconfirmed if host != self.host)
            draft.job = replace(draft.job, unconfirmed=rest)
            draft.record("processes-gone", [self.host])
        if draft.job.state in (State.STARTING, State.RUNNING) and not draft.job.node(self.host).has_succeeded:
            failure = draft.job.first_failure
            draft.stop(Cause.FAILURE, failure.reason if failure else because("ranks-ended-early", [self.host]))


class LeftoversGone(OfNode):
    """The processes that SIGKILL did not end are gone, by the node or by a person who released the host."""

    def apply(self, draft: Draft) -> None:
        if draft.job.node(self.host).leftovers:
            draft.set_node(self.host, leftovers=())
            draft.record("leftovers-gone", [self.host])


class NodeLost(OfNode):
    """The processes of the attempt on the host are gone. `why`: rebooted (another boot id), directory-gone (its records
    and all its processes are gone, with the same boot id), by-user (a person released the host), powered-off (its
    power agent was told to, and reports it) or no-power (its power agent reports that it is off)."""

    why: str

    def apply(self, draft: Draft) -> None:
        if not draft.job.node(self.host).may_run_processes:
            return
        draft.set_node(self.host, phase=Phase.LOST, lost=self.why)
        draft.record("node-lost", [self.host], values={"why": self.why})
        unconfirmed = tuple(host for host in draft.job.unconfirmed if host != self.host)
        draft.job = replace(draft.job, unconfirmed=unconfirmed)
        if draft.job.state in (State.STARTING, State.RUNNING):
            reason = because(LOST[self.why], [self.host])
            if draft.job.first_failure is None:
                draft.job = replace(draft.job, first_failure=FirstFailure(reason))
            draft.stop(Cause.NODE_LOST, reason)


class PowerOff(OfNode):
    """The power agent is asked to switch the host off; `why`: it was, and this is why the host is not proved off."""

    why: Detail | None = None

    def apply(self, draft: Draft) -> None:
        node = draft.job.node(self.host)
        reason = because("power-off-asked" if self.why is None else "power-off-failed", [self.host], why=self.why)
        if node.may_run_processes and node.power != reason:
            draft.set_node(self.host, power=reason)
            draft.record("power-off", [self.host], values={"reason": reason})


class SupervisorLost(OfNode):
    def apply(self, draft: Draft) -> None:
        if draft.job.node(self.host).may_run_processes:
            draft.stop(Cause.NODE_LOST, because("supervisor-lost", [self.host]))


class StopStarted(OfNode):
    """The supervisor of a host started to end its ranks. `by`: head, limit, failure, node (it received SIGTERM), fence
    (its lease expired), peer (the ranks of another host failed) or finished; `at_s`: the host's clock; `done`: the
    work of all its ranks was complete."""

    by: str
    why: Detail
    at_s: float
    done: bool = False

    def apply(self, draft: Draft) -> None:
        if self.by == "limit":
            draft.stop(Cause.LIMIT, because("time-limit", [self.host], why=self.why))
        if self.by in ("node", "fence") and not self.done:
            draft.stop(Cause.PREEMPTED, because("preempted", [self.host], why=self.why))


class NodeTrouble(OfNode):
    """A supervisor could not do something; no rank was ended. `code`: of the event; `at_ns`: the host's clock."""

    code: str
    values: Mapping[str, Any]
    at_ns: int

    def apply(self, draft: Draft) -> None:
        if self.at_ns > draft.job.node(self.host).trouble_ns:
            draft.set_node(self.host, trouble_ns=self.at_ns)
            draft.record(self.code, [self.host], values=self.values)


class Hung(JobInput):
    """The job makes no progress, and is to be stopped (health/hang.py). `hosts`, `ranks`: those that the others wait
    for, (): unknown. `is_unreachable`: these hosts do not respond. `finding`: what was observed."""

    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    finding: Text
    is_unreachable: bool = False

    def apply(self, draft: Draft) -> None:
        if draft.job.state is State.RUNNING:
            code = "hung-without-host" if self.is_unreachable else "hung"
            draft.stop(Cause.HUNG, because(code, self.hosts, self.ranks, self.finding))


class TrainsSeparately(JobInput):
    """By the environment of its processes `world_size` ranks train on this host without the other hosts."""

    attempt: int
    host: str
    world_size: int

    def apply(self, draft: Draft) -> None:
        """Fail the job, without a restart: the next attempt would do the same."""
        job = draft.job
        if job.state not in (State.STARTING, State.RUNNING) or self.attempt != job.attempt:
            return
        failure = Failure(Kind.USER, "separate-trainings", (self.host,), (), "certain")
        reason = because("separate-trainings", [self.host], world_size=self.world_size)
        draft.job = replace(job, failure=failure, first_failure=FirstFailure(reason, "certain"))
        draft.stop(Cause.FAILURE, reason)


class Diagnosed(JobInput):
    """The failure of an attempt was diagnosed. `first`: what failed first, None: there is no diagnosis, or the attempt
    did not fail by itself. `last_step`: the newest step that it reported, `saved_step`: of the newest complete
    checkpoint on its hosts, None: unknown."""

    attempt: int
    failure: Failure
    last_step: int | None = None
    first: FirstFailure | None = None
    saved_step: int | None = None

    def apply(self, draft: Draft) -> None:
        """Take what failed first by the diagnosis, also after the end; a later one, with more evidence, replaces it."""
        job = draft.job
        if self.attempt != job.attempt:
            past = (replace(one, failure=self.failure) if one.number == self.attempt else one for one in job.past)
            draft.job = replace(job, past=tuple(past))
        elif job.state in (State.STOPPING, State.BACKOFF, State.FAILED) and job.cause is not Cause.COMPLETED:
            failure = judge_quickly(job) if job.cause is Cause.HUNG else self.failure  # what was seen before
            job = replace(job, failure=failure, last_step=self.last_step, saved_step=self.saved_step)
            draft.job = _with_first(job, self.first)
            if self.first is not None and self.first != job.first_failure:
                first = self.first
                values = {"reason": first.reason, "finding": self.failure.code, "confidence": first.confidence}
                draft.record("diagnosed", first.reason.hosts, first.reason.ranks, values)


def _first_failure(job: Job) -> FirstFailure | None:
    """Return what failed first; a process that only served the ranks of a complete job did not fail."""
    clocks = {node.host: node.clock_offset_s for node in job.nodes}
    found = None if job.cause is Cause.COMPLETED else first_failure(job.nodes, clocks, forks=job.forks)
    return None if found is None else FirstFailure(found)


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
