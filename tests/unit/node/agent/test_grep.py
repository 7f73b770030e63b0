"""A node looks through its own logs: the head's way of seeing lines, bounded, and killed when a pattern never ends."""

import os
import random
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.logs.log_lines import LineSplitter
from ascendrun.head.spool.clocks import HostClock, Reading
from ascendrun.head.spool.grep import Wanted, copied_until, make_request, read_hits
from ascendrun.head.spool.spool_files import StreamFiles
from ascendrun.node import layout, wire
from ascendrun.node.agent.execute import Commands
from ascendrun.node.agent.grep import grep, read_lines
from ascendrun.node.op_errors import OperationError

TAG = "head-job.1"
CODE = Path(__file__).resolve().parents[4]
AGENT = [
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(CODE)!r})\nfrom ascendrun.node.agent.grep import main; sys.exit(main())",
]


class Node:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = Path(layout.attempt_dir(str(root), TAG))
        self.folder.mkdir(parents=True)

    def write(self, data: bytes, *, name: str = "rank-0.out", generation: int = 0, at_s: float = 1.0) -> None:
        path = self.folder / f"{name}.{generation}"
        with open(path, "ab") as file:
            file.write(data)
        with open(self.folder / f"{name}.times.{generation}", "ab") as file:
            file.write(struct.pack("!QQ", path.stat().st_size, int(at_s * 1e9)))

    def grep(self, *patterns: str, files: Any = None, **more: Any) -> tuple[list[tuple[dict[str, Any], str]], bool]:
        request = {"tag": TAG, "patterns": list(patterns), "files": files or {"rank-0.out": [0, 0]}, **more}
        login = dict(os.environb)
        fields, body = grep(str(self.root), request, agent=AGENT, commands=Commands(login, 0o022), login=login)
        frames = [(header, text.decode()) for header, text in wire.FrameReader().feed(body)]
        hits = [frame for frame in frames if "end" not in frame[0]]
        return hits, fields["complete"] and any(header.get("end") for header, _ in frames)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def texts(found: tuple[list[tuple[dict[str, Any], str]], bool]) -> list[str]:
    assert found[1]
    return [text for _header, text in found[0]]


def test_only_lines_in_which_a_pattern_is_found_are_sent_with_their_times(node: Node) -> None:
    node.write(b"one\ntwo\n", at_s=1.0)
    node.write(b"three\n", at_s=2.0)
    hits, is_complete = node.grep("^t")
    assert is_complete
    assert [(header["offset"], header["at_ns"], text) for header, text in hits] == [
        (4, 10**9, "two"),
        (8, 2 * 10**9, "three"),
    ]


def test_what_the_head_has_is_not_looked_at_again(node: Node) -> None:
    node.write(b"hit one\nhit two\n")
    node.write(b"hit three\n", generation=1)
    assert texts(node.grep("hit", files={"rank-0.out": [0, 8]})) == ["hit two", "hit three"]
    assert texts(node.grep("hit", files={"rank-0.out": [1, 0], "rank-7.err": [0, 0]})) == ["hit three"]


def test_case_inversion_several_patterns_and_times(node: Node) -> None:
    for at_s, line in enumerate((b"Error A\n", b"warning B\n", b"fine C\n")):
        node.write(line, at_s=float(at_s))
    assert texts(node.grep("ERROR", ignore_case=True)) == ["Error A"]
    assert texts(node.grep("Error", "warning")) == ["Error A", "warning B"]
    assert texts(node.grep("Error", "warning", invert=True)) == ["fine C"]
    assert texts(node.grep(".", since_ns=10**9, until_ns=10**9)) == ["warning B"]


def test_a_pattern_that_never_ends_is_killed(node: Node) -> None:
    node.write(b"a" * 60 + b"\n")
    began = time.monotonic()
    hits, is_complete = node.grep("(a+)+$x", timeout_s=0.5)
    assert (hits, is_complete) == ([], False)
    assert time.monotonic() - began < 20


