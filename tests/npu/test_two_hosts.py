"""Jobs of family npu on two virtual hosts, each with a network, cards and a CANN of its own: HCCL's way over TCP."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ascendrun.sim.ascend.hosts import install_on
from ascendrun.sim.ascend.scenario import Scenario
from tests.cluster.conftest import (  # noqa: F401  # fixtures
    ascendrun, cluster, machine_left_as_found, module_cluster, no_leftovers)

TINY = ["tracks=60", "hidden=16", "layers=1", "heads=2", "batch_size=10", "epochs=1", "log_every=1"]


@pytest.fixture
def submit(ascendrun, cluster, toolkit):  # noqa: F811
    """submit(program, family, arguments, **env): the finished job's id and what `submit` said."""
    for number, name in enumerate(("node1", "node2"), start=1):
        install_on(cluster, name, Scenario(cards=2, number=number))
    (ascendrun.folder / "npu.hosts").write_text(cluster.hostfile(slots=2, names=("node1", "node2")))

    def run(program, family, arguments, **env):
        job = {"name": f"{program}-{family}", "program": program, "nodes": 2, "hostfile": "npu.hosts", "python": sys.executable,
               "devices": {"family": family, "per_node": 1}, "setup": f"source {toolkit}/set_env.sh", "args": arguments,
               "checks": {"skip": ["*"]}, "restart": {"max": 0},
               "env": {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", **env}}
        path = ascendrun.folder / f"{job['name']}.yaml"
        path.write_text(json.dumps(job))
        return ascendrun("submit", path, timeout=300)

    return run


def losses(ascendrun, name):  # noqa: F811
    found = {}
    for path in Path(ascendrun.state_dir, "jobs").glob("*/attempt-1/node1/rank-0.metrics.*"):
        if json.loads((path.parents[2] / "job.json").read_text())["name"] == name if (path.parents[2] / "job.json").exists() else True:
            found.update({line["step"]: line["loss"] for line in map(json.loads, path.read_text().splitlines()) if "loss" in line})
    return found


def test_collectives_cross_hosts_and_are_measured(submit):
    done = submit("meshtest", "npu", {"sizes": ["65536"], "repeats": 2, "budget_s": 0.1})
    assert done.returncode == 0, done.stdout + done.stderr
