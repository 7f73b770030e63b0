"""Two head nodes and the same NPUs: nothing is used twice, nothing stays leased, who waits runs afterwards."""

from __future__ import annotations

import json
import random
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Ascendrun
from scenes import NpuScene, Scene, await_that

from ascendrun.sim.ascend.scenario import Scenario
from ascendrun.sim.ascend.tree import install_on
from ascendrun.sim.vcluster.cluster import VirtualCluster

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
USE = """
import fcntl, json, os, sys, time
devices = os.environ["ASCEND_RT_VISIBLE_DEVICES"].split(",")
mine = devices[int(os.environ["LOCAL_RANK"])]
base = os.environ["HCCL_IF_BASE_PORT"]
names = ["npu-" + mine] + (["hccl-" + base] if os.environ["LOCAL_RANK"] == "0" else [])
used = [open("/tmp/use/" + name, "w") for name in names]
for file in used:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with open("/tmp/use/twice", "a") as log:
            log.write(file.name + "\\n")
print(json.dumps({"base": int(base), "devices": devices}), flush=True)
time.sleep(float(sys.argv[1]))
while sys.argv[2:] and not os.path.exists("/tmp/use/go"):
    time.sleep(0.05)
"""


def install(scene: Scene, hosts: Any, cards: int) -> None:
    for number, name in enumerate(hosts, start=1):
        install_on(scene.cluster, name, Scenario(cards=cards, number=number))
        use = scene.cluster.path(name, "/tmp/use")
        use.mkdir(exist_ok=True)
        use.chmod(0o777)
    (scene.folder / "code" / "use.py").write_text(USE)


def npu_job(scene: Scene, name: str, ids: list[int], *words: object, hosts: Any) -> Path:
    """A job on these NPUs of each host. Its ranks state what they use, on their node. `words`: seconds, and "go" to
    wait for /tmp/use/go."""
    (scene.folder / f"{name}.hosts").write_text(scene.cluster.hostfile(slots=len(ids), names=hosts))
    path = scene.folder / f"{name}.yaml"
    command = json.dumps(["python3", "use.py", *map(str, words)])
    path.write_text(
        f"name: {name}\ncommand: {command}\nhostfile: {name}.hosts\nworkdir: {{path: code}}\n"
        f"setup: source /usr/local/Ascend/ascend-toolkit/set_env.sh\ndevices: {{type: npu, ids: {ids}}}\n"
    )
    return path


def used_twice(scene: Scene, hosts: Any) -> list[str]:
    logs = [scene.cluster.path(host, "/tmp/use/twice") for host in hosts]
    return [line for log in logs if log.exists() for line in log.read_text().splitlines()]


def leased(scene: Scene, hostfile: str) -> list[dict[str, Any]]:
    done = scene.ascendrun("leases", "-H", hostfile, "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["leases"]
    return rows


def second_head(first: Scene, tmp_path: Path, watch: Any) -> Scene:
    folder = tmp_path / "head2"
    folder.mkdir()
    cluster = first.cluster
    return Scene(Ascendrun(lambda: cluster, folder, watch), cluster)


def states_of(scene: Scene, job: str) -> list[str]:
    return [event["values"]["state"] for event in scene.show(job)["events"] if event["code"] == "state-changed"]


def test_two_heads_on_the_same_npus_one_waits_and_then_runs(
    ascendrun: Ascendrun, cluster: VirtualCluster, no_leftovers: Any, tmp_path: Path
) -> None:
    hosts = NpuScene.hosts
    one = Scene(ascendrun, cluster)
    two = second_head(one, tmp_path, no_leftovers)
    for scene in (one, two):
        install(scene, hosts, 2)
    with ThreadPoolExecutor() as pool:
        jobs = [npu_job(scene, "pair", [0], 0, "go", hosts=hosts) for scene in (one, two)]
        first = [pool.submit(scene.start, job) for scene, job in zip((one, two), jobs)]
        beside = one.start(npu_job(one, "beside", [1], 0, "go", hosts=hosts))
        ids = [(scene, future.result()) for scene, future in zip((one, two), first)]
    await_that(lambda: any("BACKOFF" in states_of(scene, job) for scene, job in ids), "one waits for the other")
    one.await_state(beside, "RUNNING")
    for host in hosts:
        cluster.path(host, "/tmp/use/go").touch()
    for scene, job in (*ids, (one, beside)):
        scene.await_state(job, *ENDED)
    told = {(scene.folder, job): states_of(scene, job) for scene, job in (*ids, (one, beside))}
    assert {states[-1] for states in told.values()} == {"SUCCEEDED"}, told
    waits = [event for scene, job in ids for event in scene.show(job)["events"] if event["code"] == "held"]
    assert waits and {event["values"]["by"] is not None for event in waits} == {True}, told
    assert sum("BACKOFF" in told[scene.folder, job] for scene, job in ids) >= 1
    assert not used_twice(one, hosts)
    bases = [json.loads(line)["base"] for job in ("pair", "beside") for line in output_of(one, job).splitlines()]
    assert len(set(bases)) == 2, "two jobs of one head on disjoint NPUs have disjoint ports"
    assert leased(one, "pair.hosts") == []


def output_of(scene: Scene, name: str) -> str:
    job = next(
        row["id"] for row in json.loads(scene.ascendrun("ps", "-a", "-o", "json").stdout)["jobs"] if row["name"] == name
    )
    return "".join(path.read_text() for path in scene.spooled(job, "rank-*.out.*"))


@pytest.mark.thorough
@pytest.mark.timeout(2400)
def test_fifty_submits_from_two_heads_killed_at_random(
    cluster_of: Any, ascendrun: Ascendrun, no_leftovers: Any, tmp_path: Path
) -> None:
    cluster = cluster_of(4)
    lot = random.Random(11)
    one = Scene(ascendrun.on(cluster), cluster)
    two = second_head(one, tmp_path, no_leftovers)
    hosts = tuple(cluster.hosts)
    for scene in (one, two):
        install(scene, hosts, 8)
    started: list[tuple[Scene, str]] = []

    def submit(number: int) -> None:
        scene = (one, two)[number % 2]
        ids = sorted(lot.sample(range(8), lot.randint(1, 8)))
        chosen = sorted(lot.sample(hosts, lot.randint(1, 2)))
        job = npu_job(scene, f"storm-{number}", ids, lot.uniform(0.2, 2.0), hosts=chosen)
        started.append((scene, scene.start(job)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(submit, range(50)))
    until = time.monotonic() + 60
    while time.monotonic() < until:
        victims = [p for host in hosts for p in cluster.processes(host) if is_ours(p.environ, p.argv)]
        if victims:
            subprocess.run(["kill", "-9", str(lot.choice(victims).pid)], capture_output=True)
        time.sleep(lot.uniform(0.5, 2.0))
    for scene, job in started:
        scene.await_state(job, *ENDED, deadline_s=900)
    assert not used_twice(one, hosts)
    (one.folder / "all.hosts").write_text(cluster.hostfile(slots=8))
    assert leased(one, "all.hosts") == []


def is_ours(environ: Any, argv: Any) -> bool:
    words = " ".join(argv)
    return "use.py" in words or words.endswith("serve") or " supervise " in words
