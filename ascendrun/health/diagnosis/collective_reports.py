"""Rules for reports of the communication library: named ranks, missing ranks, and differing values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ascendrun.health.diagnosis.candidates import Candidate
from ascendrun.health.diagnosis.lines.launchers import LAUNCHERS
from ascendrun.health.diagnosis.wait_table import Report, Table, finished_early, has_finished, minority

_TLS_ENTRY = re.compile(r"([0-9a-fA-F.:]+)/(\d+)")
_CQE_TYPE, _STUCK_TYPE = re.compile("cqe", re.IGNORECASE), re.compile("stuck", re.IGNORECASE)


def blame_tls(table: Table) -> Candidate | None:
    """Blame the smaller group if the TLS switch differs."""
    reports = table.messages("tls")
    sides: dict[str, set[tuple[str, str]]] = {"on": set(), "off": set()}
    for _events_of, message in reports:
        for side, entries in sides.items():
            entries.update(_TLS_ENTRY.findall(message.values.get(side, "")))
    rows: dict[str, set[int]] = {}
    for timeline, message in table.messages("link"):
        if message.values.get("tls"):
            rows.setdefault(message.values["tls"].upper(), set()).add(timeline.rank.rank)
    if not reports and len(rows) < 2:
        return None
    if not sides["on"] or not sides["off"]:
        smaller = min(rows.values(), key=len) if len(rows) > 1 else set()
        is_minor = bool(smaller) and 2 * len(smaller) < sum(map(len, rows.values()))
        return table.make(
            "EI0016",
            80,
            smaller if is_minor else (),
            reports or table.messages("link"),
            retry="never",
            blames="node",
            caveats="who-unknown" if not is_minor else "by-rule",
        )
    fewer = min(sides.values(), key=len)
    places = [table.rank_at(address, int(device)) for address, device in sorted(fewer)]
    even = len(sides["on"]) == len(sides["off"])
    return table.make(
        "EI0016",
        85,
        [rank for ranks, _ in places for rank in ranks],
        reports,
        retry="never",
        hosts=[host for _, host in places if host is not None],
        sure=not even,
        blames="node",
        caveats="two-sides" if even else "",
    )


_DIFFERS: Mapping[str, str] = {"differs": "EI0005", "mismatch": "collectives-mismatch", "models": "models-differ"}


def blame_differs(table: Table) -> Candidate | None:
    """Blame the outlier if ranks call different collectives, else all ranks that report it."""
    reports = table.messages(*_DIFFERS)
    if not reports:
        return None
    outliers = minority(table.tags()) or _outliers_in_one_aspect(table, reports)
    ranks = outliers or tuple(timeline.rank.rank for timeline, _ in reports)
    first = [one for one in reports if one[0].rank.rank in ranks]
    return table.make(
        _DIFFERS[reports[0][1].kind],
        75,
        ranks,
        [*first, *(one for one in reports if one not in first)],
        retry="never",
        blames="job",
        caveats="by-rule" if outliers else "who-unknown",
    )


def _outliers_in_one_aspect(table: Table, reports: Sequence[Report]) -> tuple[int, ...]:
    """Return the minority with another value for one aspect (operation, size): by its own report, otherwise by
    reports of others. Groups that number their ranks differently are not compared."""
    if any(
        message.kind == "mismatch" and message.ranks and message.ranks[0] != timeline.rank.rank
        for timeline, message in reports
    ):
        return ()
    given: dict[str, dict[int, str]] = {}
    for timeline, message in reports:
        if message.kind == "models":
            given["model"] = {
                **dict.fromkeys(range(message.ranks[0]), message.values["theirs"]),
                message.ranks[0]: message.values["own"],
            }
            continue
        for aspect, value in message.values.items():
            given.setdefault(aspect, {}).setdefault(timeline.rank.rank, value)
    for _events_of, message in table.messages("mismatch-elsewhere"):
        for aspect, value in message.values.items():
            given.setdefault(aspect, {}).setdefault(message.ranks[1], value)
    return next((few for few in map(minority, given.values()) if few), ())


def blame_cqe(table: Table) -> Candidate | None:
    """Blame, if RoCE stopped retrying, the host in every broken pair, else both ends."""
    return _blame_pairs(table, "EI0013", table.messages("cqe"))


def blame_completion(table: Table) -> Candidate | None:
    """Apply the rule of `blame_cqe` to NCCL, where an address is a host's, with all its ranks."""
    found = _blame_pairs(table, "nccl-ib-completion", table.messages("completion"))
    return found and replace(
        found, ranks=tuple(rank.rank for host in found.hosts for rank in table.evidence.ranks_of(host))
    )


