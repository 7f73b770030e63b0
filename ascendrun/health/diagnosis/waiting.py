"""Whom to blame when the ranks only tell that they waited for each other, or lost each other."""

from __future__ import annotations

import re
from collections import Counter
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from ascendrun.ascend.signatures import scan
from ascendrun.health.diagnosis.candidates import Candidate
from ascendrun.health.diagnosis.clues import proof_of
from ascendrun.health.diagnosis.evidence import Evidence, RankEvidence
from ascendrun.health.diagnosis.peers import CONNECT, EXEC, LOST, Word
from ascendrun.health.diagnosis.stories import RankStory
from ascendrun.health.diagnosis.times import Moment
from ascendrun.health.diagnosis.verdict import Proof

LAGGING_S = 900.0
FEW_SHARE = 0.25
"""Silent ranks are blamed when they are no more than so many of all, or make up whole hosts."""
_TLS_ENTRY = re.compile(r"([0-9a-fA-F.:]+)/(\d+)")
_CQE_TYPE, _STUCK_TYPE = re.compile("cqe", re.IGNORECASE), re.compile("stuck", re.IGNORECASE)

Said = Tuple[RankStory, Word]


def blame_waiting(evidence: Evidence, stories: Sequence[RankStory]) -> Optional[Candidate]:
    """The first rule that can tell; None when no rank waited for or lost another, or nothing tells whom."""
    said: List[Said] = [(story, word) for story in stories for word in story.words]
    if not said:
        return None
    table = _Table(evidence, stories, said)
    rules: Tuple[Callable[[_Table], Optional[Candidate]], ...] = (
        _tls, _differs, _cqe, _location, _missing, _finished_early, _unreachable, _silent, _latest, _sequence, _lagging,
        _chain, _named,
    )
    for rule in rules:
        found = rule(table)
        if found is not None:
            return found
    return None


class _Table:
    """What the rules look at."""

    def __init__(self, evidence: Evidence, stories: Sequence[RankStory], said: Sequence[Said]) -> None:
        self.evidence, self.stories, self.said = evidence, stories, said
        self.by_rank = {story.rank.rank: story for story in stories}
        self.waiting = [story for story in stories if story.waited in (CONNECT, EXEC)]
        self.losing = [story for story in stories if story.waited == LOST]

    def words(self, *kinds: str) -> List[Said]:
        return [(story, word) for story, word in self.said if word.kind in kinds]

    def rank_at(self, address: str, device: Optional[int]) -> Tuple[Tuple[int, ...], Optional[str]]:
        """The ranks and the host behind an address: of a device's own network port, or of a server and a device."""
        for host in self.evidence.hosts:
            if address in host.device_addresses:
                device = host.device_addresses[address]
            elif address not in host.addresses and address != host.host:
                continue
            ranks = self.evidence.ranks_of(host.host)
            return tuple(rank.rank for rank in _on_device(ranks, device)), host.host
        return (), None

    def named(self, word: Word) -> Tuple[Tuple[int, ...], Optional[str]]:
        """Whom a line names: by address where that is known, else by the rank's number."""
        for address, device in word.addresses:
            ranks, host = self.rank_at(address, device)
            if host is not None and (ranks or not word.ranks):
                return ranks, host
        known = tuple(rank for rank in word.ranks if rank in self.by_rank)
        return known, self.by_rank[known[0]].rank.host if known else None

    def hosts_of(self, ranks: Iterable[int]) -> Tuple[str, ...]:
        return tuple(sorted({self.by_rank[rank].rank.host for rank in ranks if rank in self.by_rank}))

    def proofs(self, said: Sequence[Said], *, limit: int = 3) -> Tuple[Proof, ...]:
        return tuple(proof_of(self.evidence, word.line, rank=story.rank.rank, host=story.rank.host)
                     for story, word in said[:limit])

    def make(self, code: str, strength: int, ranks: Iterable[int], said: Sequence[Said], *,
             hosts: Optional[Iterable[str]] = None, doubts: Tuple[str, ...] = (), sure: bool = False,
             at: Optional[Moment] = None, retry: str = "unknown", blames: str = "peer",
             values: Optional[Dict[str, str]] = None) -> Candidate:
        chosen = tuple(sorted(set(ranks)))
        words = {} if not said else _values_of(code, said[0][1].line.text)
        places = tuple(sorted(set(hosts))) if hosts is not None else self.hosts_of(chosen)
        return Candidate(code, strength, chosen, places, at=at, proofs=self.proofs(said), sure=sure, blames=blames,
                         doubts=doubts, retry=retry, values={**words, **(values or {})})

    def groups(self) -> Dict[int, str]:
        """The communication group that each rank waited in: operations of different ones cannot be compared."""
        return {story.rank.rank: word.values["group"] for story, word in self.words("tag")}  # its plog's word counts

    def tags(self) -> Dict[int, str]:
        """The collective of each rank, of those in the group that most are in."""
        groups = self.groups()
        common = _most(groups.values())
        return {story.rank.rank: word.values["tag"] for story, word in self.words("tag")
                if groups[story.rank.rank] == common}

    @property
    def waits(self) -> List[Said]:
        return [(story, word) for story, word in self.said if word.wait is not None]


