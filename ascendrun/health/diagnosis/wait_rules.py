"""Who the others waited for, if no rank reports its own reason: one table of rules over the edges between ranks.

Explicit reports come before conclusions from silence, from the order of steps and ends, and from chains of waiting.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Callable, NamedTuple

from ascendrun.ascend.peer_messages import CONNECT, LOST
from ascendrun.ascend.vocabularies import strength_of
from ascendrun.health.diagnosis.edges import COUNTED, Edge, Edges, Found, minority
from ascendrun.health.diagnosis.evidence import Evidence, earliest
from ascendrun.health.diagnosis.lines.launchers import LAUNCHERS
from ascendrun.health.diagnosis.lines.line_kinds import is_loopback
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.result import Suspect
from ascendrun.text.format import fold_hosts

LONG_BEFORE_S = 60.0
QUIET_S = 900.0
"""A rank without output for so long before the others was stuck, also if it ended later; more than clocks differ."""


class Rule(NamedTuple):
    """One rule. `code`, `caveats`: of what it finds, if the finding has no others. `is_weak`: weaker than a
    rank's symptom."""

    code: str
    find: Callable[[Edges], Found | None]
    caveats: str = "by-rule"
    is_weak: bool = False


def blame_waiting(evidence: Evidence, timelines: Sequence[RankTimeline]) -> Suspect | None:
    """Return what the first applicable rule finds; None if no rank waited for or lost another, or if unknown which.
    If no rank failed and none has output, an unreachable host is the only evidence."""
    edges = Edges(evidence, timelines)
    if not edges.all and any(timeline.rank.has_failed for timeline in timelines):
        return None
    tried = []
    for rule in RULES if edges.all else [rule for rule in RULES if rule.find is unreachable]:
        found = rule.find(edges)
        tried.append(rule.find.__name__.replace("_", "-"))
        if found is not None:
            strength = strength_of("weak-rule" if rule.is_weak else "rule")
            return replace(edges.suspect(found, rule.code, strength, rule.caveats), rules=tuple(tried))
    return None


# ---------------------------------------------------------------- reports of the communication library

_TLS_ENTRY = re.compile(r"([0-9a-fA-F.:]+)/(\d+)")
_CULPRITS = (("hccl-culprit-cqe", "cqe"), ("hccl-culprit-stuck", "stuck"), ("hccl-culprit-lost", ""))
"""Broken links first, then stuck ranks, then lost ranks: the code, and a word of the type."""
_DIFFERS = {"differs": "EI0005", "mismatch": "collectives-mismatch", "models": "models-differ"}


def other_tls(edges: Edges) -> Found | None:
    """The smaller group if the TLS switch differs; of equal groups, one."""
    reports, links = edges.of("tls"), edges.of("link")
    sides = {one.rank: one.message.values["tls"].upper() for one in links if one.message.values.get("tls")}
    for side in ("on", "off"):
        for entry in (entry for one in reports for entry in _TLS_ENTRY.findall(one.message.values[side])):
            sides.update(dict.fromkeys(edges.rank_at(entry[0], int(entry[1]))[0], side))
    if not reports and len(set(sides.values())) < 2:
        return None
    few = minority(sides)
    return Found(few, reports or links, caveats="" if few and reports else None if few else "who-unknown")


def other_collective(edges: Edges) -> Found | None:
    """The outlier if ranks call different collectives, else all ranks that report it."""
    reports = edges.of(*_DIFFERS)
    if not reports:
        return None
    few = minority(edges.in_largest_group("tag")) or _outliers_in_one_aspect(edges, reports)
    ranks = few or tuple(one.rank for one in reports)
    shown = sorted(reports, key=lambda one: one.rank not in ranks)
    return Found(ranks, shown, _DIFFERS[reports[0].message.kind], caveats=None if few else "who-unknown")


def _outliers_in_one_aspect(edges: Edges, reports: Sequence[Edge]) -> tuple[int, ...]:
    """Return the minority with another value for one aspect (operation, size): by its own report, otherwise by
    reports of others. Groups that number their ranks differently are not compared."""
    if any(one.message.kind == "mismatch" and {*one.message.ranks} - {one.rank} for one in reports):
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


def broken_transport(edges: Edges) -> Found | None:
    """The host in every broken pair if a transport stopped retrying, else both ends: RoCE names a device, NCCL a host,
    with all its ranks."""
    reports = edges.of("cqe") or edges.of("completion")
    if not reports:
        return None
    common = set.intersection(*({one.host, one.target or one.host} for one in reports))
    accused = {one.target for one in reports if one.target is not None}
    hosts = common if len(reports) > 1 and len(common) == 1 else accused or {one.host for one in reports}
    at = reports[0].timeline.waited_at
    if reports[0].message.kind == "completion":
        return Found(edges.ranks_on(hosts), reports, "nccl-ib-completion", hosts=hosts, at=at)
    there = {*edges.ranks_on(hosts)}
    remote = there & {rank for one in reports for rank in one.ranks}
    return Found(remote or there & {one.rank for one in reports}, reports, hosts=hosts, at=at)


