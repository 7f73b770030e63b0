"""Who the others waited for, if no rank reports its own reason: one table of rules over the graph of their facts.

A rule searches in reports of some kinds: for the row in which ranks differ, for whom they name, for who does not wait.
Explicit reports come before conclusions from silence, from the order of steps and ends, and from chains of waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Callable, NamedTuple

from ascendrun.ascend.peer_messages import CONNECT, EXEC, LOST
from ascendrun.ascend.vocabularies import alike, read_table, says, strength_of
from ascendrun.health.diagnosis.edges import Edge, Edges, Found
from ascendrun.health.diagnosis.evidence import Evidence, earliest, surely_before
from ascendrun.health.diagnosis.lines.launchers import LAUNCHERS
from ascendrun.health.diagnosis.lines.rank_lines import services_in
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.result import Suspect
from ascendrun.health.flight_recorder import Recorded, first_difference
from ascendrun.health.wait_limits import calls_in
from ascendrun.health.what_differs import lowest, minority, unlike_in
from ascendrun.text import Text, listed
from ascendrun.text.format import fold_hosts

FEW_SHARE = 0.25
"""Ranks without output, and ends of chains, are blamed up to this fraction of all, or if they are entire hosts."""
LONG_BEFORE_S = 60.0


class Rule(NamedTuple):
    """One rule: a search in the reports of some kinds, which there must be; without kinds in all waits. `rows`: of the
    matrix. `code`, `caveats`: of what it finds, if that has no others. `is_weak`: weaker than a rank's symptom."""

    name: str
    code: str
    find: str
    kinds: Sequence[str] = ()
    rows: Sequence[str] = ()
    caveats: str = "by-rule"
    is_weak: bool = False


def blame_waiting(evidence: Evidence, timelines: Sequence[RankTimeline]) -> Suspect | None:
    """Return what the first applicable rule finds; None if no rank waited for or lost another, or if unknown which.
    If no rank failed and none has output, an unreachable host is the only evidence."""
    edges = Edges(evidence, timelines)
    if not edges.all and any(timeline.rank.has_failed for timeline in timelines):
        return None
    tried = []
    rules = [Rule(**row) for row in read_table("waits")["rules"]]
    for rule in rules if edges.all else [rule for rule in rules if rule.find == "unreachable"]:
        reports = edges.of(*rule.kinds) if rule.kinds else edges.waits
        search: Callable[..., Found | None] = globals()[rule.find]
        found = search(edges, reports, *rule.rows) if reports or not rule.kinds else None
        tried.append(rule.name)
        if found is not None:
            strength = strength_of("weak-rule" if rule.is_weak else "rule")
            return replace(edges.suspect(found, rule.code, strength, rule.caveats), rules=tuple(tried))
    return None


class Row(NamedTuple):
    """How the values of a row are compared. `by`: numbers differ by more than this, None: they are names. `within`: of
    the lowest; `times`: as many other ranks are needed, more than 2: and all ranks."""

    code: str
    by: float | None = None
    within: float = 0.0
    times: int = 2
    is_of_all: bool = False


def other_tls(edges: Edges, links: Sequence[Edge]) -> Found | None:
    """The smaller group if the TLS switch differs."""
    row, reports = edges.row("tls", links), edges.of("tls")
    if not reports and len(set(row.values())) < 2:
        return None
    return _odd(minority(row), reports or links, caveats="" if reports else None)


def other_collective(edges: Edges, reports: Sequence[Edge]) -> Found | None:
    """The outlier if ranks call different collectives or sizes, else all ranks that report it. Groups that number
    their ranks differently are not compared."""
    is_of_group = any(one.message.kind == "mismatch" and {*one.message.ranks} - {one.rank} for one in reports)
    told = [*reports, *edges.of("mismatch-elsewhere")]
    names = [] if is_of_group else [name for one in told for name in one.message.values]
    rows = (edges.row("tag", edges.counted), *(edges.row(name, told) for name in dict.fromkeys(names)))
    codes = {"differs": "EI0005", "mismatch": "collectives-mismatch", "models": "models-differ"}
    return _odd(next(filter(None, map(minority, rows)), ()), reports, codes[reports[0].message.kind])


