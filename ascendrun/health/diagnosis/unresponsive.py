"""Rules for ranks without output and for ranks that are early, late, or behind the others."""

from __future__ import annotations

from dataclasses import replace

from ascendrun.health.diagnosis.candidates import Candidate
from ascendrun.health.diagnosis.peers import CONNECT
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.wait_table import (
    FEW_SHARE,
    Table,
    finished_early,
    has_finished,
    minority,
    most_common,
    most_reported,
    naming,
)

LAGGING_S = 900.0
LONG_BEFORE_S = 60.0


def blame_finished_early(table: Table) -> Candidate | None:
    """Blame ranks that exited 0 while others still waited for them: they had fewer steps."""
    ended = [timeline for timeline in table.timelines if has_finished(timeline.rank)]
    suffering = [*table.waiting, *table.losing]
    if not ended or not suffering or len(ended) >= len(table.timelines):
        return None
    before = [
        timeline
        for timeline in ended
        if not any(
            other.waited_at is not None and timeline.end is not None and other.waited_at.is_before(timeline.end)
            for other in suffering
        )
    ]
    return finished_early(table, [timeline.rank.rank for timeline in before]) if before else None


def blame_unreachable(table: Table) -> Candidate | None:
    """Blame unreachable hosts without exit records of their ranks, while others wait for them."""
    hosts = []
    for host in table.evidence.hosts:
        ranks = [table.by_rank[rank.rank] for rank in table.evidence.ranks_of(host.host)]
        quiet = [timeline for timeline in ranks if not timeline.rank.has_ended and timeline.waited is None]
        if host.reachable is False and not host.has_ended and len(quiet) == len(ranks):
            hosts.append(host.host)
    missed = table.waiting or table.losing or table.messages("location")
    if not hosts or len(hosts) >= len(table.evidence.hosts) or (table.reports and not missed):
        return None
    ranks_there = [rank.rank for host in hosts for rank in table.evidence.ranks_of(host)]
    ranks_there = ranks_there or sorted(set(range(table.evidence.world_size)) - set(table.by_rank))
    made = table.make(
        "node-unreachable",
        58,
        ranks_there,
        table.waits[:1],
        hosts=hosts,
        caveats="no-response",
        retry="same",
        blames="node",
    )
    return replace(made, proofs=(*table.last_output(ranks_there), *made.proofs))


def blame_first_loser(table: Table) -> Candidate | None:
    """Blame a rank that lost a connection long before other ranks ended or reported: it did not lose those."""
    first = [
        timeline
        for timeline in table.losing
        if timeline.chain is not None
        and timeline.own is not None
        and timeline.own.code == "exception"
        and timeline.waited_at is not None
        and all(_is_long_before(timeline, other) for other in table.timelines if other is not timeline)
    ]
    if len(first) != 1 or len(table.timelines) < 3 or first[0].own is None:
        return None
    made = table.make(
        "exception",
        57,
        [first[0].rank.rank],
        [one for one in table.waits if one[0] is first[0]],
        caveats="only-symptom",
        values=first[0].own.values,
    )
    return replace(made, at=first[0].waited_at, proofs=first[0].own.proofs)


def _is_long_before(one: RankTimeline, other: RankTimeline) -> bool:
    ends = [at for at in (other.waited_at, other.end) if at is not None]
    return (
        bool(ends) and one.waited_at is not None and all(one.waited_at.is_before(at, by_s=LONG_BEFORE_S) for at in ends)
    )


def blame_quiet(table: Table) -> Candidate | None:
    """Blame, if only some ranks timed out, the others, provided they are few or entire hosts."""
    suffering = {timeline.rank.rank for timeline in (*table.waiting, *table.losing)}
    quiet = [
        timeline
        for timeline in table.timelines
        if timeline.rank.rank not in suffering and not timeline.has_cause and not timeline.rank.has_failed
    ]
    if not quiet or not suffering:
        return None
    ranks = {timeline.rank.rank for timeline in quiet}
    narrowed = most_reported(table, among=ranks)
    if len(quiet) > 1 and narrowed:
        ranks = set(narrowed)
    hosts = table.hosts_of(ranks)
    whole = ranks == {rank.rank for host in hosts for rank in table.evidence.ranks_of(host)}
    few = len(ranks) <= max(1, FEW_SHARE * len(table.timelines))
    if not (narrowed or few or (whole and 2 * len(hosts) <= len({one.rank.host for one in table.timelines}))):
        return None
    unseen = all(not table.by_rank[rank].rank.has_ended for rank in ranks)
    code = "node-unreachable" if whole and unseen and len(table.evidence.hosts) > len(hosts) else "rank-unresponsive"
    made = table.make(code, 54, ranks, naming(table, ranks) or table.waits[:1], caveats="no-response")
    return replace(made, proofs=(*table.last_output(ranks), *made.proofs))


