"""The holder starts processes for an agent: they keep descriptors, environment and their own session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascendrun.node import hold


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A holder started as the engine does: by the text of its file, and nothing else of ours."""
    source = Path(hold.__file__).read_text()
    name = f"test-{os.getpid()}"
    made = subprocess.Popen([sys.executable, "-I", "-S", "-c", source, name], cwd="/")
    yield made
    made.kill()
    made.wait()
    Path(hold.socket_path(name)).unlink(missing_ok=True)


def start(script: str, env: dict[bytes, bytes], fds: list[int]) -> tuple[int, list[int], bytes]:
    reader, writer = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    argv = [sys.executable, "-I", "-S", "-c", script]
    made = hold.spawn(f"test-{os.getpid()}", argv, env, [null, writer, null, *fds])
    os.close(writer)
    os.close(null)
    with open(reader, "rb") as out:
        return made["pid"], made["fds"], out.readline()


def test_a_process_gets_its_descriptors_and_exactly_its_environment(holder: subprocess.Popen[bytes]) -> None:
    odd = {b"ODD": "a'b\n汉".encode() + b"\xff"}
    script = "import os, sys; print(dict(os.environb) == %r, os.getsid(0) == os.getpid(), os.getppid())" % {
        **odd,
        b"LC_CTYPE": b"C.UTF-8",
    }
    reader, writer = os.pipe()
    pid, numbers, line = start(script, odd, [writer])
    assert line.split() == [b"True", b"True", str(holder.pid).encode()]
    assert len(numbers) == 1 and pid != holder.pid
    for fd in (reader, writer):
        os.close(fd)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_end_of_the_allocation_reaches_every_process(holder: subprocess.Popen[bytes], number: int) -> None:
    script = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()"
    pid, _, line = start(script, {}, [])
    assert line == b"up\n"
    holder.send_signal(number)
    if number == signal.SIGTERM:
        assert holder.wait(20) == 0 and not Path(f"/proc/{pid}").exists()
    else:
        assert holder.poll() is None, "the next attempt may still need it"
