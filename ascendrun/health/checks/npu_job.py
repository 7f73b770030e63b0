"""Checks of what a job asks of the NPUs: which devices, and the number format."""

from __future__ import annotations

from collections.abc import Iterator

from ascendrun.ascend.chips import device_faults
from ascendrun.ascend.variable_forms import effective_ids
from ascendrun.core.findings import Finding, Severity
from ascendrun.health.checks.devices import ids_text, npu_nodes, planned_devices
from ascendrun.health.survey.check_context import Check, World
from ascendrun.health.survey.npu_facts import chip_of_node

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


def check_visible_devices(world: World) -> Iterator[Finding]:
    """As a rank would see the variable, after the set-up: what its form breaks is told with the other variables."""
    for host, facts in npu_nodes(world):
        value = (facts.environ or {}).get(VISIBLE)
        if not value:
            continue
        ids, wanted = effective_ids(value), planned_devices(world, host)
        if wanted is not None and len(ids) < len(wanted):
            yield Finding(
                "visible-fewer",
                Severity.FAIL,
                (host,),
                {"value": value[:80], "found": str(len(ids)), "wanted": str(len(wanted))},
            )
        count = len(facts.npu.info.chips) if facts.npu.info is not None else None
        over = [number for number in ids if count is not None and number >= count]
        if over:
            yield Finding(
                "visible-beyond",
                Severity.FAIL,
                (host,),
                {"value": value[:80], "ids": ids_text(over), "count": str(count)},
            )


def check_device_set(world: World) -> Iterator[Finding]:
    """Which devices of one server HCCL takes together, by the chip's links. Only the 910A refuses the others."""
    for host, facts in npu_nodes(world):
        chip, wanted = chip_of_node(facts.npu), planned_devices(world, host)
        for fault in device_faults(chip, wanted) if chip is not None and wanted else ():
            severity = Severity.FAIL if chip is not None and chip.family == "A1" else Severity.WARN
            yield Finding("device-set", severity, (host,), {"says": fault})


def check_bf16(world: World) -> Iterator[Finding]:
    asked = bf16_words(world)
    for host, facts in npu_nodes(world) if asked is not None else ():
        chip = chip_of_node(facts.npu)
        if chip is not None and not chip.has_bf16:
            yield Finding("bf16-unsupported", Severity.FAIL, (host,), {"chip": chip.name, "word": asked or ""})


def bf16_words(world: World) -> str | None:
    """Where the job asks for bf16: an option's word; None: nowhere that one sees from outside its code."""
    if world.job is None:
        return None
    for name, value in world.job.args.items():
        if _means_bf16(name, str(value)) and str(value).lower() not in ("false", "none"):
            return f"{name}: {str(value).lower()}"
    words = tuple(str(word) for word in world.job.command or ())
    for word, after in zip(words, (*words[1:], "")):
        name, _, value = word.partition("=")
        own = value or ("" if after.startswith("-") else after)
        if word.startswith("-") and _means_bf16(name.lstrip("-"), own) and own.lower() not in ("false", "0", "no"):
            return word if value or not own else f"{word} {own}"
    return None


def _means_bf16(name: str, value: str) -> bool:
    return name.lower() in ("bf16", "bfloat16") or value.lower() in ("bf16", "bfloat16")


CHECKS: tuple[Check, ...] = (
    Check(
        "visible-devices",
        check_visible_devices,
        "the variable of visible devices leaves the job its devices",
        ("visible-fewer", "visible-beyond"),
    ),
    Check("device-set", check_device_set, "the chip's links take the job's devices together", ("device-set",)),
    Check("bf16", check_bf16, "the chip computes in bf16 where the job asks for it", ("bf16-unsupported",)),
)
