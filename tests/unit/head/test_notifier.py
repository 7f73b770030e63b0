"""Notices arrive, once, whatever the services do and whoever dies; and nothing else waits for them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from web_service import DROP, HANG, Answer, Say, Service, await_that, settings_text

from ascendrun.core.errors import InvalidInput
from ascendrun.core.job import Job, State
from ascendrun.core.notices import QUEUE_LIMIT
from ascendrun.head.noticequeue import NoticeQueue
from ascendrun.head.notifier import Notifier
from ascendrun.head.settings import load_settings
from ascendrun.head.settingswatch import LOOK_S
from ascendrun.head.store import Store

OK = Say(200, b'{"errcode":0,"code":0}')


class Head:
    """A state folder with a store, a settings file, and a notifier that works as the controller would have it."""

    def __init__(self, folder: Path, *, ask_s: float = 30.0) -> None:
        self.folder = folder
        self.file = folder / "config.yaml"
        self.store = Store.open(folder / "state")
        self.notifier = Notifier(self.store, self.read, files=[self.file], ask_s=ask_s)
        self.store.outbox = self.notifier.outbox
        self.jobs: List[Job] = []

    def read(self) -> Any:
        return load_settings({}, files=[self.file]).notices

    def submit(self, name: str = "qwen") -> Job:
        def make(job_id: str, head_id: str) -> Job:
            return Job(id=job_id, name=name, run=f"{head_id}-{job_id}", hosts=("a", "b"), grace_s=1, start_s=1,
                       created_at_s=1.0)
        job = self.store.add_job(key=f"k{len(self.jobs)}", make_job=make, spec={}, hosts=[], trees=[], file=None,
                                 now_s=time.time())
        self.jobs.append(job)
        return job

    def move(self, job: Job, state: str, why: str = "because") -> None:
        self.store.save(replace(job, state=State(state)), [("state", f"{state}: {why}")], now_s=time.time())
        self.beat()

    def beat(self) -> None:
        self.notifier.beat([(job.name, job.id) for job in self.jobs])

    def rows(self) -> Dict[str, Any]:
        return {row["target"]: row for row in self.store.notices()}

    def await_state(self, target: str, state: str) -> Any:
        await_that(lambda: target in self.rows() and self.rows()[target]["state"] == state)
        return self.rows()[target]

    def due_now(self) -> None:
        """As if the time until the next tries had passed."""
        with self.store.writing() as db:
            db.execute("UPDATE notices SET due_at_s = 0")

    def story(self, job: Job) -> List[str]:
        return [f"{event.kind}: {event.text}" for event in self.store.events(job.id)]

    def close(self) -> None:
        self.notifier.close(bound_s=0.2)
        self.store.close()


@pytest.fixture
def heads(tmp_path: Path) -> Iterator[Callable[..., Head]]:
    made: List[Head] = []

    def make(text: str, **options: Any) -> Head:
        (tmp_path / "config.yaml").write_text(text)
        made.append(Head(tmp_path, **options))
        return made[-1]
    yield make
    for head in made:
        head.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    made: List[Service] = []

    def make(*answers: Answer, **options: Answer) -> Service:
        made.append(Service(*answers, **{"default": OK, **options}))
        return made[-1]
    yield make
    for service in made:
        service.close()


def target(service: Service, kind: str = "generic", **more: Any) -> Dict[str, Any]:
    return {"kind": kind, "url": service.url(), **more}


def test_the_end_of_a_job_is_told_once_to_everyone_who_asked(heads: Any, serve: Any) -> None:
    one, other = serve(), serve()
    head = heads(settings_text([target(one), target(other, "dingtalk", on=["started"])]))
    job = head.submit()
    head.move(job, "RUNNING")
    head.move(job, "FAILED", "rank 3 ended with 1")
    assert one.await_asked(1)[0].json["job"]["state"] == "FAILED"
    assert "qwen runs" in other.await_asked(1)[0].json["markdown"]["title"]
    head.await_state("generic", "delivered")
    head.await_state("dingtalk", "delivered")
    assert (len(one.asked), len(other.asked)) == (1, 1)


def test_deciding_the_same_twice_sends_once(heads: Any, serve: Any) -> None:
    service = serve()
    head = heads(settings_text([target(service)]))
    job = head.submit()
    for _ in range(3):
        head.move(job, "FAILED")
    head.await_state("generic", "delivered")
    assert len(head.store.notices()) == 1 == len(service.asked)


@pytest.mark.parametrize("answer", [Say(500, b"oops"), DROP])
def test_what_failed_is_tried_again_with_the_same_id(heads: Any, serve: Any, answer: Answer) -> None:
    service = serve(answer)
    head = heads(settings_text([target(service, "dingtalk")]))
    head.move(head.submit(), "SUCCEEDED")
    service.await_asked(1)
    await_that(lambda: head.rows()["dingtalk"]["answer"])
    assert head.rows()["dingtalk"]["due_at_s"] > time.time() - 60  # later, not never
    head.await_state("dingtalk", "delivered")
    assert head.rows()["dingtalk"]["tries"] == 2 and service.asked[0].body == service.asked[1].body


def test_a_service_that_asks_for_time_gets_it(heads: Any, serve: Any) -> None:
    service = serve(Say(429, b"slow down", (("Retry-After", "1800"),)))
    head = heads(settings_text([target(service, "slack")]))
    before_s = time.time()
    head.move(head.submit(), "SUCCEEDED")
    await_that(lambda: (head.rows()["slack"]["answer"] or "").startswith("429"))
    assert head.rows()["slack"]["due_at_s"] >= before_s + 1800


@pytest.mark.parametrize("kind, answer", [
    ("dingtalk", Say(200, b'{"errcode":310000,"errmsg":"sign not match"}')),
    ("feishu", Say(200, b'{"code":19021,"msg":"sign match fail"}')),
    ("wecom", Say(200, b'{"errcode":93000,"errmsg":"invalid webhook url"}')),
    ("slack", Say(404, b"no_service")),
])
def test_a_refusal_stands_in_the_story_and_is_not_repeated(heads: Any, serve: Any, kind: str, answer: Say) -> None:
    service = serve(answer)
    head = heads(settings_text([target(service, kind)]))
    job = head.submit()
    head.move(job, "FAILED")
    head.await_state(kind, "refused")
    lines = [line for line in head.story(job) if line.startswith("notice:")]
    assert len(lines) == 1 and answer.body.decode()[:20] in lines[0] and len(service.asked) == 1


def test_no_credential_is_in_the_store_the_story_or_the_log(heads: Any, serve: Any, capfd: Any, tmp_path: Path) -> None:
    echo = serve(Say(400, b"bad url /hook/0123456789abcdef?key=topsecret99 and s3cr3tS1gn"))
    dead = {"kind": "generic", "name": "dead", "url": "http://127.0.0.1:9/hook/0123456789abcdef?key=topsecret99"}
    head = heads(settings_text([target(echo, "dingtalk", secret="s3cr3tS1gn"), dead]))
    job = head.submit()
    head.move(job, "FAILED")
    head.await_state("dingtalk", "refused")
    await_that(lambda: head.rows()["dead"]["answer"])
    head.close()
    everything = b"".join(path.read_bytes() for path in (tmp_path / "state").iterdir() if path.is_file())
    everything += "".join(capfd.readouterr()).encode()
    for secret in (b"topsecret99", b"0123456789abcdef", b"s3cr3tS1gn"):
        assert secret not in everything


def test_a_dead_service_delays_neither_another_nor_the_end_of_the_controller(heads: Any, serve: Any) -> None:
    dead, fine = serve(default=HANG), serve()
    head = heads(settings_text([target(dead, name="dead"), target(fine, name="fine")]), ask_s=120.0)
    job = head.submit()
    began = time.monotonic()
    head.move(job, "FAILED")
    dead.await_asked(1)
    head.await_state("fine", "delivered")
    head.notifier.close(bound_s=1.0)
    assert time.monotonic() - began < 100  # and not the 120 s of the one that hangs


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
sys.path[:0] = [{code!r}, {here!r}]
from test_notifier import Head
head = Head(pathlib.Path(sys.argv[1]))
head.notifier.start()
job = head.store.find("j-0001").job if sys.argv[2] == "again" else head.submit()
head.move(job, "FAILED")
until = time.monotonic() + 60
while head.rows()["generic"]["state"] in ("waiting", "sending") and time.monotonic() < until:
    time.sleep(0.01)
head.close()
"""


