"""Stacks of ranks on a node: real processes, no process harmed that did not announce its handler."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ascendrun.node import procs, stacks
from ascendrun.node.stacks import make_environ
from tests.lib.vcluster.processes import await_that

HANDLER = "import faulthandler; faulthandler.register(40, open({path!r}, 'ab')); "
STANDS = "import time\ndef read_shard():\n  print('ready', flush=True)\n  while True: time.sleep(1000)\nread_shard()\n"


SLOW_HANDLER = """
import signal, time
def print_slowly(*_):
  with open({path!r}, 'ab', 0) as file:
    file.write(b'Thread 0x1 (most recent call first):\\n')
    time.sleep(0.3)
    file.write(b'  File "data.py", line 1 in read_shard\\n')
signal.signal(40, print_slowly)
"""


class Node:
    """A node's directory of an attempt whose ranks this test starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[subprocess.Popen[bytes]] = []

    def start(self, *codes: str, announce: bool = True, env: dict[str, str] | None = None) -> None:
        for rank, code in enumerate(codes):
            own = {**os.environ, "RANK": str(rank), "PATH": "/nowhere", "PYTHONFAULTHANDLER": "1", **(env or {})}
            path = self.folder / f"rank-{rank}.stack.0"
            child = subprocess.Popen(
                [sys.executable, "-c", code.replace("HANDLER", HANDLER.format(path=str(path)))],
                env=own,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self.children.append(child)
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            if announce:
                line = {"event": "start", "stack_signal": 40, "pid": child.pid}
                (self.folder / f"rank-{rank}.metrics.0").write_text(json.dumps(line) + "\n")

    def take(self) -> list[dict[str, Any]]:
        rows = stacks.take(self.found(), {}, str(self.folder), login={})["ranks"]
        assert isinstance(rows, list)
        return rows

    def found(self) -> list[tuple[int, int]]:
        stats = [procs.read_stat(child.pid) for child in self.children]
        return [(stat.pid, stat.start) for stat in stats if stat is not None]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(stacks, "PRINTED_S", 60.0)  # every rank that is asked here prints, if late
    made = Node(tmp_path)
    yield made
    for child in made.children:
        with suppress(ProcessLookupError):
            child.kill()
        child.communicate()


def test_a_rank_without_a_handler_is_never_signalled(node: Node) -> None:
    node.start(STANDS)  # announced, as another program in its place would find it; signal 40 would kill it
    (row,) = node.take()
    assert (row["rank"], row["source"], row["text"]) == (0, "proc", "")
    assert node.children[0].poll() is None and len(row["threads"]) == 1


def test_a_handler_that_was_not_announced_is_not_used(node: Node) -> None:
    node.start("HANDLER\n" + STANDS, announce=False)
    assert [row["source"] for row in node.take()] == ["proc"]


def test_ranks_print_their_stacks_and_run_on(node: Node) -> None:
    node.start("HANDLER\n" + STANDS, "HANDLER\n" + STANDS)
    for _ in range(2):
        rows = node.take()
        assert [row["source"] for row in rows] == ["signal", "signal"]
        assert all(row["text"].count("read_shard") == 1 for row in rows), "only what this look printed"
    assert all(child.poll() is None for child in node.children)


def test_a_rank_that_waits_for_a_processor_while_it_prints_is_read_to_the_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "SETTLED_S", 10.0)
    path = node.folder / "rank-0.stack.0"
    path.touch()
    node.start(SLOW_HANDLER.format(path=str(path)) + STANDS)
    (row,) = node.take()
    assert "read_shard" in row["text"]


def test_a_stopped_rank_is_described_and_stays_stopped(node: Node) -> None:
    node.start("HANDLER\n" + STANDS, "HANDLER\n" + STANDS)
    node.children[0].send_signal(signal.SIGSTOP)
    stat = lambda: procs.read_stat(node.children[0].pid)  # noqa: E731
    await_that(lambda: getattr(stat(), "state", "") == "T")
    rows = node.take()
    assert rows[0]["state"] == "T" and [row["source"] for row in rows] == ["proc", "signal"]
    assert getattr(stat(), "state", "") == "T"