def _blame_pairs(table: Table, code: str, reports: Sequence[Report]) -> Candidate | None:
    if not reports:
        return None
    pairs = [({timeline.rank.host}, table.named(message)) for timeline, message in reports]
    common = set.intersection(*({*own, *([host] if host else [])} for own, (_, host) in pairs))
    remote = {rank for _, (ranks, _) in pairs for rank in ranks}
    accused = {host for _, (_, host) in pairs if host is not None}
    if len(pairs) > 1 and len(common) == 1:
        hosts = common
    else:
        hosts = accused or {timeline.rank.host for timeline, _ in reports}
    local = {timeline.rank.rank for timeline, _ in reports}
    ranks = [rank for rank in (*remote, *local) if table.by_rank[rank].rank.host in hosts]
    only = [rank for rank in ranks if rank in remote] or ranks
    return table.make(
        code,
        70,
        only,
        reports,
        hosts=hosts,
        caveats="network-or-peer",
        retry="exclude",
        blames="network",
        at=reports[0][0].waited_at,
    )


def blame_location(table: Table) -> Candidate | None:
    """Blame the culprits that HCCL's heartbeat names: broken links first, then stuck ranks, then lost ranks."""
    reports = table.messages("location")
    named = {table.named(message)[1] for _events_of, message in reports}
    if not reports or any(
        host.reachable is False and not host.has_ended and host.host in named for host in table.evidence.hosts
    ):
        return None  # any rank of an unreachable host may be named
    for code, test in (
        ("hccl-culprit-cqe", _CQE_TYPE.search),
        ("hccl-culprit-stuck", _STUCK_TYPE.search),
        ("hccl-culprit-lost", lambda text: True),
    ):
        chosen = [(timeline, message) for timeline, message in reports if test(message.values["type"])]
        votes = Counter(table.named(message) for _events_of, message in chosen)
        votes = Counter({who: count for who, count in votes.items() if who[1] is not None})
        if votes:
            (ranks, host), count = votes.most_common(1)[0]
            tied = [who for who, number in votes.items() if number == count]
            caveats = "two-named" if len(tied) > 1 else "by-rule"
            rest = _accused_end(table, ranks) if len(tied) == 1 else None
            if rest is not None:
                return rest
            return table.make(
                code,
                65,
                [rank for who, _ in tied for rank in who],
                [one for one in chosen if table.named(one[1]) in tied],
                hosts=[place for _, place in tied if place],
                caveats=caveats,
            )
    values = {"address": f"{reports[0][1].addresses[0][0]}/{reports[0][1].addresses[0][1]}"}
    return table.make("hccl-culprit-lost", 45, (), reports, caveats="address-unknown", values=values)


def _accused_end(table: Table, ranks: Sequence[int]) -> Candidate | None:
    """Blame a named rank that had already finished and therefore sent nothing."""
    ended = [rank for rank in ranks if has_finished(table.by_rank[rank].rank)]
    return finished_early(table, ended) if ended and len(ended) == len(ranks) else None


def blame_world_size(table: Table) -> Candidate | None:
    """Blame the world size if all started ranks joined the rendezvous, and the program waited for more."""
    started = max(table.evidence.world_size, len(table.timelines))
    reports = [
        (timeline, message)
        for timeline, message in table.messages("clients")
        if message.values and int(message.values["joined"]) == started < int(message.values["expected"])
    ]
    if not reports or table.evidence.launcher in LAUNCHERS:  # the number of ranks they started is unknown
        return None
    values = {name: reports[0][1].values[name] for name in ("joined", "expected")}
    return table.make("world-size-wrong", 60, (), reports, hosts=(), retry="never", blames="job", values=values)


def blame_missing(table: Table) -> Candidate | None:
    """Blame the ranks that did not join the rendezvous, which counts arrivals."""
    named = {rank for _events_of, message in table.messages("missing") for rank in message.ranks}
    came = {rank for _events_of, message in table.messages("connected") for rank in message.ranks}
    if came and not named:
        needed = max((int(message.values["count"]) for _events_of, message in table.messages("needed")), default=0)
        total = max(needed, table.evidence.world_size)
        named = set(range(total)) - came
    if not named or len(named) >= max(table.evidence.world_size, 2):
        return None
    return table.make("ranks-missing", 60, named, table.messages("missing", "connected"), caveats="no-response")
