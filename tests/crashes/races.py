"""Races: two heads start jobs on the same two hosts at once, each pair for the same port, and nobody stops anything.

    python -m tests.crashes.races --races 2000 --history races.jsonl

In each round every head submits PAIRS jobs, the k-th of both for the k-th port: one of the two starts, the other is
refused by a host, which may have prepared it, and starts when the first has ended. All of them succeed, and nothing
ends an attempt but a port that is held. One JSON line for each round goes to stdout, or into --history.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ascendrun.core.events import Event
from ascendrun.core.jobs.job import TERMINAL, Job, State
from ascendrun.head.state.store import Store
from tests.cluster.conftest import head_environ
from tests.crashes.hosts import CampaignError, Hosts
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.processes import await_true

PAIRS, FIRST_PORT = 8, 29600
ROUND_S = 900.0
CLIENT = """import sys; from ascendrun import Cluster
for line in sys.stdin: print(Cluster().jobs.submit(line.strip()).id, flush=True)"""


class Head:
    """One head node: its state directory, and a process that submits what it is told."""

    def __init__(self, cluster: VirtualCluster, folder: Path) -> None:
        folder.mkdir()
        self.hosts = Hosts(cluster, folder)
        argv = cluster.head_argv([sys.executable, "-c", CLIENT], cwd=str(folder))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._client = subprocess.Popen(argv, env=head_environ(self.hosts.state_dir), text=True, **pipes)
        self.ids: list[str] = []
        for number in range(PAIRS):
            self._path(number).write_text(
                f"name: race-{number}\ncommand: ['true']\nhostfile: two.hosts\nlauncher: none\n"
                f"env: {{MASTER_PORT: {FIRST_PORT + number}}}\n"
            )

    def _path(self, number: int) -> Path:
        return self.hosts.folder / f"race-{number}.yaml"

    def submit(self, number: int) -> None:
        assert self._client.stdin is not None
        self._client.stdin.write(f"{self._path(number)}\n")
        self._client.stdin.flush()

    def take_id(self) -> None:
        assert self._client.stdout is not None
        self.ids.append(self._client.stdout.readline().strip())

    def jobs(self) -> list[Job]:
        with Store.open_for_reading(self.hosts.state_dir) as store:
            return [store.jobs.find(name).job for name in self.ids]

    def stories(self) -> dict[str, list[Event]]:
        with Store.open_for_reading(self.hosts.state_dir) as store:
            return {name: list(store.events.of(name)) for name in self.ids}

    def close(self) -> None:
        self._client.kill()
        self._client.communicate()
        self.hosts.close()


def race(heads: Sequence[Head]) -> int:
    """One round; return the number of starts. Raises CampaignError."""
    for head in heads:
        head.ids.clear()
    for number in range(PAIRS):
        for head in heads[:: 1 if number % 2 else -1]:
            head.submit(number)
    for head in heads * PAIRS:
        head.take_id()
    await_true(lambda: all(job.state in TERMINAL for head in heads for job in head.jobs()), deadline_s=ROUND_S)
    jobs = [job for head in heads for job in head.jobs()]
    bad = {job.id for job in jobs if job.state is not State.SUCCEEDED}
    stories = [story for head in heads for story in head.stories().items()]
    bad |= {name for name, story in stories if any(map(is_stop, story))}
    if bad:
        raise CampaignError(
            "\n".join(str(event.to_json()) for name, story in stories if name in bad for event in story)
        )
    return len(jobs)


def is_stop(event: Event) -> bool:
    """Whether it ends an attempt for another reason than that a host holds the port for somebody else."""
    return event.code == "node-stopped" or (
        event.values.get("state") == "STOPPING" and event.values.get("cause") != "held"
    )


def races(folder: Path, count: int, tell: Path | None) -> None:
    """Raises CampaignError at the first start that fails or is stopped."""
    with VirtualCluster.up(2, disk="512M") as cluster:  # their records stay
        heads = [Head(cluster, folder / name) for name in ("one", "two")]
        try:
            done = 0
            while done < count:
                began_s = time.monotonic()
                done += race(heads)
                line = json.dumps({"starts": done, "round_s": round(time.monotonic() - began_s, 1)})
                print(line, flush=True)
                if tell is not None:
                    with open(tell, "a") as history:
                        history.write(line + "\n")
        finally:
            for head in heads:
                head.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.crashes.races", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--races", type=int, default=2000, help="starts, in rounds of 16")
    parser.add_argument("--history", type=Path, help="a file that gets a line for each round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ascendrun-races-") as place:
        races(Path(place), options.races, options.history)
