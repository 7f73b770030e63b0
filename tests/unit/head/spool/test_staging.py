"""Directories of a job on their way to its hosts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ascendrun.core.jobs.plan import Tree
from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol.file_messages import PutFileReply
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool import transfer
from ascendrun.head.spool.staging import TreePush, push_once_per_home
from ascendrun.head.spool.transfer import BLOCK_S
from ascendrun.head.state.state_dir import tree_file


def test_bytes_are_counted_as_they_arrive_and_when_they_are_there(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(transfer, "BLOCK_BYTES", 4)
    code, data = Tree("code", "a" * 64, 9, 1), Tree("data", "b" * 64, 7, 1)
    (tmp_path / "trees").mkdir()
    tree_file(tmp_path, code.sha256).write_bytes(b"x" * 9)
    seen: list[tuple[int, int | None]] = []
    cut = [4]

    def ask(request: Any, body: bytes, deadline_s: float, then: Callable[[Reply[Any]], None]) -> None:
        seen.append((push.done_bytes, request.offset))
        assert deadline_s >= BLOCK_S, "a disk may be slow"
        if cut and request.offset == cut[0]:
            cut.pop()
            then(Reply(None, error=Failure("connection-lost", "cut")))
            return
        here = 4 if ended else 0
        have = (request.offset or here) + len(body)
        then(Reply(PutFileReply(have, request.tree == data.sha256 or request.sha256 is not None)))

    ended: list[Failure | None] = []
    for _ in range(2):
        push = TreePush(tmp_path, [code, data], query=ask, done=ended.append)
        push.send_next()
    assert [one and one.code for one in ended] == ["connection-lost", None]
    assert seen == [(0, None), (0, 0), (4, 4), (0, None), (0, 4), (8, 8), (9, None), (9, None)]
    assert (push.done_bytes, push.total_bytes) == (16, 16), "what the node has is not sent again; never more than all"


def test_nodes_that_share_a_home_wait_for_one_of_them() -> None:
    begun: dict[str, Callable[[], None]] = {}
    push_once_per_home(("n1", "n2", "n3", "n4"), {"n1": "n3", "n3": "n3", "n4": "n3"}, begun.__setitem__)
    assert list(begun) == ["n1", "n2"]
    begun["n2"]()
    assert list(begun) == ["n1", "n2"]
    begun["n1"]()
    assert list(begun) == ["n1", "n2", "n3", "n4"]
