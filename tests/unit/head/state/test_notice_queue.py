"""A notice outlives who was to send it: controllers that die, stores that cannot be opened, queues that grow."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascendrun.head.state.notice_queue import QUEUE_LIMIT
from ascendrun.head.state.store import Store
from tests.lib.notice_head import Head, target
from tests.lib.vcluster.processes import await_that
from tests.lib.web_service import Say, settings_text


def test_what_was_due_when_the_controller_ended_is_sent_by_the_next_one(heads: Any, serve: Any, tmp_path: Path) -> None:
    service = serve(Say(500))
    head = heads(settings_text([target(service)]))
    head.move(head.submit(), "FAILED")
    await_that(lambda: head.rows()["generic"]["answer"])
    head.notifier.close(bound_s=0.1)
    head.due_now()
    later = Head(tmp_path)
    try:
        later.notifier.start()
        service.await_asked(2)
        later.await_state("generic", "delivered")
    finally:
        later.close()


CONTROLLER = """
import sys, time, pathlib
sys.path.insert(0, {code!r})
from tests.lib.notice_head import Head
head = Head(pathlib.Path(sys.argv[1]))
head.notifier.start()
job = head.store.jobs.find("j-0001").job if sys.argv[2] == "again" else head.submit()
head.move(job, "FAILED")
until = time.monotonic() + 60
while head.rows()["generic"]["state"] in ("waiting", "sending") and time.monotonic() < until:
    time.sleep(0.01)
head.close()
"""


def controller(folder: Path, what: str, failpoint: str = "") -> int:
    env = {**os.environ, "ASCENDRUN_FAILPOINT": failpoint} if failpoint else dict(os.environ)
    code = CONTROLLER.format(code=str(Path(__file__).resolve().parents[4]))
    return subprocess.run([sys.executable, "-c", code, str(folder), what], env=env, timeout=120).returncode


@pytest.mark.parametrize("place, sendings", [("notices.before_send", 1), ("notices.after_send", 2)])
def test_a_controller_killed_around_a_sending_costs_at_most_one_duplicate(
    serve: Any, tmp_path: Path, place: str, sendings: int
) -> None:
    service = serve()
    (tmp_path / "config.yaml").write_text(settings_text([target(service)]))
    assert controller(tmp_path, "first", f"{place}=kill") == -9
    assert controller(tmp_path, "again") == 0
    assert len(service.asked) == sendings
    assert len({asked.json["id"] for asked in service.asked}) == 1
    assert len({asked.headers["Idempotency-Key"] for asked in service.asked}) == 1


@pytest.mark.slow
def test_who_is_killed_again_and_again_does_not_send_for_ever(serve: Any, tmp_path: Path) -> None:
    service = serve()
    (tmp_path / "config.yaml").write_text(settings_text([target(service)]))
    for what in ("first", "again"):
        assert controller(tmp_path, what, "notices.after_send=kill") == -9
    assert controller(tmp_path, "again", "notices.after_send=kill") == 0
    store = Store.open_for_reading(tmp_path / "state")
    assert store is not None and len(service.asked) == 2
    assert [row["state"] for row in store.notices.newest()] == ["unknown"]
    assert any("interrupted" in str(event.message()) for event in store.events.of("j-0001"))
    store.close()


def test_a_store_that_cannot_be_opened_for_a_while_delays_a_notice_and_loses_none(
    heads: Any, serve: Any, capfd: Any, tmp_path: Path
) -> None:
    service = serve()
    head = heads(settings_text([target(service)]))
    job = head.submit()
    head.save(job, "FAILED")
    said: list[str] = []
    (tmp_path / "state").rename(tmp_path / "away")
    try:
        head.beat()
        await_that(lambda: said.append(capfd.readouterr().err) or "state.db" in "".join(said))
    finally:
        (tmp_path / "away").rename(tmp_path / "state")
    head.await_state("generic", "delivered")
    assert len(service.asked) == 1


def test_a_queue_that_grows_too_long_drops_its_oldest_and_says_so(heads: Any, tmp_path: Path) -> None:
    head = heads(settings_text([{"kind": "generic", "url_file": "missing"}]))
    job = head.submit()
    with head.store.writing() as db:
        db.executemany(
            "INSERT INTO notices (id, target, job, body, made_at_s, state, due_at_s)"
            " VALUES (?, 'x', ?, '{}', 0, 'waiting', 0)",
            [(str(number), job.id) for number in range(QUEUE_LIMIT + 3)],
        )
    assert head.store.notices.give_up_beyond("x", now_s=1.0) == 3
    given_up = {row["id"] for row in head.store.notices.newest(limit=5000) if row["state"] == "given up"}
    assert given_up == {"0", "1", "2"} and [
        event.values["count"] for event in head.store.events.of(job.id) if event.code == "notification-failed"
    ] == [3]


def test_what_was_delivered_long_ago_is_forgotten_while_the_controller_runs(heads: Any, serve: Any) -> None:
    service = serve()
    head = heads(settings_text([target(service)]))
    old, new = head.submit("old"), head.submit("new")
    head.move(old, "FAILED")
    head.await_state("generic", "delivered")
    with head.store.writing() as db:
        db.execute("UPDATE notices SET made_at_s = made_at_s - 31 * 86400.0")
    head.move(new, "FAILED")
    await_that(lambda: [row["job"] for row in head.store.notices.newest()] == [new.id])
