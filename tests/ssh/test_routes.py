"""Ways to a host that the user's ssh config describes: jumps, includes, certificates; read as `ssh` reads them."""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sshd import Ear, connects

from ascendrun.core.errors import HostKeyUnknownError, UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.head.ssh.config import SshConfig
from tests.lib.vcluster.processes import await_that


def logins(server: Any) -> int:
    return server.log.count("Accepted publickey")


def hop(name: str, server: Any, *more: str) -> list[str]:
    return [f"Host {name}", "  HostName 127.0.0.1", f"  Port {server.port}", *(f"  {line}" for line in more)]


def test_a_jump_hosts_unknown_key_is_named_as_the_jump_hosts(lab: Any) -> None:
    jump, inner = lab.server(trusted=False), lab.server()
    lab.write_config(*hop("gate", jump), *hop("inner", inner, "ProxyJump gate"))
    caught = lab.refused(HostKeyUnknownError, Host("inner"))
    assert str(caught.hint) == "ascendrun trust gate"
    assert logins(inner) == 0


def test_a_jump_host_that_is_down_fails_every_host_behind_it_at_once(lab: Any) -> None:
    jump, inner = lab.server(), lab.server()
    lab.write_config(*hop("gate", jump), *hop("inner", inner, "ProxyJump gate"))
    jump.stop()
    backends = lab.backends()

    def attempt(_: int) -> str:
        with pytest.raises(UnreachableError) as caught:
            backends.connect(Host("inner"))
        return str(caught.value.message)

    with ThreadPoolExecutor(8) as pool:
        messages = list(pool.map(attempt, range(8)))
    assert [message for message in messages if "gate" not in message] == []


def test_a_host_that_the_jump_host_cannot_reach_is_named_with_it(lab: Any) -> None:
    jump, inner = lab.server(), lab.server()
    lab.write_config(*hop("gate", jump), *hop("inner", inner, "ProxyJump gate"))
    inner.stop()
    lab.refused(UnreachableError, Host("inner"), "inner .*through jump host gate")


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.thorough)])
def test_many_hosts_behind_a_jump_host_cost_it_one_login(lab: Any, count: int) -> None:
    jump = lab.server(options=("MaxStartups 2", "MaxSessions 1"))
    inner = lab.server()
    lab.write_config(*hop("gate", jump), *hop("inner*", inner, "ProxyJump gate"))
    backends = lab.backends()
    assert backends.ssh().why_openssh(Host("inner1")) is None
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda number: connects(backends, Host(f"inner{number}")), range(count)))
    assert (logins(jump), logins(inner)) == (1, count)


def test_a_jump_host_that_was_restarted_is_logged_in_to_again(lab: Any) -> None:
    jump, inner = lab.server(), lab.server()
    lab.write_config(*hop("gate", jump), *hop("inner", inner, "ProxyJump gate"))
    backends = lab.backends()
    connection = backends.connect(Host("inner"))
    ear = Ear()
    connection.open("exec cat", ear.receiver(), deadline_s=10.0)
    jump.kill_sessions()
    ear.wait()
    await_that(lambda: not jump.session_pids(), "the jump host's sessions end")
    connects(backends, Host("inner"))
    assert logins(jump) == 2


def test_two_jumps_in_a_row_go_through_openssh(lab: Any) -> None:
    first, second, inner = lab.server(), lab.server(), lab.server()
    lab.write_config(
        *hop("first", first), *hop("second", second, "ProxyJump first"), *hop("inner", inner, "ProxyJump second")
    )
    users = lab.folder / "users_known_hosts"
    users.write_text(lab.own_known_hosts.read_text())  # ssh's own ssh to a jump host reads the user's file only
    backends = lab.backends()
    assert backends.ssh().why_openssh(Host("inner")).key == "ssh.several-jumps"
    connects(backends, Host("inner"))


def test_a_proxy_command_goes_through_openssh(lab: Any) -> None:
    server = lab.server()
    lab.write_config(
        *hop(
            "inner",
            server,
            "ProxyCommand python3 -c 'import socket,sys,threading,os;"
            's=socket.create_connection(("%h",%p));'
            'threading.Thread(target=lambda:[s.sendall(d) for d in iter(lambda:os.read(0,65536),b"")],'
            'daemon=True).start();[os.write(1,d) for d in iter(lambda:s.recv(65536),b"")]\'',
        )
    )
    backends = lab.backends()
    assert "proxycommand" in backends.ssh().why_openssh(Host("inner")).values["setting"]
    connects(backends, Host("inner"))
    lab.refused(UnreachableError, Host("inner"), "paramiko does not .*proxycommand", transport="paramiko")


def test_a_host_certificate_goes_through_openssh(lab: Any) -> None:
    authority = lab.folder / "ca"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(authority)], check=True)
    server = lab.server(trusted=False)
    subprocess.run(
        ["ssh-keygen", "-q", "-s", str(authority), "-I", "host", "-h", "-n", "inner", f"{server.host_key_file}.pub"],
        check=True,
    )
    server.stop()
    server.options.append(f"HostCertificate {server.host_key_file}-cert.pub")
    server.start()
    lab.write_config(*hop("inner", server, "HostKeyAlias inner"))
    (lab.folder / "users_known_hosts").write_text(f"@cert-authority inner {Path(f'{authority}.pub').read_text()}")
    backends = lab.backends()
    assert backends.ssh().why_openssh(Host("inner")).key == "ssh.host-certificates"
    connects(backends, Host("inner"))
    lab.refused(HostKeyUnknownError, Host("inner"), "authority", transport="paramiko")


