"""What the checks of NPUs share: which nodes have NPUs, and which devices the job uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ascendrun.ascend.variable_forms import effective_ids
from ascendrun.core.findings import Severity
from ascendrun.health.survey.check_context import CheckContext
from ascendrun.health.survey.facts import NodeFacts


def npu_nodes(context: CheckContext) -> Iterator[tuple[str, NodeFacts]]:
    """The nodes whose NPUs matter here: of an npu job all, without a job those that have some."""
    if context.family not in (None, "npu"):
        return
    for host, facts in context.facts.items():
        if context.family == "npu" or facts.npu.has_any:
            yield host, facts


def planned_devices(context: CheckContext, host: str) -> tuple[int, ...] | None:
    """The device ids that the job gets on the host; None: no plan, or none for this host."""
    first = context.first_ranks.get(host)
    value = first.env.get("ASCEND_RT_VISIBLE_DEVICES") if first is not None else None
    return effective_ids(value) if value is not None else None


def severity_at(
    context: CheckContext, host: str, devices: Iterable[int], *, otherwise: Severity = Severity.WARN
) -> Severity:
    """FAIL where the job takes one of the devices, or where it is not known which it takes; else `otherwise`."""
    wanted = planned_devices(context, host)
    return Severity.FAIL if wanted is None or set(wanted) & set(devices) else otherwise


def is_many(context: CheckContext) -> bool:
    """Whether devices of several nodes are to talk to each other."""
    return len(context.facts) + len(context.unreached) > 1
