"""What the chips read now: load, memory, heat and power as the processes and the faults of the moment make them."""

from __future__ import annotations

import math
import os
import time
from typing import Any, NamedTuple, Sequence

from ascendrun.sim.ascend.tool import model

WARM_UP_S = 30.0  # a loaded chip has made 63 % of its way to its final heat after this time
_HEALTH = (
    ("health_critical", "Critical"),
    ("health_alarm", "Alarm"),
    ("health_warning", "Warning"),
    ("health_unknown", "UNKNOWN"),
)
CHANGES: dict[str, tuple[str, ...]] = {
    **{name: ("health", "error_codes") for name, _ in _HEALTH},
    "hot": ("temperature_c",),
    "throttled": ("temperature_c",),
    "hbm_short": ("hbm_used_mb",),
    "hbm_held": ("hbm_used_mb", "ddr_used_mb"),
    "ghost_process": ("hbm_used_mb", "ddr_used_mb"),
    "ecc_single": ("single_bit",),
    "ecc_double": ("double_bit",),
}  # which readings a fault changes


class Reading(NamedTuple):
    """One chip now. `error_codes` are shown by `-t health`; `aicore_mhz` is the present clock, `rated_mhz` the
    highest."""

    chip: model.Chip
    health: str
    error_codes: tuple[str, ...]
    power_w: float
    temperature_c: int
    load_percent: int
    aicore_mhz: int
    rated_mhz: int
    ddr_used_mb: int
    hbm_used_mb: int
    hbm_mb: int
    single_bit: int
    double_bit: int
    rows: tuple[model.Row, ...]


def readings(node: model.Node, faults: model.Faults, rows: Sequence[model.Row]) -> list[Reading]:
    """The chips that respond, in order; `rows`: processes that run on the node now."""
    present = [chip for chip in node.chips if not faults.is_gone(chip.npu_id)]
    return [_reading(node.family, chip, faults, (*node.rows, *rows)) for chip in present]


def _reading(family: model.Family, chip: model.Chip, faults: model.Faults, rows: Sequence[model.Row]) -> Reading:
    card = chip.npu_id
    mine = tuple(row for row in rows if row.logic_id == chip.logic_id) + _ghosts(chip, faults)
    load = min(100, sum(row.load for row in mine))
    warmth = load / 100 * max((1 - math.exp(-row.age_s / WARM_UP_S) for row in mine), default=0.0)
    percent = faults.number("hbm_short", card)
    hbm_mb = chip.hbm_mb if percent is None else int(chip.hbm_mb * percent / 100)
    held_mb = sum(row.memory_mb for row in mine) + int(faults.number("hbm_held", card) or 0)
    throttled = faults.number("throttled", card)
    heat = chip.idle_c + (family.busy_c - family.idle_c) * warmth
    hot = faults.number("hot", card) if throttled is None else max(heat, family.busy_c) + 36
    health, codes = _health(faults, card)
    rated = int(faults.number("rated_clock", card) or family.mhz)
    clock = rated if load else min(rated, family.idle_mhz)
    watts = chip.idle_w + (family.busy_w - family.idle_w) * load / 100
    natural = Reading(
        chip=chip,
        health=health,
        error_codes=codes,
        power_w=round(watts, 1),
        temperature_c=int(heat if hot is None else hot),
        load_percent=load,
        aicore_mhz=clock if throttled is None else int(clock * throttled / 100),
        rated_mhz=rated,
        ddr_used_mb=chip.ddr_used_mb if chip.hbm_mb else min(chip.ddr_mb, chip.ddr_used_mb + held_mb),
        hbm_used_mb=min(hbm_mb, chip.hbm_idle_mb + held_mb),
        hbm_mb=hbm_mb,
        single_bit=faults.grown("ecc_single", card),
        double_bit=faults.grown("ecc_double", card),
        rows=mine,
    )
    return natural._replace(**_fixed(chip, faults))


def _fixed(chip: model.Chip, faults: model.Faults) -> Any:
    """What the scenario pins, but for what a fault changes: a fault switched on later must show."""
    in_force = [name for name in CHANGES if faults.has(name, chip.npu_id)]
    changed = {reading for name in in_force for reading in CHANGES[name]}
    fixed = {name: value for name, value in chip.fixed.items() if name not in changed}
    if "error_codes" in fixed:
        fixed["error_codes"] = tuple(fixed["error_codes"])
    return fixed


def _ghosts(chip: model.Chip, faults: model.Faults) -> tuple[model.Row, ...]:
    ghost = faults.of("ghost_process", chip.npu_id)
    if ghost is None:
        return ()
    memory_mb = int(0.45 * (chip.hbm_mb or chip.ddr_mb))
    return (model.Row(chip.logic_id, int(float(model.value_of(ghost))), "python", memory_mb, 0, 0.0),)


