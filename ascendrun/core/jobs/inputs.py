"""The inputs that change a job, each with its change: its placement and start, requests of users, and time.

endings.py has those of its ends. Apart from the record (job.py), which every command that lists jobs loads. Times are
passed separately (`now_s`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from ascendrun.core.dataclass import dataclass, dataclass_transform
from ascendrun.core.findings import Finding
from ascendrun.core.jobs import draft as drafts
from ascendrun.core.jobs.actions import AbortNodes, QueryNodes
from ascendrun.core.jobs.checkpoints import Listed, ResumePoint
from ascendrun.core.jobs.job import BEFORE_GO, Cause, Job, NodeProgress, Phase, StageFiles, State
from ascendrun.core.jobs.outcome import judge_quickly
from ascendrun.core.jobs.reasons import Detail, Reason, because
from ascendrun.core.jobs.restart import Failure, Kind

EXPECTED_APART_S = 60.0
"""Least change of an expected start that is recorded."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class JobInput:
    """Something that happened, which `lifecycle.advance` takes; each kind is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    def apply(self, draft: drafts.Draft) -> None:
        """Change the job of `draft`; a repeated input changes nothing."""
        raise NotImplementedError


class OfNode(JobInput):
    """From one node of the present attempt."""

    host: str


class NodesFree(JobInput):
    """The attempt gets these hosts, in the order of their node ranks, and these spares. `replaced`: the files that a
    host requires (NodeProgress.replaces)."""

    hosts: tuple[str, ...]
    spares: tuple[str, ...] = ()
    replaced: Mapping[str, StageFiles] = field(default_factory=dict)

    def apply(self, draft: drafts.Draft) -> None:
        if draft.job.state is not State.QUEUED:
            return
        nodes = tuple(NodeProgress(host, k, replaces=self.replaced.get(host)) for k, host in enumerate(self.hosts))
        lost = tuple(host for host in draft.job.lost_hosts if host not in self.hosts)
        placed = replace(draft.job, hosts=self.hosts, spares=self.spares, nodes=nodes, lost_hosts=lost)
        draft.job = replace(placed, world_size=0, go_sent_at_s=None)
        draft.transition(State.CHECKING, because("nodes-available", count=len(nodes)))
        if len(self.hosts) < draft.job.request.nodes:
            draft.record("nodes-missing", values={"found": len(self.hosts), "count": draft.job.request.nodes})
        elif len(self.spares) < draft.job.request.spares:
            draft.record("spares-missing", values={"found": len(self.spares), "count": draft.job.request.spares})
        draft.actions.append(QueryNodes())


class SparesFree(JobInput):
    """These hosts, and no others, are free for a job that runs on fewer hosts than it requested."""

    hosts: tuple[str, ...]

    def apply(self, draft: drafts.Draft) -> None:
        job = draft.job
        if job.lacks_hosts:
            draft.job = replace(job, spares=tuple(host for host in self.hosts if host not in job.hosts))


class GrowthPossible(JobInput):
    """These spares are ready, (): none, for a job that runs on fewer hosts than it requested. `saved_step`: of its
    newest complete checkpoint, 0: there is none. After the next checkpoint it restarts with them."""

    hosts: tuple[str, ...]
    saved_step: int = 0

    def apply(self, draft: drafts.Draft) -> None:
        job = draft.job
        hosts = tuple(host for host in self.hosts if host in job.spares)
        if not job.lacks_hosts or not hosts:
            draft.job = replace(job, grows_after=None)
        elif job.grows_after is None:
            draft.job = replace(job, grows_after=self.saved_step)
            count = min(len(job.hosts) + len(hosts), job.request.nodes)
            draft.record("grows-later", hosts, values={"found": len(job.hosts), "count": count})
        elif self.saved_step > job.grows_after:
            draft.stop(Cause.RESIZED, because("grows", hosts, step=self.saved_step))


class WaitingForNodes(JobInput):
    """The job is not placed. `start_s`: its expected start, None: not known. `is_first`: no other waits before it."""

    reason: Reason
    start_s: float | None = None
    is_first: bool = field(default=False, compare=False)

    def apply(self, draft: drafts.Draft) -> None:
        if draft.job.state is State.QUEUED:
            draft.wait_for(self.reason)
            if abs((draft.job.start_expected_at_s or 0.0) - (self.start_s or 0.0)) >= EXPECTED_APART_S:
                draft.job = replace(draft.job, start_expected_at_s=self.start_s)


class DependencyFailed(JobInput):
    """The dependency of this job ended without success."""

    reason: Reason

    def apply(self, draft: drafts.Draft) -> None:
        if draft.job.state is State.QUEUED:
            draft.stop(Cause.NEED, self.reason)


class NodeReported(OfNode):
    boot_id: str
    clock_offset_s: float | None
    machine_key: str | None = None
    incarnation: str | None = None

    def apply(self, draft: drafts.Draft) -> None:
        node = draft.job.node(self.host)
        identity = {"boot_id": self.boot_id, "machine_key": self.machine_key, "incarnation": self.incarnation}
        draft.set_node(self.host, clock_offset_s=self.clock_offset_s, **identity)
        if node.phase is Phase.PENDING:
            draft.set_node(self.host, phase=Phase.REPORTED)


class Checked(JobInput):
    """The nodes were checked before the start. `warnings`: findings that do not prevent it, each with its line."""

    warnings: tuple[tuple[Finding, Detail], ...] = ()

    def apply(self, draft: drafts.Draft) -> None:
        for finding, line in self.warnings:
            values = {"finding": finding.code, "values": finding.values, "warning": line}
            draft.record("preflight-warning", finding.hosts, values=values)


class Pulling(JobInput):
    """Hosts fetch the image of the job, so far: `reason`."""

    reason: Reason

    def apply(self, draft: drafts.Draft) -> None:
        if draft.job.state is State.CHECKING:
            draft.wait_for(self.reason)


class ResumeChosen(JobInput):
    """What the attempt resumes from. `incomplete`: newer checkpoints that are not complete, with their hosts."""

    point: ResumePoint
    incomplete: tuple[tuple[str, Listed], ...] = ()

    def apply(self, draft: drafts.Draft) -> None:
        if draft.job.state is not State.CHECKING:
            return
        point = self.point
        draft.job = replace(draft.job, resume=point)
        for host, one in self.incomplete:
            draft.record("checkpoint-incomplete", [host], values={"path": one.path, "why": one.why, "file": one.file})
        if point.skip:
            draft.record("checkpoint-set-aside", values={"steps": list(point.skip)})
        if point.step:
            values = {"step": point.step, "format": point.format, "path": next(iter(point.paths.values()))}
            draft.record("resume-chosen", values=values)


class ResumeLost(JobInput):
    """The newest checkpoint, of this step, is only on the disks of hosts that the attempt does not have."""

    step: int
    hosts: tuple[str, ...]

    def apply(self, draft: drafts.Draft) -> None:
        if draft.job.state is State.CHECKING:
            draft.hold(because("only-copy", self.hosts, step=self.step), self.hosts, None)


class Planned(JobInput):
    """The plan is complete: the ranks of each host. `serving`: hosts whose part is not `ends_job`; `roles`: by
    host, {}: the job has none."""

    ranks: Mapping[str, tuple[int, ...]]
    world_size: int
    serving: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)

    def apply(self, draft: drafts.Draft) -> None:
        for host, ranks in self.ranks.items():
            draft.set_node(host, ranks=ranks, ends_job=host not in self.serving, role=self.roles.get(host))
        draft.job = replace(draft.job, world_size=self.world_size)


class NodeStaged(OfNode):
    def apply(self, draft: drafts.Draft) -> None:
        if draft.job.node(self.host).phase is Phase.REPORTED:
            draft.set_node(self.host, phase=Phase.STAGED)


class NodeReady(OfNode):
    """`master_port`: a free port of the first node of a role, or of the job; None from the others. `hccl`: the leased
    port blocks of HCCL by their first port; None: none was requested."""

    master_port: int | None
    hccl: tuple[int, ...] | None = None

    def apply(self, draft: drafts.Draft) -> None:
        if draft.job.go_sent_at_s is None and draft.job.state is not State.STARTING:
            draft.actions.append(AbortNodes(draft.job.run_id, (self.host,)))  # stopped while it was preparing
            return
        if draft.job.state is not State.STARTING or draft.job.node(self.host).phase is not Phase.STAGED:
            return
        draft.set_node(self.host, phase=Phase.READY, hccl=self.hccl, master_port=self.master_port)


class Refused(JobInput):
    """A node or the plan prevents the start. `host` None: the plan, or several hosts (`hosts`, (): none of them).
    `is_away`: the host is not reachable, which the job cannot have caused."""

    host: str | None
    why: Detail
    hosts: tuple[str, ...] = ()
    is_away: bool = False

    def apply(self, draft: drafts.Draft) -> None:
        job = draft.job
        hosts = self.hosts or (() if self.host is None else (self.host,))
        why = self.why if self.host is None else because("on-host", hosts, why=self.why)
        if job.go_sent_at_s is not None:
            draft.stop(Cause.FAILURE, why if isinstance(why, Reason) else because("rejected", hosts, why=why))
        elif job.state in BEFORE_GO and _can_pass_over(job, hosts, draft.now_s, is_away=self.is_away):
            _pass_over(draft, hosts, self.why)
        elif job.state is not State.QUEUED or (self.host, self.hosts) == (None, ()):  # else of an attempt given up
            draft.stop(Cause.REFUSED, because("preflight-failed", hosts, why=why))


class TrainingRefused(JobInput):
    """The training would fail. `hosts`: on these hosts only, (): on any."""

    why: Detail
    hosts: tuple[str, ...] = ()

    def apply(self, draft: drafts.Draft) -> None:
        """Place the job on other hosts if only these lack something and there are others; else only a change helps."""
        job = draft.job
        if job.state is not State.CHECKING:
            return
        others = (
            set(job.pool) - set(self.hosts) - {host for host, at_s in job.passed_over.items() if at_s > draft.now_s}
        )
        is_enough = len(others) >= job.request.least
        if is_enough and _can_pass_over(job, self.hosts, draft.now_s, is_away=False):
            _pass_over(draft, self.hosts, self.why)
            return
        draft.job = replace(job, failure=Failure(Kind.USER, "training-refused", self.hosts, confidence="certain"))
        draft.stop(Cause.TRAINING, because("training-refused", self.hosts, why=self.why))


class StageFilesMissing(JobInput):
    """The host does not see the files that it requires (NodeProgress.replaces)."""

    host: str

    def apply(self, draft: drafts.Draft) -> None:
        files = draft.job.node(self.host).replaces
        if files is not None and draft.job.state in BEFORE_GO:
            pipeline = draft.job.pipeline
            reason = because("stage-files-lost", [self.host], lost=files.host, stage=files.stage, pipeline=pipeline)
            draft.stop(Cause.FILES_LOST, reason)


class HoldChanged(JobInput):
    """A user holds the job in the queue; `by` None: the user `ended_by` ended that."""

    by: str | None
    ended_by: str = "-"

    def apply(self, draft: drafts.Draft) -> None:
        if not draft.job.is_terminal and draft.job.held_by != self.by:
            if self.by is None:
                draft.record("hold-ended", values={"by": draft.job.held_by, "ended_by": self.ended_by})
            else:
                draft.record("hold-started", values={"by": self.by})
            draft.job = replace(draft.job, held_by=self.by)


class Held(JobInput):
    """Something else uses devices or ports of the job: a refusal that passes. `what`: as the node reports it; `by`: the
    run that leases them, None: unknown, or several. `hosts`: all of them, (): the one."""

    host: str
    what: Detail
    by: str | None = None
    hosts: tuple[str, ...] = ()

    def apply(self, draft: drafts.Draft) -> None:
        if draft.job.state in (State.CHECKING, State.STAGING, State.STARTING):
            hosts = (self.host, *(host for host in self.hosts if host != self.host))
            draft.hold(because("held", hosts, why=self.what), hosts, self.by)


class RankStarted(OfNode):
    rank: int
    pid: int
    local_rank: int = 0

    def apply(self, draft: drafts.Draft) -> None:
        node = draft.job.node(self.host)
        if self.rank in node.pids:
            return
        draft.set_node(self.host, pids={**node.pids, self.rank: self.pid})
        if node.phase is Phase.GO_SENT and {*node.pids, self.rank} >= set(node.ranks):
            draft.set_node(self.host, phase=Phase.STARTED)


class HostGivenUp(JobInput):
    """A user reported that a host is gone for good, with its disks."""

    host: str
    by: str

    def apply(self, draft: drafts.Draft) -> None:
        """Wait no longer for checkpoints that only this host has."""
        job = draft.job
        if job.is_terminal or self.host in job.lost_hosts or self.host not in job.used_hosts:
            return
        draft.record("host-given-up", [self.host], values={"by": self.by})
        draft.job = replace(job, lost_hosts=(*job.lost_hosts, self.host))
        if job.state is State.BACKOFF and job.cause is Cause.HELD:
            draft.job = replace(draft.job, not_before_s=draft.now_s)


class StopRequested(JobInput):
    """`by`: the user and the machine of the command."""

    now: bool
    by: str = "-"

    def apply(self, draft: drafts.Draft) -> None:
        draft.stop(Cause.USER, because("stopped-by-user", by=self.by), now=self.now)
        if draft.job.state is State.STOPPING and draft.job.cause is Cause.USER:
            draft.job = replace(draft.job, stopped_by=self.by)


class RetryRequested(JobInput):
    """A user started the next attempt of a job that had ended without success. `by`: the user and the machine of the
    command."""

    by: str = "-"

    def apply(self, draft: drafts.Draft) -> None:
        job = draft.job
        if job.state not in (State.FAILED, State.STOPPED):
            return
        draft.job = replace(job, past=tuple(replace(one, counted=False) for one in job.past))
        draft.back_off(because("retried-by-user", by=self.by), draft.now_s, counted=False)
        *past, last = draft.job.past
        past.append(replace(last, ended_at_s=job.ended_at_s or draft.now_s))
        draft.job = replace(draft.job, past=tuple(past), ended_at_s=None)


class HeadRestarted(JobInput):
    """A new controller found the job in a start without GO from the previous controller."""

    def apply(self, draft: drafts.Draft) -> None:
        draft.stop(Cause.HEAD_RESTARTED, because("controller-restarted"))


class Tick(JobInput):
    """Time passed. `reachable`: hosts that respond now. `fenced`: hosts whose leases have expired: they have ended the
    ranks by themselves. `quiet_s`: for how many seconds each of the others has been silent, as far as we could hear.
    `switchable`: hosts that a power agent can switch off."""

    reachable: frozenset[str] = frozenset()
    fenced: frozenset[str] = frozenset()
    quiet_s: Mapping[str, float] = field(default_factory=dict)
    switchable: frozenset[str] = frozenset()

    def apply(self, draft: drafts.Draft) -> None:
        job, draft.fenced = draft.job, self.fenced
        go_s = draft.now_s - (job.go_sent_at_s or draft.now_s)
        if job.state is State.STARTING and go_s > job.start_s:
            late = [n for n in job.nodes if n.phase is Phase.GO_SENT]
            missing = sum(len(set(n.ranks) - set(n.pids)) for n in late)
            hosts = [node.host for node in late]
            draft.stop(Cause.START_TIMEOUT, because("start-timeout", hosts, count=missing, limit_s=job.start_s))
        if job.state is State.STOPPING:
            waited_s = draft.now_s - job.since_s - drafts.stop_grace_s(job)
            _give_up_waiting(draft, self, waited_s=waited_s)
            if waited_s > drafts.JUDGE_S and drafts.may_restart(job) and job.failure is None:
                draft.job = replace(draft.job, failure=judge_quickly(job))


def _pass_over(draft: drafts.Draft, hosts: Sequence[str], why: Detail) -> None:
    until_s = draft.now_s + drafts.PASSED_OVER_S
    draft.record("host-passed-over", hosts, values={"why": why, "until_s": until_s})
    draft.job = replace(draft.job, passed_over={**draft.job.passed_over, **dict.fromkeys(hosts, until_s)})
    draft.stop(Cause.PASSED_OVER, because("passed-over", hosts, why=why))


LOOKED_AT_S = 60.0
"""Seconds after the submission of a job in which its user sees why its start failed."""


def _can_pass_over(job: Job, hosts: Sequence[str], now_s: float, *, is_away: bool) -> bool:
    """Return whether the job is placed again, without these hosts: if there are others, or if it has run before.

    What most of its hosts refuse, or three of them in turn, is wrong with the job.
    """
    passed = {host for host, until_s in job.passed_over.items() if until_s > now_s} | set(hosts)
    is_of_job = 2 * len(hosts) > len(job.hosts) if len(job.hosts) > 1 else len(passed) > 2
    has_others = len(job.pool) - len(passed) >= job.request.least
    waits = waits_for_hosts(job, now_s) if is_away else job.has_run
    return bool(hosts) and (is_away or not is_of_job) and (has_others or waits)


def waits_for_hosts(job: Job, now_s: float) -> bool:
    """Return whether the job waits for hosts that do not respond. Its first start fails there instead, with their
    error, while the user who submitted it may still look."""
    return job.has_run or now_s - job.created_at_s > LOOKED_AT_S


def _give_up_waiting(draft: drafts.Draft, tick: Tick, *, waited_s: float) -> None:
    """Mark hosts that do not confirm the end in time as unconfirmed, so that the job can end. One that was silent long
    before is not waited for again."""
    waiting = [n.host for n in draft.job.nodes if n.may_run_processes and n.host not in draft.job.unconfirmed]
    silent = tuple(host for host in waiting if host not in tick.reachable)
    alone = replace(draft.job, unconfirmed=silent)
    is_fenced = bool(silent) and drafts.can_restart_without(alone, silent, switchable=tick.switchable)
    patience_s = 0.0 if is_fenced and drafts.may_restart(draft.job) else drafts.CONFIRM_S
    waits_s = {host: waited_s if waited_s <= 0 else max(waited_s, tick.quiet_s.get(host, 0.0)) for host in silent}
    unreachable = tuple(host for host in silent if waits_s[host] > patience_s)
    stuck = tuple(host for host in waiting if host in tick.reachable and waited_s > 2 * drafts.CONFIRM_S)
    if unreachable:
        draft.record("end-unconfirmed", unreachable)
    if stuck:
        draft.record("end-failed", stuck)
    if unreachable or stuck:
        draft.job = replace(draft.job, unconfirmed=(*draft.job.unconfirmed, *unreachable, *stuck))
