"""Runs one command inside a host's namespaces: `python -I -S enter.py PID CWD GROUPS -- command…`.

Independent (no import of ascendrun), so that it starts in milliseconds. Signals that a process sends to it reach the
command; when it is killed the command dies with it; it ends as the command ended, by exit code or by signal.
GROUPS: cgroup.procs files to join, divided by colons; "-" for none.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import NoReturn

KINDS = ("cgroup", "ipc", "uts", "net", "pid", "mnt")
FORWARDED = tuple(getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "CONT"))
PR_SET_PDEATHSIG = 1
_SI_KERNEL = 0x80


def main(argv: list[str]) -> NoReturn:
    pid, cwd, groups = int(argv[0]), argv[1], argv[2]
    command = argv[argv.index("--") + 1 :]
    libc = ctypes.CDLL(None, use_errno=True)
    for path in groups.split(":") if groups != "-" else ():
        with open(path, "w", encoding="ascii") as file:
            file.write("0")
    fds = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in KINDS]
    for kind, fd in zip(KINDS, fds):
        if libc.setns(fd, 0) < 0:
            sys.exit(f"cannot enter the {kind} namespace of {pid}: {os.strerror(ctypes.get_errno())}")
        os.close(fd)
    os.chdir(cwd)
    watched = {*FORWARDED, signal.SIGCHLD, signal.SIGWINCH}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _execute(command)
    _let_go_of_output()
    _end_like(_wait(child, watched))


def _execute(command: list[str]) -> NoReturn:
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _let_go_of_output() -> None:
    """The command's pipes end when the command closes them, not when we do."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


def _wait(child: int, watched: set[signal.Signals]) -> int:
    """The wait status of `child`. A terminal's own signals reach the whole group; only those sent to us continue."""
    while True:
        came = signal.sigwaitinfo(watched)
        if came.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
        elif came.si_code != _SI_KERNEL:
            os.kill(child, came.si_signo)


def _end_like(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(sys.argv[1:])
