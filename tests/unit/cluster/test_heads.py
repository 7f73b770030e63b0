"""Which of several machines is the head: an ssh that prints the role of each host stands in for the machines."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from ascendrun.cluster import standby
from ascendrun.cluster.heads import other_head
from ascendrun.cluster.standby import CONNECT_S, Follower, Role, find_head
from ascendrun.core.errors import ConflictError, UnreachableError
from ascendrun.core.settings import Settings
from ascendrun.core.standby_settings import Standby
from ascendrun.head.loop import daemon, guard

SSH = """#!/bin/sh
for word; do case $word in
    a|b|u@a|u@b) host=${word#u@};;
    ConnectTimeout=*) limit=${limit:-${word#*=}};;
esac; done
[ -e %(folder)s/$host ] || exec sleep 60
[ "$limit" -ge "$(cat %(folder)s/$host.slow 2>/dev/null || echo 0)" ] || exit 255
echo "Welcome to $host"; cat %(folder)s/$host
"""


@pytest.fixture
def roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the roles of hosts; one without a role does not respond."""
    (tmp_path / "ssh").write_text(SSH % {"folder": tmp_path})
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def put(slow_s: int = 0, **found: str) -> None:
        for host, role in found.items():
            (tmp_path / host).write_text(f"ascendrun-role {role}\n")
            (tmp_path / f"{host}.slow").write_text(str(slow_s))

    return put


def test_a_machine_that_does_not_respond_is_not_awaited_when_the_other_is_the_head(roles: Any) -> None:
    roles(b='["head", 3]')
    assert find_head(["u@a", "u@b"]) == "u@b"
    assert other_head(Settings(Path("/nowhere"), head="u@a, u@b"), is_of_machine=False) == "u@b"


def test_without_a_lease_the_higher_term_has_the_jobs(roles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "CONNECT_S", 60)  # a shell may take longer to start than a machine is waited for
    roles(a='["store", 1]', b='["store", 2]')
    assert find_head(["u@a", "u@b"]) == "u@b"
    assert find_head(["u@a"], lambda: Role("store", 2)) is None
    assert find_head(["u@b"], lambda: Role("store", 1)) == "u@b"


def test_a_copy_is_not_the_head(roles: Any) -> None:
    roles(a='["standby", 0]', b='["superseded", 4]')
    with pytest.raises(UnreachableError):
        find_head(["u@a", "u@b"], lambda: Role("standby"))
    assert find_head(["u@a"], lambda: Role("none")) is None


def test_a_standby_finds_a_head_whose_sshd_is_slow(roles: Any) -> None:
    roles(a='["head", 3]', slow_s=CONNECT_S + 1)
    assert find_head(["u@a"], lambda: Role("standby")) == "u@a"


def test_a_standby_that_takes_over_does_not_wait_for_the_lost_head(roles: Any) -> None:
    roles()
    found = iter([Role("standby"), Role("standby"), Role("head", 2)])
    assert find_head(["u@a"], lambda: next(found)) is None


def test_a_command_that_tests_the_lock_does_not_end_a_standby_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower, copy = Follower(Settings(tmp_path / "state"), Standby(("a", "b"), (), 20.0)), tmp_path / "state.standby"
    copy.mkdir()
    tester = os.open(copy / guard.LOCK_NAME, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(tester, fcntl.LOCK_SH)
    waits: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr(daemon.time, "sleep", lambda s: waits.append(s) or fcntl.flock(tester, fcntl.LOCK_UN))
        follower._take_lock()
    assert len(waits) == 1 and daemon.running_pid(copy) == os.getpid()
    with pytest.raises(ConflictError):
        Follower(Settings(tmp_path / "state"), Standby(("a", "b"), (), 20.0))._take_lock()
    os.close(tester)
