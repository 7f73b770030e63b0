"""The context of the checks from the controller's replies to a survey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ascendrun.core.errors import AscendrunError
from ascendrun.core.findings import paused_collector
from ascendrun.core.reports import NodeReport, load_report
from ascendrun.head.protocol.control_messages import SurveyReply
from ascendrun.head.survey.submission import Submission, make_job
from ascendrun.health.survey.check_context import CheckContext
from ascendrun.health.survey.facts import NodeFacts, Unreached
from ascendrun.health.survey.probes import read_facts


def read_world(
    answers: Sequence[SurveyReply], submission: Submission | None, *, device_type: str | None, now_s: float
) -> CheckContext:
    """Make the context from one reply for each host. The plan is rebuilt from the same reports, as for a start."""
    facts: dict[str, NodeFacts] = {}
    reports: dict[str, NodeReport] = {}
    unreached: dict[str, Unreached] = {}
    everyone = {answer.host: None for answer in answers}
    with paused_collector():
        for answer in answers:
            why = answer.refused
            if why is not None:
                unreached[answer.host] = Unreached(why.code, why.message, why.hint)
            else:
                report = reports[answer.host] = load_report(answer.report, everyone)
                facts[answer.host] = read_facts(report, answer.results)
    spec = submission.spec if submission is not None else None
    return CheckContext(
        facts=facts,
        unreached=unreached,
        job=spec,
        plan=_plan(submission, reports, now_s),
        now_s=now_s,
        device_type=spec.devices.type if spec is not None else device_type,
    )


def _plan(submission: Submission | None, reports: Mapping[str, NodeReport], now_s: float) -> Any:
    from ascendrun.head.survey.submission import build_plan

    if submission is None or len(reports) < len(submission.hosts):
        return None
    job = make_job(submission, "j-new", "dry-run", now_s)
    try:
        return build_plan(submission.spec, submission.hosts, reports, job, submission.trees)
    except AscendrunError:
        return None
