"""Every message between the controller and an agent, through both ends: what one writes the other reads."""

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.head.protocol import agent_messages as messages
from ascendrun.head.protocol import file_messages
from ascendrun.head.protocol.messages import Message, R, Request
from ascendrun.head.spool.relay import Relay
from ascendrun.node import layout, loader, tree_hash, wire
from ascendrun.node.agent import serve
from ascendrun.node.agent.follow import Follow
from ascendrun.node.agent.serve import Agent
from tests.agent.conftest import TAG


class Header(dict):  # type: ignore[type-arg]
    """A request's header that knows which of its fields were read."""

    read: set[str]

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


class Node:
    """An agent in this process."""

    def __init__(self, root: Path) -> None:
        root.mkdir(mode=0o700)
        pyz = root / "agent.pyz"
        pyz.write_bytes(loader.pack_agent(loader.read_sources())[0])
        self.root, self.read_fd = root, -1
        self.read_fd, self._write_fd = os.pipe()
        self.agent = Agent(
            str(root),
            agent=[sys.executable, "-I", "-S", str(pyz)],
            umask=0o077,
            in_fd=os.open(os.devnull, os.O_RDONLY),
            out_fd=self._write_fd,
        )
        self.agent.outbox._on_broken = lambda: None  # the agent's own process would end now
        self.reader = wire.FrameReader()
        self.events: list[Message] = []
        self.replies: list[tuple[dict[str, Any], bytes]] = []

    def ask(self, request: Request[R], body: bytes = b"") -> tuple[R, bytes]:
        """The reply, read by the controller's end; every field that was sent must have been read by the agent."""
        header = Header(json.loads(json.dumps({"id": 1, "op": request.OP, **request.to_header()})))
        header.read = set()
        self.agent._take(header, body)
        self.wait(lambda: bool(self.replies))
        reply, reply_body = self.replies.pop()
        assert reply["ok"], reply
        if not isinstance(request, messages.Grep):  # handed on as a whole to a process
            assert set(header) <= header.read | {"id", "op"}, request
        return request.REPLY.from_header(reply), reply_body

    def wait(self, condition: Any) -> None:
        deadline = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < deadline
            if not select.select([self.read_fd], [], [], 1.0)[0]:
                continue
            for header, body in self.reader.feed(os.read(self.read_fd, 1 << 20)):
                if "re" in header:
                    self.replies.append((header, body))
                elif header["event"] != "beat":
                    self.events.append(file_messages.EVENTS[header["event"]].from_header(header))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "node")
    yield made
    os.close(made.read_fd)


