"""The cost of a job: device hours, and the energy of its devices."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobs.job import ACTIVE_STATES
from ascendrun.core.samples import DeviceSample
from ascendrun.health.report.time_use import Stay

BRIDGED = 3.0
"""A gap between two samples of a device counts as measured up to this many usual intervals, and always up to:"""
BRIDGED_S = 30.0
AROUND = 4
"""Number of intervals on each side that define the usual interval."""


@dataclass(frozen=True)
class Cost:
    """Cost. `devices`: number in use by the job, None: unknown; `family`: their type. `held_s`: duration of use.

    `energy_kwh`: of the devices in that time, as far as power was measured; None: not measured.
    `energy_known`: the measured fraction of that time, 0 to 1.
    """

    devices: int | None
    device_type: str
    held_s: float
    device_hours: float | None
    energy_kwh: float | None
    energy_known: float | None


def held_spans(stays: Sequence[Stay]) -> list[tuple[float, float]]:
    """Return the merged times (start, end) at which the job used its devices."""
    spans: list[tuple[float, float]] = []
    for stay in stays:
        if stay.state in ACTIVE_STATES:
            start_s, end_s = stay.start_ms / 1000, stay.end_ms / 1000
            if spans and spans[-1][1] == start_s:
                spans[-1] = (spans[-1][0], end_s)
            else:
                spans.append((start_s, end_s))
    return spans


def count_cost(
    stays: Sequence[Stay], *, devices: int | None, device_type: str, samples: Sequence[DeviceSample]
) -> Cost:
    """Compute the cost. `samples`: of the job's devices only, in order of time."""
    spans = held_spans(stays)
    held_s = sum(end - start for start, end in spans)
    by_device: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for one in samples:
        if one.power_w is not None:
            by_device.setdefault((one.host, one.device), []).append((one.at_s, one.power_w))
    joules, known_s = 0.0, 0.0
    for points in by_device.values():
        energy, seconds = integrate(points, spans)
        joules, known_s = joules + energy, known_s + seconds
    count = devices if devices is not None else len(by_device) or None
    hours = None if count is None else count * held_s / 3600
    if not known_s or not count or not held_s:
        return Cost(count, device_type, held_s, hours, None, 0.0 if count and held_s else None)
    return Cost(count, device_type, held_s, hours, joules / 3.6e6, min(1.0, known_s / (count * held_s)))


def integrate(points: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (integral over time, known seconds) within the spans, with linear interpolation between points.

    A gap much longer than those around it is unknown, except one usual interval after its first point. The usual
    interval varies along a series: older parts may be stored as means of ten minutes.
    """
    gaps = [later - earlier for (earlier, _), (later, _) in zip(points, points[1:])]
    total, known_s = 0.0, 0.0
    for index, (at, value) in enumerate(points):
        around = (gaps[max(0, index - AROUND) : index], gaps[index + 1 : index + 1 + AROUND])
        usual_s = max((median(side) for side in around if side), default=BRIDGED_S)
        end, next_value = points[index + 1] if index < len(gaps) else (at + usual_s, value)
        if end - at > max(BRIDGED_S, BRIDGED * usual_s):
            end, next_value = at + usual_s, value
        for start, stop in spans:
            low, high = max(start, at), min(stop, end)
            if low < high:
                slope = (next_value - value) / (end - at)
                total += (value + slope * ((low + high) / 2 - at)) * (high - low)
                known_s += high - low
    return total, known_s