def culprit_of_hccl(edges: Edges) -> Found | None:
    """The culprits that HCCL's heartbeat names; of an unreachable host it may name any rank."""
    reports = edges.of("location")
    if not reports or {one.target for one in reports} & {*edges.evidence.silent_hosts}:
        return None
    for code, word in _CULPRITS:
        chosen = [one for one in reports if word in one.message.values["type"].lower() and one.target is not None]
        votes = Counter((one.ranks, one.target) for one in chosen)
        if votes:
            tied = [who for who, number in votes.items() if number == max(votes.values())]
            ranks = [rank for who, _ in tied for rank in who]
            if len(tied) == 1 and ranks and all(edges.by_rank[rank].has_finished for rank in ranks):
                return _finished(edges, ranks)  # and therefore sent nothing
            naming = [one for one in chosen if (one.ranks, one.target) in tied]
            hosts = [place for _, place in tied if place]
            return Found(ranks, naming, code, hosts=hosts, caveats="two-named" if len(tied) > 1 else None)
    address, device = reports[0].message.addresses[0]
    return Found((), reports, caveats="address-unknown", values={"address": f"{address}/{device}"})


def world_size(edges: Edges) -> Found | None:
    """The world size if all started ranks joined the rendezvous, and the program waited for more. How many ranks other
    launchers started is unknown."""
    started = str(max(edges.evidence.world_size, len(edges.timelines)))
    reports = [one for one in edges.of("clients") if one.message.values.get("joined") == started]
    reports = [one for one in reports if int(one.message.values["expected"]) > int(started)]
    if not reports or edges.evidence.launcher in LAUNCHERS:
        return None
    return Found((), reports, values=reports[0].message.values)


def missing(edges: Edges) -> Found | None:
    """The ranks that did not join the rendezvous, which counts arrivals."""
    named = {rank for one in edges.of("missing") for rank in one.message.ranks}
    came = {rank for one in edges.of("connected") for rank in one.message.ranks}
    if came and not named:
        needed = [int(one.message.values["count"]) for one in edges.of("needed")]
        named = set(range(max([edges.evidence.world_size, *needed]))) - came
    if not named or len(named) >= max(edges.evidence.world_size, 2):
        return None
    return Found(named, edges.of("missing", "connected"))


# ---------------------------------------------------------------- hosts that cannot reach each other

_OWN_FAULT = frozenset({"no_network", "no_name"})
"""The reporting host's kernel or resolver returns these itself, without contacting another host."""
_UNREACHED = {"no_name": "name-not-resolved", "in_vain": "master-unreachable"}


def loopback(edges: Edges) -> Found | None:
    """Loopback addresses to which ranks connected instead of another node: the master's, if its name resolves so; or
    that of a peer, which is then the only host without a report."""
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
        return Found(edges.ranks_on(rest), reports, "own-address-local", hosts=rest, values=values)
    return Found([one.rank for one in reports], reports, values=values)


def unreached(edges: Edges) -> Found | None:
    """The host that no other host reaches; else hosts that fail where others succeed; else the reporting host of a
    pair. A timeout is a broken path only if a rank there was listening."""
    reports = [one for one in edges.of("unreached") if one.target != one.host and _counts(edges, one)]
    pairs: dict[tuple[str, str | None], Edge] = {}
    for one in reports:
        path = (one.host, one.target)
        if path not in pairs or pairs[path].message.values["why"] == "in_vain":
            pairs[path] = one
    if not pairs:
        return None
    chosen = list(pairs.values())
    first, own = chosen[0].message, chosen[0].timeline.own
    why, is_own = first.values["why"], {one.message.values["why"] for one in chosen} <= _OWN_FAULT
    hosts, target = _sides(edges, pairs)
    source, ranks = fold_hosts(sorted(hosts)), [one.rank for one in reports]
    if target is not None and not is_own and 1 < len(hosts) < len(edges.evidence.hosts) < 2 * len(hosts) + 1:
        hosts, ranks = {target}, edges.ranks_on([target])
    is_stranger = target is None and len(hosts) == 1 and why in ("no_route", "no_answer") and own is not None
    if is_stranger and own is not None and "type" in own.values and not first.values["meeting"]:
        return Found(ranks, chosen, "exception", hosts=hosts, caveats="only-symptom", values=own.values)
    tried = {address for one in chosen for address, _ in one.message.addresses}
    to = target or ", ".join(sorted(tried)) or "?"  # no host of the job
    code = "hccl-root-unreachable" if "TopoExchangeAgent" in first.line.text else _UNREACHED.get(why, "no-route")
    values = {"reason": first.values["reason"], "from": source, "to": to}
    return Found(ranks, chosen, code, hosts=hosts, caveats="by-rule" if is_own else None, values=values)


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


