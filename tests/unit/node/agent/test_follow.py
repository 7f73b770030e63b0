"""What grows is sent once, in order, and nothing is passed over in silence."""

import contextlib
import errno
import os
import queue
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ascendrun.head.waiting import get_within
from ascendrun.node import layout
from ascendrun.node.agent import follow as follow_module
from ascendrun.node.agent.follow import FIRST_POLL_S, FIRST_S, POLL_S, Follow, Follower

TAG = "job.1"
NOBODY = 65534


@pytest.fixture
def root() -> Iterator[Path]:
    """Open to everybody, unlike a test's own folder: the superuser is refused nothing."""
    root = Path(tempfile.mkdtemp(prefix="ascendrun-follow-"))
    root.chmod(0o755)
    folder = Path(layout.attempt_dir(str(root), TAG))
    folder.mkdir(parents=True)
    yield root
    shutil.rmtree(root)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(was)


def test_a_generation_that_cannot_be_opened_holds_the_later_ones_back_and_comes_when_it_can(root: Path) -> None:
    folder = Path(layout.attempt_dir(str(root), TAG))
    for name, data in (("rank-0.out.0", "first"), ("rank-0.out.1", "second"), ("rank-1.out.0", "other")):
        (folder / name).write_text(data)
    (folder / "rank-0.out.0").chmod(0)
    said: list[tuple[dict[str, Any], bytes]] = []
    follow = Follow(str(root), TAG, {}, lambda header, body: said.append((header, body)), {})
    with as_nobody():
        assert [follow.poll(now_s) for now_s in (1.0, 2.0)] == [False, False]  # not asked again and again at once
    assert [(header["event"], header["file"], header["generation"], body) for header, body in said] == [
        ("follow_held", "rank-0.out", 0, b""),
        ("data", "rank-1.out", 0, b"other"),
    ]
    assert "Permission denied" in said[0][0]["error"]
    (folder / "rank-0.out.0").chmod(0o644)
    with as_nobody():
        follow.poll(3.0)
    assert [(header["event"], header["generation"], body) for header, body in said[2:]] == [
        ("data", 0, b"first"),
        ("data", 1, b"second"),
    ]


def test_only_the_start_of_a_file_over_its_limit_is_sent_and_that_is_reported_once(root: Path) -> None:
    folder = Path(layout.attempt_dir(str(root), TAG))
    with open(folder / "rank-0.error.0", "wb") as file:
        file.truncate(900 << 20)
    (folder / "rank-0.out.0").write_bytes(b"x" * 100)
    said: list[tuple[dict[str, Any], bytes]] = []
    follow = Follow(str(root), TAG, {}, lambda header, body: said.append((header, body)), {"error": 1 << 17, "out": 0})
    while follow.poll(1.0):
        pass
    follow.poll(2.0)
    assert sum(len(body) for _, body in said) == 1 << 17
    limited = [header for header, _ in said if header["event"] == "follow_limited"]
    assert [(one["file"], one["size"], one["limit"]) for one in limited] == [("rank-0.error", 900 << 20, 1 << 17)]


def test_a_file_with_a_window_is_sent_as_far_as_it_goes_in_order_over_its_generations(root: Path) -> None:
    folder = Path(layout.attempt_dir(str(root), TAG))
    (folder / "samples.1").write_bytes(b"a" * 90)
    (folder / "samples.2").write_bytes(b"b" * 90)
    (folder / "rank-0.out.0").write_bytes(b"c" * 500)
    said: list[tuple[str, int, int, int]] = []

    def send(header: dict[str, Any], body: bytes) -> None:
        said.append((header["file"], header["generation"], header["offset"], len(body)))

    def polled(now_s: float) -> list[tuple[str, int, int, int]]:
        said.clear()
        follow.poll(now_s)
        return list(said)

    follow = Follow(str(root), TAG, {"samples": {"1": 50}}, send, {}, {"samples": [100, 1, 20]})
    assert polled(1.0) == [("rank-0.out", 0, 0, 500), ("samples", 1, 50, 40), ("samples", 2, 0, 30)]
    assert polled(2.0) == []
    follow.acknowledge("samples", 1, 80)
    assert polled(3.0) == [("samples", 2, 30, 60)], "90 bytes of the last generation, and 10 of that before"
    (folder / "samples.3").write_bytes(b"d" * 300)
    assert polled(4.0) == []
    follow.acknowledge("samples", 2, 90)
    follow.acknowledge("rank-0.out", 0, 10)
    assert polled(5.0) == [("samples", 3, 0, 100)]


def test_a_close_that_fails_ends_no_transfer(tmp_path: Path) -> None:
    folder = Path(layout.attempt_dir(str(tmp_path), TAG))
    folder.mkdir(parents=True)
    (folder / "rank-0.out.0").write_text("words")
    said: list[tuple[str, bytes]] = []
    follow = Follow(str(tmp_path), TAG, {}, lambda header, body: said.append((header["event"], body)), {})

    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:  # a file server that has gone since the file was opened
        patch.setattr(os, "pread", fail)
        patch.setattr(os, "close", fail)
        assert not follow.poll(1.0)
    assert not follow.poll(2.0)
    assert said == [("follow_held", b""), ("data", b"words")]


def test_the_first_output_of_a_file_waits_for_no_batch_and_more_of_it_does(root: Path) -> None:
    folder = Path(layout.attempt_dir(str(root), TAG))
    said: list[bytes] = []
    follow = Follow(str(root), TAG, {}, lambda header, body: said.append(body), {})
    for rank, now_s in ((0, 1.0), (1, 1.01)):
        (folder / f"rank-{rank}.out.0").write_bytes(b"first")
        follow.poll(now_s)
    assert said == [b"first", b"first"]
    (folder / "rank-0.out.0").write_bytes(b"first, more")
    follow.poll(1.02)
    assert len(said) == 2
    follow.poll(2.0)
    assert said[2:] == [b", more"]


def test_files_are_polled_often_until_an_attempt_has_output_and_for_a_limited_time(root: Path) -> None:
    follow = Follow(str(root), TAG, {}, lambda header, body: None, {})
    now_s = time.monotonic()
    assert follow.poll_s(now_s) == FIRST_POLL_S < POLL_S
    assert follow.poll_s(now_s + FIRST_S) == POLL_S
    folder = Path(layout.attempt_dir(str(root), TAG))
    (folder / "events.0").write_bytes(b"an event\n")
    follow.poll(now_s)
    assert follow.poll_s(now_s) == FIRST_POLL_S, "an event is not output"
    (folder / "rank-0.out.0").write_bytes(b"first\n")
    follow.poll(now_s)
    assert follow.poll_s(now_s) == POLL_S


def test_the_first_line_is_sent_before_the_usual_poll(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_module, "POLL_S", 3600.0)
    monkeypatch.setattr(follow_module, "FIRST_S", 3600.0)
    folder = Path(layout.attempt_dir(str(root), TAG))
    (folder / "events.0").write_bytes(b"an event\n")
    sent: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    follower = Follower(str(root), send=lambda header, body: sent.put(body), note_lost=lambda tag: None)
    follower.follow(TAG, {}, {}, {})
    assert get_within(sent, 60.0) == b"an event\n"
    (folder / "rank-0.out.0").write_bytes(b"first\n")  # behind the first poll
    assert get_within(sent, 60.0) == b"first\n"
    follower.unfollow(TAG)
