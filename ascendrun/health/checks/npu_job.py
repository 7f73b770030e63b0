"""Checks of a job's NPU requirements: devices and number format."""

from __future__ import annotations

from collections.abc import Iterator

from ascendrun.ascend.devices import device_faults
from ascendrun.ascend.variables import effective_ids
from ascendrun.core.findings import Finding, Severity
from ascendrun.health.survey.check_context import CheckContext, check, finding, npu_check, npu_nodes, planned_devices
from ascendrun.health.survey.facts import NodeFacts

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


@npu_check(
    "visible-devices", "ASCEND_RT_VISIBLE_DEVICES includes the devices of the job", "visible-fewer visible-beyond"
)
def check_visible_devices(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Check the variable as a rank gets it, after setup. Another check reports an invalid form."""
    value = (facts.environ or {}).get(VISIBLE)
    if not value:
        return
    ids, planned = effective_ids(value), planned_devices(context, host)
    if planned is not None and len(ids) < len(planned):
        yield finding("visible-fewer", Severity.FAIL, host, value=value[:80], found=len(ids), expected=len(planned))
    count = len(facts.npu.info.chips) if facts.npu.info is not None else None
    over = [number for number in ids if count is not None and number >= count]
    if over:
        yield finding("visible-beyond", Severity.FAIL, host, value=value[:80], ids=tuple(over), count=count)


@npu_check("device-set", "the chip supports the devices of the job together", "device-set")
def check_device_set(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Check the devices that HCCL supports together, by the chip's links. Only the 910A rejects others."""
    chip, planned = facts.npu.chip, planned_devices(context, host)
    for fault in device_faults(chip, planned) if chip is not None and planned else ():
        severity = Severity.FAIL if chip is not None and chip.family == "A1" else Severity.WARN
        yield finding("device-set", severity, host, problem=fault)


@check("bf16", "the chip supports bf16 if the job requests it", "bf16-unsupported")
def check_bf16(context: CheckContext) -> Iterator[Finding]:
    argument = bf16_argument(context)
    for host, facts in npu_nodes(context) if argument is not None else ():
        chip = facts.npu.chip
        if chip is not None and not chip.has_bf16:
            yield finding("bf16-unsupported", Severity.FAIL, host, chip=chip.name, argument=argument)


def bf16_argument(context: CheckContext) -> str | None:
    """Return the argument or option that requests bf16; None: not visible outside the program's code."""
    if context.job is None:
        return None
    for name, value in context.job.args.items():
        if _means_bf16(name, str(value)) and str(value).lower() not in ("false", "none"):
            return f"{name}: {str(value).lower()}"
    words = tuple(str(word) for word in context.job.command or ())
    for word, after in zip(words, (*words[1:], "")):
        name, _, value = word.partition("=")
        own = value or ("" if after.startswith("-") else after)
        if word.startswith("-") and _means_bf16(name.lstrip("-"), own) and own.lower() not in ("false", "0", "no"):
            return word if value or not own else f"{word} {own}"
    return None


def _means_bf16(name: str, value: str) -> bool:
    return name.lower() in ("bf16", "bfloat16") or value.lower() in ("bf16", "bfloat16")
