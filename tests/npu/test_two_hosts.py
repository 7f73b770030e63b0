"""Jobs of family npu on two virtual hosts, each with a network, cards and devices of its own: HCCL's way over TCP."""

from __future__ import annotations

import json
import sys

import pytest

from ascendrun.sim.ascend.hosts import install_on
from ascendrun.sim.ascend.scenario import Scenario
from tests.cluster.conftest import (  # noqa: F401  # fixtures
    ascendrun,
    cluster,
    machine_left_as_found,
    module_cluster,
    no_leftovers,
)
from tests.programs.conftest import TINY

QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", "HCCL_EXEC_TIMEOUT": "68"}
DEADLINE_S = 300.0


@pytest.fixture
def submit(ascendrun, cluster, toolkit):  # noqa: F811
    """submit(program, arguments, **simulated): how `submit` of a job of one rank on each of both nodes ended."""
    for number, name in enumerate(("node1", "node2"), start=1):
        install_on(cluster, name, Scenario(cards=2, number=number))
    (ascendrun.folder / "npu.hosts").write_text(cluster.hostfile(slots=2, names=("node1", "node2")))

    def run(program, arguments, **simulated):
        exports = "".join(f"\nexport ASCENDRUN_SIM_NPU_{name}={value}" for name, value in simulated.items())
        job = {"name": program, "program": program, "nodes": 2, "hostfile": "npu.hosts", "python": sys.executable,
               "devices": {"family": "npu", "per_node": 1}, "setup": f"source {toolkit}/set_env.sh{exports}",
               "args": arguments, "restart": {"max": 0}, "env": QUIET}
        path = ascendrun.folder / f"{program}.yaml"
        path.write_text(json.dumps(job))
        return ascendrun("submit", path, timeout=DEADLINE_S)

    return run


def losses(ascendrun):  # noqa: F811
    """By step, of the only job."""
    file, = ascendrun.state_dir.glob("jobs/*/attempt-1/node1/rank-0.metrics.0")
    return {line["step"]: line["loss"] for line in map(json.loads, file.read_text().splitlines()) if "loss" in line}


def test_a_bundled_program_trains_over_two_hosts_as_it_does_on_the_cpu(submit, ascendrun, launch):  # noqa: F811
    words = (option[2:].split("=") for option in (*TINY, "--dropout=0"))
    done = submit("trajectory", {name: json.loads(value) for name, value in words})
    assert done.returncode == 0, done.stdout + done.stderr
    on_cpu = launch("trajectory", [*TINY, "--dropout=0"], ranks=2, family="cpu").succeed().losses()
    assert len(on_cpu) > 3
    assert losses(ascendrun) == pytest.approx(on_cpu, rel=2e-3)


def test_explain_names_the_rank_whose_memory_broke_not_the_one_that_waited(submit, ascendrun):  # noqa: F811
    done = submit("meshtest", {"sizes": ["65536"], "repeats": 3, "budget_s": 0.1}, HURRY=60,
                  FAULTS="hbm-ecc:1@2")
    assert done.returncode == 1, done.stdout + done.stderr
    told = ascendrun("explain", "meshtest", "-o", "json")
    found = json.loads(told.stdout)["diagnosis"]
    assert (found["code"], found["ranks"], found["hosts"]) == ("ACL-507054", [1], ["node2"]), done.stderr
