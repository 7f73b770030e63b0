"""Bad inputs of trainings on real hosts: plan and submit refuse them from a head that has neither base nor data."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

import pytest
import yaml
from scenes import Scene, run_text

from tests.lib.vcluster.cluster import VirtualCluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "planner"))
from plan_world import BAD, QWEN, SHIPS, files

HOST_OF = {"n1": "node1", "n2": "node2"}


def write(cluster: VirtualCluster, changes: Mapping[str, bytes | None]) -> None:
    """Write files of the hosts by `path` or `host:path`; None: remove it."""
    for place, data in changes.items():
        name, _, path = place.rpartition(":")
        for host in (HOST_OF[name],) if name else cluster.hosts:
            file = cluster.path(host, path)
            if data is None:
                file.unlink(missing_ok=True)
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_every_bad_input_is_refused_on_two_hosts(
    ascendrun: Any, cluster_of: Callable[..., VirtualCluster], tmp_path: Path
) -> None:
    cluster = cluster_of(2)
    scene = Scene(ascendrun.on(cluster), cluster)
    (scene.folder / "two.hosts").write_text(cluster.hostfile(slots=2))
    path, wrong = scene.folder / "job.yaml", []
    for name, (program, args, changes, code) in BAD.items():
        write(cluster, files())
        write(cluster, changes)
        job = {
            "name": "job",
            "program": program,
            "nodes": 2,
            "devices": {"type": "cpu", "per_node": 2},
            "hostfile": "two.hosts",
            "args": {**(QWEN if program == "qwen_lora" else SHIPS), **args},
        }
        path.write_text(yaml.safe_dump(job))
        planned = scene.ascendrun("plan", path, "-o", "json")
        refused = scene.ascendrun("submit", "--detach", path)
        found = [each["code"] for each in json.loads(planned.stdout)["problems"]] if planned.stdout else []
        if (planned.returncode, refused.returncode) != (3, 3) or code not in found:
            wrong.append((name, code, found, run_text(planned), run_text(refused)))
        write(cluster, dict.fromkeys((place.rpartition(":")[2] for place in changes), None))
    assert not wrong
    jobs = json.loads(scene.ascendrun("ps", "--all", "-o", "json").stdout)
    assert not (jobs["jobs"] if isinstance(jobs, dict) else jobs), "no job was stored, so no device was leased"
