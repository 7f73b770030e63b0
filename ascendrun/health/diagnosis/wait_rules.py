"""Who the others waited for, if no rank reports its own reason: the rules in their order, on the edges between ranks.

Explicit reports come before conclusions from silence, from the order of steps and ends, and from chains of waiting.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Callable

from ascendrun.ascend.peer_messages import CONNECT, LOST
from ascendrun.health.diagnosis.candidates import Candidate
from ascendrun.health.diagnosis.edges import COUNTED, Edge, Edges, minority
from ascendrun.health.diagnosis.evidence import Evidence, earliest
from ascendrun.health.diagnosis.lines.launchers import LAUNCHERS
from ascendrun.health.diagnosis.lines.line_kinds import is_loopback
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.text.format import fold_hosts

LAGGING_S = 900.0
LONG_BEFORE_S = 60.0


def blame_waiting(evidence: Evidence, timelines: Sequence[RankTimeline]) -> Candidate | None:
    """Return the first applicable rule's result; None if no rank waited for or lost another, or if unknown which.
    If no rank failed and none has output, an unreachable host is the only evidence."""
    edges = Edges(evidence, timelines)
    if not edges.all:
        return None if any(timeline.rank.has_failed for timeline in timelines) else blame_unreachable(edges)
    return next((found for found in (rule(edges) for rule in RULES) if found is not None), None)


# ---------------------------------------------------------------- reports of the communication library

_TLS_ENTRY = re.compile(r"([0-9a-fA-F.:]+)/(\d+)")
_CULPRITS = (("hccl-culprit-cqe", "cqe"), ("hccl-culprit-stuck", "stuck"), ("hccl-culprit-lost", ""))
"""Broken links first, then stuck ranks, then lost ranks: the code, and a word of the type."""
_DIFFERS = {"differs": "EI0005", "mismatch": "collectives-mismatch", "models": "models-differ"}


def blame_tls(edges: Edges) -> Candidate | None:
    """Blame the smaller group if the TLS switch differs."""
    reports, links = edges.of("tls"), edges.of("link")
    on, off = (
        {entry for one in reports for entry in _TLS_ENTRY.findall(one.message.values.get(side, ""))}
        for side in ("on", "off")
    )
    rows: dict[str, set[int]] = {}
    for one in links:
        if one.message.values.get("tls"):
            rows.setdefault(one.message.values["tls"].upper(), set()).add(one.rank)
    if not reports and len(rows) < 2:
        return None
    if not on or not off:
        smaller = min(rows.values(), key=len) if len(rows) > 1 else set()
        is_minor = bool(smaller) and 2 * len(smaller) < sum(map(len, rows.values()))
        ranks, caveats = (smaller, "by-rule") if is_minor else (set(), "who-unknown")
        return edges.make("EI0016", 80, ranks, reports or links, caveats=caveats)
    places = [edges.rank_at(address, int(device)) for address, device in sorted(on if len(on) <= len(off) else off)]
    return edges.make(
        "EI0016",
        85,
        [rank for several, _ in places for rank in several],
        reports,
        hosts=[host for _, host in places if host is not None],
        sure=len(on) != len(off),
        caveats="two-sides" if len(on) == len(off) else "",
    )


def blame_differs(edges: Edges) -> Candidate | None:
    """Blame the outlier if ranks call different collectives, else all ranks that report it."""
    reports = edges.of(*_DIFFERS)
    if not reports:
        return None
    outliers = minority(edges.in_largest_group("tag")) or _outliers_in_one_aspect(edges, reports)
    ranks = outliers or tuple(one.rank for one in reports)
    shown = sorted(reports, key=lambda one: one.rank not in ranks)
    caveats = "by-rule" if outliers else "who-unknown"
    return edges.make(_DIFFERS[reports[0].message.kind], 75, ranks, shown, caveats=caveats)


def _outliers_in_one_aspect(edges: Edges, reports: Sequence[Edge]) -> tuple[int, ...]:
    """Return the minority with another value for one aspect (operation, size): by its own report, otherwise by
    reports of others. Groups that number their ranks differently are not compared."""
    if any(m.kind == "mismatch" and m.ranks and m.ranks[0] != one.rank for one, m in ((r, r.message) for r in reports)):
        return ()
    given: dict[str, dict[int, str]] = {}
    for one in reports:
        values, ranks = one.message.values, one.message.ranks
        if one.message.kind == "models":
            given["model"] = {**dict.fromkeys(range(ranks[0]), values["theirs"]), ranks[0]: values["own"]}
            continue
        for aspect, value in values.items():
            given.setdefault(aspect, {}).setdefault(one.rank, value)
    for one in edges.of("mismatch-elsewhere"):
        for aspect, value in one.message.values.items():
            given.setdefault(aspect, {}).setdefault(one.message.ranks[1], value)
    return next((few for few in map(minority, given.values()) if few), ())


def blame_broken(edges: Edges) -> Candidate | None:
    """Blame, if a transport stopped retrying, the host in every broken pair, else both ends: RoCE names a device, NCCL
    a host, with all its ranks."""
    kind = next((kind for kind in ("cqe", "completion") if edges.of(kind)), None)
    if kind is None:
        return None
    reports = edges.of(kind)
    common = set.intersection(*({one.host, one.target or one.host} for one in reports))
    remote = {rank for one in reports for rank in one.ranks}
    accused = {one.target for one in reports if one.target is not None}
    hosts = common if len(reports) > 1 and len(common) == 1 else accused or {one.host for one in reports}
    ranks = [rank for rank in (*remote, *{one.rank for one in reports}) if edges.by_rank[rank].rank.host in hosts]
    only = [rank for rank in ranks if rank in remote] or ranks
    code, only = ("EI0013", only) if kind == "cqe" else ("nccl-ib-completion", edges.ranks_on(hosts))
    at = reports[0].timeline.waited_at
    return edges.make(code, 70, only, reports, hosts=hosts, caveats="network-or-peer", at=at)


def blame_location(edges: Edges) -> Candidate | None:
    """Blame the culprits that HCCL's heartbeat names."""
    reports = edges.of("location")
    if not reports or {one.target for one in reports} & {*edges.evidence.silent_hosts}:
        return None  # any rank of an unreachable host may be named
    for code, word in _CULPRITS:
        chosen = [one for one in reports if word in one.message.values["type"].lower() and one.target is not None]
        votes = Counter((one.ranks, one.target) for one in chosen)
        if votes:
            count = max(votes.values())
            tied = [who for who, number in votes.items() if number == count]
            ranks = [rank for who, _ in tied for rank in who]
            if len(tied) == 1 and ranks and all(edges.by_rank[rank].has_finished for rank in ranks):
                return _finished_early(edges, ranks)  # and therefore sent nothing
            naming = [one for one in chosen if (one.ranks, one.target) in tied]
            hosts = [place for _, place in tied if place]
            caveats = "two-named" if len(tied) > 1 else "by-rule"
            return edges.make(code, 65, ranks, naming, hosts=hosts, caveats=caveats)
    address, device = reports[0].message.addresses[0]
    values = {"address": f"{address}/{device}"}
    return edges.make("hccl-culprit-lost", 45, (), reports, caveats="address-unknown", values=values)


