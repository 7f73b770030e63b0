"""Asks for a key's passphrase through the program that ssh would use: the controller has no terminal of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Callable

ASK_S = 60.0


def find_askpass(environ: Mapping[str, str]) -> Callable[[str], str | None] | None:
    """A function from a prompt to the passphrase, by $SSH_ASKPASS as ssh-add knows it; None: none is set.

    The function returns None when the program fails, is cancelled, or takes longer than a minute.
    """
    program = environ.get("SSH_ASKPASS")
    if not program:
        return None

    def ask(prompt: str) -> str | None:
        try:
            done = subprocess.run(
                [program, prompt], capture_output=True, text=True, timeout=ASK_S, check=False, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.rstrip("\n") if done.returncode == 0 else None

    return ask
