"""Which orders of the agent wait for each other, and when it ends."""

import json
import subprocess
import sys
from pathlib import Path

ASK = """
import json, sys
from ascendrun.node.agent.serve import Agent
agent = Agent(sys.argv[1], agent=["agent.pyz"], umask=0o077, in_fd=0, out_fd=1)
print(json.dumps([agent.queue_of(op, header) for op, header in json.loads(sys.argv[2])]), file=sys.stderr)
"""


def lanes_of(root: Path, *orders: tuple[str, str]) -> list[str]:
    """Asked in a process of its own: an agent that nobody listens to ends its process."""
    asked = json.dumps([(op, {"tag": tag}) for op, tag in orders])
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(root), asked],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(done.stderr)
    return found


def test_a_slow_release_holds_up_no_stop_and_itself_alone(tmp_path: Path) -> None:
    release, again, of_other, *orders = lanes_of(
        tmp_path,
        ("release", "job.1"),
        ("release", "job.1"),
        ("release", "job.2"),
        *((op, "job.1") for op in ("stop", "go", "prepare", "forget")),
    )
    assert release == again != of_other  # asked again it takes no lane more
    assert release not in orders and len(set(orders)) == 1
    assert lanes_of(tmp_path, ("stop", "job.1"), ("stop", "job.2"))[0] == orders[0]
    assert len(set(lanes_of(tmp_path, ("stop", "job.1"), ("stop", "job.2")))) == 2


SERVE = """
import sys
from ascendrun.node import wire
from ascendrun.node.agent.serve import Agent
wire.HEAD_SILENT_S = 0.5
print(Agent(sys.argv[1], agent=[sys.executable, sys.argv[2]], umask=0o077, in_fd=0, out_fd=1).run(), file=sys.stderr)
"""


BEATS = """
import os, sys
from ascendrun.node import wire
from ascendrun.node.agent.follow import Follower
from ascendrun.node.agent.serve import Agent
Follower.is_busy = lambda self: True
wire.BEAT_S, wire.MOST_BEAT_S, wire.RESTING_BEAT_S = 0.02, 0.1, 0.5
into, out = os.pipe()
agent = Agent(sys.argv[1], agent=["agent.pyz"], umask=0o077, in_fd=0, out_fd=out)
def beats():
    reader, found = wire.FrameReader(), []
    while len(found) < 4:
        found += [header for header, _ in reader.feed(os.read(into, 1 << 16)) if header.get("event") == "beat"]
    return [(two["at_ns"] - one["at_ns"]) / 1e9 for one, two in zip(found[1:], found[2:])], found[-1]["rests"]
for beat_s in (None, 0.08, 9.0):
    agent._take({"id": 1, "op": "ping"} if beat_s is None else {"id": 1, "op": "ping", "beat_s": beat_s}, b"")
    print(*beats())
"""


def test_an_agent_beats_at_the_interval_that_the_head_asked_for_and_rests_no_longer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEATS, str(tmp_path)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    usual, rarer, most = (line.rpartition(" ") for line in done.stdout.splitlines())
    pauses_s = [min(json.loads(pauses)) for pauses, _, _ in (usual, rarer, most)]
    assert pauses_s[0] >= 0.02 and pauses_s[1] >= 0.08 and pauses_s[2] >= 0.1, pauses_s
    assert [rests for _, _, rests in (usual, rarer, most)] == ["False"] * 3


def test_an_agent_whose_head_is_silent_ends_although_its_connection_is_open(tmp_path: Path) -> None:
    archive = tmp_path / "agent.pyz"
    archive.touch()
    argv = [sys.executable, "-c", SERVE, str(tmp_path), str(archive)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(argv, **pipes) as agent:  # type: ignore[call-overload]
        assert agent.stderr.read() == b"0\n"
