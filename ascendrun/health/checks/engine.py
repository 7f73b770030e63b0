"""Checks of the engine that grants the hosts: what it can end, its devices, and the state directory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ascendrun.core.allocations import EngineFacts
from ascendrun.core.findings import Finding, Severity
from ascendrun.health.survey.check_context import CheckContext, check, finding

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec


@check("engine", "the engine ends all of a job and not too early, has its devices, and the state directory is local",
       "engine-tracking engine-kill-wait engine-time-refused engine-time-short engine-devices-unknown "
       "engine-devices-differ engine-state-remote")  # fmt: skip
def check_engine(context: CheckContext) -> Iterator[Finding]:
    engine = context.engine
    if engine is None:
        return
    if engine.is_tracking_exact is False:
        yield finding("engine-tracking", Severity.WARN, (), kind=engine.tracking)
    grace_s = context.job.checkpoint.grace_period_s if context.job is not None else 0.0
    if engine.kill_wait_s is not None and engine.kill_wait_s < grace_s:
        yield finding("engine-kill-wait", Severity.WARN, (), seconds=engine.kill_wait_s, grace_s=grace_s)
    yield from _times(engine, context.job)
    if engine.state_on is not None:
        yield finding("engine-state-remote", Severity.WARN, (), file_system=engine.state_on)
    most, name = max(engine.devices, default=None), engine.device_name
    if most == 0 and context.device_type != "cpu":
        yield finding("engine-devices-unknown", Severity.FAIL, (), name=name)
    for host, facts in context.facts.items() if most else ():
        if facts.npu.chips and len(facts.npu.chips) not in engine.devices:
            count = len(facts.npu.chips)
            yield finding("engine-devices-differ", Severity.WARN, host, name=name, engine=most, count=count)


def _times(engine: EngineFacts, job: JobSpec | None) -> Iterator[Finding]:
    limit_s, longest_s = engine.limit_s, engine.longest_s
    if limit_s is not None and longest_s is not None and limit_s > longest_s:
        yield finding("engine-time-refused", Severity.FAIL, (), limit_s=limit_s, longest_s=longest_s)
    elif job is not None and limit_s is not None and not job.restart.max_restarts:
        if (job.timeouts.run_s or 0.0) > limit_s:
            yield finding("engine-time-short", Severity.WARN, (), run_s=job.timeouts.run_s, limit_s=limit_s)
