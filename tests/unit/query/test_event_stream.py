"""What the store tells of the past: running time, lost nodes, restarts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Cause, Job, Request, State
from ascendrun.head.state.store import Store
from ascendrun.health.forecast import History
from ascendrun.query.event_stream import read_history

DAY_S = 86400.0


def test_where_nothing_was_ever_submitted_there_is_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path, now_s=1.0) == History()


def test_running_time_and_lost_nodes_are_read_from_the_story(tmp_path: Path) -> None:
    store = Store.open(tmp_path)

    def add(key: str) -> Job:
        return store.jobs.add(
            key=key,
            spec={},
            hosts=[],
            trees=[],
            file=None,
            now_s=0.0,
            make_job=lambda i, h: Job(
                id=i,
                name=key,
                run=f"{h}-{i}",
                hosts=("a", "b"),
                pool=("a", "b"),
                request=Request(2),
                grace_s=1,
                start_s=1,
                created_at_s=0.0,
            ),
        )

    lost, live = add("lost"), add("live")
    for state, at_s in [("STARTING", 10.0), ("RUNNING", 20.0), ("STOPPING", DAY_S + 20), ("FAILED", DAY_S + 30)]:
        later = Event("state-changed", {"state": "MOVED"}, at_s=at_s)
        store.jobs.save(lost, [Event("state-changed", {"state": state}, at_s=at_s), later], now_s=at_s)
    store.jobs.save(replace(lost, state=State.FAILED, cause=Cause.NODE_LOST), [], now_s=DAY_S + 30)
    store.jobs.save(
        replace(live, state=State.RUNNING), [Event("state-changed", {"state": "RUNNING"}, at_s=DAY_S)], now_s=DAY_S
    )
    store.close()
    history = read_history(tmp_path, now_s=2 * DAY_S)
    assert history.node_days == pytest.approx(2 + 2)
    assert history.failures == 1 and history.restarts_s == ()
