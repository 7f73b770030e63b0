"""Long series made short: spikes and gaps stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ascendrun.health.report.charts import make_band, make_chart, thin

VALUES = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=400)


@given(VALUES, st.integers(3, 60))
def test_a_thinned_series_keeps_its_ends_its_least_and_its_greatest(values: list[float | None], most: int) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = thin(points, most=most)
    assert len(kept) <= max(4, -(-4 * most // 3) + 4)
    assert set(kept) <= set(points) and [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    numbers = [y for y in values if y is not None]
    if numbers:
        drawn = [y for _, y in kept if y is not None]
        assert (min(drawn), max(drawn)) == (min(numbers), max(numbers))


def test_one_spike_among_very_many_points_is_drawn() -> None:
    points = [(float(x), 77.0 if x == 154_321 else 1.0) for x in range(250_000)]
    assert (154_321.0, 77.0) in thin(points)


def test_nothing_to_draw_is_no_chart() -> None:
    assert make_chart("loss", "step", "", []) is None
    assert make_chart("loss", "step", "", [(1.0, None), (2.0, float("nan"))]) is None
    assert make_band("power_w", "W", [[], [(1.0, None)]], since_s=0.0, until_s=10.0) is None


def series(values: list[tuple[float, float]]) -> list[tuple[float, float | None]]:
    return [(at, y) for at, y in values]


def test_several_devices_are_mean_least_and_greatest_and_a_gap_stays_one() -> None:
    ones = [series([(t * 10.0, y) for t in range(100) if not 40 <= t < 60]) for y in (1.0, 2.0, 6.0)]
    found = make_band("power_w", "W", ones, since_s=0.0, until_s=1000.0)
    assert found is not None and found.is_band
    mean, least, greatest = (line.ys for line in found.lines)
    assert set(mean) == {3.0, None} and set(least) == {1.0, None} and set(greatest) == {6.0, None}
    [gap] = [x for x, y in zip(found.xs, mean) if y is None]
    assert 390.0 < gap < 600.0


def test_one_device_is_one_line() -> None:
    found = make_band("power_w", "W", [series([(0.0, 1.0), (5.0, 2.0)])], since_s=0.0, until_s=10.0)
    assert found is not None and not found.is_band and len(found.lines) == 1


def test_what_can_be_full_is_drawn_from_nothing_to_full_and_other_shares_are_not() -> None:
    points = [(float(x), 99.9) for x in range(5)]
    drawn = {name: make_chart(name, "time", "%", points) for name in ("utilisation", "host_cpu", "mfu")}
    assert {name: chart is not None and chart.is_load for name, chart in drawn.items()} == {
        "utilisation": True,
        "host_cpu": True,
        "mfu": False,
    }
