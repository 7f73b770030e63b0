"""One device, rank or host of `top` by itself: every figure that is known, and how each went."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ascendrun.cli.output import describe_memory, describe_seconds, width_of
from ascendrun.cli.top.columns import lay, note
from ascendrun.cli.top.figures import beside, figure, gib, megabytes, percent, seconds, short
from ascendrun.cli.top.screens import LiveScreen, row_title
from ascendrun.cli.top.sparkline import in_buckets, sparkline
from ascendrun.cli.top.words import key_word, word
from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.health.top.view import HostRow, TopRow

if TYPE_CHECKING:
    from ascendrun.cli.top.app import TopApp

SPANS = ((600.0, "10m"), (3600.0, "1h"), (6 * 3600.0, "6h"), (86400.0, "24h"), (7 * 86400.0, "7d"))
NAME_WIDTH, VALUE_WIDTH = 14, 16


class DetailScreen(LiveScreen):
    """`[` and `]` show a shorter and a longer time."""

    follows = False

    def __init__(self, app: TopApp, row: TopRow) -> None:
        super().__init__(app, row_title(row.host, row.device, app.lang))
        self._row = row
        self._span = 1
        self._bindings.bind("left_square_bracket", "span(-1)", word(app.lang, "shorter"), key_display="[")
        self._bindings.bind("right_square_bracket", "span(1)", word(app.lang, "longer"), key_display="]")
        self._bindings.bind("l", "logs", key_word(app.lang, "logs"))

    def action_span(self, by: int) -> None:
        self._span = max(0, min(len(SPANS) - 1, self._span + by))
        self.begin()

    def action_logs(self) -> None:
        from ascendrun.cli.top.screens import LogScreen

        if self._row.job is not None and self._row.rank is not None:
            self.app.push_screen(LogScreen(self.top, self._row.job, self._row.rank))

    def read(self) -> list[str]:
        row, host = self._now()
        now_s = time.time()
        span_s, name = SPANS[self._span]
        series = read_series(self.top.source.cluster.settings.state_dir, row, since_s=now_s - span_s, until_s=now_s)
        width = max(10, self.size.width - NAME_WIDTH - VALUE_WIDTH - 6)
        page = DetailPage(row, host, self.lang, span=name, since_s=now_s - span_s, until_s=now_s, bars=width)
        return page.lines(*series)

    def _now(self) -> tuple[TopRow, HostRow | None]:
        """The row as it stands now; as it was where it has gone."""
        view = self.top.view
        if view is None:
            return self._row, None
        for row in view.rows:
            if (row.host, row.device, row.job, row.rank) == (
                self._row.host,
                self._row.device,
                self._row.job,
                self._row.rank,
            ):
                self._row = row
                break
        return self._row, next((one for one in view.hosts if one.host == self._row.host), None)


Series = tuple[tuple[DeviceSample, ...], tuple[HostSample, ...], tuple[RankSample, ...]]


def read_series(state_dir: Any, row: TopRow, *, since_s: float, until_s: float) -> Series:
    """How the row's device, host and rank went; () of each of which nothing is kept. Raises StoreUnusableError."""
    from ascendrun.head.state.sample_store import SampleStore

    store = SampleStore.open_for_reading(state_dir)
    if store is None:
        return (), (), ()
    try:
        devices: tuple[DeviceSample, ...] = ()
        ranks: tuple[RankSample, ...] = ()
        if row.device is not None:
            devices = store.device_series(since_s=since_s, until_s=until_s, host=row.host, device=row.device)
        if row.job is not None and row.rank is not None:
            ranks = store.rank_series(since_s=since_s, until_s=until_s, job=row.job, rank=row.rank)
        return devices, store.host_series(since_s=since_s, until_s=until_s, host=row.host), ranks
    finally:
        store.close()


