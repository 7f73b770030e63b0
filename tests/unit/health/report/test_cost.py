"""Energy and device hours: what was measured counts, what was not is said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.jobs.job import State
from ascendrun.core.samples import DeviceSample
from ascendrun.health.report.cost import count_cost, held_spans, integrate
from ascendrun.health.report.time_use import find_stays

MOVES = [
    (100.0, State.CHECKING),
    (110.0, State.STAGING),
    (120.0, State.STARTING),
    (130.0, State.RUNNING),
    (3700.0, State.SUCCEEDED),
]
STAYS = find_stays(MOVES, created_s=0.0, until_s=3700.0)


def measured(device: int, begin_s: float, end_s: float, watts: float, every_s: float = 5.0) -> list[DeviceSample]:
    count = int((end_s - begin_s) / every_s)
    return [DeviceSample(begin_s + k * every_s, "a", device, "npu", power_w=watts) for k in range(count)]


def test_devices_are_held_from_the_first_look_at_the_nodes_to_the_end() -> None:
    assert held_spans(STAYS) == [(100.0, 3700.0)]


def test_a_steady_power_over_an_hour_is_its_kilowatt_hours() -> None:
    samples = sorted([*measured(0, 0.0, 3800.0, 300.0), *measured(1, 0.0, 3800.0, 100.0)], key=lambda one: one.at_s)
    cost = count_cost(STAYS, devices=2, device_type="npu", samples=samples)
    assert cost.device_hours == pytest.approx(2.0)
    assert cost.energy_kwh == pytest.approx(0.4) and cost.energy_known == pytest.approx(1.0)


def test_what_was_not_measured_is_not_guessed() -> None:
    half = count_cost(STAYS, devices=2, device_type="npu", samples=measured(0, 100.0, 3700.0, 300.0))
    assert half.energy_kwh == pytest.approx(0.3) and half.energy_known == pytest.approx(0.5)
    samples = [*measured(0, 100.0, 1000.0, 300.0), *measured(0, 2800.0, 3700.0, 300.0)]
    gap = count_cost(STAYS, devices=1, device_type="npu", samples=samples)
    assert gap.energy_kwh == pytest.approx(0.15, rel=0.01) and gap.energy_known == pytest.approx(0.5, rel=0.01)
    none = count_cost(STAYS, devices=2, device_type="npu", samples=())
    assert (none.energy_kwh, none.energy_known, none.device_hours) == (None, 0.0, 2.0)


def test_means_of_minutes_and_of_ten_minutes_count_alike() -> None:
    coarse = [
        *measured(0, 100.0, 1900.0, 300.0, 600.0),
        *measured(0, 1900.0, 3100.0, 300.0, 60.0),
        *measured(0, 3100.0, 3700.0, 300.0, 5.0),
    ]
    cost = count_cost(STAYS, devices=1, device_type="npu", samples=coarse)
    assert cost.energy_known == pytest.approx(1.0) and cost.energy_kwh == pytest.approx(0.3)


def test_a_job_that_never_held_anything_cost_nothing() -> None:
    cost = count_cost(find_stays([], created_s=0.0, until_s=50.0), devices=8, device_type="npu", samples=())
    assert (cost.held_s, cost.device_hours, cost.energy_kwh, cost.energy_known) == (0.0, 0.0, None, None)


def test_between_two_samples_power_changes_evenly() -> None:
    assert integrate([(0.0, 0.0), (10.0, 100.0), (20.0, 100.0)], [(0.0, 10.0)]) == (500.0, 10.0)
    assert integrate([(0.0, 0.0), (10.0, 100.0), (20.0, 100.0)], [(5.0, 10.0)]) == (375.0, 5.0)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 500)), max_size=30, unique_by=lambda point: point[0]))
def test_no_more_is_known_than_there_was(points: list[tuple[float, float]]) -> None:
    ordered = sorted(points)
    total, known_s = integrate(ordered, [(100.0, 400.0), (500.0, 900.0)])
    highest = max((watts for _, watts in points), default=0.0)
    assert 0.0 <= known_s <= 700.0 + 1e-6 and -1e-6 <= total <= highest * known_s + 1e-6
