"""What grows is sent once, in order, and nothing is passed over in silence."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ascendrun.node import layout
from ascendrun.node.agent.follow import Follow

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
    follow = Follow(str(root), TAG, {}, lambda header, body: said.append((header, body)))
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
