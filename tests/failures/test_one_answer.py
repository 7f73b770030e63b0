"""What the view of a job names as the first failure is what `explain` names."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import case_files, case_of, load, one_of
from spooling import make_job, spool_case

from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.jobs.endings import Diagnosed
from ascendrun.core.jobs.job import Cause, State
from ascendrun.core.jobs.lifecycle import advance
from ascendrun.core.jobs.outcome import first_failure
from ascendrun.core.jobs.reasons import FirstFailure
from ascendrun.core.jobs.restart import Failure, Kind, RestartPolicy
from ascendrun.core.settings import Settings
from ascendrun.head.state.job_table import StoredJob
from ascendrun.head.state.store import Store
from ascendrun.health.failures import failure_of, first_of
from ascendrun.query.explain import explain_job, judge
from ascendrun.query.views import make_job_detail, make_job_view

FAILED = [path for path in case_files() if "\nstate:" not in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", FAILED, ids=lambda path: path.stem)
def test_the_view_of_a_failed_job_names_the_ranks_and_hosts_of_its_diagnosis(path: Path, tmp_path: Path) -> None:
    case, found = case_of(path)
    evidence = case.evidence
    job = make_job(evidence, "j-0001", "head")
    quick = first_failure(job.nodes, {}, forks=False)
    job = replace(job, first_failure=None if quick is None else FirstFailure(quick))
    event = Diagnosed(1, failure_of(found, evidence), None, first_of(found, evidence))
    job = advance(job, event, now_s=0.0).job
    stored = StoredJob(job, "key", {}, [], [], None)
    detail = make_job_detail(stored, make_job_view(stored, None), (), None, Settings(state_dir=tmp_path))
    assert detail.first_failure is not None
    assert (detail.first_failure.ranks, detail.first_failure.hosts) == (found.ranks, found.hosts)
    assert detail.job.confidence == found.confidence.value


@pytest.mark.parametrize("path", one_of(40, FAILED), ids=lambda path: path.stem)
def test_the_answer_of_the_child_process_is_that_of_explain(path: Path, tmp_path: Path) -> None:
    case = load(path)
    job_id = spool_case(case, tmp_path)
    answer = judge(tmp_path, job_id, 1, now_s=case.evidence.now_s)
    first = load_dataclass(FirstFailure, answer["first"])
    with Store.open_for_reading(tmp_path) as store:
        job = replace(store.jobs.find(job_id).job, state=State.FAILED, cause=Cause.FAILURE)
    job = advance(job, Diagnosed(1, load_dataclass(Failure, answer["failure"]), None, first), now_s=0.0).job
    found = explain_job(tmp_path, job_id, now_s=case.evidence.now_s).diagnosis
    assert job.first_failure is not None
    assert (job.first_failure.reason.ranks, job.first_failure.reason.hosts) == (found.ranks, found.hosts)
    assert job.first_failure.confidence == found.confidence.value


def test_a_refusal_of_the_ranks_is_the_users_and_is_not_tried_again() -> None:
    """It was `unknown`: three restarts, and then checkpoints were set aside that nothing was wrong with."""
    (path,) = [path for path in case_files() if path.stem == "all_ranks_refuse_the_checkpoints_of_another_training"]
    case, diagnosis = case_of(path)
    found = failure_of(diagnosis, case.evidence)
    assert (found.kind, found.retry) == (Kind.USER, "never")
    assert Kind.USER not in RestartPolicy().causes
