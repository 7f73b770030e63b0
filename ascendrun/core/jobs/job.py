"""The record of a job: its state, its nodes and the ends of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Any

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.checkpoints import ResumePoint
from ascendrun.core.jobs.reasons import FirstFailure, Reason, because
from ascendrun.core.jobs.restart import Failure, PastAttempt, RestartPolicy
from ascendrun.text import to_json


class State(str, Enum):
    """State of a job. The transitions between them are the table in core/jobs/draft.py."""

    QUEUED = "QUEUED"
    CHECKING = "CHECKING"
    STAGING = "STAGING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    BACKOFF = "BACKOFF"
    SUCCEEDED = "SUCCEEDED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


TERMINAL = frozenset({State.SUCCEEDED, State.STOPPED, State.FAILED})
ACTIVE_STATES = frozenset({State.CHECKING, State.STAGING, State.STARTING, State.RUNNING, State.STOPPING})
"""States in which a job uses its nodes."""
BEFORE_GO = (State.CHECKING, State.STAGING, State.STARTING)


class Phase(str, Enum):
    """Progress of one node within an attempt. From GO_SENT on, processes may exist there."""

    PENDING = "PENDING"
    REPORTED = "REPORTED"
    STAGED = "STAGED"
    READY = "READY"
    GO_SENT = "GO_SENT"
    STARTED = "STARTED"
    ENDED = "ENDED"
    LOST = "LOST"


class Cause(str, Enum):
    """Reason for stopping a job; decides whether it ends SUCCEEDED, STOPPED or FAILED, or is retried after BACKOFF."""

    USER = "user"
    REFUSED = "refused"
    FAILURE = "failure"
    NODE_LOST = "node-lost"
    START_TIMEOUT = "start-timeout"
    LIMIT = "limit"
    HEAD_RESTARTED = "head-restarted"
    NEED = "need"
    PREEMPTED = "preempted"
    HELD = "held"
    HUNG = "hung"
    PASSED_OVER = "passed-over"
    FILES_LOST = "files-lost"
    TRAINING = "training"
    COMPLETED = "completed"
    RESIZED = "resized"
    REQUEUED = "requeued"


@dataclass(frozen=True)
class Exit:
    """Exit of one rank. `at_ns`: the node's UTC clock; compare over nodes only after removing clock offsets.
    `stopped`: it ended after a stop request. `done`: its metrics say that its work is complete. `killed_at_exit`: it
    had finished, did not exit, and was killed. `exited_ns`: when the kernel reported it, as `at_ns`."""

    code: int | None
    signal: int | None
    at_ns: int
    stopped: bool = False
    killed_at_exit: bool = False
    exited_ns: int | None = None
    max_rss_bytes: int | None = None
    done: bool = False

    @property
    def is_failure(self) -> bool:
        return not self.stopped and (self.signal is not None or self.code != 0)

    def agrees(self, other: Exit | None) -> bool:
        """Return whether the other says the same about how the rank ended."""
        return other is not None and (self.code, self.signal, self.stopped) == (other.code, other.signal, other.stopped)

    @property
    def is_success(self) -> bool:
        """Whether the work is complete: a rank that is stopped may also exit with 0, after it has saved."""
        return self.code == 0 and (not self.stopped or self.done or self.killed_at_exit)


@dataclass(frozen=True)
class Leftover:
    """A process of an attempt that SIGKILL did not end. `start`: clock ticks since boot; `state`: a letter of /proc;
    `wait_channel`: the kernel function in which it waits; `since_ns`: the node's UTC clock. None, "": not recorded."""

    pid: int
    start: int | None = None
    comm: str = ""
    state: str = ""
    wait_channel: str = ""
    since_ns: int | None = None


@dataclass(frozen=True)
class ForkedRank:
    """A rank that the process of its node started itself. `exit`: None: it runs; its code and signal are None where the
    node did not see them."""

    pid: int
    exit: Exit | None = None


