"""The holder of a container: starts the supervisor inside, and ends with the last process below it.

The runtime starts it, as the container's first process. It gets the supervisor's command and descriptors through its
socket, which is in a directory of the node (node/hold.py): leases and pipes are as without a container.
"""

from __future__ import annotations

import os
import signal
import socket

from ascendrun.node import hold, procs

START_S = 60.0
"""Seconds until the agent must have sent its request: it may have been killed, and then nothing remains."""


def main(name: str) -> int:
    path = hold.socket_path(name)
    hold.make_private(os.path.dirname(path))
    procs.become_subreaper()  # the supervisor leaves its first process
    signal.signal(signal.SIGTERM, _pass_on)  # `docker stop`
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


def _pass_on(number: int, _frame: object) -> None:
    for pid, process in procs.snapshot().items():
        if process.ppid == os.getpid():
            procs.send_signal(pid, process.start, number)
