"""history: device-hours of ended jobs, running time and lost nodes, from their changes of state."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.cli.job_columns import job_columns
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Cause, Job, Request, State
from ascendrun.core.jobs.restart import PastAttempt
from ascendrun.head.state.store import Store
from ascendrun.health.forecast import History
from ascendrun.query.history import read_losses
from ascendrun.query.views import make_job_view
from tests.lib.demo_jobs import store_job
from tests.lib.story_cluster import Desk

HOUR_S = 3600.0
NPU_8 = {"devices": {"type": "npu", "per_node": 8}}


def add(store: Store, name: str, spec: dict[str, Any], moves: list[tuple[float, str]], **changes: Any) -> Job:
    """Store a job with its changes of state (hours since 0, state); it was submitted at 0."""
    values = {"created_at_s": 0.0, "request": Request(2), "user": changes.get("user")}
    job = store_job(store, name, spec=spec, now_s=0.0, name=name, **values)
    for at_h, state in moves:
        job = replace(job, state=State(state))
        store.jobs.save(job, [Event("state-changed", {"state": state}, at_s=at_h * HOUR_S)], now_s=at_h * HOUR_S)
    ended_s = moves[-1][0] * HOUR_S if job.is_terminal else None
    job = replace(job, ended_at_s=ended_s, **changes)
    store.jobs.save(job, [], now_s=0.0)
    return job


@pytest.fixture
def history(desk: Desk) -> Desk:
    store = Store.open(desk.folder / "state")
    run = [(1.0, "CHECKING"), (1.5, "STARTING"), (2.0, "RUNNING")]
    add(store, "once", NPU_8, [*run, (4.0, "STOPPING"), (4.5, "SUCCEEDED")], user="ann")
    again = [(5.0, "BACKOFF"), (6.0, "QUEUED"), (7.0, "CHECKING"), (9.0, "FAILED")]
    past = (PastAttempt(1, ("a", "b"), 2 * HOUR_S, 5 * HOUR_S),)  # the second attempt has one host only
    add(store, "twice", NPU_8, [*run, *again], user="ann", hosts=("a",), pool=("a", "b"), attempt=2, past=past)
    add(store, "cpu", {"devices": {"type": "cpu", "per_node": 2}}, [*run, (3.0, "STOPPED")], user="bob", hosts=("a",))
    add(store, "unknown", {}, [*run, (3.0, "FAILED")])
    add(store, "never", NPU_8, [(8.0, "STOPPED")], user="bob", hosts=())
    add(store, "live", NPU_8, run, user="ann")
    store.close()
    return desk


def rows(desk: Desk, *argv: str) -> list[dict[str, Any]]:
    result = desk.say("history", *argv, "-o", "json")
    assert result.code == 0
    return list(next(value for name, value in json.loads(result.out).items() if name != "schema_version"))


def test_device_hours_are_devices_times_the_time_with_hosts_over_all_attempts(history: Desk) -> None:
    found = {row["name"]: (row["devices"], row["held_s"] / HOUR_S, row["device_hours"]) for row in rows(history)}
    assert found == {
        "once": (16, 3.5, 56.0),
        "twice": (8, 6.0, 4 * 16 + 2 * 8),
        "cpu": (2, 2.0, 4.0),
        "unknown": (None, 2.0, None),
        "never": (None, 0.0, 0.0),
    }
    assert [row["name"] for row in rows(history)][:2] == ["twice", "never"], "the newest end first"


def test_every_screen_has_the_number_of_the_attempt_that_the_options_take(history: Desk) -> None:
    store = Store.open(history.folder / "state")
    add(store, "held", NPU_8, [(2.0, "RUNNING"), (9.0, "STOPPED")], attempt=3)  # two were held before a start
    view = make_job_view(store.jobs.find("held"), None)
    store.close()
    (row,) = [row for row in rows(history) if row["name"] == "held"]
    (in_ps,) = [column.cell(view) for column in job_columns(9.0) if column.title == "ATTEMPT"]
    assert (view.attempt, row["attempts"], in_ps) == (3, 3, "3")  # `show` and `explain` print that of the view


def test_users_are_summed_by_type_of_device(history: Desk) -> None:
    names = ("user", "device_type", "jobs", "device_hours", "unknown_jobs")
    found = [tuple(row[name] for name in names) for row in rows(history, "--by", "user")]
    assert found == [
        ("ann", "npu", 2, 136.0, 0),
        ("bob", "cpu", 1, 4.0, 0),
        (None, "auto", 1, 0.0, 1),
        ("bob", "npu", 1, 0.0, 0),
    ]
    result = history.say("history", "--by", "user")
    assert "140.00 device-hours" in result.err and "devices: 1 job" in result.err


def test_waste_is_summed_by_project_and_month(history: Desk) -> None:
    store = Store.open(history.folder / "state")
    run = [(0.0, "QUEUED"), (24.0, "CHECKING"), (25.0, "RUNNING")]
    for name, end_h in (("one", 27.0), ("two", 24.0 * 40)):
        spec = {**NPU_8, "labels": {"project": "llm", "team": "x"}}
        add(store, name, spec, [*run, (end_h, "STOPPING"), (end_h + 1, "SUCCEEDED")], hosts=("a",), attempt=1)
    store.close()
    found = {row["project"]: row for row in rows(history, "--by", "project") if row["device_type"] == "npu"}
    llm, none = found["llm"], found[None]
    assert (llm["jobs"], llm["failed_hours"], llm["idle_hours"]) == (2, 0.0, 2 * 8 * 2.0)
    assert llm["waited_s"] == 48 * HOUR_S and llm["device_hours"] == 8 * (4 + 24 * 39 + 1)
    assert (none["failed_hours"], none["idle_hours"], none["device_hours"]) == (80.0, 16 * 1.5, 136.0), "once and twice"
    months = [(row["month"], row["jobs"]) for row in rows(history, "--by", "month") if row["device_type"] == "npu"]
    assert months == [("1970-02", 1), ("1970-01", 4)]
    table = history.say("history", "--by", "project", "-o", "csv").out.splitlines()
    assert "failed_hours" in table[0] and len(table) == 5
    assert history.say("history", "--by", "month", "-q").code == 2


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--user", "bob"], ["never", "cpu"]),
        (["--user", "nobody"], []),
        (["--since", "1970-01-01T08:00:00Z"], ["twice", "never"]),
        (["--since", "1970-01-01T04:00:00Z", "--user", "ann"], ["twice", "once"]),
    ],
)
def test_jobs_are_chosen_by_user_and_end(history: Desk, argv: list[str], names: list[str]) -> None:
    assert [row["name"] for row in rows(history, *argv)] == names


def test_scripts_get_ids_and_csv(history: Desk) -> None:
    ids = history.say("history", "-q", "--user", "ann").out
    assert ids == history.say("history", "-o", "name", "--user", "ann").out == "j-0002\nj-0001\n"
    table = list(csv.DictReader(io.StringIO(history.say("history", "-o", "csv", "--user", "ann").out)))
    assert [row["device_hours"] for row in table] == ["80.0", "56.0"]


def test_without_jobs_history_is_empty(desk: Desk, tmp_path: Path) -> None:
    assert rows(desk) == []


def test_where_nothing_was_ever_submitted_there_is_no_history(tmp_path: Path) -> None:
    with Store.open_for_reading(tmp_path) as store:
        assert read_losses(store, now_s=1.0) == History()


def test_running_time_and_lost_nodes_are_read_from_the_story(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        moves = [(0.1, "STARTING"), (0.2, "RUNNING"), (24.2, "STOPPING"), (24.3, "FAILED")]
        lost = add(store, "lost", {}, moves, cause=Cause.NODE_LOST)
        store.jobs.save(lost, [Event("state-changed", {"state": "MOVED"}, at_s=25 * HOUR_S)], now_s=25 * HOUR_S)
        add(store, "live", {}, [(24.0, "RUNNING")])
        history = read_losses(store, now_s=48 * HOUR_S)
    assert history.node_days == pytest.approx(2 + 2)
    assert history.failures == 1 and history.restarts_s == ()
