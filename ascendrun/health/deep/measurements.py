"""Measurements of a deep check: the schedule of pairs of hosts, slow hosts and slow links, and the report.

Round 1 pairs neighbours, round 2 pairs distant hosts. Then every slow host is paired with healthy hosts, until
either the host or the link is known to be slow. The pairs of a round are disjoint and run in parallel. A pair is slow
relative to the median of the hosts' best results, not to an absolute number. That median is reliable if fewer
than a quarter of the hosts are faulty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from statistics import median_high
from typing import Any

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.text import Text

Pair = tuple[str, str]

PARTNERS = 2
"""Every healthy host is measured with this number of others, so that a slow result can be confirmed."""
PROOFS = 2
"""Required slow results: of a host with different healthy partners, of a link in repeated measurements."""


@dataclass(frozen=True)
class Exchange:
    """One measurement between two hosts. `rates`: by name, larger is better, such as bytes a second or 1/latency.

    `rates` None: they could not exchange data; `why`: the reason.
    """

    one: str
    other: str
    rates: Mapping[str, float] | None
    why: str | Text | None = None

    @property
    def pair(self) -> Pair:
        return pair_of(self.one, self.other)


@dataclass(frozen=True)
class PairEvaluation:
    """The conclusions from the results so far. `typical`: by rate, the median over each host's best.

    `slow`: pairs whose best measurement is slow or failed. `sound`: hosts with at least one pair that is not slow.
    `bad_hosts`: slow with all partners. `bad_links`: slow between two sound hosts, measured twice.
    `splits`: two groups of hosts, fast inside and slow between, with the bad links between them: one fault of the
    network, such as a switch's uplink, instead of many links. `unclear`: slow pairs without any of these
    explanations, because there were too few sound hosts to compare with.
    """

    typical: Mapping[str, float]
    slow: frozenset[Pair]
    sound: frozenset[str]
    bad_hosts: tuple[str, ...]
    bad_links: tuple[Pair, ...]
    splits: tuple[Split, ...]
    unclear: tuple[Pair, ...]

    @property
    def lone_links(self) -> tuple[Pair, ...]:
        """Return the bad links that are not part of a split."""
        known = {pair for split in self.splits for pair in split.links}
        return tuple(pair for pair in self.bad_links if pair not in known)


@dataclass(frozen=True)
class Split:
    """Two groups of hosts in the order of all hosts, and the bad links between them."""

    one: tuple[str, ...]
    other: tuple[str, ...]
    links: tuple[Pair, ...]


def pair_of(one: str, other: str) -> Pair:
    return (one, other) if one <= other else (other, one)


def evaluate_pairs(hosts: Sequence[str], results: Sequence[Exchange], *, shares: Mapping[str, float]) -> PairEvaluation:
    """Evaluate results. `shares`: by rate, the fraction of typical below which a pair is slow; others are ignored."""
    best = best_of_pairs(results)
    of_hosts = best_of_hosts(results).values()  # a pair's own rate would lower both hosts' values
    rates_of = {name: [rates[name] for rates in of_hosts if name in rates] for name in shares}
    typical = {name: median_high(values) for name, values in rates_of.items() if values}
    slow = frozenset(pair for pair, rates in best.items() if is_slow(rates, typical, shares))
    sound = frozenset(host for pair in best if pair not in slow for host in pair)
    partners = partners_of(results)
    bad_hosts = tuple(host for host in hosts if _is_bad(host, partners.get(host, set()), slow, sound))
    counts = Counter(result.pair for result in results)
    bad_links = tuple(pair for pair in sorted(slow) if sound.issuperset(pair) and counts[pair] >= PROOFS)
    known = set(bad_hosts)
    unclear = tuple(pair for pair in sorted(slow) if pair not in bad_links and not known.intersection(pair))
    splits = _splits(hosts, [pair for pair in best if pair not in slow], bad_links)
    return PairEvaluation(typical, slow, sound, bad_hosts, bad_links, splits, unclear)


def next_round(
    hosts: Sequence[str], results: Sequence[Exchange], *, shares: Mapping[str, float], partners: int = PARTNERS
) -> tuple[Pair, ...]:
    """Return disjoint pairs to measure in parallel; () if no more are useful.

    A pair is measured once, and again if it alone is slow; so the number of rounds is finite.
    """
    evaluation = evaluate_pairs(hosts, results, shares=shares)
    met = partners_of(results)
    draft = _Round(hosts, met, set(evaluation.bad_hosts))
    draft.pair_suspects(evaluation.sound)
    counts = Counter(result.pair for result in results)
    for pair in evaluation.unclear:
        if evaluation.sound.issuperset(pair) and counts[pair] < PROOFS:
            draft.add(*pair)
    draft.pair_the_rest(partners)
    if len(evaluation.bad_links) > 1:
        draft.bisect({host for pair in evaluation.bad_links for host in pair})
    return tuple(draft.pairs)


def best_of_pairs(results: Sequence[Exchange]) -> dict[Pair, Mapping[str, float] | None]:
    """Return each pair's best rate by name over its measurements; None if all of them failed."""
    best: dict[Pair, Mapping[str, float] | None] = {}
    for result in results:
        before = best.get(result.pair)
        if before is None or result.rates is None:
            best[result.pair] = before if result.rates is None else dict(result.rates)
        else:
            best[result.pair] = {
                name: max(before.get(name, 0.0), result.rates.get(name, 0.0)) for name in {*before, *result.rates}
            }
    return best


