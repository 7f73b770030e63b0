"""Views of jobs that `ascendrun.Cluster` returns, with their nodes, ranks and events, made from the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import NotFoundError
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Exit, Job, NodeProgress, Phase, PipelineStatus, StageStatus
from ascendrun.core.jobs.reasons import Reason, because
from ascendrun.core.jobs.restart import PastAttempt
from ascendrun.core.machines import Hold, Machine, job_holds
from ascendrun.core.reachability import UNKNOWN
from ascendrun.core.settings import Settings, local_root
from ascendrun.head.state.job_files import outputs_dir, read_waiting
from ascendrun.text import Text
from ascendrun.text.format import grouped

if TYPE_CHECKING:
    from ascendrun.core.pulse import JobSight
    from ascendrun.head.state.job_table import StoredJob


@dataclass(frozen=True)
class NodeView:
    """One node of one job. `liveness`: ALIVE, SUSPECT, UNREACHABLE, or UNKNOWN: nothing recent is known of it.
    `heard_at_s`: when its agent sent its last message, None: unknown. `role`: None: the job has none."""

    host: str
    node_rank: int
    ranks: tuple[int, ...]
    liveness: str
    phase: str
    heard_at_s: float | None = None
    role: str | None = None


@dataclass(frozen=True)
class RankView:
    """State of one rank. `exit_code` for an exit, `signal` for a death by signal; both None: it runs or never ran.
    `stopped`: it ended after ascendrun stopped it. `hung_at_exit`: it finished its work but does not exit.
    `is_known`: False if nothing recent confirms that it still runs."""

    rank: int
    host: str
    pid: int | None
    exit_code: int | None
    signal: int | None
    exited_at_s: float | None
    stopped: bool
    hung_at_exit: bool
    is_known: bool = True


@dataclass(frozen=True)
class JobView:
    """A job as `ps` shows it. `state` is a name of core/jobs/job.State; `reason` is never empty while the job waits,
    stops or has failed. `progress`: the newest metrics line of rank 0, None: none yet.
    `pipeline`, `stage`: the pipeline's id and the job's stage in it; None: not in a pipeline.
    `stages`: only of a complete pipeline: the state of each stage.
    `world_size`: None: not planned yet.
    `unreachable_hosts`: of a running job: hosts that do not respond at this moment.
    `last_state`: the newest stored state; it differs from `state` while that is UNKNOWN, since nothing confirms it.
    `holds`: hosts that no other job may use, also after the end, and why.
    `hosts`: of the present attempt, (): it waits in the queue; `nodes`: how many it needs; `pool`: those that it may
    use; `spares`: hosts that it keeps as replacements. `priority`: higher ones start first. `held_by`: the user who
    holds it in the queue, None: not held. `confidence`: of what failed first: certain, likely or unknown, by the
    diagnosis; preliminary, until it is there; None: nothing failed. `start_expected_at_s`: of a queued job, None: not
    known."""

    id: str
    name: str
    state: str
    reason: Reason
    attempt: int
    hosts: tuple[str, ...]
    world_size: int | None
    created_at_s: float
    started_at_s: float | None = None
    ended_at_s: float | None = None
    exit_code: int | None = None
    file: str | None = None
    progress: Mapping[str, Any] | None = None
    pipeline: str | None = None
    stage: str | None = None
    stages: tuple[StageStatus, ...] = ()
    unreachable_hosts: tuple[str, ...] = ()
    last_state: str | None = None
    holds: tuple[Hold, ...] = ()
    nodes: int = 0
    pool: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    priority: int = 0
    held_by: str | None = None
    confidence: str | None = None
    start_expected_at_s: float | None = None


OF_JOB = (
    *("id", "name", "attempt", "hosts", "created_at_s", "started_at_s", "ended_at_s"),
    *("pipeline", "stage", "pool", "priority", "held_by", "confidence"),
)
"""Fields of a JobView that are those of its job."""


@dataclass(frozen=True)
class JobDetail:
    """A job as `show` shows it. `run`: its name on the nodes; `directories`: its location there, by host.
    `first_failure`: what failed first, with its hosts and ranks, None: nothing failed; `job.confidence`: how certain
    that is. `unconfirmed_hosts`: hosts whose processes could not be confirmed gone when the job ended. `spares`: why
    each spare is not ready, None: it is; one that has not been examined yet is missing. `outputs`: directory of its
    outputs on this machine, None: there is none. `outputs_waiting`: hosts whose declared outputs are not there.
    `forked_ranks`: those that the processes in `ranks` started, known by their environment."""

    job: JobView
    run: str
    directories: Mapping[str, str]
    nodes: tuple[NodeView, ...]
    ranks: tuple[RankView, ...]
    events: tuple[Event, ...]
    first_failure: Reason | None
    unconfirmed_hosts: tuple[str, ...]
    spec: Mapping[str, Any]
    past_attempts: tuple[PastAttempt, ...] = ()
    spares: Mapping[str, Text | str | None] = field(default_factory=dict)
    outputs: str | None = None
    outputs_waiting: tuple[str, ...] = ()
    forked_ranks: tuple[RankView, ...] = ()


def find_job(state_dir: Path, ref: str) -> tuple[StoredJob, tuple[Event, ...]]:
    """Return a job with its events. Raises NotFoundError, StoreUnusableError."""
    from ascendrun.head.state.store import Store  # with sqlite3, which the help of a command does not need

    with Store.open_for_reading(state_dir) as store:
        stored = store.jobs.find(ref)
        return stored, store.events.of(stored.job.id)


SLOW_HOSTS = 4
"""Number of slowest hosts that are named while a job's directories are sent."""


