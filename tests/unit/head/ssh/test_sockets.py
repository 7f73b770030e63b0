"""What the kernel is requested to do for connections to hosts."""

from __future__ import annotations

import socket
import sys

import pytest

from ascendrun.head.ssh.paramiko_login import _RTO_MAX_MS, _connect_to


@pytest.mark.skipif(sys.platform != "linux", reason="an option of Linux")
def test_what_was_lost_is_sent_again_at_least_every_second_where_the_kernel_can() -> None:
    option, most_ms = _RTO_MAX_MS
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            server.getsockopt(socket.IPPROTO_TCP, option)
        except OSError:
            can = False
        else:
            can = True
        with _connect_to((socket.AF_INET, server.getsockname()), 60.0) as made:
            assert made.getpeername() == server.getsockname()
            assert not can or made.getsockopt(socket.IPPROTO_TCP, option) == most_ms == 1000
