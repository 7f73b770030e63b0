"""Checks of the engine that grants the hosts: what it can end, its devices, and the state directory."""

from __future__ import annotations

from collections.abc import Iterator

from ascendrun.core.findings import Finding, Severity
from ascendrun.health.survey.check_context import CheckContext, check, finding


@check("engine", "the engine ends all of a job and not too early, has its devices, and the state directory is local",
       "engine-tracking engine-kill-wait engine-devices-unknown engine-devices-differ engine-state-remote")  # fmt: skip
def check_engine(context: CheckContext) -> Iterator[Finding]:
    engine = context.engine
    if engine is None:
        return
    if engine.is_tracking_exact is False:
        yield finding("engine-tracking", Severity.WARN, (), kind=engine.tracking)
    grace_s = context.job.checkpoint.grace_period_s if context.job is not None else 0.0
    if engine.kill_wait_s is not None and engine.kill_wait_s < grace_s:
        yield finding("engine-kill-wait", Severity.WARN, (), seconds=engine.kill_wait_s, grace_s=grace_s)
    if engine.state_on is not None:
        yield finding("engine-state-remote", Severity.WARN, (), file_system=engine.state_on)
    most, name = max(engine.devices, default=None), engine.device_name
    if most == 0 and context.device_type != "cpu":
        yield finding("engine-devices-unknown", Severity.FAIL, (), name=name)
    for host, facts in context.facts.items() if most else ():
        if facts.npu.chips and len(facts.npu.chips) not in engine.devices:
            count = len(facts.npu.chips)
            yield finding("engine-devices-differ", Severity.WARN, host, name=name, engine=most, count=count)
