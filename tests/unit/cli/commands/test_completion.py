"""A shell completes jobs, hosts and templates; what cannot be read completes nothing and prints nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from ascendrun.cli.app import cli
from ascendrun.head.state.store import Store
from tests.lib.demo_jobs import store_job


def complete(*words: str) -> list[str]:
    found = BashComplete(cli, {}, "ascendrun", "_X").get_completions(list(words[:-1]), words[-1])
    return [item.value for item in found]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASCENDRUN_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def jobs(folder: Path) -> None:
    """j-0001 and j-0002 train, j-0003 eval."""
    store = Store.open(folder)
    for number, name in enumerate(("train", "train", "eval")):
        store_job(store, str(number), name=name)
    store.close()


@pytest.mark.usefixtures("jobs")
def test_jobs_by_id_and_name() -> None:
    assert complete("stop", "") == ["j-0003", "j-0002", "j-0001", "train", "eval"]
    assert complete("logs", "tr") == ["train"]
    assert complete("top", "--job", "e") == ["eval"]
    assert complete("status", "j-0001") == ["j-0001"], "an alias completes too"


def test_hosts_of_the_hostfile(folder: Path) -> None:
    (folder / "all.hosts").write_text("npu01\nnpu02 slots=8\n")
    assert complete("exec", "-H", "all.hosts", "--hosts", "npu") == ["npu01", "npu02"]
    assert complete("exec", "-H", "none.hosts", "--hosts", "npu") == []


def test_templates(folder: Path) -> None:
    assert "quickstart" in complete("init", "qui")


def test_a_broken_state_directory_completes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "state.db").write_text("not a database")
    assert complete("stop", "") == []
    monkeypatch.setenv("ASCENDRUN_COLOR", "purple")
    assert complete("stop", "") == []
    assert capfd.readouterr() == ("", "")


SHELLS = {
    "bash": """
        source <(ascendrun completion bash)
        COMP_WORDS=({words}) COMP_CWORD={last}
        _ascendrun_completion ascendrun
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """,
    "zsh": """
        compdef() {{ function=$1 }}
        compadd() {{ print -l -- ${{(P)@[-1]}} }}
        source <(ascendrun completion zsh)
        words=({words}) CURRENT=$(({last} + 1))
        $function
    """,
    "fish": """
        ascendrun completion fish | source
        complete --do-complete '{words}'
    """,
}
"""What a shell runs for the Tab key after these words. The function that zsh offers values with is a stand-in."""


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.usefixtures("jobs")
def test_a_real_shell_completes(shell: str, folder: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        stop = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        stop(f"{shell} is not installed")
    (folder / "all.hosts").write_text("npu01\nnpu02 slots=8\n")
    (folder / "ascendrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m ascendrun "$@"\n')
    (folder / "ascendrun").chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[4]),
        "ASCENDRUN_HOSTFILE": str(folder / "all.hosts"),
    }
    for words, expected in (
        ("ascendrun stop j-", {"j-0001", "j-0002", "j-0003"}),
        ("ascendrun logs tr", {"train"}),
        ("ascendrun exec --hosts npu", {"npu01", "npu02"}),
        ("ascendrun init quick", {"quickstart"}),
        ("ascendrun completion f", {"fish"}),
    ):
        script = SHELLS[shell].format(words=words, last=len(words.split()) - 1)
        done = subprocess.run([program, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
        assert (set(done.stdout.split()), done.stderr) == (expected, ""), words
