"""Attempts that did not fail by themselves: running, succeeded, rejected, stopped, timed out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ascendrun.ascend.vocabularies import alike, code_of_cause
from ascendrun.core.events import SEPARATE, Event
from ascendrun.core.jobs.reasons import Reason
from ascendrun.health.diagnosis.classes import code_value, retry_of
from ascendrun.health.diagnosis.evidence import Evidence, moment
from ascendrun.health.diagnosis.render import caveat
from ascendrun.health.diagnosis.result import Confidence, Diagnosis, Proof
from ascendrun.text import Rendered, Text, listed

NO_OUTPUT_S = 120.0
LIVE = frozenset({"QUEUED", "CHECKING", "STAGING", "STARTING", "RUNNING"})


def explain_ending(evidence: Evidence) -> Diagnosis | None:
    """Return the diagnosis of an attempt that did not fail by itself; None: search for the failure."""
    failed = [rank for rank in evidence.ranks if rank.has_failed]
    if evidence.state == "SUCCEEDED" or evidence.cause == "completed":
        return replace(_diagnosis(evidence, "succeeded"), anomalies=tuple(_anomalies(evidence)))
    if evidence.cause == "held" or (evidence.cause is None and evidence.state in LIVE):
        return _live(evidence)
    if evidence.reason is not None and evidence.reason.code == SEPARATE:
        return replace(_diagnosis(evidence, SEPARATE), hosts=evidence.reason.hosts)
    stopped = evidence.reason.code if evidence.state == "STOPPED" and evidence.reason is not None else ""
    code = code_of_cause(evidence.cause or "") or (stopped if stopped in alike("stops") else None)
    if code is None or (failed and code not in alike("stops")):
        return None
    stops_s = [(rank, evidence.host(rank.host).stopped_at_s) for rank in failed if code in alike("stops")]
    if any(at_s is None or (rank.exited_at_s or at_s) < at_s for rank, at_s in stops_s):
        return None  # ranks of a host failed by themselves before that host was stopped
    reason = evidence.reason or Reason("hung")
    if code == "hang":
        name = "hang-unreachable" if reason.code == "hung-without-host" else "hang"
        return replace(_diagnosis(evidence, name, reason.why or ""), ranks=reason.ranks, hosts=reason.hosts)
    unseen = code in alike("stops") and any(rank.pid is not None and not rank.has_ended for rank in evidence.ranks)
    hosts = tuple(sorted(reason.hosts)) if code in alike("names-hosts") else ()
    found = replace(_diagnosis(evidence, code), hosts=hosts)
    return replace(found, confidence=Confidence.LIKELY, caveats=(caveat("not-all-seen"),)) if unseen else found


def hang_now(events: Sequence[Event]) -> Event | None:
    """Return the event of a hang that is not resolved, None: there is none."""
    found = next((event for event in reversed(events) if event.code in ("hang", "hang-resolved")), None)
    return found if found is not None and found.code == "hang" else None


def _diagnosis(evidence: Evidence, code: str, finding: Rendered | str | None = None) -> Diagnosis:
    """Make a diagnosis. `finding`: of a hang, None: it is none."""
    reason, value = evidence.reason, code_value(code)
    is_live = evidence.state in LIVE
    told = [event for event in evidence.events if reason is not None and event.values.get("reason") == reason]
    why = reason.why if reason is not None and code == "preflight-failed" else None
    values = {"reason": why or reason or "", "job": evidence.job, "needed": evidence.needs, "state": evidence.state}
    return Diagnosis(
        code=code,
        confidence=Confidence.CERTAIN if finding is None else Confidence.LIKELY,
        at_s=evidence.ended_at_s,
        evidence=tuple(Proof(event.message(), at_s=event.at_s) for event in told[-1:] if not is_live),
        values=values if finding is None else {**values, "finding": finding},
        retry=retry_of(code),
        domain="" if value is None else value.domain,
        missing=evidence.missing,
    )


def _live(evidence: Evidence) -> Diagnosis:
    is_running, anomalies = evidence.state == "RUNNING", tuple(_anomalies(evidence))
    hang = hang_now(evidence.events) if is_running else None
    if hang is None:
        return replace(_diagnosis(evidence, "running" if is_running else "in-progress"), anomalies=anomalies)
    found = _diagnosis(evidence, "running", hang.values.get("finding") or "")
    proof, since_s = Proof(hang.message(), at_s=hang.at_s), hang.values.get("since_s")
    shown = replace(found, code="hangs", at_s=since_s, evidence=(proof,), anomalies=anomalies)
    return replace(shown, ranks=hang.ranks, hosts=hang.hosts)


def _anomalies(evidence: Evidence) -> Iterator[Text]:
    """Yield anomalies of a job that has not failed."""
    is_running = evidence.state == "RUNNING"
    unreachable = [host.host for host in evidence.hosts if host.reachable is False]
    if unreachable and is_running:
        yield listed("diagnosis.anomaly.host-unreachable", hosts=unreachable)
    hung = [rank.rank for rank in evidence.ranks if rank.lingers]
    if hung:
        yield listed("diagnosis.anomaly.hung-at-exit", ranks=hung)
    if is_running:
        yield from _anomalies_of_ranks(evidence, unreachable)
    yield from evidence.slow


def _anomalies_of_ranks(evidence: Evidence, unreachable: Sequence[str]) -> Iterator[Text]:
    ended = [rank.rank for rank in evidence.ranks if rank.code == 0]
    if ended and len(ended) < len(evidence.ranks):
        yield listed("diagnosis.anomaly.ended-early", ranks=ended)
    alive = [rank for rank in evidence.ranks if rank.host not in unreachable and not rank.has_ended]
    heard = {rank.rank: moment(evidence, rank.host, rank.last_output_s) for rank in alive}
    written_s = {rank: when.at_s for rank, when in heard.items() if when is not None}
    newest_s = max(written_s.values(), default=0.0)
    quiet = [rank for rank, at_s in written_s.items() if newest_s - at_s > NO_OUTPUT_S]
    if quiet and len(quiet) < len(written_s):
        seconds = newest_s - min(written_s[rank] for rank in quiet)
        yield listed("diagnosis.anomaly.no-output", ranks=quiet, seconds=seconds)
    elif written_s and evidence.now_s - newest_s > NO_OUTPUT_S:
        yield listed("diagnosis.anomaly.no-output-at-all", seconds=evidence.now_s - newest_s)
    steps = {rank.rank: rank.last_step for rank in evidence.ranks if rank.last_step is not None}
    low, newest = min(steps.values(), default=0), max(steps.values(), default=0)
    if newest - low > 1:
        behind = [rank for rank, step in steps.items() if step == low]
        yield listed("diagnosis.anomaly.behind", ranks=behind, step=low, newest=newest)
