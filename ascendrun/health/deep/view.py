"""What the measurements of a deep look mean: findings about devices, hosts and links, against peers and last time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Callable, TypeVar

from ascendrun.core.findings import Finding, Severity, fold_findings
from ascendrun.core.names import fold_names
from ascendrun.health.deep.pair_schedule import Exchange, Judgement, Pair, best_of_hosts, best_of_pairs, judge
from ascendrun.health.deep.results import BANDWIDTH, PROMPTNESS, RAIL, DeepReport

_Key = TypeVar("_Key", bound=Hashable)

CODES: tuple[str, ...] = (
    "deep-device-inconsistent",
    "deep-device-wrong",
    "deep-device-slow",
    "deep-node-slow",
    "deep-host-disconnected",
    "deep-host-slow",
    "deep-split-disconnected",
    "deep-split-slow",
    "deep-link-disconnected",
    "deep-link-slow",
    "deep-pair-disconnected",
    "deep-pair-slow",
    "deep-host-failed",
    "deep-host-busy",
    "deep-host-not-ready",
    "deep-network-slower-than-before",
    "deep-node-slower-than-before",
    "deep-device-slower-than-before",
)
"""All that a deep look may find; their words are in texts/deep.*.json."""

MIN_PEERS = 3
"""Of two values nobody can say which one is the odd one."""


@dataclass(frozen=True)
class Shares:
    """Below which share of the median of its peers a value is too small; `last`: of its own value last time.

    A matrix product has no neighbours, so it varies little; a latency of three times the usual is still luck at times.
    """

    exchange: float
    promptness: float
    device: float
    last: float


SHARES: Mapping[str, Shares] = {
    "npu": Shares(exchange=0.7, promptness=0.33, device=0.85, last=0.8),
    "cuda": Shares(exchange=0.7, promptness=0.33, device=0.85, last=0.8),
    # CPUs and host networks are shared with whatever else runs there.
    "cpu": Shares(exchange=0.3, promptness=0.1, device=0.3, last=0.4),
}


def shares_of(family: str, exchanges: Sequence[Exchange]) -> dict[str, float]:
    """What the pairing holds against the typical rates: the mesh, its latency, and each rail for itself."""
    shares = SHARES[family]
    rails = {name for one in exchanges for name in one.rates or () if name.startswith(RAIL)}
    return {BANDWIDTH: shares.exchange, PROMPTNESS: shares.promptness, **dict.fromkeys(sorted(rails), shares.exchange)}


def deep_findings(report: DeepReport, before: DeepReport | None = None) -> tuple[Finding, ...]:
    """Everything that the report says, the worst first. `before`: an earlier run to compare with."""
    found: list[Finding] = [*_skipped(report), *_failed(report), *_wrong_devices(report), *slow_alone(report)]
    if report.exchanges:
        judged = judge(report.paired, report.exchanges, shares=shares_of(report.family, report.exchanges))
        found += _pair_findings(report, judged)
    if before is not None:
        found += _slower_than_before(report, before)
    return fold_findings(found)


def slow_alone(report: DeepReport) -> Iterator[Finding]:
    """Devices and single hosts that are slow against their peers; also who is worth a second measurement."""
    shares = SHARES[report.family]
    speeds = {(host, one.device): one.tflops for host, result in report.hosts.items() for one in result.devices}
    for (host, device), typical in _below(speeds, shares.device):
        yield Finding(
            "deep-device-slow",
            Severity.WARN,
            (host,),
            {
                "device": device,
                "measured": _told_tflops(speeds[host, device]),
                "typical": _told_tflops(typical),
                "percent": _percent_less(speeds[host, device], typical),
            },
        )
    inside = {
        host: result.bandwidth_bytes_per_s
        for host, result in report.hosts.items()
        if result.bandwidth_bytes_per_s is not None
    }
    for host, typical in _below(inside, shares.exchange):
        yield Finding(
            "deep-node-slow",
            Severity.WARN,
            (host,),
            {
                "measured": told_speed(inside[host]),
                "typical": told_speed(typical),
                "percent": _percent_less(inside[host], typical),
            },
        )


def _skipped(report: DeepReport) -> Iterator[Finding]:
    for host, job in report.busy.items():
        yield Finding("deep-host-busy", Severity.NOTE, (host,), {"job": job})
    if report.unfit:
        yield Finding("deep-host-not-ready", Severity.NOTE, report.unfit)


def _failed(report: DeepReport) -> Iterator[Finding]:
    for host, result in report.hosts.items():
        if result.why is not None:
            yield Finding("deep-host-failed", Severity.FAIL, (host,), {"why": result.why})


def _wrong_devices(report: DeepReport) -> Iterator[Finding]:
    """A device that contradicts itself, or the digest of most devices."""
    devices = [(host, one) for host, result in report.hosts.items() for one in result.devices]
    digests = Counter(one.digest for _, one in devices)
    usual, votes = digests.most_common(1)[0] if digests else ("", 0)
    for host, one in devices:
        if one.wrong:
            yield Finding(
                "deep-device-inconsistent", Severity.FAIL, (host,), {"device": one.device, "wrong": str(one.wrong)}
            )
        elif one.digest != usual and votes > len(devices) / 2 and len(devices) >= MIN_PEERS:
            yield Finding(
                "deep-device-wrong",
                Severity.FAIL,
                (host,),
                {"device": one.device},
                (f"{one.device}: {one.digest}", f"most devices: {usual}"),
            )


def _pair_findings(report: DeepReport, judged: Judgement) -> Iterator[Finding]:
    best, of_pairs = best_of_hosts(report.exchanges), best_of_pairs(report.exchanges)
    shares = shares_of(report.family, report.exchanges)
    evidence = {pair: _tell_pair(pair, report.exchanges) for pair in of_pairs}
    for host in judged.bad_hosts:
        told = tuple(evidence[pair] for pair in sorted(of_pairs) if host in pair)
        worst = _worst(best.get(host), judged.typical, shares)
        code, severity = ("deep-host-slow", Severity.WARN) if worst else ("deep-host-disconnected", Severity.FAIL)
        yield Finding(code, severity, (host,), worst, told)
    yield from _split_findings(judged, of_pairs, shares, evidence)
    for kind, pairs in (("link", judged.lone_links), ("pair", judged.unclear)):
        for pair in pairs:
            worst = _worst(of_pairs[pair], judged.typical, shares)
            code, severity = (
                (f"deep-{kind}-slow", Severity.WARN) if worst else (f"deep-{kind}-disconnected", Severity.FAIL)
            )
            yield Finding(code, severity, pair, worst, (evidence[pair],))


def _split_findings(
    judged: Judgement,
    of_pairs: Mapping[Pair, Mapping[str, float] | None],
    shares: Mapping[str, float],
    evidence: Mapping[Pair, str],
) -> Iterator[Finding]:
    for split in judged.splits:
        groups = {"one": fold_names(split.one), "other": fold_names(split.other), "count": str(len(split.links))}
        known = [rates for rates in (of_pairs[pair] for pair in split.links) if rates is not None]
        worst = _worst(max(known, key=lambda rates: rates.get(BANDWIDTH, 0.0)), judged.typical, shares) if known else {}
        code, severity = ("deep-split-slow", Severity.WARN) if worst else ("deep-split-disconnected", Severity.FAIL)
        yield Finding(
            code,
            severity,
            (*split.one, *split.other),
            {**groups, **worst},
            tuple(evidence[pair] for pair in split.links),
        )


def _worst(
    rates: Mapping[str, float] | None, typical: Mapping[str, float], shares: Mapping[str, float]
) -> dict[str, str]:
    """The rate that is furthest below its share of the typical one, told; {} when there are no rates."""
    known = [name for name in shares if name in (rates or {}) and name in typical]
    if rates is None or not known:
        return {}
    name = min(known, key=lambda one: rates[one] / typical[one] / shares[one])
    rail = f"{name[len(RAIL) :]}: " if name.startswith(RAIL) else ""
    tell = _told_latency if name == PROMPTNESS else told_speed
    percent = _percent_less(rates[name], typical[name]) if name != PROMPTNESS else ""
    return {
        "measured": f"{rail}{tell(rates[name])}",
        "typical": tell(typical[name]),
        "percent": percent or f"{typical[name] / max(rates[name], 1e-12):.3g}x",
    }


def _slower_than_before(report: DeepReport, before: DeepReport) -> Iterator[Finding]:
    share = SHARES[report.family].last
    then = _scores(before)
    for (host, kind, device), value in _scores(report).items():
        last = then.get((host, kind, device))
        if last and value < share * last:
            tell = _told_tflops if kind == "device" else told_speed
            named = {"device": device} if device else {}
            yield Finding(
                f"deep-{kind}-slower-than-before",
                Severity.NOTE,
                (host,),
                {**named, "percent": _percent_less(value, last), "measured": tell(value), "before": tell(last)},
            )


def _scores(report: DeepReport) -> dict[tuple[str, str, str], float]:
    """What is compared over time, larger is better: by host, kind, and device ("" where it is the host's own)."""
    scores = {
        (host, "network", ""): rates[BANDWIDTH]
        for host, rates in best_of_hosts(report.exchanges).items()
        if BANDWIDTH in rates
    }
    for host, result in report.hosts.items():
        if result.bandwidth_bytes_per_s is not None:
            scores[host, "node", ""] = result.bandwidth_bytes_per_s
        scores.update({(host, "device", one.device): one.tflops for one in result.devices})
    return scores


def _below(values: Mapping[_Key, float], share: float) -> Iterator[tuple[_Key, float]]:
    """Who is below the share of the median, and that median; nobody when there are too few to compare."""
    if len(values) < MIN_PEERS:
        return
    typical = median(values.values())
    for key, value in values.items():
        if value < share * typical:
            yield key, typical


def summary_rows(report: DeepReport) -> tuple[tuple[str, str], ...]:
    """(name, text) of what was measured: median, smallest and largest of devices, nodes and pairs."""
    rows: list[tuple[str, str]] = []
    devices = [one.tflops for result in report.hosts.values() for one in result.devices]
    inside = [
        result.bandwidth_bytes_per_s for result in report.hosts.values() if result.bandwidth_bytes_per_s is not None
    ]
    rates = [rates for rates in best_of_pairs(report.exchanges).values() if rates is not None]
    if devices:
        rows.append(("products", _told_spread(devices, _told_tflops, "device")))
    if inside:
        rows.append(("in nodes", _told_spread(inside, told_speed, "node")))
    for name, told, label in ((BANDWIDTH, told_speed, "in pairs"), (PROMPTNESS, _told_latency, "latency")):
        values = [one[name] for one in rates if name in one]
        if values:
            rows.append((label, _told_spread(values, told, "pair")))
    return tuple(rows)


def _told_spread(values: Sequence[float], told: Callable[[float], str], noun: str) -> str:
    if len(values) == 1:
        return f"{told(values[0])} (1 {noun})"
    return f"{told(median(values))} ({len(values)} {noun}s, {told(min(values))} to {told(max(values))})"


def _tell_pair(pair: Pair, exchanges: Sequence[Exchange]) -> str:
    """One line of evidence: every measurement of the pair, in its order."""
    told = []
    for one in exchanges:
        if one.pair == pair and one.rates is None:
            told.append(one.why or "nothing was exchanged")
        elif one.pair == pair and one.rates is not None:
            rails = {name[len(RAIL) :]: rate for name, rate in one.rates.items() if name.startswith(RAIL)}
            slowest = min(rails, key=lambda name: rails[name], default=None)
            tail = f", slowest rail {slowest} {told_speed(rails[slowest])}" if slowest else ""
            told.append(
                f"{told_speed(one.rates.get(BANDWIDTH, 0.0))}, {_told_latency(one.rates.get(PROMPTNESS, 0.0))}{tail}"
            )
    return f"{pair[0]} - {pair[1]}: {'; again: '.join(told)}"


def told_speed(bytes_per_s: float) -> str:
    """3 digits and the unit that fits."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s / 1e3:.3g} kB/s"


def _told_tflops(tflops: float) -> str:
    return f"{tflops:.3g} TFLOP/s"


def _told_latency(promptness: float) -> str:
    if not promptness:
        return "no latency known"
    return f"{1e3 / promptness:.3g} ms" if promptness < 1e3 else f"{1e6 / promptness:.3g} us"


def _percent_less(value: float, typical: float) -> str:
    """Never a full 100: that would be nothing at all."""
    return f"{min(99.0, 100 * (1 - value / typical)):.0f}%"
