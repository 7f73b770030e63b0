"""Views of jobs that `ascendrun.Cluster` returns, with their nodes, ranks and events, made from the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.events import Event
    from ascendrun.core.jobs.job import Job, NodeProgress
    from ascendrun.core.jobs.pipelines import PipelineStatus, StageStatus
    from ascendrun.core.settings import Settings
    from ascendrun.head.state.store import StoredJob


@dataclass(frozen=True)
class NodeView:
    """One node of one job. `liveness`: ALIVE, SUSPECT, UNREACHABLE, or UNKNOWN if no controller monitors it."""

    host: str
    node_rank: int
    ranks: tuple[int, ...]
    liveness: str
    phase: str


@dataclass(frozen=True)
class RankView:
    """State of one rank. `exit_code` for an exit, `signal` for a death by signal; both None: it runs or never ran.
    `stopped`: it ended after ascendrun stopped it. `hung_at_exit`: it finished its work but does not exit."""

    rank: int
    host: str
    pid: int | None
    exit_code: int | None
    signal: int | None
    exited_at_s: float | None
    stopped: bool
    hung_at_exit: bool


@dataclass(frozen=True)
class JobView:
    """A job as `ps` shows it. `state` is a name of core/jobs/job.State; `reason` is never empty while the job waits,
    stops or has failed. `progress`: the newest metrics line of rank 0, None: none yet.
    `pipeline`, `stage`: the pipeline's id and the job's stage in it; None: not in a pipeline.
    `stages`: only of a complete pipeline: the state of each stage.
    `world_size`: None: not planned yet.
    `unreachable_hosts`: of a running job: hosts that do not respond at this moment."""

    id: str
    name: str
    state: str
    reason: Text | str
    attempt: int
    hosts: tuple[str, ...]
    world_size: int | None
    created_at_s: float
    started_at_s: float | None
    ended_at_s: float | None
    exit_code: int | None
    file: str | None
    progress: Mapping[str, Any] | None
    pipeline: str | None = None
    stage: str | None = None
    stages: tuple[StageStatus, ...] = ()
    unreachable_hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobDetail:
    """A job as `show` shows it. `run`: its name on the nodes; `directories`: its location there, by host.
    `first_failure`: names the first failing rank, None: none failed. `unconfirmed_hosts`: hosts whose processes could
    not be confirmed gone when the job ended."""

    job: JobView
    run: str
    directories: Mapping[str, str]
    nodes: tuple[NodeView, ...]
    ranks: tuple[RankView, ...]
    events: tuple[Event, ...]
    first_failure: Text | str | None
    unconfirmed_hosts: tuple[str, ...]
    spec: Mapping[str, Any]


SLOW_HOSTS = 4
"""Number of slowest hosts that are named while a job's directories are sent."""


@dataclass(frozen=True)
class Reachability:
    """State of a job's hosts in the controller, by host: `liveness`, seconds without a reply and, while the job is
    STAGING, the bytes of its directories that are on the host, and their total."""

    liveness: Mapping[str, str] = field(default_factory=dict)
    silence_s: Mapping[str, float] = field(default_factory=dict)
    staged: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def unreachable_hosts(job: Job, now: Reachability | None) -> tuple[str, ...]:
    """Return the hosts of a RUNNING job that do not respond."""
    if now is None or job.state.value != "RUNNING":
        return ()
    return tuple(node.host for node in job.nodes if now.liveness.get(node.host) == "UNREACHABLE")


def running_reason(job: Job, now: Reachability | None) -> Text:
    """Return how many ranks of a RUNNING job run now. `now` None: the controller does not respond."""
    if now is None:
        return Text(
            "state.running-unconfirmed",
            "{ranks:plural rank ranks} started; the controller does not respond",
            ranks=job.world_size,
        )
    hosts = unreachable_hosts(job, now)
    lost = [node for node in job.nodes if node.host in hosts]
    running = sum(rank not in node.exits for node in job.nodes if node not in lost for rank in node.ranks)
    if not lost and running == job.world_size:
        return Text("state.running", "{ranks:plural rank ranks} running", ranks=running)
    if not lost:
        return Text("state.running-some", "{running} of {total} ranks running", running=running, total=job.world_size)
    return Text(
        "state.running-unreachable",
        "{running} of {total} ranks running; {hosts:hosts} unreachable for {silence_s:duration}",
        running=running,
        total=job.world_size,
        hosts=hosts,
        silence_s=round(max(now.silence_s.get(host, 0.0) for host in hosts)),
    )


