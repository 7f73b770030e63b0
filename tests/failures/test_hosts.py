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


TROUBLE = {"trouble": [{"step": "spool", "errno": "ENOSPC", "at": 88}]}


@pytest.mark.parametrize("host", [TROUBLE, {"disk_free": 4096}], ids=["could not write", "has no space"])
@pytest.mark.parametrize(("first", "code"), [(SILENT, "disk-full"), (CLEAR, "exception")])
def test_a_full_disk_of_the_host_explains_only_an_unclear_end(first, code, host):
    found = explain(first, **host)
    assert (found.code, found.hosts) == (code, ("npu02",))
    assert (found.confidence is Confidence.CERTAIN) == (code == "exception")


def test_a_full_disk_kills_nobody():
    assert explain({"ranks": 2, "at": 90, "exit": -9}, disk_free=4096).code == "killed"


def test_a_rank_without_output_for_a_quarter_of_an_hour_was_stuck_before_it_timed_out_too():
    waits = {"err": FRAMES + "RuntimeError: timed out waiting for the other ranks", "exit": 1}
    groups = [{"ranks": 3, "at": 2000, "until": 100, **waits}, {"ranks": "rest", "at": 2001, "until": 1999, **waits}]
    found = diagnose(Builder({"ranks": 4, "per_host": 2, "groups": groups}, seed="hosts").evidence())
    assert (found.code, found.ranks) == ("rank-unresponsive", (3,)), found.rules
