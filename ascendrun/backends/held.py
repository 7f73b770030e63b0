"""Of the engines that start a holder on each host (node/hold.py): how they run their commands, and a connection its."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Callable

from ascendrun.core.allocations import EngineError
from ascendrun.core.errors import UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.reasons import because
from ascendrun.head.ssh.child_process import ChildConnection, ChildStream

COMMAND_S = 60.0
"""Seconds that a command of an engine may take: a busy queue or API server answers late."""

LINK = """\
d=/tmp/ascendrun-hold-$(id -u); f=$d/$ASCENDRUN_HOLDER.py; n=0
until [ -s "$f" ] || [ $n -ge 1000 ]; do sleep 0.02; n=$((n+1)); done
if [ -O "$d" ] && [ -O "$f" ] && IFS= read -r p <"$f"; then exec "${p#?}" -I -S "$f" "$ASCENDRUN_HOLDER" "$0"; fi
exec /bin/sh -c "$0"
"""
"""Script that runs a command, its $0, by the holder, for which it waits; without a holder, itself."""


def run_command(
    argv: Sequence[str], text: str = "", *, verb: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Return how a command of an engine ended. `verb`: part of its name. Raises EngineError."""
    try:
        return subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=COMMAND_S, check=False, env=env, cwd="/"
        )
    except FileNotFoundError as error:
        raise EngineError(because("engine-no-command", command=argv[0]), is_final=True) from error
    except subprocess.TimeoutExpired as error:
        name = f"{argv[0]} {verb}".rstrip()
        raise EngineError(because("engine-silent", why=f"{name}: {COMMAND_S:g} s")) from error


def connect(host: Host, argv_of: Callable[[Host, Sequence[str]], list[str]]) -> ChildConnection:
    """Return a connection of which each command runs by the holder of the host. `argv_of`: what runs one there."""

    def start(command: str) -> ChildStream:
        argv = argv_of(host, ["/bin/sh", "-c", LINK, command])
        try:
            return ChildStream(argv, cwd="/")
        except OSError as error:
            raise UnreachableError.of(
                "engine.not-connected",
                "{host}: cannot start {command} ({error})",
                "run ascendrun where {command} is on PATH: on a login node, or after its installation",
                host=host.name,
                command=argv[0],
                error=error.strerror or str(error),
            ) from error

    return ChildConnection(start)