def blame_latest(table: Table) -> Candidate | None:
    """Blame the last ranks to time out, if all did, further apart than the timeout: they arrived too late."""
    if len(table.waiting) < len(table.timelines) or len(table.waiting) < 2:
        return None
    times = [(timeline, timeline.waited_at) for timeline in table.waiting if timeline.waited_at is not None]
    if len(times) < len(table.waiting):
        return None
    first, last = (function(at.at_s for _, at in times) for function in (min, max))
    error_s = sum(sorted((at.error_s for _, at in times), reverse=True)[:2])
    connecting = any(timeline.waited == CONNECT for timeline in table.waiting)
    limit_s = table.evidence.connect_timeout_s if connecting else table.evidence.exec_timeout_s
    if last - first - error_s <= limit_s:
        return None
    late = [timeline.rank.rank for timeline, at in times if last - at.at_s < max(5.0, at.error_s)]
    if 2 * len(late) > len(table.timelines):
        return None
    reports = [one for one in table.waits if one[0].rank.rank in late] + table.waits[:1]
    values = {"spread": f"{last - first:.0f}", "timeout": f"{limit_s:.0f}"}
    return table.make("late-rank", 56, late, reports, retry="same", values=values)


def blame_sequence(table: Table) -> Candidate | None:
    """Blame ranks that are a collective behind the others, or in a different collective."""
    lagging = table.messages("lagging")
    named = {rank for _, message in lagging for rank in message.ranks}
    if named and 2 * len(named) < len(table.timelines):
        return table.make("collective-not-reached", 56, named, lagging, values=lagging[0][1].values)
    groups = table.groups()
    common = most_common(groups.values())
    for kind, name in (("index", "index"), ("sequence", "seq")):
        numbers: dict[int, int] = {}
        for timeline, message in table.messages(kind):
            if groups.get(timeline.rank.rank, common) == common:
                numbers.setdefault(timeline.rank.rank, int(message.values[name]))
        if len(numbers) > 1 and len(set(numbers.values())) > 1:
            lowest = min(numbers.values())
            behind = [rank for rank, number in numbers.items() if number == lowest]
            if 2 * len(behind) < len(numbers):
                reports = [one for one in table.messages(kind) if one[0].rank.rank in behind]
                values = {"index": str(lowest), "others": str(max(numbers.values()))}
                return table.make("collective-not-reached", 56, behind, reports, values=values)
    outliers = minority(table.tags())
    outliers = outliers or minority(
        {
            timeline.rank.rank: message.values["op"]
            for timeline, message in table.messages("sequence")
            if "op" in message.values
        }
    )
    if not outliers:
        return None
    reports = [one for one in table.messages("tag", "sequence") if one[0].rank.rank in outliers]
    return table.make("collective-differs", 57, outliers, reports, retry="never", blames="job")


def blame_lagging(table: Table) -> Candidate | None:
    """Blame ranks that were steps behind, or had no output for long, when the others timed out."""
    if not (table.waiting or table.losing):
        return None
    steps = {
        timeline.rank.rank: timeline.rank.last_step
        for timeline in table.timelines
        if timeline.rank.last_step is not None
    }
    if len(steps) > 2 and len(steps) == len(table.timelines):
        ordered = sorted(steps.values())
        middle = ordered[len(ordered) // 2]
        behind = [rank for rank, step in steps.items() if step < middle - 1]
        if behind and 4 * len(behind) <= len(steps):
            return table.make(
                "lagging", 50, behind, table.waits, values={"step": str(min(ordered)), "others": str(middle)}
            )
    quiet_s = {timeline.rank.rank: timeline.rank.last_output_s for timeline in table.timelines}
    known_s = sorted(at for at in quiet_s.values() if at is not None)
    if len(known_s) < 3 or len(known_s) < len(table.timelines):
        return None
    middle_s = known_s[len(known_s) // 2]
    late = [rank for rank, at in quiet_s.items() if at is not None and middle_s - at > LAGGING_S]
    if not late or 4 * len(late) > len(known_s):
        return None
    return table.make("lagging", 45, late, table.waits, caveats="by-rule clocks", values={})
