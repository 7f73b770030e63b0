"""A machine's own state below ROOT, also where machines share a home."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest

from ascendrun.node import layout, tree_hash
from ascendrun.node.agent import checks
from tests.agent.conftest import Node

SLEEP = ["sleep", "60"]


def test_an_attempt_is_live_from_its_preparation_until_its_end(node: Node) -> None:
    agent = node.connect()
    assert agent.hello["live"] == [] and agent.hello["neighbours"] == []
    agent.start(node.job("head-j1.1", ["true"]))
    agent.do("prepare", **node.job("head-j2.1", SLEEP))
    agent.do("prepare", **node.job("head-j3.1", SLEEP))
    agent.wait_ended("head-j1.1")
    agent.do("abort", tag="head-j2.1")
    mark = Path(layout.live_mark(str(node.folder("head-j1.1"))))
    agent.wait(lambda: not mark.exists())
    second = node.connect()
    assert second.hello["live"] == ["head-j3.1"]
    second.do("stop", tag="head-j3.1", now=True)
    assert node.connect().hello["live"] == []


def test_an_incarnation_lasts_as_long_as_the_folder(node: Node) -> None:
    first = node.connect().hello
    second = node.connect().hello
    assert len(first["incarnation"]) == 16 and first["incarnation"] == second["incarnation"]
    assert len(first["machine_key"]) == 12 and first["machine_key"] == second["machine_key"]
    path = node.root / "nodes" / first["machine_key"] / "incarnation.json"
    assert json.loads(path.read_text()) == {"incarnation": first["incarnation"]}
    path.unlink()
    assert node.connect().hello["incarnation"] != first["incarnation"]


def test_machines_with_one_home_have_keys_and_incarnations_of_their_own_and_see_each_other(node: Node) -> None:
    one, other = node.connect(hostname="n1").hello, node.connect(hostname="n2").hello
    assert one["machine_key"] != other["machine_key"] and one["incarnation"] != other["incarnation"]
    assert one["neighbours"] == [] and other["neighbours"] == [one["machine_key"]]
    assert node.connect(hostname="n1").hello["neighbours"] == [other["machine_key"]]


def test_an_attempt_of_two_machines_with_one_home_runs_once_on_each(node: Node) -> None:
    """Equal tags, equal names of files, pids that may be equal: nothing of one machine reaches the other."""
    tag = "head-j1.1"
    machines = {name: node.connect(hostname=name) for name in ("n1", "n2")}
    job = {}
    for rank, (name, agent) in enumerate(machines.items()):
        key = agent.hello["machine_key"]
        job[name] = node.job(tag, ["sh", "-c", "hostname; pwd; while [ ! -e go ]; do sleep 0.02; done; hostname"])
        job[name]["ranks"][0].update(rank=rank, env={"RANK": str(rank)})
        job[name]["cwd"] = layout.work_dir(str(node.root), "head-j1", key)
        agent.start(job[name])
    for rank, agent in enumerate(machines.values()):
        agent.wait_told(tag, "rank_started", rank=rank)
        agent.wait(lambda agent=agent, rank=rank: agent.output(tag, rank).count(b"\n") == 2)
    assert all(agent.phase(tag) == "running" for agent in machines.values())
    Path(job["n1"]["cwd"], "go").touch()
    assert machines["n1"].wait_ended(tag)["codes"] == {"0": 0}
    machines["n1"].wait_phase(tag, "ended")
    assert machines["n2"].phase(tag) == "running" and machines["n2"].do("processes", tag=tag)["processes"]
    machines["n2"].do("stop", tag=tag, now=True)
    assert machines["n2"].wait_ended(tag)["codes"] == {"1": -9}
    for rank, (name, agent) in enumerate(machines.items()):
        assert agent.output(tag, rank).startswith(f"{name}\n{job[name]['cwd']}\n".encode())
        assert len(agent.told(tag, "rank_started")) == 1


def test_a_tree_that_one_machine_stored_is_there_for_the_other_which_checks_it_itself(node: Node, code: Path) -> None:
    one, other = node.connect(hostname="n1"), node.connect(hostname="n2")
    sha256 = one.stage(code)
    assert other.do("put_tree", tree=sha256, size_bytes=0)["done"]
    job = {"trees": [sha256], "link_tree": sha256}
    other.do("prepare", **node.job("head-j1.1", SLEEP, cwd=str(node.root), **job))
    (path,) = [path for path in Path(layout.tree_dir(str(node.root), sha256)).rglob("*") if path.is_file()][:1]
    path.chmod(0o644)
    path.write_bytes(b"altered")
    for number, agent in enumerate((one, other), start=2):
        refused = agent.refused("prepare", **node.job(f"head-j{number}.1", SLEEP, cwd=str(node.root), **job))
        assert refused["code"] == "tree-differs"


def test_incomplete_files_of_another_machine_stay_until_they_are_old(node: Node, code: Path) -> None:
    trees = node.root / "trees"
    trees.mkdir()
    dead, foreign, old = (
        trees / f".tmp-{name}-tar-aa" for name in (f"{layout.machine_key()}-1-1", "0" * 12 + "-1-1", "1-1")
    )
    for path in (dead, foreign, old):
        path.touch()
    os.utime(old, (0, 0))
    node.connect().stage(code)
    assert not dead.exists() and foreign.exists() and not old.exists()


def test_two_machines_that_store_one_tree_at_once_both_succeed(node: Node, code: Path) -> None:
    entries = tree_hash.list_tree(str(code))
    sha256, out = tree_hash.hash_listing(entries), io.BytesIO()
    tree_hash.write_tar(str(code), entries, out)
    data = out.getvalue()
    machines = [node.connect(hostname=name) for name in ("n1", "n2")]
    blocks = [{"offset": at} for at in range(0, len(data), 512)]
    for more in (*blocks, {"sha256": ""}):
        part = {"tree": sha256, "size_bytes": len(data), **more}
        at = part.get("offset", len(data))
        numbers = [agent.post("put_tree", data[at : at + 512], **part) for agent in machines]
        for agent, number in zip(machines, numbers):
            assert agent.wait(lambda agent=agent, number=number: agent.replies.pop(number, None))[0]["ok"]
    assert [path.name for path in (node.root / "trees").glob(".tmp-*")] == []
    for number, agent in enumerate(machines):
        agent.do("prepare", **node.job(f"head-j{number}.1", SLEEP, cwd=str(node.root), trees=[sha256]))


def on_network(node: Node, tag: str) -> Path:
    """Make the attempt's folder as on a network file system; return the folder of its growing files."""
    folder = node.folder(tag)
    folder.mkdir(parents=True, mode=0o700)
    (folder / layout.WHERE).write_text("{}")
    return Path(layout.streams_dir(str(folder)))


