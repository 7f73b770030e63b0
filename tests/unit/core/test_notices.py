"""Which lines of a story become notices, for whom, and when each is tried again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.jobs.job import Job, State
from ascendrun.core.notices import (
    _TITLES,
    LANGUAGES,
    LAST_RETRY_S,
    LIMITS,
    LONGEST_WAIT_S,
    Notice,
    Target,
    describe,
    free_at_s,
    make_test_notice,
    notice_of,
    retry_after_s,
    with_name,
)


def make_job(**changes: Any) -> Job:
    job = Job(
        id="j-0007",
        name="qwen32b",
        run="h-j-0007",
        hosts=("npu1", "npu2"),
        grace_s=1,
        start_s=1,
        created_at_s=10.0,
        world_size=16,
    )
    return replace(job, **changes)


def make(kind: str = "state", text: str = "FAILED: rank 3 ended with exit code 1", **changes: Any) -> Notice:
    notice = notice_of(make_job(**changes), kind, text, seq=9, head_id="ab12", head="login1", at_s=100.0)
    assert notice is not None
    return notice


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
    notice = make("state", f"{state}: because")
    assert (notice.kind, notice.state, notice.text) == (kind, state, "because")


@pytest.mark.parametrize(
    "kind, text",
    [
        ("state", "CHECKING: its nodes are free"),
        ("note", "FAILED: no"),
        ("submitted", "x"),
        ("asked", "stop"),
        ("notice", "hook: not delivered"),
    ],
)
def test_other_lines_make_none(kind: str, text: str) -> None:
    assert notice_of(make_job(), kind, text, seq=1, head_id="h", head="x", at_s=1.0) is None


def test_the_same_end_has_one_id_however_often_it_is_decided_and_another_attempt_another() -> None:
    again = notice_of(make_job(), "state", "FAILED: told anew", seq=12, head_id="ab12", head="login1", at_s=500.0)
    assert again is not None and again.id == make().id == "ab12/j-0007/1/FAILED"
    assert make(attempt=2).id != make().id


def test_each_time_that_hosts_fall_silent_is_a_matter_of_its_own() -> None:
    first, second = (
        make("unreachable", "npu1: no answer"),
        notice_of(make_job(), "unreachable", "npu1: no answer", seq=10, head_id="ab12", head="login1", at_s=100.0),
    )
    assert second is not None and first.id != second.id


@pytest.mark.parametrize(
    "on, kinds",
    [
        (("ended",), {"succeeded", "stopped", "failed"}),
        (("failed",), {"failed"}),
        (("started",), {"started"}),
        (("unreachable", "straggler"), {"unreachable", "answers", "straggler"}),
        (("ended", "failed"), {"succeeded", "stopped", "failed"}),
    ],
)
def test_a_target_gets_what_it_asked_for(on: tuple[str, ...], kinds: set[str]) -> None:
    target = Target(name="t", kind="slack", on=on)
    everything = [replace(make(), kind=kind) for kind in _TITLES["en"] if kind != "test"]
    assert {notice.kind for notice in everything if target.wants(notice)} == kinds
    assert target.wants(make_test_notice(head="h", at_s=1.0))


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
    assert Target(name="t", kind="slack", on=("failed",), jobs=globs).wants(make()) is is_wanted


def test_a_dead_mans_switch_is_pressed_for_the_kinds_it_has_paths_for() -> None:
    target = Target(name="deadman", kind="deadman", suffixes={"failed": "/fail"})
    assert target.wants(make()) and not target.wants(make(text="SUCCEEDED: fine"))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("kind", sorted(_TITLES["en"]))
def test_every_kind_has_words_in_every_language_and_the_keyword_in_front(lang: str, kind: str) -> None:
    words = describe(replace(make(), kind=kind), lang)
    assert words.title.startswith("ascendrun: ") and "{" not in words.as_text()
    assert ("npu[1-2]" in words.as_text()) and ("rank 3" in words.as_text())


def test_credentials_in_a_reason_stay_at_home_and_its_lines_become_one() -> None:
    words = describe(make(text="FAILED: could not log in:\nPASSWORD=hunter22x\nhttps://me:hunter22x@host/"), "en")
    why = dict(words.facts)["why"]
    assert "hunter22x" not in why and "\n" not in why and "could not log in" in why


def test_a_notice_survives_the_trip_through_the_store() -> None:
    import json

    assert Notice.from_json(json.loads(json.dumps(make().to_json()))) == make()


def test_the_credentials_of_a_target_never_show_in_a_traceback() -> None:
    assert "topsecret" not in repr(Target(name="t", kind="slack", url="https://x/topsecret", secret="topsecret"))


@given(st.integers(1, 10_000), st.text(max_size=20))
def test_retries_wait_longer_and_longer_up_to_a_bound(tries: int, name: str) -> None:
    waits = [retry_after_s(count, notice_id=name) for count in (tries, tries + 1)]
    assert 2.0 <= waits[0] <= waits[1] <= LAST_RETRY_S * 1.2


@given(st.integers(1, 50), st.floats(0, 1e9))
def test_a_service_that_says_how_long_is_heard_within_reason(tries: int, asked_s: float) -> None:
    wait_s = retry_after_s(tries, notice_id="x", asked_s=asked_s)
    assert min(asked_s, LONGEST_WAIT_S) <= wait_s <= LONGEST_WAIT_S


@given(st.sampled_from(sorted(LIMITS)), st.lists(st.floats(0, 5.0), min_size=1, max_size=150))
def test_no_window_ever_holds_more_sendings_than_the_service_allows(kind: str, pauses_s: list[float]) -> None:
    now_s = 1000.0
    sent_s: list[float] = []
    for pause_s in pauses_s:
        now_s += pause_s
        now_s = max(now_s, free_at_s(sent_s, LIMITS[kind], now_s=now_s))
        sent_s.append(now_s)
    for count, window_s in LIMITS[kind]:
        for first, later in zip(sent_s, sent_s[count:]):
            assert later - first >= window_s - 1e-6


def test_a_clock_that_was_set_back_does_not_silence_a_target_for_ever() -> None:
    assert free_at_s([9_000_000.0] * 20, LIMITS["dingtalk"], now_s=1000.0) <= 1000.0 + 60.0


def test_targets_without_a_name_are_called_by_their_kind() -> None:
    targets = with_name(
        [
            Target(name="", kind="slack"),
            Target(name="slack-2", kind="slack"),
            Target(name="", kind="slack"),
            Target(name="", kind="wecom"),
        ]
    )
    assert [target.name for target in targets] == ["slack", "slack-2", "slack-3", "wecom"]


def test_every_terminal_state_is_told() -> None:
    kinds = {make("state", f"{state.value}: x").kind for state in (State.SUCCEEDED, State.STOPPED, State.FAILED)}
    assert kinds == {"succeeded", "stopped", "failed"}
