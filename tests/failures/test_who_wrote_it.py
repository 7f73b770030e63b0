"""The rank that wrote a report in the output of a launcher's process, where no prefix names it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder

from ascendrun.health.diagnosis import Confidence, Diagnosis, diagnose, render

FRAMES = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in <module>\n    fit()\n'


def explain(err: str, **row: object) -> Diagnosis:
    groups = [{"ranks": 0, "at": 60, "err": err, "exit": 1}]
    made = {"ranks": 1, "world": 8, "launcher": "torchrun", "family": "npu", "groups": groups, "steps": 0, **row}
    return diagnose(Builder(made, seed="wrote").evidence())


def reported(rank: int) -> str:
    return f"[ERROR] 2026-11-20-10:00:00 (PID:40070, Device:{rank}, RankID:{rank}) ERR00100 PTA call acl api failed"


def test_the_suffix_of_torch_npu_names_the_rank() -> None:
    failed = f"{FRAMES}RuntimeError: call failed, error code is 207001\n"
    assert explain(failed + reported(5)).ranks == (5,)
    assert explain(failed + reported(5)).code == explain(failed).code == "ACL-207001"
    assert explain(f"{failed}{reported(5)}\n{reported(3)}").ranks == (0,), "of two ranks neither is known"
    assert explain(failed + reported(5).replace("RankID:5", "RankID:-1")).ranks == (0,)


def test_a_watchdog_line_that_is_broken_in_two_is_a_wait_of_its_rank() -> None:
    found = explain("[rank3] Watchdog caught collective operation timeout:\nWorkNCCL(SeqNum=7, OpType=ALLGATHER)")
    assert found.domain == "silent" and found.code != "exit-code"


@pytest.mark.parametrize(
    "err",
    [
        "2026-11-20 10:00:00 ERROR serve.py:18 | ValueError: no such layout: [8, 12)",
        "  RuntimeError: no such layout: [8, 12)",
        "    ".join(f"{FRAMES}RuntimeError: no such layout: [8, 12)".splitlines(keepends=True)),
    ],
    ids=["logged", "indented", "all but its head indented"],
)
def test_the_last_output_is_an_exception_also_without_a_whole_traceback(err: str) -> None:
    found = explain(err)
    assert found.code == "exception" and "no such layout" in str(found.values["message"])


def test_a_package_of_npus_on_a_gpu_host_is_not_to_be_installed() -> None:
    err = f"{FRAMES}ModuleNotFoundError: No module named 'vllm_ascend'"
    hints = {family: render(explain(err, family=family), "en").hint for family in ("cuda", "npu")}
    assert "on GPUs remove" in hints["cuda"] and "on NPUs install" not in hints["cuda"]
    assert "on NPUs install" in hints["npu"]


def test_an_internal_name_that_an_object_lacks_is_of_the_versions() -> None:
    """A package used what another one has renamed; of the program's own classes it is the program's."""
    frames = '  File "/opt/site-packages/trl/models/utils.py", line 148, in add_hooks\n    hook()\n'
    last = "AttributeError: 'Engine' object has no attribute '_register_hooks'"
    assert explain(f"{FRAMES}{frames}{last}").domain == "environment"
    assert explain(f"{FRAMES}{last}").domain == "program"
    assert explain(f"{FRAMES}{last}").confidence is not Confidence.CERTAIN
