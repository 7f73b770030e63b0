"""What the chips read now: load, memory, heat and power as the processes and the faults of the moment make them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence

from ascendrun.sim.ascend.tool.families import Family
from ascendrun.sim.ascend.tool.faults import Faults, value_of
from ascendrun.sim.ascend.tool.model import Chip, Node, Row

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
    """One chip now. `error_codes` are shown by `-t health`; `aicore_mhz` is the present clock."""

    chip: Chip
    health: str
    error_codes: tuple[str, ...]
    power_w: float
    temperature_c: int
    load_percent: int
    aicore_mhz: int
    ddr_used_mb: int
    hbm_used_mb: int
    hbm_mb: int
    single_bit: int
    double_bit: int
    rows: tuple[Row, ...]


def readings(node: Node, faults: Faults, rows: Sequence[Row]) -> list[Reading]:
    """The chips that respond, in order; `rows`: processes that run on the node now."""
    present = [chip for chip in node.chips if not faults.is_gone(chip.npu_id)]
    return [_reading(node.family, chip, faults, (*node.rows, *rows)) for chip in present]


def _reading(family: Family, chip: Chip, faults: Faults, rows: Sequence[Row]) -> Reading:
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
    clock = family.mhz if load else family.idle_mhz
    watts = chip.idle_w + (family.busy_w - family.idle_w) * load / 100
    natural = Reading(
        chip=chip,
        health=health,
        error_codes=codes,
        power_w=round(watts, 1),
        temperature_c=int(heat if hot is None else hot),
        load_percent=load,
        aicore_mhz=clock if throttled is None else int(family.mhz * throttled / 100),
        ddr_used_mb=chip.ddr_used_mb if chip.hbm_mb else min(chip.ddr_mb, chip.ddr_used_mb + held_mb),
        hbm_used_mb=min(hbm_mb, chip.hbm_idle_mb + held_mb),
        hbm_mb=hbm_mb,
        single_bit=faults.grown("ecc_single", card),
        double_bit=faults.grown("ecc_double", card),
        rows=mine,
    )
    return natural._replace(**_fixed(chip, faults))


def _fixed(chip: Chip, faults: Faults) -> Any:
    """What the scenario pins, but for what a fault changes: a fault switched on later must show."""
    in_force = [name for name in CHANGES if faults.has(name, chip.npu_id)]
    changed = {reading for name in in_force for reading in CHANGES[name]}
    fixed = {name: value for name, value in chip.fixed.items() if name not in changed}
    if "error_codes" in fixed:
        fixed["error_codes"] = tuple(fixed["error_codes"])
    return fixed


def _ghosts(chip: Chip, faults: Faults) -> tuple[Row, ...]:
    ghost = faults.of("ghost_process", chip.npu_id)
    if ghost is None:
        return ()
    memory_mb = int(0.45 * (chip.hbm_mb or chip.ddr_mb))
    return (Row(chip.logic_id, int(float(value_of(ghost))), "python", memory_mb, 0, 0.0),)


def _health(faults: Faults, card: int) -> tuple[str, tuple[str, ...]]:
    for name, word in _HEALTH:
        fault = faults.of(name, card)
        if fault is not None:
            return word, tuple(value_of(fault).split())
    return "OK", ()


def percent(used: int, total: int) -> int:
    """As the tool rounds: down; 0 where there is nothing to use."""
    return used * 100 // total if total else 0


def memory_of(reading: Reading) -> tuple[int, int]:
    """Used and total of the chip's main memory: HBM, or DDR where that is all it has."""
    if reading.hbm_mb:
        return reading.hbm_used_mb, reading.hbm_mb
    return reading.ddr_used_mb, reading.chip.ddr_mb
