"""The cheap checks of a job that waits for busy hosts: what cannot heal refuses it now, not hours later at its turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ascendrun.core.findings import Severity
from ascendrun.core.jobs.inputs import Refused
from ascendrun.core.jobs.job import State
from ascendrun.head.protocol.control_messages import Survey, SurveyReply
from ascendrun.head.survey.survey_reader import read_world

if TYPE_CHECKING:
    from ascendrun.head.loop.job.runner import JobRunner
    from ascendrun.head.loop.operations import Operations
    from ascendrun.head.loop.steps import JobSteps

WAITS_S = 2.0
"""Seconds after its submission in which a job that need not wait leaves the queue."""
PROBES = ("write", "python", "paths")
"""Probes that touch no device and no port: the hosts may be in use."""
LASTING = frozenset({"python-missing", "directory-not-writable", "path-not-found"})
"""Findings that no waiting heals."""


def look_early(runner: JobRunner, operations: Operations, steps: JobSteps) -> None:
    """Examine the hosts of a queued job, and refuse it if too few are left for it. A host that is away may heal, and
    so may what a stage lacks before the earlier ones have run."""
    if runner.job.state is not State.QUEUED or runner.job.engine is not None or runner.job.needs is not None:
        return
    request = Survey(runner.hosts, runner.submission.to_json(), names=PROBES, is_full=False)
    operations.examine(request, partial(_judge, runner, steps))


def _judge(runner: JobRunner, steps: JobSteps, replies: Sequence[SurveyReply]) -> None:
    from ascendrun.health.checks import run_checks
    from ascendrun.health.comparison import failed_checks

    context = read_world(replies, runner.submission, device_type=None, now_s=time.time())
    every = run_checks(context, is_full=False, skip=runner.spec.checks.skip)
    found = [one for one in every if one.severity is Severity.FAIL and one.code in LASTING]
    bad = {host for finding in found for host in finding.hosts}
    if runner.job.state is State.QUEUED and found and len(runner.hosts) - len(bad) < runner.job.request.least:
        steps.feed(runner.job.id, Refused(None, failed_checks(found)))
        steps.work_off()
