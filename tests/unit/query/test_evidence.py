"""Which attempt is explained, and what of the job's story belongs to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.events import Event
from ascendrun.core.jobs.inputs import DependencyFailed
from ascendrun.core.jobs.job import Cause, Job, State
from ascendrun.core.jobs.lifecycle import advance
from ascendrun.core.jobs.reasons import because
from ascendrun.core.jobs.schedule import check_dependency
from ascendrun.head.state.job_table import StoredJob
from ascendrun.health.diagnosis import diagnose, render
from ascendrun.query.evidence import attempt_to_explain, events_of_attempt, read_evidence
from ascendrun.text import Text
from tests.lib.demo_jobs import demo_job


def changed(seq: int, state: str, attempt: int, reason: Text, cause: str | None = None) -> Event:
    return Event("state-changed", {"state": state, "reason": reason, "cause": cause}, (), (), attempt, 100.0 + seq)


EXITED = because("rank-exited", ["n1"], [1], code=1)
EVENTS = [
    Event("submitted", {"name": "demo"}, ("n1",), (), 1, 100.0),
    changed(1, "RUNNING", 1, because("running", count=2)),
    changed(2, "STOPPING", 1, EXITED, "failure"),
    changed(3, "BACKOFF", 1, EXITED, "failure"),
    changed(4, "QUEUED", 2, because("next-attempt", attempt=2)),
    changed(5, "CHECKING", 2, because("nodes-available", count=1)),
    changed(6, "STOPPING", 2, because("stopped-by-user"), "user"),
    changed(7, "STOPPED", 2, because("stopped-by-user"), "user"),
]


def make_job(**changes: Any) -> Job:
    job = demo_job(run="h-j-0001", hosts=("n1",), state=State.FAILED, attempt=2, world_size=2)
    return replace(job, **changes)


def stored(job: Job) -> StoredJob:
    return StoredJob(
        job,
        "key",
        {"devices": {"type": "npu", "ids": [4, 5]}, "env": {"HCCL_CONNECT_TIMEOUT": "300"}},
        [{"name": "n1", "addr": "10.0.0.1"}],
        [],
        None,
    )


def test_each_attempt_has_its_own_part_of_the_story_and_the_decision_that_followed() -> None:
    first, second = events_of_attempt(EVENTS, 1), events_of_attempt(EVENTS, 2)
    assert [event.values["state"] for event in first] == ["RUNNING", "STOPPING", "BACKOFF", "QUEUED"]
    assert [event.values["state"] for event in second] == ["QUEUED", "CHECKING", "STOPPING", "STOPPED"]


@pytest.mark.parametrize(
    "changes, attempt",
    [
        ({"state": State.QUEUED}, 1),
        ({"state": State.CHECKING}, 1),
        ({"state": State.RUNNING, "go_sent_at_s": 5.0}, 2),
        ({"state": State.FAILED}, 2),
        ({"state": State.QUEUED, "attempt": 1}, 1),
    ],
)
def test_an_attempt_that_only_waits_has_nothing_to_say(changes: dict[str, Any], attempt: int) -> None:
    assert attempt_to_explain(make_job(**changes)) == attempt


@pytest.mark.parametrize("attempt, cause", [(1, "failure"), (2, "user")])
def test_why_an_attempt_was_stopped_is_known_of_earlier_ones_too(tmp_path: Path, attempt: int, cause: str) -> None:
    job = make_job(state=State.STOPPED, cause=Cause.USER)
    assert read_evidence(tmp_path, stored(job), EVENTS, attempt=attempt, now_s=200.0).cause == cause


def test_a_stage_that_was_called_off_leads_to_the_one_that_failed(tmp_path: Path) -> None:
    failed = make_job(id="j-0001-2", stage="train", state=State.FAILED)
    queued = make_job(id="j-0001-3", state=State.QUEUED, attempt=1, world_size=0, needs="j-0001-2")
    verdict = check_dependency(queued, failed)
    assert isinstance(verdict, DependencyFailed)
    called_off = advance(queued, verdict, now_s=50.0)
    story = called_off.events
    told = render(diagnose(read_evidence(tmp_path, stored(called_off.job), story, now_s=60.0)))
    assert (told.code, told.confidence.value, told.retry) == ("stage-skipped", "certain", "unknown")
    assert "j-0001-2" in told.message
    assert told.hint == "ascendrun explain j-0001-2"
    assert (
        read_evidence(tmp_path, stored(replace(called_off.job, attempt=2)), story, attempt=1, now_s=60.0).cause
        == "need"
    )


def test_what_a_supervisor_recorded_becomes_a_rank(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "j-0001" / "attempt-2" / "n1"
    folder.mkdir(parents=True)
    records = [
        {"event": "rank_started", "rank": 1, "local_rank": 1, "pid": 77, "at_ns": 1},
        {
            "event": "rank_exited",
            "rank": 1,
            "code": None,
            "signal": 9,
            "stopped": False,
            "at_ns": 5 * 10**9,
            "exited_ns": 4 * 10**9,
        },
        {"event": "stopping", "by": "failure", "reason": "rank 1", "at_ns": 6 * 10**9},
        {"event": "ended"},
    ]
    torn = b'{"event": "rank_exi'
    (folder / "events.0").write_bytes("".join(json.dumps(one) + "\n" for one in records).encode() + torn)
    evidence = read_evidence(tmp_path, stored(make_job()), EVENTS, now_s=200.0)
    assert len(evidence.ranks) == 1
    rank = evidence.ranks[0]
    assert (rank.rank, rank.pid, rank.device, rank.signal, rank.exited_at_s) == (1, 77, 5, 9, 4.0)
    host = evidence.host("n1")
    assert (host.stopped_at_s, host.has_ended, host.addresses) == (6.0, True, ("10.0.0.1", "n1"))
    assert evidence.connect_timeout_s == 300.0


def test_of_an_attempt_that_left_nothing_it_is_said(tmp_path: Path) -> None:
    missing = read_evidence(tmp_path, stored(make_job()), EVENTS, now_s=200.0).missing
    assert [(text.key, text.values) for text in missing] == [("explain.no-files", {"attempt": 2})]
