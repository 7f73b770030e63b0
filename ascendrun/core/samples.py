"""What was measured at one moment: of a device, of a host, of a rank. None: not measured, never 0.

`at_s` is in UTC seconds by the head's clock, so that hosts can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Optional, Tuple, Union


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
    family: str
    name: Optional[str] = None
    utilisation: Optional[float] = None
    memory_used_bytes: Optional[int] = None
    memory_total_bytes: Optional[int] = None
    power_w: Optional[float] = None
    temperature_c: Optional[float] = None
    frequency_mhz: Optional[float] = None
    health: Optional[str] = None
    link_up: Optional[bool] = None
    link_downs: Optional[int] = None
    link_tx_bytes_s: Optional[float] = None
    link_rx_bytes_s: Optional[float] = None
    ecc_errors: Optional[int] = None
    pids: Optional[Tuple[int, ...]] = None
    source: Optional[str] = None


@dataclass(frozen=True)
class DeviceDetail:
    """What the tools said of one device beyond its figures: only the newest is kept. `values`: counters and amounts by
    the tool's own names. `bus_id`: of its PCIe slot. `processes`: (pid, MB of its memory, None: not told)."""

    at_s: float
    host: str
    device: int
    family: str
    bus_id: Optional[str] = None
    values: Mapping[str, int] = field(default_factory=dict)
    processes: Tuple[Tuple[int, Optional[int]], ...] = ()


@dataclass(frozen=True)
class HostSample:
    """One host. `cpu`: percent of all its cores. `disk_free_bytes`: where ascendrun's folder lies."""

    at_s: float
    host: str
    cpu: Optional[float] = None
    load1: Optional[float] = None
    memory_used_bytes: Optional[int] = None
    memory_total_bytes: Optional[int] = None
    disk_free_bytes: Optional[int] = None
    disk_read_bytes_s: Optional[float] = None
    disk_write_bytes_s: Optional[float] = None
    net_rx_bytes_s: Optional[float] = None
    net_tx_bytes_s: Optional[float] = None


@dataclass(frozen=True)
class RankSample:
    """One rank with all its children. `cpu`: percent of one core. `device`: the device it was given, None: none."""

    at_s: float
    host: str
    job: str
    attempt: int
    rank: int
    pid: Optional[int] = None
    device: Optional[int] = None
    cpu: Optional[float] = None
    rss_bytes: Optional[int] = None
    read_bytes_s: Optional[float] = None
    write_bytes_s: Optional[float] = None
    threads: Optional[int] = None
    state: Optional[str] = None


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

    devices: Tuple[DeviceSample, ...] = ()
    hosts: Tuple[HostSample, ...] = ()
    ranks: Tuple[RankSample, ...] = ()
