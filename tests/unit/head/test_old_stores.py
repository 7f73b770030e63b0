"""A store that a release with sentences wrote (old_store.sql) is read into typed events, and keeps its facts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from ascendrun.core.jobs.job import Cause, State
from ascendrun.core.reachability import unreachable_hosts
from ascendrun.head.loop.stragglers import known_from_events
from ascendrun.head.state.notice_queue import NoticeQueue
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.head.state.store import Store
from ascendrun.query.evidence import read_evidence

EXPECTED = {
    "success": (State.SUCCEEDED, None, 1, "reason.succeeded"),
    "rank-fails": (State.FAILED, Cause.FAILURE, 1, "reason.rank-exited"),
    "user-stop": (State.STOPPED, Cause.USER, 1, "reason.stopped-by-user"),
    "refused": (State.FAILED, Cause.REFUSED, 1, "reason.preflight-failed"),
    "rebooted": (State.FAILED, Cause.NODE_LOST, 1, "reason.node-rebooted"),
    "start-timeout": (State.FAILED, Cause.START_TIMEOUT, 1, "reason.start-timeout"),
    "restarted": (State.STOPPED, Cause.USER, 2, "reason.stopped-by-user"),
    "failed-need": (State.STOPPED, Cause.NEED, 1, "reason.dependency-failed"),
    "running": (State.RUNNING, None, 1, "reason.running"),
}


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    db = sqlite3.connect(path / "state.db")
    db.executescript((Path(__file__).parent / "old_store.sql").read_text(encoding="utf-8"))
    db.close()
    return path


def open_store(state_dir: Path) -> Store:
    store = Store.open(state_dir)
    store.close()
    reader = Store.open_for_reading(state_dir)
    assert reader is not None and not reader.is_copy
    return reader


def test_states_causes_attempts_and_reasons_come_out_as_before(state_dir: Path) -> None:
    store = open_store(state_dir)
    jobs = {stored.job.name: stored.job for stored in store.all_jobs()}
    assert {name: (job.state, job.cause, job.attempt, job.reason.key) for name, job in jobs.items()} == EXPECTED
    assert jobs["rank-fails"].first_failure is not None
    failure = jobs["rank-fails"].first_failure
    assert (failure.kind, failure.rank, failure.host, failure.code) == ("rank-exited", 3, "npu02", 7)
    assert jobs["refused"].reason.values["hosts"] == jobs["start-timeout"].reason.values["hosts"] == ["npu02"]
    assert [exit.killed_at_exit for exit in jobs["rank-fails"].nodes[1].exits.values()] == [True]
    assert [exit.killed_at_exit for exit in jobs["success"].nodes[0].exits.values()] == [False, False]
    assert jobs["restarted"].unconfirmed == ("npu02", "npu01")
    assert jobs["failed-need"].reason.values["job"] == jobs["refused"].id
    store.close()


def test_every_line_becomes_a_typed_event_but_those_of_no_release(state_dir: Path) -> None:
    store = open_store(state_dir)
    events = [item.event for item in store.stream()]
    assert [event.values["text"] for event in events if event.code == "legacy"] == ["something of a later release"]
    assert all("legacy" not in repr(event.values.get("reason")) for event in events)
    by_code = {event.code: event for event in events}
    assert by_code["processes-remain"].values["pids"] == [4711, 4712]
    assert by_code["file-truncated"].values["size"] == 10
    assert {event.values["grace_s"] for event in events if event.code == "stop-requested"} == {30.0, 0.0}
    restarted = [event for event in store.events("j-0007") if event.code == "state-changed"]
    assert [event.attempt for event in restarted if event.values["state"] == "STOPPING"] == [1, 2]
    assert [event.values["cause"] for event in restarted if event.values["state"] == "STOPPING"] == [
        "head-restarted",
        "user",
    ]
    store.close()


def test_unreachable_hosts_and_stragglers_are_known_again(state_dir: Path) -> None:
    store = open_store(state_dir)
    assert unreachable_hosts(store.events("j-0009")) == {"npu02"}
    assert unreachable_hosts(store.events("j-0005")) == set()
    assert dict(known_from_events(1, store.events("j-0009")).missing) == {("npu02", 3): 0}
    store.close()


def test_earlier_attempts_keep_their_cause(state_dir: Path) -> None:
    store = open_store(state_dir)
    stored, events = store.find("j-0007"), store.events("j-0007")
    for attempt, cause in ((1, "head-restarted"), (2, "user")):
        assert read_evidence(state_dir, stored, events, attempt=attempt, now_s=5000.0).cause == cause
    rebooted = read_evidence(state_dir, store.find("j-0005"), store.events("j-0005"), now_s=5000.0)
    assert [host.host for host in rebooted.hosts if host.lost == "rebooted"] == ["npu02"]
    store.close()


def test_a_reader_sees_the_same_and_leaves_the_file_as_it_is(state_dir: Path) -> None:
    reader = Store.open_for_reading(state_dir)
    assert reader is not None and reader.is_copy
    before = reader.stream()
    reader.close()
    db = sqlite3.connect(state_dir / "state.db")
    assert db.execute("PRAGMA user_version").fetchone() == (2,)
    db.close()
    store = open_store(state_dir)
    assert store.stream() == before
    store.close()


def test_the_file_is_copied_before_it_is_migrated_and_only_then(state_dir: Path) -> None:
    Store.open_for_reading(state_dir).close()
    backup = state_dir / "state.db.v2"
    assert not backup.exists(), "a reader migrates nothing"
    with sqlite3.connect(state_dir / "state.db") as db:
        rows = db.execute("SELECT * FROM jobs").fetchall()
    open_store(state_dir).close()
    with sqlite3.connect(backup) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,)
        assert db.execute("SELECT * FROM jobs").fetchall() == rows
    assert backup.stat().st_mode & 0o777 == 0o600
    backup.unlink()
    open_store(state_dir).close()
    assert not backup.exists(), "there was nothing to migrate"


def test_a_migration_that_fails_leaves_the_file_as_it_was(state_dir: Path) -> None:
    def fail(db: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    class Broken(Store):
        MIGRATIONS = (*Store.MIGRATIONS, "CREATE TABLE of_the_next_release (x)", fail)

    with pytest.raises(StoreUnusableError, match="disk I/O error"):
        Broken.open(state_dir)
    with sqlite3.connect(state_dir / "state.db") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,), "no step of it happened"
    open_store(state_dir).close()


def test_a_notice_that_waits_is_still_delivered(state_dir: Path) -> None:
    from ascendrun.core.notices import Notice, describe

    store = Store.open(state_dir)
    waiting = NoticeQueue(store).next("team")
    assert waiting is not None
    notice = Notice.from_json(waiting.body)
    assert notice.kind == "reachable" and "npu01: answers again" in describe(notice, "en").as_text()
    store.close()
