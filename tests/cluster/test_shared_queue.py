"""Two controllers, one shared queue and the same hosts, over real processes."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Ascendrun
from scenes import BEAT_ON, Scene, await_that

from ascendrun.head.queue.messages import QUEUE_NAME


class Queue:
    """The server, on the head."""

    def __init__(self, ascendrun: Ascendrun, folder: Path) -> None:
        self._ascendrun, self.folder = ascendrun, folder
        self.start()

    def start(self) -> None:
        self.process: subprocess.Popen[Any] = self._ascendrun.popen("controller", "run", "--shared", self.folder)
        await_that(lambda: self.pid() is not None, "the queue listens")

    def pid(self) -> int | None:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(self.folder / QUEUE_NAME))
            except OSError:
                return None
            return int(struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])

    def kill(self) -> None:
        pid = self.pid()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=60)


@pytest.fixture
def shared(ascendrun: Ascendrun, tmp_path: Path) -> Iterator[Queue]:
    made = Queue(ascendrun, tmp_path / "queue")
    yield made
    made.kill()


def test_jobs_of_two_controllers_share_no_host_and_the_queue_may_die(
    scene: Scene, shared: Queue, no_leftovers: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "head2"
    folder.mkdir()
    two = Scene(Ascendrun(lambda: scene.cluster, folder, no_leftovers), scene.cluster)
    env = {"ASCENDRUN_QUEUE": str(shared.folder)}
    first = scene.start(scene.job("first", "meet", "print", "met", *BEAT_ON), env=env)
    scene.await_line(first, "met", count=4)
    second = two.start(two.job("second", "print", "done"), env=env)

    def reason() -> str:
        return str(two.show(second)["job"]["reason_code"])

    await_that(lambda: reason() == "nodes-in-use", "it waits for the job of the other controller")
    rows = {row["name"]: row for row in scene.ascendrun.ask("ps", "--all-users", env=env)["jobs"]}
    assert (rows["first"]["state"], rows["second"]["state"]) == ("RUNNING", "QUEUED")
    assert rows["second"]["reason"].count(f"root/{first}") == 1 and "command" not in rows["second"]
    shared.kill()
    await_that(lambda: reason() == "queue-away", "it says that the queue is away")
    assert scene.ascendrun("ps", "--all-users", env=env).returncode == 5
    scene.enough()
    scene.await_state(first, "SUCCEEDED")
    assert two.state(second) == "QUEUED"
    shared.start()
    two.await_state(second, "SUCCEEDED")
    ours = scene.start(scene.job("third", "meet", "print", "met", "hang"), env=env)
    scene.await_line(ours, "met", count=4)
    scene.ascendrun("stop", f"root/{ours}", "--now", env=env, code=0)
    scene.await_state(ours, "STOPPED")
