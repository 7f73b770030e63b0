"""Page of one device, its rank and its host: every metric with its history."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ascendrun.cli.output import describe_memory, describe_seconds, width_of
from ascendrun.cli.top.cells import gib, in_buckets, megabytes, number, percent, relative, seconds, short, sparkline
from ascendrun.cli.top.columns import LINK_DOWN, LINK_UP, external, lay, note
from ascendrun.cli.top.screens import LiveScreen, LogScreen
from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.health.top.view import HostRow, TopRow, TopView
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster

SPANS = ((600.0, "10m"), (3600.0, "1h"), (6 * 3600.0, "6h"), (86400.0, "24h"), (7 * 86400.0, "7d"))
NAME_WIDTH, VALUE_WIDTH = 14, 16
DEVICE = Text("top.device", "device")
METRICS: Mapping[str, Text | str] = {
    "util": Text("top.metric-util", "utilisation"),
    "mem": Text("top.metric-mem", "memory GiB"),
    "power": Text("top.metric-power", "power"),
    "temp": Text("top.metric-temp", "temperature"),
    "freq": Text("top.metric-freq", "clock MHz"),
    "traffic": Text("top.metric-traffic", "tx/rx MB/s"),
    "cpu": "CPU",
    "rss": Text("top.metric-rss", "memory"),
    "step": Text("top.metric-step", "step"),
    "loss": "loss",
    "tokens": "tokens/s",
    "step_s": Text("top.metric-step-s", "s/step"),
    "load": Text("top.metric-load", "load"),
    "memory": Text("top.metric-memory", "memory GiB"),
    "disk": Text("top.metric-disk", "disk free"),
}


class DetailScreen(LiveScreen):
    """`[` and `]` show a shorter and a longer time span. `view`: the latest view of `top`."""

    follows = False

    def __init__(self, cluster: Cluster, row: TopRow, view: Callable[[], TopView | None]) -> None:
        super().__init__(cluster, row.host if row.device is None else f"{row.host} · {DEVICE} {row.device}")
        self._row, self._view = row, view
        self._span = 1
        self._bindings.bind("left_square_bracket", "span(-1)", str(Text("top.key-shorter", "Shorter")), key_display="[")
        self._bindings.bind("right_square_bracket", "span(1)", str(Text("top.key-longer", "Longer")), key_display="]")
        self._bindings.bind("l", "logs", str(Text("top.key-logs", "Logs")))

    def action_span(self, by: int) -> None:
        self._span = max(0, min(len(SPANS) - 1, self._span + by))
        self.begin()

    def action_logs(self) -> None:
        if self._row.job is not None and self._row.rank is not None:
            self.app.push_screen(LogScreen(self.cluster, self._row.job, self._row.rank))

    def read(self) -> list[str]:
        row, host = self._now()
        now_s = time.time()
        span_s, name = SPANS[self._span]
        series = self.cluster.samples.series(
            row.host, device=row.device, job=row.job, rank=row.rank, since_s=now_s - span_s, until_s=now_s
        )
        width = max(10, self.size.width - NAME_WIDTH - VALUE_WIDTH - 6)
        page = DetailPage(row, host, span=name, since_s=now_s - span_s, until_s=now_s, bars=width)
        return page.lines(*series)

    def _now(self) -> tuple[TopRow, HostRow | None]:
        """Return the current row, the last one if it is gone."""
        view = self._view()
        if view is None:
            return self._row, None
        for row in view.rows:
            if place_of(row) == place_of(self._row):
                self._row = row
                break
        return self._row, next((host for host in view.hosts if host.host == self._row.host), None)


def place_of(row: TopRow) -> tuple[object, ...]:
    return row.host, row.device, row.job, row.rank


class DetailPage:
    """The text of the page; `bars`: characters of each sparkline."""

    def __init__(
        self, row: TopRow, host: HostRow | None, *, span: str, since_s: float, until_s: float, bars: int
    ) -> None:
        self._row, self._host, self._span = row, host, span
        self._since_s, self._until_s, self._bars = since_s, until_s, bars

    def lines(
        self, devices: tuple[DeviceSample, ...], hosts: tuple[HostSample, ...], ranks: tuple[RankSample, ...]
    ) -> list[str]:
        return [*self._who(), "", *self._device(devices), *self._rank(ranks), *self._of_host(hosts)]

    def _who(self) -> list[str]:
        row, now = self._row, self._row.metrics
        parts = [part for part in (now.name, now.health) if part]
        if now.link_up is not None:
            link = LINK_UP if now.link_up else LINK_DOWN
            port = Text("top.port", "port {link}", link=link)
            if now.link_downs is not None:
                port = Text("top.port-downs", "port {link} (went down {n} times)", link=link, n=now.link_downs)
            parts.append(str(port))
        if now.ecc_errors is not None:
            parts.append(f"ECC {now.ecc_errors}")
        if row.age_s is not None:
            parts.append(str(Text("top.age", "measured {age} ago", age=describe_seconds(row.age_s))))
        lines = [" · ".join(parts)]
        if row.job is not None:
            lines.append(f"{row.job} {row.job_name} · rank {row.rank} · pid {number(row.pid)}")
        if row.external_pids:
            lines.append(str(external(row)))
        problems = note(row)
        return [*lines, f"! {problems}"] if problems else lines

    def _device(self, series: tuple[DeviceSample, ...]) -> list[str]:
        if self._row.device is None:
            return []
        now = self._row.metrics
        total = now.memory_total_bytes
        traffic = f"{megabytes(now.link_tx_bytes_s)}/{megabytes(now.link_rx_bytes_s)}"
        return [
            self._head(DEVICE),
            self._line("util", percent(now.utilisation), series, "utilisation", 0, 100),
            self._line("mem", gib(now.memory_used_bytes, total), series, "memory_used_bytes", 0, total),
            self._line("power", number(now.power_w, " W"), series, "power_w", 0),
            self._line("temp", number(now.temperature_c, " C"), series, "temperature_c"),
            self._line("freq", number(now.frequency_mhz), series, "frequency_mhz"),
            self._line("traffic", traffic, series, "link_tx_bytes_s", 0),
            "",
        ]

    def _rank(self, series: tuple[RankSample, ...]) -> list[str]:
        row, progress = self._row, self._row.progress
        if row.rank is None:
            return []
        return [
            self._head("rank"),
            self._line("cpu", percent(row.cpu), series, "cpu", 0),
            self._line("rss", describe_memory(row.rss_bytes), series, "rss_bytes", 0),
            self._plain("step", number(progress.step)),
            self._plain("loss", short(progress.loss)),
            self._plain("tokens", short(progress.tokens_per_s)),
            self._plain("step_s", f"{seconds(progress.step_s)}  ({relative(row.slower_by)})"),
            "",
        ]

    def _of_host(self, series: tuple[HostSample, ...]) -> list[str]:
        if self._host is None:
            return []
        now = self._host.metrics
        used = gib(now.memory_used_bytes, now.memory_total_bytes)
        net = f"{megabytes(now.net_tx_bytes_s)}/{megabytes(now.net_rx_bytes_s)}"
        return [
            self._head(Text("top.host", "host")),
            self._line("cpu", percent(now.cpu), series, "cpu", 0, 100),
            self._line("load", number(now.load1, digits=1), series, "load1", 0),
            self._line("memory", used, series, "memory_used_bytes", 0, now.memory_total_bytes),
            self._line("traffic", net, series, "net_rx_bytes_s", 0),
            self._plain("disk", describe_memory(now.disk_free_bytes)),
        ]

    def _head(self, name: Text | str) -> str:
        space = " " * max(1, NAME_WIDTH + VALUE_WIDTH - width_of(str(name)) + 2)
        return f"{name}{space}{Text('top.last-span', 'last {span}', span=self._span)}"

    def _plain(self, name: str, value: str) -> str:
        return f"{lay(str(METRICS[name]), NAME_WIDTH, is_right=False)}{lay(value, VALUE_WIDTH, is_right=True)}"

    def _line(self, name: str, value: str, series: tuple[Any, ...], metric: str, *limits: float | None) -> str:
        """Return a line. `limits`: lowest and highest value of the scale; missing or None: of the values themselves."""
        points = [(sample.at_s, getattr(sample, metric)) for sample in series]
        buckets = in_buckets(points, since_s=self._since_s, until_s=self._until_s, count=self._bars)
        return f"{self._plain(name, value)}  {sparkline(buckets, **dict(zip(('low', 'high'), limits)))}".rstrip()