def test_py_spy_is_used_where_the_rank_has_it(node: Node, tmp_path: Path) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text(f"#!{sys.executable}\nprint('[{{\"frames\": []}}]')\n")
    tool.chmod(0o755)
    node.start("HANDLER\n" + STANDS, env={"PATH": str(tmp_path)})
    (row,) = node.take()
    assert (row["source"], json.loads(row["text"])) == ("py-spy", [{"frames": []}])


def test_a_py_spy_that_may_not_trace_is_replaced_by_the_handler(node: Node, tmp_path: Path) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text("#!/bin/sh\nexit 1\n")
    tool.chmod(0o755)
    node.start("HANDLER\n" + STANDS, env={"PATH": str(tmp_path)})
    assert [row["source"] for row in node.take()] == ["signal"]


def test_an_attempt_without_processes_has_no_stacks(node: Node) -> None:
    assert node.take() == []


def test_the_processes_below_a_rank_are_named(node: Node) -> None:
    node.start("import subprocess\nsubprocess.Popen(['/bin/sleep', '1000'])\n" + STANDS)
    try:
        below = procs.snapshot()
        child = next(stat for stat in below.values() if stat.ppid == node.children[0].pid)
        await_that(lambda: bool(procs.read_environ(child.pid)))  # empty for a moment after `exec`, as in the kernel
        rows = stacks.take([(child.pid, child.start), *node.found()], {}, str(node.folder), login={})["ranks"]
        assert [(row["pid"], row["below"]) for row in rows] == [(node.children[0].pid, ["sleep"])]
    finally:
        os.kill(child.pid, signal.SIGKILL)


def test_a_rank_that_hides_its_environment_is_known_by_its_leader(node: Node) -> None:
    node.start(STANDS, env={"RANK": "x"})
    (who,) = node.found()
    assert [row["rank"] for row in stacks.take([who], {who[0]: 3}, str(node.folder), login={})["ranks"]] == [3]


def test_hung_ranks_print_every_stack_as_they_end_also_when_stopped(node: Node) -> None:
    node.start(STANDS, STANDS, announce=False)
    node.children[1].send_signal(signal.SIGSTOP)
    stacks.abort(node.found())
    for child in node.children:
        _, errors = child.communicate(timeout=60)
        assert child.returncode == -signal.SIGABRT and b"read_shard" in errors


def test_a_rank_that_does_not_handle_abort_is_left_to_term_and_kill(node: Node) -> None:
    node.start("import faulthandler; faulthandler.disable()\n" + STANDS, announce=False)
    assert not stacks.catches(node.children[0].pid, signal.SIGABRT)
    stacks.abort(node.found())
    assert [row["source"] for row in node.take()] == ["proc"] and node.children[0].poll() is None


def test_the_last_words_leave_no_core(node: Node) -> None:
    node.start(STANDS, announce=False)
    pid = node.children[0].pid
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.prlimit(pid, resource.RLIMIT_CORE, (hard, hard))
    node.children[0].send_signal(signal.SIGSTOP)
    stacks._forbid_core(pid)
    assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)


def test_a_shell_next_to_a_rank_has_its_environment_but_writes_to_none_of_its_files() -> None:
    of_rank = b"RANK=3\0LANG=C\0TERM=dumb\0ASCENDRUN_RUN_ID=h-j-0001.1\0ASCENDRUN_METRICS_FILE=/m\0A=b=c\0"
    environ = make_environ(of_rank, {b"TERM": b"xterm", b"HOME": b"/root"})
    assert environ == {b"RANK": b"3", b"LANG": b"C", b"TERM": b"xterm", b"A": b"b=c"}
    assert make_environ(b"", {b"TERM": b"xterm"}) == {}
