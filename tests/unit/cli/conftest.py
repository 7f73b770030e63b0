"""The command line over a cluster that plays a story."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from story_cluster import Desk, Run, StoryCluster

from ascendrun.cli import main
from ascendrun.core.settings import Settings


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Desk:
    monkeypatch.setenv("ASCENDRUN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("NO_COLOR", "FORCE_COLOR", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    for name in ("ASCENDRUN_COLOR", "ASCENDRUN_HOSTFILE", "ASCENDRUN_EXEC_TIMEOUT_S", "ASCENDRUN_LANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "C.UTF-8")
    (tmp_path / "all.hosts").write_text("n1 addr=10.0.0.1 slots=2 groups=g\nn2 addr=10.0.0.2 slots=2\n")
    (tmp_path / "job.yaml").write_text(
        "name: demo\ncommand: [python, train.py]\nnodes: 2\ndevices: {type: cpu, per_node: 2}\nhostfile: all.hosts\n"
    )
    monkeypatch.chdir(tmp_path)
    cluster = StoryCluster(Settings(state_dir=tmp_path / "state"))

    def say(*argv: str) -> Run:
        capsysbinary.readouterr()

        def make(settings: Settings) -> StoryCluster:
            cluster.settings = cluster.head.settings = settings
            return cluster

        code = main(argv, make_cluster=make)
        captured = capsysbinary.readouterr()
        return Run(code, captured.out.decode("utf-8", "replace"), captured.err.decode(), captured.out)

    return Desk(cluster, say, tmp_path)
