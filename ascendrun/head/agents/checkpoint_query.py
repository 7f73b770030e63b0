"""Query of the checkpoints on the hosts of an attempt, and the choice of the one that it resumes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Callable

from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.hosts import Host
from ascendrun.core.jobs import checkpoints
from ascendrun.core.jobs.checkpoints import Listed, Listings, OnlyCopy, ResumePoint
from ascendrun.core.jobs.job import Job
from ascendrun.core.jobs.restart import set_aside
from ascendrun.core.reports import NodeReport
from ascendrun.head.agents.connections import Connections
from ascendrun.head.protocol.agent_messages import Checkpoints, CheckpointsReply
from ascendrun.head.protocol.remote import Reply
from ascendrun.node import layout

if TYPE_CHECKING:
    from ascendrun.core.jobfile.spec import JobSpec

LIST_S = 30.0


def query_checkpoints(
    spec: JobSpec,
    job: Job,
    hosts: Sequence[Host],
    reports: Mapping[str, NodeReport],
    *,
    links: Connections,
    post: Callable[[Callable[[], None]], None],
    done: Callable[[Listings], None],
) -> None:
    """List the checkpoints of a job on connected hosts; `done` is called once, in the controller's thread.

    A first attempt without `checkpoint.dir` has none, and asks nobody.
    """
    found: dict[str, tuple[Listed, ...]] = {}
    waiting = {host.name for host in hosts} if spec.checkpoint.dir or job.attempt > 1 else set()

    def take(host: str, reply: Reply[CheckpointsReply]) -> None:
        waiting.discard(host)
        if reply.error is None:
            found[host] = tuple(load_dataclass(Listed, row) for row in reply.message.checkpoints)
        if not waiting:
            done(found)

    def ask(host: Host) -> None:
        folder = spec.checkpoint.dir or layout.checkpoints_dir(reports[host.name].root, job.run)
        links.get(host).call(
            Checkpoints(folder), deadline_s=LIST_S, done=lambda reply: post(lambda: take(host.name, reply))
        )

    if not waiting:
        done(found)
        return
    for host in hosts:
        ask(host)


def choose(job: Job, hosts: Sequence[str], listings: Listings) -> ResumePoint | OnlyCopy | None:
    """Return what the attempt resumes from; None: unknown, since a host did not list its checkpoints."""
    if not set(hosts) <= set(listings):
        return None
    ran = [one for one in job.past if one.started_at_s is not None]
    known = [one.resumed_step for one in ran if one.resumed_step]
    return checkpoints.choose(
        listings,
        hosts,
        skip=set_aside(job.past),
        absent=[host for host in ran[-1].hosts if host not in (*hosts, *job.lost_hosts)] if ran else (),
        known_step=known[-1] if known else 0,
    )
