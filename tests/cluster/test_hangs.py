"""Hung jobs: the rank that the others wait for is named, a job that may restart is stopped with its stacks.

The windows are divided by ASCENDRUN_HANG_DIVISOR: 4.5 s without a step instead of 90 s, 45 s to act instead of 900 s.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from scenes import Scene, await_that

PROGRAM = Path(__file__).with_name("hanging.py")
DIVISOR = {"ASCENDRUN_HANG_DIVISOR": "20"}
KINDS = {"deadlock": "read_shard", "loader": "next_batch", "pipe": "write_all", "collective": "barrier"}
"""With the function in which the rank then is."""


@pytest.fixture
def scene(ascendrun: Any, cluster: Any) -> Scene:
    made = Scene(ascendrun, cluster)
    shutil.copy(PROGRAM, made.folder / "code")
    return made


def start(scene: Scene, kind: str, odd: int = 3, *, more: str = "", python: str = "python3") -> str:
    command = [python, "hanging.py", kind, str(odd), "20"]
    job = scene.start(scene.job(kind, command=command, more=f"sampling: {{interval_s: 0.5}}\n{more}"), env=DIVISOR)
    scene.await_line(job, "trains", count=4)
    return job


def events(scene: Scene, job: str, code: str) -> list[dict[str, Any]]:
    return [event for event in scene.show(job)["events"] if event["code"] == code]


def ask(scene: Scene, *words: str) -> dict[str, Any]:
    done = scene.ascendrun(*words, "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def pid_of(scene: Scene, job: str, host: str, rank: int) -> int:
    """As the machine sees it."""
    for pid in scene.ranks_of(job, host):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"rank {rank} does not run on {host}")


def test_a_stopped_rank_is_named_and_when_it_continues_the_job_trains_on(scene: Scene) -> None:
    job = start(scene, "none")
    pid = pid_of(scene, job, "node2", 3)
    os.kill(pid, signal.SIGSTOP)
    await_that(lambda: bool(events(scene, job, "hang")), "the hang is reported")
    (event,) = events(scene, job, "hang")
    assert (event["hosts"], event["ranks"]) == (["node2"], [3])
    assert {"no-step", "rank-differs", "stacks"} <= set(event["values"]["signs"])
    assert event["values"]["others"] == "all_reduce" and event["values"]["hang_s"] is None
    found = ask(scene, "explain", job)["diagnosis"]
    assert (found["code"], found["ranks"], found["hosts"]) == ("hangs", [3], ["node2"])
    groups = ask(scene, "stacks", job)["groups"]
    assert [(group["ranks"], group["state"], group["is_awaited"]) for group in groups] == [
        ([0, 1, 2], "S", False),
        ([3], "T", True),
    ]
    assert "all_reduce" in groups[0]["frames"][0]
    os.kill(pid, signal.SIGCONT)
    await_that(lambda: bool(events(scene, job, "hang-resolved")), "it is resolved")
    assert scene.state(job) == "RUNNING" and len(scene.everywhere(job)) == 4
    scene.ascendrun("stop", "--now", job)


def test_a_hung_job_that_may_restart_ends_with_its_stacks_and_starts_again(scene: Scene) -> None:
    job = start(scene, "none", more="timeouts: {hang_s: 40}\nrestart: {max_restarts: 1, backoff_s: [1, 2]}\n")
    os.kill(pid_of(scene, job, "node2", 3), signal.SIGSTOP)
    await_that(lambda: scene.show(job)["job"]["attempt"] == 2, "it is started again")

    def last_words(part: str) -> int:
        files = [path for path in scene.spooled(job, "rank-*.err.0") if "attempt-1" in str(path)]
        return sum(part in path.read_text() for path in files)

    await_that(lambda: last_words("most recent call first") == 4, "the stacks of all ranks are here")
    await_that(lambda: last_words("all_reduce") >= 3, "with the frames of those that wait")
    kept = ask(scene, "stacks", job, "--attempt", "1")
    assert (kept["attempt"], sorted(rank for group in kept["groups"] for rank in group["ranks"])) == (1, [0, 1, 2, 3])
    assert [group["ranks"] for group in kept["groups"] if group["is_awaited"]] == [[3]] and kept["at"]
    assert ask(scene, "explain", job, "--attempt", "1")["stacks"]
    scene.await_line(job, "trains", count=8)
    scene.ascendrun("stop", "--now", job)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_hang_names_its_rank_and_where_it_is(scene: Scene, kind: str) -> None:
    """With gloo: idle ranks wait, and so does the rank that they wait for."""
    pytest.importorskip("torch")
    job = start(scene, kind, odd=2, python=sys.executable)
    await_that(lambda: bool(events(scene, job, "hang")), "the hang is reported")
    (event,) = events(scene, job, "hang")
    assert (event["hosts"], event["ranks"]) == (["node2"], [2]), event
    assert KINDS[kind] in event["values"]["where"] and event["values"]["others"] == "all_reduce"
    scene.ascendrun("stop", "--now", job)