def test_more_hits_than_asked_for_are_cut_and_said_to_be(node: Node) -> None:
    node.write(b"x\n" * 1000)
    request = {"tag": TAG, "patterns": ["x"], "files": {"rank-0.out": [0, 0]}, "max_hits": 10}
    login = dict(os.environb)
    _fields, body = grep(str(node.root), request, agent=AGENT, commands=Commands(login, 0o022), login=login)
    found = read_hits("n1", body, attempt=1, clock=HostClock(), is_complete=True)
    assert len(found.lines[(0, "out")]) == 10 and found.problem.key == "grep.truncated"


@pytest.mark.parametrize("request_", [{"patterns": ["("], "files": {}}, {"patterns": ["x"], "files": {"../x": [0, 0]}}])
def test_nonsense_is_refused(node: Node, request_: dict[str, Any]) -> None:
    with pytest.raises(OperationError):
        grep(str(node.root), {"tag": TAG, **request_}, agent=AGENT, commands=Commands({}, 0o022), login={})


def test_both_ends_see_the_same_lines(node: Node) -> None:
    """The node's own splitting against the head's: bars, giants, NULs, old Chinese, lines over generations."""
    shuffle = random.Random(7)
    pieces = [
        b"plain\n",
        b"\n",
        b"bar 1\rbar 2\n",
        b"\x00nul\n",
        b"x" * 70_000 + b"\n",
        b"\xff\xfe\n",
        b"half",
        "汉\n".encode(),
        "设备\n".encode("gbk"),
        b"windows\r\n",
        b"y" * 1_500_000 + b"\n",
    ]
    data = b"".join(shuffle.choice(pieces) for _ in range(400))
    node.write(data[: len(data) // 2])
    node.write(data[len(data) // 2 :], generation=1)
    splitter = LineSplitter()
    heads = [*splitter.feed(data), *filter(None, [splitter.finish()])]
    nodes = [line.text for line in read_lines(str(node.folder), "rank-0.out", 0, 0)]
    assert [text.split("... (+")[0] for text in heads] == nodes


def test_the_head_asks_from_its_last_whole_line_in_the_hosts_clock(node: Node, tmp_path: Path) -> None:
    files = StreamFiles(tmp_path / "spool", "n1", 3, "err", 1)
    files.folder.mkdir()
    assert copied_until(files) == (0, 0)
    files.path(0).write_bytes(b"old\n")
    files.path(1).write_bytes(b"one\ntwo\nhal")
    assert copied_until(files) == (1, 8)
    files.path(1).write_bytes(b"half of a line")
    assert copied_until(files) == (1, 0)
    clock = HostClock([Reading(0.0, 90.0, 0.001)])
    wanted = Wanted(("x",), since_s=10.0)
    request = make_request(wanted, {(3, "err"): (1, 8)}, clock)
    assert request["files"] == {"rank-3.err": [1, 8]}
    assert (request["since_ns"], request["until_ns"]) == (100 * 10**9, None)


def test_hits_come_back_in_the_heads_clock_and_torn_answers_are_said_to_be(node: Node) -> None:
    node.write(b"hit\n", at_s=100.0)
    clock = HostClock([Reading(0.0, 90.0, 0.001)])
    body = b"".join(wire.pack(header, text.encode()) for header, text in node.grep("hit")[0])
    found = read_hits("n1", body + wire.pack({"end": True}), attempt=2, clock=clock, is_complete=True)
    assert found.lines == {(0, "out"): [(10.0, "n1", 0, "out", "hit", 2)]} and found.problem is None
    torn = read_hits("n1", body, attempt=2, clock=clock, is_complete=False)
    assert torn.lines and torn.problem.key == "grep.timed-out"
    killed = read_hits("n1", b"", attempt=2, clock=clock, is_complete=True)
    assert killed.problem.key == "grep.incomplete" and not killed.lines
    assert (
        read_hits("n1", b"\xff" * 8 + b"x" * 99, attempt=1, clock=clock, is_complete=True).problem.key
        == "grep.invalid-reply"
    )