def blame_world_size(edges: Edges) -> Candidate | None:
    """Blame the world size if all started ranks joined the rendezvous, and the program waited for more."""
    started = max(edges.evidence.world_size, len(edges.timelines))
    reports = [
        one
        for one in edges.of("clients")
        if one.message.values and int(one.message.values["joined"]) == started < int(one.message.values["expected"])
    ]
    if not reports or edges.evidence.launcher in LAUNCHERS:  # the number of ranks they started is unknown
        return None
    return edges.make("world-size-wrong", 60, (), reports, hosts=(), values=reports[0].message.values)


def blame_missing(edges: Edges) -> Candidate | None:
    """Blame the ranks that did not join the rendezvous, which counts arrivals."""
    named = {rank for one in edges.of("missing") for rank in one.message.ranks}
    came = {rank for one in edges.of("connected") for rank in one.message.ranks}
    if came and not named:
        needed = [int(one.message.values["count"]) for one in edges.of("needed")]
        named = set(range(max([edges.evidence.world_size, *needed]))) - came
    if not named or len(named) >= max(edges.evidence.world_size, 2):
        return None
    return edges.make("ranks-missing", 60, named, edges.of("missing", "connected"), caveats="no-response")


# ---------------------------------------------------------------- hosts that cannot reach each other

_OWN_FAULT = frozenset({"no_network", "no_name"})
"""The reporting host's kernel or resolver returns these itself, without contacting another host."""
_UNREACHED = {"no_name": "name-not-resolved", "in_vain": "master-unreachable"}