def unlike(edges: Edges, reports: Sequence[Edge]) -> Found | None:
    """The minority if ranks waited in one call of their group with different operations or sizes, else these ranks."""
    row = unlike_in(((one.rank, one.message) for one in reports), len(edges.timelines))[1]
    few, there = minority(row), [one for one in reports if one.rank in row]
    return _odd(few, there, "" if few else "collectives-mismatch") if row else None


def _odd(few: Sequence[int], reports: Sequence[Edge], code: str = "", caveats: str | None = None) -> Found:
    ranks = few or tuple(one.rank for one in reports)
    shown = sorted(reports, key=lambda one: one.rank not in ranks)
    return Found(ranks, shown, code, caveats=caveats if few else "who-unknown")


def recorded(edges: Edges, waits: Sequence[Edge]) -> Found | None:
    """Where the dumps of flight recorders differ; those of roles number the ranks of each role."""
    every = (one for host in edges.evidence.hosts for one in host.recorded.items())
    dumps = {rank: dump for rank, dump in every if rank in edges.by_rank}
    found = None if edges.evidence.labels else first_difference(dumps)
    if found is None:
        return None
    few, own = {*found.ranks}, found.own
    other = next(rank for rank, dump in dumps.items() if rank not in few and found.theirs in dump)
    first = _call("not-recorded", found.theirs) if own is None else _call("recorded", own)
    seen = [(found.ranks[0], first), (other, _call("recorded", found.theirs))]
    values = {"index": str(max(one.seq for one in dumps[found.ranks[0]])), "others": str(found.theirs.seq)}
    shown = [one for one in waits if one.rank in few] or waits[:1]
    return Found(few, shown, "collective-differs" if own is not None else "", values=values, seen=seen)


def _call(key: str, one: Recorded) -> Text:
    sizes = ", ".join("x".join(map(str, shape)) for shape in one.sizes[0])
    return listed(f"diagnosis.{key}", seq=one.seq, group=one.group, op=one.op, sizes=sizes or "-")


def differ(edges: Edges, waits: Sequence[Edge], *names: str) -> Found | None:
    """The minority of the first of these rows in which ranks differ: the ranks at the lowest number, or with another
    name than the others."""
    for name in names:
        kind, row = Row(**read_table("waits")["rows"][name]), edges.row(name, edges.counted)
        numbers = {rank: float(value) for rank, value in row.items() if kind.by is not None}
        few = lowest(numbers, by=kind.by or 0.0, within=kind.within, times=kind.times) if numbers else minority(row)
        if not few or (kind.is_of_all and (not edges.suffering or len(row) < len(edges.timelines))):
            continue
        shown = [one for one in edges.counted if one.rank in few] or waits
        if kind.code in alike("by-silence"):
            return Found(few, shown[:1], kind.code, caveats="no-response")
        low, high = (f"{one(numbers.values(), default=0.0):.0f}" for one in (min, max))
        values = {"index": low, "step": low, "others": high} if numbers else {}
        return Found(few, shown, kind.code, values=values)
    return None


def latest(edges: Edges, waits: Sequence[Edge]) -> Found | None:
    """The last ranks to time out, if all did, further apart than the timeout: they arrived too late."""
    ends = {one.rank.rank: one.waited_at for one in edges.suffering if one.waited != LOST}
    row = {rank: -at.at_s for rank, at in ends.items() if at is not None}
    errors_s = sorted(at.error_s for at in ends.values() if at is not None)[-2:]
    is_connecting = any(one.waited == CONNECT for one in edges.suffering)
    limit_s = edges.evidence.connect_timeout_s if is_connecting else edges.evidence.exec_timeout_s
    late = lowest(row, by=limit_s + sum(errors_s), within=max([5.0, *errors_s]))
    if len(row) < len(edges.timelines) or not late:
        return None
    shown = [*(one for one in waits if one.rank in late), *waits[:1]]
    spread_s = max(row.values()) - min(row.values())
    return Found(late, shown, values={"spread": f"{spread_s:.0f}", "timeout": f"{limit_s:.0f}"})


