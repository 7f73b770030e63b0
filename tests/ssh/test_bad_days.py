"""Hosts that are silent, impostors, overloaded or closed to us: each is told apart, in time, with the way out."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from sshd import Ear, connects, trust

from ascendrun.core.errors import DeadlineExceededError, UnreachableError
from ascendrun.core.hosts import Host

BOTH = pytest.mark.parametrize("transport", ["paramiko", "openssh"])
# For servers that send no banner. The other steps have their time: of `ssh` all steps together are limited too.
SHORT = {"tcp_s": 1.0, "banner_s": 1.0}


@contextmanager
def speaking(words: bytes, *, stays: bool = True) -> Iterator[Host]:
    """A host of which something says these words to the first who comes, and nothing else."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(16)
        kept: list[socket.socket] = []

        def greet() -> None:
            kept.append(sock.accept()[0])
            kept[0].sendall(words)
            if not stays:
                kept[0].close()

        greeter = threading.Thread(target=greet)
        greeter.start()
        yield Host("odd", addr="127.0.0.1", port=sock.getsockname()[1])
        greeter.join()
        kept[0].close()


@BOTH
def test_a_host_that_accepts_and_says_nothing_is_given_up_in_time(lab: Any, transport: str) -> None:
    with speaking(b"") as host:
        caught = lab.refused(UnreachableError, host, transport=transport, **SHORT)
    assert "odd" in str(caught.message) and "banner" in str(caught.message)
    assert "load of the host" in str(caught.hint)


@BOTH
def test_a_frozen_sshd_is_given_up_in_time(lab: Any, transport: str) -> None:
    server = lab.server()
    server.process.send_signal(signal.SIGSTOP)
    lab.refused(UnreachableError, server.host(), "banner", transport=transport, **SHORT)


def test_an_sshd_that_freezes_after_its_banner_is_given_up_in_time(lab: Any) -> None:
    with speaking(b"SSH-2.0-frozen\r\n") as host:
        lab.refused(UnreachableError, host, "odd .*no key exchange", transport="paramiko", kex_s=1.0)


@pytest.mark.parametrize("lines", [1, 101])
def test_a_server_that_speaks_something_else_is_named(lab: Any, lines: int) -> None:
    with speaking(b"HTTP/1.1 400 Bad Request\r\n" * lines, stays=False) as host:
        lab.refused(UnreachableError, host, "not an SSH server", transport="paramiko")


@BOTH
def test_a_closed_port_is_named_with_its_host(lab: Any, transport: str) -> None:
    server = lab.server()
    server.stop()
    lab.refused(UnreachableError, server.host(), f"(?i)node1 .*{server.port}.*refused", transport=transport)


@BOTH
def test_a_name_that_nobody_knows_is_named(lab: Any, transport: str) -> None:
    caught = lab.refused(
        UnreachableError, Host("n1", addr="no-such-host.invalid"), "no-such-host.invalid", transport=transport
    )
    assert "addr=" in str(caught.hint)


def test_a_config_mended_after_a_failure_counts_for_the_next_try(lab: Any) -> None:
    server = lab.server()
    lab.write_config("Host node1", "  Port 1")
    backends = lab.backends("auto")
    host = Host("node1", addr="127.0.0.1", user=server.host().user)
    with pytest.raises(UnreachableError, match=":1.*refused"):
        connects(backends, host)
    lab.write_config("Host node1", f"  Port {server.port}")
    connects(backends, host)


@BOTH
def test_a_shell_that_refuses_commands_ends_in_an_answer(lab: Any, transport: str) -> None:
    server = lab.server(options=("ForceCommand /bin/false",))
    connection = lab.backends(transport).connect(server.host())
    ear = Ear()
    try:
        connection.open("echo fine", ear.receiver(), deadline_s=20.0)
        assert ear.wait()[1] == 1
    except ConnectionError:
        pass  # gone before the command could be sent: an answer, too
    finally:
        connection.close()