def staging_reason(job: Job, now: Reachability | None) -> Text | str:
    """Return the progress of sending the directories of a STAGING job to its nodes."""
    shares = {host: done / total for host, (done, total) in (now.staged if now else {}).items() if total}
    if not shares or now is None:
        return job.reason
    done, total = (sum(pair[which] for pair in now.staged.values()) for which in (0, 1))
    values = {"done": done, "total": total, "share": done / total, "nodes": len(now.staged)}
    slow = sorted((host for host, share in shares.items() if share < 1), key=lambda host: shares[host])[:SLOW_HOSTS]
    if done == 0 or len(slow) in (0, len(shares)):
        return Text(
            "state.staging",
            "sent {done:bytes} of {total:bytes} ({share:percent}) to {nodes:plural node nodes}",
            **values,
        )
    return Text(
        "state.staging-slow",
        "sent {done:bytes} of {total:bytes} ({share:percent}) to {nodes:plural node nodes}; slowest: {hosts:hosts}",
        **values,
        hosts=slow,
    )


def reason_now(job: Job, now: Reachability | None) -> Text | str:
    """Return the reason of a job's state, updated from the controller's present knowledge where that differs."""
    if job.state.value == "RUNNING":
        return running_reason(job, now)
    return staging_reason(job, now) if job.state.value == "STAGING" else job.reason


def make_job_view(stored: StoredJob, progress: Mapping[str, Any] | None, now: Reachability | None = None) -> JobView:
    """Make the view of a stored job. `now`: state of its hosts, None: unknown."""
    job = stored.job
    exit_code = None if job.ended_at_s is None else int(job.state.value != "SUCCEEDED")
    return JobView(
        id=job.id,
        name=job.name,
        state=job.state.value,
        reason=reason_now(job, now),
        attempt=job.attempt,
        hosts=job.hosts,
        world_size=job.world_size or None,
        created_at_s=job.created_at_s,
        started_at_s=job.started_at_s,
        ended_at_s=job.ended_at_s,
        exit_code=exit_code,
        file=stored.file,
        progress=progress,
        pipeline=job.pipeline,
        stage=job.stage,
        unreachable_hosts=unreachable_hosts(job, now),
    )


def make_pipeline_view(stored: Sequence[StoredJob], status: PipelineStatus, representative: JobView) -> JobView:
    """Make the view of a pipeline. `stored`: all its jobs; `representative`: the view of the representative stage."""
    first = stored[0].job
    is_over = all(one.job.is_terminal for one in stored)
    starts = [one.job.started_at_s for one in stored if one.job.started_at_s is not None]
    ends = [one.job.ended_at_s or 0.0 for one in stored]
    return replace(
        representative,
        id=str(first.pipeline),
        name=first.name[: -len(f".{first.stage}")],
        state=status.state.value,
        reason=representative.reason if status.state.value == representative.state == "RUNNING" else status.reason,
        created_at_s=first.created_at_s,
        started_at_s=min(starts, default=None),
        ended_at_s=max(ends) if is_over else None,
        exit_code=int(status.state.value != "SUCCEEDED") if is_over else None,
        stages=status.stages,
    )


def make_job_detail(
    stored: StoredJob, view: JobView, events: tuple[Event, ...], liveness: Mapping[str, str], settings: Settings
) -> JobDetail:
    """Make the detailed view of a stored job with nodes and ranks. `liveness`: by host, from the controller."""
    job = stored.job
    nodes = tuple(
        NodeView(node.host, node.node_rank, node.ranks, liveness.get(node.host, "UNKNOWN"), node.phase.value)
        for node in job.nodes
    )
    ranks = tuple(_rank_view(node, rank) for node in job.nodes for rank in node.ranks)
    return JobDetail(
        job=view,
        run=job.run,
        directories={host["name"]: f"{_node_root(settings, host)}/runs/{job.run}" for host in stored.hosts},
        nodes=nodes,
        ranks=ranks,
        events=events,
        first_failure=None if job.first_failure is None else job.first_failure.reason(),
        unconfirmed_hosts=job.unconfirmed,
        spec=stored.spec,
    )


def _node_root(settings: Settings, host: Mapping[str, Any]) -> str:
    """Return ascendrun's directory on a host of a job (node/layout.py); "~" is the user's home directory there."""
    from ascendrun.core.settings import local_root

    return str(local_root(settings, host["name"])) if host.get("addr") == "local" else "~/.ascendrun"


def _rank_view(node: NodeProgress, rank: int) -> RankView:
    end = node.exits.get(rank)
    return RankView(
        rank=rank,
        host=node.host,
        pid=node.pids.get(rank),
        exit_code=end.code if end else None,
        signal=end.signal if end else None,
        exited_at_s=end.at_ns / 1e9 if end else None,
        stopped=end.stopped if end else False,
        hung_at_exit=rank in node.lingering,
    )


def choose_attempt(job: JobView | Job, attempt: int | None) -> int:
    """Return the attempt (None: the newest). Raises NotFoundError if the job has no such attempt."""
    if attempt is not None and attempt > job.attempt:
        from ascendrun.core.errors import NotFoundError

        raise NotFoundError(
            Text("logs.no-attempt", "{job}: no attempt {attempt}", job=job.id, attempt=attempt),
            hint=Text("logs.attempts", "the newest attempt is {attempt}", attempt=job.attempt),
        )
    return attempt or max(job.attempt, 1)
