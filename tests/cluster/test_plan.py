"""A training that would fail on real hosts: submit and retry refuse it from a head that has neither base nor data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Callable

import pytest
from scenes import Scene

from tests.lib.plan_world import files, write_job
from tests.lib.vcluster.cluster import VirtualCluster

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


@pytest.fixture
def scene(scene_of: Callable[..., Scene]) -> Scene:
    made = scene_of(2)
    (made.folder / "two.hosts").write_text(made.cluster.hostfile(slots=2))
    write(made.cluster, files())
    return made


def test_submit_and_retry_of_a_training_that_would_fail_end_before_any_process(scene: Scene) -> None:
    path = write_job(scene.folder, "qwen_lora", {"target_modules": ["wqkv"], "data_path": "/data/none.json"})
    job = scene.ascendrun.ask("submit", "--wait", path, code=3)["id"]
    scene.ascendrun("retry", job, code=0)
    scene.ascendrun("wait", job, code=3)
    shown = scene.show(job)
    states = [event["attempt"] for event in shown["events"] if event["values"].get("state") == "FAILED"]
    assert shown["job"]["state"] == "FAILED" and states == [1, 2]
    assert shown["job"]["reason_code"] == "training-refused" and "started_at_s" not in shown["job"]