class DetailPage:
    """The text of the page; `bars`: characters of each sparkline."""

    def __init__(
        self, row: TopRow, host: HostRow | None, lang: str, *, span: str, since_s: float, until_s: float, bars: int
    ) -> None:
        self._row, self._host, self._lang, self._span = row, host, lang, span
        self._since_s, self._until_s, self._bars = since_s, until_s, bars

    def lines(
        self, devices: tuple[DeviceSample, ...], hosts: tuple[HostSample, ...], ranks: tuple[RankSample, ...]
    ) -> list[str]:
        return [*self._who(), "", *self._device(devices), *self._rank(ranks), *self._of_host(hosts)]

    def _who(self) -> list[str]:
        row, now, lang = self._row, self._row.figures, self._lang
        parts = [part for part in (now.name, now.health) if part]
        if now.link_up is not None:
            link = word(lang, "link-up" if now.link_up else "link-down")
            downs = "" if now.link_downs is None else word(lang, "downs", n=now.link_downs)
            parts.append(f"{word(lang, 'port')} {link}{downs}")
        if now.ecc_errors is not None:
            parts.append(f"ECC {now.ecc_errors}")
        if row.age_s is not None:
            parts.append(word(lang, "age", age=describe_seconds(row.age_s)))
        lines = [" · ".join(parts)]
        if row.job is not None:
            lines.append(f"{row.job} {row.job_name} · rank {row.rank} · pid {'-' if row.pid is None else row.pid}")
        if row.foreign_pids:
            lines.append(word(lang, "problem-foreign", pids=", ".join(map(str, row.foreign_pids))))
        said = note(row, lang)
        return [*lines, f"! {said}"] if said else lines

    def _device(self, series: tuple[DeviceSample, ...]) -> list[str]:
        if self._row.device is None:
            return []
        now = self._row.figures
        total = now.memory_total_bytes
        traffic = f"{megabytes(now.link_tx_bytes_s)}/{megabytes(now.link_rx_bytes_s)}"
        return [
            self._head("device"),
            self._line("util", percent(now.utilisation), series, lambda one: one.utilisation, 0, 100),
            self._line("mem", gib(now.memory_used_bytes, total), series, lambda one: one.memory_used_bytes, 0, total),
            self._line("power", figure(now.power_w, " W"), series, lambda one: one.power_w, 0),
            self._line("temp", figure(now.temperature_c, " C"), series, lambda one: one.temperature_c),
            self._line("freq", figure(now.frequency_mhz), series, lambda one: one.frequency_mhz),
            self._line("traffic", traffic, series, lambda one: one.link_tx_bytes_s, 0),
            "",
        ]

    def _rank(self, series: tuple[RankSample, ...]) -> list[str]:
        row, told = self._row, self._row.progress
        if row.rank is None:
            return []
        return [
            self._head("of-rank"),
            self._line("cpu", percent(row.cpu), series, lambda one: one.cpu, 0),
            self._line("rss", describe_memory(row.rss_bytes), series, lambda one: one.rss_bytes, 0),
            self._plain("step", "-" if told.step is None else str(told.step)),
            self._plain("loss", short(told.loss)),
            self._plain("tokens", short(told.tokens_per_s)),
            self._plain("step_s", f"{seconds(told.step_s)}  ({beside(row.slower_by)})"),
            "",
        ]

    def _of_host(self, series: tuple[HostSample, ...]) -> list[str]:
        if self._host is None:
            return []
        now = self._host.figures
        used = gib(now.memory_used_bytes, now.memory_total_bytes)
        net = f"{megabytes(now.net_tx_bytes_s)}/{megabytes(now.net_rx_bytes_s)}"
        return [
            self._head("of-host"),
            self._line("cpu", percent(now.cpu), series, lambda one: one.cpu, 0, 100),
            self._line("load", "-" if now.load1 is None else f"{now.load1:.1f}", series, lambda one: one.load1, 0),
            self._line("memory", used, series, lambda one: one.memory_used_bytes, 0, now.memory_total_bytes),
            self._line("traffic", net, series, lambda one: one.net_rx_bytes_s, 0),
            self._plain("disk", describe_memory(now.disk_free_bytes)),
        ]

    def _head(self, name: str) -> str:
        space = " " * max(1, NAME_WIDTH + VALUE_WIDTH - width_of(word(self._lang, name)) + 2)
        return f"{word(self._lang, name)}{space}{word(self._lang, 'last', span=self._span)}"

    def _plain(self, name: str, value: str) -> str:
        return f"{lay(self._name(name), NAME_WIDTH, is_right=False)}{lay(value, VALUE_WIDTH, is_right=True)}"

    def _line(
        self,
        name: str,
        value: str,
        series: tuple[Any, ...],
        figure_of: Any,
        low: float | None = None,
        high: float | None = None,
    ) -> str:
        points = [(one.at_s, figure_of(one)) for one in series]
        buckets = in_buckets(points, since_s=self._since_s, until_s=self._until_s, count=self._bars)
        return f"{self._plain(name, value)}  {sparkline(buckets, low=low, high=high)}".rstrip()

    def _name(self, name: str) -> str:
        return word(self._lang, f"of-{name}")