@BOTH
def test_commands_follow_each_other_where_sshd_allows_one_session(lab: Any, transport: str) -> None:
    server = lab.server(options=("MaxSessions 1",))
    connection = lab.backends(transport).connect(server.host())
    for number in range(5):
        ear = Ear()
        connection.open(f"echo {number}", ear.receiver(), deadline_s=20.0)
        assert ear.wait()[1] == 0
    connection.close()


def test_a_second_session_where_sshd_allows_one_is_refused_with_the_reason(lab: Any) -> None:
    server = lab.server(options=("MaxSessions 1",))
    connection = lab.backends("paramiko").connect(server.host())
    ear, second = Ear(), Ear()
    stream = connection.open("exec cat", ear.receiver(), deadline_s=20.0)
    with pytest.raises(UnreachableError) as caught:
        connection.open("true", second.receiver(), deadline_s=20.0)
    assert "MaxSessions" in str(caught.value.hint)
    stream.send(b"still here", deadline_s=20.0)
    stream.close_input()
    assert ear.wait()[1] == 0 and ear.output == b"still here"
    assert second.ends == []
    connection.close()


@BOTH
def test_an_sshd_that_drops_logins_at_random_serves_all_in_the_end(lab: Any, transport: str) -> None:
    server = lab.server(options=("MaxStartups 2",))
    backends = lab.backends(transport, tcp_s=30.0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: connects(backends, server.host()), range(8)))
    assert "MaxStartups" in server.log


def test_a_host_that_freezes_under_a_running_stream_refuses_the_next_command_in_time(lab: Any) -> None:
    server = lab.server()
    connection = lab.backends("paramiko").connect(server.host())
    ear = Ear()
    connection.open("exec cat", ear.receiver(), deadline_s=20.0)
    frozen = server.session_pids()
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="node1"):
        connection.open("true", Ear().receiver(), deadline_s=1.0)
    assert time.monotonic() - began < 20.0, "not the time of an opening, which is longer"
    connection.close()
    ear.wait()


def test_a_login_that_hangs_is_given_up_in_time(lab: Any) -> None:
    if os.geteuid() != 0:
        pytest.skip("sshd runs an AuthorizedKeysCommand only when it is root")
    server = lab.server(
        options=("AuthorizedKeysCommand /bin/sleep 30", "AuthorizedKeysCommandUser root", "AuthorizedKeysFile none")
    )
    lab.refused(UnreachableError, server.host(), "to the login within 1 s", transport="paramiko", auth_s=1.0)


def test_a_server_without_a_common_algorithm_is_reached_through_openssh(lab: Any) -> None:
    server = lab.server(options=("KexAlgorithms sntrup761x25519-sha512@openssh.com",))
    backends = lab.backends("auto")
    connects(backends, server.host())
    assert backends.ssh().why_openssh(server.host()).key == "ssh.no-algorithm"
    caught = lab.refused(UnreachableError, server.host(), transport="paramiko")
    assert "OpenSSH" in str(caught.hint)


def test_two_servers_at_one_address_are_known_by_their_ports(lab: Any) -> None:
    first, second = lab.server(trusted=False), lab.server(trusted=False)
    trust(lab.own_known_hosts, first, second)
    backends = lab.backends("paramiko")
    connects(backends, first.host("a"))
    connects(backends, second.host("b"))


def gives_back(server: Any, lab: Any, payload: bytes) -> None:
    """Everything that is sent through `cat` comes back."""
    connection = lab.backends("paramiko").connect(server.host())
    ear = Ear()
    stream = connection.open("exec cat", ear.receiver(), deadline_s=20.0)
    stream.send(payload, deadline_s=60.0)
    stream.close_input()
    assert ear.wait(60.0)[1] == 0
    assert ear.output == payload
    connection.close()


def test_keys_exchanged_anew_in_mid_stream_stop_nothing(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paramiko.packet import Packetizer

    monkeypatch.setattr(Packetizer, "REKEY_BYTES", 300_000)
    gives_back(lab.server(), lab, os.urandom(1000) * 6000)


def test_a_host_that_asks_for_new_keys_often_is_served(lab: Any) -> None:
    gives_back(lab.server(options=("RekeyLimit 200K",)), lab, os.urandom(1000) * 6000)
