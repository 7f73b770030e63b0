"""The story of stragglers: told once when they appear, once when they are gone, and known again after a restart."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

import pytest

from ascendrun.core.jobs.job import Job, NodeProgress, State
from ascendrun.head.loop.stragglers import APPEARED, GONE, Known, Straggling, known_from_story, take_look
from ascendrun.health.stragglers.causes import Sign
from ascendrun.health.stragglers.detect import Straggler


def slow(rank: int | None, host: str = "a") -> Straggler:
    return Straggler(rank, host, (rank or 0,), 100.0, 1.3, 0.2, None, ())


def looks(*turns: Sequence[Straggler]) -> list[tuple[str, str]]:
    known, story = Known(1), []
    for found in turns:
        known, lines = take_look(known, found)
        story += [(kind, text.split(" is slow")[0]) for kind, text in lines]
    return story


def test_a_straggler_is_told_once_however_long_it_stays() -> None:
    assert looks([slow(5)], [slow(5)], [slow(5)]) == [(APPEARED, "rank 5 on a")]


def test_it_is_told_to_keep_up_again_once_it_was_missing_twice() -> None:
    assert looks([slow(5)], [], [slow(5)], [], []) == [(APPEARED, "rank 5 on a"), (GONE, "rank 5 on a keeps up again")]


def test_a_rank_whose_whole_node_becomes_slow_has_not_become_faster() -> None:
    assert looks([slow(5)], [slow(None)], [slow(None)], [], []) == [
        (APPEARED, "rank 5 on a"),
        (APPEARED, "a (ranks 0)"),
        (GONE, "a keeps up again"),
    ]


def test_what_an_earlier_controller_told_is_not_told_again() -> None:
    story = [
        ("state", "STARTING: x"),
        (APPEARED, "rank 1 on b is slow: 30 % more"),
        (APPEARED, "c (ranks 0-7) is slow"),
        (APPEARED, "rank 5 on a is slow"),
        (GONE, "rank 1 on b keeps up again"),
        ("note", "rank 9 on z: odd"),
    ]
    known = known_from_story(1, story)
    assert dict(known.missing) == {("c", None): 0, ("a", 5): 0}
    assert take_look(known, [slow(5), slow(None, "c")])[1] == ()


def test_another_attempt_begins_with_no_stragglers() -> None:
    story = [
        ("state", "STARTING: x"),
        (APPEARED, "rank 5 on a is slow"),
        ("state", "BACKOFF: y"),
        ("state", "STARTING: z"),
    ]
    assert dict(known_from_story(2, story).missing) == {}


class Desk:
    """The controller's thread, as far as a look needs it."""

    def __init__(self, state_dir: Path) -> None:
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.told: list[tuple[str, str, str]] = []
        self.disk_is_full = False
        self.straggling = Straggling(
            state_dir,
            post=self.calls.put,
            tell=self._tell,
            story=lambda job_id: [(kind, text) for _, kind, text in self.told],
        )

    def _tell(self, job_id: str, lines: Sequence[tuple[str, str]]) -> None:
        if self.disk_is_full:
            raise OSError("no space left")
        self.told += [(job_id, kind, text) for kind, text in lines]

    def look(self, job: Job) -> None:
        self.straggling.look([job])
        self.calls.get(timeout=30)()


def make_job(state: State = State.RUNNING) -> Job:
    nodes = (NodeProgress(host="a", node_rank=0, ranks=(0, 1)), NodeProgress(host="b", node_rank=1, ranks=(2, 3)))
    return Job(
        id="j-0001",
        name="n",
        run="h-j-0001",
        hosts=("a", "b"),
        grace_s=1,
        start_s=1,
        created_at_s=0.0,
        state=state,
        world_size=4,
        nodes=nodes,
    )


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
    [(job, kind, text)] = desk.told
    assert (job, kind) == ("j-0001", APPEARED)
    assert text.startswith("rank 2 on b is slow: ") and "50%" in text and "30%" in text
    write_steps(tmp_path, slow_rank=None, first=41)
    desk.look(make_job())
    desk.look(make_job())
    assert [kind for _, kind, _ in desk.told] == [APPEARED, GONE]


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
    desk.straggling.look([make_job(State.STOPPING), make_job(State.SUCCEEDED)])
    assert desk.calls.empty() and desk.told == []


def test_a_story_that_cannot_be_written_now_is_told_later(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    write_steps(tmp_path, slow_rank=2, first=1)
    desk.disk_is_full = True
    with pytest.raises(OSError, match="no space left"):
        desk.look(make_job())
    desk.disk_is_full = False
    desk.look(make_job())
    assert [kind for _, kind, _ in desk.told] == [APPEARED]


def test_the_sign_of_a_straggler_stands_in_its_line(tmp_path: Path) -> None:
    from dataclasses import replace

    from ascendrun.health.stragglers.causes import Mark

    one = replace(slow(5), sign=Sign.FREQUENCY, evidence=(Mark(Sign.FREQUENCY, "frequency_mhz", 900.0, 1800.0),))
    [(_, text)] = take_look(Known(1), [one])[1]
    assert "900 MHz" in text and "1800 MHz" in text
