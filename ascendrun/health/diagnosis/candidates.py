"""Candidates for the first failure, with reasons, from the ranks' timelines, hosts, devices and kernel logs."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from ascendrun.ascend.signatures import Hit, scan, signature_of, strongest
from ascendrun.core.dataclass import dataclass
from ascendrun.core.events import Event
from ascendrun.health.diagnosis import evidence as given
from ascendrun.health.diagnosis import result
from ascendrun.health.diagnosis.lines.exits import signal_of
from ascendrun.health.diagnosis.lines.rank_lines import OF_SEVERAL
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.text import Rendered, Text

PROOFS_LIMIT = 6
AT_ONCE_S = 0.5


@dataclass(frozen=True)
class Candidate:
    """A possible first failure. `ranks`: with this reason; `at`: their earliest time. `sure`: the reason is a fact.
    `caveats`: why it may be wrong. `is_vague`: the kind of end is known, its reason is not."""

    code: str
    strength: int
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    at: given.Moment | None = None
    proofs: tuple[result.Proof, ...] = ()
    values: Mapping[str, str | Rendered] = field(default_factory=dict)
    sure: bool = True
    is_vague: bool = False
    caveats: tuple[str, ...] = ()

    @property
    def is_credible(self) -> bool:
        return self.strength >= result.CREDIBLE


def candidates_of(evidence: given.Evidence, timelines: Sequence[RankTimeline]) -> tuple[Candidate, ...]:
    """Return ranks with their own reason, grouped by reason; then hosts and devices."""
    causes = [timeline.own for timeline in timelines if timeline.own is not None and timeline.has_cause]
    found = _by_reason(indicator for indicator in causes if not indicator.is_vague)
    found += [make_candidate(group) for group in _together(indicator for indicator in causes if indicator.is_vague)]
    found += _of_symptoms(timelines)
    hosts = [one for host in evidence.hosts for one in _of_host(evidence, host, found)]
    return (*found, *hosts, *_of_devices(evidence, timelines, found))


def _by_reason(indicators: Iterable[result.Indicator]) -> list[Candidate]:
    groups: dict[str, list[result.Indicator]] = {}
    for indicator in indicators:
        groups.setdefault(indicator.sameness, []).append(indicator)
    return [make_candidate(group) for group in groups.values()]


def _together(ends: Iterable[result.Indicator]) -> list[list[result.Indicator]]:
    """Group ends without a reason: at the same time, within the uncertainty of the clocks, or with the same last
    output."""
    groups: list[list[result.Indicator]] = []
    for end in sorted(ends, key=lambda one: (one.sameness, one.host, one.at.at_s if one.at else 0.0)):
        known = next((group for group in groups if _is_one_end(group[-1], end)), None)
        if known is not None:
            known.append(end)
        else:
            groups.append([end])
    return groups


def _is_one_end(one: result.Indicator, other: result.Indicator) -> bool:
    if one.sameness != other.sameness:
        return False
    messages = {result.normalised(str(indicator.values.get("last", "-"))) for indicator in (one, other)}
    if len(messages) == 1 and messages != {"-"}:
        return True
    if one.at is None or other.at is None:
        return False
    return not given.surely_before(one.at, other.at, by_s=AT_ONCE_S) and not given.surely_before(
        other.at, one.at, by_s=AT_ONCE_S
    )


def _of_symptoms(timelines: Sequence[RankTimeline]) -> list[Candidate]:
    """Return ranks that failed by themselves with a symptom: their output shows where, not why. Those whose messages
    the rules evaluate with those of others are not among them.

    One may not have waited for others. Or its exception resembles waiting (a download, a lock), it is on few ranks, and
    the others lost them.
    """
    signs: list[result.Indicator] = []
    resembling: list[result.Indicator] = []
    for timeline, own in with_symptom(timelines):
        if not timeline.rank.has_failed or any(message.kind in OF_SEVERAL for message in timeline.messages):
            continue
        row = signature_of(own.code)
        is_of_others = row is not None and row.blames in ("peer", "network")
        is_other = is_of_others or own.code in ("exception", "terminated") or own.strength < result.SIGN_FROM
        if timeline.waited is None and not is_other:
            signs.append(own)
        is_collective = timeline.chain is not None and timeline.chain.root.collective
        if "type" in own.values and not is_collective and {one.kind for one in timeline.waits} <= {"suffered"}:
            resembling.append(own)
    others = sum(1 for timeline in timelines if timeline.waited is not None)
    few = (one for one in _by_reason(resembling) if 2 * len(one.ranks) < others)
    return [
        *(_unsure(one, max(one.strength, result.CREDIBLE)) for one in _by_reason(signs)),
        *(_unsure(one, result.STRENGTH["suffered"]) for one in few),
    ]


def with_symptom(timelines: Sequence[RankTimeline]) -> Iterator[tuple[RankTimeline, result.Indicator]]:
    for timeline in timelines:
        if timeline.own is not None and timeline.own.role == result.SYMPTOM:
            yield timeline, timeline.own


def _unsure(one: Candidate, strength: int) -> Candidate:
    return replace(one, strength=strength, sure=False, caveats=("only-symptom",))


def strongest_symptom(timelines: Sequence[RankTimeline]) -> Candidate | None:
    """Return the strongest symptom of ranks that were not stopped; None: no rank has one."""
    found = _by_reason(
        own
        for timeline, own in with_symptom(timelines)
        if not timeline.rank.stopped and own.strength >= result.SIGN_FROM
    )
    best = max(found, key=lambda one: (one.strength, -(one.at.at_s if one.at else 0.0)), default=None)
    return None if best is None else _unsure(best, best.strength)


def make_candidate(indicators: Sequence[result.Indicator]) -> Candidate:
    """Make a candidate from observations of one reason, of one or many ranks."""
    ordered = sorted(indicators, key=lambda one: (one.at is None, one.at.at_s if one.at else 0.0, one.rank or 0))
    first = ordered[0]
    return Candidate(
        code=first.code,
        strength=max(indicator.strength for indicator in indicators),
        ranks=tuple(sorted({indicator.rank for indicator in indicators})),
        hosts=tuple(sorted({indicator.host for indicator in indicators})),
        at=given.earliest(indicator.at for indicator in indicators),
        proofs=tuple(proof for indicator in ordered[:2] for proof in indicator.proofs)[:PROOFS_LIMIT],
        values=first.values,
        sure=any(indicator.sure for indicator in indicators),
        is_vague=all(indicator.is_vague for indicator in indicators),
    )


_OF_ERRNO = {
    "ENOSPC": "disk-full",
    "EDQUOT": "quota-exceeded",
    "EROFS": "read-only-disk",
    "EIO": "io-error",
    "ESTALE": "stale-file-handle",
}
"""Codes of the catalogue for errors that a supervisor met in the attempt's directory."""


