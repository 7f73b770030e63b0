"""The context of the checks from what nodes replied to a survey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ascendrun.core.errors import AscendrunError
from ascendrun.core.findings import paused_collector
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport, load_report
from ascendrun.head.protocol.control_messages import SurveyReply
from ascendrun.head.survey.doctor import SurveyResults
from ascendrun.head.survey.submission import Submission, build_plan, make_job
from ascendrun.health.survey.check_context import CheckContext
from ascendrun.health.survey.facts import NodeFacts, Unreached
from ascendrun.health.survey.probes import read_facts

if TYPE_CHECKING:
    from ascendrun.core.jobfile.spec import JobSpec
    from ascendrun.core.jobs.plan import LaunchPlan


def make_context(
    answers: SurveyResults,
    reports: Mapping[str, NodeReport],
    spec: JobSpec | None,
    plan: LaunchPlan | None,
    *,
    now_s: float,
    device_type: str | None = None,
) -> CheckContext:
    """Make the context of an examination. A host without results was not reached. `device_type`: without a job."""
    facts: dict[str, NodeFacts] = {}
    unreached: dict[str, Unreached] = {}
    with paused_collector():
        for host in dict.fromkeys((*reports, *answers)):
            answer = answers.get(host, {})
            if "results" in answer:
                facts[host] = read_facts(reports[host], answer["results"])
            else:
                why: Failure = answer.get("refused") or Failure("internal", "")
                unreached[host] = Unreached(why.code, why.message, why.hint)
    return CheckContext(
        facts=facts,
        unreached=unreached,
        job=spec,
        plan=plan,
        now_s=now_s,
        device_type=spec.devices.type if spec is not None else device_type,
    )


def read_world(
    replies: Sequence[SurveyReply], submission: Submission | None, *, device_type: str | None, now_s: float
) -> CheckContext:
    """Make the context from one reply for each host. The plan is rebuilt from the same reports, as for a start."""
    everyone = {one.host: None for one in replies}
    with paused_collector():
        reports = {one.host: load_report(one.report, everyone) for one in replies if one.refused is None}
    answers = {
        one.host: {"results": one.results} if one.refused is None else {"refused": one.refused} for one in replies
    }
    spec = submission.spec if submission is not None else None
    plan = dry_plan(submission, reports, now_s)
    return make_context(answers, reports, spec, plan, now_s=now_s, device_type=device_type)


def dry_plan(submission: Submission | None, reports: Mapping[str, NodeReport], now_s: float) -> LaunchPlan | None:
    """Return the plan that a start would have; None if a host is missing, or cannot run the job: the findings or the
    caller's own plan report why."""
    if submission is None or len(reports) < len(submission.hosts):
        return None
    job = make_job(submission, "j-new", "dry-run", now_s)
    try:
        return build_plan(submission.spec, submission.hosts, reports, job, submission.trees)
    except AscendrunError:
        return None
