"""Findings of a deep check: devices, hosts and links compared with peers and the last measurement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from ascendrun.core.dataclass import dataclass
from ascendrun.core.findings import Finding, Severity, fold_findings
from ascendrun.health.deep.pair_schedule import (
    Exchange,
    Pair,
    PairEvaluation,
    best_of_hosts,
    best_of_pairs,
    evaluate_pairs,
)
from ascendrun.health.deep.results import BANDWIDTH, PROMPTNESS, RAIL, DeepReport, Quantity
from ascendrun.text import Text

_Key = TypeVar("_Key", bound=Hashable)


TFLOPS, BYTES_PER_S = "TFLOP/s", "B/s"

MIN_PEERS = 3
"""With two values, neither is an outlier."""


@dataclass(frozen=True)
class Shares:
    """Fractions of the peers' median below which a value is too small; `last`: of its own previous value.

    Matrix products share no resources, so they vary little; latency may be three times the usual by chance.
    """

    exchange: float
    promptness: float
    device: float
    last: float


SHARES: Mapping[str, Shares] = {
    "npu": Shares(exchange=0.7, promptness=0.33, device=0.85, last=0.8),
    "cuda": Shares(exchange=0.7, promptness=0.33, device=0.85, last=0.8),
    # Other programs use the CPUs and host networks too.
    "cpu": Shares(exchange=0.3, promptness=0.1, device=0.3, last=0.4),
}


def shares_of(device_type: str, exchanges: Sequence[Exchange]) -> dict[str, float]:
    """Return the minimum fraction of each typical rate: the mesh, its latency, and each rail."""
    shares = SHARES[device_type]
    rails = {name for one in exchanges for name in one.rates or () if name.startswith(RAIL)}
    return {BANDWIDTH: shares.exchange, PROMPTNESS: shares.promptness, **dict.fromkeys(sorted(rails), shares.exchange)}


def deep_findings(report: DeepReport, before: DeepReport | None = None) -> tuple[Finding, ...]:
    """Return all findings of the report, the worst first. `before`: an earlier run to compare with."""
    found: list[Finding] = [*_skipped(report), *_failed(report), *_wrong_devices(report), *slow_alone(report)]
    if report.exchanges:
        evaluation = evaluate_pairs(
            report.paired, report.exchanges, shares=shares_of(report.device_type, report.exchanges)
        )
        found += _pair_findings(report, evaluation)
    if before is not None:
        found += _slower_than_before(report, before)
    return fold_findings(found)


def slow_alone(report: DeepReport) -> Iterator[Finding]:
    """Yield devices and hosts that are slower than their peers; these are measured a second time."""
    shares = SHARES[report.device_type]
    speeds = {(host, one.device): one.tflops for host, result in report.hosts.items() for one in result.devices}
    for (host, device), typical in _below(speeds, shares.device):
        yield Finding(
            "deep-device-slow",
            Severity.WARN,
            (host,),
            {
                "device": device,
                "measured": Quantity(speeds[host, device], TFLOPS),
                "typical": Quantity(typical, TFLOPS),
                "below": _lower(speeds[host, device], typical),
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
                "measured": Quantity(inside[host], BYTES_PER_S),
                "typical": Quantity(typical, BYTES_PER_S),
                "below": _lower(inside[host], typical),
            },
        )


def _skipped(report: DeepReport) -> Iterator[Finding]:
    for host, job in report.busy.items():
        yield Finding("deep-host-busy", Severity.NOTE, (host,), {"job": job})
    if report.not_ready:
        yield Finding("deep-host-not-ready", Severity.NOTE, report.not_ready)


def _failed(report: DeepReport) -> Iterator[Finding]:
    for host, result in report.hosts.items():
        if result.why is not None:
            yield Finding("deep-host-failed", Severity.FAIL, (host,), {"why": result.why})


def _wrong_devices(report: DeepReport) -> Iterator[Finding]:
    """Find devices with inconsistent results, or with another digest than most devices."""
    devices = [(host, one) for host, result in report.hosts.items() for one in result.devices]
    digests = Counter(one.digest for _, one in devices)
    usual, votes = digests.most_common(1)[0] if digests else ("", 0)
    for host, one in devices:
        if one.wrong:
            yield Finding(
                "deep-device-inconsistent", Severity.FAIL, (host,), {"device": one.device, "wrong": one.wrong}
            )
        elif one.digest != usual and votes > len(devices) / 2 and len(devices) >= MIN_PEERS:
            yield Finding(
                "deep-device-wrong",
                Severity.FAIL,
                (host,),
                {"device": one.device},
                (f"{one.device}: {one.digest}", Text("deep.usual-digest", "most devices: {digest}", digest=usual)),
            )


def _pair_findings(report: DeepReport, evaluation: PairEvaluation) -> Iterator[Finding]:
    best, of_pairs = best_of_hosts(report.exchanges), best_of_pairs(report.exchanges)
    shares = shares_of(report.device_type, report.exchanges)
    evidence = {pair: _pair_line(pair, report.exchanges) for pair in of_pairs}
    for host in evaluation.bad_hosts:
        lines = tuple(evidence[pair] for pair in sorted(of_pairs) if host in pair)
        worst = _worst(best.get(host), evaluation.typical, shares)
        code, severity = ("deep-host-slow", Severity.WARN) if worst else ("deep-host-disconnected", Severity.FAIL)
        yield Finding(code, severity, (host,), worst, lines)
    yield from _split_findings(evaluation, of_pairs, shares, evidence)
    for kind, pairs in (("link", evaluation.lone_links), ("pair", evaluation.unclear)):
        for pair in pairs:
            worst = _worst(of_pairs[pair], evaluation.typical, shares)
            code, severity = (
                (f"deep-{kind}-slow", Severity.WARN) if worst else (f"deep-{kind}-disconnected", Severity.FAIL)
            )
            yield Finding(code, severity, pair, worst, (evidence[pair],))


def _split_findings(
    evaluation: PairEvaluation,
    of_pairs: Mapping[Pair, Mapping[str, float] | None],
    shares: Mapping[str, float],
    evidence: Mapping[Pair, Text],
) -> Iterator[Finding]:
    for split in evaluation.splits:
        groups = {"one": split.one, "other": split.other, "count": len(split.links)}
        known = [rates for rates in (of_pairs[pair] for pair in split.links) if rates is not None]
        worst = (
            _worst(max(known, key=lambda rates: rates.get(BANDWIDTH, 0.0)), evaluation.typical, shares) if known else {}
        )
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
) -> dict[str, Any]:
    """Return the values of the rate furthest below its fraction of the typical rate; {} without rates."""
    known = [name for name in shares if name in (rates or {}) and name in typical]
    if rates is None or not known:
        return {}
    name = min(known, key=lambda one: rates[one] / typical[one] / shares[one])
    if name == PROMPTNESS:
        factor = typical[name] / max(rates[name], 1e-12)
        below = Text("deep.times-longer", "{factor:.3g} times longer", factor=factor)
        return {"measured": _latency(rates[name]), "typical": _latency(typical[name]), "below": below}
    return {
        "measured": Quantity(rates[name], BYTES_PER_S, name[len(RAIL) :] if name.startswith(RAIL) else ""),
        "typical": Quantity(typical[name], BYTES_PER_S),
        "below": _lower(rates[name], typical[name]),
    }


def _slower_than_before(report: DeepReport, before: DeepReport) -> Iterator[Finding]:
    share = SHARES[report.device_type].last
    then = _scores(before)
    for (host, kind, device), value in _scores(report).items():
        last = then.get((host, kind, device))
        if last and value < share * last:
            unit = TFLOPS if kind == "device" else BYTES_PER_S
            named = {"device": device} if device else {}
            yield Finding(
                f"deep-{kind}-slower-than-before",
                Severity.NOTE,
                (host,),
                {
                    **named,
                    "below": _lower(value, last),
                    "measured": Quantity(value, unit),
                    "before": Quantity(last, unit),
                },
            )


def _scores(report: DeepReport) -> dict[tuple[str, str, str], float]:
    """Return the values compared over time (larger is better), by host, kind, and device ("": of the host)."""
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
    """Yield the keys below the fraction of the median, with that median; nothing with too few values."""
    if len(values) < MIN_PEERS:
        return
    typical = median(values.values())
    for key, value in values.items():
        if value < share * typical:
            yield key, typical


def summary_rows(report: DeepReport) -> tuple[tuple[str, Text], ...]:
    """Return (name, text) of the measurements: median, smallest and largest of devices, nodes and pairs."""
    rows: list[tuple[str, Text]] = []
    devices = [Quantity(one.tflops, TFLOPS) for result in report.hosts.values() for one in result.devices]
    inside = [
        Quantity(result.bandwidth_bytes_per_s, BYTES_PER_S)
        for result in report.hosts.values()
        if result.bandwidth_bytes_per_s is not None
    ]
    rates = [rates for rates in best_of_pairs(report.exchanges).values() if rates is not None]
    if devices:
        rows.append(("products", Text("deep.devices", "{spread} ({count:plural device devices})", **_spread(devices))))
    if inside:
        rows.append(("in nodes", Text("deep.nodes", "{spread} ({count:plural node nodes})", **_spread(inside))))
    speeds = [Quantity(one[BANDWIDTH], BYTES_PER_S) for one in rates if BANDWIDTH in one]
    delays = [_latency(one[PROMPTNESS]) for one in rates if one.get(PROMPTNESS)]
    for name, values in (("in pairs", speeds), ("latency", delays)):
        if values:
            rows.append((name, Text("deep.pairs", "{spread} ({count:plural pair pairs})", **_spread(values))))
    return tuple(rows)


def _spread(values: Sequence[Quantity]) -> dict[str, Any]:
    """Return the values of a row: number of measurements, median, smallest and largest."""
    ordered = sorted(value.value for value in values)
    middle, low, high = (Quantity(value, values[0].unit) for value in (median(ordered), ordered[0], ordered[-1]))
    if len(values) == 1:
        return {"spread": middle, "count": 1}
    spread = Text("deep.spread", "{median}, from {low} to {high}", median=middle, low=low, high=high)
    return {"spread": spread, "count": len(values)}


def _pair_line(pair: Pair, exchanges: Sequence[Exchange]) -> Text:
    """Return one line of evidence: every measurement of the pair, in order."""
    found: list[Text | str] = []
    for one in exchanges:
        if one.pair == pair and one.rates is None:
            found.append(one.why or Text("deep.nothing-exchanged", "no data exchanged"))
        elif one.pair == pair and one.rates is not None:
            rails = {name[len(RAIL) :]: rate for name, rate in one.rates.items() if name.startswith(RAIL)}
            slowest = min(rails, key=lambda name: rails[name], default=None)
            speed = Quantity(one.rates.get(BANDWIDTH, 0.0), BYTES_PER_S)
            delay = _latency(one.rates[PROMPTNESS]) if one.rates.get(PROMPTNESS) else None
            if slowest is None:
                found.append(Text("deep.pair", "{speed}, latency {latency}", speed=speed, latency=delay))
            else:
                rail = Quantity(rails[slowest], BYTES_PER_S, slowest)
                found.append(
                    Text(
                        "deep.pair-with-rails",
                        "{speed}, latency {latency}, slowest rail {rail}",
                        speed=speed,
                        latency=delay,
                        rail=rail,
                    )
                )
    measured: Text | str = found[0]
    for again in found[1:]:
        measured = Text("deep.repeated", "{first}; repeated: {again}", first=measured, again=again)
    return Text("deep.pair-line", "{one} and {other}: {measured}", one=pair[0], other=pair[1], measured=measured)


def _latency(promptness: float) -> Quantity:
    return Quantity(1.0 / max(promptness, 1e-12), "s")


def _lower(value: float, typical: float) -> Text:
    """Return the deficit; never 100%, which would mean a value of 0."""
    return Text("deep.lower", "{fraction:percent} lower", fraction=min(0.99, 1 - value / typical))
