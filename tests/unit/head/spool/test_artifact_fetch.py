"""What nodes give after a failure lands whole beside the logs, or is asked for again. No node names a path of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest

from ascendrun.core.hosts import Host
from ascendrun.core.jobs.draft import Transition
from ascendrun.core.jobs.job import Cause, Job, State
from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.control_messages import Gather, GatherReply
from ascendrun.head.protocol.file_messages import ArtifactData
from ascendrun.head.protocol.messages import Request
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool import artifact_fetch
from ascendrun.head.spool.artifact_store import hosts_awaited, hosts_collected, read_artifacts
from ascendrun.head.state.state_dir import spool_dir

JOB = Job(id="j-0001", name="demo", run="head-j-0001", hosts=("n1", "n2"), grace_s=1.0, start_s=1.0, created_at_s=0.0)
HOSTS = (Host(name="n1"), Host(name="n2"))


class FakeLink:
    """A host whose answers the test gives."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.is_up = False
        self.calls: list[tuple[Request[Any], Callable[[Reply[Any]], None]]] = []

    def call(self, request: Request[Any], *, deadline_s: float, done: Callable[[Reply[Any]], None]) -> None:
        self.calls.append((request, done))


class World:
    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        state_dir.mkdir(exist_ok=True)
        self.links = {host: FakeLink(host) for host in HOSTS}
        self.gatherer = self.start()

    def get(self, host: Host) -> FakeLink:
        return self.links[host]

    def post(self, call: Callable[[], None]) -> None:
        call()

    def start(self) -> artifact_fetch.ArtifactFetcher:
        links: Any = self
        subject = artifact_fetch.Subject("j-0001", "head-j-0001", "npu", 2, HOSTS)
        return artifact_fetch.ArtifactFetcher(self.state_dir, links, lambda job_id: subject)

    def come_up(self, name: str) -> FakeLink:
        link = self.links[Host(name=name)]
        link.is_up = True
        self.gatherer.on_up(link)
        return link

    def say(self, link: FakeLink, name: str, file: str, data: bytes, *, offset: int = 0) -> None:
        self.gatherer.take(link, ArtifactData("head-j-0001.1", name, file, offset), data)

    def end(self, link: FakeLink, *files: Mapping[str, Any], error: Failure | None = None) -> None:
        reply = agent.GatherReply(
            files=list(files),
            problems=[{"name": "hccn", "text": "no such command: hccn_tool"}],
            at_ns=7 * 10**9,
            start_ns=5 * 10**9,
            boot_ns=10**9,
        )
        link.calls.pop(0)[1](Reply(None if error else reply, error=error))

    @property
    def attempt_dir(self) -> Path:
        return spool_dir(self.state_dir, "j-0001", 1)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "state")


@pytest.fixture
def link(world: World) -> FakeLink:
    """A host that was asked."""
    world.gatherer.fetch("j-0001", 1)
    return world.come_up("n1")


def test_what_a_host_gives_is_there_once_all_of_it_is(world: World, link: FakeLink) -> None:
    assert link.calls[0][0] == agent.Gather("head-j-0001.1", artifact_fetch.items_for("npu"), artifact_fetch.GATHER_S)
    world.say(link, "plog", "debug/plog/plog-1_2.log", b"hello ")
    world.say(link, "plog", "debug/plog/plog-1_2.log", b"world", offset=6)
    assert read_artifacts(world.attempt_dir, "n1").at_s is None
    assert hosts_awaited(world.state_dir, "j-0001", 1) == ("n1", "n2")
    sizes = {"bytes": 11, "of_bytes": 11, "mtime_ns": 6 * 10**9, "is_ours": True}
    world.end(link, {"name": "plog", "file": "debug/plog/plog-1_2.log", "source": "/root/ascend/log/x", **sizes})
    found = read_artifacts(world.attempt_dir, "n1")
    (file,) = found.of("plog")
    assert file.path.read_bytes() == b"hello world" and (file.mtime_s, file.is_ours) == (6.0, True)
    assert (found.at_s, found.start_s, found.boot_s) == (7.0, 5.0, 1.0)
    assert found.problems == (("hccn", "no such command: hccn_tool"),)
    assert hosts_collected(world.attempt_dir) == ("n1",)
    assert hosts_awaited(world.state_dir, "j-0001", 1) == ("n2",)
    gathered = world.attempt_dir / "n1" / "gathered"
    assert [path for path in (gathered, *gathered.rglob("*")) if path.stat().st_mode & 0o077] == []