def controller(folder: Path, what: str, failpoint: str = "") -> int:
    here = Path(__file__).resolve().parent
    env = {**os.environ, "ASCENDRUN_FAILPOINT": failpoint} if failpoint else dict(os.environ)
    code = CONTROLLER.format(code=str(here.parents[2]), here=str(here))
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
    assert [row["state"] for row in store.notices()] == ["unknown"]
    assert any("interrupted" in event.text for event in store.events("j-0001"))
    store.close()


def test_a_burst_beyond_the_limit_of_the_service_is_spread(heads: Any, serve: Any) -> None:
    service = serve()
    head = heads(settings_text([target(service, "dingtalk")]))
    for _ in range(25):
        head.move(head.submit(), "FAILED")
    service.await_asked(20)
    await_that(lambda: sum(row["state"] == "delivered" for row in head.store.notices()) == 20)
    assert len(service.asked) == 20 and sum(row["state"] == "waiting" for row in head.store.notices()) == 5


def test_a_queue_that_grows_too_long_drops_its_oldest_and_says_so(heads: Any, tmp_path: Path) -> None:
    head = heads(settings_text([{"kind": "generic", "url_file": "missing"}]))
    job = head.submit()
    with head.store.writing() as db:
        db.executemany("INSERT INTO notices (id, target, job, body, made_at_s, state, due_at_s)"
                       " VALUES (?, 'x', ?, '{}', 0, 'waiting', 0)",
                       [(str(number), job.id) for number in range(QUEUE_LIMIT + 3)])
    queue = NoticeQueue(head.store.beside())
    assert queue.give_up_beyond("x", now_s=1.0) == 3
    given_up = {row["id"] for row in head.store.notices(limit=5000) if row["state"] == "given up"}
    queue.close()
    assert given_up == {"0", "1", "2"} and any("3 oldest given up" in line for line in head.story(job))


