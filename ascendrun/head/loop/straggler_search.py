"""Search for stragglers of running jobs in a child process: what it reads takes memory that Python's allocator does not
give back, and time that the controller's loop needs.

`python -m ascendrun.head.loop.straggler_search STATE_DIR` reads the pickled jobs from its input, and writes the
stragglers of each and its CPU seconds.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from contextlib import suppress
from pathlib import Path

from ascendrun.core.errors import AscendrunError
from ascendrun.core.jobs.job import Job
from ascendrun.core.samples import Newest
from ascendrun.head.spool.clocks import HostClock, read_clocks
from ascendrun.head.spool.metrics_reader import find_metrics, iter_lines
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.health.samples.step_times import make_step_times
from ascendrun.health.stragglers.detect import Straggler, find_stragglers
from ascendrun.node.files import write_all

SAMPLES_S = 600.0
READ_BYTES = 16 * 1024 * 1024
"""Bytes that one search reads of the metrics of all ranks together;"""
LEAST_BYTES, MOST_BYTES = 8 * 1024, 64 * 1024
"""and of one rank: enough for some windows of steps."""
FEW_DEVICES = 256
"""Above this number of ranks the 1-minute means of devices are read."""


def read_stragglers(state_dir: Path, job: Job, *, now_s: float) -> tuple[Straggler, ...]:
    """Return stragglers of the current attempt, from data on this machine. Unreadable samples count as none."""
    hosts_of_ranks = {rank: node.host for node in job.nodes for rank in node.ranks}
    attempt_dir = spool_dir(state_dir, job.id, job.attempt)
    files = find_metrics(attempt_dir, ranks=hosts_of_ranks)
    last_bytes = min(MOST_BYTES, max(LEAST_BYTES, READ_BYTES // max(1, len(files))))
    clocks = read_clocks(attempt_dir)
    steps = {}
    for rank, paths in files.items():
        clock = clocks.get(hosts_of_ranks[rank], HostClock())
        lines = iter_lines(paths, last_bytes=last_bytes)
        steps[rank] = make_step_times(lines, to_head_s=clock.to_head_s, error_s=clock.error_s)
    samples = _read_samples(
        state_dir, job.id, frozenset(job.hosts), now_s=now_s, few=len(hosts_of_ranks) <= FEW_DEVICES
    )
    found: list[Straggler] = []
    for role in dict.fromkeys(node.role for node in job.nodes):  # those of others do other work
        own = {rank: node.host for node in job.nodes if node.role == role for rank in node.ranks}
        own_steps = {rank: times for rank, times in steps.items() if rank in own}
        found += find_stragglers(own_steps, samples, hosts_of_ranks=own, now_s=now_s)
    return tuple(found)


def _read_samples(state_dir: Path, job_id: str, hosts: frozenset[str], *, now_s: float, few: bool) -> Newest:
    try:
        with SampleStore.open_for_reading(state_dir) as store:
            window = {"since_s": now_s - SAMPLES_S, "until_s": now_s + 1.0, "every_s": 0.0 if few else 60.0}
            return Newest(
                store.device_series(host=hosts, **window),
                store.host_series(host=hosts, **window),
                store.rank_series(job=job_id, **window),
            )
    except AscendrunError:
        return Newest()


def main() -> None:
    os.nice(10)
    state_dir, jobs = Path(sys.argv[1]), pickle.load(sys.stdin.buffer)
    found = {job.id: read_stragglers(state_dir, job, now_s=time.time()) for job in jobs}
    with suppress(BrokenPipeError):  # the controller has ended meanwhile
        write_all(sys.stdout.fileno(), pickle.dumps((found, time.process_time())))


if __name__ == "__main__":
    main()
