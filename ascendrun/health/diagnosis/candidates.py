"""Suspects: ranks with their own reason, grouped by reason; their hosts, the devices, and the kernels' messages."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ascendrun.ascend.signatures import Hit, scan, signature_of, strongest
from ascendrun.ascend.vocabularies import alike, strength_of
from ascendrun.core.jobs.reasons import LOST
from ascendrun.health.diagnosis import evidence as given
from ascendrun.health.diagnosis import result
from ascendrun.health.diagnosis.evidence import Evidence, HostEvidence, Moment, earliest, moment, surely_before
from ascendrun.health.diagnosis.lines.exits import is_signal, signal_of
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.result import Proof, Suspect, normalised, proof_of
from ascendrun.text import listed

PROOFS_LIMIT = 6
AT_ONCE_S = 0.5


def candidates_of(evidence: Evidence, timelines: Sequence[RankTimeline]) -> tuple[Suspect, ...]:
    """Return ranks with their own reason, grouped by reason; then hosts, devices, and kernels."""
    found = _by_reason(timeline.own for timeline in timelines if timeline.own is not None and timeline.has_cause)
    found += [*_of_symptoms(timelines), *_lost_hosts(evidence)]
    return (*found, *_of_hosts(evidence, found))


def _by_reason(suspects: Iterable[Suspect]) -> list[Suspect]:
    """Merge suspects of one reason. Ends without a reason are one only if they came at the same time, within the
    uncertainty of the clocks, or with the same last output."""
    groups: list[list[Suspect]] = []
    for one in sorted(suspects, key=lambda one: one.at_s):
        same = (group for group in groups if (group[0].code, group[0].key) == (one.code, one.key))
        known = [group for group in same if _is_one_end(group[-1], one)]
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
    """Make one of several of one reason: the earliest that left output."""
    ordered = sorted(suspects, key=lambda one: (one.values.get("last") == "-", one.at is None, one.at_s, one.ranks))
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
    several = alike("several-messages")
    failed = (one for one in timelines if one.rank.has_failed and several.isdisjoint(it.kind for it in one.messages))
    shown = [(one, one.own) for one in failed if one.own is not None and one.own.role == result.SYMPTOM]
    free = (own for one, own in shown if one.waited is None and own.strength >= result.SIGN_FROM)
    rows = ((own, signature_of(own.code)) for own in free if own.code not in ("exception", "terminated"))
    signs = (own for own, row in rows if row is None or not row.is_of_others)
    raised = ((one.chain, own) for one, own in shown if "type" in own.values)
    resembling = (own for chain, own in raised if chain is None or not chain.root.collective)
    others = sum(1 for timeline in timelines if timeline.waited is not None)
    few = (one for one in _by_reason(resembling) if 2 * len(one.ranks) < others)
    return [
        *(_unsure(one, max(one.strength, result.CREDIBLE)) for one in _by_reason(signs)),
        *(_unsure(one, strength_of("suffered")) for one in few),
    ]


def _unsure(one: Suspect, strength: int) -> Suspect:
    return replace(one, strength=strength, sure=False, caveats=("only-symptom",))


def strongest_symptom(timelines: Sequence[RankTimeline]) -> Suspect | None:
    """Return the strongest symptom of ranks that were not stopped, a weak one only of ranks that failed by themselves
    and waited for none; None: no rank has one."""
    running = [one for one in timelines if not one.rank.stopped]
    signs = [(one, one.own) for one in running if one.own is not None and one.own.role == result.SYMPTOM]
    strong = [own for _, own in signs if own.strength >= result.SIGN_FROM]
    weak = [own for one, own in signs if (one.rank.has_failed or one.rank.inner) and one.waited is None]
    best = max(_by_reason(strong or weak), key=lambda one: (one.strength, -one.at_s), default=None)
    return None if best is None else _unsure(best, best.strength)


# ---------------------------------------------------------------- facts of the hosts

BEFORE_S, AFTER_S = 1800.0, 10.0
"""Around the end of a host's ranks."""
NEAR_S = 300.0
"""Maximum time from a fact of a host to a rank's message for the same event."""
UNCLEAR_BELOW = 80
FULL_BELOW_BYTES = 64 * 2**20
"""Too little for any checkpoint."""


