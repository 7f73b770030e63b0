"""Measurements at one time: of a device, a host, a rank. None: not measured, never 0.

`at_s` is in UTC seconds by the head's clock, so that hosts can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Union

from ascendrun.core.dataclass import dataclass


@dataclass(frozen=True)
class DeviceSample:
    """One NPU (or GPU; of a chip with two dies, one die). `device`: its number as in `devices.ids` of a job.

    `utilisation`: percent of the compute cores (AICore on an NPU). `health`: status text of the tool, "OK", "Warning",
    "Alarm", "Critical". `link_up`: its own network port. `link_downs`: how often that port went down since the driver
    started. `ecc_errors`: uncorrectable memory errors since the driver started. `pids`: its processes as the tool lists
    them, (): none. `source`: the tool, "npu-smi" or "nvidia-smi".
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
    """Details of one device from the tools beyond its metrics: only the newest is kept. `values`: counters and amounts
    by the tool's own names. `bus_id`: of its PCIe slot. `processes`: (pid, MB of its memory, None: unknown)."""

    at_s: float
    host: str
    device: int
    device_type: str
    bus_id: str | None = None
    values: Mapping[str, int] = field(default_factory=dict)
    processes: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True)
class HostSample:
    """One host. `cpu`: percent of all its cores. `disk_free_bytes`: of the disk of ascendrun's directory."""

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
    """One rank with all its children. `cpu`: percent of one core. `device`: its assigned device, None: none."""

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
    """Output of a tool on a host that cannot be parsed. `why`: the parser's error, or how the tool ended."""

    at_s: float
    host: str
    tool: str
    text: str
    why: str


@dataclass(frozen=True)
class Newest:
    """The newest sample of every requested device, host and rank."""

    devices: tuple[DeviceSample, ...] = ()
    hosts: tuple[HostSample, ...] = ()
    ranks: tuple[RankSample, ...] = ()