def blame_loopback(edges: Edges) -> Candidate | None:
    """Blame loopback addresses to which ranks connected instead of another node: the master's, if its name resolves so;
    or that of a peer, which is then the only host without a report."""
    master = edges.by_rank.get(0)
    reports = [
        one
        for one in edges.of("unreached", "lost", "tried")
        if any(is_loopback(address) for address, _ in one.message.addresses)
        and (one.message.kind != "tried" or one.timeline.waited is not None)
        and (one.message.kind == "lost" or master is None or one.host != master.rank.host)
    ]
    if not reports or len(edges.evidence.hosts) < 2:
        return None
    rest = {host.host for host in edges.evidence.hosts} - {one.host for one in reports}
    values = {"address": reports[0].message.addresses[0][0]}
    if len(rest) == 1 and all(one.message.kind == "lost" for one in reports):
        return edges.make("own-address-local", 75, edges.ranks_on(rest), reports, hosts=rest, values=values)
    return edges.make("master-address-local", 75, [one.rank for one in reports], reports, values=values)


def blame_unreached(edges: Edges) -> Candidate | None:
    """Blame the host that no other host reaches; else hosts that fail where others succeed; else the reporting host
    of a pair. A timeout is a broken path only if a rank there was listening."""
    reports = [one for one in edges.of("unreached") if _counts(edges, one)]
    pairs: dict[tuple[str, str | None], Edge] = {}
    for one in reports:
        path = (one.host, one.target)
        if one.target != one.host and (path not in pairs or pairs[path].message.values["why"] == "in_vain"):
            pairs[path] = one
    if not pairs:
        return None
    chosen = list(pairs.values())
    first, own = chosen[0].message, chosen[0].timeline.own
    why, whys = first.values["why"], {one.message.values["why"] for one in chosen}
    sources, target = _sides(edges, pairs)
    others = {timeline.rank.host for timeline in edges.timelines} - {target}
    hosts, ranks = sources, [one.rank for one in reports if one.host in sources]
    if target is not None and not whys & _OWN_FAULT and len(sources) > 1 and 2 * len(sources) > len(others):
        hosts, ranks = {target}, edges.ranks_on([target])
    is_stranger = target is None and len(sources) == 1 and why in ("no_route", "no_answer") and own is not None
    if is_stranger and own is not None and "type" in own.values and not first.values["meeting"]:
        return edges.make("exception", 57, ranks, chosen, hosts=hosts, caveats="only-symptom", values=own.values)
    tried = {address for one in chosen for address, _ in one.message.addresses}
    return edges.make(
        "hccl-root-unreachable" if "TopoExchangeAgent" in first.line.text else _UNREACHED.get(why, "no-route"),
        57,
        ranks,
        chosen,
        hosts=hosts,
        caveats="by-rule" if whys <= _OWN_FAULT else "network-or-peer",
        values={
            "reason": first.values["reason"],
            "from": fold_hosts(sorted(sources)),
            "to": target or ", ".join(sorted(tried)) or "?",  # no host of the job
        },
    )


def _counts(edges: Edges, one: Edge) -> bool:
    if one.message.values["why"] == "no_name":
        return one.timeline.waited is not None
    # a target None: an unknown address, possibly the master's
    return one.message.values["why"] != "in_vain" or any(
        one.target in (None, other.host) for other in edges.of("clients")
    )


def _sides(edges: Edges, pairs: Iterable[tuple[str, str | None]]) -> tuple[set[str], str | None]:
    """Return reporting hosts, and the single host that they name; several without a name mean the only other host."""
    sources = {source for source, _ in pairs}
    targets = {target for _, target in pairs if target is not None}
    if not targets and len(sources) > 1:
        targets = {host.host for host in edges.evidence.hosts} - sources
    return sources, next(iter(targets)) if len(targets) == 1 else None


# ---------------------------------------------------------------- ranks without output, early, late, or behind


def blame_finished_early(edges: Edges) -> Candidate | None:
    """Blame ranks that exited 0 while others still waited for them: they had fewer steps."""
    ended = [timeline for timeline in edges.timelines if timeline.has_finished]
    waited_at = [other.waited_at for other in edges.suffering if other.waited_at is not None]
    before = [
        timeline.rank.rank
        for timeline in ended
        if timeline.end is None or not any(at.is_before(timeline.end) for at in waited_at)
    ]
    is_some = bool(before and edges.suffering) and len(ended) < len(edges.timelines)
    return _finished_early(edges, before) if is_some else None


def _finished_early(edges: Edges, ranks: Sequence[int]) -> Candidate:
    at = earliest(edges.by_rank[rank].end for rank in ranks)
    return edges.make("finished-early", 52, ranks, edges.waits, at=at)