def best_of_hosts(results: Sequence[Exchange]) -> dict[str, dict[str, float]]:
    """Return each host's best rate by name with any partner, without hosts that exchanged no data."""
    best: dict[str, dict[str, float]] = {}
    for pair, rates in best_of_pairs(results).items():
        for host in pair:
            for name, value in (rates or {}).items():
                mine = best.setdefault(host, {})
                mine[name] = max(value, mine.get(name, 0.0))
    return best


def partners_of(results: Sequence[Exchange]) -> dict[str, set[str]]:
    """Return the partners of each host's measurements."""
    met: dict[str, set[str]] = {}
    for result in results:
        met.setdefault(result.one, set()).add(result.other)
        met.setdefault(result.other, set()).add(result.one)
    return met


def is_slow(rates: Mapping[str, float] | None, typical: Mapping[str, float], shares: Mapping[str, float]) -> bool:
    """Return whether any rate is below its fraction of the typical rate; a failed pair is slow."""
    if rates is None:
        return True
    return any(
        rates[name] < share * typical[name] for name, share in shares.items() if name in rates and name in typical
    )


def _is_bad(host: str, partners: set[str], slow: frozenset[Pair], sound: frozenset[str]) -> bool:
    """Return whether a host is not sound, and slow with PROOFS sound partners (or all sound hosts)."""
    if host in sound:
        return False
    witnesses = [other for other in partners if other in sound and pair_of(host, other) in slow]
    return len(witnesses) >= PROOFS or (bool(witnesses) and sound <= partners)


def _splits(hosts: Sequence[str], good: Sequence[Pair], bad_links: Sequence[Pair]) -> tuple[Split, ...]:
    """Return pairs of groups, each connected by good pairs, with more than one bad link between them."""
    group = _group_by(hosts, good)
    between: dict[tuple[int, int], list[Pair]] = {}
    for one, other in bad_links:
        low, high = sorted((group[one], group[other]))
        if low != high:
            between.setdefault((low, high), []).append((one, other))
    return tuple(
        Split(
            tuple(host for host in hosts if group[host] == low),
            tuple(host for host in hosts if group[host] == high),
            tuple(links),
        )
        for (low, high), links in sorted(between.items())
        if len(links) > 1
    )


def _group_by(hosts: Sequence[str], pairs: Sequence[Pair]) -> dict[str, int]:
    """Return a number for each host, equal if pairs connect the hosts: the index of the group's first host."""
    parent = list(range(len(hosts)))
    place = {host: number for number, host in enumerate(hosts)}

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    for one, other in pairs:
        low, high = sorted((root(place[one]), root(place[other])))
        parent[high] = low
    return {host: root(number) for host, number in place.items()}


