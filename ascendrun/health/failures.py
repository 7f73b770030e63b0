"""What a diagnosis means for the job: the failure that the restart policy decides by, and what failed first."""

from __future__ import annotations

from ascendrun.ascend import vocabularies
from ascendrun.ascend.signatures import signature_of
from ascendrun.ascend.vocabularies import alike
from ascendrun.core.jobs.job import Exit
from ascendrun.core.jobs.outcome import exit_reason
from ascendrun.core.jobs.reasons import LOST, FirstFailure, Reason, because
from ascendrun.core.jobs.restart import Failure, Kind
from ascendrun.core.jobs.roles import named_rank
from ascendrun.health.diagnosis import Diagnosis, Evidence
from ascendrun.health.diagnosis.classes import code_value
from ascendrun.health.diagnosis.lines.launchers import expand
from ascendrun.health.diagnosis.result import normalised

REFUSED = 78
"""Exit code of a rank that refuses what it was given, EX_CONFIG of sysexits.h: another attempt is given the same."""


def failure_of(found: Diagnosis, evidence: Evidence) -> Failure:
    """Return the failure that a diagnosis describes, for the restart policy."""
    signature = signature_of(found.code)
    kind, retry = kind_of(found), found.retry
    if any(one.code == REFUSED for one in evidence.ranks if one.rank in found.ranks):
        kind, retry = Kind.USER, "never"
    own = signature is not None and signature.is_of_node
    seen = any(host.devices or host.reachable is False for host in evidence.hosts if host.host in found.hosts)
    grade, print_ = found.confidence.value, fingerprint_of(found)
    return Failure(kind, found.code, found.hosts, found.ranks, grade, retry, own or seen, print_)


def fingerprint_of(found: Diagnosis) -> str:
    """Return what is equal for one exception in several attempts: domain, value, place, and its message without
    numbers, names and paths; "" of a failure without an exception, and of waits and signals."""
    if "type" not in found.values or not found.why or found.domain in ("silent", "outside"):
        return ""
    place = str(found.values.get("where", ""))
    return "|".join((found.domain, found.why[0].key, place, normalised(str(found.values.get("message", "")))))


def kind_of(found: Diagnosis) -> Kind:
    """Return the kind of a failure, by its domain and scope; what comes again wherever it runs is the user's."""
    value, row = code_value(found.code), signature_of(found.code)
    if value is not None and value.kind:
        return Kind(value.kind)
    by_device = row is not None and row.family in {*alike("runtimes"), "signal"}
    told = "" if row is None else "device" if by_device else "other"
    facts = {"domain": found.domain, "scope": found.scope, "retry": found.retry, "row": told}
    return Kind(vocabularies.kind_of(facts))


def first_of(found: Diagnosis, evidence: Evidence) -> FirstFailure:
    """Return what failed first by a diagnosis, as every output names it."""
    return FirstFailure(_reason(found, expand(evidence)), found.confidence.value)


def _reason(found: Diagnosis, evidence: Evidence) -> Reason:
    if found.code in LOST.values():
        return because(found.code, found.hosts, found.ranks)
    if not found.ranks:
        return because("hosts-failed", found.hosts) if found.hosts else because("first-unknown")
    rank = next((one for one in evidence.ranks if (one.rank,) == found.ranks), None)
    named = named_rank(found.ranks, evidence.labels)
    if rank is not None and rank.start_failed is not None:
        return because("rank-start-failed", [rank.host], found.ranks, rank.start_failed, **named)
    if rank is not None and (rank.code or (rank.signal is not None and not rank.stopped)):
        end = exit_reason(rank.rank, rank.host, Exit(rank.code, rank.signal, 0), evidence.labels)
        return because(end.code, found.hosts, found.ranks, **end.values)  # a code is its own, also during a stop
    return because("rank-failed" if len(found.ranks) == 1 else "ranks-failed", found.hosts, found.ranks, **named)
