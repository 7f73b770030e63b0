"""What is observed of a host near the end is the reason of ends there that have no clear one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder

from ascendrun.health.diagnosis import Confidence, Diagnosis, diagnose

LINK_DOWN = "[50122.9] hns3 0000:7d:00.3 eth3: link down"
SILENT = {"ranks": "2-3", "at": 90, "exit": 1}
FRAMES = 'Traceback (most recent call last):\n  File "a.py", line 1\n'
CLEAR = {"ranks": 2, "at": 90, "exit": 1, "err": FRAMES + "KeyError: 17"}


def explain(first: dict[str, Any], **host: Any) -> Diagnosis:
    """The diagnosis of a job of two hosts, in which these ranks of the second one fail, and the others are stopped."""
    rest = {"ranks": "rest", "at": 91, "err": "sigterm", "exit": -15, "stopped": True}
    row = {"ranks": 4, "per_host": 2, "family": "npu", "groups": [first, rest], "hosts": {"npu02": host}}
    return diagnose(Builder(row, seed="hosts").evidence())


def test_a_kernel_line_without_a_device_is_of_the_device_in_alarm():
    found = explain(SILENT, devices={1: "its port is down"}, dmesg=[LINK_DOWN])
    assert (found.code, found.ranks) == ("nic-link-down", (3,))
    assert {proof.line for proof in found.evidence} >= {LINK_DOWN, "device.problem"}


@pytest.mark.parametrize(("first", "code"), [(SILENT, "disk-full"), (CLEAR, "exception")])
def test_a_supervisor_that_could_not_write_explains_only_an_unclear_end(first, code):
    found = explain(first, trouble=[{"step": "spool", "errno": "ENOSPC", "at": 88}])
    assert (found.code, found.hosts) == (code, ("npu02",))
    assert (found.confidence is Confidence.CERTAIN) == (code == "exception")
