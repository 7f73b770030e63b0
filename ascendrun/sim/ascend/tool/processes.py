"""Which processes of this machine use which simulated NPU.

A process uses one if its environment at the start has ASCENDRUN_SIM_NPU=<logic id>, or =auto, the device that
its LOCAL_RANK (0 without one) picks from ASCEND_RT_VISIBLE_DEVICES (all without it). Or when it keeps a file of the
node's marker directory open whose name starts with the id: `3`, `3.rank3`. ASCENDRUN_SIM_NPU_PROCESS_MB and
ASCENDRUN_SIM_NPU_LOAD set its memory and its fraction of the AI cores; a marker file may
hold the same two numbers. A child that inherited its parent's mark is not shown next to it. Where the node is a
directory
and no host of its own, the environment must name that directory too (ASCENDRUN_SIM_ROOT): other nodes may share the
machine's processes.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ascendrun.sim.ascend.tool.model import Row

DEVICE_VARIABLE = "ASCENDRUN_SIM_NPU"
ROOT_VARIABLE = "ASCENDRUN_SIM_ROOT"
MEMORY_VARIABLE = "ASCENDRUN_SIM_NPU_PROCESS_MB"
LOAD_VARIABLE = "ASCENDRUN_SIM_NPU_LOAD"
DEFAULT_MEMORY_MB = 20000
DEFAULT_LOAD = 92


class _Use(NamedTuple):
    logic_id: int
    memory_mb: int
    load: int


def find_rows(root: str, marker_folder: str, count: int) -> list[Row]:
    """The processes on the `count` chips of the node at `root`, lowest pid first.

    What may not be looked at, or has just ended, is left out.
    """
    uses: dict[int, list[_Use]] = {}
    parents: dict[int, tuple[int, float]] = {}
    has_markers = os.path.isdir(marker_folder) and bool(os.listdir(marker_folder))
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        found = _uses(int(name), root, marker_folder if has_markers else None, count)
        status = _status(int(name)) if found else None
        if status is not None:
            uses[int(name)], parents[int(name)] = found, status
    uptime_s = float(_read("/proc/uptime").split()[0])
    rows = []
    for pid in sorted(uses):
        parent, started_s = parents[pid]
        above = {use.logic_id for use in uses.get(parent, [])}
        name = _read(f"/proc/{pid}/comm").rstrip("\n")
        rows += [
            Row(use.logic_id, pid, name, use.memory_mb, use.load, max(0.0, uptime_s - started_s))
            for use in uses[pid]
            if use.logic_id not in above and name
        ]
    return rows


def _uses(pid: int, root: str, marker_folder: str | None, count: int) -> list[_Use]:
    environ = _environ(pid)
    device = device_of(environ, count) if root in ("/", environ.get(ROOT_VARIABLE)) else None
    memory_mb = _number(environ.get(MEMORY_VARIABLE), DEFAULT_MEMORY_MB)
    load = _number(environ.get(LOAD_VARIABLE), DEFAULT_LOAD)
    uses = [] if device is None else [_Use(device, memory_mb, load)]
    if marker_folder:
        uses += _open_markers(pid, marker_folder, count)
    return uses


def device_of(environ: dict[str, str], count: int) -> int | None:
    """The logic id of the chip that a process of this environment uses; None where it uses none."""
    word = environ.get(DEVICE_VARIABLE, "")
    if word.isdigit():
        return int(word) if int(word) < count else None
    if word != "auto":
        return None
    visible = [int(part) for part in environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",") if part.isdigit()]
    visible = visible or list(range(count))
    local_rank = _number(environ.get("LOCAL_RANK"), 0)
    chosen = visible[local_rank] if local_rank < len(visible) else visible[0]
    return chosen if chosen < count else None


def _open_markers(pid: int, folder: str, count: int) -> list[_Use]:
    uses: dict[int, _Use] = {}
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []  # it has ended, or is another user's
    for descriptor in descriptors:
        try:
            path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except OSError:
            continue
        head, _, name = path.rpartition("/")
        word = name.split(".")[0]
        if head == folder and word.isdigit() and int(word) < count:
            numbers = _read(path).split()
            memory_mb = _number(numbers[0] if numbers else None, DEFAULT_MEMORY_MB)
            load = _number(numbers[1] if len(numbers) > 1 else None, DEFAULT_LOAD)
            uses[int(word)] = _Use(int(word), memory_mb, load)
    return list(uses.values())


def _environ(pid: int) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in _read(f"/proc/{pid}/environ").split("\0")]
    return {name: value for name, _, value in pairs}


def _status(pid: int) -> tuple[int, float] | None:
    """Its parent, and when it started in seconds after the boot."""
    words = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(words) < 20 or words[0] == "Z":
        return None
    return int(words[1]), int(words[19]) / os.sysconf("SC_CLK_TCK")


def _number(word: str | None, default: int) -> int:
    return int(word) if word and word.isdigit() else default


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""  # it has ended, or is another user's
