"""Hosts that fail examinations: found while they are idle, closed to jobs, and opened by an examination that passes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from scenes import BEAT_ON, Scene, await_that, run_text, venv_python

from ascendrun.sim.ascend import tree
from ascendrun.sim.ascend.scenario import Scenario
from tests.lib.vcluster.npus import install_on
from tests.lib.vcluster.processes import await_true

DEADLINE_S = 280.0


@pytest.fixture
def scene(scene_of: Callable[..., Scene]) -> Scene:
    return scene_of(2)


def states(scene: Scene) -> dict[str, str]:
    return {row["names"][0]: row["state"] for row in scene.ascendrun.ask("nodes", "--all")["machines"]}


def codes(scene: Scene) -> list[str]:
    """Of the events that belong to no job."""
    found: list[dict[str, Any]] = scene.ascendrun.ask("events")["events"]
    return [event["code"] for event in found if event["code"].startswith("host-")]


@pytest.mark.thorough
@pytest.mark.timeout(3 * DEADLINE_S)
def test_a_full_disk_closes_an_idle_host_until_an_examination_passes(scene: Scene) -> None:
    idle = {"ASCENDRUN_IDLE_CHECK_S": "5"}
    known = scene.start(scene.job("known", "print", "done"), env=idle)
    scene.await_state(known, "SUCCEEDED")
    scene.cluster.fill("node2")
    await_that(lambda: states(scene)["node2"] == "quarantined", "two strikes, a minute apart", deadline_s=180)
    assert states(scene)["node1"] == "free"
    assert codes(scene) == ["host-strike", "host-strike", "host-closed"]
    elsewhere = scene.start(scene.job("elsewhere", "print", "done", more="nodes: 1\n", hosts=["node2", "node1"]))
    scene.await_state(elsewhere, "SUCCEEDED")
    assert scene.show(elsewhere)["job"]["hosts"] == ["node1"]

    refused = scene.ascendrun("undrain", "node2")
    assert refused.returncode == 3 and states(scene)["node2"] == "quarantined", run_text(refused)
    scene.cluster.unfill("node2")
    deep = scene.job(
        "deep", hosts=["node2"], per_node=1, more=f"python: {venv_python()}\n", command=["python3", "-c", "pass"]
    )
    scene.ascendrun("doctor", deep, "--quick", "--deep", "-o", "json", timeout=DEADLINE_S, code=0)
    assert states(scene)["node2"] == "free" and codes(scene)[-1] == "host-opened"

    assert scene.ascendrun("drain", "node2", "--reason", "optics").returncode == 0
    scene.cluster.fill("node2")
    refused = scene.ascendrun("undrain", "node2")
    assert refused.returncode == 3 and states(scene)["node2"] == "drained", run_text(refused)
    scene.cluster.unfill("node2")
    done = scene.ascendrun("undrain", "node2")
    assert done.returncode == 0 and states(scene)["node2"] == "free", run_text(done)
    back = scene.start(scene.job("back", "print", "done", hosts=["node2"]))
    scene.await_state(back, "SUCCEEDED")


def test_a_host_is_drained_at_the_planned_time_and_before_it_only_jobs_start_that_end_in_time(scene: Scene) -> None:
    scene.await_state(scene.start(scene.job("known", "print", "done")), "SUCCEEDED")
    planned = scene.ascendrun.ask("drain", "node2", "--at", "2h", "--for", "1h", "--reason", "optics")
    assert [machine["state"] for machine in planned["machines"]] == ["free"]
    unlimited = scene.start(scene.job("unlimited", "print", "done", hosts=["node2"]))
    fits = scene.start(scene.job("fits", "print", "done", hosts=["node2"], more="timeouts: {run_s: 600}\n"))
    scene.await_state(fits, "SUCCEEDED")
    waiting = scene.show(unlimited)["job"]
    assert (waiting["state"], waiting["reason_code"]) == ("QUEUED", "too-few-hosts")
    assert "optics" in waiting["reason"]
    assert scene.ascendrun("undrain", "node2", "--no-check").returncode == 0
    scene.await_state(unlimited, "SUCCEEDED")

    running = scene.start(scene.job("running", "print", "ready", *BEAT_ON, hosts=["node2"]))
    scene.await_line(running, "ready", count=2)
    assert scene.ascendrun("drain", "node2", "--at", "1s").returncode == 0
    await_that(lambda: states(scene)["node2"] == "draining", "the planned time has come")
    assert scene.state(running) == "RUNNING"
    scene.enough()
    scene.await_state(running, "SUCCEEDED")
    assert states(scene)["node2"] == "drained"
    assert scene.ascendrun("drain", "node2", "--at", "1h", "--now").returncode == 2
    scene.ascendrun("undrain", "node2", "--no-check", code=0)


ECC = (
    "RuntimeError: operator():build/CMakeFiles/torch_npu.dir/compiler_depend.ts:137 NPU function error: "
    "HBM MULTI BIT ECC ERROR, error code is 507054"
)
BREAKS = """
import os, signal, sys
print("runs", flush=True)
if os.environ["RANK"] == "1" and os.environ["ASCENDRUN_RUN_ID"].endswith(".1"):
    sys.exit(os.environ["SAYS"])
