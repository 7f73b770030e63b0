"""The controller as a process: one for each state directory, started by any command, found by a file lock."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.core.errors import DeadlineExceededError, UnreachableError
from ascendrun.core.settings import STATE_VARIABLE
from ascendrun.head.ssh.transport import Backend
from ascendrun.head.state.state_dir import make_state_dir
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.notify.notifier import NotifierMaker

LOCK_NAME = "controller.lock"
LOG_NAME = "controller.log"
IDLE_VARIABLE = "ASCENDRUN_CONTROLLER_IDLE_S"
_POLL_S = 0.01
LOOK_S = 0.3


@contextmanager
def _locked(state_dir: Path) -> Iterator[bool]:
    """Hold the controller's lock; yield False if another process has it.

    `is_running` takes the lock for a moment to test it: only the controller keeps it.
    """
    fd = os.open(state_dir / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + LOOK_S
        while not _try_lock(fd):
            if time.monotonic() > until:
                yield False
                return
            time.sleep(_POLL_S)
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        yield True
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_running(state_dir: Path) -> bool:
    """Return whether a controller holds the lock (it may still be starting)."""
    path = state_dir / LOCK_NAME
    if not path.exists():
        return False
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def wait_until_free(state_dir: Path, *, timeout_s: float) -> None:
    """Return when no controller holds the lock. Raises DeadlineExceededError."""
    deadline = time.monotonic() + timeout_s
    while is_running(state_dir):
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                Text(
                    "controller.not-ended",
                    "the controller of {path} did not end within {timeout_s:g} s",
                    path=str(state_dir),
                    timeout_s=timeout_s,
                )
            )
        time.sleep(_POLL_S)


def run_controller(state_dir: Path, backend: Backend, *, notifier: NotifierMaker | None = None) -> bool:
    """Run the controller until it ends; return False immediately if another process already is the controller."""
    from ascendrun.head.loop.controller import IDLE_S, Controller
    from ascendrun.head.notify.notifier import Notifier

    make_state_dir(state_dir)
    with _locked(state_dir) as is_ours:
        if is_ours:
            idle_s = float(os.environ.get(IDLE_VARIABLE) or IDLE_S)
            Controller(state_dir, backend, idle_s=idle_s, notifier=notifier or Notifier).run()
        return is_ours


def start_controller(state_dir: Path, *, deadline_s: float) -> None:
    """Start a controller that outlives this process and wait until it responds.

    Concurrent starts are harmless: one gets the lock, others end. Raises UnreachableError with the end of its log.
    """
    from ascendrun.head.protocol.control_socket import ControlClient

    make_state_dir(state_dir)
    log_path = state_dir / LOG_NAME
    with open(log_path, "ab") as log:
        os.chmod(log_path, 0o600)
        child = subprocess.Popen(
            [sys.executable, "-m", "ascendrun", "controller", "run"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=_environment(state_dir),
        )
    deadline = time.monotonic() + deadline_s
    error: UnreachableError | None = None
    while time.monotonic() < deadline:
        try:
            ControlClient(state_dir).close()
            return
        except UnreachableError as refused:
            error = refused
        if child.poll() is not None and not is_running(state_dir):
            break
        time.sleep(_POLL_S)
    tail = log_path.read_bytes()[-2000:].decode("utf-8", "replace").strip().splitlines()[-1:]
    raise UnreachableError(
        Text("controller.not-started", "the controller did not start: {why}", why=tail[0] if tail else str(error)),
        hint=Text("controller.run", "run ascendrun controller run; the log is {path}", path=str(log_path)),
    ) from error


def _environment(state_dir: Path) -> dict[str, str]:
    import ascendrun

    package_parent = str(Path(ascendrun.__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (package_parent, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, STATE_VARIABLE: str(state_dir), "PYTHONPATH": path}
