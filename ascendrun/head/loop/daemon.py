"""The controller as a process: one for each state directory, started by any command, found by a file lock."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.core.errors import (
    AscendrunError,
    ConflictError,
    DeadlineExceededError,
    SupersededError,
    UnreachableError,
)
from ascendrun.head.loop import guard as guarding
from ascendrun.head.state.state_dir import make_state_dir
from ascendrun.head.state.store_place import standby_dir
from ascendrun.node.files import write_json
from ascendrun.node.procs import snapshot
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.retention import Retention
    from ascendrun.core.standby_settings import Standby
    from ascendrun.head.notify.notifier import NotifierMaker
    from ascendrun.head.ssh.transport import Backend

IDLE_VARIABLE = "ASCENDRUN_CONTROLLER_IDLE_S"
REFUSAL_NAME = "controller-refused.json"
"""Why the last controller did not start, as data: its log ends with a hint, without the fact."""
_POLL_S = 0.01
LOOK_S = 0.3
STALL_S, START_LIMIT_S = 40.0, 300.0
"""Seconds for which a controller may start without using the processor, longer than it waits for its voters, and in
all. On a machine with much other work the start alone takes minutes."""


@contextmanager
def _locked(state_dir: Path) -> Iterator[int | None]:
    """Hold the controller's lock; yield its descriptor, None if another process has it.

    What the file contains after an end: guard.LOCK_NAME. A controller that replaced itself has the descriptor of its
    predecessor.
    """
    path, kept = state_dir / guarding.LOCK_NAME, os.environ.pop(guarding.KEPT_LOCK_VARIABLE, "")
    fd = int(kept) if kept else os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.set_inheritable(fd, False)
    try:
        if not take_lock(fd):
            yield None
            return
        guarding.write_lock(fd, f"{os.getpid()}\n".encode())
        try:
            yield fd
        except SupersededError:
            guarding.write_lock(fd, b"")  # it would be refused after each start by a guard or by cron
            raise
        guarding.write_lock(fd, guarding.end_mark())
    finally:
        os.close(fd)


def take_lock(fd: int) -> bool:
    """Take the lock; False: another process keeps it. `is_running` takes it for a moment to test it."""
    until = time.monotonic() + LOOK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def is_running(state_dir: Path) -> bool:
    """Return whether a controller holds the lock (it may still be starting)."""
    return running_pid(state_dir) is not None


def running_pid(state_dir: Path) -> int | None:
    """Return the pid of the controller that holds the lock; 0: it has not written it yet, None: none runs."""
    try:
        with guarding.tested_lock(str(state_dir)) as (fd, is_free):
            text = b"" if is_free else os.read(fd, 32).strip()
    except FileNotFoundError:
        return None
    return None if is_free else int(text) if text.isdigit() else 0


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


def mark_stopped(state_dir: Path) -> bool:
    """Make the end of a controller that died an end on purpose: no guard starts it again. False: one runs."""
    try:
        with guarding.tested_lock(str(state_dir)) as (fd, is_free):
            if is_free:
                guarding.write_lock(fd, guarding.end_mark())
            return is_free
    except FileNotFoundError:
        return True


def run_controller(
    state_dir: Path,
    backend: Backend,
    *,
    notifier: NotifierMaker | None = None,
    retention: Retention | None = None,
    idle_check_s: float | None = None,
    shared_queue: Path | None = None,
    standby: Standby | None = None,
) -> bool:
    """Run the controller until it ends; return False immediately if another process already is the controller. Raises
    SupersededError: another machine continues as this head."""
    from ascendrun.head.loop.controller import IDLE_S, Controller
    from ascendrun.head.notify.notifier import Notifier

    make_state_dir(state_dir)
    if standby_dir(state_dir).is_dir():
        raise ConflictError.of(
            "standby.is-copy",
            "this machine is the standby of another head",
            "run the command on the head, or `ascendrun controller standby --take-over` here",
        )
    if (
        guarding.is_restart()
        and guarding.KEPT_LOCK_VARIABLE not in os.environ
        and not guarding.should_run(str(state_dir))
    ):
        return False  # stopped meanwhile, or a command started another
    with _locked(state_dir) as lock_fd:
        if lock_fd is not None:
            idle_s = float(os.environ.get(IDLE_VARIABLE) or IDLE_S)
            if standby is not None:
                from ascendrun.head.agents.lease import note_superseded

                with suppress(OSError):  # the first renewal learns it too
                    note_superseded(backend, standby, state_dir)
            refuse_superseded(state_dir)
            controller = Controller(
                state_dir,
                backend,
                idle_s=idle_s,
                notifier=notifier or Notifier,
                retention=retention,
                idle_check_s=idle_check_s,
                shared_queue=shared_queue,
                standby=standby,
            )
            controller.run()
            if controller.restarts:
                _replace_process(lock_fd)
        return lock_fd is not None


def refuse_superseded(state_dir: Path) -> None:
    """Raise SupersededError if another machine continues as this head."""
    from ascendrun.head.state.store_file import continues_elsewhere, superseded_by  # with SQLite: commands need none

    host = superseded_by(state_dir)
    if host is not None:
        raise SupersededError(continues_elsewhere(host), hint=Text("standby.elsewhere", "run commands on that machine"))


@contextmanager
def reported_refusal(state_dir: Path) -> Iterator[None]:
    """Write the error with which a controller does not start, for the command that started its process."""
    try:
        yield
    except AscendrunError as error:
        with suppress(OSError):
            write_json(str(state_dir / REFUSAL_NAME), error.to_json(), durable=False)
        raise


def _read_refusal(state_dir: Path) -> AscendrunError | None:
    """Return the error with which a controller refused to start; None: it wrote none."""
    try:
        return AscendrunError.from_json(json.loads((state_dir / REFUSAL_NAME).read_bytes()))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _replace_process(lock_fd: int) -> None:
    """Become the controller of the release on disk, with the same pid, guard and lock. Without its guard this process
    becomes the guard of a new controller."""
    is_lost = guarding.is_guard_lost()
    print(
        f"controller: {'its guard was killed' if is_lost else 'the release on disk was replaced'}; restarting",
        flush=True,
    )
    os.set_inheritable(lock_fd, True)
    guard = {} if is_lost else {guarding.GUARDED_VARIABLE: str(guarding.guard_pid() or "none")}
    os.execve(sys.executable, guarding.ARGV, {**os.environ, **guard, guarding.KEPT_LOCK_VARIABLE: str(lock_fd)})


def start_controller(state_dir: Path, *, limit_s: float = START_LIMIT_S) -> None:
    """Start a controller that outlives this process and wait until it responds: as long as it lives and uses the
    processor, at most `limit_s`.

    Concurrent starts are harmless: one gets the lock, others end. Raises the error of a controller that refused to
    start, else UnreachableError with the end of its log.
    """
    import subprocess

    from ascendrun.head.protocol.control_socket import ControlClient

    make_state_dir(state_dir)
    log_path = state_dir / guarding.LOG_NAME
    with suppress(OSError):
        (state_dir / REFUSAL_NAME).unlink()
    with open(log_path, "ab") as log:
        os.chmod(log_path, 0o600)
        child = subprocess.Popen(
            [sys.executable, "-m", "ascendrun", "controller", "run"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=guarding.environment(str(state_dir)),
        )
    until_mono, watch = time.monotonic() + limit_s, _StartWatch(state_dir, child.pid)
    error: UnreachableError | None = None
    while time.monotonic() < until_mono and not watch.is_stalled():
        try:
            ControlClient(state_dir).close()
            return
        except UnreachableError as refused:
            error = refused
        if child.poll() is not None and not is_running(state_dir):
            break
        time.sleep(_POLL_S)
    refusal = _read_refusal(state_dir)
    if refusal is not None:
        raise refusal
    tail = log_path.read_bytes()[-2000:].decode("utf-8", "replace").strip().splitlines()[-1:]
    raise UnreachableError(
        Text("controller.not-started", "the controller did not start: {why}", why=tail[0] if tail else str(error)),
        hint=Text("controller.run", "run ascendrun controller run; the log is {path}", path=str(log_path)),
    ) from error


class _StartWatch:
    """Whether a controller that starts uses the processor: each process of its `session`, or the one that has the lock,
    if that is another."""

    def __init__(self, state_dir: Path, session: int) -> None:
        self._state_dir, self._session = state_dir, session
        self._used: dict[int, int] = {}
        self._moved_mono = self._read_mono = time.monotonic()

    def is_stalled(self) -> bool:
        now = time.monotonic()
        if now - self._read_mono >= LOOK_S:
            running, before = running_pid(self._state_dir), self._used
            pids = {running} - {os.getpid()}  # who waits is no controller, also if it has the lock
            mine = (one for one in snapshot().values() if one.session == self._session or one.pid in pids)
            self._read_mono, self._used = now, {one.pid: one.cpu_ticks for one in mine}
            self._moved_mono = self._moved_mono if self._used == before else now
        return now - self._moved_mono > STALL_S
