"""Hosts as the API has them, over a store without a controller."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ascendrun.cluster import Cluster
from ascendrun.core.jobs.job import State
from ascendrun.head.state.store import Store
from tests.unit.head.state.test_job_files import submission, submit


def test_the_hosts_of_ended_jobs_are_known(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        [job_id] = submit(store, submission("demo"))
        job = store.jobs.find(job_id).job
        store.jobs.save(replace(job, state=State.SUCCEEDED, hosts=("n1",), ended_at_s=8.0), [], now_s=8.0)
        store.jobs.mark_drained(job_id)
    assert [machine.names for machine in Cluster(state_dir=tmp_path).hosts.machines()] == [("n1",)]
