"""The data of `top` as Prometheus metrics: npu-exporter names for NPUs, ascendrun_* for everything else.

Unknown values, and those not measured recently, are absent, never 0. One endpoint reports all hosts, so each device
series has `host` besides npu-exporter's labels; labels that only Kubernetes or the vendor knows are empty.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Callable, Optional, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ascendrun import __version__
from ascendrun.core.errors import AscendrunError
from ascendrun.core.jobs.job import State
from ascendrun.core.measurement import metrics_of
from ascendrun.core.pulse import Pulse
from ascendrun.core.reachability import UNKNOWN
from ascendrun.core.samples import DETAIL_NAMES, DeviceDetail, DeviceSample, HostSample, RankSample
from ascendrun.health.top.join import STALE_S
from ascendrun.health.top.view import HostRow, Progress, TopRow, TopView
from ascendrun.text.format import grouped

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)
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
ReadPulse = Callable[[], Optional[Pulse]]
"""Function that returns what the controller knows; None: no controller has written lately."""
Row = tuple[str, str, Callable[[Any], Optional[float]]]
"""(name, description, function that reads the value)"""
NPU_EXPORTER_UNITS: Mapping[str, tuple[float, str]] = {"bytes": (MIB, "MB"), "bytes/s": (MEGA, "MB/s")}


def table_rows(kind: type[Any], prefix: str, path: str) -> Iterator[Row]:
    """Yield the series of a kind of metrics whose names begin with `prefix`. `path`: of the sample in the object."""
    for field, metric in metrics_of(kind).items():
        for name in metric.prometheus:
            if name.startswith(prefix):
                same = (1.0, metric.unit)
                per, unit = NPU_EXPORTER_UNITS.get(metric.unit, same) if prefix == "npu_" else same
                yield name, f"{metric.meaning}, {unit}".rstrip(", "), _scaled(f"{path}.{field}", per)


def _scaled(path: str, per: float) -> Callable[[Any], float | None]:
    find = attrgetter(path)
    return lambda item: None if (value := as_number(find(item))) is None else value / per


def as_number(value: Any) -> float | None:
    """Return the value of a series; of a health text 1: OK, 0: not OK, None: unknown."""
    if isinstance(value, str):
        return None if value == "UNKNOWN" else float(value == "OK")
    return None if value is None else float(value)


def _processes(row: TopRow) -> float | None:
    if row.external_pids is None:
        return None
    return float(len(row.external_pids) + (row.rank is not None))


NPU_ROWS: tuple[Row, ...] = (
    *table_rows(DeviceSample, "npu_", "metrics"),
    ("npu_chip_info_process_info_num", "Processes on the NPU", _processes),
    (
        "npu_chip_info_name",
        "The NPU's name is the label model_name; always 1",
        lambda row: 1.0 if row.metrics.name else None,
    ),
)
"""Metrics of NPUs, with the names and units of npu-exporter."""
DEVICE_ROWS: tuple[Row, ...] = (
    *table_rows(DeviceSample, "ascendrun_", "metrics"),
    (
        "ascendrun_device_external_processes",
        "Processes on the device that belong to no rank",
        lambda row: None if row.external_pids is None else float(len(row.external_pids)),
    ),
)
DEVICE_AGE: Row = ("ascendrun_device_sample_age_seconds", "Age of the latest device sample", lambda row: row.age_s)
RANK_ROWS: tuple[Row, ...] = (
    *table_rows(Progress, "ascendrun_rank_", "progress"),
    *table_rows(RankSample, "ascendrun_rank_", "rank_metrics"),
    (
        "ascendrun_rank_slowdown_ratio",
        "Step time of the rank without waiting, divided by the median of the other ranks",
        lambda row: row.slower_by,
    ),
    ("ascendrun_rank_straggles", "1: the rank is a straggler", lambda row: float("slow" in row.problems)),
)
JOB_ROWS: tuple[Row, ...] = (
    ("ascendrun_job_ranks", "Ranks of the job", lambda row: float(row.job.world_size) if row.job.world_size else None),
    *table_rows(Progress, "ascendrun_job_", "progress"),
    (
        "ascendrun_job_slowest_ratio",
        "Step time of the slowest rank divided by the median of the others",
        lambda row: row.slower_by,
    ),
    ("ascendrun_job_stragglers", "Stragglers", lambda row: float(len(row.stragglers))),
    (
        "ascendrun_job_started_timestamp_seconds",
        "Time at which the job started running",
        lambda row: row.job.started_at_s,
    ),
)


def _count(*states: float | None) -> Callable[[Sequence[TopRow]], float]:
    """Return a function that counts the NPUs of a host in these states of health."""
    return lambda rows: float(sum(as_number(row.metrics.health) in states for row in rows))


def _is_fresh(host: HostRow) -> bool:
    return host.age_s is not None and host.age_s <= STALE_S


MACHINE_ROWS: tuple[Row, ...] = (
    ("machine_npu_nums", "NPUs of the host", _count(1.0, 0.0, None)),
    ("machine_healthy_npu_nums", "NPUs of the host that are OK", _count(1.0)),
    ("machine_unhealthy_npu_nums", "NPUs of the host that are not OK", _count(0.0)),
    ("machine_unknown_npu_nums", "NPUs of the host whose health is not known", _count(None)),
)
"""npu-exporter's counts of a machine, for each host."""
HOST_ROWS: tuple[Row, ...] = tuple(table_rows(HostSample, "ascendrun_", "metrics"))
HOST_AGE: Row = ("ascendrun_host_sample_age_seconds", "Age of the latest host sample", lambda host: host.age_s)
HOST_HAS_DATA: Row = (
    "ascendrun_host_has_data",
    "1: there is recent data of the host, 0: there is none",
    lambda host: float(_is_fresh(host)),
)


