"""A metric is one row: the store, the exporter, `top` and the docs follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascendrun.cli.top.columns import host_columns, metric_columns
from ascendrun.cli.top.screens import DetailPage
from ascendrun.core.dataclass import dataclass
from ascendrun.core.measurement import Column, HostColumn, metric, metrics_of
from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.health.top.view import HostLine, HostRow, Progress, TopRow
from ascendrun.query.prometheus import table_rows
from tests.lib.pages.measurements import render_rows

T = 1_763_600_000.0
ROW = metric(
    "fan speed",
    "rpm",
    prometheus=("ascendrun_device_fan_rpm",),
    column=Column("fan", "FAN", 30),
    host_column=HostColumn("fan", "FAN", 30, "max"),
    detail="fan",
)


@dataclass(frozen=True)
class Wider(DeviceSample):
    fan_rpm: float | None = ROW


class WiderStore(SampleStore):
    KINDS = {**SampleStore.KINDS, "device": Wider}


def wider(device: int, fan_rpm: float | None) -> Any:
    return Wider(T, "a", device, "npu", utilisation=50.0, fan_rpm=fan_rpm)


def test_the_store_keeps_the_new_metric_also_in_a_file_that_lacks_it(tmp_path: Path) -> None:
    with SampleStore.open(tmp_path) as store:
        store.add([DeviceSample(T - 60, "a", 0, "npu", utilisation=40.0)])
    with WiderStore.open_for_reading(tmp_path) as reader:  # before a controller of the new release has opened it
        assert reader.newest(since_s=0).devices == (Wider(T - 60, "a", 0, "npu", utilisation=40.0),)
    with WiderStore.open(tmp_path) as store:
        store.add([wider(0, 900.0), wider(1, None)])
        store.tend(now_s=T + 300)
        found = store.device_series(since_s=0, until_s=2 * T, host="a")
    assert [(one.utilisation, one.fan_rpm) for one in found] == [(40.0, None), (50.0, 900.0), (50.0, None)]


def test_the_exporter_top_and_the_docs_show_the_new_metric() -> None:
    row = TopRow("a", 0, wider(0, 900.0), age_s=1.0)
    [(name, description, read)] = [each for each in table_rows(Wider, "ascendrun_", "metrics") if "fan" in each[0]]
    assert (name, description, read(row)) == ("ascendrun_device_fan_rpm", "fan speed, rpm", 900.0)
    [column] = [each for each in metric_columns(Wider, "metrics", of_device=True) if each.key == "fan"]
    assert (column.title, column.cell(row), column.cell(TopRow("a", 1, wider(1, None)))) == ("FAN", "900", "-")
    [column] = [each for each in host_columns(Wider) if each.key == "fan"]
    line = HostLine("a", (row, TopRow("a", 1, wider(1, 950.0))), HostRow("a", 2, ()))
    assert (column.of_device, column.cell(line)) == (True, "950")
    page = DetailPage(row, None, span="1h", since_s=T - 3600, until_s=T + 1, bars=4)
    assert [each.split()[:2] for each in page.metric_lines(Wider, row.metrics) if "fan" in each] == [["fan", "900"]]
    assert "| `fan_rpm` | fan speed | rpm | `FAN` | `ascendrun_device_fan_rpm` |" in render_rows(Wider)


@pytest.mark.parametrize("kind", [DeviceSample, HostSample, RankSample, Progress])
def test_rows_name_other_rows_and_no_series_twice(kind: type[Any]) -> None:
    rows = metrics_of(kind)
    assert {row.beside for row in rows.values()} - {None} <= set(rows)
    series = [name for row in rows.values() for name in row.prometheus]
    assert len(series) == len(set(series))
