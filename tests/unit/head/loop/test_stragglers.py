"""The story of stragglers: told once when they appear, once when they are gone, and known again after a restart."""

from __future__ import annotations

import json
import queue
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import pytest

from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Job, NodeProgress, State
from ascendrun.head.loop.stragglers import APPEARED, GONE, Known, StragglerMonitor, known_from_events, update_known
from ascendrun.health.stragglers.causes import StragglerCause
from ascendrun.health.stragglers.detect import Straggler
from ascendrun.text import Text
from tests.lib.demo_jobs import demo_job


def slow(rank: int | None, host: str = "a") -> Straggler:
    return Straggler(rank, host, (rank or 0,), 100.0, 1.3, 0.2, None, ())


def event(code: str, rank: int | None, host: str, attempt: int = 1) -> Event:
    return Event(code, {"is_node": rank is None}, (host,), () if rank is None else (rank,), attempt)


def who(event: Event) -> tuple[str, str, int | None]:
    return event.code, event.hosts[0], None if event.values["is_node"] else event.ranks[0]


def looks(*turns: Sequence[Straggler]) -> list[tuple[str, str, int | None]]:
    known, events = Known(1), []
    for found in turns:
        known, new = update_known(known, found)
        events += [who(event) for event in new]
    return events


def test_a_straggler_is_recorded_once_however_long_it_stays() -> None:
    assert looks([slow(5)], [slow(5)], [slow(5)]) == [(APPEARED, "a", 5)]


def test_it_is_resolved_once_it_was_missing_twice() -> None:
    assert looks([slow(5)], [], [slow(5)], [], []) == [(APPEARED, "a", 5), (GONE, "a", 5)]


def test_a_rank_whose_whole_node_becomes_slow_has_not_become_faster() -> None:
    assert looks([slow(5)], [slow(None)], [slow(None)], [], []) == [
        (APPEARED, "a", 5),
        (APPEARED, "a", None),
        (GONE, "a", None),
    ]


def test_what_an_earlier_controller_recorded_is_not_recorded_again() -> None:
    events = [
        event(APPEARED, 1, "b"),
        event(APPEARED, None, "c"),
        event(APPEARED, 5, "a"),
        event(GONE, 1, "b"),
        Event("preflight-warning", {"warning": "rank 9 on z: odd"}, attempt=1),
    ]
    known = known_from_events(1, events)
    assert dict(known.missing) == {("c", None): 0, ("a", 5): 0}
    assert update_known(known, [slow(5), slow(None, "c")])[1] == ()


def test_another_attempt_begins_with_no_stragglers() -> None:
    assert dict(known_from_events(2, [event(APPEARED, 5, "a")]).missing) == {}


class Desk:
    """The controller's thread, as far as a look needs it."""

    def __init__(self, state_dir: Path) -> None:
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.told: list[Event] = []
        self.disk_is_full = False
        steps = SimpleNamespace(record=self._record, events_of=lambda job_id: self.told)
        context: Any = SimpleNamespace(state_dir=state_dir, post=self.calls.put, steps=steps)
        self.straggling = StragglerMonitor(context)

    def _record(self, job_id: str, events: Sequence[Event]) -> None:
        if self.disk_is_full:
            raise OSError("no space left")
        self.told += events

    def look(self, job: Job) -> None:
        self.straggling.check([job])
        self.calls.get(timeout=60)()


def make_job(state: State = State.RUNNING) -> Job:
    nodes = (NodeProgress(host="a", node_rank=0, ranks=(0, 1)), NodeProgress(host="b", node_rank=1, ranks=(2, 3)))
    return demo_job(name="n", run="h-j-0001", created_at_s=0.0, state=state, world_size=4, nodes=nodes)


def write_steps(state_dir: Path, *, slow_rank: int | None, first: int) -> None:
    now_s = time.time()
    for rank in range(4):
        folder = state_dir / "jobs" / "j-0001" / "attempt-1" / ("a" if rank < 2 else "b")
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"rank-{rank}.metrics.0", "a") as file:
            for step in range(first, first + 40):
                comm_s = 0.1 if rank == slow_rank else 0.4
                file.write(json.dumps({"step": step, "at_s": now_s + step, "step_s": 1.0, "comm_s": comm_s}) + "\n")


def test_the_ranks_own_files_lead_to_a_line_in_the_story(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.look(make_job())
    assert desk.told == []
    write_steps(tmp_path, slow_rank=2, first=1)
    desk.look(make_job())
    desk.look(make_job())
    [found] = desk.told
    assert who(found) == (APPEARED, "b", 2)
    assert (found.values["slower_by"], found.values["step_fraction"]) == (0.5, 0.3)
    write_steps(tmp_path, slow_rank=None, first=41)
    desk.look(make_job())
    desk.look(make_job())
    assert [event.code for event in desk.told] == [APPEARED, GONE]


def test_a_search_that_fails_is_repeated_by_the_next_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(tmp_path)
    write_steps(tmp_path, slow_rank=2, first=1)
    for python in ("/bin/false", "/nonexistent"):
        monkeypatch.setattr("sys.executable", python)
        desk.look(make_job())
        line = rf"controller: cannot search for stragglers: .*{python}.* \(next search in \d+ s, `ascendrun top` shows"
        assert desk.told == [] and re.search(line, capfd.readouterr().err)
        monkeypatch.undo()
    desk.look(make_job())
    assert [event.code for event in desk.told] == [APPEARED]


def test_a_new_controller_does_not_tell_what_stands_in_the_story(tmp_path: Path) -> None:
    first, second = Desk(tmp_path), Desk(tmp_path)
    write_steps(tmp_path, slow_rank=2, first=1)
    first.look(make_job())
    second.told = list(first.told)
    second.look(make_job())
    assert len(second.told) == 1


def test_only_jobs_that_run_are_looked_at(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    write_steps(tmp_path, slow_rank=2, first=1)
    desk.straggling.check([make_job(State.STOPPING), make_job(State.SUCCEEDED)])
    assert desk.calls.empty() and desk.told == []


def test_a_story_that_cannot_be_written_now_is_told_later(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    write_steps(tmp_path, slow_rank=2, first=1)
    desk.disk_is_full = True
    with pytest.raises(OSError, match="no space left"):
        desk.look(make_job())
    desk.disk_is_full = False
    desk.look(make_job())
    assert [event.code for event in desk.told] == [APPEARED]


def test_the_sign_of_a_straggler_stands_in_its_line(tmp_path: Path) -> None:
    from dataclasses import replace

    from ascendrun.health.stragglers.causes import Mark

    one = replace(
        slow(5),
        cause=StragglerCause.FREQUENCY,
        evidence=(Mark(StragglerCause.FREQUENCY, Text("straggler.clock", "", here=900.0, others=1800.0)),),
    )
    [found] = update_known(Known(1), [one])[1]
    assert found.values["cause"] == "frequency"
    [metric] = found.values["likely_cause"].values["metrics"]
    assert metric.values == {"here": 900.0, "others": 1800.0}
