"""A file that a user names for output is complete or not written, and no device or link is replaced."""

import os
import stat
import threading
from pathlib import Path

import pytest

from ascendrun.output_file import write_bytes, write_output


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")

    def fail(file: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_output(path, fail)
    assert path.read_bytes() == b"old"
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, exists: bool) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to("target")
    write_bytes(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"


def test_a_pipe_is_written_through(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    received: list[bytes] = []
    for path in (pipe, link):
        reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
        reader.start()
        write_bytes(path, b"data")
        reader.join(10)
    assert received == [b"data", b"data"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_the_standard_output_is_written_through(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as log:
        write_bytes(Path(f"/proc/self/fd/{log.fileno()}"), b"data")
    assert (tmp_path / "log").read_bytes() == b"data"
