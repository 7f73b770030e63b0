"""A short night: trainings that nobody helps train on through faults to the numbers of an undisturbed run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.crashes import elastic
from tests.crashes.night import KINDS, LANES, draw, night


def test_a_night_follows_from_its_seed_and_has_every_kind_of_fault() -> None:
    plan = draw(7, 20)
    assert plan == draw(7, 20) != draw(8, 20)
    assert {fault.kind for fault in plan[: len(KINDS)]} == set(KINDS)
    assert {fault.lane for fault in plan} == set(range(len(LANES)))


def test_an_elastic_night_follows_from_its_seed_and_has_every_kind_at_every_moment() -> None:
    plan = elastic.draw(7, 20)
    assert plan == elastic.draw(7, 20) != elastic.draw(8, 20)
    assert {(one.kind, one.moment) for one in plan} == {(k, m) for k in elastic.KINDS for m in elastic.MOMENTS}
    assert {len(one.hosts) for one in plan} == {1, 2} and all(len(set(one.hosts)) == len(one.hosts) for one in plan)


@pytest.mark.thorough
@pytest.mark.timeout(0)
def test_hosts_come_and_go_six_times_and_each_training_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    told: list[Mapping[str, Any]] = []
    elastic.elastic(tmp_path, 1, elastic.draw(1, 6), told.append, elastic.TRAININGS[:1])
    assert len([one for one in told if one["what"] == "coming"]) == 6
    assert {one["state"] for one in told if one["what"] == "job"} == {"SUCCEEDED"}


@pytest.mark.thorough
@pytest.mark.timeout(0)
def test_jobs_that_nobody_helps_train_on_through_eight_faults(tmp_path: Path) -> None:
    """The command `python -m tests.crashes.night` goes on for two hours."""
    told: list[Mapping[str, Any]] = []
    night(tmp_path, 1, 1200, len(KINDS), told.append)
    assert {one["kind"] for one in told if one["what"] == "fault"} == set(KINDS)
    assert {one["state"] for one in told if one["what"] == "job"} == {"SUCCEEDED"}