def _of_host(evidence: given.Evidence, host: given.HostEvidence, found: Sequence[Candidate]) -> list[Candidate]:
    """Return what is known of the host itself. What its supervisor could not write precedes the silence of its ranks,
    whose output it took with it; not a reason of their own."""
    here = evidence.ranks_of(host.host)
    ranks = tuple(rank.rank for rank in here)
    lost = {"rebooted": "node-rebooted", "directory-gone": "node-directory-gone"}.get(host.lost or "")
    codes = [code for code in (lost, "supervisor-lost" if host.supervisor_lost else None) if code is not None]
    made = []
    for code in codes:  # with the state transitions with this reason
        moves = [one for one in evidence.events if getattr(one.values.get("reason"), "key", "") == f"reason.{code}"]
        proofs = tuple(_proof_of(one, host) for one in moves if host.host in one.hosts)
        made.append(Candidate(code, result.STRENGTH[code], ranks, (host.host,), proofs=proofs[:2]))
    if any(one.is_credible and not (one.is_vague and set(one.ranks).isdisjoint(ranks)) for one in found):
        return made
    for event in evidence.events:
        known = _OF_ERRNO.get(str(event.values.get("errno"))) if event.code == "io-error" else None
        node_s = 2 * event.at_s - host.clock.to_head_s(event.at_s)
        if known is not None and host.host in event.hosts and is_timely(node_s, here):
            failed = tuple(rank.rank for rank in here if rank.has_failed)
            at, proof = given.Moment(event.at_s, 0.0, host.host), _proof_of(event, host)
            strength = result.STRENGTH["kernel"]
            return [*made, Candidate(known, strength, failed or ranks, (host.host,), at, (proof,), sure=False)]
    return made