def test_growing_files_of_an_attempt_on_a_network_file_system_are_on_a_local_disk(node: Node) -> None:
    tag = "head-j1.1"
    streams = on_network(node, tag)
    env = {
        "ASCENDRUN_METRICS_FILE": str(node.folder(tag) / "rank-0.metrics.0"),
        "OTHER": str(node.folder(tag)) + "-other/file",
    }
    script = 'echo seen needle; echo to err >&2; echo "{}" > "$ASCENDRUN_METRICS_FILE"; echo $OTHER; sleep 60'
    job = node.job(tag, ["sh", "-c", script], sampling={"interval_s": 1, "items": []})
    job["ranks"][0]["env"].update(env)
    agent = node.connect()
    agent.start(job)
    agent.wait(lambda: agent.output(tag).count(b"\n") == 2 and agent.files.get((tag, "rank-0.metrics", 0)))
    agent.wait(lambda: agent.output(tag, stream="err").endswith(b"\n"))
    assert agent.output(tag) == f"seen needle\n{env['OTHER']}\n".encode()
    assert agent.output(tag, stream="err") == b"to err\n"
    assert {"rank-0.out.0", "rank-0.err.0", "rank-0.metrics.0", "events.0"} <= {path.name for path in streams.iterdir()}
    assert streams.stat().st_mode & 0o777 == 0o700
    in_home = {path.name for path in node.folder(tag).iterdir()}
    assert not [name for name in in_home if layout.PULLED_FILE.match(name)], in_home
    request = {"tag": tag, "patterns": ["needle"], "ignore_case": False, "invert": False, "timeout_s": 30}
    _, body = agent.ask("grep", files={"rank-0.out": [0, 0]}, **request)
    assert b"seen needle" in body
    assert set(agent.do("files", tag=tag)["files"]) >= {"events", "rank-0.out", "rank-0.metrics"}
    os.kill(node.identity(tag)["pid"], 9)
    agent.wait_told(tag, "supervisor_lost")
    agent.end(tag)
    agent.wait_phase(tag, "ended")
    assert not node.alive(tag)
    agent.do("forget", tag=tag)
    assert not streams.exists() and not node.folder(tag).exists()


