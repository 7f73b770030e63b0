"""Commands that wait for a controller which starts slowly, or not at all: real processes on a busy machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ascendrun.cluster import Cluster
from ascendrun.core.errors import UnreachableError
from ascendrun.head.loop import daemon
from ascendrun.node.procs import snapshot
from tests.lib.vcluster.processes import await_that

BUSY = "import time\nuntil = time.monotonic() + {busy_s}\nwhile time.monotonic() < until:\n    pass\n"
STUCK = "import time\ntime.sleep(3600)\n"
STALL_S = 4.0


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Commands give up on a controller that has not used the processor for STALL_S. Nothing is left at the end."""
    monkeypatch.setattr(daemon, "STALL_S", STALL_S)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "first"), prepend=os.pathsep)
    (tmp_path / "first").mkdir()
    yield tmp_path / "state"
    (tmp_path / "first" / "sitecustomize.py").unlink()
    await_that(lambda: not kill_ours(tmp_path))


def kill_ours(folder: Path) -> list[int]:
    """Kill what is there; some may have ended meanwhile, and a guard may have started another one."""
    found = ours(folder)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def ours(folder: Path) -> list[int]:
    """The controllers and guards of a test, by their state directory."""
    mark = f"ASCENDRUN_STATE_DIR={folder / 'state'}".encode()
    found = []
    for pid in snapshot():
        try:
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue
    return found


def at_start(state_dir: Path, code: str) -> None:
    """Let each Python run this first."""
    (state_dir.parent / "first" / "sitecustomize.py").write_text(code)


def test_a_start_that_uses_the_processor_is_awaited_however_long_it_takes(state_dir: Path) -> None:
    at_start(state_dir, BUSY.format(busy_s=2 * STALL_S))
    daemon.start_controller(state_dir)
    assert daemon.is_running(state_dir)
    Cluster(state_dir=state_dir).controller.stop()


def test_a_start_that_is_stuck_is_reported(state_dir: Path) -> None:
    at_start(state_dir, STUCK)
    with pytest.raises(UnreachableError):
        daemon.start_controller(state_dir)
    assert ours(state_dir.parent), "it lives, and may start yet"


def test_a_start_ends_at_the_limit_of_the_command(state_dir: Path) -> None:
    at_start(state_dir, BUSY.format(busy_s=3600))
    with pytest.raises(UnreachableError):
        daemon.start_controller(state_dir, limit_s=1.0)