def _lost_hosts(evidence: Evidence) -> Iterator[Suspect]:
    """Yield the hosts that were lost, with the state transitions for this reason."""
    for host in evidence.hosts:
        for code in filter(None, (LOST.get(host.lost or ""), "supervisor-lost" if host.supervisor_lost else None)):
            moves = [one for one in evidence.events if getattr(one.values.get("reason"), "key", "") == f"reason.{code}"]
            proofs = [Proof(one.message(), None, host.host, at_s=one.at_s) for one in moves if host.host in one.hosts]
            ranks = tuple(rank.rank for rank in evidence.ranks_of(host.host))
            yield Suspect(code, strength_of(code), ranks, (host.host,), proofs=tuple(proofs[:2]))


def _of_hosts(evidence: Evidence, found: Sequence[Suspect]) -> Iterator[Suspect]:
    """Yield what supervisors, kernels and devices report of their hosts near the end: the reason of the ends there that
    have no clear one. Beside a clear reason only what the devices of its ranks report counts."""
    unclear = [one for one in found if one.is_vague or "only-symptom" in one.caveats or is_of_some_device(one)]
    is_open = not any(one.is_credible and one not in unclear for one in found)
    credible = {rank for one in found if one.is_credible and not one.is_vague for rank in one.ranks}
    for host in evidence.hosts:
        here = [one for one in unclear if host.host in one.hosts]
        alarms = [one for one in _alarms(evidence, host) if not credible or credible & {*one.ranks}]
        yield from (_explaining(one, here, evidence, by=1) for one in alarms)
        if is_open and (here or not unclear):
            for one in (*_of_storage(evidence, host), *_of_kernel(evidence, host, here)):
                located = one if one.ranks or len(alarms) != 1 else joined(one, alarms[0], alarms[0].ranks)
                yield _explaining(located, here, evidence, by=2)


def _explaining(fact: Suspect, here: Sequence[Suspect], evidence: Evidence, *, by: int) -> Suspect:
    """Return a fact of a host as the reason of unclear ends there, and so stronger than these."""
    ranks = {rank.rank: rank for rank in evidence.ranks_of(fact.hosts[0])}
    explained = [one for one in here if not fact.ranks or {*fact.ranks} & {*one.ranks}]
    ends = (moment(evidence, fact.hosts[0], ranks[rank].exited_at_s) for rank in fact.ranks)
    return replace(
        fact,
        strength=max([fact.strength, *(one.strength + by for one in explained)]),
        ranks=fact.ranks or tuple(sorted({rank for one in explained for rank in one.ranks} & {*ranks})),
        at=fact.at or earliest([*ends, *(one.at for one in explained)]),
    )


def joined(fact: Suspect, other: Suspect, ranks: Iterable[int]) -> Suspect:
    """Return a fact of a host that names no rank, on those of its ranks that another one names."""
    return replace(fact, ranks=tuple(sorted(ranks)), proofs=(*fact.proofs, *other.proofs)[:PROOFS_LIMIT])


