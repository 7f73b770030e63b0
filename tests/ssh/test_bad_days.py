"""Hosts that are silent, impostors, overloaded or closed to us: each is told apart, in time, with the way out."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterator, List

import pytest
from conftest import DEADLINES, Ear, connects
from sshd import make_key, public_key, trust, wait_until

from ascendrun.core.errors import AuthFailed, CannotConnect, DeadlineExceeded, HostKeyChanged, HostKeyUnknown
from ascendrun.core.hosts import Host
from ascendrun.head.hostkeys import known_name, record_host_keys
from ascendrun.head.transport import Deadlines

BOTH = pytest.mark.parametrize("transport", ["paramiko", "openssh"])
SHORT = Deadlines(tcp_s=1.0, banner_s=1.0, kex_s=1.0, auth_s=1.0, open_s=1.0)
DEBUG = ("LogLevel DEBUG1",)


def login_attempts(server: Any) -> List[str]:
    return [line for line in server.log.splitlines() if "userauth-request" in line]


def connections_seen(server: Any) -> int:
    return server.log.count("Connection from")


@pytest.fixture
def silent_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(16)
        yield sock.getsockname()[1]


@BOTH
def test_a_host_that_accepts_and_says_nothing_is_given_up_in_time(lab: Any, transport: str, silent_port: int) -> None:
    with pytest.raises(CannotConnect) as caught:
        lab.backends(transport).connect(Host("mute", addr="127.0.0.1", port=silent_port), deadlines=SHORT)
    assert "mute" in caught.value.message and "banner" in caught.value.message
    assert "frozen" in (caught.value.hint or "")


@BOTH
def test_a_frozen_sshd_is_given_up_in_time(lab: Any, transport: str) -> None:
    server = lab.server()
    server.process.send_signal(signal.SIGSTOP)
    with pytest.raises(CannotConnect, match="banner"):
        lab.backends(transport).connect(server.host(), deadlines=SHORT)


def test_an_sshd_that_freezes_after_its_banner_is_given_up_in_time(lab: Any) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(1)
        host = Host("icy", addr="127.0.0.1", port=sock.getsockname()[1])
        kept: List[Any] = []
        greeter = threading.Thread(target=lambda: _greet(sock, kept))
        greeter.start()
        with pytest.raises(CannotConnect, match="icy .*no key exchange"):
            lab.backends("paramiko").connect(host, deadlines=SHORT)
        greeter.join()
        kept[0].close()


def _greet(sock: socket.socket, kept: List[Any]) -> None:
    connection = sock.accept()[0]
    connection.sendall(b"SSH-2.0-frozen\r\n")
    kept.append(connection)


def test_a_server_that_speaks_something_else_is_named(lab: Any) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(1)

        def answer() -> None:
            connection = sock.accept()[0]
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 101)
            connection.close()

        web = threading.Thread(target=answer)
        web.start()
        with pytest.raises(CannotConnect, match="no SSH server"):
            lab.backends("paramiko").connect(Host("web", addr="127.0.0.1", port=sock.getsockname()[1]), deadlines=SHORT)
        web.join()


@BOTH
def test_a_closed_port_is_named_with_its_host(lab: Any, transport: str) -> None:
    server = lab.server()
    server.stop()
    with pytest.raises(CannotConnect, match=f"(?i)node1 .*{server.port}.*refused"):
        lab.backends(transport).connect(server.host(), deadlines=SHORT)


@BOTH
def test_a_name_that_nobody_knows_is_named(lab: Any, transport: str) -> None:
    with pytest.raises(CannotConnect, match="no-such-host.invalid") as caught:
        lab.backends(transport).connect(Host("n1", addr="no-such-host.invalid"), deadlines=SHORT)
    assert "addr=" in (caught.value.hint or "")


@BOTH
def test_a_changed_host_key_stops_before_any_login_attempt(lab: Any, transport: str) -> None:
    server = lab.server(options=DEBUG, trusted=False)
    other = public_key(make_key(lab.folder / "other_host_key"))
    record_host_keys(lab.own_known_hosts, [(known_name("127.0.0.1", server.port), other)])
    with pytest.raises(HostKeyChanged) as caught:
        lab.backends(transport).connect(server.host(), deadlines=DEADLINES)
    assert server.host_key.fingerprint in caught.value.message
    assert str(lab.own_known_hosts) in caught.value.message
    assert "ascendrun trust --replace node1" in (caught.value.hint or "")
    if transport == "paramiko":
        assert other.fingerprint in caught.value.message
    wait_until(lambda: connections_seen(server), what="sshd saw us")
    assert login_attempts(server) == []


def test_a_host_with_a_key_of_another_type_than_recorded_is_changed_not_unknown(lab: Any) -> None:
    server = lab.server(options=DEBUG, host_key="ecdsa", trusted=False)
    other = public_key(make_key(lab.folder / "other_host_key"))
    record_host_keys(lab.own_known_hosts, [(known_name("127.0.0.1", server.port), other)])
    with pytest.raises(HostKeyChanged):
        lab.backends("paramiko").connect(server.host(), deadlines=DEADLINES)
    assert login_attempts(server) == []


@BOTH
def test_an_unknown_host_key_stops_before_any_login_attempt(lab: Any, transport: str) -> None:
    server = lab.server(options=DEBUG, trusted=False)
    with pytest.raises(HostKeyUnknown) as caught:
        lab.backends(transport).connect(server.host(), deadlines=DEADLINES)
    assert caught.value.hint == "ascendrun trust node1"
    assert login_attempts(server) == []
    assert not lab.own_known_hosts.exists()


@BOTH
def test_a_revoked_host_key_is_refused_although_it_is_recorded(lab: Any, transport: str) -> None:
    server = lab.server(options=DEBUG)
    key = server.host_key
    (lab.folder / "users_known_hosts").write_text(f"@revoked * {key.type} {key.base64}\n")
    with pytest.raises(HostKeyChanged, match="revoked"):
        lab.backends(transport).connect(server.host(), deadlines=DEADLINES)
    assert login_attempts(server) == []


@BOTH
def test_trust_reads_the_key_without_a_login_and_mends_a_changed_one(lab: Any, transport: str) -> None:
    server = lab.server(options=DEBUG, trusted=False)
    users = lab.folder / "users_known_hosts"
    users.write_text(f"# mine\n[127.0.0.1]:{server.port} ssh-ed25519 {public_key(make_key(lab.folder / 'k')).base64}\n")
    before = users.read_text()
    backends = lab.backends(transport)
    key = backends.ssh().scan_host_key(server.host(), deadlines=DEADLINES)
    assert key == server.host_key
    assert not [line for line in login_attempts(server) if "publickey" in line]
    assert backends.ssh().record_host_key(server.host(), key, replace=True)
    connects(backends, server.host())
    assert users.read_text() == before
    assert lab.own_known_hosts.stat().st_mode & 0o777 == 0o600


@BOTH
def test_a_key_replaced_in_our_own_file_is_not_taken_from_the_users_file_any_more(lab: Any, transport: str) -> None:
    server = lab.server(trusted=False)
    key = server.host_key
    name = known_name("127.0.0.1", server.port)
    (lab.folder / "users_known_hosts").write_text(f"{name} {key.type} {key.base64}\n")
    connects(lab.backends(transport), server.host())
    record_host_keys(lab.own_known_hosts, [(name, public_key(make_key(lab.folder / "new")))], replace=True)
    with pytest.raises(HostKeyChanged):
        lab.backends(transport).connect(server.host(), deadlines=DEADLINES)


@BOTH
def test_a_refused_user_key_is_told_and_not_tried_again_at_once(lab: Any, transport: str) -> None:
    server = lab.server()
    lab.write_config(identity=make_key(lab.folder / "stranger"))
    backends = lab.backends(transport)
    with pytest.raises(AuthFailed, match="node1 .*refused"):
        backends.connect(server.host(), deadlines=DEADLINES)
    seen = connections_seen(server)
    with pytest.raises(AuthFailed, match="not tried again for"):
        backends.connect(server.host(), deadlines=DEADLINES)
    assert connections_seen(server) == seen


def test_an_encrypted_key_without_a_passphrase_fails_at_once_and_names_the_agent(lab: Any) -> None:
    server = lab.server()
    locked = make_key(lab.folder / "locked", passphrase="open sesame")
    lab.write_config(identity=locked)
    with pytest.raises(AuthFailed, match="encrypted") as caught:
        lab.backends("paramiko").connect(server.host(), deadlines=DEADLINES)
    assert caught.value.hint == f"ssh-add {locked}"


def test_a_config_mended_after_a_failure_counts_for_the_next_try(lab: Any) -> None:
    server = lab.server()
    lab.write_config("Host node1", "  Port 1")
    backends = lab.backends("auto")
    host = Host("node1", addr="127.0.0.1", user=server.host().user)
    with pytest.raises(CannotConnect, match="port 1 .*refused"):
        connects(backends, host)
    lab.write_config("Host node1", f"  Port {server.port}")
    connects(backends, host)


def test_an_encrypted_key_fails_without_a_prompt_through_openssh_too(lab: Any) -> None:
    server = lab.server()
    lab.write_config(identity=make_key(lab.folder / "locked", passphrase="open sesame"))
    with pytest.raises(AuthFailed):
        lab.backends("openssh").connect(server.host(), deadlines=DEADLINES)


def test_a_wrong_passphrase_is_told_as_such(lab: Any) -> None:
    server = lab.server()
    lab.write_config(identity=make_key(lab.folder / "locked", passphrase="open sesame"))
    with pytest.raises(AuthFailed, match="locked: cannot be used"):
        lab.backends("paramiko", ask=lambda _: "guess").connect(server.host(), deadlines=DEADLINES)


def test_a_key_file_that_others_can_read_is_not_used(lab: Any) -> None:
    server = lab.server()
    lab.key.chmod(0o644)
    with pytest.raises(AuthFailed) as caught:
        lab.backends("paramiko").connect(server.host(), deadlines=DEADLINES)
    assert caught.value.hint == f"chmod 600 {lab.key}"


def test_a_passphrase_is_asked_for_once_for_all_hosts(lab: Any) -> None:
    servers = [lab.server(), lab.server()]
    locked = make_key(lab.folder / "locked", passphrase="open sesame")
    for server in servers:
        (server.folder / "authorized_keys").write_text(Path(f"{locked}.pub").read_text())
    lab.write_config(identity=locked)
    asked: List[str] = []
    backends = lab.backends("paramiko", ask=lambda text: asked.append(text) or "open sesame")
    for server in servers:
        connects(backends, server.host())
    assert asked == [f"Passphrase for {locked}: "]


def test_a_locked_key_works_without_asking_once_the_agent_holds_it(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = lab.server()
    locked = make_key(lab.folder / "locked", passphrase="open sesame")
    (server.folder / "authorized_keys").write_text(Path(f"{locked}.pub").read_text())
    lab.write_config(identity=locked)
    path = lab.folder / "agent.sock"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        wait_until(path.exists, what="the agent listens")
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        backends = lab.backends("paramiko")
        with pytest.raises(AuthFailed, match="encrypted"):
            connects(backends, server.host())
        open_copy = lab.folder / "open_copy"
        open_copy.write_bytes(locked.read_bytes())
        open_copy.chmod(0o600)
        subprocess.run(["ssh-keygen", "-q", "-p", "-P", "open sesame", "-N", "", "-f", str(open_copy)], check=True,
                       stdout=subprocess.DEVNULL)
        subprocess.run(["ssh-add", "-q", str(open_copy)], check=True, stderr=subprocess.DEVNULL)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: connects(backends, server.host()), range(4)))
        backends.close()
    finally:
        agent.kill()
        agent.wait()


def test_a_dead_agent_socket_does_no_harm(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = lab.server()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(lab.folder / "gone.sock"))
    connects(lab.backends("paramiko"), server.host())


@BOTH
def test_a_shell_that_refuses_commands_ends_in_an_answer(lab: Any, transport: str) -> None:
    server = lab.server(options=("ForceCommand /bin/false",))
    connection = lab.backends(transport).connect(server.host(), deadlines=DEADLINES)
    ear = Ear()
    try:
        connection.open("echo fine", ear.receiver(), deadline_s=10.0)
        assert ear.wait()[1] == 1
    except ConnectionError:
        pass  # gone before the command could be sent: an answer, too
    finally:
        connection.close()


@BOTH
def test_commands_follow_each_other_where_sshd_allows_one_session(lab: Any, transport: str) -> None:
    server = lab.server(options=("MaxSessions 1",))
    connection = lab.backends(transport).connect(server.host(), deadlines=DEADLINES)
    for number in range(5):
        ear = Ear()
        connection.open(f"echo {number}", ear.receiver(), deadline_s=20.0)
        assert ear.wait()[1] == 0
    connection.close()


def test_a_second_session_where_sshd_allows_one_is_refused_with_the_reason(lab: Any) -> None:
    server = lab.server(options=("MaxSessions 1",))
    connection = lab.backends("paramiko").connect(server.host(), deadlines=DEADLINES)
    ear, second = Ear(), Ear()
    stream = connection.open("exec cat", ear.receiver(), deadline_s=20.0)
    with pytest.raises(CannotConnect) as caught:
        connection.open("true", second.receiver(), deadline_s=5.0)
    assert "MaxSessions" in (caught.value.hint or "")
    stream.send(b"still here", deadline_s=5.0)
    stream.close_input()
    assert ear.wait()[1] == 0 and ear.output == b"still here"
    assert second.ends == []
    connection.close()


@BOTH
def test_an_sshd_that_drops_logins_at_random_serves_all_in_the_end(lab: Any, transport: str) -> None:
    server = lab.server(options=("MaxStartups 2",))
    backends = lab.backends(transport)
    generous = dataclasses.replace(DEADLINES, tcp_s=30.0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: connects(backends, server.host(), generous), range(8)))
    assert "MaxStartups" in server.log


def test_a_host_that_freezes_under_a_running_stream_refuses_the_next_command_in_time(lab: Any) -> None:
    server = lab.server()
    connection = lab.backends("paramiko").connect(server.host(), deadlines=DEADLINES)
    ear = Ear()
    connection.open("exec cat", ear.receiver(), deadline_s=10.0)
    frozen = server.session_pids()
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="node1"):
        connection.open("true", Ear().receiver(), deadline_s=1.0)
    assert time.monotonic() - began < 10.0
    connection.close()
    ear.wait(10.0)


def test_a_login_that_hangs_is_given_up_in_time(lab: Any) -> None:
    if os.geteuid() != 0:
        pytest.skip("sshd runs an AuthorizedKeysCommand only when it is root")
    server = lab.server(options=("AuthorizedKeysCommand /bin/sleep 30", "AuthorizedKeysCommandUser root",
                                 "AuthorizedKeysFile none"))
    with pytest.raises(CannotConnect, match="login within 1 s"):
        lab.backends("paramiko").connect(server.host(), deadlines=SHORT)


def test_a_server_without_a_common_algorithm_is_reached_through_openssh(lab: Any) -> None:
    server = lab.server(options=("KexAlgorithms sntrup761x25519-sha512@openssh.com",))
    backends = lab.backends("auto")
    connects(backends, server.host())
    assert "algorithm" in (backends.ssh().why_openssh(server.host()) or "")
    with pytest.raises(CannotConnect) as caught:
        lab.backends("paramiko").connect(server.host(), deadlines=DEADLINES)
    assert "OpenSSH" in (caught.value.hint or "")


def test_two_servers_at_one_address_are_known_by_their_ports(lab: Any) -> None:
    first, second = lab.server(trusted=False), lab.server(trusted=False)
    trust(lab.own_known_hosts, first, second)
    backends = lab.backends("paramiko")
    connects(backends, first.host("a"))
    connects(backends, second.host("b"))


def gives_back(server: Any, lab: Any, payload: bytes) -> None:
    """Everything that is sent through `cat` comes back."""
    connection = lab.backends("paramiko").connect(server.host(), deadlines=DEADLINES)
    ear = Ear()
    stream = connection.open("exec cat", ear.receiver(), deadline_s=10.0)
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
