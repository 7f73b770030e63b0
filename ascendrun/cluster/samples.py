"""Measurements: samples and series of devices, hosts and ranks, rank metrics, data of `top` and Prometheus."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from ascendrun.cluster.api import Part
from ascendrun.core.dataclass import dataclass
from ascendrun.core.hosts import Host
from ascendrun.core.metrics import MetricsLine, as_row, progress_pattern
from ascendrun.core.pulse import Pulse, Sight
from ascendrun.core.samples import DeviceDetail, DeviceSample, HostSample, Newest, RankSample
from ascendrun.head.protocol.control_messages import Sample
from ascendrun.head.spool.metrics_reader import find_progress, iter_lines
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.state_dir import clock_now, read_pulse, spool_dir
from ascendrun.health.top.join import STALE_S
from ascendrun.health.top.view import TopView
from ascendrun.query.top_source import TopSource, newest_samples
from ascendrun.text import Text

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ascendrun.query.heat import HeatMap
    from ascendrun.query.views import JobDetail


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep. `loss`, `best_loss`: the last and the least; `metrics`: the newest of the others that it
    reported, under the names of docs/metrics.md. None: none yet."""

    id: str
    name: str
    state: str
    sweep: str
    index: int
    values: Mapping[str, Any]
    step: int | None = None
    loss: float | None = None
    best_loss: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


NOT_RESULTS = ("step", "loss", "total_steps", "epoch", "timestamp", "phase", "rank", "event", "message")


GRAFANA = {"cluster": "cluster.json", "job": "job.json", "node": "node.json", "alerts": "alerts.yml"}