def state_now(job: Job, sight: JobSight | None) -> tuple[str, Reason]:
    """Return the state of a job and its reason, as every screen and format shows them.

    `sight`: what may be stated about a live job, None: nothing. A live job that nothing recent confirms is UNKNOWN.
    """
    if job.is_terminal:
        return job.state.value, job.reason
    if sight is None or not sight.is_known:
        problem = None if sight is None else sight.problem
        seen_at_s = job.since_s or job.created_at_s
        if sight is not None and sight.seen_at_s is not None:
            seen_at_s = max(sight.seen_at_s, seen_at_s)
        why = because("no-response") if problem is None else problem
        return UNKNOWN, because("unknown", why=why, state=job.state.value, seen_at_s=seen_at_s)
    if job.state.value == "RUNNING":
        return job.state.value, running_reason(job, sight)
    return job.state.value, staging_reason(job, sight) if job.state.value == "STAGING" else job.reason


def silent_hosts(job: Job, sight: JobSight | None) -> Mapping[str, str]:
    """Return the hosts of a RUNNING job of which nothing is known now, with their liveness."""
    if sight is None or job.state.value != "RUNNING":
        return {}
    states = {node.host: sight.liveness.get(node.host) for node in job.nodes}
    return {host: state for host, state in states.items() if state in (UNKNOWN, "UNREACHABLE")}


def running_reason(job: Job, sight: JobSight) -> Reason:
    """Return how many ranks of a RUNNING job run now, and which hosts do not confirm theirs."""
    silent = silent_hosts(job, sight)
    seen = [node for node in job.nodes if node.host not in silent]
    has_forked = any(node.forked for node in job.nodes)
    running = sum(rank not in node.exits for node in seen for rank in node.ranks)
    if has_forked:
        running = sum(rank.exit is None for node in seen for rank in node.forked.values())
    if not silent and running == job.rank_count:
        return because("running", count=running)
    if not silent and not running:
        hosts = tuple(node.host for node in seen if node.phase is not Phase.ENDED)
        return because("ending", hosts, total=job.rank_count)
    if not silent:
        return because("running-some", running=running, total=job.rank_count)
    texts = [_silent_text(silent, state, sight) for state in ("UNREACHABLE", UNKNOWN) if state in silent.values()]
    if not seen:
        return because("running-unseen", silent, away=texts)
    ages = [sight.now_s - at_s for at_s in map(sight.heard_at_s.get, (node.host for node in seen)) if at_s is not None]
    age_s = round(max(ages, default=0.0))
    return because("running-silent", silent, away=texts, running=running, total=job.rank_count, age_s=age_s)