def test_an_include_stays_with_paramiko(lab: Any) -> None:
    server = lab.server()
    included = lab.folder / "more.conf"
    included.write_text("\n".join(hop("inner", server)) + "\n")
    included.chmod(0o600)
    lab.write_config(f"Include {included}")
    backends = lab.backends()
    assert backends.ssh().why_openssh(Host("inner")) is None
    connects(backends, Host("inner"))


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_other_kinds_of_host_keys_and_names_with_several_addresses_work(lab: Any, kind: str) -> None:
    server = lab.server(host_key=kind, trusted=False)
    (lab.folder / "users_known_hosts").write_text(
        f"[localhost]:{server.port} {server.host_key.type} {server.host_key.base64}\n"
    )
    for transport in ("paramiko", "openssh"):
        connects(lab.backends(transport), Host("n", addr="localhost", port=server.port, user=server.host().user))


def test_a_host_recorded_under_its_hostfile_name_is_known_by_it(lab: Any) -> None:
    server = lab.server(trusted=False)
    (lab.folder / "users_known_hosts").write_text(
        f"[npu01]:{server.port} {server.host_key.type} {server.host_key.base64}\n"
    )
    for transport in ("paramiko", "openssh"):
        connects(lab.backends(transport), server.host("npu01"))


CONFIGS: dict[str, str] = {
    "plain": "Host n1\n  User anna\n  Port 2222\n  HostName 10.0.0.1\n  IdentityFile ~/k1\n  IdentityFile /k2\n",
    "equals, case and quotes": 'HOST n1\n  uSER="anna b"\n  pOrT = 77\n  hostname = "h"\n  IdentityFile="/a b/k"\n',
    "first wins": "User first\nHost *\n  User second\n  Port 5\nHost n1\n  Port 6\n",
    "negation": "Host * !n1\n  User wrong\nHost n?\n  User right\n",
    "match": "Match host n1 user root\n  Port 9\nMatch originalhost other\n  Port 10\nMatch !host n2\n  HostName h\n",
    "match on a changed host name": "Host n1\n  HostName real\nMatch host real\n  User anna\nMatch host n1\n  Port 4\n",
    "final": "Match final all\n  User last\n  Port 5\nHost n1\n  User first\n",
    "jump": "Host n1\n  ProxyJump anna@gate:2200\nHost *\n  ProxyCommand nc x\n",
    "no jump": "Host n1\n  ProxyJump none\nHost *\n  ProxyJump gate\n",
    "tokens": "HostName %h.example.org\nUser anna\nIdentityFile /keys/%r-%n-%p\nHostKeyAlias alias\n",
    "comments": "# one\n\n   # two\nHost n1 # three\n  User anna # four\n",
    "algorithms": "Ciphers aes256-gcm@openssh.com\nKexAlgorithms curve25519-sha256\nMACs hmac-sha2-512\n",
    "known hosts": "UserKnownHostsFile /a /b\nGlobalKnownHostsFile /c\nIdentitiesOnly yes\nAddressFamily inet\n",
    "crlf": "Host n1\r\n  User anna\r\n  Port 7\r\n",
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_config_means_what_ssh_says_it_means(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config"
    path.write_bytes(CONFIGS[name].encode())
    path.chmod(0o600)
    answer = subprocess.run(["ssh", "-G", "-F", str(path), "n1"], check=True, capture_output=True, text=True).stdout
    said: dict[str, list[str]] = {}
    for line in answer.splitlines():
        key, _, value = line.partition(" ")
        said.setdefault(key, []).append(value)
    target = SshConfig(path).resolve(Host("n1"))
    assert [target.address] == said["hostname"]
    assert [str(target.port)] == said["port"]
    assert [target.user] == said["user"]
    assert [target.jump] == said.get("proxyjump", [None])
    assert [target.key_alias] == said.get("hostkeyalias", [None])
    assert target.identities_only == (said["identitiesonly"] == ["yes"])
    if "IdentityFile" in CONFIGS[name]:
        home = str(Path("~").expanduser())
        tokens = {"%r": target.user, "%n": "n1", "%p": str(target.port), "~": home}
        told = said["identityfile"]
        for token, value in tokens.items():
            told = [file.replace(token, value) for file in told]
        assert list(target.identity_files) == told
    for keyword, value in target.algorithms.items():
        assert [value] == said[keyword]
    if "KnownHostsFile" in CONFIGS[name]:
        told = said["userknownhostsfile"] + said["globalknownhostsfile"]
        assert " ".join(target.known_hosts_files) == " ".join(told)


def test_a_thousand_hosts_and_blocks_are_resolved_without_asking_ssh(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("".join(f"Host n{i}\n  Port {i + 1}\n  User u{i}\n" for i in range(1000)))
    path.chmod(0o600)
    config = SshConfig(path)
    began = time.process_time()
    assert [config.resolve(Host(f"n{i}")).port for i in range(0, 1000, 10)] == list(range(1, 1001, 10))
    assert time.process_time() - began < 20.0
