"""Agents on the head node start the controller again if it was killed together with its guard."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ascendrun
from ascendrun.core.settings import STATE_VARIABLE
from ascendrun.head.loop.guard import LOCK_NAME
from ascendrun.head.protocol.agent_messages import AgentInfo, WatchHead
from ascendrun.node.procs import boot_id

WATCH_S = 30.0


def is_here(info: AgentInfo) -> bool:
    """Return whether an agent is on this machine, as this user and outside containers with a network of their own."""
    here = (boot_id(), os.geteuid(), os.stat("/proc/self/ns/net").st_ino)
    return (info.boot_id, info.uid, info.net_ns) == here


def watch_request(state_dir: Path) -> WatchHead:
    argv = [sys.executable, "-m", "ascendrun.head.loop.guard"]
    return WatchHead(str(state_dir / LOCK_NAME), argv, environment(state_dir))


def environment(state_dir: Path) -> dict[str, str]:
    """Return the environment of a controller of this release."""
    package_parent = str(Path(ascendrun.__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (package_parent, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, STATE_VARIABLE: str(state_dir), "PYTHONPATH": path}
