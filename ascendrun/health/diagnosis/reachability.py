"""Rules for hosts that cannot reach each other: the side of a broken path to check."""

from __future__ import annotations

from collections.abc import Sequence

from ascendrun.health.diagnosis.candidates import Candidate
from ascendrun.health.diagnosis.peers import is_loopback
from ascendrun.health.diagnosis.wait_table import Report, Table
from ascendrun.text.format import fold_hosts

_OWN_FAULT = frozenset({"no_network", "no_name"})
"""The reporting host's kernel or resolver returns these itself, without contacting another host."""
_CODES = {"no_name": "name-not-resolved", "in_vain": "master-unreachable"}


def blame_loopback(table: Table) -> Candidate | None:
    """Blame loopback addresses to which ranks connected instead of another node: the master's, if its name resolves so;
    or that of a peer, which is then the only host without a report."""
    master = table.by_rank.get(0)
    reports = [
        (timeline, message)
        for timeline, message in table.messages("unreached", "lost", "tried")
        if any(is_loopback(address) for address, _ in message.addresses)
        and (message.kind != "tried" or timeline.waited is not None)
        and (message.kind == "lost" or master is None or timeline.rank.host != master.rank.host)
    ]
    if not reports or len(table.evidence.hosts) < 2:
        return None
    rest = {host.host for host in table.evidence.hosts} - {timeline.rank.host for timeline, _ in reports}
    if len(rest) == 1 and all(message.kind == "lost" for _, message in reports):
        ranks = [rank.rank for host in rest for rank in table.evidence.ranks_of(host)]
        values = {"address": reports[0][1].addresses[0][0]}
        return table.make(
            "own-address-local", 75, ranks, reports, hosts=rest, retry="never", blames="node", values=values
        )
    return table.make(
        "master-address-local",
        75,
        [timeline.rank.rank for timeline, _ in reports],
        reports,
        retry="never",
        blames="job",
        values={"address": reports[0][1].addresses[0][0]},
    )


def blame_unreached(table: Table) -> Candidate | None:
    """Blame the host that no other host reaches; else hosts that fail where others succeed; else the reporting host
    of a pair. A timeout is a broken path only if a rank there was listening."""
    reports = [one for one in table.messages("unreached") if _counts(table, one)]
    pairs: dict[tuple[str, str | None], Report] = {}
    for one in reports:
        timeline, message = one
        target = table.named(message)[1]
        if target != timeline.rank.host:
            known = pairs.get((timeline.rank.host, target))
            if known is None or known[1].values["why"] == "in_vain":
                pairs[(timeline.rank.host, target)] = one
    if not pairs:
        return None
    chosen = list(pairs.values())
    sources, target = _sides(table, pairs)
    whys = {message.values["why"] for _, message in chosen}
    is_target = target is not None and not whys & _OWN_FAULT and _is_everybody(table, sources, target)
    hosts = {target} if is_target and target is not None else sources
    ranks = [rank.rank for host in hosts for rank in table.evidence.ranks_of(host)]
    if not is_target:
        ranks = [timeline.rank.rank for timeline, _ in reports if timeline.rank.host in hosts]
    why = chosen[0][1].values["why"]
    own = chosen[0][0].own
    if (
        target is None
        and len(sources) == 1
        and why in ("no_route", "no_answer")
        and own is not None
        and ("type" in own.values and not chosen[0][1].values["meeting"])
    ):
        return table.make("exception", 57, ranks, chosen, hosts=hosts, caveats="only-symptom", values=own.values)
    code = "hccl-root-unreachable" if "TopoExchangeAgent" in chosen[0][1].line.text else _CODES.get(why, "no-route")
    caveats = "by-rule" if whys <= _OWN_FAULT else "network-or-peer"
    values = {
        "reason": chosen[0][1].values["reason"],
        "from": fold_hosts(sorted(sources)),
        "to": target or _place(chosen),
    }
    return table.make(
        code, 57, ranks, chosen, hosts=hosts, blames="network", caveats=caveats, retry="exclude", values=values
    )


def _place(reports: Sequence[Report]) -> str:
    """Return the address or name that was tried; it is not a host of the job."""
    tried = {address for _, message in reports for address, _ in message.addresses}
    return ", ".join(sorted(tried)) or "?"


def _counts(table: Table, one: Report) -> bool:
    timeline, message = one
    if message.values["why"] == "no_name":
        return timeline.waited is not None
    if message.values["why"] != "in_vain":
        return True
    host = table.named(message)[1]  # None: an unknown address, possibly the master's
    return any(host in (None, other.rank.host) for other, _ in table.messages("clients"))


def _sides(table: Table, pairs: dict[tuple[str, str | None], Report]) -> tuple[set[str], str | None]:
    """Return reporting hosts, and the single host that they name; several without a name mean the only other host."""
    sources = {source for source, _ in pairs}
    targets = {target for _, target in pairs if target is not None}
    if len(targets) == 1:
        return sources, next(iter(targets))
    rest: list[str] = [host.host for host in table.evidence.hosts if host.host not in sources]
    if not targets and len(rest) == 1 and len(sources) > 1:
        return sources, rest[0]
    return sources, None


def _is_everybody(table: Table, sources: set[str], target: str) -> bool:
    """Return whether at least two hosts, and more than half of the others, report the target."""
    others = {timeline.rank.host for timeline in table.timelines} - {target}
    return len(sources) > 1 and 2 * len(sources) > len(others)
