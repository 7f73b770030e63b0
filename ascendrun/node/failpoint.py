"""Named places where tests kill, stop or break the agent.

ASCENDRUN_FAILPOINT="name=kill" or "name:3=pause" (the third time it is reached). Actions: kill (SIGKILL to itself),
exit (status 70), raise, pause (SIGSTOP to itself). Without the variable a failpoint costs one dictionary look-up.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "ASCENDRUN_FAILPOINT"


class FailpointError(RuntimeError):
    """Raised by the action `raise`."""


def parse(text: str) -> dict[str, list[object]]:
    """Return {name: [hits left, action]}. Raises ValueError on invalid text: a typo must not disable a test."""
    armed: dict[str, list[object]] = {}
    for part in text.split(","):
        place, _, action = part.strip().partition("=")
        name, _, count = place.partition(":")
        if not name or action not in ("kill", "exit", "raise", "pause"):
            raise ValueError(f"not a failpoint: {part!r} (name[:n]=kill|exit|raise|pause)")
        armed[name] = [int(count or 1), action]
    return armed


_ARMED = parse(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else {}


def failpoint(name: str) -> None:
    """Perform the action if this name is armed and its count is reached, else nothing."""
    entry = _ARMED.get(name)
    if entry is None:
        return
    entry[0] = int(str(entry[0])) - 1
    if entry[0] != 0:
        return
    os.write(2, (f"failpoint {name}: {entry[1]}\n").encode("ascii"))
    if entry[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif entry[1] == "exit":
        os._exit(70)
    elif entry[1] == "pause":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise FailpointError(name)
