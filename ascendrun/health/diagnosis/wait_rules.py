"""Who the others waited for, if no rank reports its own reason: the rules in their order.

Explicit reports come before conclusions from silence, from the order of steps and ends, and from chains of waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Callable

from ascendrun.ascend.peer_messages import CONNECT
from ascendrun.health.diagnosis import wait_reports
from ascendrun.health.diagnosis.candidates import Candidate
from ascendrun.health.diagnosis.evidence import Evidence
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.wait_reports import COUNTED, Table, has_finished, minority

FEW_SHARE = 0.25
"""Ranks without output, and ends of chains, are blamed up to this fraction of all, or if they are entire hosts."""
LAGGING_S = 900.0
LONG_BEFORE_S = 60.0


def blame_waiting(evidence: Evidence, timelines: Sequence[RankTimeline]) -> Candidate | None:
    """Return the first applicable rule's result; None if no rank waited for or lost another, or if unknown which.
    If no rank failed and none has output, an unreachable host is the only evidence."""
    table = Table(evidence, timelines)
    if not table.reports:
        return None if any(timeline.rank.has_failed for timeline in timelines) else blame_unreachable(table)
    return next((found for found in (rule(table) for rule in RULES) if found is not None), None)


# ---------------------------------------------------------------- ranks without output, early, late, or behind


def blame_finished_early(table: Table) -> Candidate | None:
    """Blame ranks that exited 0 while others still waited for them: they had fewer steps."""
    ended = [timeline for timeline in table.timelines if has_finished(timeline.rank)]
    if not ended or not table.suffering or len(ended) >= len(table.timelines):
        return None
    waited_at = [other.waited_at for other in table.suffering if other.waited_at is not None]
    before = [
        timeline.rank.rank
        for timeline in ended
        if timeline.end is None or not any(at.is_before(timeline.end) for at in waited_at)
    ]
    return table.finished_early(before) if before else None


def blame_unreachable(table: Table) -> Candidate | None:
    """Blame unreachable hosts without exit records of their ranks, while others wait for them."""
    hosts = [
        host.host
        for host in table.evidence.hosts
        if host.reachable is False
        and not host.has_ended
        and not any(one.rank.has_ended or one.waited for one in table.timelines if one.rank.host == host.host)
    ]
    missed = table.suffering or table.messages("location")
    if not hosts or len(hosts) >= len(table.evidence.hosts) or (table.reports and not missed):
        return None
    ranks = table.ranks_on(hosts) or sorted(set(range(table.evidence.world_size)) - set(table.by_rank))
    reports = table.waits[:1]
    return table.make("node-unreachable", 58, ranks, reports, hosts=hosts, caveats="no-response", shows_output=True)


def blame_first_loser(table: Table) -> Candidate | None:
    """Blame a rank that lost a connection long before other ranks ended or reported: it did not lose those."""
    first = [
        timeline
        for timeline in table.losing
        if timeline.chain is not None
        and timeline.own is not None
        and timeline.own.code == "exception"
        and all(_is_long_before(timeline, other) for other in table.timelines if other is not timeline)
    ]
    if len(first) != 1 or len(table.timelines) < 3 or first[0].own is None:
        return None
    values, ranks = first[0].own.values, [first[0].rank.rank]
    waits = [one for one in table.waits if one.timeline is first[0]]
    made = table.make("exception", 57, ranks, waits, caveats="only-symptom", values=values, at=first[0].waited_at)
    return replace(made, proofs=first[0].own.proofs)


def _is_long_before(one: RankTimeline, other: RankTimeline) -> bool:
    ends = [at for at in (other.waited_at, other.end) if at is not None]
    return (
        one.waited_at is not None and bool(ends) and all(one.waited_at.is_before(at, by_s=LONG_BEFORE_S) for at in ends)
    )


def blame_quiet(table: Table) -> Candidate | None:
    """Blame, if only some ranks timed out, the others, provided they are few or entire hosts."""
    suffering = {timeline.rank.rank for timeline in table.suffering}
    ranks = {
        timeline.rank.rank
        for timeline in table.timelines
        if timeline.rank.rank not in suffering and not timeline.has_cause and not timeline.rank.has_failed
    }
    if not ranks or not suffering:
        return None
    narrowed = table.most_reported(among=ranks)
    ranks = set(narrowed) or ranks
    hosts = {table.by_rank[rank].rank.host for rank in ranks}
    is_whole = ranks == set(table.ranks_on(hosts))
    is_few = len(ranks) <= max(1, FEW_SHARE * len(table.timelines))
    if not (narrowed or is_few or (is_whole and 2 * len(hosts) <= len({one.rank.host for one in table.timelines}))):
        return None
    is_unseen = all(not table.by_rank[rank].rank.has_ended for rank in ranks)
    is_host = is_whole and is_unseen and len(table.evidence.hosts) > len(hosts)
    code, reports = "node-unreachable" if is_host else "rank-unresponsive", table.naming(ranks) or table.waits[:1]
    return table.make(code, 54, ranks, reports, caveats="no-response", shows_output=True)


def blame_latest(table: Table) -> Candidate | None:
    """Blame the last ranks to time out, if all did, further apart than the timeout: they arrived too late."""
    if len(table.waiting) < len(table.timelines) or len(table.waiting) < 2:
        return None
    times = {timeline.rank.rank: timeline.waited_at for timeline in table.waiting if timeline.waited_at is not None}
    if len(times) < len(table.waiting):
        return None
    first, last = (function(at.at_s for at in times.values()) for function in (min, max))
    error_s = sum(sorted((at.error_s for at in times.values()), reverse=True)[:2])
    connecting = any(timeline.waited == CONNECT for timeline in table.waiting)
    limit_s = table.evidence.connect_timeout_s if connecting else table.evidence.exec_timeout_s
    late = [rank for rank, at in times.items() if last - at.at_s < max(5.0, at.error_s)]
    if last - first - error_s <= limit_s or 2 * len(late) > len(table.timelines):
        return None
    reports = [one for one in table.waits if one.rank in late] + table.waits[:1]
    values = {"spread": f"{last - first:.0f}", "timeout": f"{limit_s:.0f}"}
    return table.make("late-rank", 56, late, reports, values=values)


def blame_sequence(table: Table) -> Candidate | None:
    """Blame ranks that are a collective behind the others, or in a different collective."""
    lagging = table.messages("lagging")
    named = {rank for one in lagging for rank in one.message.ranks}
    if named and 2 * len(named) < len(table.timelines):
        return table.make("collective-not-reached", 56, named, lagging, values=lagging[0].message.values)
    for name in ("index", "seq"):
        found = _behind(table, name)
        if found is not None:
            return found
    of_kinds = (table.tags(), *(table.in_largest_group(name) for name in ("op", "in", "out")))
    outliers = next((few for few in map(minority, of_kinds) if few), ())
    reports = [one for one in table.messages("tag", "sequence") if one.rank in outliers]
    if outliers:
        return table.make("collective-differs", 57, outliers, reports)
    return _behind(table, "completed") or _behind(table, "enqueued")


def _behind(table: Table, name: str) -> Candidate | None:
    """Blame the minority of ranks with the lowest number of this name in the largest group."""
    numbers = {rank: int(text) for rank, text in table.in_largest_group(name).items()}
    lowest = min(numbers.values(), default=0)
    behind = [rank for rank, number in numbers.items() if number == lowest]
    if not behind or 2 * len(behind) >= len(numbers):
        return None
    reports = [one for one in table.messages(*COUNTED) if one.rank in behind]
    values = {"index": str(lowest), "others": str(max(numbers.values()))}
    return table.make("collective-not-reached", 56, behind, reports, values=values)


def blame_lagging(table: Table) -> Candidate | None:
    """Blame ranks that were steps behind, or had no output for long, when the others timed out."""
    if not table.suffering:
        return None
    steps = {one.rank.rank: one.rank.last_step for one in table.timelines if one.rank.last_step is not None}
    if len(steps) > 2 and len(steps) == len(table.timelines):
        ordered = sorted(steps.values())
        middle = ordered[len(ordered) // 2]
        behind = [rank for rank, step in steps.items() if step < middle - 1]
        if behind and 4 * len(behind) <= len(steps):
            return table.make(
                "lagging", 50, behind, table.waits, values={"step": str(ordered[0]), "others": str(middle)}
            )
    quiet_s = {one.rank.rank: one.rank.last_output_s for one in table.timelines if one.rank.last_output_s is not None}
    if len(quiet_s) < 3 or len(quiet_s) < len(table.timelines):
        return None
    middle_s = sorted(quiet_s.values())[len(quiet_s) // 2]
    late = [rank for rank, at_s in quiet_s.items() if middle_s - at_s > LAGGING_S]
    if not late or 4 * len(late) > len(quiet_s):
        return None
    return table.make("lagging", 45, late, table.waits, caveats="by-rule clocks")


# ---------------------------------------------------------------- chains of waiting ranks


def blame_stuck(table: Table) -> Candidate | None:
    """Blame the few ranks that reported themselves stuck, if all others only lost them."""
    reports = table.messages("stuck")
    stuck = {one.rank for one in reports}
    rest = [timeline for timeline in table.timelines if timeline.rank.rank not in stuck]
    if not stuck or 4 * len(stuck) > len(table.timelines) or any(timeline not in table.losing for timeline in rest):
        return None
    return table.make("watchdog-stuck", 46, stuck, reports)


def blame_chain(table: Table) -> Candidate | None:
    """Blame the end of a chain of waiting ranks, which does not wait itself; else blame the cycle."""
    reports = [one for one in table.messages("link", "remote") if one.message.wait is not None]
    edges: dict[int, set[int]] = {}
    for one in reports:
        targets = {*table.named(one.message)[0]} - {one.rank}
        if targets:
            edges.setdefault(one.rank, set()).update(targets)
    if not edges:
        return None
    ends = {target for targets in edges.values() for target in targets} - set(edges)
    if ends and len(ends) <= max(1, FEW_SHARE * len(table.timelines)):
        return table.make("wait-chain", 53, ends, [one for one in reports if set(table.named(one.message)[0]) & ends])
    circle = () if ends else _circle(edges)
    if len(circle) == 2:
        return table.make("link-broken", 52, circle, reports, caveats="network-or-peer")
    return table.make("wait-cycle", 50, circle, reports) if circle else None


def _circle(edges: Mapping[int, set[int]]) -> tuple[int, ...]:
    """Return a cycle if every rank waits for exactly one other; () otherwise: then no rank is blamed."""
    if any(len(targets) != 1 for targets in edges.values()):
        return ()
    path: list[int] = []
    at = min(edges)
    while at in edges and at not in path:
        path.append(at)
        at = next(iter(edges[at]))
    return tuple(path[path.index(at) :]) if at in path else ()


def blame_most_reported(table: Table) -> Candidate | None:
    """Blame the rank or host that is named most, without other evidence."""
    ranks = table.most_reported(among=set(table.by_rank))
    if ranks:
        return table.make("most-reported", 45, ranks, table.naming(set(ranks)))
    reports = table.messages("lost", "link", "timeout")
    hosts = Counter(host for host in (table.named(one.message)[1] for one in reports) if host is not None)
    if sum(hosts.values()) < 2:
        return None
    host, count = hosts.most_common(1)[0]
    outside = [timeline for timeline in table.suffering if timeline.rank.host != host]
    if 3 * count < 2 * sum(hosts.values()) or not outside:
        return None
    naming = [one for one in reports if table.named(one.message)[1] == host]
    return table.make("most-reported", 42, table.ranks_on([host]), naming, hosts=[host])


RULES: tuple[Callable[[Table], Candidate | None], ...] = (
    wait_reports.blame_tls, wait_reports.blame_differs, wait_reports.blame_cqe, wait_reports.blame_location,
    wait_reports.blame_loopback, wait_reports.blame_world_size, wait_reports.blame_missing, blame_finished_early,
    blame_unreachable, blame_first_loser, wait_reports.blame_unreached, wait_reports.blame_completion, blame_quiet,
    blame_latest, blame_sequence, blame_lagging, blame_stuck, blame_chain, blame_most_reported,
)  # fmt: skip