def test_what_was_delivered_long_ago_is_forgotten_while_the_controller_runs(heads: Any, serve: Any) -> None:
    service = serve()
    head = heads(settings_text([target(service)]))
    old, new = head.submit("old"), head.submit("new")
    head.move(old, "FAILED")
    head.await_state("generic", "delivered")
    with head.store.writing() as db:
        db.execute("UPDATE notices SET made_at_s = made_at_s - 31 * 86400.0")
    head.move(new, "FAILED")
    await_that(lambda: [row["job"] for row in head.store.notices()] == [new.id])


def test_a_url_file_is_read_at_every_sending(heads: Any, serve: Any, tmp_path: Path) -> None:
    service = serve()
    head = heads(settings_text([{"kind": "generic", "url_file": "url"}]))
    head.move(head.submit(), "FAILED")
    await_that(lambda: head.rows()["generic"]["answer"])
    assert "cannot be read" in head.rows()["generic"]["answer"]
    (tmp_path / "url").write_text(service.url() + "\n")
    head.await_state("generic", "delivered")


def test_a_changed_settings_file_is_followed_and_a_broken_one_is_not(heads: Any, serve: Any, capfd: Any) -> None:
    one, other = serve(), serve()
    head = heads(settings_text([target(one)]))
    job = head.submit()
    head.file.write_text("notify: [{kind: carrier-pigeon}]\n")
    with pytest.raises(InvalidInput):
        head.read()
    await_that(lambda: head.notifier.settings() is None or "carrier-pigeon" in "".join(capfd.readouterr()))
    head.file.write_text(settings_text([target(other, name="other")]))

    def names() -> Optional[List[str]]:
        settings = head.notifier.settings()
        return [one.name for one in settings.targets] if settings else None
    await_that(lambda: names() == ["other"])
    head.move(job, "FAILED")
    other.await_asked(1)
    assert one.asked == []