def _proof_of(event: Event, host: given.HostEvidence) -> result.Proof:
    return result.Proof(text=event.message(), host=host.host, at_s=event.at_s)


def _of_devices(
    evidence: given.Evidence, timelines: Sequence[RankTimeline], found: Sequence[Candidate]
) -> list[Candidate]:
    """Return devices that are unhealthy afterwards, if nothing else is credible or the failed rank used them."""
    by_rank = {timeline.rank.rank: timeline for timeline in timelines}
    credible = {rank for one in found if one.is_credible and not one.is_vague for rank in one.ranks}
    unclear = {rank: one for one in found if is_of_some_device(one) for rank in one.ranks}
    alarms = []
    for host, fact in [(one, fact) for one in evidence.hosts for fact in one.devices]:
        here = evidence.ranks_of(host.host)
        ranks = tuple(rank.rank for rank in here if rank.device == fact.device)
        ended = [by_rank[rank] for rank in ranks if rank in by_rank]
        is_unused = not ranks and any(rank.device is not None for rank in here)
        if is_unused or (credible and not credible & set(ranks)):
            continue
        if ranks and not credible and not any(one.is_over for one in ended):
            continue
        text = Text("device.problem", "device {device}: {problem}", device=fact.device, problem=fact.problem)
        proof = result.Proof(text=text, host=host.host, file=fact.file, rank=ranks[0] if ranks else None)
        explained = [unclear[rank] for rank in ranks if rank in unclear]
        strength = max([result.STRENGTH["device-alarm"], *(one.strength + 1 for one in explained)])
        when = given.earliest([*(timeline.end for timeline in ended), *(one.at for one in explained)])
        values = {"device": str(fact.device), "problem": fact.problem}
        made = Candidate("device-alarm", strength, ranks, (host.host,), when, (proof,), values, sure=False)
        alarms.append(replace(made, caveats=("only-afterwards",)))
    return alarms


UNCLEAR_BELOW = 80


def is_of_some_device(one: Candidate) -> bool:
    """Return whether it is a runtime code for a fault of the device or driver; other lines may be more exact."""
    row = signature_of(one.code)
    return (
        row is not None
        and row.role == result.CAUSE
        and row.blames == "node"
        and row.family in result.RUNTIMES
        and row.strength < UNCLEAR_BELOW
    )


KERNEL_FAMILIES = frozenset({"host", "driver", "storage", "network", "limits", "cuda"})
BEFORE_S, AFTER_S = 1800.0, 10.0
"""Around the end of a host's ranks."""
KILLED_AT_ONCE_S = 1.0
_OF_KERNELS = {"memory-corrupted": (signal.SIGBUS, signal.SIGKILL)}
"""The signals with which a kernel ends a process for this code."""
NEAR_S = 300.0
"""Maximum time from a kernel message to a rank's message for the same event."""


