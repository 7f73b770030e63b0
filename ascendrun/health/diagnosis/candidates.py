"""Suspects: ranks with their own reason, grouped by reason; their hosts, the devices, and the kernels' messages."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ascendrun.ascend.signatures import Hit, scan, signature_of
from ascendrun.ascend.vocabularies import strength_of
from ascendrun.core.events import Event
from ascendrun.health.diagnosis.evidence import (
    Evidence,
    HostEvidence,
    Moment,
    RankEvidence,
    earliest,
    moment,
    surely_before,
)
from ascendrun.health.diagnosis.lines.exits import signal_of
from ascendrun.health.diagnosis.lines.rank_lines import OF_SEVERAL
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.result import (
    CAUSE,
    CREDIBLE,
    RUNTIMES,
    SIGN_FROM,
    SYMPTOM,
    Proof,
    Suspect,
    normalised,
    proof_of,
)
from ascendrun.text import listed

PROOFS_LIMIT = 6
AT_ONCE_S = 0.5


def candidates_of(evidence: Evidence, timelines: Sequence[RankTimeline]) -> tuple[Suspect, ...]:
    """Return ranks with their own reason, grouped by reason; then hosts, devices, and kernels."""
    found = _by_reason(timeline.own for timeline in timelines if timeline.own is not None and timeline.has_cause)
    found += _of_symptoms(timelines)
    hosts = [one for host in evidence.hosts for one in _of_host(evidence, host, found)]
    return (*found, *hosts, *_of_devices(evidence, timelines, found), *_of_kernels(evidence, [*found, *hosts]))


def _by_reason(suspects: Iterable[Suspect]) -> list[Suspect]:
    """Merge suspects of one reason. Ends without a reason are one only if they came at the same time, within the
    uncertainty of the clocks, or with the same last output."""
    groups: list[list[Suspect]] = []
    for one in sorted(suspects, key=lambda one: one.at.at_s if one.at else 0.0):
        known = [group for group in groups if group[0].sameness == one.sameness and _is_one_end(group[-1], one)]
        if known:
            known[0].append(one)
        else:
            groups.append([one])
    return [merged(group) for group in groups]


def _is_one_end(one: Suspect, other: Suspect) -> bool:
    last = {normalised(str(each.values.get("last", "-"))) for each in (one, other)}
    is_same = len(last) == 1 and last != {"-"}
    return not one.is_vague or is_same or not surely_before(one.at, other.at, by_s=AT_ONCE_S)


def merged(suspects: Sequence[Suspect]) -> Suspect:
    """Make one of several of one reason."""
    ordered = sorted(suspects, key=lambda one: (one.at is None, one.at.at_s if one.at else 0.0, one.ranks))
    return replace(
        ordered[0],
        strength=max(one.strength for one in suspects),
        ranks=tuple(sorted({rank for one in suspects for rank in one.ranks})),
        hosts=tuple(sorted({host for one in suspects for host in one.hosts})),
        at=earliest(one.at for one in suspects),
        proofs=tuple(proof for one in ordered[:2] for proof in one.proofs)[:PROOFS_LIMIT],
        sure=any(one.sure for one in suspects),
        is_vague=all(one.is_vague for one in suspects),
    )


def _of_symptoms(timelines: Sequence[RankTimeline]) -> list[Suspect]:
    """Return ranks that failed by themselves with a symptom: their output shows where, not why. Those whose messages
    the rules evaluate with those of others are not among them.

    One may not have waited for others. Or its exception resembles waiting (a download, a lock), it is on few ranks, and
    the others lost them.
    """
    signs: list[Suspect] = []
    resembling: list[Suspect] = []
    for timeline, own in with_symptom(timelines):
        if not timeline.rank.has_failed or any(message.kind in OF_SEVERAL for message in timeline.messages):
            continue
        row = signature_of(own.code)
        is_of_others = row is not None and row.blames in ("peer", "network")
        is_other = is_of_others or own.code in ("exception", "terminated") or own.strength < SIGN_FROM
        if timeline.waited is None and not is_other:
            signs.append(own)
        is_collective = timeline.chain is not None and timeline.chain.root.collective
        if "type" in own.values and not is_collective:
            resembling.append(own)
    others = sum(1 for timeline in timelines if timeline.waited is not None)
    few = (one for one in _by_reason(resembling) if 2 * len(one.ranks) < others)
    return [
        *(_unsure(one, max(one.strength, CREDIBLE)) for one in _by_reason(signs)),
        *(_unsure(one, strength_of("suffered")) for one in few),
    ]


def with_symptom(timelines: Sequence[RankTimeline]) -> Iterator[tuple[RankTimeline, Suspect]]:
    for timeline in timelines:
        if timeline.own is not None and timeline.own.role == SYMPTOM:
            yield timeline, timeline.own


def _unsure(one: Suspect, strength: int) -> Suspect:
    return replace(one, strength=strength, sure=False, caveats=("only-symptom",))


def strongest_symptom(timelines: Sequence[RankTimeline]) -> Suspect | None:
    """Return the strongest symptom of ranks that were not stopped; None: no rank has one."""
    running = (own for timeline, own in with_symptom(timelines) if not timeline.rank.stopped)
    found = _by_reason(own for own in running if own.strength >= SIGN_FROM)
    best = max(found, key=lambda one: (one.strength, -(one.at.at_s if one.at else 0.0)), default=None)
    return None if best is None else _unsure(best, best.strength)


# ---------------------------------------------------------------- hosts and devices

_OF_ERRNO = {
    "ENOSPC": "disk-full",
    "EDQUOT": "quota-exceeded",
    "EROFS": "read-only-disk",
    "EIO": "io-error",
    "ESTALE": "stale-file-handle",
}
"""Codes of the catalogue for errors that a supervisor met in the attempt's directory."""
_LOST = {"rebooted": "node-rebooted", "directory-gone": "node-directory-gone"}


