"""Attempts that did not fail by themselves: still running, ended well, refused, stopped, out of time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ascendrun.core.logs.log_lines import fold_ranks
from ascendrun.core.names import fold_names
from ascendrun.health.diagnosis.evidence import Evidence, RankEvidence
from ascendrun.health.diagnosis.result import Confidence, Diagnosis, Proof
from ascendrun.health.diagnosis.times import moment

SILENT_AFTER_S = 120.0
LIVE = frozenset({"QUEUED", "CHECKING", "STAGING", "STARTING", "RUNNING"})
_BY_CAUSE = {
    "refused": "start-refused",
    "limit": "time-limit",
    "start-timeout": "start-timeout",
    "head-restarted": "head-restarted",
    "user": "stopped-by-user",
    "need": "stage-called-off",
}
_NEEDED = re.compile(r"^not started: (?:stage (?P<stage>\S+) \()?(?P<job>j-[0-9-]+)")
"""As core/jobs/schedule.py says it."""
_RETRY = {"start-refused": "never", "time-limit": "same", "start-timeout": "same", "head-restarted": "same"}


def explain_ending(evidence: Evidence) -> Diagnosis | None:
    """The diagnosis of an attempt that has no failure of its own to be found; None: look for one."""
    failed = [rank for rank in evidence.ranks if rank.has_failed]
    if evidence.state == "SUCCEEDED":
        return _told(evidence, "succeeded", odd=_odd(evidence))
    if evidence.cause is None and evidence.state in LIVE:
        return _live(evidence)
    code = _BY_CAUSE.get(evidence.cause or "")
    if code is None or (failed and code not in ("stopped-by-user", "time-limit")):
        return None
    if code in ("stopped-by-user", "time-limit") and _failed_before(evidence, failed):
        return None
    late = tuple(sorted({host.host for host in evidence.hosts if host.host in evidence.reason}))
    hosts = late if code in ("start-refused", "start-timeout") else ()
    told = _told(evidence, code, hosts=hosts)
    unseen = code in ("stopped-by-user", "time-limit") and any(
        rank.pid is not None and not rank.has_ended for rank in evidence.ranks
    )
    return replace(told, confidence=Confidence.LIKELY, doubts=("not-all-seen",)) if unseen else told


def _failed_before(evidence: Evidence, failed: Sequence[RankEvidence]) -> bool:
    """Ranks of a host end badly by themselves before anybody told that host to stop."""
    for rank in failed:
        stopped_s = evidence.host(rank.host).stopped_at_s
        if stopped_s is None or (rank.exited_at_s is not None and rank.exited_at_s < stopped_s):
            return True
    return False


def _told(evidence: Evidence, code: str, *, hosts: tuple[str, ...] = (), odd: tuple[str, ...] = ()) -> Diagnosis:
    proofs = tuple(
        Proof(text=event.text, at_s=event.at_s)
        for event in evidence.story
        if evidence.reason and evidence.reason in event.text
    )[-1:]
    reason = evidence.reason.replace("nothing was started: ", "").replace("not started: ", "")
    needed = _NEEDED.match(evidence.reason)
    return Diagnosis(
        code=code,
        confidence=Confidence.CERTAIN,
        hosts=hosts,
        at_s=evidence.ended_at_s,
        proofs=proofs,
        values={"reason": reason, "job": evidence.job, "needed": needed["job"] if needed else ""},
        odd=odd,
        retry=_RETRY.get(code, "unknown"),
        missing=evidence.missing,
    )


def _live(evidence: Evidence) -> Diagnosis:
    code = "running" if evidence.state == "RUNNING" else "on-its-way"
    return Diagnosis(
        code=code,
        confidence=Confidence.CERTAIN,
        odd=_odd(evidence),
        missing=evidence.missing,
        values={"state": evidence.state, "reason": evidence.reason, "job": evidence.job},
    )


def _odd(evidence: Evidence) -> tuple[str, ...]:
    """What a person would want to know of a job that has not failed; "name|value|value" as texts/ has their words."""
    odd: list[str] = []
    unreachable_hosts = [host.host for host in evidence.hosts if host.reachable is False]
    if unreachable_hosts and evidence.state == "RUNNING":
        odd.append(f"host-silent|{fold_names(unreachable_hosts)}")
    lingering = [rank.rank for rank in evidence.ranks if rank.lingers]
    if lingering:
        odd.append(f"lingers|{fold_ranks(lingering)}")
    if evidence.state == "RUNNING":
        odd.extend(_odd_ranks(evidence, set(unreachable_hosts)))
    odd.extend(f"slow|{text}" for text in evidence.slow)
    return tuple(odd)


def _odd_ranks(evidence: Evidence, unreachable_hosts: set[str]) -> list[str]:
    odd = []
    ended = [rank.rank for rank in evidence.ranks if rank.code == 0]
    if ended and len(ended) < len(evidence.ranks):
        odd.append(f"ended-early|{fold_ranks(ended)}")
    heard = {}
    for rank in evidence.ranks:
        when = moment(evidence, rank.host, rank.last_output_s)
        if when is not None and rank.host not in unreachable_hosts and not rank.has_ended:
            heard[rank.rank] = when.at_s
    newest = max(heard.values(), default=0.0)
    quiet = [rank for rank, at_s in heard.items() if newest - at_s > SILENT_AFTER_S]
    if quiet and len(quiet) < len(heard):
        odd.append(f"quiet|{fold_ranks(quiet)}|{newest - min(heard[rank] for rank in quiet):.0f}")
    elif heard and evidence.now_s - newest > SILENT_AFTER_S:
        odd.append(f"all-quiet|{evidence.now_s - newest:.0f}")
    steps = {rank.rank: rank.last_step for rank in evidence.ranks if rank.last_step is not None}
    if len(steps) > 1 and max(steps.values()) - min(steps.values()) > 1:
        low = min(steps.values())
        behind = [rank for rank, step in steps.items() if step == low]
        if len(behind) < len(steps):
            odd.append(f"behind|{fold_ranks(behind)}|{low}|{max(steps.values())}")
    return odd