def finished_early(edges: Edges) -> Found | None:
    """Ranks that exited 0 while others still waited for them: they had fewer steps."""
    ended = [timeline for timeline in edges.timelines if timeline.has_finished]
    waited_at = [other.waited_at for other in edges.suffering if other.waited_at is not None]
    before = [
        timeline.rank.rank
        for timeline in ended
        if timeline.end is None or not any(at.is_before(timeline.end) for at in waited_at)
    ]
    is_some = bool(before and edges.suffering) and len(ended) < len(edges.timelines)
    return _finished(edges, before) if is_some else None


def _finished(edges: Edges, ranks: Sequence[int]) -> Found:
    return Found(ranks, edges.waits, "finished-early", at=earliest(edges.by_rank[rank].end for rank in ranks))


def unreachable(edges: Edges) -> Found | None:
    """Unreachable hosts without exit records of their ranks, while others wait for them."""
    over = {one.rank.host for one in edges.timelines if one.rank.has_ended or one.waited}
    hosts = [host for host in edges.evidence.silent_hosts if host not in over]
    missed = edges.suffering or edges.of("location")
    if not hosts or len(hosts) >= len(edges.evidence.hosts) or (edges.all and not missed):
        return None
    ranks = edges.ranks_on(hosts) or sorted(set(range(edges.evidence.world_size)) - set(edges.by_rank))
    return Found(ranks, edges.waits[:1], hosts=hosts, shows_output=True)


def first_loser(edges: Edges) -> Found | None:
    """A rank that lost a connection long before other ranks ended or reported: it did not lose those."""
    for one in edges.suffering if len(edges.timelines) > 2 else ():
        own, others = one.own, (other for other in edges.timelines if other is not one)
        is_first = one.waited == LOST and all(_is_long_before(one, other) for other in others)
        if is_first and own is not None and own.code == "exception":
            return Found([one.rank.rank], (), values=own.values, at=one.waited_at, proofs=own.proofs)
    return None


def _is_long_before(one: RankTimeline, other: RankTimeline) -> bool:
    ends = [at for at in (other.waited_at, other.end) if at is not None]
    return (
        one.waited_at is not None and bool(ends) and all(one.waited_at.is_before(at, by_s=LONG_BEFORE_S) for at in ends)
    )


def quiet(edges: Edges) -> Found | None:
    """The others if only some ranks timed out, provided they are few or entire hosts."""
    ranks = {
        one.rank.rank for one in edges.timelines if one.waited is None and not one.has_cause and not one.rank.has_failed
    }
    if not ranks or not edges.suffering:
        return None
    narrowed = edges.most_reported(among=ranks)
    ranks = set(narrowed) or ranks
    hosts = {edges.by_rank[rank].rank.host for rank in ranks}
    is_whole = ranks == set(edges.ranks_on(hosts))
    if not (narrowed or edges.is_few(ranks) or (is_whole and 2 * len(hosts) <= len(edges.hosts))):
        return None
    is_unseen = not any(edges.by_rank[rank].rank.has_ended for rank in ranks)
    is_host = is_whole and is_unseen and len(edges.hosts) > len(hosts)
    code = "node-unreachable" if is_host else ""
    return Found(ranks, edges.to(ranks) or edges.waits[:1], code, shows_output=True)


def latest(edges: Edges) -> Found | None:
    """The last ranks to time out, if all did, further apart than the timeout: they arrived too late."""
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
    return Found(late, shown, values={"spread": f"{last - first:.0f}", "timeout": f"{limit_s:.0f}"})


def lagging(edges: Edges) -> Found | None:
    """Ranks that did not join a collective, by the dump of a library."""
    reports = edges.of("lagging")
    named = {rank for one in reports for rank in one.message.ranks}
    is_few = bool(named) and 2 * len(named) < len(edges.timelines)
    return Found(named, reports, values=reports[0].message.values) if is_few else None


_COMPARED = ("index", "seq", "tag", "op", "in", "out", "completed", "enqueued")
"""What ranks report of the operation at which they stopped: numbers, then names and sizes, then less exact numbers."""