def _most(values: Iterable[str]) -> Optional[str]:
    counted = Counter(values).most_common(1)
    return counted[0][0] if counted else None


def _values_of(code: str, text: str) -> Mapping[str, str]:
    """What a line has in the places of the signature of that code."""
    return next((hit.values for hit in scan([(0, text)]) if hit.signature.code == code), {})


def _on_device(ranks: Sequence[RankEvidence], device: Optional[int]) -> Sequence[RankEvidence]:
    if device is None:
        return ranks if len(ranks) == 1 else ()
    exact = [rank for rank in ranks if rank.device == device]
    if exact or any(rank.device is not None for rank in ranks):
        return exact
    return ranks[device:device + 1]


# ---------------------------------------------------------------- what the library itself says


def _tls(table: _Table) -> Optional[Candidate]:
    """The TLS switch differs: those of the smaller side."""
    said = table.words("tls")
    sides: Dict[str, Set[Tuple[str, str]]] = {"on": set(), "off": set()}
    for _story, word in said:
        for side, entries in sides.items():
            entries.update(_TLS_ENTRY.findall(word.values.get(side, "")))
    rows: Dict[str, Set[int]] = {}
    for story, word in table.words("link"):
        if word.values.get("tls"):
            rows.setdefault(word.values["tls"].upper(), set()).add(story.rank.rank)
    if not said and len(rows) < 2:
        return None
    if not sides["on"] or not sides["off"]:
        smaller = min(rows.values(), key=len) if len(rows) > 1 else set()
        is_minor = bool(smaller) and 2 * len(smaller) < sum(map(len, rows.values()))
        return table.make("EI0016", 80, smaller if is_minor else (), said or table.words("link"), retry="never",
                          blames="node", doubts=("who-unknown",) if not is_minor else ("by-rule",))
    fewer = min(sides.values(), key=len)
    places = [table.rank_at(address, int(device)) for address, device in sorted(fewer)]
    even = len(sides["on"]) == len(sides["off"])
    return table.make("EI0016", 85, [rank for ranks, _ in places for rank in ranks], said, retry="never",
                      hosts=[host for _, host in places if host is not None], sure=not even, blames="node",
                      doubts=("two-sides",) if even else ())


def _differs(table: _Table) -> Optional[Candidate]:
    """Ranks call different collectives: the odd one, else all that complain."""
    said = table.words("differs")
    if not said:
        return None
    odd = _minority(table.tags())
    ranks = odd or tuple(story.rank.rank for story, _ in said)
    return table.make("EI0005", 75, ranks, said, retry="never", blames="job",
                      doubts=("by-rule",) if odd else ("who-unknown",))


def _cqe(table: _Table) -> Optional[Candidate]:
    """RoCE gave up sending: the host that takes part in every broken pair, else both ends."""
    said = table.words("cqe")
    if not said:
        return None
    pairs = [({story.rank.host}, table.named(word)) for story, word in said]
    common = set.intersection(*({*own, *([host] if host else [])} for own, (_, host) in pairs))
    remote = {rank for _, (ranks, _) in pairs for rank in ranks}
    accused = {host for _, (_, host) in pairs if host is not None}
    if len(pairs) > 1 and len(common) == 1:
        hosts = common
    else:
        hosts = accused or {story.rank.host for story, _ in said}
    local = {story.rank.rank for story, _ in said}
    ranks = [rank for rank in (*remote, *local) if table.by_rank[rank].rank.host in hosts]
    only = [rank for rank in ranks if rank in remote] or ranks
    return table.make("EI0013", 70, only, said, hosts=hosts, doubts=("network-or-peer",), retry="exclude",
                      blames="network", at=said[0][0].waited_at)


