"""A training that is slow and never hangs: python slow.py phases|plain MODE SECONDS ..., and then it trains on.

phases: metrics with steps, phases and a signal for stacks, as bundled programs write them; its log is quiet.
plain: a line on standard output every 15 s of steps, and nothing else.

train       a step every half second
step        one step in which every rank computes
checkpoint  rank 0 writes, little at a time; the others wait for it
slow-link   the same at 200 kB/s
disk        rank 0 writes at once, and waits in fsync for as long as the disk takes; the others wait for it
evaluation  every rank computes
data        rank 0 computes; the others wait for it
compile     a compiler runs below the last rank; the others wait for it
"""

import os
import sys
import time

from hanging import Sockets, rank, record, size

LINE_S = 15.0


def compute(seconds):
    """At a few percent of a core."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            pass
        time.sleep(0.1)


def checkpoint():
    return open("%s/slow-checkpoint" % os.environ.get("SAVED", "/tmp"), "wb")


def save(seconds, bytes_s=4 << 20):
    """Files one after the other: pages that are written again before they are on the disk count once."""
    end = time.monotonic() + seconds
    with checkpoint() as file:
        while time.monotonic() < end:
            if file.tell() > 256 << 20:
                file.seek(0)
                file.truncate()
            file.write(bytes(bytes_s))
            file.flush()
            time.sleep(1)


def flush():
    with checkpoint() as file:
        file.write(bytes(4 << 20))
        file.flush()
        os.fsync(file.fileno())


def compile_below(seconds):
    child = os.fork()
    if not child:
        with open("/proc/self/comm", "w") as file:
            file.write("ccec")
        compute(seconds)
        os._exit(0)
    os.waitpid(child, 0)


SAVES = {"checkpoint": save, "slow-link": lambda seconds: save(seconds, 200000), "disk": lambda seconds: flush()}


class Training:
    def __init__(self, has_phases):
        self.has_phases = has_phases
        self.peers = Sockets()
        self.step = 0
        self.said = 0.0
        if has_phases:
            record(event="start", step=0, stack_signal=40, pid=os.getpid())

    def train(self, is_over):
        while not is_over():
            self.peers.all_reduce()
            self.step += 1
            if self.has_phases:
                record(step=self.step, loss=1.0)
            elif time.monotonic() > self.said + LINE_S:
                self.said = time.monotonic()
                print("step %d" % self.step, flush=True)
            time.sleep(0.5)

    def phase(self, name, act, who=None):
        """`who`: the only rank that acts; all meet afterwards."""
        if self.has_phases:
            record(event="phase", phase=name, state="begin")
        if who in (None, rank):
            act()
        self.peers.all_reduce()
        if self.has_phases:
            record(event="phase", phase=name, state="end")

    def play(self, mode, seconds):
        if mode == "train":
            end = self.step + int(2 * seconds)  # the same step on every rank
            self.train(lambda: self.step >= end)
        elif mode == "step":
            compute(seconds)
            self.peers.all_reduce()
        elif mode == "compile":
            if rank == size - 1:
                compile_below(seconds)
            self.peers.all_reduce()
        elif mode in SAVES:
            self.phase("checkpoint", lambda: SAVES[mode](seconds), who=0)
        else:
            self.phase(mode, lambda: compute(seconds), who=0 if mode == "data" else None)


def main(kind, *modes):
    training = Training(kind == "phases")
    for mode, seconds in zip(modes[::2], modes[1::2]):
        if rank == 0:
            print("mode %s" % mode, flush=True)
        training.play(mode, float(seconds))
    if rank == 0:
        print("mode last", flush=True)
    training.train(lambda: False)


main(*sys.argv[1:])
