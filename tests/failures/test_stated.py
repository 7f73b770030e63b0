"""What the last lines of a rank state, and what they only point at, advise or describe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder

from ascendrun.health.diagnosis import Confidence, Diagnosis, diagnose, render

ARGUMENT = "EE1001: [PID: 4001] 2026-11-26-10:00:00.123.117 The argument is invalid. Reason: invalid device id 9\n"
LOGGED = "(Worker_TP1 pid=5) ERROR 06-17 09:12:44 [multiproc_executor.py:622]"
PARTS = {
    "frame": f'{LOGGED}   File "/vllm/worker/errors.py", line 3, in fail\n{LOGGED}     raise Failed(error)\n',
    "marks": f'{LOGGED}   File "/vllm/worker/errors.py", line 3, in fail\n{LOGGED}            ^^^^^^^^^^\n',
    "pointer": "RuntimeError: Invocation failed\n",
}
CLOSED = (
    "[rank0]:[E1126 10:00:00.123 ProcessGroupHCCL.cpp:444] [PG 0 Rank 0] Exception (either an error or timeout) "
    "detected by watchdog at work: WorkHCCL(SeqNum=118, OpType=ALLREDUCE, Timeout(ms)=600000)\n"
    "[rank0]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[10.0.0.2]:33712\n"
)


def explain(*groups: dict[str, Any], **row: Any) -> Diagnosis:
    made = {"ranks": 1, "family": "npu", "steps": 4, "groups": groups, **row}
    return diagnose(Builder(made, seed="stated").evidence())


def failed(err: str, ranks: object = 0, at: float = 60.0) -> dict[str, Any]:
    return {"ranks": ranks, "at": at, "err": err, "exit": 1}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_part_of_a_traceback_is_less_than_a_coded_report_of_an_earlier_rank(part: str) -> None:
    found = explain(failed(ARGUMENT), failed(part, 1, 62.0), ranks=2, per_host=1)
    assert (found.code, found.ranks) == ("EE1001", (0,))


def test_marks_below_a_line_of_code_are_not_the_last_error() -> None:
    assert explain(failed(PARTS["marks"])).code == "exit-code"


@pytest.mark.parametrize(
    "block",
    [
        "[ERROR] device exception, error class: AICORE, chip id: 0, device id: 3\n[ERROR]   status: 0x80000010\n",
        "chip_id=0 device_id=3 err_class=0x80e01801\n  status_reg[0]=0x10 status_reg[1]=0x0\n  aicore exception\n",
        "hbm multi-bit error on channel 4, device id: 3, error class: memory\n",
    ],
)
def test_a_block_about_a_device_without_a_code_is_of_the_device(block: str) -> None:
    found = explain(failed(block))
    assert (found.domain, found.confidence) == ("device", Confidence.LIKELY)


@pytest.mark.parametrize("err", ["", "loading the weights\n"])
def test_an_exit_code_alone_gives_no_domain_that_is_likely(err: str) -> None:
    assert explain(failed(err)).reason_grade is Confidence.UNKNOWN
    assert explain(failed("[ERROR] stage 2 has 11 layers, of 48\n")).reason_grade is Confidence.LIKELY


def test_the_limit_of_a_work_that_a_peer_closed_did_not_end_it() -> None:
    stopped = {"ranks": 1, "at": 61, "exit": -15, "stopped": True}
    found = explain(failed(CLOSED), failed(CLOSED, "2-3"), stopped, ranks=4, per_host=1)
    assert (found.code, found.ranks) == ("peer-closed", (1,))
    assert "ended or closed" in render(found, "en").message and "logs" in render(found, "en").hint
    assert "LIMITED" not in found.given and "ping" not in render(found, "en").hint


ADVICE = (
    "        Solution: 1. Check whether the node is healthy. 2. Check the network connectivity between the nodes.\n"
    "RuntimeError: HCCL function error: HcclCommInitRootInfo, error code is {}. Check whether the node is healthy.\n"
)


@pytest.mark.parametrize(
    "line",
    [
        "EI0001: [PID: 4001] 2026-11-26-10:00:00.123.117 Environment variable [HCCL_BUFFSIZE] value [9MB] is invalid.",
        "E39999: [PID: 4001] 2026-11-26-10:00:00.123.117 Environment variable [HCCL_BUFFSIZE] value [9MB] is invalid.",
        "[ERROR] HCCL(4001,python):2026-11-26-10:00:00.123.117 [env.cc:22] [Parse]HCCL_IF_IP[10.0.0.300] is invalid",
    ],
)
def test_a_refused_variable_is_a_setting_and_no_fault_of_its_node(line: str) -> None:
    stopped = {"ranks": "0-3", "at": 63, "exit": -15, "stopped": True}
    found = explain(failed(f"{line}\n{ADVICE.format(1)}", "4-7"), stopped, ranks=8, per_host=4)
    assert (found.code, found.ranks, found.retry) == ("EI0001", (4, 5, 6, 7), "never")


def test_a_link_that_is_down_outranks_the_wait_of_its_report() -> None:
    line = (
        "EI0006: [PID: 4001] 2026-11-26-10:00:00.123.117 Getting socket times out. Reason: the link of device 3 is down"
    )
    found = explain(failed(f"{line}\n{ADVICE.format(9)}"), ranks=1, world=8, launcher="torchrun")
    assert (found.code, found.domain, found.ranks) == ("EJ0002", "network", (0,))


FRAME = 'Traceback (most recent call last):\n  File "/job/train.py", line 21, in main\n    run(config)\n'
MUTE, NO_EXCEPTION, TORN = "the rank left no error output", "no exception is at the end", "part of a traceback"


@pytest.mark.parametrize(
    ("end", "message", "cause", "caveat"),
    [
        ({}, "failed first with exit code 1 and left no error output", "without error output", MUTE),
        ({"err": "Value error, 9 is less than 32\n"}, "last output: Value error, 9 is", "no exception", NO_EXCEPTION),
        ({"err": FRAME}, "failed first with exit code 1", "the exception of its traceback is not in the log", TORN),
        ({"exit": -7}, "crashed first, with SIGBUS, and left no error output", "truncated", MUTE),
        ({"exit": -7, "err": "bad page\n"}, "last output: bad page", "truncated", "another meaning"),
    ],
)
def test_output_that_is_there_is_not_called_absent(end: dict[str, Any], message: str, cause: str, caveat: str) -> None:
    found = render(explain({"ranks": 0, "at": 60.0, "exit": 1, **end}, steps=0))
    assert message in found.message and cause in found.cause
    assert [str(one) for one in found.caveats if caveat in str(one)]
    assert sum(known in str(one) for one in found.caveats for known in (MUTE, NO_EXCEPTION, TORN)) <= 1


def test_the_end_of_another_rank_has_the_same_text_with_and_without_output() -> None:
    ends = render(explain(failed(""), failed("bad page\n", 1), ranks=2, steps=0))
    assert "last output: bad page" in ends.message and ends.ranks == (0, 1)
    found = render(explain(failed("", 0), failed("printed\n", 1), failed("TypeError: no\n", 2), ranks=3, steps=0))
    assert "without output" not in " ".join(link.message for link in (*found.chain, *found.alternatives))


SLURM = "slurmstepd-n7: error: Detected 1 oom-kill event(s) in StepId=9.0. Some of your processes were killed.\n"
RAY = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"


@pytest.mark.parametrize("line", [SLURM, RAY, "slurmstepd: error: Exceeded job memory limit\n"])
def test_a_scheduler_that_reports_memory_explains_sigkill(line: str) -> None:
    killed = {"ranks": 2, "at": 60.0, "exit": -9, "err": f"loading shard 7\n{line}"}
    found = render(explain(killed, {"ranks": "rest", "at": 61.0, "exit": -15, "stopped": True}, ranks=4))
    assert (found.code, found.domain, found.ranks) == ("host-oom", "host-memory", (2,))
    assert (found.confidence, found.reason_grade) == (Confidence.CERTAIN, Confidence.CERTAIN)
    assert line.strip()[:60] in found.message and "kernel" not in found.message


@pytest.mark.parametrize(
    "end", [{"exit": 1}, {"err": f"2 retries remain: {RAY}"}, {"err": "monitors memory\n"}, {"stopped": True}]
)
def test_a_report_of_memory_explains_nothing_that_it_did_not_end(end: dict[str, Any]) -> None:
    found = explain({"ranks": 2, "at": 60.0, "exit": -9, "err": SLURM, **end}, ranks=4)
    assert found.code != "host-oom" and found.reason_grade is not Confidence.CERTAIN
