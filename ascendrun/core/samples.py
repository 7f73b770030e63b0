"""What was measured at one moment: of a device, of a host, of a rank. None: not measured, never 0.

`at_s` is in UTC seconds by the head's clock, so that hosts can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union


@dataclass(frozen=True)
class DeviceSample:
    """One NPU (or GPU; of a chip with two dies, one die). `device`: its number as a job names it in `devices.ids`.

    `utilisation`: percent of the compute cores (AICore on an NPU). `health`: the tool's word, "OK", "Warning", "Alarm",
    "Critical". `link_up`: its own network port. `link_downs`: how often that port went down since the driver started.
    `ecc_errors`: memory errors that could not be corrected, since the driver started.
    `pids`: processes on it as the tool lists them, () : looked, none. `source`: the tool that said so, "npu-smi",
    "nvidia-smi".
    """

    at_s: float
    host: str
    device: int
    device_type: str
    name: str | None = None
    utilisation: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    frequency_mhz: float | None = None
    health: str | None = None
    link_up: bool | None = None
    link_downs: int | None = None
    link_tx_bytes_s: float | None = None
    link_rx_bytes_s: float | None = None
    ecc_errors: int | None = None
    pids: tuple[int, ...] | None = None
    source: str | None = None


@dataclass(frozen=True)
class DeviceDetail:
    """What the tools said of one device beyond its figures: only the newest is kept. `values`: counters and amounts by
    the tool's own names. `bus_id`: of its PCIe slot. `processes`: (pid, MB of its memory, None: not told)."""

    at_s: float
    host: str
    device: int
    device_type: str
    bus_id: str | None = None
    values: Mapping[str, int] = field(default_factory=dict)
    processes: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True)
class HostSample:
    """One host. `cpu`: percent of all its cores. `disk_free_bytes`: where ascendrun's folder lies."""

    at_s: float
    host: str
    cpu: float | None = None
    load1: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_free_bytes: int | None = None
    disk_read_bytes_s: float | None = None
    disk_write_bytes_s: float | None = None
    net_rx_bytes_s: float | None = None
    net_tx_bytes_s: float | None = None


@dataclass(frozen=True)
class RankSample:
    """One rank with all its children. `cpu`: percent of one core. `device`: the device it was given, None: none."""

    at_s: float
    host: str
    job: str
    attempt: int
    rank: int
    pid: int | None = None
    device: int | None = None
    cpu: float | None = None
    rss_bytes: int | None = None
    read_bytes_s: float | None = None
    write_bytes_s: float | None = None
    threads: int | None = None
    state: str | None = None


Sample = Union[DeviceSample, HostSample, RankSample]


@dataclass(frozen=True)
class RawText:
    """What a tool on a host said and nobody understood. `why`: what the parser made of it, or how the tool ended."""

    at_s: float
    host: str
    tool: str
    text: str
    why: str


@dataclass(frozen=True)
class Newest:
    """The newest sample of every device, host and rank that was asked for."""

    devices: tuple[DeviceSample, ...] = ()
    hosts: tuple[HostSample, ...] = ()
    ranks: tuple[RankSample, ...] = ()