@dataclass(frozen=True)
class StageFiles:
    """What stages before a job left in their working directory on a host: `stage` is the first of them.
    `machine_key`: of the host's machine (AgentInfo)."""

    host: str
    machine_key: str
    stage: str | None = None


@dataclass(frozen=True)
class NodeProgress:
    """One node within the current attempt. `clock_offset_s`: node clock minus head clock, None: not measured.
    `lost`: why its processes are gone in phase LOST (endings.NodeLost), None: not lost. `machine_key`, `incarnation`:
    of its machine and its records there (AgentInfo), None: not reported. `leftovers`: processes that still live after
    the end. `trouble_ns`: time of the newest NodeTrouble, by the node's clock. `hccl`: see inputs.NodeReady.
    `replaces`: files of a host that was given up, whose place this one takes, None: it takes no such place. `ends_job`,
    `role`: see NodePlan. `master_port`: its free port, None: not requested. `power`: see endings.PowerOff, None: its
    power stays on."""

    host: str
    node_rank: int
    phase: Phase = Phase.PENDING
    ranks: tuple[int, ...] = ()
    boot_id: str | None = None
    clock_offset_s: float | None = None
    pids: Mapping[int, int] = field(default_factory=dict)
    exits: Mapping[int, Exit] = field(default_factory=dict)
    lingering: tuple[int, ...] = ()
    lost: str | None = None
    machine_key: str | None = None
    incarnation: str | None = None
    leftovers: tuple[Leftover, ...] = ()
    trouble_ns: int = 0
    hccl: tuple[int, ...] | None = None
    replaces: StageFiles | None = None
    forked: Mapping[int, ForkedRank] = field(default_factory=dict)
    ends_job: bool = True
    role: str | None = None
    master_port: int | None = None
    power: Reason | None = None

    @property
    def has_succeeded(self) -> bool:
        """Whether all its ranks have ended, each with its work complete."""
        ranks = all(rank in self.exits and self.exits[rank].is_success for rank in self.ranks)
        return ranks and not any(exit.is_failure for exit in self.exits.values())

    @property
    def may_run_processes(self) -> bool:
        return self.phase in (Phase.GO_SENT, Phase.STARTED)


@dataclass(frozen=True)
class Request:
    """What a job needs of its pool. `nodes`: hosts of an attempt. `min_nodes`: the fewest with which an attempt starts
    while others are missing, 0: all. `spares`: hosts that are claimed for replacements.
    `same_as`: the id of the job whose hosts an attempt must use first, since its files are there; None: any hosts.
    `examines`: it measures its hosts, also those in quarantine or drained. `may_lack_files`: a stage that also runs
    where the files of the stages before it are lost."""

    nodes: int = 0
    spares: int = 0
    same_as: str | None = None
    examines: bool = False
    may_lack_files: bool = False
    min_nodes: int = 0

    @property
    def least(self) -> int:
        """The fewest hosts of an attempt."""
        return self.min_nodes or self.nodes


