"""A short night: trainings without help train on through faults to the numbers of an undisturbed run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.crashes import elastic, night
from tests.crashes.campaign import campaign


def test_a_night_follows_from_its_seed_and_has_every_kind_of_fault() -> None:
    plan = night.draw(7, 20)
    assert plan == night.draw(7, 20) != night.draw(8, 20)
    assert {fault.kind for fault in plan[: len(night.KINDS)]} == set(night.KINDS)
    assert {fault.lane for fault in plan} == set(range(len(night.LANES)))


def test_an_elastic_night_follows_from_its_seed_and_has_every_kind_at_every_moment() -> None:
    plan = elastic.draw(7, 20)
    assert plan == elastic.draw(7, 20) != elastic.draw(8, 20)
    assert {(one.kind, one.moment) for one in plan} == {(k, m) for k in elastic.KINDS for m in elastic.MOMENTS}
    assert {len(one.places) for one in plan} == {1, 2}
    assert all(len(set(one.places)) == len(one.places) for one in plan)


@pytest.mark.thorough
@pytest.mark.timeout(0)
def test_hosts_come_and_go_six_times_and_each_training_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    told: list[Mapping[str, Any]] = []
    campaign(tmp_path, lambda hosts: elastic.Elastic(hosts, told.append, elastic.draw(1, 6), elastic.TRAININGS[:1]))
    assert len([one for one in told if one["what"] == "fault"]) == 6
    assert {one["state"] for one in told if one["what"] == "job"} == {"SUCCEEDED"}


@pytest.mark.thorough
@pytest.mark.timeout(0)
def test_jobs_without_help_train_on_through_eight_faults(tmp_path: Path) -> None:
    """The command `python -m tests.crashes.night` continues for two hours."""
    told: list[Mapping[str, Any]] = []
    campaign(tmp_path, lambda hosts: night.Night(hosts, told.append, night.draw(1, len(night.KINDS)), 1200))
    assert {one["kind"] for one in told if one["what"] == "fault"} == set(night.KINDS)
    assert {one["state"] for one in told if one["what"] == "job"} == {"SUCCEEDED"}
