"""Words on their way to a host without an agent: exact, and never read as code, in every login shell at hand."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ascendrun.head.agents.connections import COMMAND, MAGIC, encode_argv

ODD = [
    "a'; touch PWNED; echo 'b",
    "$(touch PWNED)",
    "`touch PWNED`",
    "",
    " two  spaces ",
    "new\nline\n",
    "\\0041 %s %b \\n",
    "汉字",
    "-n",
    "*",
    "~",
    "!!",
    "\udcff\udc80",
    "tab\tend",
]
SHELLS = [shell for shell in ("sh", "dash", "bash", "zsh", "fish", "csh") if shutil.which(shell)]


def run(shell: str, words: list[str], folder: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [shell, "-c", COMMAND], input=encode_argv(["30", *words]), capture_output=True, cwd=folder, timeout=60
    )


@pytest.mark.parametrize("shell", SHELLS)
def test_arguments_arrive_byte_for_byte_and_are_never_code(shell: str, tmp_path: Path) -> None:
    python = "import os,sys; sys.stdout.buffer.write(b'|'.join(os.fsencode(arg) for arg in sys.argv[1:]))"
    done = run(shell, ["python3", "-c", python, *ODD], tmp_path)
    told = done.stdout.split(MAGIC, 1)[1].split(b"|")
    assert told == [word.encode("utf-8", "surrogateescape") for word in ODD], done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shell", SHELLS)
def test_the_exit_code_and_a_missing_program_are_told(shell: str, tmp_path: Path) -> None:
    assert run(shell, ["python3", "-c", "raise SystemExit(7)"], tmp_path).returncode == 7
    assert run(shell, ["no-such-program"], tmp_path).returncode == 127


def test_a_command_that_takes_too_long_is_ended_by_the_node_itself(tmp_path: Path) -> None:
    words = encode_argv(["0.2", "sleep", "600"])
    done = subprocess.run(["sh", "-c", COMMAND], input=words, capture_output=True, timeout=60)
    assert done.returncode == 124


def test_a_nul_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError):
        encode_argv(["a\0b"])