def named(edges: Edges, reports: Sequence[Edge]) -> Found | None:
    """The ranks that reports name as absent, if not all, or of a collective most; or those that are not among the ones
    that came."""
    absent = {rank for one in reports if one.message.kind != "connected" for rank in one.message.ranks}
    size = max(edges.evidence.world_size, 2, *(rank + 1 for rank in absent))
    came = {rank for one in reports if one.message.kind == "connected" for rank in one.message.ranks}
    if came and not absent:
        absent = {*range(max([size, *(int(one.message.values["count"]) for one in edges.of("needed"))]))} - came
    most = len(edges.timelines) / 2 if reports[0].message.kind == "lagging" else size
    return Found(absent, reports, values=reports[0].message.values) if 0 < len(absent) < most else None


def world_size(edges: Edges, reports: Sequence[Edge]) -> Found | None:
    """The world size if all started ranks joined the rendezvous, and the program waited for more. How many ranks other
    launchers started is unknown."""
    started = max(edges.evidence.world_size, len(edges.timelines))
    reports = [one for one in reports if one.message.values.get("joined") == str(started)]
    reports = [one for one in reports if int(one.message.values["expected"]) > started]
    if not reports or edges.evidence.launcher in LAUNCHERS:
        return None
    return Found((), reports, values=reports[0].message.values)


def culprit_of_hccl(edges: Edges, reports: Sequence[Edge]) -> Found | None:
    """The culprits that HCCL's heartbeat names; of an unreachable host it may name any rank."""
    if {one.target for one in reports} & {*edges.evidence.silent_hosts}:
        return None
    for part in ("cqe", "stuck", ""):  # broken links first, then stuck ranks, then lost ones
        chosen = [one for one in reports if part in one.message.values["type"].lower() and one.target is not None]
        votes = Counter((one.ranks, one.target) for one in chosen)
        tied = [who for who, number in votes.items() if number == max(votes.values())]
        if tied:
            naming = [one for one in chosen if (one.ranks, one.target) in tied]
            ranks, hosts = [rank for who, _ in tied for rank in who], [str(place) for _, place in tied]
            caveats = "two-named" if len(tied) > 1 else None
            return Found(ranks, naming, f"hccl-culprit-{part or 'lost'}", hosts=hosts, caveats=caveats)
    peer, device = reports[0].message.addresses[0]
    return Found((), reports, caveats="address-unknown", values={"peer": peer, "device": f"{device}"})


def stuck(edges: Edges, reports: Sequence[Edge]) -> Found | None:
    """The few ranks that reported themselves stuck, if all others only lost them."""
    ranks = {one.rank for one in reports}
    has_lost = all(one.waited == LOST for one in edges.timelines if one.rank.rank not in ranks)
    return Found(ranks, reports) if _is_few(edges, ranks) and has_lost else None


def most_named(edges: Edges, reports: Sequence[Edge]) -> Found | None:
    """The host that at least two reports and two thirds of them name, without other evidence; of it the rank that they
    name, if it is one."""
    reports = [one for one in reports if one.target is not None]
    host, count = next(iter(Counter(one.target for one in reports).most_common(1)), ("", 0))
    if len(reports) < 2 or 3 * count < 2 * len(reports) or all(one.rank.host == host for one in edges.suffering):
        return None
    naming = [one for one in reports if one.target == host]
    ranks, code = {rank for one in naming for rank in one.ranks}, "peer-closed" if _were_closed(edges, naming) else ""
    return Found(ranks if len(ranks) == 1 else edges.ranks_on([str(host)]), naming, code)


