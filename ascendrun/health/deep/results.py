"""The measurements of a deep check: of single hosts, and of pairs of hosts in rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.health.deep.pair_schedule import Exchange
from ascendrun.text import Text

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
