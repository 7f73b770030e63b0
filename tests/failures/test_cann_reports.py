"""Reports of CANN in the forms in which it prints them: their own sentence is quoted and gives the class."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder

from ascendrun.ascend.vocabularies import cann_detail
from ascendrun.health.diagnosis import Confidence, Diagnosis, diagnose, render

FRAMES = 'Traceback (most recent call last):\n  File "/job/fit.py", line 9, in <module>\n    fit()\n'
STAMP = "2026-06-17-09:12:44.123.456"
TRACE = "        TraceBack (most recent call last):\n"


def explain(err: str) -> Diagnosis:
    groups = [{"ranks": 0, "at": 60, "err": err, "exit": 1}, {"ranks": 1, "at": 60.5, "exit": -15, "stopped": True}]
    made = {"ranks": 2, "family": "npu", "groups": groups, "steps": 4}
    return diagnose(Builder(made, seed="cann").evidence())


@pytest.mark.parametrize(
    "report",
    [
        f"EZ9999: [PID: 812] {STAMP} No slot is left for the tasks of stream 7.",
        f"EZ9999: {STAMP} No slot is left for the tasks of stream 7.",
        f"[PID: 812] {STAMP} Internal_Error_Stream(EZ9999): No slot is left for the tasks of stream 7.",
        f"EZ9999: Inner Error!\nEZ9999: [PID: 812] {STAMP} launch failed\n{TRACE}"
        "        No slot is left for the tasks of stream 7.",
        f"EZ9999: [PID: 812] {STAMP} launch failed\n{TRACE}       launch failed again\n"
        "       No slot is left for the tasks of stream 7.[FUNC:Launch][FILE:stream.cc][LINE:9]",
    ],
    ids=["with the process", "without it", "with its name", "in its trace", "in its trace with the place"],
)
def test_the_sentence_of_a_report_is_quoted(report: str) -> None:
    found = explain(f"{FRAMES}RuntimeError: the launch failed\n{report}\n")
    assert "No slot is left for the tasks of stream 7" in render(found, "en").message
    assert cann_detail(report.splitlines()).rstrip(".") == "No slot is left for the tasks of stream 7"


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("The binary of op Rope is not found for this type", "environment"),
        ("The tiling data of the two cores was truncated", "data"),
        ("The shapes of x1 and x2 cannot be broadcast", "program"),
    ],
)
@pytest.mark.parametrize("code", ["EZ9999", "EZ1777", "E89999"])
def test_the_wording_of_a_report_of_a_family_gives_its_domain(code: str, text: str, domain: str) -> None:
    found = explain(f"{FRAMES}RuntimeError: the launch failed\n{code}: [PID: 812] {STAMP} {text}\n")
    assert found.domain == domain
    assert found.reason_grade is not Confidence.CERTAIN


def test_the_vendors_solution_comes_where_nothing_more_exact_is_known() -> None:
    solution = (
        "        Possible Cause: the package is of another chip\n        Solution: 1. Install the kernels of this chip."
    )
    plain = explain(f"{FRAMES}RuntimeError: failed\nEZ1777: [PID: 812] {STAMP} No kernel of op Rope.\n{solution}\n")
    assert render(plain, "en").hint.startswith("CANN advises: Install the kernels of this chip")
    assert "CANN 提示" in render(plain, "zh").hint
    exact = explain(f"{FRAMES}RuntimeError: failed\nEI0014: [PID: 812] {STAMP} Value 3 differs.\n{solution}\n")
    assert exact.code == "EI0014" and "CANN advises" not in render(exact, "en").hint
    wait = explain(f"{FRAMES}RuntimeError: failed\nEI0006: [PID: 812] {STAMP} Getting socket times out.\n{solution}\n")
    assert wait.domain == "silent" and "CANN advises" not in render(wait, "en").hint


def test_a_line_that_follows_no_trace_is_no_report() -> None:
    assert cann_detail(["        No slot is left for the tasks of stream 7."]) == ""
    assert cann_detail([TRACE.rstrip(), "step 7", "        No slot is left for the tasks."]) == ""