class _Round:
    """A round under construction: the free hosts, and their possible partners."""

    def __init__(self, hosts: Sequence[str], met: Mapping[str, set[str]], bad: set[str]) -> None:
        self._hosts = [host for host in hosts if host not in bad]
        self._place = {host: place for place, host in enumerate(self._hosts)}
        self._met = met
        self._busy: set[str] = set()
        self.pairs: list[Pair] = []

    def add(self, one: str, other: str) -> None:
        """Add the pair if both hosts are free."""
        if self._busy.isdisjoint((one, other)):
            self._busy.update((one, other))
            self.pairs.append(pair_of(one, other))

    def pair_suspects(self, sound: frozenset[str]) -> None:
        """Pair each measured host that is not sound with a sound host that is a new partner."""
        for host in self._hosts:
            met = self._met.get(host)
            if met and host not in sound:
                self._pair(
                    host, (one for one in self._hosts if one in sound and one not in met and one not in self._busy)
                )

    def pair_the_rest(self, partners: int) -> None:
        """Pair free hosts that had too few partners with each other, else with any new partner."""
        wanting = [host for host in self._hosts if len(self._met.get(host, ())) < partners]
        for among in (set(wanting), set(self._hosts)):
            for host in wanting:
                self._pair(host, (one for one in self._candidates(host) if one in among))

    def bisect(self, doubtful: set[str]) -> None:
        """Pair hosts of bad links at decreasing distances, until the hosts of one switch form a group."""
        for host in [host for host in self._hosts if host in doubtful]:
            if len(self._met.get(host, ())) <= len(self._hosts).bit_length():
                self._pair(host, (one for one in self._candidates(host) if one in doubtful))

    def _pair(self, host: str, others: Iterator[str]) -> None:
        """Pair a free host with the first of the others."""
        other = next(others, None) if host not in self._busy else None
        if other is not None:
            self.add(host, other)

    def _candidates(self, host: str) -> Iterator[str]:
        """Yield free new partners: first the neighbour, which often shares a switch; then the most distant."""
        met = self._met.get(host, set())
        count, place = len(self._hosts), self._place[host]
        first = max(1, count >> len(met)) if met else 1
        for step in range(count):
            other = self._hosts[(place + first + step) % count]
            if other != host and other not in met and other not in self._busy:
                yield other


Lines = Sequence[Mapping[str, Any]]
"""Lines of the metrics files of all ranks of one measurement job."""

BANDWIDTH, PROMPTNESS, RAIL = "bandwidth", "promptness", "rail "
"""Rates of a pair: bytes/s of the complete mesh, 1/latency, and `rail npu:3`, bytes/s of one rail."""


@dataclass(frozen=True)
class Quantity:
    """A measured value with its unit. `device`: its rail, "" for none."""

    value: float
    unit: str
    device: str = ""

    def __str__(self) -> str:
        return f"{self.device}: {self._number()}" if self.device else self._number()

    def _number(self) -> str:
        """Return three digits with a suitable unit prefix."""
        prefixes = _PREFIXES.get(self.unit, ((1.0, ""),))
        size, prefix = next((row for row in prefixes if abs(self.value) >= row[0]), prefixes[-1])
        return f"{self.value / size:.3g} {prefix}{self.unit}"


_PREFIXES = {"B/s": ((1e9, "G"), (1e6, "M"), (1e3, "k")), "s": ((1.0, ""), (1e-3, "m"), (1e-6, "µ"))}


@dataclass(frozen=True)
class DeviceResult:
    """Matrix products of one device. `digest`: equal on all healthy devices; `wrong`: products unequal to the first."""

    device: str
    tflops: float
    tflops_slowest: float
    digest: str
    wrong: int