def test_every_message_passes_through_both_ends(node: Node, tmp_path: Path) -> None:
    asked = set()

    def ask(request: Request[R], body: bytes = b"") -> R:
        asked.add(type(request))
        return node.ask(request, body)[0]

    assert ask(messages.Ping()).at_ns > 0
    assert ask(messages.WatchHead(str(tmp_path / "no-lock"), ["true"], {})) is not None
    probe = ask(messages.Probe({"peer": ["127.0.0.1"]}))
    assert probe.free_bytes and set(probe.routes["peer"]) == {"interface", "source"}
    code = tmp_path / "code"
    code.mkdir()
    (code / "a.py").write_text("pass\n")
    entries = tree_hash.list_tree(str(code))
    sha256 = tree_hash.hash_listing(entries)
    with open(tmp_path / "code.tar", "wb") as file:
        tree_hash.write_tar(str(code), entries, file)
    tar = (tmp_path / "code.tar").read_bytes()
    tree = file_messages.PutTree(sha256, len(tar))
    assert not ask(tree).done
    assert ask(replace(tree, offset=0), tar).have == len(tar) and ask(replace(tree, sha256="")).done
    prepare = messages.Prepare(
        tag=TAG,
        node_rank=0,
        ranks=[{"rank": 0, "local_rank": 0, "argv": ["sh", "-c", "echo hello; sleep 30"], "env": {"RANK": "0"}}],
        cwd=str(tmp_path),
        setup=None,
        trees=[sha256],
        link_tree=sha256,
        ports=[],
        stop={"signal": "TERM", "grace_s": 1.0},
        start_s=10.0,
        max_s=None,
        sampling=None,
        home="head-job",
        job={"id": "job"},
        fence_s=1000.0,
        pointer={"format": "deepspeed", "path": str(tmp_path / "global_step4"), "step": 4},
    )
    (tmp_path / "latest").write_text("global_step8")
    first = ask(prepare).pointer
    assert first == {"path": str(tmp_path / "latest"), "before": "global_step8", "step": 4}
    assert ask(prepare) == messages.PrepareReply()
    assert ask(messages.Abort(TAG)) is not None
    ask(prepare)
    ask(messages.Follow(TAG, {"rank-0.out": {"0": 0}}, {}, {"samples": (1 << 16, 0, 0)}))
    ask(messages.Acknowledge(TAG, "samples", 0, 0))
    assert ask(messages.Go(TAG, None, {"SECRET": "x"})).supervisor_pid > 0
    node.wait(lambda: any(isinstance(one, file_messages.FileData) and one.file == "rank-0.out" for one in node.events))
    assert ask(file_messages.Files(TAG)).files["rank-0.out"] == {"0": 6}
    node.wait(lambda: {one.comm for one in ask(messages.Processes(TAG)).processes} == {"sh", "sleep"})
    seen = ask(messages.Processes(TAG))
    assert ask(messages.Copy(TAG)).job == {"id": "job"}
    assert ask(messages.Live()).live == (TAG,) and seen.phase == "running"
    assert seen.supervisor and len(seen.processes) == 2
    assert all(one.pid > 1 and one.start > 0 and one.state in "SRD" for one in seen.processes)
    found, body = node.ask(messages.Grep(TAG, {"rank-0.out": [0, 0]}, ["hell"], False, False, 10.0))
    assert found.complete and b"hello" in body
    asked.add(messages.Grep)
    assert ask(messages.Stacks(TAG)).at_ns > 0
    assert ask(messages.RankProcess(TAG, 0)).argv[-3] == "shell"
    assert ask(messages.Renew(TAG, 1)).at_ns > 1
    (tmp_path / "ckpt" / "step-00000004").mkdir(parents=True)
    (torn,) = ask(messages.Checkpoints(str(tmp_path / "ckpt"))).checkpoints
    assert (torn["step"], torn["whole"], torn["why"]) == (4, False, "missing")
    assert ask(messages.Release(TAG, {}, 1 << 30)).freed_bytes == 0
    assert ask(messages.Usage("head")).runs["head-job"] > 0
    used = ask(messages.Usage()).total_bytes
    assert used is not None and used > ask(messages.Usage("head")).runs["head-job"]
    assert ask(messages.Prune(("head-job",), ())).removed == {}, "it runs"
    gathered = ask(
        messages.Gather(TAG, [{"name": "x", "kind": "argv", "file": "f", "commands": [["echo", "a"]]}], 10.0)
    )
    assert [file["name"] for file in gathered.files] == ["x"] and gathered.at_ns > gathered.boot_ns
    (tmp_path / "left").write_bytes(b"abc")
    left = str(tmp_path / "left")
    assert [file[:2] for file in ask(file_messages.Outputs("head-job", (left,))).files] == [(left, 3)]
    found, block = node.ask(file_messages.ReadOutput("head-job", left, 1))
    assert (found.size_bytes, block) == (3, b"bc")
    sha256 = ask(file_messages.ReadOutput("head-job", left)).sha256
    assert sha256 is not None and sha256.startswith("ba7816bf")
    put = file_messages.PutFile("head-job", str(tmp_path / "put"), 3, 10**18, 0o644)
    assert ask(put).have == 0 and ask(replace(put, offset=0), b"abc").have == 3
    identity = Relay({}).identity
    port = ask(file_messages.Offer(put.to_header(), identity)).port
    whole = replace(put, sha256=sha256).to_header()
    assert ask(file_messages.Take(whole, identity, ["127.0.0.1"], port, 3.0)).done
    assert (tmp_path / "put").read_bytes() == b"abc"
    ask(messages.Stop(TAG, True, 0.0, "user", by="wang@login1"))
    taken = json.loads(Path(layout.attempt_dir(str(node.root), TAG), layout.STOP_TAKEN).read_bytes())
    assert (taken["why"], taken["by"]) == ("user", "wang@login1")
    ask(messages.Unfollow(TAG))
    assert ask(messages.Processes("head-other.1")) == messages.ProcessesReply()
    ran, body = node.ask(messages.Exec(["echo", "a"], 10.0, 100))
    assert (ran.code, ran.timed_out, body[: ran.out_bytes]) == (0, False, b"a\n")
    asked.add(messages.Exec)
    shell = {"setup": None, "env": {}, "secret_env": {}, "cwd": ""}
    survey = ask(messages.Survey([{"name": "limits", "kind": "limits"}], 10.0, shell))
    assert "limits" in survey.results["limits"]
    assert ask(messages.Sample([{"name": "e", "argv": ["echo", "a"], "timeout_s": 5.0}], 10.0)).lines[1]["tool"] == "e"
    kinds = {
        one
        for one in Request.__subclasses__()
        if one.__module__ in (messages.__name__, file_messages.PutFile.__module__)
    }
    assert asked == kinds
    assert {type(one) for one in node.events} == {file_messages.FileData, file_messages.ArtifactData}


def test_the_events_of_files_that_cannot_be_followed_and_the_first_event_of_an_agent(tmp_path: Path) -> None:
    sent: list[Message] = []

    def send(header: dict[str, Any], body: bytes) -> None:
        sent.append(file_messages.EVENTS[header["event"]].from_header(json.loads(json.dumps(header))))

    folder = Path(layout.attempt_dir(str(tmp_path), "head-job.1"))
    folder.mkdir(parents=True)
    (folder / "rank-0.out.0").write_text("a")
    (folder / "rank-1.out.0").mkdir()
    follow = Follow(str(tmp_path), TAG, {"rank-0.out": {"0": 5}}, send, {})
    assert follow._send_file(("rank-1.out", 0), 1)
    follow.poll(1e9)
    assert sent[0] == file_messages.FileUnreadable(TAG, "rank-1.out", 0, "[Errno 21] Is a directory")
    assert sent[1] == file_messages.FileTruncated(TAG, "rank-0.out", 0, 1)
    agent_path = tmp_path / "agent.pyz"
    agent_path.write_bytes(b"x")
    send(serve.hello(str(tmp_path), str(agent_path)), b"")
    info = sent[-1]
    assert isinstance(info, messages.AgentInfo) and info.root == str(tmp_path) and info.uid == os.geteuid()
