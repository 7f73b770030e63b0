"""The data of `top` as Prometheus metrics: npu-exporter names for NPUs, ascendrun_* for everything else.

Unknown values, and those not measured recently, are absent, never 0. One endpoint reports all hosts, so each device
series has `host` besides npu-exporter's labels; labels that only Kubernetes or the vendor knows are empty.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Callable, Optional, Union

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ascendrun import __version__
from ascendrun.core.errors import AscendrunError
from ascendrun.core.jobs.job import State
from ascendrun.core.reachability import UNKNOWN
from ascendrun.core.samples import DeviceDetail
from ascendrun.health.top.join import STALE_S
from ascendrun.health.top.view import HostRow, JobRow, TopRow, TopView

MIB = 1024.0**2
MEGA = 1e6
NPU_LABELS = ("container_name", "id", "model_name", "namespace", "pcie_bus_info", "pod_name", "vdie_id", "host")
DEVICE_LABELS = ("host", "id", "device_type", "model_name")
JOB_LABELS = ("job_id", "job_name")
"""Not `job`: Prometheus itself uses that label for a group of targets."""
RANK_LABELS = (*JOB_LABELS, "rank", "host")
LIVENESS = ("ALIVE", "SUSPECT", "UNREACHABLE", UNKNOWN)
STATES = (*(state.value for state in State), UNKNOWN)

Read = Callable[[], tuple[TopView, Mapping[str, int], Sequence[DeviceDetail]]]
"""Function that returns the view, the number of jobs in each state, and the details of devices."""
Row = tuple[str, str, Union[str, Callable[[Any], Optional[float]]]]
"""(name, description, path of the value or the function that reads it)"""


def _scaled(path: str, by: float = 1.0) -> Callable[[Any], float | None]:
    """Return a scaled reader. `path`: a field of the object, or of a nested object, as in progress.step."""
    find = attrgetter(path)

    def read(one: Any) -> float | None:
        value = find(one)
        return None if value is None else value / by

    return read


def _health(row: TopRow) -> float | None:
    health = row.metrics.health
    return None if health in (None, "UNKNOWN") else float(health == "OK")


def _link(row: TopRow) -> float | None:
    return None if row.metrics.link_up is None else float(row.metrics.link_up)


def _processes(row: TopRow) -> float | None:
    if row.external_pids is None:
        return None
    return float(len(row.external_pids) + (row.rank is not None))


NPU_ROWS: tuple[Row, ...] = (
    ("npu_chip_info_utilization", "AI core utilisation in percent", "metrics.utilisation"),
    ("npu_chip_info_hbm_used_memory", "HBM in use, MB", _scaled("metrics.memory_used_bytes", MIB)),
    ("npu_chip_info_hbm_total_memory", "Total HBM, MB", _scaled("metrics.memory_total_bytes", MIB)),
    ("npu_chip_info_power", "Power in W", "metrics.power_w"),
    ("npu_chip_info_temperature", "Temperature in degrees Celsius", "metrics.temperature_c"),
    ("npu_chip_info_aicore_current_freq", "AI core clock in MHz", "metrics.frequency_mhz"),
    ("npu_chip_info_health_status", "1: the NPU is OK, 0: it is not", _health),
    ("npu_chip_info_link_status", "1: the NPU's network port is up, 0: it is down", _link),
    ("npu_chip_info_bandwidth_tx", "Sent over the NPU's network port, MB/s", _scaled("metrics.link_tx_bytes_s", MEGA)),
    (
        "npu_chip_info_bandwidth_rx",
        "Received over the NPU's network port, MB/s",
        _scaled("metrics.link_rx_bytes_s", MEGA),
    ),
    ("npu_chip_info_process_info_num", "Processes on the NPU", _processes),
    (
        "npu_chip_info_name",
        "The NPU's name is the label model_name; always 1",
        lambda row: 1.0 if row.metrics.name else None,
    ),
)
"""Metrics of NPUs, with the names and units of npu-exporter."""

DEVICE_ROWS: tuple[Row, ...] = (
    ("ascendrun_device_utilization_percent", "Use of a device's compute cores", "metrics.utilisation"),
    ("ascendrun_device_memory_used_bytes", "A device's memory in use", "metrics.memory_used_bytes"),
    ("ascendrun_device_memory_total_bytes", "Total memory of a device", "metrics.memory_total_bytes"),
    ("ascendrun_device_power_watts", "A device's power", "metrics.power_w"),
    ("ascendrun_device_temperature_celsius", "A device's temperature", "metrics.temperature_c"),
    ("ascendrun_device_frequency_megahertz", "A device's clock", "metrics.frequency_mhz"),
    ("ascendrun_device_healthy", "1: the health of the device is OK, 0: it is not", _health),
    ("ascendrun_device_link_up", "1: the device's own network port is up", _link),
    ("ascendrun_device_link_downs", "How often that port went down since the driver started", "metrics.link_downs"),
    ("ascendrun_device_ecc_errors", "Uncorrectable memory errors", "metrics.ecc_errors"),
    (
        "ascendrun_device_external_processes",
        "Processes on the device that belong to no rank",
        lambda row: None if row.external_pids is None else float(len(row.external_pids)),
    ),
)
DEVICE_AGE: tuple[Row, ...] = (("ascendrun_device_sample_age_seconds", "Age of the latest device sample", "age_s"),)
RANK_ROWS: tuple[Row, ...] = (
    ("ascendrun_rank_step", "Latest step that the rank reported", "progress.step"),
    ("ascendrun_rank_step_seconds", "Median time of the latest steps of the rank", "progress.step_s"),
    (
        "ascendrun_rank_slowdown_ratio",
        "Step time of the rank without waiting, divided by the median of the other ranks",
        "slower_by",
    ),
    ("ascendrun_rank_cpu_percent", "CPU of the rank's processes; 100: one core", "cpu"),
    ("ascendrun_rank_resident_bytes", "Host memory of the rank's processes", "rss_bytes"),
    ("ascendrun_rank_straggles", "1: the rank is a straggler", lambda row: float("slow" in row.problems)),
)
JOB_ROWS: tuple[Row, ...] = (
    ("ascendrun_job_ranks", "Ranks of the job", lambda row: float(row.job.world_size) if row.job.world_size else None),
    ("ascendrun_job_step", "Latest step that was reported", "progress.step"),
    ("ascendrun_job_total_steps", "Steps that the program will run", "progress.total_steps"),
    ("ascendrun_job_epoch", "Epochs done", "progress.epoch"),
    ("ascendrun_job_loss", "Latest loss; NaN where the program reports it", "progress.loss"),
    ("ascendrun_job_tokens_per_second", "Tokens per second, as reported by the program", "progress.tokens_per_s"),
    ("ascendrun_job_mfu_ratio", "Model FLOPS utilisation from 0 to 1", "progress.mfu"),
    ("ascendrun_job_step_seconds", "Median time of a step over all ranks", "progress.step_s"),
    ("ascendrun_job_slowest_ratio", "Step time of the slowest rank divided by the median of the others", "slower_by"),
    ("ascendrun_job_stragglers", "Stragglers", lambda row: float(len(row.stragglers))),
    ("ascendrun_job_started_timestamp_seconds", "Time at which the job started running", "job.started_at_s"),
)
HOST_ROWS: tuple[Row, ...] = (
    ("ascendrun_host_cpu_percent", "Use of all cores of a host", "metrics.cpu"),
    ("ascendrun_host_load1", "Load of a host over a minute", "metrics.load1"),
    ("ascendrun_host_memory_used_bytes", "A host's memory in use", "metrics.memory_used_bytes"),
    ("ascendrun_host_memory_total_bytes", "Total memory of a host", "metrics.memory_total_bytes"),
    ("ascendrun_host_disk_free_bytes", "Free space on the file system of ascendrun", "metrics.disk_free_bytes"),
    ("ascendrun_host_network_receive_bytes_per_second", "Received by a host", "metrics.net_rx_bytes_s"),
    ("ascendrun_host_network_transmit_bytes_per_second", "Sent by a host", "metrics.net_tx_bytes_s"),
)
HOST_AGE: tuple[Row, ...] = (("ascendrun_host_sample_age_seconds", "Age of the latest host sample", "age_s"),)


Labelled = Sequence[tuple[tuple[str, ...], DeviceDetail]]

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


def make_families(view: TopView, *, states: Mapping[str, int], details: Sequence[DeviceDetail] = ()) -> list[Metric]:
    """Make all metrics. `states`: number of jobs in each state, ended jobs too. `details`: further data of devices."""
    devices = list({(row.host, row.device): row for row in view.rows if row.device is not None}.values())
    measured = [row for row in devices if row.age_s is not None and "stale" not in row.problems]
    npus = [row for row in measured if row.device_type == "npu"]
    ranks = [row for row in view.rows if row.rank is not None]
    detail_of = {(one.host, one.device): one for one in details if view.at_s - one.at_s <= STALE_S}
    known = [(_npu_labels(row, detail_of), row) for row in npus]
    families = [
        *_families(NPU_ROWS, NPU_LABELS, known),
        *detail_families(
            NPU_LABELS,
            [(given, detail_of[key]) for given, row in known if (key := (row.host, row.device or 0)) in detail_of],
        ),
        *_machines(npus),
        *_families(DEVICE_ROWS, DEVICE_LABELS, [(_device_labels(row), row) for row in measured]),
        *_families(DEVICE_AGE, DEVICE_LABELS, [(_device_labels(row), row) for row in devices]),
        *_families(RANK_ROWS, RANK_LABELS, [(_rank_labels(row), row) for row in ranks]),
        _rank_devices(ranks),
        *_families(JOB_ROWS, JOB_LABELS, [((row.job.id, row.job.name), row) for row in view.jobs]),
        *_job_states(view.jobs),
        *_hosts(view.hosts),
        _liveness(view.hosts),
        _gauge(
            "ascendrun_jobs",
            "Number of jobs by state, including ended jobs",
            ("state",),
            [((state,), float(states.get(state, 0))) for state in STATES],
        ),
        _gauge("ascendrun_build_info", "The version is a label; always 1", ("version",), [((__version__,), 1.0)]),
    ]
    return [family for family in families if family.samples]


def detail_families(labels: Sequence[str], details: Labelled) -> Iterator[Metric]:
    """Yield metrics of details. `labels`: names of the labels of each detail. Unreported values are absent."""
    for name, (key, description) in DETAIL_NAMES.items():
        values = [(given, float(detail.values[key])) for given, detail in details if key in detail.values]
        yield _gauge(name, description, labels, values)
    yield _gauge(
        "npu_chip_info_process_info",
        "Memory of a process on the NPU, MB",
        (*labels, "process_id", "container_id"),
        [
            ((*given, str(pid), ""), float(memory_mb))
            for given, detail in details
            for pid, memory_mb in detail.processes
            if memory_mb is not None
        ],
    )


def _hosts(hosts: Sequence[HostRow]) -> Iterator[Metric]:
    yield from _families(HOST_ROWS, ("host",), [((host.host,), host) for host in hosts if _is_fresh(host)])
    yield from _families(HOST_AGE, ("host",), [((host.host,), host) for host in hosts])
    yield _gauge(
        "ascendrun_host_has_data",
        "1: there is recent data of the host, 0: there is none",
        ("host",),
        [((host.host,), float(_is_fresh(host))) for host in hosts],
    )


def _is_fresh(host: HostRow) -> bool:
    return host.age_s is not None and host.age_s <= STALE_S


def _npu_labels(row: TopRow, detail_of: Mapping[tuple[str, int], DeviceDetail]) -> tuple[str, ...]:
    detail = detail_of.get((row.host, row.device or 0))
    bus_id = (detail.bus_id if detail is not None else None) or ""
    return ("", str(row.device), row.metrics.name or "", "", bus_id, "", "", row.host)


def _device_labels(row: TopRow) -> tuple[str, ...]:
    return (row.host, str(row.device), row.device_type or "", row.metrics.name or "")


def _rank_labels(row: TopRow) -> tuple[str, ...]:
    return (row.job or "", row.job_name or "", str(row.rank), row.host)


def _gauge(name: str, description: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    family = GaugeMetricFamily(name, description, labels=labels)
    for given, value in values:
        family.add_metric(given, value)
    return family


def _families(
    rows: Sequence[Row], labels: Sequence[str], items: Sequence[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    for name, description, value_of in rows:
        read = _scaled(value_of) if isinstance(value_of, str) else value_of
        known = ((given, read(item)) for given, item in items)
        yield _gauge(name, description, labels, ((given, value) for given, value in known if value is not None))


def _machines(npus: Sequence[TopRow]) -> Iterator[Metric]:
    """Yield npu-exporter's counts of a machine, for each host."""
    here: dict[str, list[TopRow]] = {}
    for row in npus:
        here.setdefault(row.host, []).append(row)
    counts: tuple[tuple[str, str, Callable[[TopRow], bool]], ...] = (
        ("machine_npu_nums", "NPUs of the host", lambda row: True),
        ("machine_healthy_npu_nums", "NPUs of the host that are OK", lambda row: _health(row) == 1.0),
        ("machine_unhealthy_npu_nums", "NPUs of the host that are not OK", lambda row: _health(row) == 0.0),
        ("machine_unknown_npu_nums", "NPUs of the host whose health is not known", lambda row: _health(row) is None),
    )
    for name, description, is_one in counts:
        yield _gauge(
            name, description, ("host",), [((host,), float(sum(map(is_one, rows)))) for host, rows in here.items()]
        )