def test_an_aborted_attempt_leaves_nothing_on_the_local_disk(node: Node) -> None:
    streams, agent = on_network(node, "head-j1.1"), node.connect()
    agent.do("prepare", **node.job("head-j1.1", SLEEP))
    assert streams.is_dir()
    agent.do("abort", tag="head-j1.1")
    assert not streams.exists() and not node.folder("head-j1.1").exists()


@pytest.mark.parametrize(
    ("line", "is_network"),
    [
        ("36 1 0:42 / /home rw - nfs4 server:/home rw", True),
        ("36 1 0:42 / /home rw shared:1 master:2 - lustre a@tcp:/x rw", True),
        ("36 1 0:42 / /home rw - fuse.juicefs x rw", True),
        ("36 1 0:42 / /home rw - fuse x rw", False),
        ("36 1 0:42 / / rw - fuse.fuse-overlayfs x rw", False),
        ("36 1 0:42 / / rw - overlay overlay rw", False),
        ("36 1 8:1 / / rw - nfs4 server:/ rw", False),
    ],
)
def test_a_network_file_system_is_known_by_its_type(line: str, is_network: bool) -> None:
    kind = checks.parse_file_system("20 1 8:2 / / rw - ext4 /dev/a rw\n" + line + "\n", os.makedev(0, 42))
    assert checks.is_network(kind) is is_network


def test_a_stop_reaches_an_attempt_whose_folder_is_looked_at_in_a_thread(node: Node) -> None:
    tags = [f"head-j{number}.1" for number in (1, 2)]
    agent = node.connect()
    for tag in tags:
        on_network(node, tag)
        agent.start(
            node.job(tag, ["sh", "-c", "trap 'echo saved; exit 0' TERM; echo on; while :; do sleep 0.02; done"])
        )
        agent.wait(lambda tag=tag: agent.output(tag) == b"on\n")
    agent.do("stop", tag=tags[0], now=True)
    agent.do("stop", tag=tags[1], now=False, grace_s=30)
    assert agent.wait_ended(tags[0])["codes"] == {"0": -9}
    assert agent.wait_ended(tags[1])["codes"] == {"0": 0} and agent.output(tags[1]) == b"on\nsaved\n"
    assert not agent.told(tags[0], "supervisor_lost")


def test_a_lost_list_entry_or_local_disk_is_made_up_for(node: Node) -> None:
    """The mark of an ended attempt that was not removed; a cleaner that removes what is below /var/tmp."""
    tag, agent = "head-j1.1", node.connect()
    streams = on_network(node, tag)
    agent.start(node.job(tag, ["sh", "-c", "echo on; sleep 60"]))
    agent.wait(lambda: agent.output(tag) == b"on\n")
    os.kill(node.identity(tag)["pid"], 9)
    agent.wait_told(tag, "supervisor_lost")
    shutil.rmtree(streams)
    live = Path(layout.live_dir(str(node.root)))
    (live / ".nfs0001").touch()
    assert node.connect().hello["live"] == [tag]
    agent.do("stop", tag=tag, now=True)
    agent.wait_phase(tag, "ended")
    assert not node.alive(tag)
    (live / tag).touch()
    assert node.connect().hello["live"] == [] and not (live / tag).exists()