@dataclass(frozen=True)
class Job:
    """Everything that the controller decided about one job, immutable: `lifecycle.advance` returns the next record.

    `pool`: the hosts that it may use, in the order of the hostfile. `hosts`: those of the present attempt in the order
    of their node ranks, (): it is queued. `spares`: hosts claimed with them, on which nothing runs. `passed_over`: how
    long (UTC seconds) a host is not used, since it was not ready. `lost_hosts`: whose disks a user has given
    up.
    `priority`: higher ones are placed first. `held_by`: the user who holds it in the queue, None: not held. `user`: who
    submitted it, None: unknown. `forks`: the process of a node may start its ranks, so that its end is no rank's.
    `pipeline`: the id of its pipeline, None: not part of a pipeline. `stage`: the stage's name in it. `needs`: the id
    of the job that has to succeed before. `home`: the run that owns its working directory, None: its own run.
    `hccl_base`: first of the host ports of HCCL, None: not chosen by this job. `refusals`: starts in a row that
    ended since devices or ports were in use. `go_sent_at_s`: when GO was decided for this attempt, None: not yet.
    `engine`: see hosts.queue_of. `allocation`: the key of its request for hosts, None: none is open; then `pool` has
    the hosts of the allocation, (): not granted yet. `granted`: the hosts of all allocations, the newest of each name.
    `unconfirmed`: hosts on which the end of all processes is unknown; they stay reserved until they are reachable.
    `stopped_by`: user and machine of the command that stops this attempt, None: none does.
    `first_failure`: what every screen shows, replaced by the diagnosis. `failure`, `last_step`: of this attempt, as
    diagnosed. `saved_step`: see PastAttempt. `resume`: what it resumes from, None: unknown. `grows_after`: the step of
    the newest checkpoint when spares were ready with which it could grow, None: none are. `past`: the newest ended
    attempts. `not_before_s`: earliest time of the next start, None: no pause. `start_expected_at_s`: of a queued job,
    None: not known. Times are UTC seconds.
    """

    id: str
    name: str
    run: str
    hosts: tuple[str, ...]
    grace_s: float
    start_s: float
    created_at_s: float
    state: State = State.QUEUED
    reason: Reason = field(default_factory=lambda: because("new"))
    attempt: int = 1
    since_s: float = 0.0
    nodes: tuple[NodeProgress, ...] = ()
    world_size: int = 0
    hccl_base: int | None = None
    go_sent_at_s: float | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None
    cause: Cause | None = None
    stop_now: bool = False
    stopped_by: str | None = None
    first_failure: FirstFailure | None = None
    unconfirmed: tuple[str, ...] = ()
    pipeline: str | None = None
    stage: str | None = None
    needs: str | None = None
    home: str | None = None
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    failure: Failure | None = None
    last_step: int | None = None
    saved_step: int | None = None
    past: tuple[PastAttempt, ...] = ()
    not_before_s: float | None = None
    pool: tuple[str, ...] = ()
    request: Request = Request()
    spares: tuple[str, ...] = ()
    passed_over: Mapping[str, float] = field(default_factory=dict)
    lost_hosts: tuple[str, ...] = ()
    priority: int = 0
    held_by: str | None = None
    refusals: int = 0
    resume: ResumePoint | None = None
    user: str | None = None
    forks: bool = False
    engine: str | None = None
    allocation: str | None = None
    granted: tuple[Host, ...] = ()
    grows_after: int | None = None
    start_expected_at_s: float | None = None

    @property
    def lacks_hosts(self) -> bool:
        """Whether the job runs on fewer hosts than it requested, as its `min_nodes` permits."""
        may_lack = self.request.min_nodes > 0 and self.state is State.RUNNING
        return may_lack and len(self.hosts) < self.request.nodes

    @property
    def run_id(self) -> str:
        return f"{self.run}.{self.attempt}"

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def confidence(self) -> str | None:
        """How certain it is what failed first in this attempt (FirstFailure); None: nothing failed."""
        return None if self.first_failure is None else self.first_failure.confidence

    def master_port_of(self, host: str) -> int | None:
        """Return the port that the ranks of a host use as MASTER_PORT: that of the first host of its role."""
        role = self.node(host).role
        return next((node.master_port for node in self.nodes if node.role == role and node.master_port), None)

    @property
    def has_run(self) -> bool:
        """Whether an earlier attempt of it has started its ranks."""
        return any(attempt.started_at_s is not None for attempt in self.past)

    @property
    def rank_count(self) -> int:
        """Return the number of ranks; processes that start ranks count only until ranks of theirs are known."""
        return sum(len(node.forked) for node in self.nodes) or self.world_size

    @property
    def used_hosts(self) -> tuple[str, ...]:
        """Return the hosts of all attempts, in the order of the pool."""
        used = {*self.hosts, *(host for attempt in self.past for host in attempt.hosts)}
        return tuple(host for host in self.pool or self.hosts if host in used)

    def hosts_of(self, attempt: int) -> tuple[str, ...]:
        """Return the hosts of an attempt, in the order of their node ranks; all of an attempt that is not recorded."""
        if attempt == self.attempt:
            return self.hosts
        return next((one.hosts for one in self.past if one.number == attempt), self.used_hosts)

    @property
    def held_hosts(self) -> tuple[str, ...]:
        """Return the hosts that no other job may use, also after the end: processes of this job may live there."""
        return tuple(n.host for n in self.nodes if n.host in self.unconfirmed or n.leftovers)

    def place_of(self, host: str) -> int | None:
        """Return the position of a host's node, usually that of the host, None: it has none."""
        at = self.hosts.index(host) if host in self.hosts else len(self.nodes)
        if at < len(self.nodes) and self.nodes[at].host == host:
            return at
        return next((at for at, node in enumerate(self.nodes) if node.host == host), None)

    def node(self, host: str) -> NodeProgress:
        at = self.place_of(host)
        if at is None:
            raise KeyError(host)
        return self.nodes[at]


