"""The real torch_npu on the simulated CANN, built once for all tests; ranks are forked from one process that has it.

Nothing here says anything of speed. Run by .venv-npu's Python: bin/test does it, or
bin/setup-env --venv .venv-npu --over .venv npu-sim && .venv-npu/bin/python -m pytest tests/npu
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable

import pytest

from ascendrun.core.errors import AscendrunError
from ascendrun.sim.npu.build import build, environment, find_target
from tests.programs.conftest import REPO, Run, Server

PROGRAM_TESTS = REPO / "tests" / "programs"


Row = tuple[object, ...]
_rows = pytest.StashKey[list[Row]]()


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> list[Row]:
    """Rows that are shown at the end: program and way, launcher, ranks, steps, largest difference, seconds."""
    return pytestconfig.stash.setdefault(_rows, [])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash.get(_rows, [])
    if rows:
        terminalreporter.section("family npu over hccl beside cpu over gloo")
    for row in rows:
        terminalreporter.write_line("{:20} {:10} {:>2} ranks {:>3} steps   off {:8} {:>6}".format(*row))


@pytest.fixture(scope="session")
def toolkit() -> Path:
    """The simulated CANN; a machine that cannot have it skips with the reason, and in CI fails."""
    try:
        return build(find_target(sys.executable))
    except AscendrunError as error:
        reason = f"{error.message}; {error.hint}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def npu_environ(toolkit: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    own = {
        "PYTHONPATH": f"{REPO}{os.pathsep}{PROGRAM_TESTS}",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "ASCENDRUN_SIM_NPU_DEVICES": "4",
        "DS_ACCELERATOR": "npu",
    }
    return environment(toolkit, {**os.environ, **own})


@pytest.fixture(scope="session")
def npu_server(npu_environ: dict[str, str]) -> Iterator[Server]:
    """As the programs' own, with torch_npu imported and no device touched."""
    server = Server(Path(__file__).with_name("npuserver.py"), npu_environ)
    yield server
    server.close()


@pytest.fixture
def launch(npu_server: Server, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """launch(program, options, name=…, ranks=1, family="npu", env={…})."""
    runs = []

    def begin(
        program: str,
        options: Sequence[str],
        *,
        name: str = "run",
        ranks: int = 1,
        family: str = "npu",
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> Run:
        folder = tmp_path / name
        common = {"ASCENDRUN_DEVICE_TYPE": family, "ASCEND_PROCESS_LOG_PATH": str(folder / "log"), **env}
        rank_env = {rank: {"RANK": str(rank), **common} for rank in range(ranks)}
        if ranks == 1:
            rank_env[0].update(WORLD_SIZE="1", LOCAL_RANK="0")
        runs.append(Run(npu_server, folder, options, ranks, rank_env, (), program))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def plogs(run: Run) -> str:
    return "".join(path.read_text() for path in sorted(run.folder.glob("log/*/plog/*.log")))
