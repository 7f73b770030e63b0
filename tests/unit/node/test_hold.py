"""The holder starts processes for an agent: they keep descriptors, environment and their own session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascendrun.node import hold, loader, procs, wire
from tests.lib.vcluster.processes import await_that


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node root with an agent that ran there."""
    archive, digest = loader.pack_agent(loader.read_sources())
    path = tmp_path / f"agent-{digest[:16]}.pyz"
    path.write_bytes(archive)
    path.with_name(f"agent-{digest[:16]}.{os.uname().nodename}.python").write_text(f"{sys.executable}\n")
    return tmp_path


@pytest.fixture
def holder(request: pytest.FixtureRequest, root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A holder started as the engine does: by the text of its file, and nothing else of ours."""
    source = Path(hold.__file__).read_text()
    name, idle_s = f"test-{os.getpid()}", str(getattr(request, "param", 600.0))
    starts = [sys.executable, "-I", "-S", "-c", "import sys; exec(sys.argv[1])"]
    env = {**os.environ, "ASCENDRUN_NODE_ROOT": str(root)}
    made = subprocess.Popen([*starts, source, name, idle_s], cwd="/", env=env)
    yield made
    made.kill()
    made.wait()
    for path in (hold.socket_path(name), hold.socket_path(name) + hold.PROGRAM):
        Path(path).unlink(missing_ok=True)


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
    await_that(lambda: not Path(f"/proc/{pid}").exists())
    if number == signal.SIGTERM:
        assert holder.wait(20) == 0
    else:
        assert holder.poll() is None, "the next attempt may still need it"


def test_connections_that_come_again_do_not_keep_a_holder_that_is_to_end(holder: subprocess.Popen[bytes]) -> None:
    name = f"test-{os.getpid()}"
    start("print()", {}, [])  # it serves
    argv = [sys.executable, "-I", "-S", hold.socket_path(name) + hold.PROGRAM, name, "trap '' TERM; echo up; cat"]
    with subprocess.Popen(argv, env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as link:
        assert link.stdout is not None and link.stdout.readline() == b"up\n"
        holder.send_signal(signal.SIGTERM)
        assert holder.wait(20) == 0


def relayed(command: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """A command as a step of the engine runs it."""
    name = f"test-{os.getpid()}"
    argv = [sys.executable, "-I", "-S", hold.socket_path(name) + hold.PROGRAM, name, command]
    return subprocess.run(argv, env=env, input=b"in", capture_output=True, timeout=30)


def test_a_connection_runs_its_command_in_the_holder(holder: subprocess.Popen[bytes]) -> None:
    start("print()", {}, [])  # it serves
    done = relayed("echo $PPID $ODD; cat; echo err >&2; exit 7", ODD="a'b 汉")
    assert done.stdout.decode() == f"{holder.pid} a'b 汉\nin" and done.stderr == b"err\n"
    assert done.returncode == 7 and relayed("kill -9 $$").returncode == 137


def test_the_agent_of_the_first_connection_was_started_before_it(holder: subprocess.Popen[bytes], root: Path) -> None:
    start("print()", {}, [])  # it serves
    children = [pid for pid, stat in procs.snapshot().items() if stat.ppid == holder.pid]
    (warm,) = [pid for pid in children if procs.read_cmdline(pid).endswith(b"\0warm\0serve\0")]
    (path,) = root.glob("*.pyz")
    command = loader.login_command(path.stem[len("agent-") :])
    env = {"PATH": os.environ["PATH"], "ASCENDRUN_NODE_ROOT": str(root)}
    for is_warm in (True, False):
        boot, frames = loader.Boot(), wire.FrameReader()
        assert [step.kind for step in boot.feed(relayed(command, **env).stdout)] == [loader.READY]
        (hello, _), *_ = frames.feed(boot.leftover)
        assert (hello["pid"] == warm) is is_warm and hello["root"] == str(root)
        (stored,) = root.glob("*.code")
        imported = stored.read_bytes()  # its modules of the first job, without those of a training
        assert b"ascendrun.node.agent.survey" in imported and b"ascendrun.node.agent.training_files" not in imported


@pytest.mark.parametrize("holder", [1.0], indirect=True)
def test_a_holder_without_supervisors_and_connections_ends(holder: subprocess.Popen[bytes]) -> None:
    pid, _, _ = start("import signal; print('up', flush=True); signal.pause()", {}, [])
    assert relayed("sleep 1.5").returncode == 0, "it stays for a supervisor"
    assert relayed(f"kill {pid}; sleep 1.5; echo here").stdout == b"here\n", "it stays for a connection"
    assert holder.wait(20) == 0 and not Path(hold.socket_path(f"test-{os.getpid()}")).exists()
