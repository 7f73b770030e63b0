"""Jobs of launcher: ray with the Ray of PyPI, on every backend."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cluster.scenes import CODE, await_that, run_text
from tests.contract.test_jobs import Place, place  # noqa: F401  # a fixture
from tests.lib.vcluster import containers

PYTHON = CODE / ".venv-ray" / "bin" / "python"
DRIVER = """
import ray
ray.init()
@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
class Worker:
    def where(self):
        print("a worker was here", flush=True)
        return ray.get_runtime_context().get_node_id()
workers = [Worker.remote() for _ in range(4)]
print(len(ray.nodes()), "nodes", len(set(ray.get([one.where.remote() for one in workers]))), "used", flush=True)
"""


@pytest.fixture(scope="session", autouse=True)
def ray_environment() -> None:
    setup = [CODE / "bin/setup-env", "--venv", str(PYTHON.parents[1]), "--over", ".venv", "ray"]
    subprocess.run(setup, cwd=CODE, check=True)


@pytest.mark.thorough
def test_the_nodes_of_a_job_form_a_ray_cluster_that_leaves_nothing(place: Place) -> None:  # noqa: F811
    (place.folder / "code" / "driver.py").write_text(DRIVER)
    more = f"launcher: ray\npython: {PYTHON}\n"
    if place.backend.get("engine") in ("docker", "podman"):  # whose image has no Ray
        mounts = [f"{path}:{path}:ro" for path in (CODE, sys.base_prefix)]
        more += f"container: {json.dumps({'image': containers.IMAGE, 'mounts': mounts})}\n"
    done = place.submit(place.job("ray", per_node=1, command=["python", "driver.py"], more=more))
    assert done.returncode == 0, run_text(done)
    assert "2 nodes 2 used" in done.stdout
    await_that(lambda: place.is_drained("j-0001"), "every byte is here")
    output = b"".join(path.read_bytes() for path in place.spooled("j-0001", "node-*.out.*"))
    assert output.count(b"a worker was here") == 4
    place.await_nobody("ray")