def _of_host(evidence: Evidence, host: HostEvidence, found: Sequence[Suspect]) -> list[Suspect]:
    """Return what is known of the host itself. What its supervisor could not write precedes the silence of its ranks,
    whose output it took with it; not a reason of their own."""
    here = evidence.ranks_of(host.host)
    ranks = tuple(rank.rank for rank in here)
    made = []
    for code in (_LOST.get(host.lost or ""), "supervisor-lost" if host.supervisor_lost else None):
        if code is not None:  # with the state transitions with this reason
            moves = [one for one in evidence.events if getattr(one.values.get("reason"), "key", "") == f"reason.{code}"]
            proofs = tuple(_proof_of(one, host) for one in moves if host.host in one.hosts)
            made.append(Suspect(code, strength_of(code), ranks, (host.host,), proofs=proofs[:2]))
    if any(one.is_credible and not (one.is_vague and set(one.ranks).isdisjoint(ranks)) for one in found):
        return made
    for event in evidence.events:
        known = _OF_ERRNO.get(str(event.values.get("errno"))) if event.code == "io-error" else None
        node_s = 2 * event.at_s - host.clock.to_head_s(event.at_s)
        if known is not None and host.host in event.hosts and is_timely(node_s, here):
            failed = tuple(rank.rank for rank in here if rank.has_failed)
            at, proof = Moment(event.at_s, 0.0, host.host), _proof_of(event, host)
            strength = strength_of("kernel")
            return [*made, Suspect(known, strength, failed or ranks, (host.host,), at, (proof,), sure=False)]
    return made


def _proof_of(event: Event, host: HostEvidence) -> Proof:
    return Proof(text=event.message(), host=host.host, at_s=event.at_s)


def _of_devices(evidence: Evidence, timelines: Sequence[RankTimeline], found: Sequence[Suspect]) -> list[Suspect]:
    """Return devices that are unhealthy afterwards, if nothing else is credible or the failed rank used them."""
    by_rank = {timeline.rank.rank: timeline for timeline in timelines}
    credible = {rank for one in found if one.is_credible and not one.is_vague for rank in one.ranks}
    alarms = []
    for host, fact in [(one, fact) for one in evidence.hosts for fact in one.devices]:
        here = evidence.ranks_of(host.host)
        ranks = tuple(rank.rank for rank in here if rank.device == fact.device and rank.rank in by_rank)
        is_unused = not ranks and any(rank.device is not None for rank in here)
        if is_unused or (credible and not credible & set(ranks)):
            continue
        text = listed("device.problem", device=fact.device, problem=fact.problem)
        proof = Proof(text=text, host=host.host, file=fact.file, rank=ranks[0] if ranks else None)
        explained = [one for one in found if is_of_some_device(one) and set(ranks) & set(one.ranks)]
        strength = max([strength_of("device-alarm"), *(one.strength + 1 for one in explained)])
        when = earliest([*(by_rank[rank].end for rank in ranks), *(one.at for one in explained)])
        values = {"device": str(fact.device), "problem": fact.problem}
        made = Suspect("device-alarm", strength, ranks, (host.host,), when, (proof,), values, sure=False)
        alarms.append(replace(made, caveats=("only-afterwards",)))
    return alarms


UNCLEAR_BELOW = 80


