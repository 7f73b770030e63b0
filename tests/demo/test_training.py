"""The demo's training keeps the contract of a program: it learns, saves whole, stops when told, and goes on."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascendrun.sim.demo import train

WORLD, END_S = 2, 120.0


class Ranks:
    """Two ranks of one start; `folder` keeps the checkpoints over starts."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._metrics = folder.parent / f"metrics-{folder.name}.jsonl"
        folder.mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        common = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(WORLD),
            "ASCENDRUN_CHECKPOINT_DIR": str(folder),
            "ASCENDRUN_METRICS_FILE": str(self._metrics),
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, train.__file__, *options],
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(WORLD)
        ]

    def end(self) -> list[str]:
        """What each rank said until its end; its exit code stands in `codes`."""
        try:
            return [process.communicate(timeout=END_S)[0] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    @property
    def codes(self) -> list[int]:
        return [process.returncode for process in self.processes]

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._metrics.read_text().splitlines()]

    def await_line(self, word: str) -> None:
        assert self.processes[0].stdout is not None
        assert any(word in line for line in self.processes[0].stdout), f"{word!r} was never said"


def newest(folder: Path) -> dict[str, Any]:
    found = train.load_newest(str(folder))
    assert found is not None
    return found


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, Any]:
    """The last checkpoint of a training that nothing disturbed."""
    ranks = Ranks(tmp_path / "whole", "--steps", "60", "--step-s", "0")
    said = ranks.end()
    assert ranks.codes == [0, 0], said
    losses = [line["loss"] for line in ranks.metrics() if "event" not in line]
    assert len(losses) == 60 and losses[-1] < losses[0] / 5
    assert [line["step"] for line in ranks.metrics() if line.get("event") == "checkpoint"] == [10, 20, 30, 40, 50, 60]
    return newest(tmp_path / "whole")


def test_told_to_stop_it_saves_and_the_rest_equals_a_training_that_was_never_stopped(
    tmp_path: Path, whole: dict[str, Any]
) -> None:
    folder = tmp_path / "stopped"
    first = Ranks(folder, "--steps", "60", "--step-s", "0.02")
    first.await_line("step 10/60")
    first.processes[1].send_signal(signal.SIGTERM)  # one rank is told; all stop after the same step
    said = first.end()
    assert first.codes == [0, 0], said
    stopped = newest(folder)["step"]
    assert 10 <= stopped < 60
    second = Ranks(folder, "--steps", "60", "--step-s", "0")
    said = second.end()
    assert f"resumes after step {stopped}" in said[0], said
    assert newest(folder) == whole


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, whole: dict[str, Any]) -> None:
    (tmp_path / "whole" / "step-00061.json").write_text('{"step": 61, "wei')
    assert newest(tmp_path / "whole") == whole


def test_a_rank_that_loses_its_peer_says_which_and_fails(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "lost", "--steps", "10000", "--step-s", "0.01")
    ranks.await_line("step 10/")
    ranks.processes[1].kill()
    said = ranks.end()
    assert ranks.codes == [1, -signal.SIGKILL], said
    assert said[0].rstrip().endswith("ConnectionError: rank 1 disconnected"), said
