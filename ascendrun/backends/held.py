"""Of the engines that start a holder on each host (node/hold.py): how they run their commands, and a connection its."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from ascendrun.core.allocations import EngineError
from ascendrun.core.jobs.reasons import because

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
