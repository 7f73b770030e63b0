"""A short night: trainings that nobody helps train on through faults to the numbers of an undisturbed run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.crashes.night import KINDS, LANES, draw, night


def test_a_night_follows_from_its_seed_and_has_every_kind_of_fault() -> None:
    plan = draw(7, 20)
    assert plan == draw(7, 20) != draw(8, 20)
    assert {fault.kind for fault in plan[: len(KINDS)]} == set(KINDS)
    assert {fault.lane for fault in plan} == set(range(len(LANES)))


@pytest.mark.thorough
@pytest.mark.timeout(0)
def test_jobs_that_nobody_helps_train_on_through_eight_faults(tmp_path: Path) -> None:
    """The command `python -m tests.crashes.night` goes on for two hours."""
    told: list[Mapping[str, Any]] = []
    night(tmp_path, 1, 1200, len(KINDS), told.append)
    assert {one["kind"] for one in told if one["what"] == "fault"} == set(KINDS)
    assert {one["state"] for one in told if one["what"] == "job"} == {"SUCCEEDED"}