def blame_unreachable(edges: Edges) -> Candidate | None:
    """Blame unreachable hosts without exit records of their ranks, while others wait for them."""
    over = {one.rank.host for one in edges.timelines if one.rank.has_ended or one.waited}
    hosts = [host for host in edges.evidence.silent_hosts if host not in over]
    missed = edges.suffering or edges.of("location")
    if not hosts or len(hosts) >= len(edges.evidence.hosts) or (edges.all and not missed):
        return None
    ranks = edges.ranks_on(hosts) or sorted(set(range(edges.evidence.world_size)) - set(edges.by_rank))
    shown = edges.waits[:1]
    return edges.make("node-unreachable", 58, ranks, shown, hosts=hosts, caveats="no-response", shows_output=True)


def blame_first_loser(edges: Edges) -> Candidate | None:
    """Blame a rank that lost a connection long before other ranks ended or reported: it did not lose those."""
    first = [
        (timeline, timeline.own)
        for timeline in edges.suffering
        if timeline.waited == LOST
        and timeline.own is not None
        and timeline.own.code == "exception"
        and all(_is_long_before(timeline, other) for other in edges.timelines if other is not timeline)
    ]
    if len(first) != 1 or len(edges.timelines) < 3:
        return None
    ((one, own),) = first
    made = edges.make("exception", 57, [one.rank.rank], (), caveats="only-symptom", values=own.values, at=one.waited_at)
    return replace(made, proofs=own.proofs)


def _is_long_before(one: RankTimeline, other: RankTimeline) -> bool:
    ends = [at for at in (other.waited_at, other.end) if at is not None]
    return (
        one.waited_at is not None and bool(ends) and all(one.waited_at.is_before(at, by_s=LONG_BEFORE_S) for at in ends)
    )


def blame_quiet(edges: Edges) -> Candidate | None:
    """Blame, if only some ranks timed out, the others, provided they are few or entire hosts."""
    ranks = {
        one.rank.rank for one in edges.timelines if one.waited is None and not one.has_cause and not one.rank.has_failed
    }
    if not ranks or not edges.suffering:
        return None
    narrowed = edges.most_reported(among=ranks)
    ranks = set(narrowed) or ranks
    hosts = {edges.by_rank[rank].rank.host for rank in ranks}
    is_whole = ranks == set(edges.ranks_on(hosts))
    is_half = 2 * len(hosts) <= len({one.rank.host for one in edges.timelines})
    if not (narrowed or edges.is_few(ranks) or (is_whole and is_half)):
        return None
    is_unseen = all(not edges.by_rank[rank].rank.has_ended for rank in ranks)
    is_host = is_whole and is_unseen and len(edges.evidence.hosts) > len(hosts)
    code, shown = "node-unreachable" if is_host else "rank-unresponsive", edges.to(ranks) or edges.waits[:1]
    return edges.make(code, 54, ranks, shown, caveats="no-response", shows_output=True)


def blame_latest(edges: Edges) -> Candidate | None:
    """Blame the last ranks to time out, if all did, further apart than the timeout: they arrived too late."""
    waiting = [one for one in edges.suffering if one.waited != LOST]
    times = {one.rank.rank: one.waited_at for one in waiting if one.waited_at is not None}
    if len(times) < max(2, len(edges.timelines)):
        return None
    first, last = (function(at.at_s for at in times.values()) for function in (min, max))
    error_s = sum(sorted((at.error_s for at in times.values()), reverse=True)[:2])
    connecting = any(timeline.waited == CONNECT for timeline in waiting)
    limit_s = edges.evidence.connect_timeout_s if connecting else edges.evidence.exec_timeout_s
    late = [rank for rank, at in times.items() if last - at.at_s < max(5.0, at.error_s)]
    if last - first - error_s <= limit_s or 2 * len(late) > len(edges.timelines):
        return None
    shown = [one for one in edges.waits if one.rank in late] + edges.waits[:1]
    values = {"spread": f"{last - first:.0f}", "timeout": f"{limit_s:.0f}"}
    return edges.make("late-rank", 56, late, shown, values=values)


def blame_sequence(edges: Edges) -> Candidate | None:
    """Blame ranks that are a collective behind the others, or in a different collective."""
    lagging = edges.of("lagging")
    named = {rank for one in lagging for rank in one.message.ranks}
    if named and 2 * len(named) < len(edges.timelines):
        return edges.make("collective-not-reached", 56, named, lagging, values=lagging[0].message.values)
    behind = _behind(edges, "index", "seq")
    if behind is not None:
        return behind
    of_kinds = (edges.in_largest_group(name) for name in ("tag", "op", "in", "out"))
    outliers = next((few for few in map(minority, of_kinds) if few), ())
    if outliers:
        shown = [one for one in edges.of("tag", "sequence") if one.rank in outliers]
        return edges.make("collective-differs", 57, outliers, shown)
    return _behind(edges, "completed", "enqueued")


