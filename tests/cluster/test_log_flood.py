"""A flood of output while links, agents and the controller die at random: the head's copy is equal, byte for byte.

The small one is always run; `--long=SEED,ROUNDS` floods a gigabyte over 16 hosts, with cuts long enough to be noticed.
"""

import hashlib
import random
import time
from typing import Callable

import leftovers
import pytest
from scenes import Scene, await_that, run_text

from tests.lib.vcluster.processes import await_true

MB = 1 << 20
FIRST_LINES_BYTES = 20_000
"""A line has at most 310 bytes: number 17 stands well before."""

FLOOD = """
import hashlib, os, sys, time
rank, size, seconds = os.environ["RANK"], int(sys.argv[1]), float(sys.argv[2])
began, sent, number, digest = time.monotonic(), 0, 0, hashlib.sha256()
noise = bytes(range(256)) * 2
while sent < size:
    lines = []
    for _ in range(200):
        lines.append(b"%s %d " % (rank.encode(), number) + noise[number % 200:number % 200 + number % 300] + b"\\n")
        number += 1
    block = b"".join(lines)
    os.write(1, block) if len(block) < 4096 else sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
    digest.update(block)
    sent += len(block)
    ahead_s = seconds * sent / size - (time.monotonic() - began)
    if ahead_s > 0.01:
        time.sleep(ahead_s)
sys.stderr.write("%d %s\\n" % (number, digest.hexdigest()))
"""


def flood(scene: Scene, *, hosts: list[str], mb_each: float, seconds: float) -> str:
    (scene.folder / "code" / "flood.py").write_text(FLOOD)
    command = ["python3", "flood.py", str(int(mb_each * MB)), str(seconds)]
    return scene.start(scene.job("flood", command=command, per_node=1, slots=1))


def copied_bytes(scene: Scene, job: str) -> int:
    return sum(path.stat().st_size for path in scene.spooled(job, "rank-*.out.*"))


def trouble(scene: Scene, job: str, luck: random.Random, *, cut_s: float, until: Callable[[], bool]) -> dict[str, int]:
    """One misfortune after the other until it is over; what happened, counted."""
    told: dict[str, int] = {}
    while not until():
        host = luck.choice(scene.cluster.hosts)
        what = luck.choice(["cut", "agent", "agent", "controller"])
        told[what] = told.get(what, 0) + 1
        wanted = copied_bytes(scene, job) + MB
        if what == "cut":
            scene.cluster.cut(host)
            await_true(until, deadline_s=luck.uniform(0.1, cut_s))
            scene.cluster.heal(host)
        elif what == "agent":
            leftovers.kill_some(scene.cluster, host, "serve")
        else:
            leftovers.kill(leftovers.controllers(scene.cluster, scene.ascendrun.state_dir))
            scene.state(job)  # whoever looks starts a new one
        await_true(lambda wanted=wanted: copied_bytes(scene, job) > wanted or until(), deadline_s=5.0)
    return told


def check(scene: Scene, job: str, *, ranks: int) -> int:
    """Node, head and what the rank says that it wrote are the same bytes, so no line is missing or there twice.

    Returns how many there are.
    """
    on_head, on_node = scene.on_head(job), scene.on_node(job)
    assert {name: len(data) for name, data in on_head.items()} == {name: len(data) for name, data in on_node.items()}
    assert on_head == on_node
    total = 0
    for rank in range(ranks):
        name = next(name for name in on_head if name.endswith(f"/rank-{rank}.out.0"))
        folder, parts = name.split("/")[0], []
        for generation in range(100):
            part = on_head.get(f"{folder}/rank-{rank}.out.{generation}")
            if part is None:
                break
            parts.append(part)
        said = b"".join(parts)
        count, digest = on_head[f"{folder}/rank-{rank}.err.0"].split()
        assert hashlib.sha256(said).hexdigest().encode() == digest
        assert said.count(b"%d %d " % (rank, int(count) - 1)) == 1
        total += len(said)
    return total


def run_flood(scene: Scene, luck: random.Random, *, mb_each: float, seconds: float, cut_s: float) -> None:
    hosts = list(scene.cluster.hosts)
    job = flood(scene, hosts=hosts, mb_each=mb_each, seconds=seconds)
    await_that(
        lambda: any(path.stat().st_size > FIRST_LINES_BYTES for path in scene.spooled(job, "rank-0.out.0")),
        "the first lines of rank 0 are here",
        deadline_s=90,
    )
    searched = scene.ascendrun("logs", job, "--grep", "^0 17 ", "--no-prefix")  # by the nodes: it is under way
    assert (searched.stdout[:5], searched.stdout.count("\n"), searched.stderr) == ("0 17 ", 1, ""), run_text(searched)
    began = time.monotonic()
    told = trouble(scene, job, luck, cut_s=cut_s, until=lambda: time.monotonic() - began > seconds)
    scene.cluster.clean()
    scene.await_state(job, "SUCCEEDED", deadline_s=240)
    await_that(lambda: scene.is_drained(job), "every byte is here", deadline_s=240)
    total = check(scene, job, ranks=len(hosts))
    print(f"{total / 1e6:.0f} MB of {len(hosts)} ranks equal after {told}")


def test_a_flood_arrives_whole_while_links_agents_and_the_controller_die(scene_of: Callable[..., Scene]) -> None:
    run_flood(scene_of(4), random.Random(4), mb_each=6, seconds=4, cut_s=1.0)


@pytest.mark.timeout(0)
def test_a_gigabyte_of_16_hosts_arrives_whole_while_links_are_cut_at_random(
    request: pytest.FixtureRequest, scene_of: Callable[..., Scene], only_long: None
) -> None:
    seed, _rounds = map(int, request.config.getoption("--long").split(","))
    run_flood(scene_of(16, disk="160M"), random.Random(seed), mb_each=64, seconds=90, cut_s=25.0)