def _location(table: _Table) -> Optional[Candidate]:
    """HCCL's heartbeat names culprits: broken links count more than stuck ones, those more than lost ones."""
    said = table.words("location")
    if not said:
        return None
    for code, test in (("hccl-culprit-cqe", _CQE_TYPE.search), ("hccl-culprit-stuck", _STUCK_TYPE.search),
                       ("hccl-culprit-lost", lambda text: True)):
        chosen = [(story, word) for story, word in said if test(word.values["type"])]
        votes = Counter(table.named(word) for _story, word in chosen)
        votes = Counter({who: count for who, count in votes.items() if who[1] is not None})
        if votes:
            (ranks, host), count = votes.most_common(1)[0]
            tied = [who for who, number in votes.items() if number == count]
            doubts = ("two-named",) if len(tied) > 1 else ("by-rule",)
            rest = _accused_end(table, ranks) if len(tied) == 1 else None
            if rest is not None:
                return rest
            return table.make(code, 65, [rank for who, _ in tied for rank in who],
                              [one for one in chosen if table.named(one[1]) in tied],
                              hosts=[place for _, place in tied if place], doubts=doubts)
    return table.make("hccl-culprit-lost", 45, (), said, doubts=("address-unknown",),
                      values={"address": f"{said[0][1].addresses[0][0]}/{said[0][1].addresses[0][1]}"})


def _accused_end(table: _Table, ranks: Sequence[int]) -> Optional[Candidate]:
    """An accused rank that had simply finished explains its silence."""
    ended = [rank for rank in ranks if _finished(table.by_rank[rank].rank)]
    return _early(table, ended) if ended and len(ended) == len(ranks) else None


def _missing(table: _Table) -> Optional[Candidate]:
    """The meeting point counts who came: those who did not."""
    named = {rank for _story, word in table.words("missing") for rank in word.ranks}
    came = {rank for _story, word in table.words("connected") for rank in word.ranks}
    if came and not named:
        needed = max((int(word.values["count"]) for _story, word in table.words("needed")), default=0)
        total = max(needed, table.evidence.world_size)
        named = set(range(total)) - came
    if not named or len(named) >= max(table.evidence.world_size, 2):
        return None
    return table.make("ranks-missing", 60, named, table.words("missing", "connected"), doubts=("silent",))


# ---------------------------------------------------------------- who is silent, early, late


def _finished(rank: RankEvidence) -> bool:
    return rank.code == 0 and not rank.stopped


def _early(table: _Table, ranks: Sequence[int]) -> Candidate:
    ends = [table.by_rank[rank].end for rank in ranks]
    known = [end for end in ends if end is not None]
    return table.make("finished-early", 52, ranks, table.waits, doubts=("by-rule",), retry="never", blames="job",
                      at=min(known, key=lambda end: end.at_s, default=None))


def _finished_early(table: _Table) -> Optional[Candidate]:
    """Some ranks ended well while others still waited for them: they had fewer steps to do."""
    ended = [story for story in table.stories if _finished(story.rank)]
    suffering = [*table.waiting, *table.losing]
    if not ended or not suffering or len(ended) >= len(table.stories):
        return None
    before = [story for story in ended if not any(
        other.waited_at is not None and story.end is not None and other.waited_at.is_before(story.end)
        for other in suffering)]
    return _early(table, [story.rank.rank for story in before]) if before else None


def _unreachable(table: _Table) -> Optional[Candidate]:
    """Hosts that do not answer and whose ranks left no exit, while others wait for them."""
    hosts = []
    for host in table.evidence.hosts:
        ranks = [table.by_rank[rank.rank] for rank in table.evidence.ranks_of(host.host)]
        quiet = [story for story in ranks if not story.rank.has_ended and story.waited is None]
        if host.reachable is False and ranks and len(quiet) == len(ranks):
            hosts.append(host.host)
    if not hosts or len(hosts) >= len(table.evidence.hosts):
        return None
    ranks_there = [rank.rank for host in hosts for rank in table.evidence.ranks_of(host)]
    return table.make("node-silent", 58, ranks_there, table.waits, hosts=hosts, doubts=("silent",), retry="same",
                      blames="node")


