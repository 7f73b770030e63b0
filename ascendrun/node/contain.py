"""The holder of a container: starts the supervisor inside, and ends with the last process below it.

The runtime starts it, as the container's first process. It gets the supervisor's command and descriptors through its
socket, which is in a directory of the node (node/hold.py): leases and pipes are as without a container. The daemon of
the runtime has started it outside of what an engine ends with its allocation: a process of the allocation's holder, the
tie, connects both.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

from ascendrun.node import hold, procs

END_S = 0.1
START_S = 60.0
"""Seconds until the agent must have sent its request: it may have been killed, and then nothing remains."""


def main(name: str, outer: str = "", python: str = "") -> int:
    """`outer`: the holder of the allocation, `python`: the interpreter there; "": it is in none."""
    path = hold.socket_path(name)
    hold.make_private(os.path.dirname(path))
    procs.become_subreaper()  # the supervisor leaves its first process
    signal.signal(signal.SIGTERM, _pass_on)  # `docker stop`
    if outer:
        _tie_to(outer, python)
    with socket.socket(socket.AF_UNIX) as server:
        if os.path.lexists(path):
            os.unlink(path)
        server.bind(path)
        try:
            server.listen(1)
            server.settimeout(START_S)
            with server.accept()[0] as connection:
                hold.serve(connection)
        finally:
            os.unlink(path)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return 0


def _tie_to(outer: str, python: str) -> None:
    """Start the tie. It ends with this process, by its input, and when it ends before, everything here does."""
    stdin, _ = os.pipe()
    ended, theirs = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    argv = [python, "-I", "-S", os.path.abspath(sys.argv[0]), "tie", str(os.getpid())]
    hold.spawn(outer, argv, None, [stdin, null, null, theirs])
    for fd in (stdin, null, theirs):
        os.close(fd)
    threading.Thread(target=_end_with, args=(ended,), daemon=True).start()


def _end_with(fd: int) -> None:
    """When nothing has `fd` open any more, kill everything below, until the main thread has seen its end. What loses
    its parent comes below this process itself."""
    os.read(fd, 1)
    while True:
        for pid, one in procs.snapshot().items():
            if one.ppid == os.getpid():
                procs.send_signal(pid, one.start, signal.SIGKILL)
        time.sleep(END_S)


def tie(pid: int) -> int:
    """Pass SIGTERM of the allocation on to the holder of a container, until that one has gone."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    os.read(0, 1)
    return 0


def _pass_on(number: int, _frame: object) -> None:
    for pid, process in procs.snapshot().items():
        if process.ppid == os.getpid():
            procs.send_signal(pid, process.start, number)
