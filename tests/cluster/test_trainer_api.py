"""The program of docs/trainer-api.md as a job on two hosts: killed in the middle, it continues and ends to the bit."""

import json
import os
import signal
from typing import Callable

import pytest
import torch
from scenes import Scene, await_that

from tests.programs.conftest import REPO
from tests.programs.test_trainer_api import write_example

KILLED_AFTER = 10
END_S = 600.0
"""For ranks that import torch on a machine with other work."""


@pytest.fixture
def scene(scene_of: Callable[..., Scene]) -> Scene:
    scene = scene_of(2, disk="1G")
    own = scene.folder / "own"
    own.mkdir()
    write_example(own)
    (own / "cluster.hosts").write_text(scene.cluster.hostfile(slots=1))
    for host in scene.cluster.hosts:
        scene.cluster.path(host, "/root/book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    return scene


def submit(scene: Scene, name: str) -> str:
    """Start the job file of the page on CPUs, with a small model; the job's id."""
    args = {
        "data_path": "/root/book.txt", "num_train_epochs": 5, "seq_len": 64, "width": 32, "save_steps": 4,
        "logging_steps": 1, "dtype": "float32",
    }  # fmt: skip
    changes = {
        "name": name,
        "python": REPO / ".venv" / "bin" / "python",
        "devices.type": "cpu",
        "devices.per_node": 1,
        "env.OMP_NUM_THREADS": 1,  # as the hosts share the processors
        "restart.max_restarts": 1,
        "restart.backoff_s": "[1, 2]",
        "outputs": "[out/]",
        **{f"args.{option}": value for option, value in args.items()},
    }
    given = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    return scene.start(scene.folder / "own" / "my_gpt.yaml", *given)


def losses(scene: Scene, job: str) -> dict[int, dict[int, float]]:
    """The loss of each step, by attempt."""
    found: dict[int, dict[int, float]] = {}
    for file in scene.spooled(job, "rank-0.metrics.0"):
        lines = map(json.loads, file.read_text().split("\n")[:-1])
        attempt = int(file.parent.parent.name.split("-")[1])
        found[attempt] = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return found


def model_of(scene: Scene, job: str) -> dict[str, torch.Tensor]:
    fetched = lambda: [one["code"] for one in scene.show(job)["events"]].count("outputs-fetched")  # noqa: E731
    await_that(fetched, "nothing else waits for the outputs")
    (file,) = (scene.ascendrun.state_dir / "outputs" / job).rglob("model.pt")
    weights: dict[str, torch.Tensor] = torch.load(file)
    return weights


@pytest.mark.timeout(3 * END_S)
def test_a_killed_rank_restarts_the_job_which_ends_as_if_it_had_not_been_killed(scene: Scene) -> None:
    straight = submit(scene, "straight")
    scene.await_state(straight, "SUCCEEDED", deadline_s=END_S)
    await_that(lambda: scene.is_drained(straight), "every byte is here")
    whole = losses(scene, straight)[1]
    assert len(whole) > 2 * KILLED_AFTER

    killed = submit(scene, "killed")
    await_that(lambda: max(losses(scene, killed).get(1, {}), default=0) >= KILLED_AFTER, "steps", deadline_s=END_S)
    os.kill(scene.ranks_of(killed, "node2")[0], signal.SIGKILL)
    scene.await_state(killed, "SUCCEEDED", deadline_s=END_S)
    await_that(lambda: scene.is_drained(killed), "every byte is here")
    by_attempt = losses(scene, killed)
    assert sorted(by_attempt) == [1, 2] and 1 < min(by_attempt[2]) <= 1 + max(by_attempt[1])
    assert {**by_attempt[1], **by_attempt[2]} == whole
    ended, wanted = model_of(scene, killed), model_of(scene, straight)
    assert ended.keys() == wanted.keys() and all(torch.equal(ended[name], wanted[name]) for name in wanted)