# Conversion of the record to plain JSON values and back, for the store.


def dump_job(job: Job) -> dict[str, Any]:
    """Return the record as JSON values; enums become their values, tuples lists, rank numbers in keys strings."""
    return dict(to_json(job))


def load_job(record: Mapping[str, Any]) -> Job:
    """Return the job of a record made by `dump_job`, also after conversion to and from JSON."""
    return load_dataclass(Job, record)


# Pipelines: the jobs of their stages.


@dataclass(frozen=True)
class StageStatus:
    """One stage: the newest job of its name. `job_id`: its id."""

    stage: str
    job_id: str
    state: State


@dataclass(frozen=True)
class PipelineStatus:
    """Summary of a pipeline. `representative`: index, in the jobs it was made from, of the job that shows its progress.
    `reason`: the stage number, the number of stages, and the reason of that stage."""

    representative: int
    state: State
    reason: Reason
    stages: tuple[StageStatus, ...]


def newest_stages(jobs: Sequence[Job]) -> tuple[int, ...]:
    """Return the indexes of each stage's newest job, in the order in which the stages were first submitted."""
    return tuple({job.stage: index for index, job in enumerate(jobs) if job.stage is not None}.values())


def representative_stage(jobs: Sequence[Job]) -> int:
    """Return the index of the job that represents the pipeline: a job with nodes, else the first that failed or was
    stopped itself, else the first that waits, else the last."""
    stages = newest_stages(jobs)
    if all(jobs[index].state is State.SUCCEEDED for index in stages):
        return stages[-1]
    return min(stages, key=lambda index: _precedence(jobs[index]))


def _precedence(job: Job) -> int:
    """Return the sort key; 0 is first."""
    if not job.is_terminal:
        return 2 if job.state is State.QUEUED else 0
    return 1 if job.state is not State.SUCCEEDED and job.cause is not Cause.NEED else 3


def pipeline_status(jobs: Sequence[Job]) -> PipelineStatus:
    """Return the status of a pipeline. `jobs`: all its jobs, oldest first. SUCCEEDED: the newest of each stage did."""
    newest = newest_stages(jobs)
    representative = representative_stage(jobs)
    job = jobs[representative]
    stages = tuple(StageStatus(str(jobs[index].stage), jobs[index].id, jobs[index].state) for index in newest)
    state = job.state
    if job.state.value in ("STOPPED", "FAILED") and any(not jobs[index].is_terminal for index in newest):
        state = State.STOPPING  # its last stages are still being skipped
    number = newest.index(representative) + 1
    reason = because("stage-progress", why=job.reason, number=number, stages=len(newest), stage=job.stage)
    return PipelineStatus(representative, state, reason, stages)