signal.pause()
"""


@pytest.mark.thorough
@pytest.mark.timeout(3 * DEADLINE_S)
def test_an_ecc_error_closes_its_host_and_the_job_continues_on_the_spare(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(3)
    more = "nodes: 2\nspare_nodes: 1\nrestart: {max_restarts: 1, backoff_s: [1, 2]}\n"
    more += f"env: {{SAYS: {json.dumps(ECC)}}}\n"
    job = scene.start(scene.job("ecc", per_node=1, slots=1, command=["python3", "-c", BREAKS], more=more))
    scene.await_line(job, "runs", count=4, deadline_s=DEADLINE_S)
    shown = scene.show(job)["job"]
    assert (shown["attempt"], shown["hosts"]) == (2, ["node1", "node3"])
    assert states(scene)["node2"] == "quarantined"
    explained = json.loads(scene.ascendrun("explain", job, "--attempt", "1", "-o", "json").stdout)
    found = explained["diagnosis"]
    assert (found["code"], found["ranks"], found["hosts"]) == ("ACL-507054", [1], ["node2"])
    assert scene.ascendrun("stop", "--now", job).returncode == 0


EATS = """
import os, signal, time
print("runs", flush=True)
if os.environ["RANK"] == "1" and os.environ["ASCENDRUN_RUN_ID"].endswith(".1"):
    while not os.path.exists("/tmp/eat"):
        time.sleep(0.05)
    held = []
    while True:
        held.append(b"x" * 2**20)
signal.pause()
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A cgroup with 64 MiB of memory: its processes are killed by the kernel when they need more."""
    is_v1 = Path("/sys/fs/cgroup/memory").is_dir()
    group = Path("/sys/fs/cgroup", "memory" if is_v1 else "", f"ascendrun-{os.getpid()}")
    limit = "memory.limit_in_bytes" if is_v1 else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip("the cgroups here cannot limit memory")
        (group / limit).write_text(str(64 << 20))
        yield group
        assert await_true(lambda: not (group / "cgroup.procs").read_text(), deadline_s=DEADLINE_S)
    finally:
        group.rmdir()


@pytest.mark.thorough
@pytest.mark.timeout(3 * DEADLINE_S)
def test_a_rank_that_the_kernel_killed_for_memory_starts_again_where_the_policy_says_so(
    small_group: Path, scene: Scene
) -> None:
    for name, causes in (("again", "[oom]"), ("ends", "[infra]")):
        more = f"restart: {{max_restarts: 1, backoff_s: [1, 2], causes: {causes}}}\n"
        job = scene.start(scene.job(name, per_node=1, slots=1, command=["python3", "-c", EATS], more=more))
        scene.await_line(job, "runs", count=2, deadline_s=DEADLINE_S)
        ranks = [one for one in scene.cluster.processes("node2") if "/tmp/eat" in " ".join(one.argv)]
        for rank in ranks:
            (small_group / "cgroup.procs").write_text(str(rank.pid))
        scene.cluster.path("node2", "/tmp/eat").touch()
        if name == "again":
            scene.await_line(job, "runs", count=4, deadline_s=DEADLINE_S)
            assert scene.ascendrun("stop", "--now", job).returncode == 0
        else:
            scene.await_state(job, "FAILED", deadline_s=DEADLINE_S)
        scene.cluster.path("node2", "/tmp/eat").unlink()
        found = json.loads(scene.ascendrun("explain", job, "--attempt", "1", "-o", "json").stdout)["diagnosis"]
        assert (found["code"], found["ranks"], found["hosts"]) == ("host-oom", [1], ["node2"])
        said = [one for one in scene.show(job)["events"] if one["code"] in ("restarting", "gave-up")]
        rule = {"again": ("restarting", "again"), "ends": ("gave-up", "cause")}[name]
        assert [(one["code"], one["values"]["rule"], one["values"]["kind"]) for one in said] == [(*rule, "oom")]
    assert states(scene)["node2"] == "free"


@pytest.mark.thorough
@pytest.mark.timeout(3 * DEADLINE_S)
def test_a_link_that_stays_down_closes_its_host_after_two_strikes(scene: Scene) -> None:
    for number, name in enumerate(scene.cluster.hosts, start=1):
        install_on(scene.cluster, name, Scenario(cards=2, number=number))
    known = scene.start(scene.job("known", "print", "done"), env={"ASCENDRUN_IDLE_CHECK_S": "5"})
    scene.await_state(known, "SUCCEEDED")
    tree.set_fault(scene.cluster.path("node2", "/"), 1, "link_down")
    await_that(lambda: states(scene)["node2"] == "quarantined", "two strikes, a minute apart", deadline_s=DEADLINE_S)
    assert states(scene)["node1"] == "free"
    assert codes(scene) == ["host-strike", "host-strike", "host-closed"]
    waits = scene.start(scene.job("waits", "print", "done", hosts=["node2"]))
    explained = scene.ascendrun("explain", waits)
    assert "node2" in explained.stdout and "link down" in explained.stdout, run_text(explained)
    assert scene.ascendrun("stop", "--now", waits).returncode == 0