def test_a_file_that_is_empty_is_there_too(world: World, link: FakeLink) -> None:
    world.end(link, {"name": "dmesg", "file": "excerpt.txt", "bytes": 0, "of_bytes": 0})
    (file,) = read_artifacts(world.attempt_dir, "n1").of("dmesg")
    assert file.path.read_bytes() == b""


def test_a_host_that_is_away_is_asked_by_the_next_controller_too(world: World) -> None:
    world.gatherer.fetch("j-0001", 1)
    world.gatherer = world.start()
    world.gatherer.resume()
    world.end(world.come_up("n2"))
    assert hosts_collected(world.attempt_dir) == ("n2",)
    assert hosts_awaited(world.state_dir, "j-0001", 1) == ("n1",)


def test_a_head_that_was_killed_before_it_asked_asks_later_those_of_whom_nothing_is_here(world: World) -> None:
    failed = replace(JOB, state=State.FAILED, go_sent_at_s=5.0, ended_at_s=9.0)
    assert (
        artifact_fetch.unrequested_attempt(failed, now_s=60.0) == 1
        and artifact_fetch.unrequested_attempt(failed, now_s=10 * 86400.0) is None
    )
    assert artifact_fetch.unrequested_attempt(replace(failed, cause=Cause.USER), now_s=60.0) is None
    assert artifact_fetch.unrequested_attempt(replace(failed, state=State.RUNNING), now_s=60.0) is None
    world.gatherer.fetch("j-0001", 1)
    world.end(world.come_up("n2"))
    for path in (world.state_dir / "gathering").iterdir():
        path.unlink()
    world.gatherer = world.start()
    world.gatherer.fetch("j-0001", 1, only_missing=True)
    assert hosts_awaited(world.state_dir, "j-0001", 1) == ("n1",)


def test_who_waits_is_told_though_somebody_cleared_the_wishes(world: World) -> None:
    answers: list[Any] = []
    world.gatherer.serve(Gather("j-0001", 1), lambda reply, body, is_last: answers.append(reply))
    for path in (world.state_dir / "gathering").iterdir():
        path.unlink()
    world.end(world.come_up("n1"))
    assert answers == [GatherReply("n1")]


def test_a_connection_lost_in_the_middle_leaves_nothing_and_is_asked_again(world: World, link: FakeLink) -> None:
    world.say(link, "plog", "half", b"half")
    link.is_up = False
    world.end(link, error=Failure("connection-lost", "gone"))
    assert [path.name for path in (world.attempt_dir / "n1").iterdir()] == []
    world.come_up("n1")
    world.say(link, "plog", "whole", b"whole")
    world.end(link, {"name": "plog", "file": "whole", "bytes": 5})
    assert [file.path.read_bytes() for file in read_artifacts(world.attempt_dir, "n1").files] == [b"whole"]


def test_a_later_look_replaces_the_earlier_one(world: World) -> None:
    for text in (b"first", b"second"):
        world.gatherer.fetch("j-0001", 1)
        link = world.come_up("n1")
        world.say(link, "dmesg", f"{text.decode()}.txt", text)
        world.end(link, {"name": "dmesg", "file": f"{text.decode()}.txt", "bytes": len(text)})
    assert [file.file for file in read_artifacts(world.attempt_dir, "n1").files] == ["second.txt"]
    assert [path.name for path in (world.attempt_dir / "n1").iterdir()] == ["gathered"]


