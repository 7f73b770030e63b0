"""What a deep look measured, as values: of each host alone, and of pairs of hosts round by round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ascendrun.health.deep.pair_schedule import Exchange

Lines = Sequence[Mapping[str, Any]]
"""What the measuring program wrote into its metrics files, of all ranks of one job."""

BANDWIDTH, PROMPTNESS, RAIL = "bandwidth", "promptness", "rail "
"""Rates of a pair: bytes a second of the whole mesh, 1/latency, and `rail npu:3`, bytes a second of one rail."""


@dataclass(frozen=True)
class DeviceResult:
    """One device's matrix products. `digest` is equal on all sound devices; `wrong`: products unlike the first."""

    device: str
    tflops: float
    tflops_slowest: float
    digest: str
    wrong: int


@dataclass(frozen=True)
class HostResult:
    """One host alone. `bandwidth_bytes_per_s`, `latency_s`: all-reduce over its own devices, None: it has only one.
    `why`: what went wrong, None: nothing."""

    devices: tuple[DeviceResult, ...] = ()
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None
    why: str | None = None


@dataclass(frozen=True)
class DeepReport:
    """One run of `doctor --deep`. `at_s`: UTC seconds. `sizes`: bytes of the all-reduces: runs with others do not
    compare. `rounds`: the exchanges of each round. Not measured: `busy`, hosts by the job that they run; `unfit`, hosts
    on which no job would start."""

    at_s: float
    family: str
    sizes: tuple[int, ...]
    hosts: Mapping[str, HostResult] = field(default_factory=dict)
    rounds: tuple[tuple[Exchange, ...], ...] = ()
    busy: Mapping[str, str] = field(default_factory=dict)
    unfit: tuple[str, ...] = ()

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(exchange for found in self.rounds for exchange in found)

    @property
    def paired(self) -> tuple[str, ...]:
        """The hosts that could be measured with others."""
        return tuple(host for host, result in self.hosts.items() if result.why is None)


def read_host(lines: Lines) -> HostResult:
    """The result of a job on one host."""
    devices = [
        DeviceResult(
            str(line["device"]),
            float(line["tflops"]),
            float(line["tflops_slowest"]),
            str(line["digest"]),
            int(line["wrong"]),
        )
        for line in lines
        if line.get("measured") == "device"
    ]
    node = next((line for line in lines if line.get("measured") == "node"), None)
    return HostResult(
        devices=tuple(sorted(devices, key=_place)),
        bandwidth_bytes_per_s=_peak(node) if node else None,
        latency_s=float(node["latency_s"]) if node else None,
    )


def read_exchange(one: str, other: str, lines: Lines) -> Exchange:
    """The result of a job on two hosts; one that ended well but wrote nothing exchanged nothing."""
    rates: dict[str, float] = {}
    for line in lines:
        if line.get("measured") == "mesh":
            rates[BANDWIDTH] = _peak(line)
            rates[PROMPTNESS] = 1.0 / max(float(line["latency_s"]), 1e-9)
        elif line.get("measured") == "rail":
            rates[RAIL + str(line["device"])] = _peak(line)
    return Exchange(one, other, rates=rates or None, why=None if rates else "it ended without a result")


def better_of(first: HostResult, second: HostResult) -> HostResult:
    """Two measurements of one host as one: the faster of each, every wrong product counted."""
    if first.why or second.why:
        return second if first.why else first
    again = {device.device: device for device in second.devices}
    devices = tuple(_better(device, again.get(device.device, device)) for device in first.devices)
    return replace(
        first,
        devices=devices,
        bandwidth_bytes_per_s=_best(first.bandwidth_bytes_per_s, second.bandwidth_bytes_per_s, max),
        latency_s=_best(first.latency_s, second.latency_s, min),
    )


def dump_report(report: DeepReport) -> dict[str, Any]:
    """As JSON values."""
    return asdict(report)


def load_report(values: Mapping[str, Any]) -> DeepReport:
    """The report of such values. Raises KeyError, TypeError or ValueError when they are of something else."""
    hosts = {
        host: HostResult(**{**result, "devices": tuple(DeviceResult(**one) for one in result["devices"])})
        for host, result in values["hosts"].items()
    }
    rounds = tuple(tuple(Exchange(**one) for one in found) for found in values["rounds"])
    return DeepReport(
        at_s=float(values["at_s"]),
        family=str(values["family"]),
        hosts=hosts,
        rounds=rounds,
        sizes=tuple(int(size) for size in values["sizes"]),
        busy=dict(values["busy"]),
        unfit=tuple(values["unfit"]),
    )


def newest_like(report: DeepReport, earlier: Iterable[DeepReport]) -> DeepReport | None:
    """The newest earlier report that can be compared with this one: same family, same sizes, some host in common."""
    alike = [
        one
        for one in earlier
        if (one.family, one.sizes) == (report.family, report.sizes)
        and one.at_s < report.at_s
        and set(one.hosts) & set(report.hosts)
    ]
    return max(alike, key=lambda one: one.at_s, default=None)


def _peak(line: Mapping[str, Any]) -> float:
    """The widest bandwidth over sizes: a slow pair has no large ones, and small ones cost latency."""
    values: list[float] = [float(value) for value in line["bandwidth_bytes_per_s"].values()]
    return max(values)


def _place(device: DeviceResult) -> tuple[str, int]:
    family, _, number = device.device.partition(":")
    return family, int(number) if number.isdigit() else 0


def _better(one: DeviceResult, other: DeviceResult) -> DeviceResult:
    faster, slower = (one, other) if one.tflops >= other.tflops else (other, one)
    return replace(faster, wrong=one.wrong + other.wrong + int(faster.digest != slower.digest))


def _best(one: float | None, other: float | None, choose: Any) -> float | None:
    known = [value for value in (one, other) if value is not None]
    return float(choose(known)) if known else None
