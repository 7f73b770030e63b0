"""The table of what ranks say about others, and the rules for explicit reports: of the communication library, and of
hosts that do not reach each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ascendrun.ascend.peer_messages import CONNECT, EXEC, LOST
from ascendrun.ascend.signatures import scan
from ascendrun.health.diagnosis.candidates import Candidate
from ascendrun.health.diagnosis.evidence import Evidence, Moment, RankEvidence, earliest
from ascendrun.health.diagnosis.lines.launchers import LAUNCHERS
from ascendrun.health.diagnosis.lines.line_kinds import PeerLine, is_loopback
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.result import Proof, proof_of
from ascendrun.text import Rendered
from ascendrun.text.format import fold_hosts

COUNTED = ("tag", "index", "sequence", "progress")
"""Kinds of messages with the number or the name of an operation of a communication group."""


class Report(NamedTuple):
    """What one rank says about others."""

    timeline: RankTimeline
    message: PeerLine

    @property
    def rank(self) -> int:
        return self.timeline.rank.rank

    @property
    def host(self) -> str:
        return self.timeline.rank.host


class Table:
    """The input of the rules. `waits`: the reports of an effect of others. `suffering`: ranks that waited for others,
    then those that lost others."""

    def __init__(self, evidence: Evidence, timelines: Sequence[RankTimeline]) -> None:
        self.evidence, self.timelines = evidence, timelines
        self.reports = [Report(timeline, message) for timeline in timelines for message in timeline.messages]
        self.waits = [one for one in self.reports if one.message.wait is not None]
        self.by_rank = {timeline.rank.rank: timeline for timeline in timelines}
        self.waiting = [timeline for timeline in timelines if timeline.waited in (CONNECT, EXEC)]
        self.losing = [timeline for timeline in timelines if timeline.waited == LOST]
        self.suffering = [*self.waiting, *self.losing]

    def messages(self, *kinds: str) -> list[Report]:
        return [one for one in self.reports if one.message.kind in kinds]

    def rank_at(self, address: str, device: int | None) -> tuple[tuple[int, ...], str | None]:
        """Return the ranks and the host of an address: of a device's network port, or of a server and a device."""
        name = self.evidence.host_at(address)
        if name is None:
            return (), None
        device = self.evidence.host(name).device_addresses.get(address, device)
        return tuple(rank.rank for rank in _on_device(self.evidence.ranks_of(name), device)), name

    def named(self, message: PeerLine) -> tuple[tuple[int, ...], str | None]:
        """Return the ranks and host that a line names: by known address, else by rank number."""
        for address, device in message.addresses:
            ranks, host = self.rank_at(address, device)
            if host is not None and (ranks or not message.ranks):
                return ranks, host
        known = tuple(rank for rank in message.ranks if rank in self.by_rank)
        return known, self.by_rank[known[0]].rank.host if known else None

    def naming(self, ranks: set[int]) -> list[Report]:
        return [one for one in self.reports if {*self.named(one.message)[0]} & ranks]

    def most_reported(self, *, among: set[int]) -> tuple[int, ...]:
        """Return the rank of `among` that waiting lines name at least twice as often as any other; () for none."""
        votes: Counter[int] = Counter()
        for one in self.reports:
            if one.message.wait is not None or one.message.kind in ("remote", "location"):
                votes.update({*self.named(one.message)[0]} & among - {one.rank})
        ranked = votes.most_common(2)
        if not ranked or (len(ranked) > 1 and ranked[0][1] < 2 * ranked[1][1]):
            return ()
        return (ranked[0][0],)

    def ranks_on(self, hosts: Iterable[str]) -> list[int]:
        return [rank.rank for host in hosts for rank in self.evidence.ranks_of(host)]

    def make(
        self,
        code: str,
        strength: int,
        ranks: Iterable[int],
        reports: Sequence[Report],
        *,
        hosts: Iterable[str] | None = None,
        caveats: str = "by-rule",
        sure: bool = False,
        at: Moment | None = None,
        values: Mapping[str, str | Rendered] | None = None,
        shows_output: bool = False,
    ) -> Candidate:
        """Make a candidate; `caveats`: names, separated by spaces. `shows_output`: prove it with the ranks' last
        output."""
        chosen = tuple(sorted(set(ranks)))
        if hosts is None:
            hosts = {self.by_rank[rank].rank.host for rank in chosen if rank in self.by_rank}
        proofs = [proof_of(self.evidence, one.message.line, one.timeline.rank) for one in reports[:3]]
        # The line of the first report has the values of the code's signature.
        line = reports[0].message.line.text if reports else ""
        found = next((hit.values for hit in scan([(0, line)]) if hit.signature.code == code), {})
        return Candidate(
            code,
            strength,
            chosen,
            tuple(sorted(set(hosts))),
            at=at,
            proofs=(*(self._last_output(chosen) if shows_output else ()), *proofs),
            sure=sure,
            caveats=tuple(caveats.split()),
            values={**found, **(values or {})},
        )

    def finished_early(self, ranks: Sequence[int]) -> Candidate:
        """Blame ranks that exited 0 while others waited for them."""
        at = earliest(self.by_rank[rank].end for rank in ranks)
        return self.make("finished-early", 52, ranks, self.waits, at=at)

    def _last_output(self, ranks: Iterable[int]) -> list[Proof]:
        """Return the last output of two of the ranks."""
        found = []
        for rank in [rank for rank in ranks if rank in self.by_rank][:2]:
            one = self.by_rank[rank].rank
            written = [line for line in one.lines if line.text.strip() and line.at_s is not None]
            if written:
                last = max(written, key=lambda line: line.at_s or 0.0)
                found.append(proof_of(self.evidence, last, one))
        return found

    def in_largest_group(self, name: str) -> dict[int, str]:
        """Return each rank's last value of this name in the largest communication group, by what it reports of its
        wait: operations of two groups are not comparable."""
        found: dict[int, str] = {}
        groups = {one.rank: one.message.values["group"] for one in self.messages("tag")}
        counted = self.messages(*COUNTED)
        common = most_common(groups.values()) or most_common(one.message.values.get("group") for one in counted)
        for one in counted:
            if groups.get(one.rank, one.message.values.get("group") or common) == common and name in one.message.values:
                found[one.rank] = one.message.values[name]
        return found

    def tags(self) -> dict[int, str]:
        """Return the collective of each rank in the largest group."""
        return self.in_largest_group("tag")


