"""Jobs on two virtual hosts, each with a network and two simulated cards of its own, through `ascendrun submit`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import pytest

from ascendrun.sim.ascend.scenario import Scenario
from tests.lib.vcluster.npus import install_on
from tests.programs.conftest import REPO

NODES = ("node1", "node2")
CARDS = 2
QUIET = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
}
DEADLINE_S = 1500.0


@dataclass(frozen=True)
class Done:
    """A job that ended: `spool` is what the head has of it."""

    code: int
    said: str
    spool: Path

    def succeed(self) -> Done:
        assert self.code == 0, self.said
        return self

    def metrics(self) -> list[dict[str, Any]]:
        """Of all ranks that write on the first node: under a launcher of its own they share a file."""
        files = sorted(self.spool.glob("attempt-1/node1/rank-*.metrics.0"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.metrics() if "loss" in line}

    def peak_bytes(self) -> int:
        """Of the allocator of one device, up to the last step."""
        return max(int(line["device_memory_bytes"]) for line in self.metrics() if "loss" in line)


@pytest.fixture
def write_job(ascendrun: Any, cluster: Any, toolkit: Path) -> Callable[..., Path]:
    """write_job(job, family="npu", per_node=2, **simulated): the file of `job`, which lacks what says where."""
    for number, name in enumerate(NODES, start=1):
        install_on(cluster, name, Scenario(cards=CARDS, number=number))
    (ascendrun.folder / "two.hosts").write_text(cluster.hostfile(slots=CARDS, names=NODES))

    def write(job: dict[str, Any], *, family: str = "npu", per_node: int = CARDS, **simulated: object) -> Path:
        whole = {
            "nodes": 2,
            **job,
            "hostfile": "two.hosts",
            "env": {**job.get("env", {}), **QUIET},
            "devices": {"type": family, "per_node": per_node},
            **where(family, toolkit, simulated),
        }
        path: Path = ascendrun.folder / f"{whole['name']}-{family}.yaml"
        path.write_text(json.dumps(whole))
        return path

    return write


@pytest.fixture
def submit(ascendrun: Any, write_job: Callable[..., Path]) -> Callable[..., Done]:
    """submit(job, …), as of write_job: how `submit` of it ended."""

    def run(job: dict[str, Any], **place: Any) -> Done:
        path = write_job(job, **place)
        done = ascendrun("submit", path, timeout=DEADLINE_S)
        said = str(done.stdout + done.stderr)
        told = re.search(r"^(j-\d+) submitted", said, re.MULTILINE)
        assert told, said
        return Done(done.returncode, said, ascendrun.state_dir / "jobs" / told.group(1))

    return run


def where(family: str, toolkit: Path, simulated: dict[str, Any]) -> dict[str, str]:
    """The Python of a job, and what makes it see simulated NPUs; on CPUs the environment that has no torch_npu."""
    if family == "cpu":
        return {"python": str(REPO / ".venv" / "bin" / "python")}
    exports = "".join(f"\nexport ASCENDRUN_SIM_NPU_{name}={value}" for name, value in simulated.items())
    return {"python": sys.executable, "setup": f"source {toolkit}/set_env.sh{exports}"}
