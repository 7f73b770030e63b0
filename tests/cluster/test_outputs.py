"""Outputs on the head node: of a shipped job, and large ones of two hosts that are cut off in the middle."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Callable

import pytest
from scenes import Scene, await_that

from tests.lib.vcluster.cluster import VirtualCluster

SIZE = 1 << 30
BLOCK_BYTES = 1 << 20
JOBS = Path(__file__).resolve().parents[2] / "jobs"
TRAININGS = ("pretrain", "finetune")
CUTS = 3
UNREACHABLE = 6
"""Exit code of `fetch`."""
OVERHEAD = 0.02
"""Of the bytes that a host sends: the headers of SSH, TCP and IP, and its logs."""
SCRIPT = """
import hashlib, os
digest = hashlib.sha256()
os.makedirs("out")
with open("out/model.bin", "wb") as file:
    for _ in range({blocks}):
        block = os.urandom(1 << 20)
        digest.update(block)
        file.write(block)
print("sha256", digest.hexdigest(), flush=True)
"""


def sent_bytes(cluster: VirtualCluster, host: str) -> int:
    """Bytes that the host has sent into the network."""
    text = Path(f"/proc/{cluster.init_pid(host)}/net/dev").read_text()
    rows = [line.split(":") for line in text.splitlines() if ":" in line]
    return sum(int(values.split()[8]) for name, values in rows if name.strip() != "lo")


def end_agents(cluster: VirtualCluster, host: str) -> None:
    """The connection of the host breaks: its agent is killed."""
    for process in cluster.processes(host):
        if process.argv[-1:] == ("serve",):
            os.kill(process.pid, signal.SIGKILL)


def fetched(scene: Scene, job: str) -> bool:
    hosts = {
        host for event in scene.show(job)["events"] if event["code"] == "outputs-fetched" for host in event["hosts"]
    }
    return hosts == set(scene.cluster.hosts)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_two_gigabytes_of_two_hosts_arrive_whole_after_three_cuts(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(2, disk="1500M")
    more = "outputs: [out/]\noutputs_from: all\n"
    command = ["python3", "-c", SCRIPT.format(blocks=SIZE >> 20)]
    before = {host: sent_bytes(scene.cluster, host) for host in scene.cluster.hosts}
    job = scene.start(scene.job("large", command=command, per_node=1, slots=1, more=more))
    folder = scene.ascendrun.state_dir / "outputs" / job

    def arrived() -> int:
        return sum(path.stat().st_blocks * 512 for path in folder.glob("*/out/*") if path.exists())

    total = SIZE * len(scene.cluster.hosts)
    for number in range(1, CUTS + 1):
        share = total * number // (CUTS + 1)
        await_that(lambda share=share: arrived() >= share, f"{share} bytes arrived", deadline_s=600.0)
        for host in scene.cluster.hosts:
            scene.cluster.cut(host) if number == 2 else end_agents(scene.cluster, host)
        if number == 2:  # the link itself is cut until the head node notices
            done = scene.ascendrun("fetch", job, "-o", "json", timeout=300.0)
            assert done.returncode == UNREACHABLE, done.stdout + done.stderr
            for host in scene.cluster.hosts:
                scene.cluster.heal(host)
    for _ in range(CUTS):  # a host that is not connected again yet is named
        done = scene.ascendrun("fetch", job, "-o", "json", timeout=900.0)
        if done.returncode != UNREACHABLE:
            break
        await_that(lambda: fetched(scene, job), "all files are fetched without being asked for", deadline_s=600.0)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = scene.ascendrun("logs", job, "-o", "jsonl").stdout.splitlines()
    printed = {row["host"]: row["text"] for row in map(json.loads, logs)}
    for host in scene.cluster.hosts:
        with open(folder / host / "out/model.bin", "rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 24):
                digest.update(block)
        assert printed[host] == f"sha256 {digest.hexdigest()}"
        sent = sent_bytes(scene.cluster, host) - before[host]
        print(f"{host}: {sent / SIZE:.4f} of {SIZE} bytes")
        assert sent <= SIZE * (1 + OVERHEAD) + CUTS * BLOCK_BYTES


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_the_shipped_trajectory_job_leaves_model_report_and_predictions_here(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(2, disk="1G")
    hostfile = scene.folder / "two.hosts"
    hostfile.write_text(scene.cluster.hostfile(slots=2))
    changes = ["args.synthetic_tracks=300", *(f"stages.{name}.args.num_train_epochs=1" for name in TRAININGS)]
    options = [word for change in (*changes, f"python={sys.executable}") for word in ("--set", change)]
    done = scene.ascendrun("submit", JOBS / "trajectory.yaml", "--hostfile", hostfile, *options, timeout=1400.0, code=0)
    last = (done.stdout + done.stderr).splitlines()[-1]
    folder = Path(re.search(r"outputs: (\S+) \(", last)[1])  # type: ignore[index]
    assert folder.is_relative_to(scene.ascendrun.state_dir / "outputs"), last
    print(last, sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
    assert list(folder.glob("**/finetune/best/model.pt"))
    (report,) = folder.glob("**/evaluate/report.json")
    assert json.loads(report.read_text())["test"]
    (predictions,) = folder.glob("**/predict/predictions.jsonl")
    assert "class_name" in json.loads(predictions.read_text().splitlines()[0])
