"""Outputs arrive whole: cut, changed, damaged, too large or of a host that is gone, over the node's own code."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest

from ascendrun.core.errors import AscendrunError, NotFoundError, UnreachableError
from ascendrun.core.events import Event
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.pulse import JobSight
from ascendrun.core.retention import Retention
from ascendrun.head.protocol.control_messages import Fetch, FetchReply
from ascendrun.head.protocol.file_messages import OutputsReply
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool.output_fetch import JobOutputs, OutputFetcher
from ascendrun.head.spool.transfer import PART, TransferError, fetch_files
from ascendrun.head.state.job_files import outputs_dir, read_waiting, waiting_jobs
from ascendrun.node.files import BLOCK_BYTES
from ascendrun.query.views import state_now
from tests.lib.transfer_node import RUN, Node, names


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


def test_a_transfer_that_is_cut_three_times_sends_at_most_one_block_twice_each(node: Node, tmp_path: Path) -> None:
    data = node.write("out/model.bin", os.urandom(9 * BLOCK_BYTES + 17))
    node.write("out/sub/empty", b"")
    node.cuts = {2, 5, 9}
    into = tmp_path / "into"
    for _ in node.cuts:
        with pytest.raises(TransferError) as cut:
            node.fetch(into, "out")
        assert cut.value.is_lost and not (into / "out/model.bin").exists()
    with open(next((into / "out").glob(f"{PART}*")), "ab") as part:
        part.write(b"half a block, as a head that was killed leaves it")
    progress = node.fetch(into, "out")
    assert (into / "out/model.bin").read_bytes() == data and names(into) == ["out/model.bin", "out/sub/empty"]
    assert (progress.files, progress.done_bytes) == (2, len(data))
    assert max(node.sent.values()) == 2 and sum(count - 1 for count in node.sent.values()) == len(node.cuts)
    before = sum(node.sent.values())
    assert node.fetch(into, "out").files == 2 and sum(node.sent.values()) == before, "what is here is not sent again"


def test_what_is_damaged_or_changes_on_the_way_arrives_as_it_is_on_the_node(node: Node, tmp_path: Path) -> None:
    damaged = node.write("damaged", os.urandom(2 * BLOCK_BYTES))
    node.damages = {2}
    node.fetch(tmp_path / "into", "damaged")
    versions = [b"the second", b"first version"]
    node.write("changed", b"x")
    node.before_read = lambda: void(versions and node.write("changed", versions.pop()))
    node.fetch(tmp_path / "into", "changed")
    assert (tmp_path / "into/damaged").read_bytes() == damaged
    assert (tmp_path / "into/changed").read_bytes() == b"the second"
    node.before_read = lambda: void(node.write("growing", (node.work / "growing").read_bytes() + b"x"))
    node.write("growing", b"x")
    with pytest.raises(TransferError) as error:
        node.fetch(tmp_path / "into", "growing")
    assert error.value.failure.code == "output-changed"


def void(_: object) -> None:
    """Ignore the result of an expression."""


def test_patterns_name_files_and_nothing_that_was_staged(node: Node, tmp_path: Path) -> None:
    tree = node.root / "trees" / ("a" * 64)
    tree.mkdir(parents=True)
    (tree / "train.py").write_text("")
    (node.work / "train.py").symlink_to(tree / "train.py")
    for path in ("out/a/b/m.csv", "out/top.csv", "other.txt"):
        node.write(path, b"1")
    os.mkfifo(node.work / "out/pipe")
    (tmp_path / "far").mkdir()
    (tmp_path / "far/x.bin").write_bytes(b"2")
    progress = node.fetch(tmp_path / "into", "**/*.csv", "*", "none*", str(tmp_path / "far"), "train.py")
    expected = ["other.txt", "out/a/b/m.csv", "out/top.csv", f"{tmp_path}/far/x.bin"[1:]]
    assert names(tmp_path / "into") == sorted(expected)
    assert progress.missing == ("none*", "train.py")
    evil = OutputsReply(folder="", files=(("../../evil", 1, 1, 1),), missing=())
    with pytest.raises(TransferError, match="invalid path"):
        fetch_files(lambda request, *, deadline_s: Reply(evil), RUN, ["x"], tmp_path / "into")  # type: ignore[arg-type]


def test_what_is_sent_is_cut_three_times_and_arrives_whole_with_at_most_one_block_twice_each(
    node: Node, tmp_path: Path
) -> None:
    data = os.urandom(9 * BLOCK_BYTES + 17)
    source = tmp_path / "here/model"
    (source / "deep").mkdir(parents=True)
    (source / "weights.bin").write_bytes(data)
    (source / "deep/empty").write_bytes(b"")
    (source / "run.sh").write_text("true")
    (source / "run.sh").chmod(0o755)
    node.cuts = {2, 5, 9}
    for _ in node.cuts:
        with pytest.raises(TransferError) as cut:
            node.send("in", source)
        assert cut.value.is_lost
    progress = node.send("in", source, source / "run.sh")
    assert names(node.work) == ["in/model/deep/empty", "in/model/run.sh", "in/model/weights.bin", "in/run.sh"]
    assert (node.work / "in/model/weights.bin").read_bytes() == data
    assert (node.work / "in/run.sh").stat().st_mode & 0o777 == 0o700
    assert (progress.files, progress.done_bytes) == (4, len(data) + 8)
    assert max(node.sent.values()) == 1, "a block that arrived is not sent again, also if its reply was lost"
    before = sum(node.sent.values())
    assert node.send("in", source).files == 3 and sum(node.sent.values()) == before, "what is there is not sent again"


def test_what_is_damaged_on_its_way_is_sent_again_and_what_changes_is_refused(node: Node, tmp_path: Path) -> None:
    data = os.urandom(2 * BLOCK_BYTES)
    (tmp_path / "one").write_bytes(data)
    node.damages = {2}
    node.send(".", tmp_path / "one")
    assert (node.work / "one").read_bytes() == data and not list(node.work.glob(f"{PART}*"))
    (tmp_path / "one").write_bytes(b"newer")
    node.send(".", tmp_path / "one")
    assert (node.work / "one").read_bytes() == b"newer", "an existing file is replaced"
    (tmp_path / "two").write_bytes(b"x")
    node.before_read = lambda: void((tmp_path / "two").write_bytes(b"longer"))
    with pytest.raises(TransferError) as error:
        node.send(".", tmp_path / "two")
    assert error.value.failure.code == "output-changed" and not (node.work / "two").exists()
    (node.work / "three").mkdir()
    (tmp_path / "three").write_bytes(b"x")
    with pytest.raises(TransferError) as error:
        node.send(".", tmp_path / "three")
    assert "three" in str(error.value.failure.message), "a directory is not replaced by a file"


class Link:
    def __init__(self, node: Node) -> None:
        self.node, self.is_up = node, True
        self.host: Host | None = None
        self.last_error: AscendrunError | None = None

    def call(self, request: Any, body: bytes = b"", *, deadline_s: float, done: Callable[[Any], None]) -> None:
        done(self.node.ask(request, deadline_s=deadline_s, body=body))


class World:
    """Two hosts, the head's state directory, and the controller's thread: `work` runs what was posted to it."""

    def __init__(self, folder: Path, *patterns: str) -> None:
        self.state_dir = folder / "state"
        self.state_dir.mkdir()
        self.hosts = (Host("n1"), Host("n2"))
        self.nodes = {host: Node(folder / host.name) for host in self.hosts}
        self.links = {host: Link(node) for host, node in self.nodes.items()}
        self.outputs = JobOutputs("j-0001", "j-0001", RUN, 1, patterns, self.hosts, separate=True)
        self.events: list[Event] = []
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.post = self.posted.put
        self.folder = outputs_dir(self.state_dir, "j-0001")
        self.on_get: Callable[[], object] = lambda: None

    def get(self, host: Host) -> Link:
        if not self.links[host].is_up:
            self.on_get()
        return self.links[host]

    def start(self, **limits: int) -> OutputFetcher:
        links: Any = self

        def record(job_id: str, events: Sequence[Event]) -> None:
            self.events.extend(events)

        retention = Retention(**limits)
        return OutputFetcher(self.state_dir, links, lambda _: self.outputs, record, retention, connect_s=0.01)

    def work(self, is_done: Callable[[], object]) -> None:
        while not is_done():
            self.posted.get(timeout=60)()

    def codes(self) -> list[tuple[str, str]]:
        return sorted((event.hosts[0], event.code) for event in self.events)

    def serve(self, fetcher: OutputFetcher, *patterns: str, into: Path | None = None) -> list[FetchReply]:
        last: list[FetchReply] = []
        ends: list[bool] = []

        def answer(reply: Any, body: bytes, is_last: bool) -> None:
            ends.append(is_last)
            last.extend([reply] if reply.ended else [])

        fetcher.serve(Fetch("j-0001", patterns, None if into is None else str(into)), answer)
        self.work(lambda: ends[-1:] == [True])
        return last


def test_a_host_that_is_gone_is_named_and_sends_when_it_is_back(tmp_path: Path) -> None:
    world = World(tmp_path, "out/", "none")
    for node in world.nodes.values():
        node.write("out/model", b"weights")
    gone = world.links[world.hosts[1]]
    gone.is_up, gone.last_error = False, UnreachableError("no route to host")
    world.start().request("j-0001")
    world.work(lambda: len(world.events) == 3)
    assert world.codes() == [("n1", "outputs-fetched"), ("n1", "outputs-missing"), ("n2", "outputs-waiting")]
    assert names(world.folder) == ["n1/out/model"] and dict(read_waiting(world.state_dir, "j-0001")) == {"n2": None}
    fetcher = world.start()  # as after the end of the controller
    fetcher.resume()
    (ended,) = [reply for reply in world.serve(fetcher) if reply.problem is not None]
    assert (ended.host, ended.problem.code if ended.problem else "") == ("n2", "unreachable")
    gone.is_up = True
    link: Any = gone
    gone.host = world.hosts[1]
    fetcher.on_up(link)
    world.work(lambda: not waiting_jobs(world.state_dir))
    assert names(world.folder) == ["n1/out/model", "n2/out/model"]


def test_a_host_that_waits_for_its_turn_to_be_connected_is_not_unreachable(tmp_path: Path) -> None:
    world = World(tmp_path, "out")
    late = world.links[world.hosts[1]]
    late.is_up, late.host = False, world.hosts[1]
    for node in world.nodes.values():
        node.write("out/model", b"weights")
    fetcher, looks = world.start(), 0

    def connect_after_some_looks() -> None:
        nonlocal looks
        looks += 1
        if looks == 5:
            late.is_up = True
            fetcher.on_up(late)  # type: ignore[arg-type]

    world.on_get = connect_after_some_looks
    assert [reply.problem for reply in world.serve(fetcher, "out", into=tmp_path / "into")] == [None, None]


def test_too_much_is_refused_with_its_limit_until_a_user_fetches_it(tmp_path: Path) -> None:
    world = World(tmp_path, "out")
    for node in world.nodes.values():
        node.write("out/model", b"x" * 600)
    fetcher = world.start(outputs_job_bytes=1000)
    fetcher.request("j-0001")
    world.work(lambda: len(world.events) == 2)
    assert sorted(event.code for event in world.events) == ["outputs-failed", "outputs-fetched"]
    ((_, failure),) = read_waiting(world.state_dir, "j-0001").items()
    assert failure is not None and failure.code == "output-limit" and failure.hint == "ascendrun fetch j-0001"
    assert all(reply.problem is None for reply in world.serve(fetcher))
    assert len(names(world.folder)) == 2 and not waiting_jobs(world.state_dir)
    with open(world.nodes[world.hosts[0]].work / "huge", "wb") as file:
        file.truncate(8 << 40)
    world.nodes[world.hosts[0]].stored_bytes["huge"] = 8 << 40
    full = {reply.host: reply.problem for reply in world.serve(fetcher, "huge", into=tmp_path / "here")}
    assert full["n1"] is not None and full["n1"].code == "disk-full" and full["n2"] is None
    world.outputs = JobOutputs("j-0001", "j-0001", RUN, 1, (), world.hosts, separate=False)
    with pytest.raises(NotFoundError, match="declares no outputs"):
        world.serve(fetcher)


def test_the_transfers_of_a_job_that_is_removed_end_before_its_files_go(tmp_path: Path) -> None:
    world = World(tmp_path, "out")
    running, gone = (world.nodes[host] for host in world.hosts)
    data = os.urandom(5 * BLOCK_BYTES)
    for node in (running, gone):
        node.write("out/model", data)
    world.links[world.hosts[1]].is_up = False
    fetcher, asked, goes_on, done = world.start(), threading.Event(), threading.Event(), threading.Event()
    running.before_read = lambda: void((asked.set(), goes_on.wait(60)))
    fetcher.request("j-0001")
    assert asked.wait(60) and fetcher.jobs_now() == {"j-0001"}
    fetcher.cancel(["j-0001"], done.set)
    assert not done.is_set(), "a thread still writes"
    goes_on.set()
    world.work(done.is_set)
    assert not fetcher.jobs_now() and world.codes() == [], "the job has no events any more"
    shutil.rmtree(world.folder)
    world.links[world.hosts[1]].is_up = True
    link: Any = world.links[world.hosts[1]]
    link.host = world.hosts[1]
    fetcher.on_up(link)
    assert not fetcher.jobs_now() and not world.folder.exists(), "a host that is back sends nothing of it"
    fetcher.cancel(["j-0002"], done.clear)
    assert not done.is_set(), "nothing to wait for"


JOB = Job(id="j-0001", name="a", run="r", hosts=("n1", "n2"), grace_s=0.0, start_s=600.0, created_at_s=0.0, since_s=0.0)


def test_the_reason_of_a_staging_job_has_bytes_share_and_slow_hosts() -> None:
    job = replace(JOB, state=State.STAGING)
    _, reason = state_now(job, JobSight(True, staged={"n1": (100, 100), "n2": (20, 100)}))
    assert (reason.code, reason.hosts) == ("staging-slow", ("n2",))
    assert reason.values == {"done": 120, "total": 200, "share": 0.6, "nodes": 2}
    assert state_now(job, JobSight(True)) == ("STAGING", job.reason)
    assert state_now(JOB, JobSight(True, staged={"n1": (1, 2)})) == ("QUEUED", JOB.reason)
