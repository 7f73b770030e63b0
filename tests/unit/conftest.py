"""Worlds of the unit tests: a command line over a story, notifiers and their services, a simulated node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import pytest

if TYPE_CHECKING:
    from tests.lib.small_world import World
    from tests.lib.story_cluster import Desk, Run


@pytest.fixture
def say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Callable[..., Run]:
    """say(words): a command line in tmp_path, over the state directory there."""
    from ascendrun.cli import main
    from tests.lib.story_cluster import Run

    monkeypatch.setenv("ASCENDRUN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("NO_COLOR", "FORCE_COLOR", "LC_ALL", "LC_MESSAGES", "LANGUAGE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("ASCENDRUN_COLOR", "ASCENDRUN_HOSTFILE", "ASCENDRUN_EXEC_TIMEOUT_S", "ASCENDRUN_LANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.chdir(tmp_path)

    def run(*argv: str, **options: Any) -> Run:
        capsysbinary.readouterr()
        code = main(argv, **options)
        captured = capsysbinary.readouterr()
        return Run(code, captured.out.decode("utf-8", "replace"), captured.err.decode(), captured.out)

    return run


@pytest.fixture
def desk(tmp_path: Path, say: Callable[..., Run]) -> Desk:
    from ascendrun.core.settings import Settings
    from tests.lib.story_cluster import Desk, StoryCluster

    (tmp_path / "all.hosts").write_text("n1 addr=10.0.0.1 slots=2 groups=g\nn2 addr=10.0.0.2 slots=2\n")
    (tmp_path / "job.yaml").write_text(
        "name: demo\ncommand: [python, -m, train]\nnodes: 2\ndevices: {type: cpu, per_node: 2}\nhostfile: all.hosts\n"
    )
    cluster = StoryCluster(Settings(state_dir=tmp_path / "state"))

    def make(settings: Settings) -> StoryCluster:
        cluster.settings = cluster.head.settings = settings
        return cluster

    return Desk(cluster, partial(say, make_cluster=make), tmp_path)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Nodes that answer as told, below the real store and jobs."""
    from tests.lib.small_world import World

    made = World(tmp_path)
    yield made
    made.store.close()


@pytest.fixture
def heads(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """heads(settings text): a notice_head.Head."""
    from tests.lib.notice_head import Head

    with ExitStack() as made:

        def make(text: str, **options: Any) -> Head:
            (tmp_path / "config.yaml").write_text(text)
            return made.enter_context(closing(Head(tmp_path, **options)))

        yield make


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """serve(answer, …): a web service that answers so, then OK."""
    from tests.lib.notice_head import OK
    from tests.lib.web_service import Service

    with ExitStack() as made:
        yield lambda *answers, **options: made.enter_context(closing(Service(*answers, **{"default": OK, **options})))


@pytest.fixture
def sim_node(tmp_path: Path) -> Any:
    """A simulated node in a folder."""
    from ascendrun.sim.ascend.scenario import Scenario
    from tests.lib.sim_node import SimNode

    return SimNode(tmp_path / "node").install(Scenario())
