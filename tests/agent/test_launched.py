"""Ranks below a launcher: the supervisor starts them in its place, so that their output and their ends are exact."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ascendrun.node.op_errors import message
from tests.agent.conftest import PY, TAG

LAUNCHER = """
import os, subprocess, sys, time
print("launching", flush=True)
count, first = int(sys.argv[1]), 2
ranks = [
    subprocess.Popen(sys.argv[3:], env=dict(os.environ, RANK=str(first + n), LOCAL_RANK=str(n)), start_new_session=True)
    for n in range(count)
]
while None in [rank.poll() for rank in ranks]:
    if sys.argv[2] == "gives-up" and os.path.exists("enough"):
        for rank in ranks:
            rank.terminate()
    if any(rank.returncode for rank in ranks):
        break
    time.sleep(0.02)
print([rank.wait() for rank in ranks] if sys.argv[2] == "waits" else "", flush=True)
sys.exit(any(rank.returncode for rank in ranks) or sys.argv[2] == "gives-up")
"""


def launched(node: Any, *words: str, code: str, ranks: int = 2, how: str = "waits", **fields: Any) -> dict[str, Any]:
    """A job of ranks 2 and 3, on node 1, that run `code` below a launcher."""
    launcher = {"argv": [PY, "-c", LAUNCHER, str(ranks), how], "command": [PY, "-c", code, *words], "env": {}}
    job = node.job(TAG, node_rank=1, launcher=launcher, **fields)
    job["ranks"] = [{"rank": 2 + n, "local_rank": n, "argv": [], "env": {"MINE": f"rank-{2 + n}"}} for n in range(2)]
    return job


def node_output(agent: Any, stream: str = "out") -> bytes:
    return bytes(agent.files.get((TAG, f"node-1.{stream}", 0), b""))


def test_each_rank_has_its_own_files_numbers_and_end(node: Any, agent: Any) -> None:
    code = "import os, sys; print(*map(os.environ.get, ['RANK', 'LOCAL_RANK', 'MINE', 'ASCENDRUN_JOIN']), sys.argv[1])"
    job = launched(node, "--local_rank=\1LOCAL_RANK\1", code=code)
    agent.start(job)
    assert agent.wait_ended(TAG)["codes"] == {"-2": 0, "2": 0, "3": 0}
    assert [(e["rank"], e["local_rank"]) for e in agent.told(TAG, "rank_started")][0] == (-2, 0)
    assert {e["rank"]: e["local_rank"] for e in agent.told(TAG, "rank_started")} == {-2: 0, 2: 0, 3: 1}
    agent.wait(lambda: agent.output(TAG, 3) == b"3 1 rank-3 None --local_rank=1\n")
    agent.wait(lambda: agent.output(TAG, 2) == b"2 0 rank-2 None --local_rank=0\n")
    agent.wait(lambda: node_output(agent) == b"launching\n[0, 0]\n")
    assert not agent.told(TAG, "stopping")


@pytest.mark.parametrize(
    "end, code, number",
    [("sys.exit(7)", 7, None), ("os.kill(os.getpid(), 9)", None, 9), ("os.kill(os.getpid(), 11)", None, 11)],
)
def test_the_first_failure_is_the_ranks_and_not_a_byte_before_it_is_lost(
    node: Any, agent: Any, end: str, code: int | None, number: int | None
) -> None:
    lasting = "import os, sys, time\nprint('x' * 3000000, flush=True)\n"
    meets = "while not os.path.exists('up'): time.sleep(0.02)\n"  # both ranks run before one of them ends
    failing = f"if os.environ['RANK'] == '3':\n    {meets}    {end}\nopen('up', 'w')\ntime.sleep(600)"
    agent.start(launched(node, code=lasting + failing))
    ended = agent.wait_ended(TAG)
    first = agent.told(TAG, "rank_exited")[0]
    assert (first["rank"], first["code"], first["signal"], first["stopped"]) == (3, code, number, False)
    (stopping,) = agent.told(TAG, "stopping")
    assert stopping["reason"] == message("rank-killed" if number else "rank-exited", rank=3, code=code, signal=number)
    assert ended["codes"]["3"] == (code or -(number or 0)) and ended["exits"]["2"]["stopped"]
    agent.wait(lambda: agent.output(TAG, 3) == b"x" * 3000000 + b"\n")
    agent.wait_phase(TAG, "ended")
    assert node.alive(TAG) == []


def test_a_stop_gives_the_ranks_their_grace_and_the_launcher_sees_them_end(node: Any, agent: Any) -> None:
    save = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    agent.start(launched(node, code=save, stop={"signal": "TERM", "grace_s": 300}))
    agent.wait(lambda: agent.output(TAG, 2) == agent.output(TAG, 3) == b"ready\n")
    agent.do("stop", tag=TAG, now=False, grace_s=300)
    assert agent.wait_ended(TAG)["codes"] == {"-2": 0, "2": 0, "3": 0}
    agent.wait(lambda: agent.output(TAG, 2) == agent.output(TAG, 3) == b"ready\nsaved\n")
    agent.wait(lambda: node_output(agent) == b"launching\n[0, 0]\n")


def test_ranks_that_their_launcher_ends_are_stopped_and_the_launcher_is_the_failure(node: Any, agent: Any) -> None:
    agent.start(launched(node, code="import time; print('ready', flush=True); time.sleep(600)", how="gives-up"))
    agent.wait(lambda: agent.output(TAG, 2) == agent.output(TAG, 3) == b"ready\n")
    (Path(node.work("head-job")) / "enough").touch()
    ended = agent.wait_ended(TAG)
    assert {number: (row["code"], row["signal"], row["stopped"]) for number, row in ended["exits"].items()} == {
        "-2": (1, None, False),
        "2": (None, signal.SIGTERM, True),
        "3": (None, signal.SIGTERM, True),
    }
    assert not agent.told(TAG, "stopping", by="failure")


def test_a_launcher_that_is_killed_ends_its_ranks(node: Any, agent: Any) -> None:
    agent.start(launched(node, code="import time; print('ready', flush=True); time.sleep(600)"))
    agent.wait(lambda: agent.output(TAG, 2) == agent.output(TAG, 3) == b"ready\n")
    os.kill(agent.told(TAG, "rank_started", rank=-2)[0]["pid"], signal.SIGKILL)
    ended = agent.wait_ended(TAG)
    assert agent.told(TAG, "rank_exited")[0]["rank"] == -2 and ended["codes"]["-2"] == -9
    assert agent.told(TAG, "stopping")[0]["reason"] == message("launcher-killed", rank=-2, code=None, signal=9)
    agent.wait_phase(TAG, "ended")
    assert node.alive(TAG) == []


def test_a_launcher_that_starts_no_rank_fails_with_what_it_printed(node: Any, agent: Any) -> None:
    job = launched(node, code="")
    job["launcher"]["argv"] = [PY, "-c", "import sys; sys.exit('no rendezvous')"]
    agent.start(job)
    assert agent.wait_ended(TAG)["codes"] == {"-2": 1, "2": None, "3": None}
    agent.wait(lambda: node_output(agent, "err") == b"no rendezvous\n")


def test_the_setup_is_that_of_the_launcher_and_of_its_ranks(node: Any, agent: Any, tmp_path: Path) -> None:
    set_env = tmp_path / "set_env.sh"
    set_env.write_text("export TOOLKIT=here; [ $# = 0 ]\n")
    job = launched(node, code="import os; print(os.environ.get('TOOLKIT'), os.environ['MINE'])")
    job["setup"] = f"source {set_env}"
    agent.start(job)
    assert agent.wait_ended(TAG)["codes"] == {"-2": 0, "2": 0, "3": 0}
    agent.wait(lambda: agent.output(TAG, 2) == b"here rank-2\n" and agent.output(TAG, 3) == b"here rank-3\n")


def test_a_failed_setup_ends_the_launcher_without_ranks(node: Any, agent: Any) -> None:
    job = launched(node, code="print(1)")
    job["setup"] = "echo no toolkit here >&2; false"
    agent.start(job)
    agent.wait_ended(TAG)
    (failed,) = agent.told(TAG, "start_failed")
    assert failed["code"] == "setup-failed" and failed["rank"] is None
    assert failed["message"]["values"]["output"] == "no toolkit here", failed
    assert {event["rank"] for event in agent.told(TAG, "rank_started")} == {-2}


def test_a_rank_that_is_not_of_this_node_is_refused(node: Any, agent: Any) -> None:
    agent.start(launched(node, code="import time; time.sleep(600)", ranks=3, how="leaves"))
    assert agent.wait_ended(TAG)["codes"]["-2"] == 1
    assert {e["rank"] for e in agent.told(TAG, "rank_started")} <= {-2, 2, 3}


def test_a_process_that_forks_its_ranks_itself_is_none_of_them(node: Any, agent: Any) -> None:
    fork = (
        "import os, subprocess, sys\n"
        "wait = [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(600)']\n"
        "own = dict(os.environ, WORLD_SIZE='4', LOCAL_WORLD_SIZE='2')\n"
        "ranks = [subprocess.Popen(wait, env=dict(own, RANK=str(rank))) for rank in (1, 3)]\n"
        "[rank.wait() for rank in ranks]"
    )
    job = node.job(TAG, [PY, "-c", fork], node_rank=1)
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "ASCENDRUN_FORKS": "1 2 1"}
    job["ranks"][0].update(rank=1, env=env)
    agent.start(job)
    # They share a pipe, so that unbuffered lines may mix. What they print is of the node, not of rank 1.
    agent.wait(lambda: agent.output(TAG, -2).count(b"1") == 2)
    assert agent.output(TAG, 1) == b""
    assert [row["rank"] for row in agent.do("stacks", tag=TAG)["ranks"]] == [1, 3]
    assert agent.refused("rank_process", tag=TAG, rank=0)["code"] == "rank-not-running"
    agent.end(TAG)
