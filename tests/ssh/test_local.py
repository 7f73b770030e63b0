"""This machine as a host: its folder, its environment, and what outlives a closed connection."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sshd import Ear

from ascendrun.backends.local import read_login
from ascendrun.core.errors import UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.core.settings import LOGIN_FILE, local_root
from tests.lib.vcluster.processes import await_that


def run(lab: Any, command: str, name: str = "here") -> Ear:
    connection = lab.backends().connect(Host(name, addr="local"))
    ear = Ear()
    connection.open(command, ear.receiver(), deadline_s=10.0)
    ear.wait()
    connection.close()
    return ear


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "-x", "a\nb", "a b"])
def test_a_name_that_leads_out_of_the_state_dir_is_refused(lab: Any, name: str) -> None:
    lab.refused(UnreachableError, Host(name, addr="local"), "invalid name")


def test_a_folder_that_cannot_be_made_is_told_with_its_path(lab: Any) -> None:
    lab.settings.state_dir.mkdir(exist_ok=True)
    (lab.settings.state_dir / "local").write_text("in the way")
    with pytest.raises(UnreachableError, match=str(lab.settings.state_dir)):
        lab.backends().connect(Host("here", addr="local"))


def test_a_detached_process_outlives_the_connection_and_holds_up_nothing(lab: Any) -> None:
    connection = lab.backends().connect(Host("here", addr="local"))
    ear = Ear()
    connection.open(
        "setsid sh -c 'trap \"\" HUP TERM; exec sleep 300' & echo $!; exec cat", ear.receiver(), deadline_s=10.0
    )
    await_that(lambda: ear.output.endswith(b"\n"), "the process is detached")
    pid = int(ear.output)
    await_that(lambda: os.getsid(pid) == pid, "it has a session of its own")
    connection.close()
    ear.wait()
    try:
        os.kill(pid, 0)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_grandchild_that_holds_the_output_does_not_hold_up_the_end(lab: Any) -> None:
    ear = run(lab, "sleep 300 & echo $!")
    pid = int(ear.output)
    os.kill(pid, signal.SIGKILL)
    assert ear.ends[0][1] == 0


def test_a_command_that_ignores_the_end_of_its_input_is_ended_by_close(lab: Any) -> None:
    connection = lab.backends().connect(Host("here", addr="local"))
    ear = Ear()
    stream = connection.open("trap '' TERM; echo on; while :; do sleep 1; done", ear.receiver(), deadline_s=10.0)
    await_that(lambda: ear.output, "it runs")
    stream.close()
    ear.wait()


def test_each_host_has_a_private_folder_and_the_heads_python(lab: Any) -> None:
    for name in ("one", "two"):
        output = run(lab, "echo $ASCENDRUN_NODE_ROOT; command -v python3; pwd", name).output.decode().splitlines()
        root = lab.settings.state_dir / "local" / name
        assert output == [str(root), str(Path(sys.executable).parent / "python3"), str(Path.home())]
        assert root.stat().st_mode & 0o777 == 0o700


def test_local_hosts_and_the_backends_module_import_no_paramiko(lab: Any) -> None:
    code = (
        "import sys; from pathlib import Path; from ascendrun.backends import Backends;"
        "from ascendrun.core.hosts import Host; from ascendrun.core.settings import Settings;"
        f"Backends(Settings(Path({str(lab.folder)!r}))).connect(Host('a', addr='local'));"
        "assert 'paramiko' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_paramiko_comes_without_invoke(lab: Any) -> None:
    code = (
        "import sys; from ascendrun.head.ssh.paramiko_import import paramiko;"
        "assert paramiko.Transport and 'invoke' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_host_without_variables_of_its_own_has_none(tmp_path: Path) -> None:
    assert read_login(tmp_path) == {}


def test_values_are_taken_to_the_end_of_the_line_and_comments_left_out(tmp_path: Path) -> None:
    (tmp_path / LOGIN_FILE).write_text("# a node\n\nPATH=/a:/b c\nEMPTY=\nOPTS=a=b\nno pair\n")
    assert read_login(tmp_path) == {"PATH": "/a:/b c", "EMPTY": "", "OPTS": "a=b"}


def test_variables_that_cannot_be_read_refuse_the_connection(lab: Any) -> None:
    root = local_root(lab.settings, "npu1")
    root.mkdir(parents=True)
    (root / LOGIN_FILE).write_bytes(b"NAME=\xff\n")
    lab.refused(UnreachableError, Host("npu1", addr="local"), LOGIN_FILE)