def _silent(table: _Table) -> Optional[Candidate]:
    """Part of the ranks timed out: the others kept them waiting, if they are few or whole hosts."""
    suffering = {story.rank.rank for story in (*table.waiting, *table.losing)}
    quiet = [story for story in table.stories
             if story.rank.rank not in suffering and not story.has_cause and not story.rank.has_failed]
    if not quiet or not suffering:
        return None
    ranks = {story.rank.rank for story in quiet}
    narrowed = _most_named(table, among=ranks)
    if len(quiet) > 1 and narrowed:
        ranks = set(narrowed)
    hosts = table.hosts_of(ranks)
    whole = ranks == {rank.rank for host in hosts for rank in table.evidence.ranks_of(host)}
    few = len(ranks) <= max(1, FEW_SHARE * len(table.stories))
    if not (narrowed or few or (whole and 2 * len(hosts) <= len({one.rank.host for one in table.stories}))):
        return None
    unseen = all(not table.by_rank[rank].rank.has_ended for rank in ranks)
    code = "node-silent" if whole and unseen and len(table.evidence.hosts) > len(hosts) else "rank-silent"
    return table.make(code, 54, ranks, _naming(table, ranks) or table.waits, doubts=("silent",))


def _latest(table: _Table) -> Optional[Candidate]:
    """All timed out, further apart than the timeout: the last to complain came last, when the first had given up."""
    if len(table.waiting) < len(table.stories) or len(table.waiting) < 2:
        return None
    times = [(story, story.waited_at) for story in table.waiting if story.waited_at is not None]
    if len(times) < len(table.waiting):
        return None
    first, last = (function(at.at_s for _, at in times) for function in (min, max))
    error_s = sum(sorted((at.error_s for _, at in times), reverse=True)[:2])
    connecting = any(story.waited == CONNECT for story in table.waiting)
    limit_s = table.evidence.connect_timeout_s if connecting else table.evidence.exec_timeout_s
    if last - first - error_s <= limit_s:
        return None
    late = [story.rank.rank for story, at in times if last - at.at_s < max(5.0, at.error_s)]
    if 2 * len(late) > len(table.stories):
        return None
    said = [one for one in table.waits if one[0].rank.rank in late] + table.waits[:1]
    return table.make("late-rank", 56, late, said, doubts=("by-rule",), retry="same",
                      values={"spread": f"{last - first:.0f}", "timeout": f"{limit_s:.0f}"})


def _sequence(table: _Table) -> Optional[Candidate]:
    """Ranks that are a collective behind the others, or in another one."""
    groups = table.groups()
    common = _most(groups.values())
    for kind, name in (("index", "index"), ("sequence", "seq")):
        numbers: Dict[int, int] = {}
        for story, word in table.words(kind):
            if groups.get(story.rank.rank, common) == common:
                numbers.setdefault(story.rank.rank, int(word.values[name]))
        if len(numbers) > 1 and len(set(numbers.values())) > 1:
            lowest = min(numbers.values())
            behind = [rank for rank, number in numbers.items() if number == lowest]
            if 2 * len(behind) < len(numbers):
                said = [one for one in table.words(kind) if one[0].rank.rank in behind]
                return table.make("behind", 56, behind, said, doubts=("by-rule",),
                                  values={"index": str(lowest), "others": str(max(numbers.values()))})
    odd = _minority(table.tags())
    odd = odd or _minority({story.rank.rank: word.values["op"] for story, word in table.words("sequence")
                            if "op" in word.values})
    if not odd:
        return None
    said = [one for one in table.words("tag", "sequence") if one[0].rank.rank in odd]
    return table.make("collective-differs", 57, odd, said, doubts=("by-rule",), retry="never", blames="job")


