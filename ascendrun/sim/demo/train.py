"""A tiny data-parallel training in plain Python that keeps the whole contract of a program.

It learns eight weights; the ranks meet at MASTER_ADDR:MASTER_PORT and average what they learned after every step. It
writes metrics, saves after every tenth step, saves and exits 0 when told to stop, and resumes from the newest
checkpoint. It needs Python 3.7 and no package.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import time
from typing import Any

WISHED = (0.7, -1.2, 2.0, 0.3, -0.5, 1.1, -2.2, 0.9)
SAVE_EVERY = 10
KEPT = 3
MEET_S = 60.0
SIM_ROOT = "ASCENDRUN_SIM_ROOT"


def take_device(rank: int, local_rank: int) -> tuple[str, Any]:
    """The device of this rank and what holds it: a simulated NPU shows whoever keeps its file open."""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    root = os.environ.get(SIM_ROOT)
    if not visible or not root:
        return "the CPU", None
    device = visible.split(",")[local_rank]
    held = open(os.path.join(root, "var/lib/ascend-sim/npu", "%s.rank%d" % (device, rank)), "w")
    held.write("21000 92\n")
    held.flush()
    return "NPU " + device, held


class Meeting:
    """All ranks, through rank 0. A rank that goes away raises ConnectionError in the others."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._peers: dict[int, Any] = {}
        if rank == 0:
            self._gather(address, world)
        else:
            self._peers[0] = _dial(address).makefile("rwb")
            self._say(0, rank)

    def _gather(self, address: tuple[str, int], world: int) -> None:
        door = socket.socket()
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(address)
        door.listen(world)
        door.settimeout(MEET_S)
        while len(self._peers) < world - 1:
            link = door.accept()[0]
            link.settimeout(None)
            peer = link.makefile("rwb")
            self._peers[int(peer.readline())] = peer
        door.close()

    def average(self, values: list[float]) -> list[float]:
        if self._rank:
            self._say(0, values)
            return [float(value) for value in self._hear(0)]
        rows = [values] + [self._hear(peer) for peer in sorted(self._peers)]
        means = [sum(column) / len(rows) for column in zip(*rows)]
        self.tell_all(means)
        return means

    def tell_all(self, values: Any) -> Any:
        """What rank 0 says, on every rank."""
        if self._rank:
            return self._hear(0)
        for peer in self._peers:
            self._say(peer, values)
        return values

    def _say(self, peer: int, values: Any) -> None:
        try:
            self._peers[peer].write(json.dumps(values).encode() + b"\n")
            self._peers[peer].flush()
        except OSError:
            raise ConnectionError("rank %d disconnected" % peer) from None

    def _hear(self, peer: int) -> Any:
        try:
            line = self._peers[peer].readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise ConnectionError("rank %d disconnected" % peer)
        return json.loads(line)


def _dial(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            link = socket.create_connection(address, timeout=MEET_S)
            link.settimeout(None)
            return link
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def learn(weights: list[float], step: int, rank: int) -> tuple[float, list[float]]:
    """Loss and gradient of this rank's own samples of this step."""
    samples = random.Random(1000 * step + rank)
    loss, gradient = 0.0, [0.0] * len(weights)
    for _ in range(32):
        inputs = [samples.gauss(0, 1) for _ in weights]
        error = sum((w - wished) * x for w, wished, x in zip(weights, WISHED, inputs)) + samples.gauss(0, 0.1)
        loss += error * error / 32
        gradient = [g + 2 * error * x / 32 for g, x in zip(gradient, inputs)]
    return loss, gradient


def save(folder: str, step: int, weights: list[float]) -> None:
    """Written beside and renamed: a checkpoint is complete or not there."""
    path = os.path.join(folder, "step-%05d.json" % step)
    with open(path + ".new", "w") as file:
        json.dump({"step": step, "weights": weights}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)
    for name in checkpoints(folder)[KEPT:]:
        os.unlink(os.path.join(folder, name))


def checkpoints(folder: str) -> list[str]:
    """The newest first."""
    return sorted((name for name in os.listdir(folder) if name.endswith(".json")), reverse=True)


def load_newest(folder: str) -> dict[str, Any] | None:
    """The newest checkpoint that can be read; None: there is none."""
    for name in checkpoints(folder):
        try:
            with open(os.path.join(folder, name)) as file:
                found: dict[str, Any] = json.load(file)
                return found
        except (OSError, ValueError):
            print(f"{name} is damaged; reading an older one", file=sys.stderr)
    return None


def report(values: dict[str, Any]) -> None:
    with open(os.environ["ASCENDRUN_METRICS_FILE"], "a") as file:
        file.write(json.dumps({"timestamp": time.time(), **values}) + "\n")


def train(meeting: Meeting, rank: int, steps: int, step_s: float) -> None:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    folder = os.environ["ASCENDRUN_CHECKPOINT_DIR"]
    begun = meeting.tell_all(load_newest(folder) if rank == 0 else None) or {"step": 0, "weights": [0.0] * len(WISHED)}
    step, weights = begun["step"], begun["weights"]
    if rank == 0:
        print("resumes after step %d" % step if step else "starts at step 0", flush=True)
    while step < steps:
        step += 1
        began = time.monotonic()
        loss, gradient = learn(weights, step, rank)
        loss, stop, *gradient = meeting.average([loss, float(bool(told))] + gradient)
        weights = [w - 0.02 * g for w, g in zip(weights, gradient)]
        time.sleep(step_s)  # the arithmetic is nothing; a step shall take as long as one can watch
        is_last = step == steps or stop > 0
        if rank == 0:
            report({"step": step, "total_steps": steps, "loss": loss, "step_s": time.monotonic() - began})
            if step % SAVE_EVERY == 0 or is_last:
                began = time.monotonic()
                save(folder, step, weights)
                report({"event": "checkpoint", "step": step, "duration_s": time.monotonic() - began})
                print("step %d/%d loss %.4f, saved" % (step, steps, loss), flush=True)
        if stop > 0:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description="Learns eight weights on all ranks together.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-s", type=float, default=0.05, help="how long a step takes at least")
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, _held = take_device(rank, int(os.environ["LOCAL_RANK"]))
    print("rank %d computes on %s" % (rank, device), flush=True)
    try:
        train(Meeting(rank, world), rank, options.steps, options.step_s)
    except ConnectionError as error:
        sys.exit(f"ConnectionError: {error}")


if __name__ == "__main__":
    main()