@pytest.mark.parametrize("file", ["../../../etc/x", "/etc/x", "..", "a/../../b", ".hidden", "index.json", "a\0b", ""])
def test_a_node_cannot_name_a_file_outside_its_folder(world: World, link: FakeLink, file: str) -> None:
    world.say(link, "plog", file, b"x")
    world.say(link, "../plog", "x", b"x")
    world.end(link, {"name": "plog", "file": file, "bytes": 1}, {"name": "../plog", "file": "x", "bytes": 1})
    (one,) = read_artifacts(world.attempt_dir, "n1").files
    assert one.path.read_bytes() == b"x"
    assert (world.attempt_dir / "n1" / "gathered" / "plog").resolve() in one.path.resolve().parents


def test_two_files_whose_safe_names_are_the_same_stay_two(world: World, link: FakeLink) -> None:
    world.say(link, "plog", "a b", b"1")
    world.say(link, "plog", "a_b", b"2")
    world.end(link, {"name": "plog", "file": "a b", "bytes": 1}, {"name": "plog", "file": "a_b", "bytes": 1})
    assert [file.path.read_bytes() for file in read_artifacts(world.attempt_dir, "n1").files] == [b"1", b"2"]


def test_somebody_who_waits_hears_of_every_host(world: World) -> None:
    said: list[tuple[Any, bool]] = []
    world.gatherer.serve(Gather("j-0001", 1), lambda reply, body, last: said.append((reply, last)))
    world.end(world.come_up("n1"))
    world.end(world.come_up("n2"), error=Failure("unknown-op", "this agent knows no operation 'gather'"))
    refused = GatherReply("n2", "this agent knows no operation 'gather'")
    assert said == [(GatherReply("n1"), False), (refused, True)]
    assert hosts_awaited(world.state_dir, "j-0001", 1) == ()


def test_an_index_that_is_torn_reads_as_nothing_gathered(world: World) -> None:
    folder = world.attempt_dir / "n1" / "gathered"
    folder.mkdir(parents=True)
    (folder / "index.json").write_text(json.dumps({"files": [{}], "problems": []}))
    assert read_artifacts(world.attempt_dir, "n1").at_s is None


def ended(target: State, cause: Cause, *, told: bool = True) -> int | None:
    after = replace(JOB, state=target, cause=cause, go_sent_at_s=1.0 if told else None, attempt=3)
    return artifact_fetch.failed_attempt(after, after, [Transition(State.STOPPING, target, 2.0, "x")])


def test_a_failure_after_the_start_is_looked_into_and_nothing_else() -> None:
    assert ended(State.FAILED, Cause.FAILURE) == 3
    assert ended(State.FAILED, Cause.NODE_LOST) == 3
    assert ended(State.FAILED, Cause.REFUSED, told=False) is None
    assert ended(State.STOPPED, Cause.USER) is None
    assert ended(State.SUCCEEDED, Cause.FAILURE) is None


def test_an_attempt_that_is_tried_again_is_looked_into_under_its_own_number() -> None:
    before = replace(JOB, state=State.STOPPING, cause=Cause.FAILURE, go_sent_at_s=1.0, attempt=1)
    after = replace(before, state=State.QUEUED, cause=None, go_sent_at_s=None, attempt=2)
    transitions = [
        Transition(State.STOPPING, State.BACKOFF, 2.0, "x"),
        Transition(State.BACKOFF, State.QUEUED, 2.0, "x"),
    ]
    assert artifact_fetch.failed_attempt(before, after, transitions) == 1


@pytest.mark.parametrize("family", ["npu", "cuda", "cpu", "auto"])
def test_every_item_is_one_that_a_node_understands(family: str) -> None:
    for item in artifact_fetch.items_for(family):
        assert {"glob": {"bases", "patterns"}, "list": {"bases", "patterns", "file"}, "argv": {"commands", "file"}}[
            item["kind"]
        ] <= set(item)
        assert json.loads(json.dumps(item)) == item
