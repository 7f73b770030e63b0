"""Two head nodes and the same NPUs: nothing is used twice, nothing stays leased, who waits runs afterwards."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import leftovers
import pytest
from conftest import Ascendrun
from scenes import NpuScene, Scene, await_that

from ascendrun.node.agent.leases import read_leases
from ascendrun.sim.ascend.scenario import Scenario
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.devices import DRIVER_NODES
from tests.lib.vcluster.npus import install_on
from tests.lib.vcluster.processes import Process
from tests.lib.vcluster.provision import FIRST_USER_ID

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
USE = """
import fcntl, json, os, sys, time
devices = os.environ["ASCEND_RT_VISIBLE_DEVICES"].split(",")
mine = devices[int(os.environ["LOCAL_RANK"])]
base = os.environ["HCCL_IF_BASE_PORT"]
names = ["npu-" + mine] + (["hccl-" + base] if os.environ["LOCAL_RANK"] == "0" else [])
names += ["port-" + os.environ["MASTER_PORT"]] if os.environ["RANK"] == "0" else []
os.umask(0)
used = [open("/tmp/use/" + name, "w") for name in names]
for file in used:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with open("/tmp/use/twice", "a") as log:
            log.write(file.name + "\\n")
print(json.dumps({"base": int(base), "devices": devices, "user": os.getuid()}), flush=True)
time.sleep(float(sys.argv[1]))
while sys.argv[2:] and not os.path.exists("/tmp/use/go"):
    time.sleep(0.05)
"""


def install(scene: Scene, hosts: Any, cards: int) -> None:
    for number, name in enumerate(hosts, start=1):
        install_on(scene.cluster, name, Scenario(cards=cards, number=number), python="/usr/bin/python3")
        use = scene.cluster.path(name, "/tmp/use")
        use.mkdir(exist_ok=True)
        use.chmod(0o777)
        for node in scene.cluster.path(name, "/dev").glob("*"):
            if node.name in DRIVER_NODES or node.name.startswith("davinci"):
                node.chmod(0o666)  # there is no group of the driver's users on these hosts
    (scene.folder / "code" / "use.py").write_text(USE)


def npu_job(scene: Scene, name: str, ids: list[int], *words: object, hosts: Any, user: str | None = None) -> Path:
    """A job on these NPUs of each host. Its ranks state what they use, on their node. `words`: seconds, and "go" to
    wait for /tmp/use/go."""
    (scene.folder / f"{name}.hosts").write_text(scene.cluster.hostfile(slots=len(ids), names=hosts, user=user))
    path = scene.folder / f"{name}.yaml"
    command = json.dumps(["python3", "use.py", *map(str, words)])
    path.write_text(
        f"name: {name}\ncommand: {command}\nhostfile: {name}.hosts\nworkdir: {{path: code}}\n"
        f"setup: source /usr/local/Ascend/ascend-toolkit/set_env.sh\ndevices: {{type: npu, ids: {ids}}}\n"
        "checks: {skip: [hccn-tool]}\n"  # the simulated tool has its time limit, and a busy machine
    )
    return path


def used_twice(scene: Scene, hosts: Any) -> list[str]:
    logs = [scene.cluster.path(host, "/tmp/use/twice") for host in hosts]
    return [line for log in logs if log.exists() for line in log.read_text().splitlines()]


def leased(scene: Scene, hostfile: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = scene.ascendrun.ask("leases", "-H", hostfile)["leases"]
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
def test_fifty_submits_of_two_users_from_two_heads_killed_at_random(
    scene_of: Callable[..., Scene], no_leftovers: Any, tmp_path: Path
) -> None:
    one = scene_of(4, users={"wang": "bash"})
    lot = random.Random(11)
    two = second_head(one, tmp_path, no_leftovers)
    users = {one: "root", two: "wang"}
    hosts = tuple(one.cluster.hosts)
    for scene in users:
        install(scene, hosts, 8)
    jobs = [(one, two)[number % 2] for number in range(50)]
    lots = [(sorted(lot.sample(range(8), lot.randint(1, 8))), lot.uniform(0.2, 2.0)) for _ in jobs]
    chosen = [sorted(lot.sample(hosts, lot.randint(1, 2))) for _ in jobs]

    def submit(number: int) -> str:
        scene, (ids, for_s) = jobs[number], lots[number]
        path = npu_job(scene, f"storm-{number}", ids, for_s, hosts=chosen[number], user=users[scene])
        return scene.start(path)

    def kill_one(among: list[Process]) -> None:
        if among:
            leftovers.kill([lot.choice(among)])
        time.sleep(lot.uniform(0.5, 2.0))

    with ThreadPoolExecutor(4) as pool:
        submitted = [pool.submit(submit, number) for number in range(len(jobs))]
        while not all(future.done() for future in submitted):
            kill_one(on_hosts(one.cluster))
    until = time.monotonic() + 60
    while time.monotonic() < until:
        kill_one(on_hosts(one.cluster))
        kill_one(leftovers.controllers(one.cluster, lot.choice((one, two)).ascendrun.state_dir))
    started = [(scene, future.result()) for scene, future in zip(jobs, submitted)]
    for scene, job in started:
        scene.await_state(job, *ENDED, deadline_s=900)
    assert not used_twice(one, hosts)
    for scene, uid in ((one, 0), (two, FIRST_USER_ID)):
        jobs_of = [job for owner, job in started if owner is scene]
        lines = [line for job in jobs_of for path in scene.spooled(job, "rank-*.out.*") for line in read_lines(path)]
        assert {line["user"] for line in lines} == {uid}
        assert "SUCCEEDED" in map(scene.state, jobs_of)
    tables = [f"/proc/{one.cluster.init_pid(host)}/net/unix" for host in hosts]
    await_that(lambda: not any(map(read_leases, tables)), "every lease is gone")
    for scene, user in users.items():
        (scene.folder / "all.hosts").write_text(one.cluster.hostfile(slots=8, user=user))
        assert leased(scene, "all.hosts") == []


def on_hosts(cluster: VirtualCluster) -> list[Process]:
    """The ranks, agents and supervisors of both users."""
    everything = [process for host in cluster.hosts for process in cluster.processes(host)]
    return [process for process in everything if is_ours(" ".join(process.argv))]


def is_ours(words: str) -> bool:
    return "use.py" in words or words.endswith("serve") or " supervise " in words


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
