"""Findings of a deep check: devices, hosts and links compared with peers and the last measurement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from ascendrun.core.dataclass import dataclass
from ascendrun.core.findings import Finding, Severity, fold_findings
from ascendrun.health.deep.measurements import (
    BANDWIDTH,
    PROMPTNESS,
    RAIL,
    DeepReport,
    Exchange,
    Pair,
    PairEvaluation,
    Quantity,
    best_of_hosts,
    best_of_pairs,
    evaluate_pairs,
)
from ascendrun.health.survey.check_context import finding
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
    found: list[Finding] = [*_not_measured(report), *_wrong_devices(report), *slow_alone(report)]
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
        values = _compared(speeds[host, device], typical, TFLOPS)
        yield finding("deep-device-slow", Severity.WARN, host, device=device, **values)
    inside = {
        host: result.bandwidth_bytes_per_s
        for host, result in report.hosts.items()
        if result.bandwidth_bytes_per_s is not None
    }
    for host, typical in _below(inside, shares.exchange):
        yield finding("deep-node-slow", Severity.WARN, host, **_compared(inside[host], typical, BYTES_PER_S))


def _not_measured(report: DeepReport) -> Iterator[Finding]:
    for host, job in report.busy.items():
        yield finding("deep-host-busy", Severity.NOTE, host, job=job)
    if report.not_ready:
        yield finding("deep-host-not-ready", Severity.NOTE, report.not_ready)
    for host, result in report.hosts.items():
        if result.why is not None:
            yield finding("deep-host-failed", Severity.FAIL, host, why=result.why)


def _wrong_devices(report: DeepReport) -> Iterator[Finding]:
    """Find devices with inconsistent results, or with another digest than most devices."""
    devices = [(host, one) for host, result in report.hosts.items() for one in result.devices]
    digests = Counter(one.digest for _, one in devices)
    usual, votes = digests.most_common(1)[0] if digests else ("", 0)
    for host, one in devices:
        if one.wrong:
            yield finding("deep-device-inconsistent", Severity.FAIL, host, device=one.device, wrong=one.wrong)
        elif one.digest != usual and votes > len(devices) / 2 and len(devices) >= MIN_PEERS:
            lines = (f"{one.device}: {one.digest}", Text("deep.usual-digest", "most devices: {digest}", digest=usual))
            yield finding("deep-device-wrong", Severity.FAIL, host, lines, device=one.device)


def _pair_findings(report: DeepReport, evaluation: PairEvaluation) -> Iterator[Finding]:
    best, of_pairs = best_of_hosts(report.exchanges), best_of_pairs(report.exchanges)
    shares = shares_of(report.device_type, report.exchanges)
    evidence = {pair: _pair_line(pair, report.exchanges) for pair in of_pairs}
    for host in evaluation.bad_hosts:
        lines = tuple(evidence[pair] for pair in sorted(of_pairs) if host in pair)
        yield _slow_or_cut("host", host, _worst(best.get(host), evaluation.typical, shares), lines)
    for split in evaluation.splits:
        known = [rates for rates in (of_pairs[pair] for pair in split.links) if rates is not None]
        fastest = max(known, key=lambda rates: rates.get(BANDWIDTH, 0.0), default=None)
        worst = _worst(fastest, evaluation.typical, shares)
        lines = tuple(evidence[pair] for pair in split.links)
        groups: dict[str, Any] = {"one": split.one, "other": split.other, "count": len(split.links)}
        yield _slow_or_cut("split", (*split.one, *split.other), worst, lines, **groups)
    for kind, pairs in (("link", evaluation.lone_links), ("pair", evaluation.unclear)):
        for pair in pairs:
            worst = _worst(of_pairs[pair], evaluation.typical, shares)
            yield _slow_or_cut(kind, pair, worst, (evidence[pair],))


def _slow_or_cut(
    kind: str, where: str | tuple[str, ...], worst: Mapping[str, Any], lines: Sequence[Text], **values: object
) -> Finding:
    """Return the finding of hosts whose worst rate is too low, or that exchanged nothing."""
    code, severity = (f"deep-{kind}-slow", Severity.WARN) if worst else (f"deep-{kind}-disconnected", Severity.FAIL)
    return finding(code, severity, where, lines, **values, **worst)


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
    rail = name[len(RAIL) :] if name.startswith(RAIL) else ""
    return _compared(rates[name], typical[name], BYTES_PER_S, rail)


def _slower_than_before(report: DeepReport, before: DeepReport) -> Iterator[Finding]:
    share = SHARES[report.device_type].last
    then = _scores(before)
    for (host, kind, device), value in _scores(report).items():
        last = then.get((host, kind, device))
        if last and value < share * last:
            unit = TFLOPS if kind == "device" else BYTES_PER_S
            values: dict[str, Any] = {
                "below": _lower(value, last),
                "measured": Quantity(value, unit),
                "before": Quantity(last, unit),
            }
            named: dict[str, Any] = {"device": device} if device else {}
            yield finding(f"deep-{kind}-slower-than-before", Severity.NOTE, host, **named, **values)


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
    devices = [Quantity(one.tflops, TFLOPS) for result in report.hosts.values() for one in result.devices]
    inside = [
        Quantity(result.bandwidth_bytes_per_s, BYTES_PER_S)
        for result in report.hosts.values()
        if result.bandwidth_bytes_per_s is not None
    ]
    rates = [rates for rates in best_of_pairs(report.exchanges).values() if rates is not None]
    speeds = [Quantity(one[BANDWIDTH], BYTES_PER_S) for one in rates if BANDWIDTH in one]
    delays = [_latency(one[PROMPTNESS]) for one in rates if one.get(PROMPTNESS)]
    rows = (
        ("products", devices, Text("deep.devices", "{spread} ({count:plural device devices})", spread="", count=0)),
        ("in nodes", inside, Text("deep.nodes", "{spread} ({count:plural node nodes})", spread="", count=0)),
        ("in pairs", speeds, _PAIRS),
        ("latency", delays, _PAIRS),
    )
    return tuple((name, Text(row.key, row.english, **_spread(values))) for name, values, row in rows if values)


_PAIRS = Text("deep.pairs", "{spread} ({count:plural pair pairs})", spread="", count=0)


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
                continue
            known = {"speed": speed, "latency": delay, "rail": Quantity(rails[slowest], BYTES_PER_S, slowest)}
            found.append(Text("deep.pair-with-rails", "{speed}, latency {latency}, slowest rail {rail}", **known))
    measured: Text | str = found[0]
    for again in found[1:]:
        measured = Text("deep.repeated", "{first}; repeated: {again}", first=measured, again=again)
    return Text("deep.pair-line", "{one} and {other}: {measured}", one=pair[0], other=pair[1], measured=measured)


def _latency(promptness: float) -> Quantity:
    return Quantity(1.0 / max(promptness, 1e-12), "s")


def _compared(value: float, typical: float, unit: str, rail: str = "") -> dict[str, Any]:
    below = _lower(value, typical)
    return {"measured": Quantity(value, unit, rail), "typical": Quantity(typical, unit), "below": below}


def _lower(value: float, typical: float) -> Text:
    """Return the deficit; never 100%, which would mean a value of 0."""
    return Text("deep.lower", "{fraction:percent} lower", fraction=min(0.99, 1 - value / typical))