def test_settings_on_a_disk_that_hangs_stop_neither_the_loop_nor_the_notices(heads: Any, serve: Any, tmp_path: Path
                                                                            ) -> None:
    one, other = serve(), serve()
    head = heads(settings_text([target(one)]))
    job = head.submit()
    head.beat()
    hanging = tmp_path / "hanging"
    os.mkfifo(hanging)  # who opens it waits until somebody writes
    os.replace(hanging, head.file)
    opened: List[int] = []

    def is_read() -> bool:
        head.beat()
        with contextlib.suppress(OSError):
            opened.append(os.open(head.file, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)
    await_that(is_read)
    began_mono = time.monotonic()
    head.move(job, "FAILED")
    assert time.monotonic() - began_mono < LOOK_S  # it is not waited for a second time
    one.await_asked(1)
    with os.fdopen(opened[0], "w") as writer:
        writer.write(settings_text([target(other, name="other")]))
    await_that(lambda: [named.name for named in head.notifier.settings().targets] == ["other"])


def test_notices_for_a_target_that_is_gone_are_given_up(heads: Any, serve: Any, tmp_path: Path) -> None:
    head = heads(settings_text([target(serve(default=Say(500)))]))
    job = head.submit()
    head.move(job, "FAILED")
    await_that(lambda: head.rows()["generic"]["answer"])
    head.notifier.close(bound_s=0.1)
    head.file.write_text("color: never\n")
    later = Head(tmp_path)
    try:
        later.notifier.start()
        later.await_state("generic", "given up")
        assert any("no such target" in line for line in later.story(job))
    finally:
        later.close()


def test_a_hook_gets_the_notice_and_its_failure_stands_in_the_story(heads: Any, tmp_path: Path) -> None:
    script = tmp_path / "hook.sh"
    script.write_text(f"#!/bin/sh\ncat > {tmp_path}/got\necho $ASCENDRUN_JOB $ASCENDRUN_STATE >> {tmp_path}/got\n"
                      "echo API_KEY=q1w2e3r4t5 went wrong\nexit 3\n")
    script.chmod(0o755)
    head = heads(settings_text([], hook={"command": ["./hook.sh"], "on": ["failed"]}))
    job = head.submit()
    head.move(job, "FAILED", "rank 3")
    head.await_state("hook", "refused")
    first, second = (tmp_path / "got").read_text().splitlines()
    assert json.loads(first)["job"]["id"] == job.id and second == f"{job.id} FAILED"
    story = "\n".join(head.story(job))
    assert "exited 3" in story and "went wrong" in story and "q1w2e3r4t5" not in story


def test_the_dead_mans_switch_is_pressed_while_a_job_lives_and_told_its_end(heads: Any, serve: Any) -> None:
    service = serve()
    head = heads(settings_text([], deadman={"url": service.url("/ping"), "every_s": 1, "failed": "/fail"}))
    head.beat()
    job = head.submit()
    head.beat()
    await_that(lambda: len(service.asked) >= 2)
    assert {(asked.method, asked.path) for asked in service.asked} == {("GET", "/ping")}
    head.move(job, "FAILED")
    await_that(lambda: any(asked.path == "/ping/fail" for asked in service.asked))


def test_a_store_that_cannot_be_opened_for_a_while_delays_a_notice_and_loses_none(
        heads: Any, serve: Any, capfd: Any, tmp_path: Path) -> None:
    service = serve()
    head = heads(settings_text([target(service)]))
    job = head.submit()
    head.store.save(replace(job, state=State.FAILED), [("state", "FAILED: because")], now_s=time.time())
    said: List[str] = []
    (tmp_path / "state").rename(tmp_path / "away")
    try:
        head.beat()
        await_that(lambda: said.append(capfd.readouterr().err) or "state.db" in "".join(said))
    finally:
        (tmp_path / "away").rename(tmp_path / "state")
    head.await_state("generic", "delivered")
    assert len(service.asked) == 1


def test_while_nobody_is_to_be_told_nothing_runs_and_nothing_is_kept(heads: Any) -> None:
    head = heads("color: never\n")
    head.notifier.start()
    head.move(head.submit(), "FAILED")
    assert head.store.notices() == () and not head.notifier.is_waiting and head.notifier._threads == {}


def test_a_store_of_the_first_version_is_brought_along_with_its_stories(tmp_path: Path) -> None:
    import sqlite3

    from ascendrun.head import store as module

    (tmp_path / "state").mkdir()
    with sqlite3.connect(tmp_path / "state" / "state.db") as db:
        for statement in module._MIGRATIONS[0].split(";"):
            db.execute(statement)
        db.executemany("INSERT INTO events VALUES (?, ?, ?, 'note', ?)",
                       [("j-0002", 1, 5.0, "b"), ("j-0001", 1, 1.0, "a"), ("j-0001", 2, 9.0, "c")])
        db.execute("PRAGMA user_version = 1")
    db.close()
    reader = Store.open_for_reading(tmp_path / "state")
    assert reader is not None
    before = reader.stream()
    reader.close()
    store = Store.open(tmp_path / "state")
    assert [line.text for line in before] == ["a", "b", "c"] and store.stream() == before
    store.close()
