"""Diagnoses of what ranks print before they fail, as `explain` renders them."""

from __future__ import annotations

from typing import Any

from ascendrun.health.diagnosis import Diagnosis, Evidence, HostEvidence, Line, RankEvidence, diagnose, render

FRAMES = 'Traceback (most recent call last):\n  File "/job/train.py", line 12, in <module>\n    run()\n'
PACKAGES = "/opt/py/lib/python3.11/site-packages"


def explain(output: str, accelerator: str = "npu", **facts: Any) -> Diagnosis:
    """The diagnosis of two ranks of one host that both print this and fail, in English."""
    lines = tuple(Line(text, "out", number) for number, text in enumerate(output.splitlines()))
    ranks = tuple(RankEvidence(rank, "a", device=rank, code=1, exited_at_s=60.0, lines=lines) for rank in (0, 1))
    hosts = (HostEvidence("a", facts=facts),)
    given = Evidence("j", "FAILED", cause="failure", world_size=2, ranks=ranks, hosts=hosts, device_type=accelerator)
    return render(diagnose(given), "en")


def frame(package: str, function: str = "call") -> str:
    """A frame of a traceback in an installed package."""
    return f'  File "{PACKAGES}/{package}/core.py", line 7, in {function}\n    value = given.part\n'
