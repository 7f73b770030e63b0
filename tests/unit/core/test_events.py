"""Events: round trip, messages, folding."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.events import EVENTS, Event, JobEvent, Severity, fold_events
from ascendrun.core.jobs.reasons import because
from ascendrun.core.records import as_record
from tests.lib.pages.events import events_told

HOSTS = tuple(f"npu{number:02d}" for number in range(1, 65))


def straggler(number: int, rank: int, *, at_s: float = 0.0, cause: str = "data", job: str = "j-0001") -> JobEvent:
    values = {"slower_by": rank / 10, "cause": cause, "is_node": False, "finding": f"{rank}", "likely_cause": "x"}
    return JobEvent(number, job, Event("straggler", values, (HOSTS[rank],), (rank,), 1, at_s))


@pytest.mark.parametrize("code", sorted(EVENTS))
def test_every_event_has_a_message_with_all_its_values(code: str) -> None:
    told = events_told()[code]
    event = Event(code, dict.fromkeys(told.values, 1), ("npu01",), (3,), 1, 5.0)
    for lang in ("en", "zh"):
        assert "?" not in event.message().render(lang).replace("（磁盘已满或故障？）", "").replace("disk?", "")
    assert told.meaning.endswith(".") and all(told.values.values())


def test_the_page_tells_of_events_that_exist() -> None:
    assert set(events_told()) == set(EVENTS)


def test_an_event_survives_the_trip_through_json() -> None:
    values = {
        "state": "FAILED",
        "reason": because("start-timeout", ["npu01", "npu02"], count=8, limit_s=600),
        "cause": "start-timeout",
    }
    event = Event("state-changed", values, ("npu01", "npu02"), (), 2, 9.0)
    assert Event.from_json(json.loads(json.dumps(event.to_json()))) == event
    assert event.severity is Severity.ERROR


def test_a_code_of_a_later_release_shows_as_it_is() -> None:
    event = Event.from_json({"code": "new-thing", "values": {"x": 1}})
    assert "new-thing" in str(event.message()) and event.severity is Severity.INFO


def test_stragglers_of_one_cause_at_one_time_are_one_line() -> None:
    folded = fold_events([straggler(rank, rank) for rank in range(12)])
    assert [(item.event.ranks, item.event.values["slower_by"]) for item in folded] == [(tuple(range(12)), 1.1)]
    apart = [straggler(1, 1), straggler(2, 2, cause="link"), straggler(3, 3, at_s=5.0), straggler(4, 4, job="j-0002")]
    assert fold_events(apart) == tuple(apart)


@given(st.lists(st.sampled_from(HOSTS), min_size=1, max_size=30))
def test_folding_loses_no_host(hosts: list[str]) -> None:
    events = [JobEvent(n, "j-0001", Event("processes-gone", {}, (host,), (), 1, 0.0)) for n, host in enumerate(hosts)]
    [item] = fold_events(events)
    assert set(item.event.hosts) == set(hosts)


def test_programs_get_a_nested_text_as_code_and_values() -> None:
    found = as_record({"reason": because("preflight-failed", ["npu01"], why=because("rejected", why="x"))})
    assert (found["reason"]["code"], found["reason"]["hosts"]) == ("preflight-failed", ["npu01"])
    assert (found["reason"]["why"]["code"], found["reason"]["why"]["why"]) == ("rejected", "x")