class Samples(Part):
    """Calls for measurements. Times are UTC seconds."""

    def newest(self, *, hosts: Collection[str] | None = None, since_s: float | None = None) -> Newest:
        """Return the newest stored sample of every device, host and rank. `since_s` None: the last minute."""
        return newest_samples(self._head.state_dir, hosts=hosts, since_s=since_s)

    def take(
        self, hosts: Sequence[Host], *, timeout_s: float = 20.0, device_type: str | None = None
    ) -> tuple[Newest, Mapping[str, Text | str]]:
        """Have the agents of these hosts take and store a sample. Return it, and {host: why it sent none}.

        `device_type`: npu or cuda; None: any type that the host has.
        """
        if not hosts:
            return Newest(), {}
        request = Sample(tuple(hosts), timeout_s, device_type)
        replies = [reply for reply, _ in self._head.stream(request, timeout_s=timeout_s + 10.0)]
        newest = Newest(
            devices=tuple(sample for reply in replies for sample in reply.devices),
            hosts=tuple(sample for reply in replies for sample in reply.hosts),
        )
        return newest, {reply.host: reply.refused.line() for reply in replies if reply.refused is not None}

    def sweep(self, ref: str) -> tuple[SweepJob, ...]:
        """Return the jobs of a sweep with values and results, by its id or the id or name of one of them; (): no
        sweep."""
        with self._head.store() as store:
            found = [(one.job, one.spec["sweep"]) for one in store.jobs.all() if one.spec.get("sweep")]
        chosen = {place["id"] for job, place in found if ref in (job.id, job.name, place["id"])}
        rows = []
        for job, place in (one for one in found if one[1]["id"] in chosen):
            row = SweepJob(job.id, job.name, job.state.value, place["id"], place["index"], place["values"])
            for line in (one for number in range(job.attempt) for one in self.metrics(job.id, attempt=number + 1)):
                new = {name: value for name, value in as_row(line).items() if value is not None}
                losses = [one for one in (row.best_loss, new.get("loss")) if one is not None]
                row = replace(
                    row,
                    step=new.get("step", row.step),
                    loss=new.get("loss", row.loss),
                    best_loss=min(losses, default=None),
                    metrics={**row.metrics, **{name: new[name] for name in new if name not in NOT_RESULTS}},
                )
            rows.append(row)
        return tuple(sorted(rows, key=lambda one: (one.sweep, one.index)))

    def request(self, hosts: Sequence[Host], *, timeout_s: float = 20.0) -> None:
        """Request samples as `take`, without waiting: they are stored. Hosts with an open request are skipped."""
        with self._head.client() as client:
            client.post(Sample(tuple(hosts), timeout_s, unless_pending=True))

    def series(
        self,
        host: str,
        *,
        since_s: float,
        until_s: float | None = None,
        device: int | None = None,
        job: str | None = None,
        rank: int | None = None,
    ) -> tuple[tuple[DeviceSample, ...], tuple[HostSample, ...], tuple[RankSample, ...]]:
        """Return the stored samples of a host, by time; limited to one `device`, and to one `rank` of a `job`.

        Raises StoreUnusableError.
        """
        until_s = time.time() if until_s is None else until_s
        with SampleStore.open_for_reading(self._head.state_dir) as store:
            return (
                ()
                if device is None
                else store.device_series(since_s=since_s, until_s=until_s, host=host, device=device),
                store.host_series(since_s=since_s, until_s=until_s, host=host),
                ()
                if job is None or rank is None
                else store.rank_series(since_s=since_s, until_s=until_s, job=job, rank=rank),
            )

    def metrics(self, ref: str, *, rank: int = 0, attempt: int | None = None) -> tuple[MetricsLine, ...]:
        """Return the metrics that a rank has written, or else those that it printed, in order. `attempt` None: the
        newest. A rank between the first and the last that wrote none has none."""
        detail = self._cluster.jobs.detail(ref)
        job = detail.job
        folder = spool_dir(self._head.state_dir, job.id, attempt or max(job.attempt, 1))
        paths = find_progress(folder, ranks=[rank]).get(rank, ())
        return tuple(iter_lines(paths, pattern=progress_pattern(detail.spec)))

    def heat(self, detail: JobDetail) -> HeatMap:
        """Return the load and the step times of each rank of a job's newest attempt over time.

        Raises StoreUnusableError.
        """
        from ascendrun.query.heat import read_heat

        return read_heat(self._head.state_dir, detail, now_s=time.time())

    def top(self, hosts: Sequence[Host] = (), *, is_patient: bool = False, with_progress: bool = True) -> TopSource:
        """Return the source of `top`; `.refresh(now_s=…)` refreshes. `hosts`: also sampled if no job runs there.
        `with_progress`: with the steps of each rank, which costs most for many ranks."""
        return TopSource(
            self._head.state_dir,
            hosts,
            sight=self._sight,
            query=lambda hosts, timeout_s: self.take(hosts, timeout_s=timeout_s),
            request=self.request,
            is_patient=is_patient,
            with_progress=with_progress,
        )

    def _sight(self) -> Sight | None:
        """Return what the controller knows; a live job without a controller gets a new controller."""
        return self._cluster.controller.sight() if self._cluster.jobs.list() else None

    def prometheus(self, hosts: Sequence[Host] = ()) -> CollectorRegistry:
        """Return the data of `top` as a registry of prometheus_client, read again at each collection."""
        from prometheus_client import CollectorRegistry

        from ascendrun.query.prometheus import TopCollector

        source = self.top(hosts)

        def read() -> tuple[TopView, Mapping[str, int], Sequence[DeviceDetail]]:
            view, states = source.refresh(now_s=time.time()), self._cluster.jobs.count_states()
            if view.samples_error:
                return view, states, ()
            with SampleStore.open_for_reading(self._head.state_dir) as store:
                return view, states, store.details(since_s=view.at_s - STALE_S)

        registry = CollectorRegistry(auto_describe=False)
        registry.register(TopCollector(read, self._fresh_pulse))
        return registry

    def _fresh_pulse(self) -> Pulse | None:
        pulse = read_pulse(self._head.state_dir)
        return pulse if pulse is not None and pulse.is_fresh(clock_now()) else None

    def dashboard(self, name: str = "cluster") -> str:
        """Return a Grafana dashboard (JSON) of the metrics of `prometheus`; of the name alerts, rules (YAML)."""
        from ascendrun.carried import data_root

        return (data_root() / "templates" / "grafana" / GRAFANA[name]).read_text(encoding="utf-8")