def _rank_devices(ranks: Sequence[TopRow]) -> Metric:
    """Make the metric that joins a rank's series with those of its device."""
    return _gauge(
        "ascendrun_rank_device_info",
        "Device of a rank; always 1",
        (*RANK_LABELS, "id"),
        [((*_rank_labels(row), str(row.device)), 1.0) for row in ranks if row.device is not None],
    )


def _job_states(rows: Sequence[JobRow]) -> Iterator[Metric]:
    jobs = [row.job for row in rows]
    yield _gauge(
        "ascendrun_job_state",
        "1 for the state of a live job",
        (*JOB_LABELS, "state"),
        [((job.id, job.name, state), float(job.state == state)) for job in jobs for state in STATES],
    )
    restarts = CounterMetricFamily("ascendrun_job_restarts", "Number of restarts of the job", labels=JOB_LABELS)
    for job in jobs:
        restarts.add_metric((job.id, job.name), float(max(0, job.attempt - 1)))
    yield restarts


def _liveness(hosts: Sequence[HostRow]) -> Metric:
    return _gauge(
        "ascendrun_node_liveness",
        "1 for the liveness of a node of a live job",
        ("host", "liveness"),
        [
            ((host.host, word), float(host.liveness == word))
            for host in hosts
            if host.liveness in LIVENESS
            for word in LIVENESS
        ],
    )


class TopCollector:
    """Collector that reads again for each scrape. `read` may raise AscendrunError."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._one_at_a_time = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        with self._one_at_a_time:
            families = list(self._collect())
        return iter(families)

    def _collect(self) -> Iterator[Metric]:
        started_s = time.monotonic()
        why: str | None = None
        try:
            view, states, details = self._read()
            why = None if view.samples_error is None else str(view.samples_error)
            yield from make_families(view, states=states, details=details)
        except AscendrunError as error:
            why = str(error)
        if why is not None:
            yield _gauge(
                "ascendrun_scrape_failed_info", "Why the last scrape failed; always 1", ("why",), [((why[:200],), 1.0)]
            )
        yield _gauge("ascendrun_scrape_ok", "1: everything could be read", (), [((), float(why is None))])
        yield _gauge("ascendrun_scrape_seconds", "Duration of the scrape", (), [((), time.monotonic() - started_s)])


def make_registry(read: Read) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TopCollector(read))
    return registry
