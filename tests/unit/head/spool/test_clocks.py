"""Two hosts' times can be compared: offsets are measured, kept, and taken off."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.head.spool.clocks import (
    CLOCK_FILE,
    ClockFiles,
    ClockTracker,
    HostClock,
    Reading,
    keep_reading,
    make_reading,
    read_clocks,
)


def test_a_host_90_s_ahead_says_its_times_in_the_heads() -> None:
    clock = HostClock([make_reading(1000.0, 1000.002, 1090.001)])
    assert clock.to_head_s(1100.0) == pytest.approx(1010.0)
    assert clock.to_node_s(1010.0) == pytest.approx(1100.0)
    assert clock.error_s == pytest.approx(0.001)


def test_a_host_never_measured_counts_as_the_head_and_says_so() -> None:
    assert HostClock().to_head_s(5.0) == 5.0
    assert HostClock().error_s is None and not HostClock().was_set


@given(
    st.floats(-90, 90),
    st.floats(-1e-4, 1e-4),
    st.lists(st.tuples(st.floats(0.0001, 2.0), st.floats(0, 1)), min_size=2, max_size=30),
    st.floats(0, 1),
)
def test_an_error_is_never_larger_than_that_of_the_best_reading_at_hand(
    offset_s: float, drift: float, trips: list[tuple[float, float]], when: float
) -> None:
    """However the round trips divide their delay, over a clock that drifts as real ones do."""

    def node_at(head_s: float) -> float:
        return head_s + offset_s + drift * head_s

    readings = []
    for minute, (delay_s, share) in enumerate(trips):
        sent_s = 60.0 * minute
        readings.append(make_reading(sent_s, sent_s + delay_s, node_at(sent_s + share * delay_s)))
    clock = HostClock(readings)
    head_s = when * 60.0 * (len(trips) - 1)
    allowed_s = min(reading.error_at(head_s) for reading in readings)
    assert not clock.was_set
    assert abs(clock.to_head_s(node_at(head_s)) - head_s) <= 3 * allowed_s + 1e-6


def test_a_drift_is_followed_between_readings() -> None:
    readings = [Reading(at_s=3600.0 * hour, offset_s=0.1 * hour, error_s=0.0005) for hour in range(5)]
    clock = HostClock(readings)
    assert clock.to_head_s(5400.0 + 0.15) == pytest.approx(5400.0, abs=0.001)


def test_a_slow_round_trip_between_good_ones_moves_nothing() -> None:
    readings = [Reading(0.0, 5.0, 0.0002), Reading(60.0, 5.9, 1.0), Reading(120.0, 5.0, 0.0002)]
    assert HostClock(readings).to_head_s(65.0) == pytest.approx(60.0, abs=0.001)


@given(st.lists(st.floats(0, 4000), max_size=8))
def test_many_times_at_once_are_what_each_would_be(times: list[float]) -> None:
    drifting = HostClock([make_reading(at, at + 0.001, at * 1.0001 + 5) for at in (1000.0, 2000.0, 3000.0)])
    for clock in (
        drifting,
        HostClock(),
        HostClock([make_reading(1000.0, 1000.001, 1000.0), make_reading(2000.0, 2000.001, 2500.0)]),
    ):
        assert list(clock.all_to_head_s(times)) == [clock.to_head_s(one) for one in times]


def test_a_clock_that_was_set_is_read_by_the_side_on_which_a_time_lies() -> None:
    readings = [Reading(60.0 * n, 0.0 if n < 5 else 3600.0, 0.001) for n in range(10)]
    clock = HostClock(readings)
    assert clock.was_set
    assert clock.to_head_s(100.0) == pytest.approx(100.0)
    assert clock.to_head_s(3600.0 + 400.0) == pytest.approx(400.0)
    assert clock.to_node_s(100.0) == pytest.approx(100.0)
    assert clock.to_node_s(400.0) == pytest.approx(4000.0)


def test_a_time_after_the_last_reading_is_taken_by_it() -> None:
    clock = HostClock([Reading(0.0, 1.0, 0.001), Reading(60.0, 1.006, 0.001)])
    assert clock.to_head_s(1e6) == pytest.approx(1e6 - 1.006)


def test_what_is_kept_is_read_back_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    keep_reading(tmp_path / "jobs" / "attempt-1" / "n1", Reading(10.0, -90.5, 0.002))
    keep_reading(tmp_path / "jobs" / "attempt-1" / "n1", Reading(70.0, -90.5, 0.001))
    (tmp_path / "jobs" / "attempt-1" / "n2").mkdir()
    with open(tmp_path / "jobs" / "attempt-1" / "n1" / "clock", "ab") as file:
        file.write(b'{"at_s": 9, "offs\n[]\n{"at_s": "x"}\n\xff')
    clocks = read_clocks(tmp_path / "jobs" / "attempt-1")
    assert clocks["n1"].readings == (Reading(10.0, -90.5, 0.002), Reading(70.0, -90.5, 0.001))
    assert clocks["n2"].error_s is None
    assert read_clocks(tmp_path / "missing") == {}


def test_a_month_of_readings_that_say_the_same_stays_small_and_a_clock_that_is_set_is_still_found(
    tmp_path: Path,
) -> None:
    files, minutes, set_at = ClockFiles(), 30 * 24 * 60, 10_030
    for minute in range(minutes):
        offset_s = 0.5 if minute < set_at else 0.9
        files.keep(tmp_path / "n1", Reading(60.0 * minute, offset_s + 1e-4 * (minute % 7), 0.0005))
    assert len((tmp_path / "n1" / CLOCK_FILE).read_bytes().splitlines()) < 1500
    clock = read_clocks(tmp_path)["n1"]
    assert clock.was_set
    for minute in (5, set_at - 2, set_at + 2, minutes - 1):
        offset_s = 0.5 if minute < set_at else 0.9
        assert clock.to_head_s(60.0 * minute + offset_s) == pytest.approx(60.0 * minute, abs=0.003)


def test_a_drift_is_kept_closely_enough_to_be_taken_off(tmp_path: Path) -> None:
    files = ClockFiles()
    for minute in range(600):
        files.keep(tmp_path / "n1", Reading(60.0 * minute, 60.0 * minute * 2e-5, 0.0003))
    clock = read_clocks(tmp_path)["n1"]
    assert not clock.was_set
    for minute in (0, 61, 301, 595):
        assert clock.to_head_s(60.0 * minute * (1 + 2e-5)) == pytest.approx(60.0 * minute, abs=0.005)


class FakeHosts:
    """Hosts whose answers the test gives, each with its own clock."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Callable[[int | None], None]]] = []

    def ping(self, host: str, heard: Callable[[int | None], None]) -> None:
        self.asked.append((host, heard))

    def answer(self, offset_s: float | None) -> None:
        _host, heard = self.asked.pop(0)
        heard(None if offset_s is None else time.time_ns() + round(offset_s * 1e9))


def test_a_host_is_measured_by_some_round_trips_and_one_result_is_kept() -> None:
    hosts, kept = FakeHosts(), []
    keeper = ClockTracker(hosts.ping, lambda host, reading: kept.append((host, reading)))
    keeper.measure("n1")
    keeper.measure("n1")  # is under way
    for _ in range(3):
        assert kept == [] and len(hosts.asked) == 1
        hosts.answer(-12.0)
    keeper.tick(["n1"])
    ((host, reading),) = kept
    assert host == "n1" and abs(reading.offset_s + 12.0) <= reading.error_s + 1e-3
    keeper.tick(["n1"])
    assert hosts.asked == []  # a minute has not gone by


def test_a_host_that_does_not_answer_leaves_no_reading_and_may_be_asked_again() -> None:
    hosts, kept = FakeHosts(), []
    keeper = ClockTracker(hosts.ping, lambda host, reading: kept.append(host))
    keeper.measure("n1")
    hosts.answer(None)
    keeper.tick(["n1"])
    assert kept == [] and hosts.asked == []
    keeper.measure("n1")
    hosts.answer(3.0)
    hosts.answer(None)
    keeper.tick(["n1"])
    assert kept == ["n1"]