def _behind(edges: Edges, *names: str) -> Candidate | None:
    """Blame the minority of ranks with the lowest number of one of these names in the largest group."""
    for name in names:
        numbers = {rank: int(text) for rank, text in edges.in_largest_group(name).items()}
        lowest = min(numbers.values(), default=0)
        behind = [rank for rank, number in numbers.items() if number == lowest]
        if behind and 2 * len(behind) < len(numbers):
            shown = [one for one in edges.of(*COUNTED) if one.rank in behind]
            values = {"index": str(lowest), "others": str(max(numbers.values()))}
            return edges.make("collective-not-reached", 56, behind, shown, values=values)
    return None


def blame_lagging(edges: Edges) -> Candidate | None:
    """Blame the few ranks that were steps behind, or had no output for long, when the others timed out."""
    ranks = [one.rank for one in edges.timelines]
    steps = {rank.rank: rank.last_step for rank in ranks if rank.last_step is not None}
    quiet_s: dict[int, float] = {rank.rank: rank.last_output_s for rank in ranks if rank.last_output_s is not None}
    for numbers, by, strength, caveats in ((steps, 1.0, 50, "by-rule"), (quiet_s, LAGGING_S, 45, "by-rule clocks")):
        if edges.suffering and len(numbers) > 2 and len(numbers) == len(ranks):
            middle = sorted(numbers.values())[len(numbers) // 2]
            late = [rank for rank, number in numbers.items() if middle - number > by]
            if late and 4 * len(late) <= len(numbers):
                shown = {"step": str(min(steps.values())), "others": str(middle)} if numbers is steps else None
                return edges.make("lagging", strength, late, edges.waits, caveats=caveats, values=shown)
    return None


# ---------------------------------------------------------------- chains of waiting ranks


def blame_stuck(edges: Edges) -> Candidate | None:
    """Blame the few ranks that reported themselves stuck, if all others only lost them."""
    reports = edges.of("stuck")
    stuck = {one.rank for one in reports}
    rest = [timeline for timeline in edges.timelines if timeline.rank.rank not in stuck]
    if not stuck or 4 * len(stuck) > len(edges.timelines) or any(one.waited != LOST for one in rest):
        return None
    return edges.make("watchdog-stuck", 46, stuck, reports)


def blame_chain(edges: Edges) -> Candidate | None:
    """Blame the end of a chain of waiting ranks, which does not wait itself; else a cycle, if each rank waits for
    exactly one other."""
    reports = [one for one in edges.of("link", "remote") if one.message.wait is not None]
    waits: dict[int, set[int]] = {}
    for one in reports:
        if {*one.ranks} - {one.rank}:
            waits.setdefault(one.rank, set()).update({*one.ranks} - {one.rank})
    ends = {target for targets in waits.values() for target in targets} - set(waits)
    if ends and edges.is_few(ends):
        return edges.make("wait-chain", 53, ends, [one for one in reports if {*one.ranks} & ends])
    if ends or not waits or any(len(targets) != 1 for targets in waits.values()):
        return None
    path = [min(waits)]
    while path[-1] not in path[:-1]:
        path.extend(waits[path[-1]])
    circle = path[path.index(path[-1]) + 1 :]
    if len(circle) == 2:
        return edges.make("link-broken", 52, circle, reports, caveats="network-or-peer")
    return edges.make("wait-cycle", 50, circle, reports)


def blame_most_reported(edges: Edges) -> Candidate | None:
    """Blame the rank or host that is named most, without other evidence."""
    ranks = edges.most_reported(among=set(edges.by_rank))
    if ranks:
        return edges.make("most-reported", 45, ranks, edges.to(set(ranks)))
    reports = [one for one in edges.of("lost", "link", "timeout") if one.target is not None]
    host, count = next(iter(Counter(str(one.target) for one in reports).most_common(1)), ("", 0))
    if len(reports) < 2 or 3 * count < 2 * len(reports) or all(one.rank.host == host for one in edges.suffering):
        return None
    naming = [one for one in reports if one.target == host]
    return edges.make("most-reported", 42, edges.ranks_on([host]), naming, hosts=[host])


RULES: tuple[Callable[[Edges], Candidate | None], ...] = (
    blame_tls, blame_differs, blame_location, blame_loopback, blame_world_size, blame_missing, blame_finished_early,
    blame_unreachable, blame_first_loser, blame_unreached, blame_broken, blame_quiet, blame_latest, blame_sequence,
    blame_lagging, blame_stuck, blame_chain, blame_most_reported,
)  # fmt: skip
