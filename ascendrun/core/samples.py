"""Measurements at one time: of a device, a host, a rank. None: not measured, never 0.

`at_s` is in UTC seconds by the head's clock, so that hosts can be compared. `KEY`: fields that name what is measured.
Each metric is a row of the table that `ascendrun.core.measurement` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar, Union

from ascendrun.core.dataclass import dataclass
from ascendrun.core.measurement import Column, HostColumn, Rollup, Sign, metric
from ascendrun.text import Text


@dataclass(frozen=True)
class DeviceSample:
    """One NPU (or GPU; of a chip with two dies, one die). `device`: its number as in `devices.ids` of a job."""

    KEY: ClassVar = ("host", "device_type", "device")
    at_s: float
    host: str
    device: int
    device_type: str
    name: str | None = metric(
        "model of the chip", rollup=Rollup.NEWEST, column=Column("chip", Text("top.column-chip", "CHIP"), 0, False)
    )
    utilisation: float | None = metric(
        "use of its compute cores (AI cores of an NPU)",
        "%",
        prometheus=("npu_chip_info_utilization", "ascendrun_device_utilization_percent"),
        column=Column("util", Text("top.column-util", "UTIL"), 97, sorts=True),
        host_column=HostColumn("utils", Text("top.column-utils", "UTIL PER DEVICE"), 97, "each", is_right=False),
        detail=Text("top.metric-util", "utilisation"),
        scale=(0.0, 100.0),
        chart=Text("report.chart-utilisation", "Device utilisation, %"),
    )
    memory_used_bytes: int | None = metric(
        "memory in use",
        "bytes",
        prometheus=("npu_chip_info_hbm_used_memory", "ascendrun_device_memory_used_bytes"),
        column=Column("mem", Text("top.column-mem", "MEM GiB"), 80, sorts=True),
        host_column=HostColumn("mem", Text("top.column-mem", "MEM GiB"), 60, "sum"),
        beside="memory_total_bytes",
        detail=Text("top.metric-mem", "memory GiB"),
        sign=Sign(
            "work",
            lambda here, others: others is not None and here > 1.05 * others,
            Text("straggler.memory", "{here:.1f} GiB in use (others {others:.1f} GiB)", here=0, others=0),
            size=2**30,
        ),
    )
    memory_total_bytes: int | None = metric(
        "total memory",
        "bytes",
        rollup=Rollup.LEVEL,
        prometheus=("npu_chip_info_hbm_total_memory", "ascendrun_device_memory_total_bytes"),
    )
    power_w: float | None = metric(
        "power",
        "W",
        prometheus=("npu_chip_info_power", "ascendrun_device_power_watts"),
        column=Column("power", Text("top.column-power", "POWER"), 55, sorts=True),
        host_column=HostColumn("power", Text("top.column-power", "POWER"), 50, "sum"),
        detail=Text("top.metric-power", "power"),
        chart=Text("report.chart-power-w", "Power per device, W"),
        sign=Sign(  # devices draw up to 10% more or less for the same work
            "work",
            lambda here, others: others is not None and here > 1.1 * others,
            Text("straggler.power", "drawing {here:.0f} W (others {others:.0f} W)", here=0, others=0),
        ),
    )
    temperature_c: float | None = metric(
        "temperature",
        "°C",
        prometheus=("npu_chip_info_temperature", "ascendrun_device_temperature_celsius"),
        column=Column("temp", Text("top.column-temp", "TEMP"), 66, sorts=True),
        host_column=HostColumn("hottest", Text("top.column-hottest", "TEMP"), 70, "max"),
        detail=Text("top.metric-temp", "temperature"),
        scale=(None, None),
        chart=Text("report.chart-temperature-c", "Device temperature, °C"),
        sign=Sign(
            "temperature",
            lambda here, others: here >= (95.0 if others is None else min(95.0, max(75.0, others + 10.0))),
            Text("straggler.heat", "at {here:.0f} °C (others {others:.0f} °C)", here=0, others=0),
            Text("straggler.heat-alone", "at {here:.0f} °C", here=0),
        ),
    )
    frequency_mhz: float | None = metric(
        "clock (of the AI cores of an NPU)",
        "MHz",
        prometheus=("npu_chip_info_aicore_current_freq", "ascendrun_device_frequency_megahertz"),
        column=Column("freq", Text("top.column-freq", "MHz"), 20),
        detail=Text("top.metric-freq", "clock MHz"),
        scale=(None, None),
        chart=Text("report.chart-frequency-mhz", "Device clock, MHz"),
        sign=Sign(  # a lower fraction of the others' clock is not rounding
            "frequency",
            lambda here, others: others is not None and here < 0.92 * others,
            Text("straggler.clock", "at {here:.0f} MHz (others {others:.0f} MHz)", here=0, others=0),
        ),
    )
    health: str | None = metric(
        "status text of the tool: OK, Warning, Alarm, Critical; as a series 1: OK, 0: not OK",
        rollup=Rollup.NEWEST,
        prometheus=("npu_chip_info_health_status", "ascendrun_device_healthy"),
        column=Column("health", Text("top.column-health", "HEALTH"), 75, False),
        host_column=HostColumn("health", Text("top.column-health", "HEALTH"), 80, "worst", is_right=False),
    )
    link_up: bool | None = metric(
        "its own network port is up; as a series 1: up, 0: down",
        rollup=Rollup.NEWEST,
        prometheus=("npu_chip_info_link_status", "ascendrun_device_link_up"),
        column=Column("link", Text("top.column-link", "LINK"), 50, False),
        host_column=HostColumn("link", Text("top.column-link", "LINK"), 55, "down", is_right=False),
    )
    link_downs: int | None = metric(
        "number of times that port went down since the driver started",
        rollup=Rollup.GROWS,
        prometheus=("ascendrun_device_link_downs",),
    )
    link_tx_bytes_s: float | None = metric(
        "sent over that port",
        "bytes/s",
        prometheus=("npu_chip_info_bandwidth_tx",),
        column=Column("traffic", Text("top.column-traffic", "TX/RX MB/s"), 0),
        beside="link_rx_bytes_s",
        detail=Text("top.metric-traffic", "tx/rx MB/s"),
        sign=Sign(
            "link",
            lambda here, others: others is not None and others > 1e6 and here < 0.5 * others,
            Text("straggler.traffic", "{here:.0f} MB/s (others {others:.0f} MB/s)", here=0, others=0),
            size=1e6,
        ),
    )
    link_rx_bytes_s: float | None = metric(
        "received over that port", "bytes/s", prometheus=("npu_chip_info_bandwidth_rx",)
    )
    ecc_errors: int | None = metric(
        "uncorrectable memory errors since the driver started",
        rollup=Rollup.GROWS,
        prometheus=("ascendrun_device_ecc_errors",),
    )
    pids: tuple[int, ...] | None = metric("its processes as the tool lists them, (): none", rollup=Rollup.NEWEST)
    source: str | None = metric("the tool: npu-smi or nvidia-smi", rollup=Rollup.NEWEST)


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
    """One host."""

    KEY: ClassVar = ("host",)
    at_s: float
    host: str
    cpu: float | None = metric(
        "use of all its cores",
        "%",
        prometheus=("ascendrun_host_cpu_percent",),
        host_column=HostColumn("cpu", "CPU", 58),
        detail="CPU",
        scale=(0.0, 100.0),
        chart=Text("report.chart-host-cpu", "Host CPU, %"),
        sign=Sign(
            "cpu",
            lambda here, others: here >= 92.0 and (others is None or here >= others + 20.0),
            Text("straggler.host-cpu", "host CPU {here:.0f}% (other hosts {others:.0f}%)", here=0, others=0),
            Text("straggler.host-cpu-alone", "host CPU {here:.0f}%", here=0),
        ),
    )
    load1: float | None = metric(
        "load over a minute",
        "processes",
        prometheus=("ascendrun_host_load1",),
        host_column=HostColumn("load", Text("top.column-load", "LOAD"), 30),
        detail=Text("top.metric-load", "load"),
    )
    memory_used_bytes: int | None = metric(
        "memory in use",
        "bytes",
        prometheus=("ascendrun_host_memory_used_bytes",),
        host_column=HostColumn("rss", Text("top.column-rss", "RSS"), 57),
        beside="memory_total_bytes",
        detail=Text("top.metric-memory", "memory GiB"),
    )
    memory_total_bytes: int | None = metric(
        "total memory", "bytes", rollup=Rollup.LEVEL, prometheus=("ascendrun_host_memory_total_bytes",)
    )
    disk_free_bytes: int | None = metric(
        "free space on the disk of ascendrun's directory",
        "bytes",
        rollup=Rollup.LEVEL,
        prometheus=("ascendrun_host_disk_free_bytes",),
        host_column=HostColumn("disk", Text("top.column-disk", "DISK"), 28),
        detail=Text("top.metric-disk", "disk free"),
    )
    disk_read_bytes_s: float | None = metric("read from disks and network file systems", "bytes/s")
    disk_write_bytes_s: float | None = metric("written to disks and network file systems", "bytes/s")
    net_rx_bytes_s: float | None = metric(
        "received by the host", "bytes/s", prometheus=("ascendrun_host_network_receive_bytes_per_second",)
    )
    net_tx_bytes_s: float | None = metric(
        "sent by the host",
        "bytes/s",
        prometheus=("ascendrun_host_network_transmit_bytes_per_second",),
        beside="net_rx_bytes_s",
        detail=Text("top.metric-traffic", "tx/rx MB/s"),
    )


@dataclass(frozen=True)
class RankSample:
    """One rank with all its children. `device`: its assigned device, None: none."""

    KEY: ClassVar = ("host", "job", "attempt", "rank")
    at_s: float
    host: str
    job: str
    attempt: int
    rank: int
    pid: int | None = metric("its process", rollup=Rollup.NEWEST)
    device: int | None = metric("its assigned device", rollup=Rollup.NEWEST)
    cpu: float | None = metric(
        "CPU of its processes; 100: one core",
        "%",
        prometheus=("ascendrun_rank_cpu_percent",),
        column=Column("cpu", "CPU", 35),
        detail="CPU",
        sign=Sign(
            "cpu",
            lambda here, others: others is not None and others >= 50.0 and here < others / 2,
            Text("straggler.rank-cpu", "{here:.0f}% of a core (others {others:.0f}%)", here=0, others=0),
        ),
    )
    rss_bytes: int | None = metric(
        "host memory of its processes",
        "bytes",
        prometheus=("ascendrun_rank_resident_bytes",),
        column=Column("rss", Text("top.column-rss", "RSS"), 32),
        detail=Text("top.metric-rss", "memory"),
    )
    read_bytes_s: float | None = metric("read from disks and network file systems", "bytes/s")
    write_bytes_s: float | None = metric("written to disks and network file systems", "bytes/s")
    threads: int | None = metric("threads of its processes")
    state: str | None = metric("state of its process, a letter of /proc", rollup=Rollup.NEWEST)


Sample = Union[DeviceSample, HostSample, RankSample]


@dataclass(frozen=True)
class Source:
    """The samples of one attempt on one host. `every_s`: interval of the samples."""

    tag: str
    host: str
    job: str
    attempt: int
    every_s: float

    @property
    def name(self) -> str:
        return f"{self.tag}/{self.host}"


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


DETAIL_NAMES: Mapping[str, tuple[str, str]] = {
    "npu_chip_info_used_memory": ("ddr_used_mb", "Memory other than HBM in use, MB"),
    "npu_chip_info_total_memory": ("ddr_total_mb", "Memory other than HBM in total, MB"),
    "npu_chip_info_hbm_utilization": ("hbm_percent", "HBM in use, percent"),
    "npu_chip_info_hbm_ecc_single_bit_error_cnt": ("hbm_single_bit", "HBM errors of one bit since the driver started"),
    "npu_chip_info_hbm_ecc_double_bit_error_cnt": ("hbm_double_bit", "HBM errors of two bits since the driver started"),
    "npu_chip_info_hbm_ecc_total_single_bit_error_cnt": ("hbm_single_bit_total", "HBM errors of one bit ever"),
    "npu_chip_info_hbm_ecc_total_double_bit_error_cnt": ("hbm_double_bit_total", "HBM errors of two bits ever"),
    "npu_chip_info_hbm_ecc_single_bit_isolated_pages_cnt": (
        "hbm_single_bit_pages",
        "HBM pages out of use for errors of one bit",
    ),
    "npu_chip_info_hbm_ecc_double_bit_isolated_pages_cnt": (
        "hbm_double_bit_pages",
        "HBM pages out of use for errors of two bits",
    ),
    "npu_chip_link_up_num": ("link_ups", "Number of times the NPU's network port became up"),
    "npu_chip_mac_rx_pause_num": ("mac_rx_mac_pause_num", "Pause frames received"),
    "npu_chip_mac_tx_pause_num": ("mac_tx_mac_pause_num", "Pause frames sent"),
    "npu_chip_mac_rx_pfc_pkt_num": ("mac_rx_pfc_pkt_num", "PFC frames received"),
    "npu_chip_mac_tx_pfc_pkt_num": ("mac_tx_pfc_pkt_num", "PFC frames sent"),
    "npu_chip_mac_rx_bad_pkt_num": ("mac_rx_bad_pkt_num", "Bad packets received"),
    "npu_chip_mac_tx_bad_pkt_num": ("mac_tx_bad_pkt_num", "Bad packets sent"),
    "npu_chip_mac_rx_bad_oct_num": ("mac_rx_bad_oct_num", "Bytes of bad packets received"),
    "npu_chip_mac_tx_bad_oct_num": ("mac_tx_bad_oct_num", "Bytes of bad packets sent"),
    "npu_chip_info_rx_fcs_num": ("mac_rx_fcs_err_pkt_num", "Packets received with a wrong checksum"),
    "npu_chip_info_rx_ecn_num": ("roce_ecn_db_num", "RoCE packets received with a congestion mark"),
    "npu_chip_roce_rx_all_pkt_num": ("roce_rx_all_pkt_num", "RoCE packets received"),
    "npu_chip_roce_tx_all_pkt_num": ("roce_tx_all_pkt_num", "RoCE packets sent"),
    "npu_chip_roce_rx_err_pkt_num": ("roce_rx_err_pkt_num", "Bad RoCE packets received"),
    "npu_chip_roce_tx_err_pkt_num": ("roce_tx_err_pkt_num", "Bad RoCE packets sent"),
    "npu_chip_roce_rx_cnp_pkt_num": ("roce_rx_cnp_pkt_num", "Congestion notices received"),
    "npu_chip_roce_tx_cnp_pkt_num": ("roce_tx_cnp_pkt_num", "Congestion notices sent"),
    "npu_chip_roce_unexpected_ack_num": ("roce_unexpected_ack_num", "Unexpected RoCE acknowledgements"),
    "npu_chip_roce_out_of_order_num": ("roce_out_of_order_num", "RoCE packets out of order or lost"),
    "npu_chip_roce_verification_err_num": ("roce_verification_err_num", "RoCE packets that failed verification"),
    "npu_chip_roce_qp_status_err_num": ("roce_qp_status_err_num", "RoCE packets to a queue pair in a wrong state"),
    "npu_chip_roce_new_pkt_rty_num": ("roce_new_pkt_rty_num", "RoCE packets sent again"),
}
"""npu-exporter's names of counters, each with the name in the tool and its meaning. All are gauges there."""
PORT_COUNTERS = tuple(name for name, _ in DETAIL_NAMES.values() if name.startswith(("mac_", "roce_")))
"""Names in the tool of the counters of a port."""
