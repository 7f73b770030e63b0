"""Kernel messages about hardware, as reasons if the ranks' output shows little."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from ascendrun.ascend.signatures import Hit, scan, strongest
from ascendrun.health.diagnosis.candidates import PROOFS_LIMIT, Candidate, is_of_some_device
from ascendrun.health.diagnosis.evidence import Evidence, HostEvidence, RankEvidence
from ascendrun.health.diagnosis.indicators import CAUSE, STRENGTH, proof_of
from ascendrun.health.diagnosis.lines.exits import signal_of
from ascendrun.health.diagnosis.times import moment

KERNEL_FAMILIES = frozenset({"host", "driver", "storage", "network", "limits", "cuda"})
BEFORE_S, AFTER_S = 1800.0, 10.0
"""Around the end of a host's ranks."""
AT_ONCE_S = 1.0
_OF_KERNELS = {"memory-corrupted": (signal.SIGBUS, signal.SIGKILL)}
"""The signals with which a kernel ends a process for this code."""
NEAR_S = 300.0
"""Maximum time from a kernel message to a rank's message for the same event."""


def candidates_of_kernels(evidence: Evidence, found: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates if no rank has a credible reason, or if ranks on the host were only killed, crashed, or have
    an unclear device code."""
    of_ranks = [one for one in found if one not in _alarms(found)]
    weak = [one for one in of_ranks if one.is_vague or "only-symptom" in one.caveats or is_of_some_device(one)]
    if any(one.is_credible and one not in weak for one in of_ranks):
        return []
    hosts = {host for one in weak for host in one.hosts}
    made = [_candidate(evidence, host, weak) for host in evidence.hosts if not hosts or host.host in hosts]
    return [_with_device(one, found) for one in made if one is not None]


def _alarms(found: Sequence[Candidate]) -> list[Candidate]:
    return [one for one in found if "only-afterwards" in one.caveats]


def _with_device(kernel: Candidate, found: Sequence[Candidate]) -> Candidate:
    """Merge it with the only unhealthy device of that host: one reason."""
    there = [one for one in _alarms(found) if one.hosts == kernel.hosts and one.ranks]
    if kernel.ranks or len(there) != 1:
        return kernel
    return replace(
        kernel,
        ranks=there[0].ranks,
        at=kernel.at or there[0].at,
        proofs=(*kernel.proofs, *there[0].proofs)[:PROOFS_LIMIT],
    )


def _candidate(evidence: Evidence, host: HostEvidence, weak: Sequence[Candidate]) -> Candidate | None:
    here = evidence.ranks_of(host.host)
    explained = [one for one in weak if set(one.ranks) & {rank.rank for rank in here}]
    hits = [hit for hit in _hits(evidence, host) if all(_may_explain(evidence, host, hit, one) for one in explained)]
    hit = strongest(hit for hit in hits if _ended(host, here, hit)) or strongest(hits)
    if hit is None:
        return None
    line = (host.dmesg or ())[hit.line]
    named = _named(here, hit)
    joined = tuple(sorted({rank for one in explained for rank in one.ranks} & {rank.rank for rank in here}))
    is_sure = bool(_ended(host, here, hit))
    strength = max([STRENGTH["kernel"], *(one.strength + 2 for one in explained)])
    strength = max(strength, hit.signature.strength) if is_sure else strength
    return Candidate(
        hit.signature.code,
        strength,
        named or joined,
        (host.host,),
        sure=is_sure,
        at=moment(evidence, host.host, line.at_s),
        values=hit.values,
        proofs=(proof_of(evidence, line, host),),
        caveats=() if is_sure else ("only-kernel",),
    )


def _ended(host: HostEvidence, here: Sequence[RankEvidence], hit: Hit) -> tuple[int, ...]:
    """Return the ranks that the kernel reports as ended, by pid, and that ended so at that time."""
    at_s = (host.dmesg or ())[hit.line].at_s
    return tuple(
        rank.rank
        for rank in here
        if str(rank.pid) == hit.values.get("pid")
        and rank.has_failed
        and signal_of(rank) in _OF_KERNELS.get(hit.signature.code, ())
        and (at_s is None or rank.exited_at_s is None or -AT_ONCE_S < rank.exited_at_s - at_s < AFTER_S)
    )


def _hits(evidence: Evidence, host: HostEvidence) -> list[Hit]:
    """Return causes in kernel lines shortly before the end, or before the last output of stopped ranks."""
    lines = host.dmesg or ()
    here = evidence.ranks_of(host.host)
    end_s = max((rank.exited_at_s for rank in here if rank.exited_at_s is not None), default=None)
    outputs_s = [rank.last_output_s for rank in here if rank.last_output_s is not None and not rank.has_failed]
    timely = {
        index
        for index, line in enumerate(lines)
        if line.at_s is None
        or end_s is None
        or -BEFORE_S < line.at_s - end_s < AFTER_S
        or any(-AFTER_S < line.at_s - last_s < NEAR_S for last_s in outputs_s)
    }
    return [
        hit
        for hit in scan((index, line.text) for index, line in enumerate(lines))
        if hit.line in timely and hit.signature.role == CAUSE and hit.signature.family in KERNEL_FAMILIES
    ]


def _may_explain(evidence: Evidence, host: HostEvidence, hit: Hit, one: Candidate) -> bool:
    """Return whether it may explain `one`; a device code ranks below a kernel message only at about the same time."""
    if not is_of_some_device(one) or one.at is None:
        return True
    when = moment(evidence, host.host, (host.dmesg or ())[hit.line].at_s)
    return when is None or -NEAR_S < when.at_s - one.at.at_s < AFTER_S


def _named(here: Sequence[RankEvidence], hit: Hit) -> tuple[int, ...]:
    """Return the ranks whose process or device the line names."""
    pid, device = hit.values.get("pid"), hit.values.get("device")
    return tuple(
        rank.rank for rank in here if str(rank.pid) == pid or (device is not None and str(rank.device) == device)
    )
