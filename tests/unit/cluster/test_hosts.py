"""Hosts and submissions as the API has them, without a controller."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ascendrun.cluster import Cluster
from ascendrun.cluster.jobs import warnings_of
from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import JobSpec, Restart
from ascendrun.core.jobs.job import State
from ascendrun.head.state.store import Store
from ascendrun.head.survey.submission import Submission
from tests.unit.head.state.test_job_files import submission, submit


def test_the_hosts_of_ended_jobs_are_known(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        [job_id] = submit(store, submission("demo"))
        job = store.jobs.find(job_id).job
        store.jobs.save(replace(job, state=State.SUCCEEDED, hosts=("n1",), ended_at_s=8.0), [], now_s=8.0)
        store.jobs.mark_drained(job_id)
    assert [machine.names for machine in Cluster(state_dir=tmp_path).hosts.machines()] == [("n1",)]


def test_a_submission_warns_of_credentials_and_of_restarts_that_may_not_come(tmp_path: Path) -> None:
    def keys(**more: Any) -> list[str]:
        spec = JobSpec(name="demo", command=("true",), **more)
        return [
            one.key for one in warnings_of([Submission("k", spec, (Host("n1"),), (), None).values["spec"]], tmp_path)
        ]

    assert keys(env={"HCCL_CONNECT_TIMEOUT": "1200"}) == []
    assert keys(env={"HF_TOKEN": "x", "A": "1"}, restart=Restart(max_restarts=3)) == [
        "submit.secret-env",
        "submit.no-entry",
    ]
