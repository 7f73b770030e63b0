"""Checks of the temperature and clock of NPUs, against those of the other NPUs of their kind.

Huawei publishes no limits for them. The limits here are choices, so a finding is a warning: a hot or slow device delays
a job, and does not end it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from ascendrun.ascend.npu_smi import NpuChip
from ascendrun.ascend.npu_smi_views import ChipCommon
from ascendrun.core.findings import Finding, Severity
from ascendrun.health.checks.npu import is_on, named_npus
from ascendrun.health.survey.check_context import CheckContext, check, compare, finding, npu_nodes
from ascendrun.text import Text

Place = tuple[str, int]
"""A host, and a device on it."""
IDLE_HOT_C, IDLE_ABOVE_C = 80, 20
"""At all, and above the median of the idle NPUs. Recorded idle NPUs have at most 50 °C; those of one server differ by
up to 7 °C."""
SLOW_FRACTION = 0.75
"""Of the median clock of the idle NPUs: an idle 910B1 is at 800 of 1800 MHz."""


@check("npu-temperature", "idle NPUs are cool", "npu-hot")
def check_temperature(context: CheckContext) -> Iterator[Finding]:
    for chips in _kinds(context):
        heat = {place: chip.temperature_c for place, chip in chips.items() if chip.temperature_c is not None}
        usual_c = median(heat.values()) if heat else 0.0
        english = "NPU {npu}: {celsius} °C (median of the idle NPUs: {usual:.0f} °C)"
        hot = {
            place: Text("doctor.npu-heat", english, npu=chips[place].npu_id, celsius=celsius, usual=usual_c)
            for place, celsius in heat.items()
            if celsius >= min(IDLE_HOT_C, usual_c + IDLE_ABOVE_C)
        }
        yield from _by_host("npu-hot", chips, hot)


@check(
    "npu-clock",
    "the NPUs have one clock, and idle ones are not throttled",
    "npu-clock-differs npu-throttled",
    is_full=True,
)
def check_clock(context: CheckContext) -> Iterator[Finding]:
    for chips in _kinds(context, is_idle=False):
        views = _views(context, chips)
        same = compare({place: view.aicore_mhz for place, view in views.items()})
        for value, places in same.others if same is not None else ():
            of_value: dict[Place, Text | None] = dict.fromkeys(places)
            yield from _by_host("npu-clock-differs", chips, of_value, value=value, majority=same and same.majority)
    for chips in _kinds(context):
        clocks = {place: view.aicore_now_mhz for place, view in _views(context, chips).items() if view.aicore_now_mhz}
        usual = median(clocks.values()) if clocks else 0
        english = "NPU {npu}: {mhz} MHz (median of the idle NPUs: {usual:.0f} MHz), {celsius} °C"
        slow: dict[Place, Text | None] = {}
        for place, mhz in clocks.items():
            if mhz < SLOW_FRACTION * usual:
                values = {"npu": chips[place].npu_id, "celsius": chips[place].temperature_c}
                slow[place] = Text("doctor.npu-clock", english, **values, mhz=mhz, usual=usual)
        yield from _by_host("npu-throttled", chips, slow)


def _kinds(context: CheckContext, *, is_idle: bool = True) -> list[dict[Place, NpuChip]]:
    """Return the chips by name: those of one name are comparable. `is_idle`: only chips without load or process."""
    kinds: dict[str | None, dict[Place, NpuChip]] = {}
    for host, facts in npu_nodes(context):
        processes = (facts.npu.info.processes if facts.npu.info is not None else None) or ()
        for device, chip in facts.npu.chips.items():
            if not is_idle or (chip.load_percent == 0 and not any(is_on(one, chip) for one in processes)):
                kinds.setdefault(chip.name, {})[host, device] = chip
    return list(kinds.values())


def _views(context: CheckContext, chips: Mapping[Place, NpuChip]) -> dict[Place, ChipCommon]:
    found = {}
    for (host, device), chip in chips.items():
        for view in context.facts[host].npu.views.common.get(chip.npu_id, ()):
            if view.chip_id in (None, chip.chip_id):
                found[host, device] = view
    return found


def _by_host(
    code: str, chips: Mapping[Place, NpuChip], lines: Mapping[Place, Text | None], **values: Any
) -> Iterator[Finding]:
    """Yield a finding for each host with one of these places."""
    for host in dict.fromkeys(host for host, _ in lines):
        mine = [place for place in lines if place[0] == host]
        evidence = [line for place in mine[:4] if (line := lines[place]) is not None]
        yield finding(
            code, Severity.WARN, host, evidence, **named_npus(chips[place].npu_id for place in mine), **values
        )
