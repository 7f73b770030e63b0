"""The newest pulse of the controller on disk, and the moment in which it is read."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path

from ascendrun.core.pulse import Clock, Pulse

PULSE_NAME = "pulse.json"


def clock_now() -> Clock:
    """Return the present moment."""
    return Clock(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), _boot_id())


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read_pulse(state_dir: Path) -> Pulse | None:
    """Return the newest pulse; None: none was written, or it cannot be read."""
    try:
        return Pulse.from_json(json.loads((state_dir / PULSE_NAME).read_bytes()))
    except (OSError, AttributeError, TypeError, ValueError):
        return None