def is_of_some_device(one: Suspect) -> bool:
    """Return whether it is a runtime code for a fault of the device or driver; other lines may be more exact."""
    row = signature_of(one.code)
    is_cause = row is not None and row.role == CAUSE and row.blames == "node" and row.strength < UNCLEAR_BELOW
    return is_cause and row is not None and row.family in RUNTIMES


# ---------------------------------------------------------------- kernels

KERNEL_FAMILIES = frozenset({"host", "driver", "storage", "network", "limits", "cuda"})
BEFORE_S, AFTER_S = 1800.0, 10.0
"""Around the end of a host's ranks."""
_OF_KERNELS = {"memory-corrupted": (signal.SIGBUS, signal.SIGKILL)}
"""The signals with which a kernel ends a process for this code."""
NEAR_S = 300.0
"""Maximum time from a kernel message to a rank's message for the same event."""


def _of_kernels(evidence: Evidence, found: Sequence[Suspect]) -> list[Suspect]:
    """Return suspects if no rank has a credible reason, or if ranks on the host were only killed, crashed, or have an
    unclear device code."""
    weak = [one for one in found if one.is_vague or "only-symptom" in one.caveats or is_of_some_device(one)]
    if any(one.is_credible and one not in weak for one in found):
        return []
    hosts = {host for one in weak for host in one.hosts}
    made = [_of_kernel(evidence, host, weak) for host in evidence.hosts if not hosts or host.host in hosts]
    return [one for one in made if one is not None]


def _of_kernel(evidence: Evidence, host: HostEvidence, weak: Sequence[Suspect]) -> Suspect | None:
    """Return the strongest message shortly before the end of the ranks that may explain all weak reasons here, or that
    is about the process of a rank that did not fail."""
    lines, here = host.dmesg or (), evidence.ranks_of(host.host)
    explained = [one for one in weak if set(one.ranks) & {rank.rank for rank in here}]
    timely = [(at, line.text) for at, line in enumerate(lines) if line.at_s is None or is_timely(line.at_s, here)]
    hits = []
    for hit in scan(timely):
        when = moment(evidence, host.host, lines[hit.line].at_s)
        is_of_silent = any(_names(hit, pid=one.pid) for one in here if not one.has_failed)
        is_cause = hit.signature.family in KERNEL_FAMILIES and (hit.signature.role == CAUSE or is_of_silent)
        if is_cause and all(_may_explain(when, one) for one in explained):
            hits.append(hit)
    ended = [hit for hit in hits if any(_ended(rank, hit) for rank in here)]
    if not hits:
        return None
    hit = max(ended or hits, key=lambda hit: (hit.signature.strength, -hit.line))
    named = tuple(rank.rank for rank in here if _names(hit, pid=rank.pid) or _names(hit, device=rank.device))
    joined = tuple(sorted({rank for one in explained for rank in one.ranks} & {rank.rank for rank in here}))
    strength = max([strength_of("kernel"), *(one.strength + 2 for one in explained)])
    return Suspect(
        hit.signature.code,
        max(strength, hit.signature.strength) if ended else strength,
        named or joined,
        (host.host,),
        sure=bool(ended),
        at=moment(evidence, host.host, lines[hit.line].at_s),
        values=hit.values,
        proofs=(proof_of(evidence, lines[hit.line], host),),
        caveats=() if ended else ("only-kernel",),
    )


def _names(hit: Hit, **number: int | None) -> bool:
    return any(value is not None and hit.values.get(name) == str(value) for name, value in number.items())


def _ended(rank: RankEvidence, hit: Hit) -> bool:
    """Return whether the kernel reports the rank as ended, by pid, and it ended so."""
    return rank.has_failed and signal_of(rank) in _OF_KERNELS.get(hit.signature.code, ()) and _names(hit, pid=rank.pid)


def is_timely(at_s: float, here: Sequence[RankEvidence]) -> bool:
    """Return whether this time of their host is shortly before the end of the ranks, or near their last output."""
    end_s = max((rank.exited_at_s for rank in here if rank.exited_at_s is not None), default=None)
    outputs_s = [rank.last_output_s for rank in here if rank.last_output_s is not None and not rank.has_failed]
    return (
        end_s is None
        or -BEFORE_S < at_s - end_s < AFTER_S
        or any(-AFTER_S < at_s - last_s < NEAR_S for last_s in outputs_s)
    )


def _may_explain(when: Moment | None, one: Suspect) -> bool:
    """Return whether a message of this time may explain it; a device code only at about the same time."""
    if not is_of_some_device(one) or one.at is None or when is None:
        return True
    return -NEAR_S < when.at_s - one.at.at_s < AFTER_S
