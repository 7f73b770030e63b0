"""A rank for scenarios: standard library only, does what its words say, in their order.

print TEXT          a line on standard output        env NAME...      the named variables as one JSON line
beat SECONDS        a numbered line every 50 ms      touch FILE       makes a file
beat-on FILE        60 such lines at least, and on until FILE exists
hang                sleeps until killed              exit CODE        ends
exit-rank R CODE    ends so if it is rank R          deaf             ignores TERM from here on
family              leaves children that setsid, that double-fork, and that ignore TERM
save-on-term        on TERM: prints "saved", exits 0
meet                waits until every rank of the job has connected to MASTER_ADDR:MASTER_PORT
alone               "not alone" if a process of another attempt is on the host; then the monotonic clock goes to
                    /tmp/alive-TAG-RANK ten times a second, while the rank lives
"""

import itertools
import json
import os
import signal
import socket
import sys
import threading
import time


def say(*words):
    print(*words, flush=True)


def beats():
    for number in itertools.count():
        say("beat %d of rank %s" % (number, os.environ["RANK"]))
        yield number
        time.sleep(0.05)


def beat(seconds):
    end = time.monotonic() + seconds
    for _ in beats():
        if time.monotonic() >= end:
            return


def beat_on(file):
    for number in beats():
        if number >= 60 and os.path.exists(file):
            return


def hang():
    while True:
        signal.pause()


def family():
    """Three ways of getting out of a process tree; each child stays for ever, and is what it will be on return."""
    for kind in ("setsid", "double-fork", "deaf"):
        ready, told = os.pipe()
        child = os.fork()
        if child:
            os.close(told)
            os.read(ready, 1)
            os.close(ready)
            if kind == "double-fork":
                os.waitpid(child, 0)
            continue
        if kind != "deaf":
            os.setsid()
        if kind == "double-fork" and os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.closerange(0, 3)
        os.write(told, b"!")
        hang()


def meet():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(address, backlog=size) as server:
            peers = [server.accept()[0] for _ in range(size - 1)]
            for peer in peers:
                peer.sendall(b"!")
        return
    deadline = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection(address, timeout=60) as connection:
                connection.recv(1)
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def alone():
    run, _, attempt = os.environ["ASCENDRUN_RUN_ID"].rpartition(".")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/environ" % pid) as file:
                values = dict(pair.partition("=")[::2] for pair in file.read().split("\0"))
        except (OSError, ValueError):
            continue
        other, _, number = values.get("ASCENDRUN_RUN_ID", "").rpartition(".")
        if other == run and number != attempt and "ASCENDRUN_SAMPLER" not in values:
            say("not alone: process %s of attempt %s" % (pid, number))
    threading.Thread(target=show_life, daemon=True).start()


def show_life():
    while True:
        try:  # a disk may be full
            with open("/tmp/alive-%(ASCENDRUN_RUN_ID)s-%(RANK)s" % os.environ, "a") as file:
                file.write("\n%.3f\n" % time.monotonic())
        except OSError:
            pass
        time.sleep(0.1)


def save_on_term():
    def save(*_):
        say("saved")
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)


def main(words):
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "print":
            say(words.pop(0))
        elif word == "env":
            say(json.dumps({name: os.environ.get(name) for name in words}))
            words.clear()
        elif word == "beat":
            beat(float(words.pop(0)))
        elif word == "beat-on":
            beat_on(words.pop(0))
        elif word == "touch":
            open(words.pop(0), "w").close()
        elif word == "exit":
            sys.exit(int(words.pop(0)))
        elif word == "exit-rank":
            rank, code = words.pop(0), int(words.pop(0))
            if os.environ["RANK"] == rank:
                sys.exit(code)
        elif word == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            {"hang": hang, "family": family, "meet": meet, "alone": alone, "save-on-term": save_on_term}[word]()


if __name__ == "__main__":
    main(sys.argv[1:])
