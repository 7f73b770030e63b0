"""Processes in /proc: their identity beyond the reusable number, their descendants, and signals that reach only them.

A process is known by pid and start time (clock ticks since boot) within one boot.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable, Iterator

_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434
"""System call numbers, equal on every architecture; Python has them from 3.9 on only."""

_PF_EXITING = 4

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Stat:
    """One line of /proc/PID/stat. `cpu_ticks`: user and system time of the process itself; `ended_ticks`: of its
    children whose end it has seen; `start`: ticks since boot."""

    __slots__ = ("pid", "state", "ppid", "session", "cpu_ticks", "ended_ticks", "threads", "start")

    def __init__(self, text: bytes) -> None:
        """Parse a line: the name in the second field may contain brackets and spaces, so count from its last bracket.
        Raises ValueError."""
        fields = text[text.rindex(b")") + 2 :].split()
        self.pid = int(text[: text.index(b" ")])
        self.state = fields[0].decode("ascii")
        self.ppid, self.session = int(fields[1]), int(fields[3])
        self.cpu_ticks, self.ended_ticks = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
        self.threads, self.start = int(fields[17]), int(fields[19])

    @property
    def is_dead(self) -> bool:
        """Whether it is a zombie: without memory, device or port, it only waits for its parent to read its status."""
        return self.state in "ZXx"


def read_stat(pid: int) -> Stat | None:
    """Return the process's status; None: no such process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return Stat(file.read())
    except (OSError, ValueError, IndexError):
        return None


def describe(pid: int, start: int) -> dict[str, Any] | None:
    """Return {pid, start, comm, state, wait_channel, killed} of a living process; None: gone, a zombie, or another one.

    `wait_channel`: the kernel function in which it waits; "" when it runs or the kernel does not show it. `killed`:
    SIGKILL waits for it, it is exiting, or this user may not signal it: nothing more can be done.
    """
    stat = read_stat(pid)
    if stat is None or stat.start != start or stat.is_dead:
        return None
    return {
        "pid": pid,
        "start": start,
        "comm": read_line("/proc/%d/comm" % pid),
        "state": stat.state,
        "wait_channel": wait_channel("/proc/%d" % pid),
        "killed": _is_killed(pid),
    }


def _is_killed(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open("/proc/%d/stat" % pid, "rb") as file:
            flags = int(file.read().rpartition(b")")[2].split()[6])
        with open("/proc/%d/status" % pid, "rb") as file:
            lines = [line.split() for line in file]
    except PermissionError:
        return True
    except (OSError, ValueError, IndexError):
        return False
    pending = [int(line[1], 16) for line in lines if line[0] in (b"SigPnd:", b"ShdPnd:")]
    return bool(flags & _PF_EXITING) or any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)


def describe_all(found: Iterable[tuple[int, int]], **more: Any) -> list[dict[str, Any]]:
    """Return `describe` of each (pid, start time) that still lives, with the same `more` fields."""
    shown = (describe(pid, start) for pid, start in found)
    return [dict(one, **more) for one in shown if one is not None]


def snapshot() -> dict[int, Stat]:
    """Return every process that this user may see, by pid."""
    found = map(read_stat, pids())
    return {stat.pid: stat for stat in found if stat is not None}


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def wait_channel(place: str) -> str:
    """Return the kernel function in which a process or thread waits, by its directory in /proc; "": none, or hidden."""
    channel = read_line(place + "/wchan")
    return "" if channel == "0" else channel


def read_environ(pid: int) -> bytes:
    """Return the initial environment of the process, NUL-separated; b"" when it is not readable or gone."""
    return _read(pid, "environ")


def read_cmdline(pid: int) -> bytes:
    """Return the command line of the process, each word with a NUL behind it; b"" when it is not readable or gone."""
    return _read(pid, "cmdline")


def _read(pid: int, name: str) -> bytes:
    try:
        with open("/proc/%d/%s" % (pid, name), "rb") as file:
            return file.read()
    except OSError:
        return b""


def variables_of(environ: bytes) -> dict[bytes, bytes]:
    """Return the variables of an environment as /proc has it."""
    return dict(pair.partition(b"=")[::2] for pair in environ.split(b"\0") if b"=" in pair)


def open_files(pid: int) -> Iterator[str]:
    """Yield the target of every open file of the process; none if this user may not see them."""
    folder = "/proc/%d/fd" % pid
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                yield os.readlink(os.path.join(folder, name))


def boot_id() -> str:
    """Return the boot id, which changes at every boot; "" where the kernel has none."""
    return read_line("/proc/sys/kernel/random/boot_id")


def read_line(path: str) -> str:
    """Return the first line of a small file, stripped; "" when it cannot be read."""
    return read_text(path, 4096).partition("\n")[0].strip()


def read_text(path: str, limit: int = 1 << 20, *, offset: int = 0) -> str:
    """Return the text of a file, of at most `limit` bytes; "" when it cannot be read."""
    try:
        with open(path, "rb") as file:
            if offset:
                file.seek(offset)
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""


def identify(pid: int) -> dict[str, Any]:
    """Return a unique identity of this process: {pid, start, boot_id}; start is -1 for a process that is gone."""
    stat = read_stat(pid)
    return {"pid": pid, "start": stat.start if stat else -1, "boot_id": boot_id()}


def is_alive(identity: dict[str, Any]) -> bool:
    """Return whether the process of `identify` still runs: not a later process with its number, not its zombie."""
    if identity.get("boot_id") != boot_id():
        return False
    stat = read_stat(int(identity.get("pid", -1)))
    return stat is not None and stat.start == identity.get("start") and not stat.is_dead


def send_signal(pid: int, start: int, signum: int) -> bool:
    """Signal only the process with this number and start time. False when it is gone.

    Where the kernel has no pidfd (before 5.3) a gap of microseconds remains between check and signal.
    """
    try:
        handle = _pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        stat = read_stat(pid)
        if stat is None or stat.start != start:
            return False
        if handle is None:
            os.kill(pid, signum)
        else:
            _pidfd_send_signal(handle, signum)
        return True
    except ProcessLookupError:
        return False
    finally:
        if handle is not None:
            os.close(handle)


def _pidfd_open(pid: int) -> int | None:
    """Open a pidfd. None: not supported by the kernel. Raises ProcessLookupError."""
    try:
        if hasattr(os, "pidfd_open"):
            return int(os.pidfd_open(pid))
        return _syscall(_PIDFD_OPEN, pid, 0)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
            return None
        raise


def _pidfd_send_signal(handle: int, signum: int) -> None:
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(handle, signum)
    else:
        _syscall(_PIDFD_SEND_SIGNAL, handle, signum, None, 0)


def _syscall(number: int, *arguments: Any) -> int:
    try:
        import ctypes
    except ImportError as error:  # Python built without libffi
        raise OSError(errno.ENOSYS, "no ctypes") from error
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


def raise_oom_score(points: int) -> None:
    """Make the kernel prefer this process, when memory runs out, to those without the points."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            now = int(file.read())
            file.seek(0)
            file.write(str(min(1000, now + points)))
    except (OSError, ValueError):
        pass


def become_subreaper() -> bool:
    """Make orphans below this process its own children from now on. False where the kernel rejects it."""
    try:
        import ctypes
    except ImportError:
        return False
    return bool(ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0)


def user_name(uid: int | None) -> str | None:
    """Return the name of a user, or the number if it has none; None: unknown."""
    import pwd

    try:
        return None if uid is None else pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
