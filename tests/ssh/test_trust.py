"""`ascendrun trust`: fingerprints are shown before anything is recorded, and a changed key is never taken silently."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
from sshd import Sshd

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environ(lab: Any) -> dict[str, str]:
    return {
        **os.environ,
        "ASCENDRUN_STATE_DIR": str(lab.settings.state_dir),
        "HOME": str(lab.folder),
        "XDG_CONFIG_HOME": str(lab.folder),
        "PYTHONPATH": str(CHECKOUT),
        "TERM": "dumb",
    }


def write_hostfile(lab: Any, *servers: Sshd) -> str:
    lines = [f"node{index} addr=127.0.0.1 port={server.port}" for index, server in enumerate(servers)]
    (lab.folder / "all.hosts").write_text("\n".join([*lines, "here addr=local"]) + "\n")
    return str(lab.folder / "all.hosts")


def trust(environ: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ascendrun", "trust", *argv],
        env=environ,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


def test_keys_are_recorded_after_a_yes(lab: Any, environ: dict[str, str]) -> None:
    servers = [lab.server(trusted=False), lab.server(trusted=False)]
    hostfile = write_hostfile(lab, *servers)
    child = pexpect.spawn(
        sys.executable, ["-m", "ascendrun", "trust", "--hostfile", hostfile], env=environ, timeout=60, encoding="utf-8"
    )
    child.expect_exact("Record 2 keys?")
    for server in servers:
        assert server.host_key.fingerprint in (child.before or "")
    assert not lab.own_known_hosts.exists()
    child.sendline("y")
    child.expect_exact("recorded 2 keys")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert all(server.host_key.base64 in lab.own_known_hosts.read_text() for server in servers)
    lab.backends("paramiko").connect(servers[0].host()).close()


def test_without_a_terminal_nothing_is_recorded_unless_told(lab: Any, environ: dict[str, str]) -> None:
    hostfile = write_hostfile(lab, lab.server(trusted=False))
    refused = trust(environ, "-H", hostfile)
    assert refused.returncode == 2 and "--yes" in refused.stderr and "SHA256:" in refused.stdout
    assert not lab.own_known_hosts.exists()
    assert trust(environ, "-H", hostfile, "--yes").returncode == 0
    again = trust(environ, "-H", hostfile)
    assert again.returncode == 0 and "known" in again.stdout


def test_printing_records_nothing(lab: Any, environ: dict[str, str]) -> None:
    server = lab.server(trusted=False)
    printed = trust(environ, "-H", write_hostfile(lab, server), "--print")
    assert printed.stdout == f"[127.0.0.1]:{server.port} {server.host_key.type} {server.host_key.base64}\n"
    assert printed.returncode == 0 and not lab.own_known_hosts.exists()


def test_a_changed_key_is_refused_until_replaced(lab: Any, environ: dict[str, str]) -> None:
    old, new = lab.server(trusted=False), lab.server(trusted=False)
    lab.own_known_hosts.parent.mkdir(exist_ok=True)
    lab.own_known_hosts.write_text(f"[127.0.0.1]:{new.port} {old.host_key.type} {old.host_key.base64}\n")
    hostfile = write_hostfile(lab, new)
    refused = trust(environ, "-H", hostfile, "--yes")
    assert refused.returncode == 5
    assert "CHANGED" in refused.stdout and "ascendrun trust --replace node0" in refused.stderr
    assert new.host_key.base64 not in lab.own_known_hosts.read_text()
    assert trust(environ, "-H", hostfile, "--yes", "--replace").returncode == 0
    assert old.host_key.base64 not in lab.own_known_hosts.read_text()
    assert new.host_key.base64 in lab.own_known_hosts.read_text()


def test_a_host_that_does_not_answer_leaves_the_others_recorded(lab: Any, environ: dict[str, str]) -> None:
    alive, dead = lab.server(trusted=False), lab.server(trusted=False)
    dead.stop()
    done = trust(environ, "-H", write_hostfile(lab, alive, dead), "--yes")
    assert done.returncode == 6
    assert "node1" in done.stderr and alive.host_key.base64 in lab.own_known_hosts.read_text()
