"""A training for scenarios of hangs: python hanging.py KIND RANK STEP, with metrics, phases and a handler for stacks.

All ranks meet in each step: over gloo if torch is there and KIND is not "none", else over plain sockets. At STEP, RANK
none       trains on                        deadlock   takes a lock twice
loader     waits for a data loader that stands still       pipe       writes to a child that does not read
collective calls a barrier while the others sum (gloo)        disk      writes a file below $SAVED, and waits for fsync
"""

import faulthandler
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
metrics_path = os.environ["ASCENDRUN_METRICS_FILE"]
faulthandler.register(40, open(os.path.join(os.path.dirname(metrics_path), "rank-%d.stack.0" % rank), "ab"))


def record(**values):
    with open(metrics_path, "a") as file:
        file.write(json.dumps(dict(values, timestamp=time.time())) + "\n")


def wait_on():
    """A signal, such as that for the stacks, ends no wait."""
    while True:
        signal.pause()


class Sockets:
    """A sum through rank 0. As with HCCL, a peer that has died never answers, and its peers wait on."""

    def __init__(self):
        self.peers = []
        if rank == 0:
            self.server = socket.create_server(address, backlog=size)
            self.peers = [self.server.accept()[0] for _ in range(size - 1)]
            return
        while not self.peers:
            try:
                self.peers = [socket.create_connection(address, timeout=60)]
                self.peers[0].settimeout(None)
            except ConnectionRefusedError:
                select.select([], [], [], 0.02)

    def all_reduce(self):
        try:
            if rank:
                self.peers[0].sendall(b"1")
            for peer in self.peers:
                if not peer.recv(1):
                    wait_on()
            if not rank:
                for peer in self.peers:
                    peer.sendall(b"1")
        except ConnectionError:
            wait_on()


class Gloo:
    def __init__(self):
        import torch.distributed as dist

        self.dist = dist
        dist.init_process_group("gloo")

    def all_reduce(self):
        import torch

        self.dist.all_reduce(torch.ones(4))

    def barrier(self):
        self.dist.barrier()


def read_shard():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def next_batch():
    queue.Queue().get()


def write_all():
    child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.PIPE)
    while True:
        child.stdin.write(b"x" * 65536)


def save():
    with open("%s/checkpoint" % os.environ["SAVED"], "wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())


def main(kind, odd, at):
    peers = Sockets() if kind in ("none", "sockets", "disk") else Gloo()
    record(event="start", step=0, stack_signal=40, pid=os.getpid())
    record(event="phase", phase="evaluation", state="begin")
    record(event="phase", phase="evaluation", state="end")
    step = 0
    while True:
        if rank == int(odd) and step == int(at) and kind != "none":
            kinds = {"deadlock": read_shard, "loader": next_batch, "pipe": write_all, "disk": save}
            kinds.get(kind, getattr(peers, "barrier", None))()
        peers.all_reduce()
        step += 1
        record(step=step, loss=1.0)
        if step == 10:
            print("trains", flush=True)
        select.select([], [], [], 0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
