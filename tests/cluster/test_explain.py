"""Real ranks that fail on hosts whose clocks differ by a minute: who was first, by whose line, and what to do."""

from typing import Any

from scenes import Scene, venv_python

from tests.lib.vcluster.cluster import VirtualCluster

CLOCK_S = 60.0

TRAINING = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(4)
for step in range(3):
    print("step", step, flush=True)
    if step == 2 and dist.get_rank() == 2:
        raise ValueError("sample 17 has no label")
    dist.all_reduce(total)
"""
RAISES_AT = "train.py:" + str(TRAINING.splitlines().index('        raise ValueError("sample 17 has no label")') + 1)

KILLED = """
import os, rank, signal
rank.meet()
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


def run_program(scene: Scene, name: str, text: str, python: str) -> dict[str, Any]:
    """The explanation of a program that fails."""
    (scene.folder / "code" / "train.py").write_text(text)
    job_file = scene.job(name, command=[python, "train.py"], more="checks: {skip: [clock]}\n")
    scene.ascendrun("submit", job_file, code=1)
    explanation: dict[str, Any] = scene.ascendrun.ask("explain", name)
    return explanation


def test_the_rank_that_raised_is_named_though_the_other_host_s_clock_is_a_minute_ahead(
    scene: Scene, cluster: VirtualCluster
) -> None:
    cluster.clock("node2", CLOCK_S)  # by its own clock rank 2 failed a minute after everybody had lost it
    explanation = run_program(scene, "raises", TRAINING, venv_python())
    found = explanation["diagnosis"]
    assert (found["code"], found["ranks"], found["hosts"]) == ("exception", [2], ["node2"]), found
    assert found["confidence"] == "certain", found["caveats"]
    assert found["values"]["where"] == RAISES_AT
    proof = found["evidence"][0]
    spooled = (scene.ascendrun.state_dir / "jobs" / explanation["id"] / "attempt-1" / proof["file"]).read_bytes()
    assert spooled[proof["offset"] :].startswith(proof["text"].encode())
    roles = {link["role"] for link in found["chain"] if 2 not in link["ranks"]}
    assert roles <= {"consequence", "teardown"}, found["chain"]
    told = scene.ascendrun("show", "raises", code=0).stdout  # submit waits 10 s for it, little on a busy machine
    assert "rank 2 on node2 failed first: ValueError: sample 17 has no label" in told

    shown = scene.ascendrun("explain", "raises", "--lang", "en", code=0)
    screen = shown.stdout
    assert "sample 17 has no label" in screen and RAISES_AT in screen and "[certain]" in screen
    assert len(screen.splitlines()) <= 40


def test_a_rank_that_somebody_killed_is_named_and_the_killer_is_not_guessed(scene: Scene) -> None:
    explanation = run_program(scene, "killed", KILLED, "python3")
    found = explanation["diagnosis"]
    assert (found["code"], found["ranks"]) == ("killed", [1]), found
    assert found["confidence"] == "likely"
    others = {rank: link["role"] for link in found["chain"] for rank in link["ranks"] if rank != 1}
    assert set(others.values()) == {"teardown"} and len(others) == 3, found["chain"]