def candidates_of_kernels(evidence: given.Evidence, found: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates if no rank has a credible reason, or if ranks on the host were only killed, crashed, or have
    an unclear device code."""
    alarms = [one for one in found if "only-afterwards" in one.caveats]
    of_ranks = [one for one in found if "only-afterwards" not in one.caveats]
    weak = [one for one in of_ranks if one.is_vague or "only-symptom" in one.caveats or is_of_some_device(one)]
    if any(one.is_credible and one not in weak for one in of_ranks):
        return []
    hosts = {host for one in weak for host in one.hosts}
    made = [_of_kernel(evidence, host, weak) for host in evidence.hosts if not hosts or host.host in hosts]
    return [_with_device(one, alarms) for one in made if one is not None]


def _with_device(kernel: Candidate, alarms: Sequence[Candidate]) -> Candidate:
    """Merge it with the only unhealthy device of that host: one reason."""
    there = [one for one in alarms if one.hosts == kernel.hosts and one.ranks]
    if kernel.ranks or len(there) != 1:
        return kernel
    proofs = (*kernel.proofs, *there[0].proofs)[:PROOFS_LIMIT]
    return replace(kernel, ranks=there[0].ranks, at=kernel.at or there[0].at, proofs=proofs)


def _of_kernel(evidence: given.Evidence, host: given.HostEvidence, weak: Sequence[Candidate]) -> Candidate | None:
    lines, here = host.dmesg or (), evidence.ranks_of(host.host)
    explained = [one for one in weak if set(one.ranks) & {rank.rank for rank in here}]
    hits = [hit for hit in _hits(lines, here) if all(_may_explain(evidence, host, hit, one) for one in explained)]
    ended = [hit for hit in hits if any(_ended(rank, hit, lines[hit.line].at_s) for rank in here)]
    hit = strongest(ended or hits)
    if hit is None:
        return None
    named = tuple(rank.rank for rank in here if _names(hit, pid=rank.pid) or _names(hit, device=rank.device))
    joined = tuple(sorted({rank for one in explained for rank in one.ranks} & {rank.rank for rank in here}))
    strength = max([result.STRENGTH["kernel"], *(one.strength + 2 for one in explained)])
    return Candidate(
        hit.signature.code,
        max(strength, hit.signature.strength) if ended else strength,
        named or joined,
        (host.host,),
        sure=bool(ended),
        at=given.moment(evidence, host.host, lines[hit.line].at_s),
        values=hit.values,
        proofs=(result.proof_of(evidence, lines[hit.line], host),),
        caveats=() if ended else ("only-kernel",),
    )


def _names(hit: Hit, **number: int | None) -> bool:
    return any(value is not None and hit.values.get(name) == str(value) for name, value in number.items())


def _ended(rank: given.RankEvidence, hit: Hit, at_s: float | None) -> bool:
    """Return whether the kernel reports the rank as ended, by pid, and it ended so at that time."""
    is_end = rank.has_failed and signal_of(rank) in _OF_KERNELS.get(hit.signature.code, ())
    if not is_end or not _names(hit, pid=rank.pid):
        return False
    return at_s is None or rank.exited_at_s is None or -KILLED_AT_ONCE_S < rank.exited_at_s - at_s < AFTER_S


def _hits(lines: Sequence[given.Line], here: Sequence[given.RankEvidence]) -> list[Hit]:
    """Return causes in kernel lines shortly before the end, or before the last output of stopped ranks, and all that
    the kernel says about the process of a rank that did not fail."""
    timely = [(at, line.text) for at, line in enumerate(lines) if line.at_s is None or is_timely(line.at_s, here)]
    return [
        hit
        for hit in scan(timely)
        if hit.signature.family in KERNEL_FAMILIES
        and (hit.signature.role == result.CAUSE or any(_names(hit, pid=one.pid) for one in here if not one.has_failed))
    ]


def is_timely(at_s: float, here: Sequence[given.RankEvidence]) -> bool:
    """Return whether this time of their host is shortly before the end of the ranks, or near their last output."""
    end_s = max((rank.exited_at_s for rank in here if rank.exited_at_s is not None), default=None)
    outputs_s = [rank.last_output_s for rank in here if rank.last_output_s is not None and not rank.has_failed]
    return (
        end_s is None
        or -BEFORE_S < at_s - end_s < AFTER_S
        or any(-AFTER_S < at_s - last_s < NEAR_S for last_s in outputs_s)
    )


def _may_explain(evidence: given.Evidence, host: given.HostEvidence, hit: Hit, one: Candidate) -> bool:
    """Return whether it may explain `one`; a device code ranks below a kernel message only at about the same time."""
    when = given.moment(evidence, host.host, (host.dmesg or ())[hit.line].at_s)
    if not is_of_some_device(one) or one.at is None or when is None:
        return True
    return -NEAR_S < when.at_s - one.at.at_s < AFTER_S
