"""Hosts that are this machine: what a login there sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendrun.backends.local import connect_local, read_login
from ascendrun.core.errors import UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.core.settings import LOGIN_FILE, Settings, local_root


def test_a_host_without_variables_of_its_own_has_none(tmp_path: Path) -> None:
    assert read_login(tmp_path) == {}


def test_values_are_taken_to_the_end_of_the_line_and_comments_left_out(tmp_path: Path) -> None:
    (tmp_path / LOGIN_FILE).write_text("# a node\n\nPATH=/a:/b c\nEMPTY=\nOPTS=a=b\nno pair\n")
    assert read_login(tmp_path) == {"PATH": "/a:/b c", "EMPTY": "", "OPTS": "a=b"}


def test_variables_that_cannot_be_read_refuse_the_connection(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    root = local_root(settings, "npu1")
    root.mkdir(parents=True)
    (root / LOGIN_FILE).write_bytes(b"NAME=\xff\n")
    with pytest.raises(UnreachableError, match=LOGIN_FILE):
        connect_local(settings, Host("npu1", addr="local"))