def other_operation(edges: Edges) -> Found | None:
    """The minority of ranks at the lowest number of an operation, or at another operation than the others."""
    for name in _COMPARED:
        given = edges.in_largest_group(name)
        has_order = name not in ("tag", "op", "in", "out")
        lowest = str(min(map(int, given.values()), default=0)) if has_order else ""
        few = minority({rank: str(value == lowest) for rank, value in given.items()} if has_order else given)
        few = tuple(rank for rank in few if not has_order or given[rank] == lowest)
        if few:
            shown = [one for one in edges.of(*COUNTED) if one.rank in few]
            values = {"index": lowest, "others": str(max(map(int, given.values())))} if has_order else {}
            return Found(few, shown, "" if has_order else "collective-differs", values=values)
    return None


def behind(edges: Edges) -> Found | None:
    """The few ranks that were steps behind, or worked no more for long, when the others timed out."""
    heard_s = {one.rank.rank: one.worked_until.at_s for one in edges.timelines if one.worked_until is not None}
    steps = {one.rank.rank: one.rank.last_step for one in edges.timelines if one.rank.last_step is not None}
    for numbers, by in ((steps, 1), (heard_s, QUIET_S)):
        middle = sorted(numbers.values())[len(numbers) // 2] if numbers else 0
        late = [rank for rank, number in numbers.items() if middle - number > by]
        if late and edges.suffering and 4 * len(late) <= len(numbers) == len(edges.timelines):
            if numbers is heard_s:
                return Found(late, edges.waits[:1], "rank-unresponsive", caveats="no-response", shows_output=True)
            return Found(late, edges.waits, values={"step": str(min(steps.values())), "others": str(middle)})
    return None


# ---------------------------------------------------------------- chains of waiting ranks


def stuck(edges: Edges) -> Found | None:
    """The few ranks that reported themselves stuck, if all others only lost them."""
    reports = edges.of("stuck")
    ranks = {one.rank for one in reports}
    has_lost = all(one.waited == LOST for one in edges.timelines if one.rank.rank not in ranks)
    return Found(ranks, reports) if ranks and edges.is_few(ranks) and has_lost else None


def end_of_chain(edges: Edges) -> Found | None:
    """The end of a chain of waiting ranks, which does not wait itself; else a cycle, if each rank waits for exactly one
    other."""
    reports = [one for one in edges.of("link", "remote") if one.message.wait is not None]
    waits: dict[int, set[int]] = {}
    for one in reports:
        if {*one.ranks} - {one.rank}:
            waits.setdefault(one.rank, set()).update({*one.ranks} - {one.rank})
    ends = {target for targets in waits.values() for target in targets} - set(waits)
    if ends and edges.is_few(ends):
        return Found(ends, [one for one in reports if {*one.ranks} & ends])
    if ends or not waits or any(len(targets) != 1 for targets in waits.values()):
        return None
    path = [min(waits)]
    while path[-1] not in path[:-1]:
        path.extend(waits[path[-1]])
    circle = path[path.index(path[-1]) + 1 :]
    if len(circle) == 2:
        return Found(circle, reports, "link-broken", caveats="network-or-peer")
    return Found(circle, reports, "wait-cycle")


def most_reported(edges: Edges) -> Found | None:
    """The rank or host that is named most, without other evidence."""
    ranks = edges.most_reported(among=set(edges.by_rank))
    if ranks:
        return Found(ranks, edges.to(set(ranks)))
    reports = [one for one in edges.of("lost", "link", "timeout") if one.target is not None]
    host, count = next(iter(Counter(str(one.target) for one in reports).most_common(1)), ("", 0))
    if len(reports) < 2 or 3 * count < 2 * len(reports) or all(one.rank.host == host for one in edges.suffering):
        return None
    return Found(edges.ranks_on([host]), [one for one in reports if one.target == host], hosts=[host])


RULES = (
    Rule("EI0016", other_tls),
    Rule("EI0005", other_collective),
    Rule("hccl-culprit-lost", culprit_of_hccl),
    Rule("master-address-local", loopback),
    Rule("world-size-wrong", world_size),
    Rule("ranks-missing", missing, "no-response"),
    Rule("finished-early", finished_early),
    Rule("node-unreachable", unreachable, "no-response"),
    Rule("exception", first_loser, "only-symptom"),
    Rule("no-route", unreached, "network-or-peer"),
    Rule("EI0013", broken_transport, "network-or-peer"),
    Rule("rank-unresponsive", quiet, "no-response"),
    Rule("late-rank", latest),
    Rule("collective-not-reached", lagging),
    Rule("collective-not-reached", other_operation),
    Rule("lagging", behind),
    Rule("watchdog-stuck", stuck, is_weak=True),
    Rule("wait-chain", end_of_chain),
    Rule("most-reported", most_reported, is_weak=True),
)
