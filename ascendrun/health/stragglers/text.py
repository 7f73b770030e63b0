"""Messages about a straggler: how much slower it is, and the likely cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascendrun.health.stragglers.causes import Mark, StragglerCause
from ascendrun.health.stragglers.detect import Straggler
from ascendrun.text import Text

_CAUSES: Mapping[StragglerCause, Text] = {
    StragglerCause.FREQUENCY: Text("straggler.frequency", "low device clock"),
    StragglerCause.TEMPERATURE: Text("straggler.temperature", "high device temperature"),
    StragglerCause.LINK: Text("straggler.link", "network link"),
    StragglerCause.DATA: Text("straggler.data", "waiting for data"),
    StragglerCause.CPU: Text("straggler.cpu", "not enough CPU or memory on the host"),
    StragglerCause.SHARED: Text("straggler.shared", "another process uses the device"),
    StragglerCause.HEALTH: Text("straggler.health", "device health"),
}


def describe_slowness(straggler: Straggler) -> Text:
    """Return how much slower it is; it follows the name of the ranks or hosts."""
    if straggler.slower_by is None:
        return Text("straggler.metrics-only", "with unusual device metrics")
    slower = straggler.slower_by - 1
    if straggler.step_fraction is None:
        return Text("straggler.slower", "slower than the median by {slower_by:percent}", slower_by=slower)
    return Text(
        "straggler.slower-costs",
        "slower than the median by {slower_by:percent}, which costs {step_fraction:percent} of each step",
        slower_by=slower,
        step_fraction=straggler.step_fraction,
    )


def describe_cause(straggler: Straggler) -> Text:
    """Return the likely cause with the metrics that show it."""
    if straggler.cause is None:
        return Text("straggler.unknown", "unknown: no measured metric explains it")
    marks = tuple(describe_mark(mark) for mark in straggler.evidence if mark.cause is straggler.cause)
    cause = _CAUSES[straggler.cause]
    return Text("straggler.cause-and-metrics", "{cause} ({metrics})", cause=cause, metrics=marks) if marks else cause


def describe_mark(mark: Mark) -> Text:
    """Return the metric here and elsewhere: 900 MHz (others 1800 MHz)."""
    values: dict[str, Any] = {"here": mark.here, "others": mark.others}
    if mark.others is None and mark.metric in _ALONE:
        return _with(_ALONE[mark.metric], here=mark.here)
    if mark.metric == "link_downs":
        values = {"count": mark.here - (mark.others or 0.0)}
    elif mark.metric in ("link_up", "stopped"):
        values = {}
    elif mark.metric == "link_tx_bytes_s":
        values = {"here": mark.here / 1e6, "others": (mark.others or 0.0) / 1e6}
    elif mark.metric in ("memory", "health"):
        values = {"here": mark.here}
    row = _METRICS.get(mark.metric)
    return (
        Text("straggler.metric", "metric {name}: {here:g}", name=mark.metric, here=mark.here)
        if row is None
        else _with(row, **values)
    )


def _with(row: Text, **values: object) -> Text:
    return Text(row.key, row.english, **values)


_METRICS: Mapping[str, Text] = {
    "frequency_mhz": Text("straggler.clock", "at {here:.0f} MHz (others {others:.0f} MHz)", here=0, others=0),
    "frequency_drop": Text("straggler.clock-drop", "fell from {others:.0f} to {here:.0f} MHz", here=0, others=0),
    "temperature_c": Text("straggler.heat", "at {here:.0f} °C (others {others:.0f} °C)", here=0, others=0),
    "link_up": Text("straggler.link-down", "link down, up on the other hosts"),
    "link_downs": Text("straggler.link-flaps", "link down {count:.0f} times meanwhile", count=0),
    "link_tx_bytes_s": Text("straggler.traffic", "{here:.0f} MB/s (others {others:.0f} MB/s)", here=0, others=0),
    "data_s": Text("straggler.data-wait", "{here:.3g} s per step (others {others:.3g} s)", here=0, others=0),
    "cpu": Text("straggler.host-cpu", "host CPU {here:.0f}% (other hosts {others:.0f}%)", here=0, others=0),
    "memory": Text("straggler.host-memory", "host memory {here:percent} full", here=0),
    "stopped": Text("straggler.stopped", "process stopped (state T)"),
    "rank_cpu": Text("straggler.rank-cpu", "{here:.0f}% of a core (others {others:.0f}%)", here=0, others=0),
    "pids": Text("straggler.processes", "{here:.0f} processes (others {others:.0f})", here=0, others=0),
    "health": Text("straggler.devices", "{here:.0f} of its devices not OK", here=0),
}
"""By metric; the values are examples."""
_ALONE: Mapping[str, Text] = {
    "temperature_c": Text("straggler.heat-alone", "at {here:.0f} °C", here=0),
    "cpu": Text("straggler.host-cpu-alone", "host CPU {here:.0f}%", here=0),
    "pids": Text("straggler.processes-alone", "{here:.0f} processes", here=0),
}
"""By metric, without a comparison."""
