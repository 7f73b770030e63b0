"""A training without libraries, on any number of ranks: python script.py STEPS. It starts in little time.

The ranks share each batch and sum their gradients through rank 0, over plain sockets. Rank 0 saves as docs/epochs.md
has it. SIGTERM to any rank: they save and end.
"""

import faulthandler
import hashlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
import uuid

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER, TAG = os.environ["ASCENDRUN_CHECKPOINT_DIR"], os.environ["ASCENDRUN_RUN_ID"]
METRICS = os.environ["ASCENDRUN_METRICS_FILE"]
BATCH, WIDTH, RATE, MOMENTUM, SAVE_STEPS = 24, 8, 0.02, 0.9, 5
STEP_S, PEERS_S = 0.1, 300.0
stops = []
signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
faulthandler.register(40, open(os.path.join(os.path.dirname(METRICS), "rank-%d.stack.0" % RANK), "ab"))


def record(**values):
    with open(METRICS, "a") as file:
        file.write(json.dumps(dict(values, timestamp=time.time())) + "\n")


class Peers:
    """Sums of numbers through rank 0, in the order of ranks."""

    def __init__(self):
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if RANK == 0:
            server = socket.create_server(address, backlog=RANKS)
            server.settimeout(PEERS_S)
            files = [server.accept()[0].makefile("rw") for _ in range(RANKS - 1)]
            self.files = [file for _, file in sorted((int(file.readline()), file) for file in files)]
            return
        until_mono = time.monotonic() + PEERS_S
        while True:
            try:
                self.files = [socket.create_connection(address).makefile("rw")]
                break
            except OSError:
                if time.monotonic() > until_mono:
                    raise
                select.select([], [], [], 0.1)
        self.send([RANK])

    def send(self, values):
        for file in self.files:
            file.write("%s\n" % (json.dumps(values) if len(values) > 1 else values[0]))
            file.flush()

    def sum(self, values):
        if RANK:
            self.send(values)
        found = [json.loads(file.readline()) for file in self.files]
        if RANK:
            return found[0]
        values = [sum(each) for each in zip(values, *found)]
        self.send(values)
        return values


class Checkpoints:
    """Of rank 0 (docs/epochs.md)."""

    def __init__(self, from_step):
        self.from_step, self.epoch = from_step, max(self.epochs(), default=-1) + 1
        os.makedirs(os.path.join(FOLDER, ".epochs"), exist_ok=True)
        self.claim("x", None)

    def epochs(self):
        try:
            return [int(name[:-5]) for name in os.listdir(os.path.join(FOLDER, ".epochs")) if name.endswith(".json")]
        except FileNotFoundError:
            return []

    def claim(self, mode, from_step):
        path = os.path.join(FOLDER, ".epochs", "%06d.json" % self.epoch)
        with open(path if mode == "x" else path + ".tmp", mode) as file:
            json.dump({"tag": TAG, "token": TAG, "from_step": from_step, "from_save": ""}, file)
        if mode != "x":
            os.rename(path + ".tmp", path)

    def save(self, step, state):
        name = "step-%08d" % step + ("-e%04d" % self.epoch if self.epoch else "")
        fresh, text = os.path.join(FOLDER, ".%s.tmp" % name), json.dumps(state)
        os.makedirs(fresh)
        part = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        facts = {"save": uuid.uuid4().hex, "identity": {"batch": BATCH}}
        manifest = {"step": step, "kind": "step", "facts": facts, "parts": {"state.json": part}, "here": ["state.json"]}
        manifest["sha256"] = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
        for file, content in (("state.json", text), ("manifest.json", json.dumps(manifest))):
            with open(os.path.join(fresh, file), "w") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
        if max(self.epochs()) > self.epoch:
            sys.exit(75)  # a later attempt has claimed the directory
        self.claim("w", self.from_step)
        os.rename(fresh, os.path.join(FOLDER, name))


def gradients(step, weights):
    """This rank's part of the gradient, of the loss, and whether it has received a signal."""
    lot, sums = random.Random(step), [0.0] * (WIDTH + 1)
    for number in range(BATCH):
        row = [lot.gauss(0, 1) for _ in range(WIDTH)]
        target = sum(value * place for place, value in enumerate(row)) + lot.gauss(0, 1)
        if number % RANKS == RANK:
            error = sum(weight * value for weight, value in zip(weights, row)) - target
            sums = [total + 2 * error * value / BATCH for total, value in zip(sums, row)] + [
                sums[-1] + error**2 / BATCH
            ]
    return sums + [float(bool(stops))]


def main(steps):
    step, weights, velocity = 0, [0.0] * WIDTH, [0.0] * WIDTH
    if os.environ.get("ASCENDRUN_RESUME_PATH"):
        with open(os.path.join(os.environ["ASCENDRUN_RESUME_PATH"], "state.json")) as file:
            step, weights, velocity = json.load(file)
    record(event="start", step=step, total_steps=steps, stack_signal=40, pid=os.getpid())
    peers, checkpoints, is_stopped = Peers(), Checkpoints(step) if RANK == 0 else None, 0.0
    while step < steps and not is_stopped:
        step += 1
        *found, loss, is_stopped = peers.sum(gradients(step, weights))
        velocity = [MOMENTUM * old + new for old, new in zip(velocity, found)]
        weights = [weight - RATE * change for weight, change in zip(weights, velocity)]
        record(step=step, total_steps=steps, loss=loss)
        if checkpoints and (step % SAVE_STEPS == 0 or step == steps or is_stopped):
            checkpoints.save(step, [step, weights, velocity])
        select.select([], [], [], STEP_S)
    record(done=step == steps)


main(int(sys.argv[1]))
