"""The guard of the controller: a small parent that starts it again. Imports little: cron runs this each minute."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ascendrun

GUARDED_VARIABLE = "ASCENDRUN_CONTROLLER_GUARD"
"""Pid of the guard, in the environment of a controller that it starts; a controller that finds it starts no other."""
KEPT_LOCK_VARIABLE = "ASCENDRUN_CONTROLLER_LOCK_FD"
LOCK_NAME = "controller.lock"
"""Locked while a controller runs. It then contains the controller's pid; after an end on purpose `end_mark`, empty
after one that lasts."""
LOG_NAME = "controller.log"
BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"
STATE_VARIABLE = "ASCENDRUN_STATE_DIR"
PAUSE_S = (1.0, 60.0)
STEADY_S = 60.0
"""Seconds of life after which the pause before the next start is the shortest again."""
START_S = 10.0
"""A first controller that ends by itself within this time is not started again: its command reports the error."""
ON_PURPOSE = (0, 2, 7)
"""Exit codes after which the controller is not started again: stopped or idle, invalid settings, another one runs."""
_guard_pid: int | None = None
_is_restart = _is_called = False


def guard_pid() -> int | None:
    """Return the pid of the guard of this process; None: it has none, or no more."""
    return _guard_pid if _guard_pid == os.getppid() else None


def is_guard_lost() -> bool:
    """Return whether this process had a guard, which was killed."""
    return _guard_pid is not None and guard_pid() is None


def is_restart() -> bool:
    """Return whether a guard started this process in place of a controller that died."""
    return _is_restart


def guard() -> None:
    """Return in a child, which is to become the controller; this process stays its guard and exits with its code.

    Call it early: the guard keeps what the process has loaded. Another call in the child does nothing.
    """
    global _guard_pid, _is_restart, _is_called
    if _is_called:
        return
    _is_called = True
    marked = os.environ.pop(GUARDED_VARIABLE, "")
    if marked:
        _guard_pid = int(marked) if marked.isdigit() else None
        _is_restart = _guard_pid is not None
        return
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _guard_pid = parent
        return
    lock = os.environ.pop(KEPT_LOCK_VARIABLE, "")
    if lock:
        os.close(int(lock))  # only the controller keeps it
    sys.exit(_Guard(pid).watch())


class _Guard:
    """The parent's side. `_pid`: the controller, None: it has ended."""

    def __init__(self, pid: int) -> None:
        self._pid: int | None = pid
        self._is_asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)

    def _end(self, number: int, _frame: object) -> None:
        self._is_asked = True
        if self._pid is not None and number != signal.SIGINT:  # a terminal sends ^C to both
            os.kill(self._pid, signal.SIGTERM)

    def _was_asked(self) -> bool:
        return self._is_asked

    def watch(self) -> int:
        """Return the exit code after an end on purpose, or after a start that failed."""
        pause_s, is_first = PAUSE_S[0], True
        while True:
            started_mono = time.monotonic()
            code = self._wait()
            lived_s = time.monotonic() - started_mono
            if self._was_asked() or code in ON_PURPOSE or (is_first and code > 0 and lived_s < START_S):
                return max(code, 0)
            pause_s = PAUSE_S[0] if lived_s >= STEADY_S else pause_s
            until_mono = time.monotonic() + pause_s
            while time.monotonic() < until_mono:
                time.sleep(0.1)
                if self._was_asked():
                    return 0
            is_first, pause_s = False, min(PAUSE_S[1], 2 * pause_s)
            with suppress(OSError):  # the log's disk may be full
                print(f"guard: the controller ended ({code}) and is started again", file=sys.stderr, flush=True)
            self._pid = os.posix_spawn(sys.executable, ARGV, {**os.environ, GUARDED_VARIABLE: str(os.getpid())})

    def _wait(self) -> int:
        assert self._pid is not None
        status = os.waitpid(self._pid, 0)[1]
        self._pid = None
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)


ARGV = [sys.executable, "-m", "ascendrun", "controller", "run"]


def environment(state_dir: str) -> dict[str, str]:
    """Return the environment of a controller of this release."""
    package_parent = os.path.dirname(os.path.dirname(os.path.realpath(ascendrun.__file__)))
    path = os.pathsep.join(part for part in (package_parent, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, STATE_VARIABLE: state_dir, "PYTHONPATH": path}


@contextmanager
def tested_lock(state_dir: str) -> Iterator[tuple[int, bool]]:
    """Yield the descriptor of the lock file, and whether no controller holds it; while this lasts, none can start.

    Raises OSError: there is none.
    """
    fd = os.open(os.path.join(state_dir, LOCK_NAME), os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield fd, False
        else:
            yield fd, True
    finally:
        os.close(fd)


def should_run(state_dir: str) -> bool:
    """Return whether a controller ran and ended without purpose, or before the machine was restarted."""
    try:
        with tested_lock(state_dir) as (fd, is_free):
            return is_free and os.read(fd, 64) not in (b"", end_mark())
    except OSError:
        return False


def write_lock(fd: int, text: bytes) -> None:
    """Replace the content of the lock file."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, text, 0)


def end_mark() -> bytes:
    """Return what marks an end on purpose until the machine boots again: a shutdown of the machine ends the controller
    by SIGTERM, as a person does."""
    with open(BOOT_ID_FILE, "rb") as file:
        return b"ended " + file.read(40)


def ensure(state_dir: str, *, detached: bool) -> bool:
    """Start a controller, or a standby, if one should run; return whether. `detached` False: this process becomes its
    guard, or the standby."""
    argv = ARGV
    if os.path.isdir(f"{state_dir}.standby"):
        state_dir, argv = f"{state_dir}.standby", [*ARGV[:-1], "standby"]
    if not should_run(state_dir):
        return False
    if detached and os.fork():
        return True
    with suppress(PermissionError):  # it leads its process group
        os.setsid()
    log = os.open(os.path.join(state_dir, LOG_NAME), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.chdir("/")
    return bool(os.execv(sys.executable, argv))


if __name__ == "__main__":
    ensure(os.environ[STATE_VARIABLE], detached=False)
