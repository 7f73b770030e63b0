"""The table of all checks, and their execution."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from types import ModuleType

from ascendrun.core.findings import Finding, Severity, fold_findings, paused_collector
from ascendrun.health.checks import (
    cann,
    container,
    device_network,
    engine,
    environment,
    host,
    network,
    npu,
    npu_heat,
    npu_job,
    software,
    storage,
)
from ascendrun.health.survey.check_context import Check, CheckContext


def _checks_in(*modules: ModuleType) -> tuple[Check, ...]:
    """Return the checks of modules in the order of their definition."""
    return tuple(value for module in modules for value in vars(module).values() if isinstance(value, Check))


NPU_CHECKS = _checks_in(npu, npu_heat, cann, device_network, npu_job)
CHECKS = (*_checks_in(container, engine, host, storage, network, software, environment), *NPU_CHECKS)
"""In the order of a manual search for causes: faults that make other results unknown come first."""

OF_A_ROLE = frozenset(_checks_in(container, storage, software, environment, npu_job))
"""Checks of what the processes of a job use: the roles of a job may differ in it, and are checked by themselves."""
WARNED = frozenset(("device-lease",))
"""Checks that warn if a job skips them: it then shares devices with what they find."""
NAMES: tuple[str, ...] = tuple(check.name for check in CHECKS)


def plain_name(name: str) -> str:
    """Return a name as in CHECKS: job files may contain hccl_ping or hccl-ping."""
    return name.replace("_", "-").lower()


def choose_checks(*, is_full: bool, skip: Iterable[str] = (), require: Iterable[str] = ()) -> tuple[Check, ...]:
    """Return the checks to run: all with `is_full`, else the light and the required; of the skipped only WARNED."""
    skipped, required = {plain_name(name) for name in skip} - WARNED, {plain_name(name) for name in require}
    return tuple(
        check
        for check in CHECKS
        if check.name not in skipped and (is_full or not check.is_full or check.name in required)
    )


def run_checks(
    context: CheckContext, *, is_full: bool = True, skip: Iterable[str] = (), require: Iterable[str] = ()
) -> tuple[Finding, ...]:
    """Return the findings of the chosen checks, merged over hosts, the most severe first."""
    skipped = {plain_name(name) for name in skip}
    with paused_collector():
        return fold_findings(_run(choose_checks(is_full=is_full, skip=skip, require=require), skipped, context))


def _run(checks: Iterable[Check], skipped: Collection[str], context: CheckContext) -> list[Finding]:
    found: list[Finding] = []
    roles = context.by_role()
    for check in checks:
        try:
            is_skipped = check.name in skipped
            for own in roles if check in OF_A_ROLE else (context,):
                found += (replace(one, severity=Severity.WARN) if is_skipped else one for one in check.function(own))
        except Exception as error:  # a bug, or invalid data from a node: keep the other checks' findings
            why = f"{type(error).__name__}: {error}"[:300]
            found.append(Finding("check-error", Severity.WARN, (), {"check": check.name, "why": why}))
    return found
