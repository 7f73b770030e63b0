"""A shell, or one command, in the environment and the working directory of a running rank.

It does not belong to the attempt: it lacks the variables by which processes of an attempt are found and stopped, and
those that name files of the rank.
"""

from __future__ import annotations

import json
import os
import sys

from ascendrun.node import layout, procs
from ascendrun.node.stacks import members_of_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable, Mapping

    from ascendrun.node.reap import Who

NOT_SHARED = (*layout.OURS, "ASCENDRUN_METRICS_FILE", "TORCHELASTIC_ERROR_FILE")
"""Variables of a rank that a shell next to it does not get: it would write into the rank's files."""
OF_TERMINAL = ("TERM", "COLORTERM", "SSH_TTY", "LINES", "COLUMNS")
"""Variables of the login that describe the terminal."""
EXIT_GONE = 75


def find_rank(rank: int, found: Iterable[Who], leaders: Mapping[int, int], agent: list[str]) -> dict[str, Any] | None:
    """Return {"argv"}, the command that opens the shell; None: no process of the rank lives here.

    `found`, `leaders`: as for stacks.take.
    """
    members = members_of_ranks(found, leaders).get(rank)
    if not members:
        return None
    pid, start = members[0]
    return {"argv": [*agent, "shell", str(pid), str(start)]}


def main(arguments: list[str]) -> int:
    """Become the shell. `arguments`: pid and start time of the rank, and a command as JSON in hexadecimal digits."""
    pid, start = int(arguments[0]), int(arguments[1])
    command = json.loads(bytes.fromhex(arguments[2]).decode("utf-8")) if len(arguments) > 2 else None
    stat = procs.read_stat(pid)
    environ = make_environ(procs.read_environ(pid), os.environb)
    try:
        if stat is None or stat.start != start or not environ:
            raise FileNotFoundError
        os.chdir("/proc/%d/cwd" % pid)
    except OSError as error:
        sys.stderr.write("ascendrun: process %d of the rank: %s\n" % (pid, error.strerror or "ended"))
        return EXIT_GONE
    environ[b"PWD"] = os.fsencode(os.getcwd())
    argv = [text.encode("utf-8", "surrogateescape") for text in command] if command else [_shell(environ), b"-i"]
    try:
        os.execvpe(argv[0], argv, environ)
    except OSError as error:
        sys.stderr.write("ascendrun: %s: %s\n" % (os.fsdecode(argv[0]), error.strerror))
        return 127


def make_environ(of_rank: bytes, of_login: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the environment of the shell. `of_rank`: as /proc has it; b"" gives {}."""
    pairs = [pair.partition(b"=") for pair in of_rank.split(b"\0") if b"=" in pair]
    environ = {name: value for name, _, value in pairs if os.fsdecode(name) not in NOT_SHARED}
    if environ:
        for name in map(os.fsencode, OF_TERMINAL):
            environ.pop(name, None)
            if name in of_login:
                environ[name] = of_login[name]
    return environ


def _shell(environ: Mapping[bytes, bytes]) -> bytes:
    """Return the user's shell, if it can be started."""
    shell = environ.get(b"SHELL") or os.environb.get(b"SHELL") or b"/bin/bash"
    return shell if os.access(shell, os.X_OK) else b"/bin/sh"
