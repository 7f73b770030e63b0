"""Hung jobs: the rank that the others wait for is named, a job that may restart is stopped with its stacks.

The windows are divided by ASCENDRUN_HANG_DIVISOR: 4.5 s without a step instead of 90 s, 45 s to act instead of 900 s.
"""

import json
import os
import shutil
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from scenes import Scene, await_that

PROGRAM = Path(__file__).with_name("hanging.py")
DIVISOR = {"ASCENDRUN_HANG_DIVISOR": "20"}
HANG_S = 300
KINDS = {"deadlock": "read_shard", "loader": "next_batch", "pipe": "write_all", "collective": "barrier"}
"""With the function in which the rank then is."""


@pytest.fixture
def scene(ascendrun: Any, cluster: Any) -> Scene:
    made = Scene(ascendrun, cluster)
    shutil.copy(PROGRAM, made.folder / "code")
    return made


def start(
    scene: Scene, kind: str, odd: int = 3, *, more: str = "", python: str = "python3", divisor: dict[str, str] = DIVISOR
) -> str:
    command = [python, "hanging.py", kind, str(odd), "20"]
    more = f"sampling: {{interval_s: {0.5 if divisor else 5}}}\n{more}"
    job = scene.start(scene.job(kind, command=command, slots=2 * len(KINDS) + 2, more=more), env=divisor)
    scene.await_line(job, "trains", count=4)
    return job


def events(scene: Scene, job: str, code: str) -> list[dict[str, Any]]:
    return [event for event in scene.show(job)["events"] if event["code"] == code]


def ask(scene: Scene, *words: str) -> dict[str, Any]:
    answer: dict[str, Any] = scene.ascendrun.ask(*words)
    return answer


def pid_of(scene: Scene, job: str, host: str, rank: int) -> int:
    """As the machine sees it."""
    for pid in scene.ranks_of(job, host):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"rank {rank} does not run on {host}")


def is_first(path: Path) -> bool:
    return path.parent.parent.name == "attempt-1"


def read_time(text: str) -> float:
    """UTC seconds, of what `show -o json` prints."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


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
        files = [path for path in scene.spooled(job, "rank-*.err.0") if is_first(path)]
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
def test_a_rank_that_waits_for_its_disk_is_saving_and_its_job_goes_on_when_the_disk_is_done(
    scene: Scene, request: pytest.FixtureRequest
) -> None:
    """Its stacks take 8 s, since it prints none: the windows are only a fifth as long."""
    hang_s, divisor = 75, 5
    disk = scene.cluster.file_system("node2", "/saved")
    request.addfinalizer(disk.heal)
    disk.stick(only="fsync")
    more = f"timeouts: {{hang_s: {hang_s}}}\nenv: {{SAVED: /saved}}\n"
    job = start(scene, "disk", more=more, divisor={"ASCENDRUN_HANG_DIVISOR": str(divisor)})
    await_that(lambda: bool(events(scene, job, "hang")), "a disk that takes nothing is reported in the end")
    (event,) = events(scene, job, "hang")
    quiet_s = read_time(event["at"]) - event["values"]["since_s"]
    assert event["ranks"] == [3] and quiet_s >= 4 * hang_s / divisor, event
    disk.heal()
    await_that(lambda: bool(events(scene, job, "hang-resolved")), "the job trains on")
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


@pytest.mark.timeout(0)
@pytest.mark.usefixtures("only_real_time")
def test_in_real_time_each_kind_is_known_within_120_s_and_stopped_30_s_after_its_limit(scene: Scene) -> None:
    pytest.importorskip("torch")
    more = f"timeouts: {{hang_s: {HANG_S}}}\nrestart: {{max_restarts: 1, backoff_s: [1, 2]}}\n"
    jobs = {
        kind: start(scene, kind, 2, more=more, python=sys.executable, divisor={}) for kind in ("none", *sorted(KINDS))
    }
    os.kill(pid_of(scene, jobs["none"], "node2", 2), signal.SIGSTOP)
    known: dict[str, tuple[list[int], float, float]] = {}
    for kind, job in jobs.items():
        await_that(lambda job=job: scene.show(job)["job"]["attempt"] == 2, f"{kind} restarts", deadline_s=3 * HANG_S)
        hang = next(event for event in events(scene, job, "hang") if event["attempt"] == 1)
        stopping = next(one for one in events(scene, job, "state-changed") if one["values"]["state"] == "STOPPING")
        metrics = [path.read_text().splitlines() for path in scene.spooled(job, "rank-*.metrics.0") if is_first(path)]
        since_s = max(json.loads(lines[-1])["timestamp"] for lines in metrics)
        known[kind] = hang["ranks"], read_time(hang["at"]) - since_s, read_time(stopping["at"]) - since_s
        logs = [path.read_text() for path in scene.spooled(job, "rank-*.err.0") if is_first(path)]
        print(kind, known[kind], sum("most recent call first" in log for log in logs), "stacks", flush=True)
        assert all("most recent call first" in log for log in logs) and len(logs) == 4, kind
        scene.ascendrun("stop", "--now", job)
    assert {kind: ranks for kind, (ranks, _, _) in known.items()} == dict.fromkeys(jobs, [2])
    assert all(known_s <= 120 and stopped_s <= HANG_S + 30 for _, known_s, stopped_s in known.values()), known
