"""The hosts that have the files of the stages before a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Callable

from ascendrun.core.jobs.job import Job, StageFiles


def bound_hosts(job: Job, find: Callable[[str], Job | None]) -> Iterator[str]:
    """Yield the hosts that have files of the job: of the stages before it, the newest first."""
    seen: set[str] = set()
    source = job.request.same_as
    while source is not None:
        before = find(source)
        if before is None:
            return
        for host in before.hosts:
            if host not in seen and host in job.pool:
                seen.add(host)
                yield host
        source = before.request.same_as


def replaced_files(
    job: Job, lost: Set[str], hosts: Sequence[str], find: Callable[[str], Job | None]
) -> Mapping[str, StageFiles]:
    """Return, for each host that takes the place of a host that a user gave up, the files that a stage requires."""
    files: dict[str, StageFiles] = {}
    source = job.needs
    while source is not None and (before := find(source)) is not None:
        for node in before.nodes:
            if node.host in job.pool and node.machine_key is not None:
                files[node.host] = StageFiles(node.host, node.machine_key, before.stage)
        source = before.needs
    required = list(files)[: job.request.nodes]
    gone = [files[host] for host in required if host in lost]
    return dict(zip([host for host in hosts if host not in required], gone))
