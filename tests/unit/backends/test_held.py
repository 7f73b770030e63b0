"""Connections of the engines that start a holder on each host."""

import sys

import pytest

from ascendrun.backends import held
from ascendrun.backends.kubernetes import exec_argv
from ascendrun.backends.slurm import step_argv
from ascendrun.core.errors import UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.head.ssh.transport import Receiver

HOST = Host("a", engine="q", allocation="train@prod")


def nothing(*_: object) -> None: ...


@pytest.mark.parametrize(("argv_of", "command"), [(step_argv, "srun"), (exec_argv, "kubectl")])
def test_a_machine_without_the_command_of_the_engine_connects_to_no_host(argv_of, command, monkeypatch) -> None:
    monkeypatch.setenv("PATH", sys.prefix)
    with pytest.raises(UnreachableError) as raised:
        held.connect(HOST, argv_of).open("true", Receiver(nothing, nothing, nothing), deadline_s=1.0)
    assert raised.value.message.values["command"] == command
