"""Keys that do not fit: a host's that is unknown, changed or revoked, ours that is refused or locked."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sshd import connects, make_key, public_key

from ascendrun.core.errors import AuthenticationError, HostKeyChangedError, HostKeyUnknownError
from ascendrun.head.ssh.host_keys import known_name, record_host_keys
from tests.lib.vcluster.processes import await_that

BOTH = pytest.mark.parametrize("transport", ["paramiko", "openssh"])
DEBUG = ("LogLevel DEBUG1",)


def login_attempts(server: Any) -> list[str]:
    return [line for line in server.log.splitlines() if "userauth-request" in line]


def connections_seen(server: Any) -> int:
    return server.log.count("Connection from")


@BOTH
def test_a_changed_host_key_stops_before_any_login_attempt(lab: Any, transport: str) -> None:
    server = lab.server(options=DEBUG, trusted=False)
    other = public_key(make_key(lab.folder / "other_host_key"))
    record_host_keys(lab.own_known_hosts, [(known_name("127.0.0.1", server.port), other)])
    caught = lab.refused(HostKeyChangedError, server.host(), transport=transport)
    assert server.host_key.fingerprint in str(caught.message)
    assert str(lab.own_known_hosts) in str(caught.message)
    assert "ascendrun trust --replace node1" in str(caught.hint)
    if transport == "paramiko":
        assert other.fingerprint in str(caught.message)
    await_that(lambda: connections_seen(server), "sshd saw us")
    assert login_attempts(server) == []


def test_a_host_with_a_key_of_another_type_than_recorded_is_changed_not_unknown(lab: Any) -> None:
    server = lab.server(options=DEBUG, host_key="ecdsa", trusted=False)
    other = public_key(make_key(lab.folder / "other_host_key"))
    record_host_keys(lab.own_known_hosts, [(known_name("127.0.0.1", server.port), other)])
    lab.refused(HostKeyChangedError, server.host(), transport="paramiko")
    assert login_attempts(server) == []


@BOTH
def test_an_unknown_host_key_stops_before_any_login_attempt(lab: Any, transport: str) -> None:
    server = lab.server(options=DEBUG, trusted=False)
    caught = lab.refused(HostKeyUnknownError, server.host(), transport=transport)
    assert str(caught.hint) == "ascendrun trust node1"
    assert login_attempts(server) == []
    assert not lab.own_known_hosts.exists()


@BOTH
def test_a_revoked_host_key_is_refused_although_it_is_recorded(lab: Any, transport: str) -> None:
    server = lab.server(options=DEBUG)
    key = server.host_key
    (lab.folder / "users_known_hosts").write_text(f"@revoked * {key.type} {key.base64}\n")
    lab.refused(HostKeyChangedError, server.host(), "revoked", transport=transport)
    assert login_attempts(server) == []


@BOTH
def test_trust_reads_the_key_without_a_login_and_mends_a_changed_one(lab: Any, transport: str) -> None:
    server = lab.server(options=DEBUG, trusted=False)
    users = lab.folder / "users_known_hosts"
    users.write_text(f"# mine\n[127.0.0.1]:{server.port} ssh-ed25519 {public_key(make_key(lab.folder / 'k')).base64}\n")
    before = users.read_text()
    backends = lab.backends(transport)
    key = backends.ssh().scan_host_key(server.host())
    assert key == server.host_key
    assert not [line for line in login_attempts(server) if "publickey" in line]
    assert record_host_keys(lab.own_known_hosts, [(known_name("127.0.0.1", server.port), key)], replace=True)
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
    lab.refused(HostKeyChangedError, server.host(), transport=transport)


@BOTH
def test_a_refused_user_key_is_told_and_not_tried_again_at_once(lab: Any, transport: str) -> None:
    server = lab.server()
    lab.write_config(identity=make_key(lab.folder / "stranger"))
    backends = lab.backends(transport)
    with pytest.raises(AuthenticationError, match="node1 .*rejected"):
        backends.connect(server.host())
    seen = connections_seen(server)
    with pytest.raises(AuthenticationError, match="next attempt in"):
        backends.connect(server.host())
    assert connections_seen(server) == seen


@BOTH
def test_an_encrypted_key_without_a_passphrase_fails_at_once_and_names_the_agent(lab: Any, transport: str) -> None:
    server = lab.server()
    locked = make_key(lab.folder / "locked", passphrase="open sesame")
    lab.write_config(identity=locked)
    caught = lab.refused(AuthenticationError, server.host(), transport=transport)
    if transport == "paramiko":
        assert "encrypted" in str(caught.message) and str(caught.hint) == f"ssh-add {locked}"


def test_a_wrong_passphrase_is_told_as_such(lab: Any) -> None:
    server = lab.server()
    lab.write_config(identity=make_key(lab.folder / "locked", passphrase="open sesame"))
    lab.refused(AuthenticationError, server.host(), "locked: not usable", transport="paramiko", ask=lambda _: "guess")


def test_a_key_file_that_others_can_read_is_not_used(lab: Any) -> None:
    server = lab.server()
    lab.key.chmod(0o644)
    caught = lab.refused(AuthenticationError, server.host(), transport="paramiko")
    assert str(caught.hint) == f"chmod 600 {lab.key}"


def test_a_passphrase_is_asked_for_once_for_all_hosts(lab: Any) -> None:
    servers = [lab.server(), lab.server()]
    locked = make_key(lab.folder / "locked", passphrase="open sesame")
    for server in servers:
        (server.folder / "authorized_keys").write_text(Path(f"{locked}.pub").read_text())
    lab.write_config(identity=locked)
    asked: list[str] = []
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
        await_that(path.exists, "the agent listens")
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        backends = lab.backends("paramiko")
        with pytest.raises(AuthenticationError, match="encrypted"):
            connects(backends, server.host())
        open_copy = lab.folder / "open_copy"
        open_copy.write_bytes(locked.read_bytes())
        open_copy.chmod(0o600)
        subprocess.run(
            ["ssh-keygen", "-q", "-p", "-P", "open sesame", "-N", "", "-f", str(open_copy)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
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
