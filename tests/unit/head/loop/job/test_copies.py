"""What a node has collected during an outage comes at the pace of the store, and each byte once."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.jobs.job import Job
from ascendrun.head.loop.job import copies
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.file_messages import FileData
from ascendrun.head.spool import sample_ingest
from ascendrun.head.spool.sample_ingest import SampleIngest
from ascendrun.node import layout
from ascendrun.node.agent.follow import Follow
from tests.lib.small_world import N1, World
from tests.lib.vcluster.processes import await_that
from tests.unit.head.spool.test_sample_ingest import T, seconds_in

WINDOW = 1 << 16


def lines(first: int, count: int) -> bytes:
    """Samples of a host, of 1 kB each."""
    return b"".join(
        json.dumps({"at_ns": (T + number) * 10**9, "host": {"cpu": 1.0}, "pad": "x" * 1000}).encode() + b"\n"
        for number in range(first, first + count)
    )


class Sender:
    """What the agent of N1 does with the requests that it gets. All that it sends arrives at once."""

    def __init__(self, world: World, root: Path, job: Job) -> None:
        self._world, self._root = world, root
        self.folder = Path(layout.attempt_dir(str(root), job.run_id))
        self.folder.mkdir(parents=True)
        self._follow: Follow | None = None
        self._taken, self._now_s = 0, 0.0
        self.follows = self.sent_bytes = 0

    def turn(self) -> None:
        self._world.turn()
        asked = self._world.get(N1).node.asked
        for request in asked[self._taken :]:
            if isinstance(request, agent.Follow):
                self.follows += 1
                offsets: Any = request.offsets
                of_files = dict(request.limits), dict(request.windows)
                self._follow = Follow(str(self._root), request.tag, offsets, self._send, *of_files)
            elif isinstance(request, agent.Acknowledge) and self._follow is not None:
                self._follow.acknowledge(request.file, request.generation, request.offset)
        self._taken = len(asked)
        self._now_s += 1.0
        if self._follow is not None:
            self._follow.poll(self._now_s)

    def _send(self, header: dict[str, Any], body: bytes) -> None:
        self.sent_bytes += len(body)
        [runner] = self._world.jobs
        runner.copies.take_data(N1.name, FileData.from_header(header), body)


@pytest.fixture
def ingest(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[SampleIngest]:
    """One over a real store, whose windows are small."""
    monkeypatch.setattr(sample_ingest, "MOST_WAITING_BYTES", WINDOW)
    monkeypatch.setattr(copies, "ACKNOWLEDGE_S", 0.0)
    with closing(SampleIngest(world.folder)) as made:
        made.start()
        world.context.samples = made
        yield made


@pytest.fixture
def sender(world: World, ingest: SampleIngest, tmp_path: Path) -> Iterator[Sender]:
    """A host with more samples than fit, after its first one: the process that keeps them stands still."""
    made = Sender(world, tmp_path / "node", world.running(N1))
    (made.folder / "samples.0").write_bytes(lines(0, 1))
    world.up(N1)
    await_that(lambda: not made.turn() and ingest._process is not None and seconds_in(world.folder) == [0])
    assert ingest._process is not None
    os.kill(ingest._process.pid, signal.SIGSTOP)
    try:
        with open(made.folder / "samples.0", "ab") as file:
            file.write(lines(1, 400))
        (made.folder / "samples.1").write_bytes(lines(401, 300))
        for _ in range(50):
            made.turn()
            time.sleep(0.01)
        yield made
    finally:
        os.kill(ingest._process.pid, signal.SIGCONT)


def test_samples_come_at_the_pace_of_the_store_and_each_byte_is_sent_once(
    world: World, ingest: SampleIngest, sender: Sender
) -> None:
    assert sender.sent_bytes < 6 * WINDOW, "windows, the pipe to the process, and no more"
    assert ingest._process is not None
    os.kill(ingest._process.pid, signal.SIGCONT)
    await_that(lambda: not sender.turn() and seconds_in(world.folder) == list(range(701)))
    assert sender.sent_bytes == sum(file.stat().st_size for file in sender.folder.iterdir())
    assert sender.follows == 1, "nothing was refused"


def test_a_host_whose_window_is_full_continues_after_the_death_of_the_process_that_keeps_samples(
    world: World, ingest: SampleIngest, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_ingest, "RETRY_S", 0.05)
    assert ingest._process is not None
    ingest._process.kill()
    await_that(lambda: not sender.turn() and seconds_in(world.folder) == list(range(701)))
