"""A tiny data-parallel training in plain Python that follows the contract of a program.

It learns eight weights; the ranks meet at MASTER_ADDR:MASTER_PORT and average their gradients after every step. It
writes metrics, saves after every tenth step, saves and exits 0 after a stop signal, and resumes from the newest
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

TARGET = (0.7, -1.2, 2.0, 0.3, -0.5, 1.1, -2.2, 0.9)
SAVE_EVERY = 10
KEPT = 3
MEET_S = 60.0
SIM_ROOT = "ASCENDRUN_SIM_ROOT"


def take_device(rank: int, local_rank: int) -> tuple[str, Any]:
    """The device of this rank and its open file: a simulated NPU lists the processes that have it open."""
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
    """All ranks, through rank 0. A rank that disconnects raises ConnectionError in the others."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._peers: dict[int, Any] = {}
        if rank == 0:
            self._accept_all(address, world)
        else:
            self._peers[0] = _dial(address).makefile("rwb")
            self._send(0, rank)

    def _accept_all(self, address: tuple[str, int], world: int) -> None:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(world)
        server.settimeout(MEET_S)
        while len(self._peers) < world - 1:
            connection = server.accept()[0]
            connection.settimeout(None)
            peer = connection.makefile("rwb")
            self._peers[int(peer.readline())] = peer
        server.close()

    def average(self, values: list[float]) -> list[float]:
        if self._rank:
            self._send(0, values)
            return [float(value) for value in self._receive(0)]
        rows = [values] + [self._receive(peer) for peer in sorted(self._peers)]
        means = [sum(column) / len(rows) for column in zip(*rows)]
        self.broadcast(means)
        return means

    def broadcast(self, values: Any) -> Any:
        """The values of rank 0, on every rank."""
        if self._rank:
            return self._receive(0)
        for peer in self._peers:
            self._send(peer, values)
        return values

    def _send(self, peer: int, values: Any) -> None:
        try:
            self._peers[peer].write(json.dumps(values).encode() + b"\n")
            self._peers[peer].flush()
        except OSError:
            raise ConnectionError("rank %d disconnected" % peer) from None

    def _receive(self, peer: int) -> Any:
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
            connection = socket.create_connection(address, timeout=MEET_S)
            connection.settimeout(None)
            return connection
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
        error = sum((w - target) * x for w, target, x in zip(weights, TARGET, inputs)) + samples.gauss(0, 0.1)
        loss += error * error / 32
        gradient = [g + 2 * error * x / 32 for g, x in zip(gradient, inputs)]
    return loss, gradient


def save(folder: str, step: int, weights: list[float]) -> None:
    """Write to a temporary file and rename it: a checkpoint is complete or missing."""
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
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    folder = os.environ["ASCENDRUN_CHECKPOINT_DIR"]
    state = meeting.broadcast(load_newest(folder) if rank == 0 else None) or {"step": 0, "weights": [0.0] * len(TARGET)}
    step, weights = state["step"], state["weights"]
    if rank == 0:
        print("resumes after step %d" % step if step else "starts at step 0", flush=True)
    while step < steps:
        step += 1
        started_s = time.monotonic()
        loss, gradient = learn(weights, step, rank)
        loss, stop, *gradient = meeting.average([loss, float(bool(stops))] + gradient)
        weights = [w - 0.02 * g for w, g in zip(weights, gradient)]
        time.sleep(step_s)  # the arithmetic takes no time; a step is slowed down to be visible
        is_last = step == steps or stop > 0
        if rank == 0:
            report({"step": step, "total_steps": steps, "loss": loss, "step_s": time.monotonic() - started_s})
            if step % SAVE_EVERY == 0 or is_last:
                started_s = time.monotonic()
                save(folder, step, weights)
                report({"event": "checkpoint", "step": step, "duration_s": time.monotonic() - started_s})
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
