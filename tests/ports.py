"""Ports of this machine for ranks of tests."""

import os
import random
import socket

WORKERS = 16


def free_port() -> int:
    """A port that is free now: the kernel gives it to no other socket meanwhile, and no other worker takes it."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % WORKERS
    while True:
        port = random.randrange(10000 + worker, 20000, WORKERS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