def _silent_text(silent: Mapping[str, str], state: str, sight: JobSight) -> Reason:
    hosts = tuple(host for host in silent if silent[host] == state)
    heard = [at_s for at_s in map(sight.heard_at_s.get, hosts) if at_s is not None]
    code = "hosts-silent" if heard else "hosts-unheard"
    return because(code, hosts, state=state, since_s=min(heard, default=None))


def staging_reason(job: Job, sight: JobSight) -> Reason:
    """Return the progress of sending the directories of a STAGING job to its nodes."""
    shares = {host: done / total for host, (done, total) in sight.staged.items() if total}
    if not shares:
        return job.reason
    done, total = (sum(pair[which] for pair in sight.staged.values()) for which in (0, 1))
    values: dict[str, Any] = {"done": done, "total": total, "share": done / total, "nodes": len(sight.staged)}
    slow = sorted((host for host, share in shares.items() if share < 1), key=lambda host: shares[host])[:SLOW_HOSTS]
    if done == 0 or len(slow) in (0, len(shares)):
        return because("staging", **values)
    return because("staging-slow", slow, **values)


def make_job_view(stored: StoredJob, progress: Mapping[str, Any] | None, sight: JobSight | None = None) -> JobView:
    """Make the view of a stored job. `sight`: what may be stated about it now if it is live, None: nothing."""
    job = stored.job
    exit_code = None if job.ended_at_s is None else int(job.state.value != "SUCCEEDED")
    state, reason = state_now(job, sight)
    return JobView(
        **{name: getattr(job, name) for name in OF_JOB},
        state=state,
        reason=reason,
        world_size=job.rank_count or None,
        exit_code=exit_code,
        file=stored.file,
        progress=progress,
        unreachable_hosts=tuple(silent_hosts(job, sight)) if state != UNKNOWN else (),
        last_state=job.state.value,
        holds=job_holds(job) if job.held_hosts else (),
        nodes=job.request.nodes,
        spares=() if job.is_terminal or not job.hosts else job.spares,
        start_expected_at_s=job.start_expected_at_s if state == "QUEUED" else None,
    )


FOUND = "FOUND"
"""State of an attempt that runs on hosts and that no record explains."""


def make_found_views(machines: Sequence[Machine]) -> tuple[JobView, ...]:
    """Make a view of each found attempt, with its job's id and its tag as name; the newest first."""
    holds = grouped((hold.tag, hold) for machine in machines for hold in machine.holds if hold.is_found)
    views = [
        JobView(
            id=found[0].job,
            name=tag,
            state=FOUND,
            reason=because("found", [hold.host for hold in found], why=found[0].reason()),
            attempt=int(tag.rpartition(".")[2]),
            hosts=tuple(sorted(hold.host for hold in found)),
            world_size=None,
            created_at_s=min(hold.since_s for hold in found),
            last_state=FOUND,
            holds=tuple(found),
        )
        for tag, found in holds.items()
    ]
    return tuple(sorted(views, key=lambda view: view.created_at_s, reverse=True))