Labelled = Sequence[tuple[tuple[str, ...], DeviceDetail]]


def make_families(view: TopView, *, states: Mapping[str, int], details: Sequence[DeviceDetail] = ()) -> list[Metric]:
    """Make all metrics. `states`: number of jobs in each state, ended jobs too. `details`: further data of devices."""
    devices = list({(row.host, row.device): row for row in view.rows if row.device is not None}.values())
    measured = [row for row in devices if row.age_s is not None and "stale" not in row.problems]
    npus = [row for row in measured if row.device_type == "npu"]
    ranks = [row for row in view.rows if row.rank is not None]
    detail_of = {(one.host, one.device): one for one in details if view.at_s - one.at_s <= STALE_S}
    known = [(_npu_labels(row, detail_of), row) for row in npus]
    by_host = grouped((row.host, row) for row in npus)
    jobs, fresh = [row.job for row in view.jobs], [host for host in view.hosts if _is_fresh(host)]
    known_hosts = [host for host in view.hosts if host.liveness in LIVENESS]
    families = [
        *_families(NPU_ROWS, NPU_LABELS, known),
        *detail_families(
            NPU_LABELS,
            [(given, detail_of[key]) for given, row in known if (key := (row.host, row.device or 0)) in detail_of],
        ),
        *_families(MACHINE_ROWS, ("host",), [((host,), rows) for host, rows in by_host.items()]),
        *_families(DEVICE_ROWS, DEVICE_LABELS, [(_device_labels(row), row) for row in measured]),
        *_families((DEVICE_AGE,), DEVICE_LABELS, [(_device_labels(row), row) for row in devices]),
        *_families(RANK_ROWS, RANK_LABELS, [(_rank_labels(row), row) for row in ranks]),
        _gauge(
            "ascendrun_rank_device_info",
            "Device of a rank; always 1",
            (*RANK_LABELS, "id"),  # joins a rank's series with those of its device
            [((*_rank_labels(row), str(row.device)), 1.0) for row in ranks if row.device is not None],
        ),
        *_families(JOB_ROWS, JOB_LABELS, [((row.job.id, row.job.name), row) for row in view.jobs]),
        _gauge(
            "ascendrun_job_state",
            "1 for the state of a live job",
            (*JOB_LABELS, "state"),
            [((job.id, job.name, state), float(job.state == state)) for job in jobs for state in STATES],
        ),
        _add(
            CounterMetricFamily("ascendrun_job_restarts", "Number of restarts of the job", labels=JOB_LABELS),
            [((job.id, job.name), float(max(0, job.attempt - 1))) for job in jobs],
        ),
        *_families(HOST_ROWS, ("host",), [((host.host,), host) for host in fresh]),
        *_families((HOST_AGE, HOST_HAS_DATA), ("host",), [((host.host,), host) for host in view.hosts]),
        _gauge(
            "ascendrun_node_liveness",
            "1 for the liveness of a node of a live job",
            ("host", "liveness"),
            [((host.host, word), float(host.liveness == word)) for host in known_hosts for word in LIVENESS],
        ),
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


def _npu_labels(row: TopRow, detail_of: Mapping[tuple[str, int], DeviceDetail]) -> tuple[str, ...]:
    detail = detail_of.get((row.host, row.device or 0))
    bus_id = (detail.bus_id if detail is not None else None) or ""
    return ("", str(row.device), row.metrics.name or "", "", bus_id, "", "", row.host)


def _device_labels(row: TopRow) -> tuple[str, ...]:
    return (row.host, str(row.device), row.device_type or "", row.metrics.name or "")


def _rank_labels(row: TopRow) -> tuple[str, ...]:
    return (row.job or "", row.job_name or "", str(row.rank), row.host)


def _gauge(name: str, description: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    return _add(GaugeMetricFamily(name, description, labels=labels), values)


def _add(family: Family, values: Iterable[tuple[Sequence[str], float]]) -> Family:
    for given, value in values:
        family.add_metric(given, value)
    return family


def _families(
    rows: Sequence[Row], labels: Sequence[str], items: Sequence[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    for name, description, read in rows:
        known = ((given, read(item)) for given, item in items)
        yield _gauge(name, description, labels, ((given, value) for given, value in known if value is not None))


class TopCollector(Collector):
    """Collector that reads again for each scrape. `read` may raise AscendrunError."""

    def __init__(self, read: Read, pulse: ReadPulse) -> None:
        self._read, self._pulse = read, pulse
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
        if (pulse := self._pulse()) is not None:
            late = "By how much the controller's loop was late at most in the last minute"
            yield _gauge("ascendrun_controller_loop_stall_seconds", late, (), [((), pulse.late_s)])
        yield _gauge("ascendrun_scrape_ok", "1: everything could be read", (), [((), float(why is None))])
        yield _gauge("ascendrun_scrape_seconds", "Duration of the scrape", (), [((), time.monotonic() - started_s)])
