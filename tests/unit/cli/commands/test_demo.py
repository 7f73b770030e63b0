"""What `sim npu` makes of the command that it is given; that it runs is shown by tests/npu."""

import os
import platform
import sys

import pytest

from ascendrun.cli.commands.demo import choose_target, command_of, python_of
from ascendrun.core.errors import PreflightError


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate"])
def test_a_launcher_called_by_its_name_starts_the_python_that_has_torch_npu(launcher):
    words = command_of([launcher, "--option", "2", "train.py"], "/env/bin/python")
    assert words[0] == "/env/bin/python"
    assert words[-3:] == ["--option", "2", "train.py"]


@pytest.mark.parametrize("argv", [["python", "train.py"], ["/other/bin/torchrun", "train.py"], ["bash", "run.sh"]])
def test_any_other_command_stays_as_it_was_given(argv):
    assert command_of(argv, "/env/bin/python") == argv


def test_the_python_beside_a_program_given_by_path_is_asked(tmp_path):
    (tmp_path / "torchrun").touch()
    os.symlink(sys.executable, tmp_path / "python")
    assert python_of(str(tmp_path / "torchrun")) == str(tmp_path / "python")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere it is refused before that")
def test_without_torch_npu_anywhere_the_way_to_get_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    with pytest.raises(PreflightError) as refused:
        choose_target(None, sys.executable)
    assert refused.value.message.key == "sim.no-torch"
    assert "bin/setup-env" in str(refused.value.hint)