def make_pipeline_view(stored: Sequence[StoredJob], status: PipelineStatus, representative: JobView) -> JobView:
    """Make the view of a pipeline. `stored`: all its jobs; `representative`: the view of the representative stage."""
    first = stored[0].job
    is_over = all(one.job.is_terminal for one in stored)
    state = UNKNOWN if representative.state == UNKNOWN else status.state.value
    starts = [one.job.started_at_s for one in stored if one.job.started_at_s is not None]
    ends = [one.job.ended_at_s or 0.0 for one in stored]
    return replace(
        representative,
        id=str(first.pipeline),
        name=first.name[: -len(f".{first.stage}")],
        state=state,
        last_state=status.state.value,
        reason=representative.reason if state == representative.state in ("RUNNING", UNKNOWN) else status.reason,
        created_at_s=first.created_at_s,
        started_at_s=min(starts, default=None),
        ended_at_s=max(ends) if is_over else None,
        exit_code=int(status.state.value != "SUCCEEDED") if is_over else None,
        stages=status.stages,
    )


def make_job_detail(
    stored: StoredJob, view: JobView, events: tuple[Event, ...], sight: JobSight | None, settings: Settings
) -> JobDetail:
    """Make the detailed view of a stored job with nodes and ranks. `sight`: as for `make_job_view`."""
    job = stored.job
    liveness, heard_at_s = ({}, {}) if sight is None else (sight.liveness, sight.heard_at_s)
    nodes = tuple(
        NodeView(
            node.host,
            node.node_rank,
            node.ranks,
            liveness.get(node.host, UNKNOWN),
            node.phase.value,
            heard_at_s.get(node.host),
            node.role,
        )
        for node in job.nodes
    )

    silent = silent_hosts(job, sight)
    known = {node.host for node in job.nodes if view.state != UNKNOWN and node.host not in silent}
    ranks = tuple(
        _rank_view(node, rank, node.pids.get(rank), node.exits.get(rank), is_known=node.host in known)
        for node in job.nodes
        for rank in node.ranks
    )
    keys = {node.host: node.machine_key for node in job.nodes}
    roots = {  # of ascendrun (node/layout.py); "~" is the user's home directory there
        host["name"]: local_root(settings, host["name"]) if host.get("addr") == "local" else "~/.ascendrun"
        for host in stored.hosts
    }
    outputs = outputs_dir(settings.state_dir, job.pipeline or job.id)
    return JobDetail(
        job=view,
        run=job.run,
        directories={
            host["name"]: f"{roots[host['name']]}/nodes/{keys.get(host['name']) or '*'}/runs/{job.run}"
            for host in stored.hosts
            if host["name"] in job.used_hosts
        },
        nodes=nodes,
        ranks=ranks,
        events=events,
        first_failure=None if job.first_failure is None else job.first_failure.reason,
        unconfirmed_hosts=job.unconfirmed,
        spec=stored.spec,
        past_attempts=job.past,
        spares={
            event.hosts[0]: event.values.get("finding")
            for event in events
            if event.code in ("spare-ready", "spare-not-ready") and event.hosts[0] in view.spares
        },
        outputs=str(outputs) if outputs.is_dir() else None,
        outputs_waiting=tuple(read_waiting(settings.state_dir, job.id)),
        forked_ranks=tuple(
            _rank_view(node, rank, forked.pid, forked.exit, is_known=node.host in known)
            for node in job.nodes
            for rank, forked in sorted(node.forked.items())
        ),
    )


def _rank_view(node: NodeProgress, rank: int, pid: int | None, end: Exit | None, *, is_known: bool) -> RankView:
    return RankView(
        rank=rank,
        host=node.host,
        pid=pid,
        exit_code=end.code if end else None,
        signal=end.signal if end else None,
        exited_at_s=end.at_ns / 1e9 if end else None,
        stopped=end.stopped if end else False,
        hung_at_exit=rank in node.lingering,
        is_known=is_known or end is not None,
    )


def choose_attempt(job: JobView | Job, attempt: int | None) -> int:
    """Return the attempt (None: the newest). Raises NotFoundError if the job has no such attempt."""
    if attempt is not None and attempt > job.attempt:
        raise NotFoundError(
            Text("logs.no-attempt", "{job}: no attempt {attempt}", job=job.id, attempt=attempt),
            hint=Text("logs.attempts", "the newest attempt is {attempt}", attempt=job.attempt),
        )
    return attempt or max(job.attempt, 1)
