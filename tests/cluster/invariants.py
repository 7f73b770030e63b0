"""What must be true of a job whatever happened to it: asked after every bad day."""

import json
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scenes import Scene, await_that

from ascendrun.core.jobs.draft import TRANSITIONS
from ascendrun.core.jobs.job import State
from ascendrun.node.layout import IDENTITY, PREPARED
from tests.lib.vcluster.cluster import VirtualCluster

LISTENS = "0A"
SSH_PORT = 22


def check_ended(scene: Scene, job: str, *, state: str, but: Sequence[str] = ()) -> None:
    """The job has ended so, and everything that holds of ended jobs holds; `but`: hosts whose disks are new."""
    detail = scene.show(job)
    assert detail["job"]["state"] == state, json.dumps(detail["events"], indent=1)
    check_moves(scene, job)
    scene.await_nobody(job)
    check_started_once(scene, job)
    check_one_key(scene, job, but=but)
    if State.RUNNING in states_of(scene, job) or scene.on_node(job):
        await_that(lambda: scene.is_drained(job), f"every byte of {job} is here")
    check_copy(scene, job, but=but)
    check_nobody_listens(scene.cluster)


def check_moves(scene: Scene, job: str) -> None:
    """Only arrows of the table, and none out of an end."""
    at = State.QUEUED
    for target in states_of(scene, job):
        assert target in TRANSITIONS[at], f"{at.value} -> {target.value}: {scene.show(job)['events']}"
        at = target


def states_of(scene: Scene, job: str) -> list[State]:
    """The states that the job went to, in order."""
    return [State(event["values"]["state"]) for event in scene.show(job)["events"] if event["code"] == "state-changed"]


def check_started_once(scene: Scene, job: str) -> None:
    """No rank of an attempt was started twice, as the nodes themselves recorded it."""
    started: Counter[tuple[str, int]] = Counter()
    for host in scene.cluster.hosts:
        for path in scene.runs_on(host).glob(f"{scene.run(job)}/attempt-*/events.0"):
            events = [event for line in path.read_bytes().splitlines() for event in _read_event(line)]
            started.update((path.parent.name, event["rank"]) for event in events if event["event"] == "rank_started")
    assert all(count == 1 for count in started.values()), started


def check_one_key(scene: Scene, job: str, *, but: Sequence[str] = ()) -> None:
    """Supervisors of an attempt believe each other's notices, whichever controllers prepared and started it. The files
    of hosts with new disks are gone; a supervisor that outlived them has made only its own again."""
    keys: dict[str, set[str]] = {}
    for host in (host for host in scene.cluster.hosts if host not in but):
        for path in scene.runs_on(host).glob(f"{scene.run(job)}/attempt-*/{IDENTITY}"):
            peers = json.loads(path.with_name(PREPARED).read_bytes()).get("peers") or {"key": ""}
            keys.setdefault(path.parent.name, set()).add(peers["key"])
    assert all(len(of_attempt) == 1 for of_attempt in keys.values()), sorted(keys)


def _read_event(line: bytes) -> list[dict[str, Any]]:
    """The event of one line; [] where a full disk tore it."""
    try:
        return [json.loads(line)]
    except ValueError:
        return []


def _has_only_an_end(data: bytes) -> bool:
    events = [event["event"] for line in data.splitlines() for event in _read_event(line) if "event" in event]
    return events == ["ended"]


def check_copy(scene: Scene, job: str, *, but: Sequence[str] = ()) -> None:
    """The head's copy of logs and records is what the nodes have, byte for byte (stacks stay there). Of an attempt that
    was prepared and ended without GO, since its controller died, nothing is copied."""
    for pattern in ("rank-*", "events.*"):
        head, node = scene.on_head(job, pattern), scene.on_node(job, pattern)
        node = {name: data for name, data in node.items() if name in head or not _has_only_an_end(data)}
        wrong = [
            name
            for name in {*head, *node}
            if name.split("/")[0] not in but
            and ".stack." not in name
            and (name in node or head[name])
            and head.get(name, b"") != node.get(name, b"")
        ]
        assert not wrong, f"head and node differ: {[(n, len(head.get(n, b'')), len(node.get(n, b''))) for n in wrong]}"


def check_nobody_listens(cluster: VirtualCluster) -> None:
    """No TCP port is listened on but sshd's."""
    for host in filter(cluster.is_up, cluster.hosts):
        for table in ("tcp", "tcp6"):
            lines = Path(f"/proc/{cluster.init_pid(host)}/net/{table}").read_text().splitlines()[1:]
            ports = {int(line.split()[1].rpartition(":")[2], 16) for line in lines if line.split()[3] == LISTENS}
            assert ports <= {SSH_PORT}, f"{host} listens on {sorted(ports)}"


def too_open(folder: Path) -> list[str]:
    """Files and folders of ours below `folder` that somebody else could open (links and sockets' targets aside)."""
    found = []
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & 0o077:
            found.append(f"{stat.filemode(mode)} {path}")
    return found
