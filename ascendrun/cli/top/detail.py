"""Page of one device, its rank and its host: every metric with its history."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ascendrun.cli.output import describe_seconds, width_of
from ascendrun.cli.top.cells import LINK_DOWN, LINK_UP, in_buckets, number, relative, sparkline
from ascendrun.cli.top.columns import describe_metric, external, lay, note
from ascendrun.cli.top.screens import LiveScreen, LogScreen
from ascendrun.core.measurement import metrics_of
from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.health.top.view import HostRow, Progress, TopRow, TopView
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster

SPANS = ((600.0, "10m"), (3600.0, "1h"), (6 * 3600.0, "6h"), (86400.0, "24h"), (7 * 86400.0, "7d"))
NAME_WIDTH, VALUE_WIDTH = 14, 16
DEVICE, RELATIVE = Text("top.device", "device"), Text("top.metric-relative", "relative")


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
        row, host = self._row, self._host
        lines = [*self._who(), ""]
        if row.device is not None:
            lines += [self._head(DEVICE), *self.metric_lines(DeviceSample, row.metrics, devices), ""]
        if row.rank is not None:
            lines += [self._head("rank"), *self._of_rank(ranks), ""]
        if host is not None:
            lines += [self._head(Text("top.host", "host")), *self.metric_lines(HostSample, host.metrics, hosts)]
        return lines

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

    def _of_rank(self, series: tuple[RankSample, ...]) -> list[str]:
        row = self._row
        lines = self.metric_lines(RankSample, row.rank_metrics, series)
        return [*lines, *self.metric_lines(Progress, row.progress), self._plain(RELATIVE, relative(row.slower_by))]

    def metric_lines(self, kind: type[Any], now: Any, series: tuple[Any, ...] = ()) -> list[str]:
        """Return a line for each metric of the page, with its history if there is a series."""
        lines = []
        for name, row in metrics_of(kind).items():
            if row.detail is not None:
                line = self._plain(row.detail, describe_metric(now, name, row))
                low, high = row.scale
                if high is None and row.beside is not None and row.unit == "bytes":
                    high = getattr(now, row.beside)
                lines.append(f"{line}  {self._history(series, name, low, high)}".rstrip())
        return lines

    def _head(self, name: Text | str) -> str:
        space = " " * max(1, NAME_WIDTH + VALUE_WIDTH - width_of(str(name)) + 2)
        return f"{name}{space}{Text('top.last-span', 'last {span}', span=self._span)}"

    def _plain(self, name: Text | str, value: str) -> str:
        return f"{lay(str(name), NAME_WIDTH, is_right=False)}{lay(value, VALUE_WIDTH, is_right=True)}"

    def _history(self, series: tuple[Any, ...], name: str, low: float | None, high: float | None) -> str:
        """Return a sparkline; `low`, `high`: of its scale, None: of the values themselves."""
        points = [(sample.at_s, getattr(sample, name)) for sample in series]
        buckets = in_buckets(points, since_s=self._since_s, until_s=self._until_s, count=self._bars)
        return sparkline(buckets, low=low, high=high)
