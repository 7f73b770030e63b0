"""A shell completes jobs, hosts and templates; what cannot be read completes nothing and prints nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from ascendrun.cli.app import cli
from ascendrun.core.jobs.job import Job
from ascendrun.head.state.store import Store


def complete(*words: str) -> list[str]:
    found = BashComplete(cli, {}, "ascendrun", "_X").get_completions(list(words[:-1]), words[-1])
    return [item.value for item in found]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASCENDRUN_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_jobs_by_id_and_name(folder: Path) -> None:
    store = Store.open(folder)
    for number, name in enumerate(("train", "train", "eval")):
        store.add_job(
            key=str(number),
            make_job=lambda job_id, head_id, name=name: Job(
                id=job_id, name=name, run=job_id, hosts=("a",), grace_s=1, start_s=1, created_at_s=1.0
            ),
            spec={},
            hosts=[],
            trees=[],
            file=None,
            now_s=1.0,
        )
    store.close()
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
