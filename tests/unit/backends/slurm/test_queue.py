"""What Slurm answers: the state table, the forms of its releases, and what is asked of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ascendrun.backends.slurm import queue
from ascendrun.core.allocations import AllocationRequest, EngineError, Gone, Granted, Waiting

KEY = "h-j-0001.1"
DOWN = '{"jobs": [], "errors": [{"description": "Failed while loading jobs", "error_number": 1811}]}'
"""What `squeue --json` prints while slurmctld is down, with the exit code 0."""


def job(state: Any, number: int = 7, **more: Any) -> dict[str, Any]:
    row = {"job_id": number, "comment": f"ascendrun:{KEY}", "job_state": state, "state_reason": "None", "nodes": ""}
    return {**row, **more}


def state_of(*rows: dict[str, Any]) -> Any:
    return queue.states_of(queue.read_jobs(json.dumps({"jobs": rows})), [KEY]).get(KEY)


@pytest.mark.parametrize("reason", ["Resources", "Priority", "Dependency", "BeginTime", "None"])
def test_a_pending_job_waits_with_the_reason_of_slurm(reason: str) -> None:
    state = state_of(job("PENDING", state_reason=reason, start_time=1795517488))
    assert isinstance(state, Waiting) and state.will_start
    assert state.reason.values == {"job": "7", "state": reason, "at_s": 1795517488.0}


@pytest.mark.parametrize("name", ["CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"])
def test_a_job_whose_nodes_are_made_ready_or_that_is_queued_again_grants_nothing_yet(name: str) -> None:
    for state in (state_of(job(name)), state_of(job([name]))):
        assert isinstance(state, Waiting) and state.will_start and state.reason.values["state"] == "None"


@pytest.mark.parametrize(
    "reason",
    ["PartitionConfig", "PartitionNodeLimit", "ReqNodeNotAvail, UnavailableNodes:n1", "AssocGrpCpuLimit"]
    + ["QOSMaxJobsPerUserLimit", "DependencyNotSatisfied", "BadConstraints"],
)
def test_a_job_that_only_a_change_lets_start_says_so(reason: str) -> None:
    state = state_of(job("PENDING", state_reason=reason))
    assert isinstance(state, Waiting) and not state.will_start and state.reason.code == "slurm-never"


@pytest.mark.parametrize(
    ("name", "cause"),
    [("CANCELLED", "cancelled"), ("TIMEOUT", "time-limit"), ("DEADLINE", "time-limit"), ("NODE_FAIL", "node-failed")]
    + [("BOOT_FAIL", "node-failed"), ("PREEMPTED", "preempted"), ("OUT_OF_MEMORY", "failed"), ("FAILED", "failed")]
    + [("REVOKED", "preempted")],
)
def test_each_end_has_its_cause(name: str, cause: str) -> None:
    for state in (state_of(job(name)), state_of(job([name]))):
        assert isinstance(state, Gone) and state.cause == cause and state.reason.values["state"] == name


RECORDED = json.loads((Path(__file__).parents[3] / "recordings/slurm/squeue-22.05.8.json").read_text())
"""Rows of `squeue --states=all --json` of the virtual cluster, by what happened: the fields that are read."""
NEVER, OVER = (Waiting, "slurm-never"), (Gone, "slurm-ended")


@pytest.mark.parametrize(
    ("name", "kind", "code", "cause"),
    [
        ("PENDING", *NEVER, None),
        ("PENDING Resources", Waiting, "slurm-expected", None),
        ("RUNNING", Granted, None, None),
    ]
    + [
        ("COMPLETING", Waiting, "slurm-ended", None),
        ("PREEMPTED", *OVER, "preempted"),
        ("TIMEOUT", *OVER, "time-limit"),
    ]
    + [(name, *OVER, "cancelled") for name in ("CANCELLED", "CANCELLED PENDING")]
    + [("NODE_FAIL", *OVER, "node-failed"), ("FAILED", *OVER, "failed"), ("COMPLETED", *OVER, "failed")],
)
def test_each_state_that_a_real_slurm_has_printed(name: str, kind: type, code: str | None, cause: str | None) -> None:
    row = RECORDED[name]
    (key,) = {row["comment"][len(queue.COMMENT) :]}
    state = queue.states_of(queue.read_jobs(json.dumps({"jobs": [row]})), [key])[key]
    assert isinstance(state, kind)
    assert code is None or state.reason.code == code
    assert cause is None or state.cause == cause
    if kind is Granted:
        assert [(host.name, host.devices) for host in state.hosts] == [("node1", (0, 1)), ("node2", (0, 1))]


def test_a_running_job_has_its_hosts_with_their_devices() -> None:
    gres = ["npu:910b:2(IDX:0-1)", "npu:910b:3(IDX:2,5-6)", "npu:910b:1(IDX:7)"]
    state = state_of(
        job("RUNNING", nodes="a[01-02],b7", gres_detail=gres, start_time=2, end_time={"set": True, "number": 9})
    )
    assert isinstance(state, Granted) and (state.ends_at_s, state.length_s) == (9.0, 7.0)
    assert [(h.name, h.devices, h.allocation) for h in state.hosts] == [
        ("a01", (0, 1), "7"),
        ("a02", (2, 5, 6), "7"),
        ("b7", (7,), "7"),
    ]


def test_devices_are_unknown_where_slurm_does_not_tell_and_a_time_without_limit_is_none() -> None:
    state = state_of(job("RUNNING", nodes="a1", end_time={"set": True, "infinite": True, "number": 0}))
    assert state.hosts[0].devices is None and state.ends_at_s is None
    for state in ("COMPLETING", ["CANCELLED", "COMPLETING"]):
        assert isinstance(state_of(job(state, nodes="a1")), Waiting), "it is not gone yet, and grants nothing"


def test_of_two_jobs_with_one_key_the_older_live_one_counts_and_the_other_is_doubled() -> None:
    rows = [job("CANCELLED", 5), job("PENDING", 9), job("RUNNING", 8, nodes="a1"), job("RUNNING", 6, comment="other")]
    assert state_of(*rows).hosts[0].allocation == "8"
    assert queue.doubled(queue.read_jobs(json.dumps({"jobs": rows})), [KEY]) == ["9"]
    assert state_of() is None


@pytest.mark.parametrize("text", ["", "no json", "{}", '{"jobs": [{"comment": "ascendrun:x"}]}', '{"jobs": 3}', DOWN])
def test_an_unreadable_answer_is_no_answer(text: str) -> None:
    with pytest.raises(EngineError) as caught:
        queue.read_jobs(text)
    assert not caught.value.is_final


def test_the_options_of_sbatch_are_those_of_the_engine() -> None:
    options = {"type": "slurm", "partition": "npu", "exclude": "a1", "gres": "npu:910b", "options": ["--mem=0"]}
    argv = queue.sbatch_options(AllocationRequest(KEY, "n", options, 2, 4, 30.0, exclude=("a2",)), exported="HOME")
    assert {"--nodes=2", "--partition=npu", "--exclude=a1,a2", "--gres=npu:910b:4", "--mem=0"} <= set(argv)
    assert {f"--comment=ascendrun:{KEY}", "--signal=B:USR1@45", "--no-requeue", "--export=HOME"} <= set(argv)
    assert not any(
        one.startswith("--gres")
        for one in queue.sbatch_options(AllocationRequest(KEY, "n", options, 2, 0, 30.0), exported="HOME")
    )


@pytest.mark.parametrize(
    ("words", "is_final"),
    [("sbatch: error: Batch job submission failed: Invalid partition name specified", True)]
    + [("sbatch: error: Batch job submission failed: Requested node configuration is not available", True)]
    + [("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", False)],
)
def test_a_refusal_is_told_from_a_slurm_that_does_not_answer(words: str, is_final: bool) -> None:
    assert queue.is_refusal("sbatch", words) is is_final


def test_a_job_that_the_queue_has_forgotten_ended_as_its_accounting_tells() -> None:
    text = "7|CANCELLED by 1000\n8|RUNNING\n9|NODE_FAIL\n10|OUT_OF_MEMORY\n7.batch|CANCELLED\nsacct: no|such|row\n"
    found = queue.ends_of(text, {"7": "a", "8": "b", "9": "c", "10": "d"})
    causes = {key: (gone.cause, gone.reason.why) for key, gone in found.items()}
    assert causes == {
        "a": ("cancelled", "CANCELLED by 1000"),
        "c": ("node-failed", "NODE_FAIL"),
        "d": ("failed", "OUT_OF_MEMORY"),
    }
