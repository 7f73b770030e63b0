"""Ports of this machine for ranks of tests."""

import random
import socket

_claims: list[socket.socket] = []


def free_port() -> int:
    """A port that is free now, and that no other test of this machine gets while this process lives.

    The kernel gives it to no other socket meanwhile: it is below its range. The claim is an abstract socket named so.
    """
    while True:
        port = random.randrange(10000, 20000)
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0ascendrun-test-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return port
