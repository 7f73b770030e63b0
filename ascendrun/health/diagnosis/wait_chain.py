"""Rules for chains of waiting ranks: the end of a chain, a cycle, a broken link; else the most named rank."""

from __future__ import annotations

from collections import Counter

from ascendrun.health.diagnosis.candidates import Candidate
from ascendrun.health.diagnosis.wait_table import FEW_SHARE, Table, most_reported, naming


def blame_chain(table: Table) -> Candidate | None:
    """Blame the end of a chain of waiting ranks, which does not wait itself; else blame the cycle."""
    edges: dict[int, set[int]] = {}
    for timeline, message in table.messages("link", "remote"):
        if message.wait is None:
            continue
        ranks, _host = table.named(message)
        edges.setdefault(timeline.rank.rank, set()).update(rank for rank in ranks if rank != timeline.rank.rank)
    edges = {rank: targets for rank, targets in edges.items() if targets}
    if not edges:
        return None
    ends = {target for targets in edges.values() for target in targets} - set(edges)
    reports = [one for one in table.messages("link", "remote") if one[1].wait is not None]
    if ends and len(ends) <= max(1, FEW_SHARE * len(table.timelines)):
        return table.make(
            "wait-chain", 53, ends, [one for one in reports if set(table.named(one[1])[0]) & ends], caveats="by-rule"
        )
    circle = _circle(edges)
    if not ends and len(circle) == 2:
        return table.make(
            "link-broken", 52, circle, reports, caveats="network-or-peer", retry="exclude", blames="network"
        )
    if not ends and circle:
        return table.make("wait-cycle", 50, circle, reports, blames="job")
    return None


def _circle(edges: dict[int, set[int]]) -> tuple[int, ...]:
    """Return a cycle if every rank waits for exactly one other; () otherwise: then no rank is blamed."""
    if any(len(targets) != 1 for targets in edges.values()):
        return ()
    path: list[int] = []
    at = min(edges)
    while at in edges and at not in path:
        path.append(at)
        at = next(iter(edges[at]))
    return tuple(path[path.index(at) :]) if at in path else ()


def blame_stuck(table: Table) -> Candidate | None:
    """Blame the few ranks that reported themselves stuck, if all others only lost them."""
    stuck = {timeline.rank.rank for timeline, _ in table.messages("stuck")}
    rest = [timeline for timeline in table.timelines if timeline.rank.rank not in stuck]
    if not stuck or 4 * len(stuck) > len(table.timelines) or any(timeline not in table.losing for timeline in rest):
        return None
    return table.make("watchdog-stuck", 46, stuck, table.messages("stuck"), blames="self")


def blame_most_reported(table: Table) -> Candidate | None:
    """Blame the rank or host that is named most, without other evidence."""
    ranks = most_reported(table, among=set(table.by_rank))
    if ranks:
        return table.make("most-reported", 45, ranks, naming(table, set(ranks)))
    accused = (table.named(message)[1] for _events_of, message in table.messages("lost", "link", "timeout"))
    hosts = Counter(host for host in accused if host is not None)
    total = sum(hosts.values())
    if not hosts or total < 2:
        return None
    host, count = hosts.most_common(1)[0]
    outside = [timeline for timeline in (*table.losing, *table.waiting) if timeline.rank.host != host]
    if 3 * count < 2 * total or not outside:
        return None
    there = [rank.rank for rank in table.evidence.ranks_of(host)]
    reports = [one for one in table.messages("lost", "link", "timeout") if table.named(one[1])[1] == host]
    return table.make("most-reported", 42, there, reports, hosts=[host])