def has_finished(rank: RankEvidence) -> bool:
    return rank.code == 0 and not rank.stopped


def most_common(values: Iterable[str | None]) -> str | None:
    return next((value for value, _ in Counter(values).most_common(1)), None)


def minority(values: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks with the rarer of exactly two values; () if they are equally frequent."""
    counts = Counter(values.values())
    if len(counts) != 2:
        return ()
    (_common, many), (rare, few) = counts.most_common(2)
    return tuple(rank for rank, value in values.items() if value == rare) if few < many else ()


def _on_device(ranks: Sequence[RankEvidence], device: int | None) -> Sequence[RankEvidence]:
    if device is None:
        return ranks if len(ranks) == 1 else ()
    exact = [rank for rank in ranks if rank.device == device]
    if exact or any(rank.device is not None for rank in ranks):
        return exact
    return ranks[device : device + 1]


_TLS_ENTRY = re.compile(r"([0-9a-fA-F.:]+)/(\d+)")
_CULPRITS = (("hccl-culprit-cqe", "cqe"), ("hccl-culprit-stuck", "stuck"), ("hccl-culprit-lost", ""))
"""Broken links first, then stuck ranks, then lost ranks: the code, and a word of the type."""
_DIFFERS = {"differs": "EI0005", "mismatch": "collectives-mismatch", "models": "models-differ"}
_OWN_FAULT = frozenset({"no_network", "no_name"})
"""The reporting host's kernel or resolver returns these itself, without contacting another host."""
_UNREACHED = {"no_name": "name-not-resolved", "in_vain": "master-unreachable"}


# ---------------------------------------------------------------- reports of the communication library


def blame_tls(table: Table) -> Candidate | None:
    """Blame the smaller group if the TLS switch differs."""
    reports, links = table.messages("tls"), table.messages("link")
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
        return table.make("EI0016", 80, ranks, reports or links, caveats=caveats)
    places = [table.rank_at(address, int(device)) for address, device in sorted(on if len(on) <= len(off) else off)]
    return table.make(
        "EI0016",
        85,
        [rank for several, _ in places for rank in several],
        reports,
        hosts=[host for _, host in places if host is not None],
        sure=len(on) != len(off),
        caveats="two-sides" if len(on) == len(off) else "",
    )


def blame_differs(table: Table) -> Candidate | None:
    """Blame the outlier if ranks call different collectives, else all ranks that report it."""
    reports = table.messages(*_DIFFERS)
    if not reports:
        return None
    outliers = minority(table.tags()) or _outliers_in_one_aspect(table, reports)
    ranks = outliers or tuple(one.rank for one in reports)
    shown = sorted(reports, key=lambda one: one.rank not in ranks)
    caveats = "by-rule" if outliers else "who-unknown"
    return table.make(_DIFFERS[reports[0].message.kind], 75, ranks, shown, caveats=caveats)


def _outliers_in_one_aspect(table: Table, reports: Sequence[Report]) -> tuple[int, ...]:
    """Return the minority with another value for one aspect (operation, size): by its own report, otherwise by
    reports of others. Groups that number their ranks differently are not compared."""
    if any(m.kind == "mismatch" and m.ranks and m.ranks[0] != timeline.rank.rank for timeline, m in reports):
        return ()
    given: dict[str, dict[int, str]] = {}
    for one in reports:
        values, ranks = one.message.values, one.message.ranks
        if one.message.kind == "models":
            given["model"] = {**dict.fromkeys(range(ranks[0]), values["theirs"]), ranks[0]: values["own"]}
            continue
        for aspect, value in values.items():
            given.setdefault(aspect, {}).setdefault(one.rank, value)
    for one in table.messages("mismatch-elsewhere"):
        for aspect, value in one.message.values.items():
            given.setdefault(aspect, {}).setdefault(one.message.ranks[1], value)
    return next((few for few in map(minority, given.values()) if few), ())


def blame_cqe(table: Table) -> Candidate | None:
    """Blame, if RoCE stopped retrying, the host in every broken pair, else both ends."""
    return _blame_pairs(table, "EI0013", table.messages("cqe"))


def blame_completion(table: Table) -> Candidate | None:
    """Apply the rule of `blame_cqe` to NCCL, where an address is a host's, with all its ranks."""
    found = _blame_pairs(table, "nccl-ib-completion", table.messages("completion"))
    return found and replace(found, ranks=tuple(table.ranks_on(found.hosts)))


def _blame_pairs(table: Table, code: str, reports: Sequence[Report]) -> Candidate | None:
    if not reports:
        return None
    named = [table.named(one.message) for one in reports]
    common = set.intersection(*({one.host, *([host] if host else [])} for one, (_, host) in zip(reports, named)))
    remote = {rank for ranks, _ in named for rank in ranks}
    accused = {host for _, host in named if host is not None}
    hosts = common if len(reports) > 1 and len(common) == 1 else accused or {one.host for one in reports}
    ranks = [rank for rank in (*remote, *{one.rank for one in reports}) if table.by_rank[rank].rank.host in hosts]
    only = [rank for rank in ranks if rank in remote] or ranks
    at = reports[0].timeline.waited_at
    return table.make(code, 70, only, reports, hosts=hosts, caveats="network-or-peer", at=at)


def blame_location(table: Table) -> Candidate | None:
    """Blame the culprits that HCCL's heartbeat names."""
    reports = table.messages("location")
    named = {table.named(one.message)[1] for one in reports}
    if not reports or any(
        host.reachable is False and not host.has_ended and host.host in named for host in table.evidence.hosts
    ):
        return None  # any rank of an unreachable host may be named
    for code, word in _CULPRITS:
        chosen = [one for one in reports if word in one.message.values["type"].lower()]
        votes = Counter(who for who in (table.named(one.message) for one in chosen) if who[1] is not None)
        if votes:
            (ranks, _), count = votes.most_common(1)[0]
            tied = [who for who, number in votes.items() if number == count]
            if len(tied) == 1 and ranks and all(has_finished(table.by_rank[rank].rank) for rank in ranks):
                return table.finished_early(ranks)  # and therefore sent nothing
            naming = [one for one in chosen if table.named(one.message) in tied]
            hosts = [place for _, place in tied if place]
            caveats = "two-named" if len(tied) > 1 else "by-rule"
            return table.make(code, 65, [rank for who, _ in tied for rank in who], naming, hosts=hosts, caveats=caveats)
    address, device = reports[0].message.addresses[0]
    values = {"address": f"{address}/{device}"}
    return table.make("hccl-culprit-lost", 45, (), reports, caveats="address-unknown", values=values)


def blame_world_size(table: Table) -> Candidate | None:
    """Blame the world size if all started ranks joined the rendezvous, and the program waited for more."""
    started = max(table.evidence.world_size, len(table.timelines))
    reports = [
        one
        for one in table.messages("clients")
        if one.message.values and int(one.message.values["joined"]) == started < int(one.message.values["expected"])
    ]
    if not reports or table.evidence.launcher in LAUNCHERS:  # the number of ranks they started is unknown
        return None
    values = {name: reports[0].message.values[name] for name in ("joined", "expected")}
    return table.make("world-size-wrong", 60, (), reports, hosts=(), values=values)


def blame_missing(table: Table) -> Candidate | None:
    """Blame the ranks that did not join the rendezvous, which counts arrivals."""
    named = {rank for one in table.messages("missing") for rank in one.message.ranks}
    came = {rank for one in table.messages("connected") for rank in one.message.ranks}
    if came and not named:
        needed = [int(one.message.values["count"]) for one in table.messages("needed")]
        named = set(range(max([table.evidence.world_size, *needed]))) - came
    if not named or len(named) >= max(table.evidence.world_size, 2):
        return None
    return table.make("ranks-missing", 60, named, table.messages("missing", "connected"), caveats="no-response")


# ---------------------------------------------------------------- hosts that cannot reach each other


def blame_loopback(table: Table) -> Candidate | None:
    """Blame loopback addresses to which ranks connected instead of another node: the master's, if its name resolves so;
    or that of a peer, which is then the only host without a report."""
    master = table.by_rank.get(0)
    reports = [
        one
        for one in table.messages("unreached", "lost", "tried")
        if any(is_loopback(address) for address, _ in one.message.addresses)
        and (one.message.kind != "tried" or one.timeline.waited is not None)
        and (one.message.kind == "lost" or master is None or one.host != master.rank.host)
    ]
    if not reports or len(table.evidence.hosts) < 2:
        return None
    rest = {host.host for host in table.evidence.hosts} - {one.host for one in reports}
    values = {"address": reports[0].message.addresses[0][0]}
    if len(rest) == 1 and all(one.message.kind == "lost" for one in reports):
        return table.make("own-address-local", 75, table.ranks_on(rest), reports, hosts=rest, values=values)
    return table.make("master-address-local", 75, [one.rank for one in reports], reports, values=values)


def blame_unreached(table: Table) -> Candidate | None:
    """Blame the host that no other host reaches; else hosts that fail where others succeed; else the reporting host
    of a pair. A timeout is a broken path only if a rank there was listening."""
    reports = [one for one in table.messages("unreached") if _counts(table, one)]
    pairs: dict[tuple[str, str | None], Report] = {}
    for one in reports:
        path = (one.host, table.named(one.message)[1])
        if path[1] != one.host and (path not in pairs or pairs[path].message.values["why"] == "in_vain"):
            pairs[path] = one
    if not pairs:
        return None
    chosen = list(pairs.values())
    first, own = chosen[0].message, chosen[0].timeline.own
    why, whys = first.values["why"], {one.message.values["why"] for one in chosen}
    sources, target = _sides(table, pairs)
    others = {timeline.rank.host for timeline in table.timelines} - {target}
    hosts, ranks = sources, [one.rank for one in reports if one.host in sources]
    if target is not None and not whys & _OWN_FAULT and len(sources) > 1 and 2 * len(sources) > len(others):
        hosts, ranks = {target}, table.ranks_on([target])
    is_stranger = target is None and len(sources) == 1 and why in ("no_route", "no_answer") and own is not None
    if is_stranger and own is not None and "type" in own.values and not first.values["meeting"]:
        return table.make("exception", 57, ranks, chosen, hosts=hosts, caveats="only-symptom", values=own.values)
    tried = {address for one in chosen for address, _ in one.message.addresses}
    return table.make(
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


def _counts(table: Table, one: Report) -> bool:
    if one.message.values["why"] == "no_name":
        return one.timeline.waited is not None
    host = table.named(one.message)[1]  # None: an unknown address, possibly the master's
    return one.message.values["why"] != "in_vain" or any(
        host in (None, other.host) for other in table.messages("clients")
    )


def _sides(table: Table, pairs: Iterable[tuple[str, str | None]]) -> tuple[set[str], str | None]:
    """Return reporting hosts, and the single host that they name; several without a name mean the only other host."""
    sources = {source for source, _ in pairs}
    targets = {target for _, target in pairs if target is not None}
    rest = [host.host for host in table.evidence.hosts if host.host not in sources]
    if not targets and len(rest) == 1 and len(sources) > 1:
        return sources, rest[0]
    return sources, next(iter(targets)) if len(targets) == 1 else None