def _health(faults: model.Faults, card: int) -> tuple[str, tuple[str, ...]]:
    for name, word in _HEALTH:
        fault = faults.of(name, card)
        if fault is not None:
            return word, tuple(model.value_of(fault).split())
    return "OK", ()


def percent(used: int, total: int) -> int:
    """As the tool rounds: down; 0 where there is nothing to use."""
    return used * 100 // total if total else 0


def memory_of(reading: Reading) -> tuple[int, int]:
    """Used and total of the chip's main memory: HBM, or DDR where that is all it has."""
    if reading.hbm_mb:
        return reading.hbm_used_mb, reading.hbm_mb
    return reading.ddr_used_mb, reading.chip.ddr_mb


# --- which processes of this machine use which simulated NPU ---
#
# A process uses one if its environment at the start has ASCENDRUN_SIM_NPU=<logic id>, or =auto, the device that its
# LOCAL_RANK (0 without one) picks from ASCEND_RT_VISIBLE_DEVICES (all without it). Or when it keeps a file of the
# node's marker directory open whose name starts with the id: `3`, `3.rank3`. ASCENDRUN_SIM_NPU_PROCESS_MB and
# ASCENDRUN_SIM_NPU_LOAD set its memory and its fraction of the AI cores; a marker file may hold the same two numbers. A
# child that inherited its parent's mark is not shown next to it. Where the node is a directory and no host of its own,
# the environment must name that directory too (ASCENDRUN_SIM_ROOT): other nodes may share the machine's processes.

DEVICE_VARIABLE = "ASCENDRUN_SIM_NPU"
ROOT_VARIABLE = "ASCENDRUN_SIM_ROOT"
MEMORY_VARIABLE = "ASCENDRUN_SIM_NPU_PROCESS_MB"
LOAD_VARIABLE = "ASCENDRUN_SIM_NPU_LOAD"
DEFAULT_MEMORY_MB = 20000
DEFAULT_LOAD = 92


def find_rows(root: str, marker_folder: str, count: int) -> list[model.Row]:
    """The processes on the `count` chips of the node at `root`, lowest pid first.

    What may not be looked at, or has just ended, is left out.
    """
    uses: dict[int, list[tuple[int, int, int]]] = {}  # by pid: logic id, memory and load
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
        above = {logic_id for logic_id, _, _ in uses.get(parent, [])}
        name = _read(f"/proc/{pid}/comm").rstrip("\n")
        rows += [
            model.Row(logic_id, pid, name, memory_mb, load, max(0.0, uptime_s - started_s))
            for logic_id, memory_mb, load in uses[pid]
            if logic_id not in above and name
        ]
    return rows


def _uses(pid: int, root: str, marker_folder: str | None, count: int) -> list[tuple[int, int, int]]:
    pairs = [pair.partition("=") for pair in _read(f"/proc/{pid}/environ").split("\0")]
    environ = {name: value for name, _, value in pairs}
    device = device_of(environ, count) if root in ("/", environ.get(ROOT_VARIABLE)) else None
    memory_mb = _number(environ.get(MEMORY_VARIABLE), DEFAULT_MEMORY_MB)
    load = _number(environ.get(LOAD_VARIABLE), DEFAULT_LOAD)
    uses = [] if device is None else [(device, memory_mb, load)]
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


def _open_markers(pid: int, folder: str, count: int) -> list[tuple[int, int, int]]:
    uses: dict[int, tuple[int, int, int]] = {}
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
            uses[int(word)] = int(word), memory_mb, load
    return list(uses.values())


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


class Reply(NamedTuple):
    """Output and exit code of the tool."""

    text: str
    code: int = 0


class Scene(NamedTuple):
    """The node at one moment; `is_complete`: its install record says that the driver is."""

    node: model.Node
    faults: model.Faults
    readings: list[Reading]
    is_complete: bool
    is_privileged: bool


def read_scene(home: str, root: str) -> Scene:
    """The node whose files are in `home`, now."""
    node = model.read_node(home)
    faults = model.Faults(model.read_faults(home), time.time())
    rows = find_rows(root, os.path.join(home, model.MARKER_FOLDER), len(node.chips))
    complete = _is_complete(root) and not faults.has("driver_incomplete")
    privileged = os.geteuid() in (0, os.stat(home).st_uid)
    return Scene(node, faults, readings(node, faults, rows), complete, privileged)


def _is_complete(root: str) -> bool:
    try:
        with open(os.path.join(root, "etc/ascend_install.info"), encoding="utf-8") as file:
            return "Driver_Install_Status=complete" in file.read()
    except OSError:
        return False
