"""The arithmetic of failures: against published figures, against a simulation, and at the edges."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.jobs.job import State
from ascendrun.health.forecast import (
    ASSUMED,
    PUBLISHED,
    History,
    JobTimeline,
    Rate,
    best_interval_s,
    effective_share,
    make_forecast,
    own_rate_per_node_day,
    sum_up,
    young_interval_s,
)

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0
RSC_1, LLAMA_3, RSC_2 = PUBLISHED


@pytest.mark.parametrize(
    "nodes, rate, hours",
    [
        (2, RSC_1, 77 * 24),
        (64, RSC_1, 58),
        (1000, RSC_1, 3.7),
        (1000, LLAMA_3, 6.3),
        (1000, RSC_2, 10.3),
        (200, LLAMA_3, 31.7),
    ],
)
def test_the_time_between_failures_is_the_published_one(nodes: int, rate: Rate, hours: float) -> None:
    assert make_forecast(nodes, History(), assumed=rate).between_failures_s / HOUR_S == pytest.approx(hours, rel=0.02)


@pytest.mark.parametrize(
    "lost_min, interval_min, first_order",
    [(38, 30, 0.76), (38, 10, 0.81), (10, 30, 0.89), (6, 30, 0.91), (3.2, 30, 0.92), (3.2, 10, 0.96), (3.2, 60, 0.85)],
)
def test_the_effective_share_is_near_the_first_order_formula(
    lost_min: float, interval_min: float, first_order: float
) -> None:
    """Meta's E[ETTR] counts a failure during a restart in full, so it is a little darker where failures are dense."""
    between_s = DAY_S / (1000 * RSC_1.per_node_day)
    share = effective_share(interval_min * MINUTE_S, between_s, save_s=0.0, restart_s=lost_min * MINUTE_S)
    assert first_order - 0.005 <= share <= first_order + 0.03


def test_the_effective_share_is_what_a_simulated_job_gets() -> None:
    chance = random.Random(5)
    between_s, interval_s, save_s, restart_s = 3600.0, 900.0, 60.0, 200.0
    elapsed_s, saved_s, next_failure_s = 0.0, 0.0, chance.expovariate(1 / between_s)
    while saved_s < 20_000 * interval_s:
        if elapsed_s + interval_s + save_s <= next_failure_s:
            elapsed_s += interval_s + save_s
            saved_s += interval_s
            continue
        while elapsed_s <= next_failure_s:  # start again, until a start comes through
            elapsed_s = next_failure_s
            next_failure_s = elapsed_s + chance.expovariate(1 / between_s)
            if elapsed_s + restart_s <= next_failure_s:
                elapsed_s += restart_s
                break
    expected = effective_share(interval_s, between_s, save_s=save_s, restart_s=restart_s)
    assert saved_s / elapsed_s == pytest.approx(expected, rel=0.02)


@given(st.floats(600, 1e7), st.floats(0.1, 600))
def test_no_other_interval_is_much_better_than_the_best_one(between_s: float, save_s: float) -> None:
    best_s = best_interval_s(between_s, save_s)
    share = effective_share(best_s, between_s, save_s=save_s, restart_s=100.0)
    for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0):
        other = effective_share(best_s * factor, between_s, save_s=save_s, restart_s=100.0)
        assert other <= share * 1.02


@given(st.floats(1e5, 1e8), st.floats(0.1, 60))
def test_where_failures_are_rare_daly_says_what_young_says(between_s: float, save_s: float) -> None:
    young_s = young_interval_s(between_s, save_s)
    assert best_interval_s(between_s, save_s) == pytest.approx(young_s, abs=save_s, rel=0.02)


@given(st.integers(1, 100_000), st.floats(0, 1e5), st.integers(0, 10_000), st.floats(0.01, 86400))
def test_every_forecast_is_a_share_and_more_nodes_never_help(
    nodes: int, days: float, failures: int, save_s: float
) -> None:
    history = History(node_days=days, failures=failures)
    one, more = (make_forecast(count, history, save_s=save_s) for count in (nodes, nodes * 2))
    for share in (one.effective_share, one.hourly_share, more.effective_share):
        assert 0.0 <= share <= 1.0
    assert more.between_failures_s < one.between_failures_s
    assert more.hourly_share <= one.hourly_share
    assert one.save_every_s >= 0


def test_a_forecast_says_where_its_rate_comes_from() -> None:
    assumed = make_forecast(8, History())
    assert assumed.rate_source == ASSUMED.source and "arXiv" in assumed.rate_source and not assumed.has_own_history
    own = make_forecast(8, History(node_days=1000, failures=2, restarts_s=(100.0, 300.0, 200.0)))
    assert (own.own_failures, own.own_node_days, own.has_own_history) == (2, 1000, True)
    assert own.restart_s == 200.0


def test_a_little_history_moves_the_rate_a_little_and_much_of_it_decides() -> None:
    assert own_rate_per_node_day(History(), ASSUMED) == pytest.approx(ASSUMED.per_node_day)
    quiet_week = own_rate_per_node_day(History(node_days=14), ASSUMED)
    assert 0.9 * ASSUMED.per_node_day < quiet_week < ASSUMED.per_node_day
    long_life = own_rate_per_node_day(History(node_days=100_000, failures=100), ASSUMED)
    assert long_life == pytest.approx(1e-3, rel=0.02)


def test_no_nodes_have_no_forecast() -> None:
    with pytest.raises(ValueError, match="0 nodes"):
        make_forecast(0, History())


def test_history_counts_running_time_lost_nodes_and_the_time_of_restarts() -> None:
    steady = JobTimeline(
        2,
        (
            (0.0, State.QUEUED),
            (100.0, State.RUNNING),
            (100.0 + DAY_S, State.STOPPING),
            (101.0 + DAY_S, State.SUCCEEDED),
        ),
        lost_a_node=False,
    )
    restarted = JobTimeline(
        4,
        (
            (0.0, State.RUNNING),
            (DAY_S, State.STOPPING),
            (DAY_S + 5, State.BACKOFF),
            (DAY_S + 60, State.RUNNING),
            (2 * DAY_S + 60, State.STOPPING),
            (2 * DAY_S + 70, State.FAILED),
        ),
        lost_a_node=True,
    )
    live = JobTimeline(1, ((0.0, State.RUNNING),), lost_a_node=False)
    refused = JobTimeline(1, ((0.0, State.CHECKING), (1.0, State.STOPPING), (2.0, State.FAILED)), lost_a_node=False)
    history = sum_up([steady, restarted, live, refused], now_s=3 * DAY_S)
    assert history.node_days == pytest.approx(2 + 8 + 3)
    assert history.failures == 2
    assert history.restarts_s == (60.0,)
