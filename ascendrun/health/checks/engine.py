"""Checks of the engine that grants the hosts: what it can end, its devices, and the state directory."""

from __future__ import annotations

from collections.abc import Iterator

from ascendrun.core.findings import Finding, Severity
from ascendrun.health.survey.check_context import CheckContext, check, finding


@check("engine-end", "the engine ends every process of a job, and not before its ranks could save",
       "engine-tracking engine-kill-wait")  # fmt: skip
def check_end(context: CheckContext) -> Iterator[Finding]:
    engine = context.engine
    if engine is None:
        return
    if engine.is_tracking_exact is False:
        yield finding("engine-tracking", Severity.WARN, (), kind=engine.tracking)
    grace_s = context.job.checkpoint.grace_period_s if context.job is not None else 0.0
    if engine.kill_wait_s is not None and engine.kill_wait_s < grace_s:
        yield finding("engine-kill-wait", Severity.WARN, (), seconds=engine.kill_wait_s, grace_s=grace_s)


@check("engine-devices", "the engine has the devices of the nodes", "engine-devices-unknown engine-devices-differ")
def check_devices(context: CheckContext) -> Iterator[Finding]:
    engine = context.engine
    if engine is None or not engine.devices or context.device_type == "cpu":
        return
    if not any(engine.devices):
        yield finding("engine-devices-unknown", Severity.FAIL, (), name=engine.device_name)
        return
    for host, facts in context.facts.items():
        count = len(facts.npu.chips)
        if count and count not in engine.devices:
            most, name = max(engine.devices), engine.device_name
            yield finding("engine-devices-differ", Severity.WARN, host, name=name, engine=most, count=count)


@check("engine-state", "the state directory is on a local disk of a login node", "engine-state-remote")
def check_state(context: CheckContext) -> Iterator[Finding]:
    if context.engine is not None and context.engine.state_on is not None:
        yield finding("engine-state-remote", Severity.WARN, (), file_system=context.engine.state_on)