def _lagging(table: _Table) -> Optional[Candidate]:
    """A rank that was steps behind, or had been quiet for long, when the others gave up."""
    if not (table.waiting or table.losing):
        return None
    steps = {story.rank.rank: story.rank.last_step for story in table.stories if story.rank.last_step is not None}
    if len(steps) > 2 and len(steps) == len(table.stories):
        ordered = sorted(steps.values())
        middle = ordered[len(ordered) // 2]
        behind = [rank for rank, step in steps.items() if step < middle - 1]
        if behind and 4 * len(behind) <= len(steps):
            return table.make("lagging", 50, behind, table.waits, doubts=("by-rule",),
                              values={"step": str(min(ordered)), "others": str(middle)})
    quiet_s = {story.rank.rank: story.rank.last_output_s for story in table.stories}
    heard = sorted(at for at in quiet_s.values() if at is not None)
    if len(heard) < 3 or len(heard) < len(table.stories):
        return None
    middle_s = heard[len(heard) // 2]
    late = [rank for rank, at in quiet_s.items() if at is not None and middle_s - at > LAGGING_S]
    if not late or 4 * len(late) > len(heard):
        return None
    return table.make("lagging", 45, late, table.waits, doubts=("by-rule", "clocks"), values={})


# ---------------------------------------------------------------- who is named


def _chain(table: _Table) -> Optional[Candidate]:
    """Who waits for whom: blame is at the chain's end, with one who waits for nobody; else it is a circle."""
    edges: Dict[int, Set[int]] = {}
    for story, word in table.words("link", "remote"):
        if word.wait is None:
            continue
        ranks, _host = table.named(word)
        edges.setdefault(story.rank.rank, set()).update(rank for rank in ranks if rank != story.rank.rank)
    edges = {rank: targets for rank, targets in edges.items() if targets}
    if not edges:
        return None
    ends = {target for targets in edges.values() for target in targets} - set(edges)
    said = [one for one in table.words("link", "remote") if one[1].wait is not None]
    if ends and len(ends) <= max(1, FEW_SHARE * len(table.stories)):
        return table.make("wait-chain", 53, ends, [one for one in said if set(table.named(one[1])[0]) & ends],
                          doubts=("by-rule",))
    circle = _circle(edges)
    if not ends and len(circle) == 2:
        return table.make("link-broken", 52, circle, said, doubts=("network-or-peer",), retry="exclude",
                          blames="network")
    if not ends and circle:
        return table.make("wait-cycle", 50, circle, said, doubts=("by-rule",), blames="job")
    return None


def _circle(edges: Dict[int, Set[int]]) -> Tuple[int, ...]:
    """One cycle, when every rank waits for exactly one other; a web of waits blames nobody."""
    if any(len(targets) != 1 for targets in edges.values()):
        return ()
    path: List[int] = []
    at = min(edges)
    while at in edges and at not in path:
        path.append(at)
        at = next(iter(edges[at]))
    return tuple(path[path.index(at):]) if at in path else ()


def _named(table: _Table) -> Optional[Candidate]:
    """Who is named most when everything else is silent."""
    ranks = _most_named(table, among=set(table.by_rank))
    if ranks:
        return table.make("most-named", 45, ranks, _naming(table, set(ranks)), doubts=("by-rule",))
    accused = (table.named(word)[1] for _story, word in table.words("lost", "link", "timeout"))
    hosts = Counter(host for host in accused if host is not None)
    total = sum(hosts.values())
    if not hosts or total < 2:
        return None
    host, count = hosts.most_common(1)[0]
    outside = [story for story in (*table.losing, *table.waiting) if story.rank.host != host]
    if 3 * count < 2 * total or not outside:
        return None
    there = [rank.rank for rank in table.evidence.ranks_of(host)]
    said = [one for one in table.words("lost", "link", "timeout") if table.named(one[1])[1] == host]
    return table.make("most-named", 42, there, said, hosts=[host], doubts=("by-rule",))


def _most_named(table: _Table, *, among: Set[int]) -> Tuple[int, ...]:
    """The one rank of `among` that lines about waits name clearly more than any other; () none is."""
    votes: Counter[int] = Counter()
    for story, word in table.said:
        if word.wait is None and word.kind not in ("remote", "location"):
            continue
        ranks, _host = table.named(word)
        for rank in {*ranks} & among - {story.rank.rank}:
            votes[rank] += 1
    ranked = votes.most_common(2)
    if not ranked or ranked[0][1] < 1:
        return ()
    if len(ranked) > 1 and ranked[0][1] < 2 * ranked[1][1]:
        return ()
    return (ranked[0][0],)


def _naming(table: _Table, ranks: Set[int]) -> List[Said]:
    return [(story, word) for story, word in table.said if {*table.named(word)[0]} & ranks]


def _minority(values: Dict[int, str]) -> Tuple[int, ...]:
    """The ranks with the rarest value, when there are two values and the rare one is clearly rare."""
    counts = Counter(values.values())
    if len(counts) != 2:
        return ()
    (_common, many), (rare, few) = counts.most_common(2)
    return tuple(rank for rank, value in values.items() if value == rare) if 2 * few <= many or few < many else ()
