"""Which lines of a story become notices, for whom, and when each is tried again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core import notices
from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.events import Event, JobEvent
from ascendrun.core.jobs.job import Job
from ascendrun.core.jobs.reasons import because
from ascendrun.text import LANGUAGES, to_json, translations
from tests.lib.demo_jobs import demo_job

KINDS = sorted(key[13:] for key in translations("en") if key.startswith("notice.title."))


def make_job(**changes: Any) -> Job:
    job = demo_job(
        id="j-0007", name="qwen32b", run="h-j-0007", hosts=("npu1", "npu2"), created_at_s=10.0, world_size=16
    )
    return replace(job, **changes)


def event(
    code: str = "state-changed", state: str = "FAILED", reason: str = "rank 3 exited", at_s: float = 100.0
) -> Event:
    return Event(code, {"state": state, "reason": because("rejected", why=reason)}, ("npu1",), (3,), 1, at_s)


def notice(event: Event, *, number: int = 9, **changes: Any) -> notices.Notice | None:
    return notices.notice_of(make_job(**changes), JobEvent(number, "j-0007", event), head_id="ab12", head="login1")


def make(made: Event | None = None, **changes: Any) -> notices.Notice:
    found = notice(made or event(), **changes)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "state, kind",
    [
        ("RUNNING", "started"),
        ("SUCCEEDED", "succeeded"),
        ("STOPPED", "stopped"),
        ("FAILED", "failed"),
        ("BACKOFF", "retrying"),
    ],
)
def test_a_state_that_people_wait_for_makes_a_notice(state: str, kind: str) -> None:
    found = make(event(state=state, reason="because"))
    assert (found.kind, found.state, found.reason) == (kind, state, because("rejected", why="because"))


def test_an_event_of_no_job_is_for_whom_asked_for_it_whatever_jobs_he_has() -> None:
    names = {"head_id": "ab12", "head": "login1"}
    found = notices.notice_of(None, JobEvent(3, "", Event("standby-missing", {"host": "b", "seconds": 600.0})), **names)
    assert found is not None and (found.id, found.job) == ("ab12/standby-missing/3", None)
    assert notices.Target("t", "generic", events=("standby",), jobs=("qwen*",)).selects(found)
    assert not notices.Target("t", "generic").selects(found)
    assert notices.notice_of(None, JobEvent(4, "", Event("standby-in-sync", {"host": "b"})), **names) is None


@pytest.mark.parametrize(
    "made",
    [
        event(state="CHECKING"),
        Event("submitted", {"name": "x"}),
        Event("stop-requested", {"grace_s": 0}),
        Event("notification-failed", {"target": "hook"}),
    ],
    ids=lambda made: made.code,
)
def test_other_events_make_none(made: Event) -> None:
    assert notice(made) is None


def test_the_same_end_has_one_id_however_often_it_is_decided_and_another_attempt_another() -> None:
    assert make(event(reason="once more", at_s=500.0), number=12).id == make().id == "ab12/j-0007/1/FAILED"
    assert make(attempt=2).id != make().id


def test_each_time_that_hosts_become_unreachable_is_a_matter_of_its_own() -> None:
    lost = event("unreachable")
    assert make(lost, number=9).id != make(lost, number=10).id


@pytest.mark.parametrize(
    "on, kinds",
    [
        (("ended",), {"succeeded", "stopped", "failed"}),
        (("failed",), {"failed"}),
        (("started",), {"started"}),
        (("unreachable", "straggler"), {"unreachable", "reachable", "straggler"}),
        (("ended", "failed"), {"succeeded", "stopped", "failed"}),
    ],
)
def test_a_target_gets_what_it_asked_for(on: tuple[str, ...], kinds: set[str]) -> None:
    target = notices.Target(name="t", type="slack", events=on)
    everything = [replace(make(), kind=kind) for kind in KINDS if kind != "test"]
    assert {notice.kind for notice in everything if target.selects(notice)} == kinds
    assert target.selects(notices.make_test_notice(head="h", at_s=1.0))


@pytest.mark.parametrize(
    "globs, is_wanted",
    [
        (("qwen*",), True),
        (("j-0007",), True),
        (("llama*", "j-1*"), False),
        (("*", "!qwen*"), False),
        (("!llama*",), True),
    ],
)
def test_jobs_are_chosen_by_name_or_id(globs: tuple[str, ...], is_wanted: bool) -> None:
    assert notices.Target(name="t", type="slack", events=("failed",), jobs=globs).selects(make()) is is_wanted


def test_a_dead_mans_switch_is_pressed_for_the_kinds_it_has_paths_for() -> None:
    target = notices.Target(name="deadman", type="deadman", suffixes={"failed": "/fail"})
    assert target.selects(make()) and not target.selects(make(event(state="SUCCEEDED")))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_words_in_every_language_and_the_keyword_in_front(lang: str, kind: str) -> None:
    words = notices.describe(replace(make(), kind=kind), lang)
    assert words.title.startswith("ascendrun: ") and "{" not in words.as_text()
    assert ("npu[1-2]" in words.as_text()) and ("rank 3" in words.as_text())


def test_credentials_in_a_reason_stay_at_home_and_its_lines_become_one() -> None:
    words = notices.describe(
        make(event(reason="could not log in:\nPASSWORD=hunter22x\nhttps://me:hunter22x@host/")), "en"
    )
    why = dict(words.facts)["reason"]
    assert "hunter22x" not in why and "\n" not in why and "could not log in" in why


def test_a_notice_survives_the_trip_through_the_store() -> None:
    import json

    assert load_dataclass(notices.Notice, json.loads(json.dumps(to_json(make())))) == make()


def test_the_credentials_of_a_target_never_show_in_a_traceback() -> None:
    assert "topsecret" not in repr(
        notices.Target(name="t", type="slack", url="https://x/topsecret", secret="topsecret")
    )


@given(st.integers(1, 10_000), st.text(max_size=20))
def test_retries_wait_longer_and_longer_up_to_a_bound(tries: int, name: str) -> None:
    waits = [notices.retry_after_s(count, notice_id=name) for count in (tries, tries + 1)]
    assert 2.0 <= waits[0] <= waits[1] <= notices.LAST_RETRY_S * 1.2


@given(st.integers(1, 50), st.floats(0, 1e9))
def test_a_service_that_says_how_long_is_heard_within_reason(tries: int, asked_s: float) -> None:
    wait_s = notices.retry_after_s(tries, notice_id="x", requested_s=asked_s)
    assert min(asked_s, notices.LONGEST_WAIT_S) <= wait_s <= notices.LONGEST_WAIT_S


@given(st.sampled_from(sorted(notices.LIMITS)), st.lists(st.floats(0, 5.0), min_size=1, max_size=150))
def test_no_window_ever_holds_more_sendings_than_the_service_allows(kind: str, pauses_s: list[float]) -> None:
    now_s = 1000.0
    sent_s: list[float] = []
    for pause_s in pauses_s:
        now_s += pause_s
        now_s = max(now_s, notices.free_at_s(sent_s, notices.LIMITS[kind], now_s=now_s))
        sent_s.append(now_s)
    for count, window_s in notices.LIMITS[kind]:
        for first, later in zip(sent_s, sent_s[count:]):
            assert later - first >= window_s - 1e-6


def test_a_clock_that_was_set_back_does_not_silence_a_target_for_ever() -> None:
    assert notices.free_at_s([9_000_000.0] * 20, notices.LIMITS["dingtalk"], now_s=1000.0) <= 1000.0 + 60.0


def test_targets_without_a_name_are_called_by_their_kind() -> None:
    targets = notices.with_name(
        [
            notices.Target(name="", type="slack"),
            notices.Target(name="slack-2", type="slack"),
            notices.Target(name="", type="slack"),
            notices.Target(name="", type="wecom"),
        ]
    )
    assert [target.name for target in targets] == ["slack", "slack-2", "slack-3", "wecom"]