def _of_storage(evidence: Evidence, host: HostEvidence) -> Iterator[Suspect]:
    """Yield what its supervisor could not write, else that its disk was full, which sends no rank a signal. The silence
    of ranks, whose output it took with it, comes after it."""
    here = evidence.ranks_of(host.host)
    ranks = tuple(rank.rank for rank in here if rank.has_failed) or tuple(rank.rank for rank in here)
    for event in (one for one in evidence.events if one.code == "io-error" and host.host in one.hosts):
        known = strongest(scan([(0, os.strerror(getattr(errno, str(event.values.get("errno")), 0)))]))
        if known is not None and is_timely(2 * event.at_s - host.clock.to_head_s(event.at_s), here):
            at, proof = Moment(event.at_s, 0.0, host.host), Proof(event.message(), None, host.host, at_s=event.at_s)
            yield Suspect(known.signature.code, strength_of("kernel"), ranks, (host.host,), at, (proof,), sure=False)
            return
    was_killed = any(is_signal(rank, "from-outside") for rank in here if rank.has_failed)
    if host.disk_free_bytes is not None and host.disk_free_bytes < FULL_BELOW_BYTES and not was_killed:
        proof = Proof(listed("diagnosis.low-disk", free=host.disk_free_bytes), host=host.host)
        yield Suspect("disk-full", strength_of("kernel"), ranks, (host.host,), proofs=(proof,), sure=False)


def _alarms(evidence: Evidence, host: HostEvidence) -> Iterator[Suspect]:
    """Yield its devices that are unhealthy afterwards, except those that no rank used."""
    here = evidence.ranks_of(host.host)
    for fact in host.devices:
        users = [rank for rank in here if rank.device == fact.device]
        if users or all(rank.device is None for rank in here):
            text = listed("device.problem", device=fact.device, problem=fact.problem)
            proof = Proof(text=text, host=host.host, file=fact.file, rank=users[0].rank if users else None)
            ranks, values = tuple(rank.rank for rank in users), {"device": str(fact.device), "problem": fact.problem}
            made = Suspect("device-alarm", strength_of("device-alarm"), ranks, (host.host,), None, (proof,), values)
            yield replace(made, sure=False, caveats=("only-afterwards",))


def is_of_some_device(one: Suspect) -> bool:
    """Return whether it is a runtime code for a fault of the device or driver; other lines may be more exact."""
    row = signature_of(one.code)
    is_unclear = row is not None and row.is_of_node and row.strength < UNCLEAR_BELOW
    return is_unclear and row is not None and row.family in alike("runtimes")


def _of_kernel(evidence: Evidence, host: HostEvidence, here: Sequence[Suspect]) -> Iterator[Suspect]:
    """Yield the kernel's strongest message that may explain all unclear ends here, or that is about the process of a
    rank that did not fail; first those that report how a rank ended."""
    lines, ranks = host.dmesg or (), evidence.ranks_of(host.host)
    timely = [(at, line.text) for at, line in enumerate(lines) if line.at_s is None or is_timely(line.at_s, ranks)]
    facts = []
    for hit in scan(timely):
        row, at = hit.signature, moment(evidence, host.host, lines[hit.line].at_s)
        is_of_silent = any(_names(hit, pid=one.pid) for one in ranks if not one.has_failed)
        is_cause = row.family in alike("of-kernels") and (row.role == result.CAUSE or is_of_silent)
        if is_cause and all(_may_explain(at, one) for one in here):
            by_kernel = (signal.SIGBUS, signal.SIGKILL) if row.code == "memory-corrupted" else ()
            killed = (rank for rank in ranks if signal_of(rank) in by_kernel)
            has_ended = any(rank.has_failed and _names(hit, pid=rank.pid) for rank in killed)
            named = tuple(one.rank for one in ranks if _names(hit, pid=one.pid) or _names(hit, device=one.device))
            strength, proof = strength_of("kernel"), proof_of(evidence, lines[hit.line], host)
            fact = Suspect(row.code, strength, named, (host.host,), at, (proof,), hit.values, sure=False)
            as_ended = replace(fact, strength=max(strength, row.strength), sure=True)
            made = as_ended if has_ended else replace(fact, caveats=("only-kernel",))
            facts.append(((has_ended, row.strength, -hit.line), made))
    yield from [max(facts, key=lambda one: one[0])[1]] if facts else ()


def _names(hit: Hit, **number: int | None) -> bool:
    return any(value is not None and hit.values.get(name) == str(value) for name, value in number.items())


def is_timely(at_s: float, here: Sequence[given.RankEvidence]) -> bool:
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