@dataclass(frozen=True)
class HostResult:
    """One host alone. `bandwidth_bytes_per_s`, `latency_s`: all-reduce over its devices, None: single device.
    `why`: why the measurement failed, None: it succeeded."""

    devices: tuple[DeviceResult, ...] = ()
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None
    why: str | Text | None = None


@dataclass(frozen=True)
class DeepReport:
    """One run of `doctor --deep`. `at_s`: UTC seconds. `sizes`: bytes per all-reduce; runs with other sizes are not
    comparable. `rounds`: the exchanges of each round. Not measured: `busy`, hosts with the job that they run, and
    `not_ready`, hosts on which a check failed."""

    at_s: float
    device_type: str
    sizes: tuple[int, ...]
    hosts: Mapping[str, HostResult] = field(default_factory=dict)
    rounds: tuple[tuple[Exchange, ...], ...] = ()
    busy: Mapping[str, str] = field(default_factory=dict)
    not_ready: tuple[str, ...] = ()

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(exchange for found in self.rounds for exchange in found)

    @property
    def paired(self) -> tuple[str, ...]:
        """Return the hosts that can be measured in pairs."""
        return tuple(host for host, result in self.hosts.items() if result.why is None)


def read_host(lines: Lines) -> HostResult:
    """Return the result of a job on one host."""
    devices = [load_dataclass(DeviceResult, line) for line in lines if line.get("measured") == "device"]
    node = next((line for line in lines if line.get("measured") == "node"), None)
    return HostResult(
        devices=tuple(sorted(devices, key=_place)),
        bandwidth_bytes_per_s=_peak(node) if node else None,
        latency_s=float(node["latency_s"]) if node else None,
    )


def read_exchange(one: str, other: str, lines: Lines) -> Exchange:
    """Return the result of a job on two hosts; a job that succeeded without output exchanged nothing."""
    rates: dict[str, float] = {}
    for line in lines:
        if line.get("measured") == "mesh":
            rates[BANDWIDTH] = _peak(line)
            rates[PROMPTNESS] = 1.0 / max(float(line["latency_s"]), 1e-9)
        elif line.get("measured") == "rail":
            rates[RAIL + str(line["device"])] = _peak(line)
    return Exchange(
        one, other, rates=rates or None, why=None if rates else Text("deep.no-result", "the job ended without a result")
    )


def better_of(first: HostResult, second: HostResult) -> HostResult:
    """Merge two measurements of one host: the faster values, all wrong products (+1 if digests differ)."""
    if first.why or second.why:
        return second if first.why else first
    again = {device.device: device for device in second.devices}
    devices = []
    for one in first.devices:
        other = again.get(one.device, one)
        wrong = one.wrong + other.wrong + int(one.digest != other.digest)
        devices.append(replace(one if one.tflops >= other.tflops else other, wrong=wrong))
    return replace(
        first,
        devices=tuple(devices),
        bandwidth_bytes_per_s=_best(first.bandwidth_bytes_per_s, second.bandwidth_bytes_per_s, max),
        latency_s=_best(first.latency_s, second.latency_s, min),
    )


def newest_like(report: DeepReport, earlier: Iterable[DeepReport]) -> DeepReport | None:
    """Return the newest comparable earlier report: same device type, same sizes, a host in common."""
    comparable = [
        other
        for other in earlier
        if (other.device_type, other.sizes) == (report.device_type, report.sizes)
        and other.at_s < report.at_s
        and set(other.hosts) & set(report.hosts)
    ]
    return max(comparable, key=lambda other: other.at_s, default=None)


def _peak(line: Mapping[str, Any]) -> float:
    """Return the highest bandwidth over sizes: slow pairs skip large sizes; latency dominates small sizes."""
    values: list[float] = [float(value) for value in line["bandwidth_bytes_per_s"].values()]
    return max(values)


def _place(device: DeviceResult) -> tuple[str, int]:
    family, _, number = device.device.partition(":")
    return family, int(number) if number.isdigit() else 0


def _best(one: float | None, other: float | None, choose: Any) -> float | None:
    known = [value for value in (one, other) if value is not None]
    return float(choose(known)) if known else None