def loopback(edges: Edges, reports: Sequence[Edge]) -> Found | None:
    """Loopback addresses to which ranks connected instead of another node: the master's, if its name resolves so; or
    that of a peer, which is then the only host without a report."""
    master = edges.by_rank.get(0)
    reports = [
        one
        for one in reports
        if any(address in ("localhost", "::1") or address.startswith("127.") for address, _ in one.message.addresses)
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


def unreached(edges: Edges, every: Sequence[Edge]) -> Found | None:
    """The host that no other host reaches; else hosts that fail where others succeed; else the reporting host of a
    pair. A timeout is a broken path only if a rank there was listening, or if rank 0 too has no answer from an address
    that no host has."""
    listening = {other.host for other in edges.of("clients")}
    master = edges.by_rank.get(0)
    is_up = listening or (master is not None and master.waited is not None)
    reports: list[Edge] = []
    paths: dict[tuple[str, str | None], Edge] = {}
    for one in sorted(every, key=lambda one: one.message.values["why"] == "in_vain"):
        why = one.message.values["why"]
        # a target None: an unknown address, possibly the master's
        is_broken = why != "in_vain" or one.target in listening or (is_up and one.target is None)
        if one.target != one.host and is_broken and (why != "no_name" or one.timeline.waited is not None):
            reports.append(one)
            paths.setdefault((one.host, one.target), one)
    if not paths:
        return None
    chosen, all_hosts = list(paths.values()), {host.host for host in edges.evidence.hosts}
    first, own = chosen[0].message, chosen[0].timeline.own
    why, is_own = first.values["why"], {one.message.values["why"] for one in chosen} <= alike("own-fault")
    hosts = {source for source, _ in paths}
    targets = {target for _, target in paths if target is not None} or (all_hosts - hosts if len(hosts) > 1 else set())
    tried = {address for one in chosen for address, _ in one.message.addresses}
    to = [*targets] if len(targets) == 1 else sorted(tried) or ["?"]  # no host of the job
    values = {"reason": first.values["reason"], "from": fold_hosts(sorted(hosts)), "to": ", ".join(to)}
    if len(targets) == 1 and not is_own and 1 < len(hosts) < len(all_hosts) <= 2 * len(hosts):
        hosts = targets
    ranks = edges.ranks_on(targets) if hosts is targets else [one.rank for one in reports]
    is_service = why == "no_network" and bool(services_in(first.line.text))
    is_stranger = len(targets) != 1 and len(hosts) == 1 and (is_service or why in ("no_route", "no_answer"))
    if is_stranger and own is not None and "type" in own.values and not first.values["meeting"]:
        return Found(ranks, chosen, "exception", hosts=hosts, caveats="only-symptom", values=own.values)
    known = {"no_name": "name-not-resolved", "in_vain": "master-unreachable"}
    code = "hccl-root-unreachable" if "TopoExchangeAgent" in first.line.text else known.get(why, "no-route")
    return Found(ranks, chosen, code, hosts=hosts, caveats="by-rule" if is_own else None, values=values)


def broken_transport(edges: Edges, reports: Sequence[Edge]) -> Found | None:
    """The host in every broken pair if a transport stopped retrying, else both ends: RoCE names a device, NCCL a host,
    with all its ranks."""
    reports = [one for one in reports if one.message.kind == "cqe"] or reports
    common = set.intersection(*({one.host, one.target or one.host} for one in reports))
    accused = {one.target for one in reports if one.target is not None}
    hosts = common if len(reports) > 1 and len(common) == 1 else accused or {one.host for one in reports}
    there, code = {*edges.ranks_on(hosts)}, "nccl-ib-completion" if reports[0].message.kind == "completion" else ""
    of_devices = {rank for one in reports for rank in one.ranks} & there or {one.rank for one in reports} & there
    return Found(there if code else of_devices, reports, code, hosts=hosts, at=reports[0].timeline.waited_at)


def finished_early(edges: Edges, waits: Sequence[Edge]) -> Found | None:
    """Ranks that exited 0 while others still waited for them, and therefore sent nothing: they had fewer steps; or the
    few that waited in a collective, if all others ended so: these did not call it."""
    ended = [one for one in edges.timelines if one.rank.code == 0 and not one.rank.stopped]
    ats = [other.waited_at for other in edges.suffering if other.waited_at is not None]
    before = [one for one in ended if one.end is None or not any(at.is_before(one.end) for at in ats)]
    if not before or not edges.suffering or len(ended) == len(edges.timelines):
        return None
    late = [one.rank.rank for one in edges.suffering if one.waited == EXEC]
    if late and 3 * len(late) <= len(before) == len(edges.timelines) - len(late):
        return Found(late, waits, "collective-differs")
    return Found([one.rank.rank for one in before], waits, at=earliest(one.end for one in before))


def unreachable(edges: Edges, waits: Sequence[Edge]) -> Found | None:
    """Unreachable hosts without exit records of their ranks, while others wait for them."""
    over = {one.rank.host for one in edges.timelines if one.rank.has_ended or one.waited}
    hosts = [host for host in edges.evidence.silent_hosts if host not in over]
    missed = edges.suffering or edges.of("location")
    if not hosts or len(hosts) >= len(edges.evidence.hosts) or (edges.all and not missed):
        return None
    ranks = edges.ranks_on(hosts) or sorted(set(range(edges.evidence.world_size)) - set(edges.by_rank))
    return Found(ranks, waits[:1], hosts=hosts)


def first_loser(edges: Edges, waits: Sequence[Edge]) -> Found | None:
    """A rank that lost a connection long before other ranks ended or reported: it did not lose those."""
    ends = {one.rank.rank: one.waited_at or one.end for one in edges.timelines}
    first = earliest(ends.values())
    ranks = [rank for rank, at in ends.items() if not surely_before(first, at, by_s=LONG_BEFORE_S)]
    one = edges.by_rank[ranks[0]]
    if len(ranks) > 1 or len(ends) < 3 or one.waited != LOST or one.own is None or one.own.code != "exception":
        return None
    return Found(ranks, [edge for edge in waits if edge.timeline is one], at=first)


def quiet(edges: Edges, waits: Sequence[Edge]) -> Found | None:
    """The others if only some ranks timed out, provided they are few or entire hosts: also few that ended only because
    these did, by a signal of the watchdog. A rank with a watchdog's report is none of them."""
    ended = {one.rank.rank for one in edges.timelines if one.waited or one.has_cause or one.rank.has_failed}
    late = {one.rank for one in edges.of("signalled")} - {one.rank for one in waits if one.message.kind != "signalled"}
    ended -= late if _is_few(edges, late) else set()
    ended |= {rank for ranks in calls_in((one.rank, one.message) for one in waits).values() for rank in ranks}
    ranks = {*edges.by_rank} - ended - {one.rank for one in edges.of("progress")}
    hosts = {edges.by_rank[rank].rank.host for rank in ranks}
    is_whole = ranks == set(edges.ranks_on(hosts))
    is_some = _is_few(edges, ranks) or (is_whole and 2 * len(hosts) <= len(edges.hosts))
    if not (ranks and edges.suffering and is_some):
        return None
    is_host = is_whole and len(edges.hosts) > len(hosts)
    is_host = is_host and not any(edges.by_rank[rank].rank.has_ended for rank in ranks)
    shown = [one for one in edges.all if ranks & {*one.ranks}] or waits[:1]
    code = "peer-closed" if _were_closed(edges, waits) else "node-unreachable" if is_host else ""
    return Found(ranks, shown, code)


def _were_closed(edges: Edges, reports: Sequence[Edge]) -> bool:
    """Return whether all only lost connections, and the other end closed one: it did, or its process ended."""
    has_lost = all(one.waited == LOST for one in edges.suffering)
    return has_lost and any(says(one.message.line.text, "closed-by-peer") for one in reports)


def _is_few(edges: Edges, ranks: set[int]) -> bool:
    return len(ranks) <= max(1, FEW_SHARE * len(edges.timelines))


def end_of_chain(edges: Edges, reports: Sequence[Edge]) -> Found | None:
    """The end of a chain of waiting ranks, which does not wait itself; else a cycle, if each rank waits for exactly one
    other."""
    reports = [one for one in reports if one.message.wait is not None and {*one.ranks} - {one.rank}]
    waits: dict[int, set[int]] = {}
    for one in reports:
        waits.setdefault(one.rank, set()).update({*one.ranks} - {one.rank})
    ends = {rank for ranks in waits.values() for rank in ranks} - {*waits}
    if ends and _is_few(edges, ends):
        return Found(ends, [one for one in reports if {*one.ranks} & ends])
    if ends or not waits or any(len(ranks) != 1 for ranks in waits.values()):
        return None
    path = [min(waits)]
    while path[-1] not in path[:-1]:
        path.extend(waits[path[-1]])
    circle = path[path.index(path[-1]) + 1 :]
    code, caveats = ("link-broken", "network-or-peer") if len(circle) == 2 else ("wait-cycle", None)
    return Found(circle, reports, code, caveats=caveats)
