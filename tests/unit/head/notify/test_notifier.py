"""Notices arrive, once, whatever services do and becomes of the settings; and nothing else waits for them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.errors import InvalidInputError
from ascendrun.core.jobs.job import Cause
from ascendrun.core.jobs.reasons import FirstFailure, because
from ascendrun.core.jobs.restart import Failure, Kind
from ascendrun.core.notices import Target, make_test_notice
from ascendrun.head.notify import notifier
from ascendrun.head.notify.delivery import deliver
from ascendrun.head.state import settings_watch
from tests.lib.notice_head import Head, target
from tests.lib.vcluster.processes import await_that
from tests.lib.web_service import DROP, HANG, Answer, Say, Service, settings_text


def telling(service: Service, heads: Any, kind: str = "generic", **more: Any) -> tuple[Service, Any]:
    """The service, and a head that tells it about jobs."""
    return service, heads(settings_text([target(service, kind, **more)]))


def test_the_end_of_a_job_is_told_once_to_everyone_who_asked(heads: Any, serve: Any) -> None:
    one, other = serve(), serve()
    head = heads(settings_text([target(one), target(other, "dingtalk", events=["started"])]))
    job = head.submit()
    head.move(job, "RUNNING")
    head.move(job, "FAILED", "rank 3 ended with 1")
    assert one.await_asked(1)[0].json["job"]["state"] == "FAILED"
    assert "qwen is running" in other.await_asked(1)[0].json["markdown"]["title"]
    head.await_state("generic", "delivered")
    head.await_state("dingtalk", "delivered")
    assert (len(one.asked), len(other.asked)) == (1, 1)


@pytest.mark.parametrize(
    "answers, outcome", [((), "delivered"), ((Say(500, b""),), "retry"), ((Say(404, b""),), "retry")]
)
def test_apprise_sends_to_services_without_an_own_format(
    serve: Any, capfd: pytest.CaptureFixture[str], answers: tuple[Answer, ...], outcome: str
) -> None:
    pytest.importorskip("apprise")
    service = serve(*answers)
    url = service.url().replace("http://", "json://topsecret:topsecret@")
    result = deliver(make_test_notice(head="h", at_s=1.0), Target("mail", "apprise", url=url), timeout_s=10)
    assert result.outcome == outcome
    assert "ascendrun" in service.await_asked(1)[0].json["title"]
    assert "topsecret" not in repr(result) + "".join(capfd.readouterr())


def test_a_url_that_apprise_does_not_know_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("apprise")
    target = Target("mail", "apprise", url="dingtalk://top_secret-token/")
    assert deliver(make_test_notice(head="h", at_s=1.0), target, timeout_s=10).outcome == "refused"
    assert "top_secret" not in "".join(capfd.readouterr())


def test_a_failure_is_told_once_with_its_diagnosis(heads: Any, serve: Any) -> None:
    service, other = serve(), serve()
    head = heads(settings_text([target(service, events=["ended"]), target(other, name="other", events=["started"])]))
    job = head.submit()
    first = FirstFailure(because("rank-exited", ["a"], [3], code=1))
    failed = head.move(job, "FAILED", cause=Cause.FAILURE, go_sent_at_s=1.0, first_failure=first)
    head.move(head.submit("next"), "RUNNING")  # what needs no diagnosis waits for none
    other.await_asked(1)
    await_that(lambda: head.rows()["generic"]["answer"])
    assert head.rows()["generic"]["answer"].key == "notice.awaits-diagnosis" and not service.asked
    reason = because("rank-killed", ["b"], [0], signal=9)
    found = replace(failed, failure=Failure(Kind.OOM, "oom"), first_failure=FirstFailure(reason, "likely"))
    head.store.jobs.save(replace(found, reason=reason), [], now_s=time.time())
    [told] = service.await_asked(1)
    assert told.json["event"]["values"]["confidence"] == "likely" and "[likely]" in told.json["text"]
    assert told.json["event"]["values"]["reason"]["code"] == "rank-killed"
    head.await_state("generic", "delivered")


def test_a_failure_without_a_diagnosis_is_told_in_time(heads: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "DIAGNOSIS_S", 0.0)
    service, head = telling(serve(), heads)
    first = FirstFailure(because("rank-exited", ["a"], [3], code=1))
    head.move(head.submit(), "FAILED", cause=Cause.FAILURE, go_sent_at_s=1.0, first_failure=first)
    [told] = service.await_asked(1)
    assert told.json["event"]["values"]["confidence"] == "preliminary"


def test_deciding_the_same_twice_sends_once(heads: Any, serve: Any) -> None:
    service, head = telling(serve(), heads)
    job = head.submit()
    for _ in range(3):
        head.move(job, "FAILED")
    head.await_state("generic", "delivered")
    assert len(head.store.notices.newest()) == 1 == len(service.asked)


@pytest.mark.parametrize("answer", [Say(500, b"oops"), DROP])
def test_what_failed_is_tried_again_with_the_same_id(heads: Any, serve: Any, answer: Answer) -> None:
    service, head = telling(serve(answer), heads, "dingtalk")
    head.move(head.submit(), "SUCCEEDED")
    service.await_asked(1)
    await_that(lambda: head.rows()["dingtalk"]["answer"])
    assert head.rows()["dingtalk"]["due_at_s"] > time.time() - 60  # later, not never
    head.await_state("dingtalk", "delivered")
    assert head.rows()["dingtalk"]["tries"] == 2 and service.asked[0].body == service.asked[1].body


def test_a_service_that_asks_for_time_gets_it(heads: Any, serve: Any) -> None:
    service, head = telling(serve(Say(429, b"slow down", (("Retry-After", "1800"),))), heads, "slack")
    before_s = time.time()
    head.move(head.submit(), "SUCCEEDED")
    await_that(lambda: (head.rows()["slack"]["answer"] or "").startswith("429"))
    assert head.rows()["slack"]["due_at_s"] >= before_s + 1800


@pytest.mark.parametrize(
    "kind, answer",
    [
        ("dingtalk", Say(200, b'{"errcode":310000,"errmsg":"sign not match"}')),
        ("feishu", Say(200, b'{"code":19021,"msg":"sign match fail"}')),
        ("wecom", Say(200, b'{"errcode":93000,"errmsg":"invalid webhook url"}')),
        ("slack", Say(404, b"no_service")),
    ],
)
def test_a_refusal_stands_in_the_story_and_is_not_repeated(heads: Any, serve: Any, kind: str, answer: Say) -> None:
    service, head = telling(serve(answer), heads, kind)
    job = head.submit()
    head.move(job, "FAILED")
    head.await_state(kind, "refused")
    lines = [line for line in head.story(job) if line.startswith("notification-failed:")]
    assert len(lines) == 1 and answer.body.decode()[:20] in lines[0] and len(service.asked) == 1


def test_no_credential_is_in_the_store_the_story_or_the_log(heads: Any, serve: Any, capfd: Any, tmp_path: Path) -> None:
    echo = serve(Say(400, b"bad url /hook/0123456789abcdef?key=topsecret99 and s3cr3tS1gn"))
    dead = {"type": "generic", "name": "dead", "url": "http://127.0.0.1:9/hook/0123456789abcdef?key=topsecret99"}
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


def test_a_burst_beyond_the_limit_of_the_service_is_spread(heads: Any, serve: Any) -> None:
    service, head = telling(serve(), heads, "dingtalk")
    for _ in range(25):
        head.move(head.submit(), "FAILED")
    service.await_asked(20)
    await_that(lambda: sum(row["state"] == "delivered" for row in head.store.notices.newest()) == 20)
    assert len(service.asked) == 20 and sum(row["state"] == "waiting" for row in head.store.notices.newest()) == 5


def test_a_hook_gets_the_notice_and_its_failure_stands_in_the_story(heads: Any, tmp_path: Path) -> None:
    script = tmp_path / "hook.sh"
    script.write_text(
        f"#!/bin/sh\ncat > {tmp_path}/got\necho $ASCENDRUN_JOB_ID $ASCENDRUN_STATE >> {tmp_path}/got\n"
        "echo API_KEY=q1w2e3r4t5 went wrong\nexit 3\n"
    )
    script.chmod(0o755)
    head = heads(settings_text([], hook={"command": ["./hook.sh"], "events": ["failed"]}))
    job = head.submit()
    head.move(job, "FAILED", "rank 3")
    head.await_state("hook", "refused")
    first, second = (tmp_path / "got").read_text().splitlines()
    assert json.loads(first)["job"]["id"] == job.id and second == f"{job.id} FAILED"
    reply = head.store.events.of(job.id)[-1].values["reply"]
    assert (reply.key, reply.values["how"].values["code"]) == ("notice.hook-output", 3)
    assert "went wrong" in reply.values["output"] and "q1w2e3r4t5" not in str(reply)


def test_the_dead_mans_switch_is_pressed_while_a_job_lives_and_told_its_end(heads: Any, serve: Any) -> None:
    service = serve()
    head = heads(settings_text([], deadman={"url": service.url("/ping"), "interval_s": 1, "failed": "/fail"}))
    head.beat()
    job = head.submit()
    head.beat()
    await_that(lambda: len(service.asked) >= 2)
    assert {(asked.method, asked.path) for asked in service.asked} == {("GET", "/ping")}
    head.move(job, "FAILED")
    await_that(lambda: any(asked.path == "/ping/fail" for asked in service.asked))


def test_while_nobody_is_to_be_told_nothing_runs_and_nothing_is_kept(heads: Any) -> None:
    head = heads("color: never\n")
    head.notifier.start()
    head.move(head.submit(), "FAILED")
    assert head.store.notices.newest() == () and not head.notifier.is_waiting and head.notifier._threads == {}


def test_a_url_file_is_read_at_every_sending(heads: Any, serve: Any, tmp_path: Path) -> None:
    service = serve()
    head = heads(settings_text([{"type": "generic", "url_file": "url"}]))
    head.move(head.submit(), "FAILED")
    await_that(lambda: head.rows()["generic"]["answer"])
    assert head.rows()["generic"]["answer"].key == "notify.cannot-read"
    (tmp_path / "url").write_text(service.url() + "\n")
    head.await_state("generic", "delivered")


def test_a_changed_settings_file_is_followed_and_a_broken_one_is_not(heads: Any, serve: Any, capfd: Any) -> None:
    one, other = serve(), serve()
    head = heads(settings_text([target(one)]))
    job = head.submit()
    head.file.write_text("notify: [{type: carrier-pigeon}]\n")
    with pytest.raises(InvalidInputError):
        head.read()
    await_that(lambda: head.notifier.settings() is None or "carrier-pigeon" in "".join(capfd.readouterr()))
    head.file.write_text(settings_text([target(other, name="other")]))

    def names() -> list[str] | None:
        settings = head.notifier.settings()
        return [one.name for one in settings.targets] if settings else None

    await_that(lambda: names() == ["other"])
    head.move(job, "FAILED")
    other.await_asked(1)
    assert one.asked == []


def test_settings_on_a_disk_that_hangs_stop_neither_the_loop_nor_the_notices(
    heads: Any, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = serve(), serve()
    head = heads(settings_text([target(one)]))
    job = head.submit()
    head.beat()
    hanging = tmp_path / "hanging"
    os.mkfifo(hanging)  # who opens it waits until somebody writes
    os.replace(hanging, head.file)
    opened: list[int] = []
    monkeypatch.setattr(settings_watch, "PATIENCE_S", 120.0)
    began_mono = time.monotonic()

    def is_read() -> bool:
        head.beat()
        with contextlib.suppress(OSError):
            opened.append(os.open(head.file, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    await_that(is_read)
    head.move(job, "FAILED")
    assert time.monotonic() - began_mono < settings_watch.PATIENCE_S  # it is not waited for
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
        assert later.rows()["generic"]["answer"].key == "notice.target-removed"
        assert later.store.events.of(job.id)[-1].values["reply"].key == "notice.target-removed"
    finally:
        later.close()
