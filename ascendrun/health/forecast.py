"""Cost of failures on N nodes: time between failures, checkpoint interval, effective training time.

Pure arithmetic. The model is Daly's (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", 2006): failures occur at a constant rate at any time, also while saving and restarting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median_high

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobs.job import State
from ascendrun.text import Text

SECONDS_A_DAY = 86400.0


@dataclass(frozen=True)
class Rate:
    """Failures that stop a job, per node and day, and the source of the number."""

    per_node_day: float
    source: str


PUBLISHED: tuple[Rate, ...] = (
    Rate(6.50e-3, "Meta RSC-1, 16k A100, 11 months (arXiv 2410.21680)"),
    Rate(3.79e-3, "Llama 3, 2048 nodes of 8 H100, 54 days (arXiv 2407.21783)"),
    Rate(2.34e-3, "Meta RSC-2, 8k A100, 11 months (arXiv 2410.21680)"),
)
ASSUMED = PUBLISHED[0]
"""The highest of the published rates. No verifiable rate of an Ascend cluster is published."""

ASSUMED_RESTART_S = 190.0
"""From the exit of a rank to the next step: 10 s to detect and stop, 60 s to start, 2 min to load."""
ASSUMED_SAVE_S = 60.0
"""Duration of the training pause for a checkpoint; programs that save in the background need less."""


@dataclass(frozen=True)
class History:
    """Failures in this cluster. `node_days`: of running jobs. `failures`: how often a job lost a node; failures of
    programs do not count, since they do not scale with nodes. `restarts_s`: from a loss until the job runs again."""

    node_days: float = 0.0
    failures: int = 0
    restarts_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Forecast:
    """A forecast. `between_failures_s`: mean time between failures that stop the job. `save_every_s`: the checkpoint
    interval with the least loss. `effective_share`: effective training time ratio (0 to 1) with that
    interval; `hourly_share`: the same with a checkpoint every hour. `rate_source`: source of the assumed rate;
    `has_own_history`: whether this cluster's history is long enough to change the rate."""

    nodes: int
    rate_per_node_day: float
    rate_source: str
    has_own_history: bool
    own_failures: int
    own_node_days: float
    restart_s: float
    save_s: float
    between_failures_s: float
    save_every_s: float
    effective_share: float
    hourly_share: float


def make_forecast(
    nodes: int,
    history: History,
    *,
    assumed: Rate = ASSUMED,
    restart_s: float | None = None,
    save_s: float = ASSUMED_SAVE_S,
) -> Forecast:
    """Return the forecast for a job on `nodes` nodes. `restart_s` None: from the history, else ASSUMED_RESTART_S.

    Raises ValueError without nodes, or if saving takes no time (then saving always would be optimal).
    """
    if nodes < 1 or save_s <= 0:
        raise ValueError(f"no forecast for {nodes} nodes that save in {save_s:g} s")
    rate_per_node_day = own_rate_per_node_day(history, assumed)
    if restart_s is None:
        restart_s = (median_high(history.restarts_s) if history.restarts_s else 0.0) or ASSUMED_RESTART_S
    between_s = SECONDS_A_DAY / (nodes * rate_per_node_day)
    every_s = best_interval_s(between_s, save_s)
    effective, hourly = (
        effective_share(interval_s, between_s, save_s=save_s, restart_s=restart_s) for interval_s in (every_s, 3600.0)
    )
    has_own_history = history.node_days >= 1 or history.failures > 0
    own = (has_own_history, history.failures, history.node_days)
    found = (restart_s, save_s, between_s, every_s, effective, hourly)
    return Forecast(nodes, rate_per_node_day, assumed.source, *own, *found)


def own_rate_per_node_day(history: History, assumed: Rate) -> float:
    """Return the assumed rate, updated by the history: the assumption counts as one failure in its mean time.

    So ten days of two nodes without failures change little, and a year of a cluster almost replaces the assumption.
    (The mean of a gamma prior of shape 1 after Poisson counts.)
    """
    return (1 + history.failures) / (1 / assumed.per_node_day + history.node_days)


def young_interval_s(between_failures_s: float, save_s: float) -> float:
    """Return Young's estimate of the best time between two checkpoints: sqrt(2 M w)."""
    return math.sqrt(2 * between_failures_s * save_s)


def best_interval_s(between_failures_s: float, save_s: float) -> float:
    """Return Daly's estimate of the best working time between two checkpoints; M if saving takes longer than
    2 M, since then no interval is good."""
    if save_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = save_s / (2 * between_failures_s)
    young_s = young_interval_s(between_failures_s, save_s)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def effective_share(interval_s: float, between_failures_s: float, *, save_s: float, restart_s: float) -> float:
    """Return the fraction of time that is training which is not repeated: 0 to 1.

    With M between failures, an interval t of work followed by a save w takes M e^(R/M) (e^((t+w)/M) - 1) on average.
    """
    mean_s = between_failures_s
    if (interval_s + save_s + restart_s) / mean_s > 700:
        return 0.0  # below any float: the job never reaches its next checkpoint
    return interval_s / (mean_s * math.exp(restart_s / mean_s) * math.expm1((interval_s + save_s) / mean_s))


@dataclass(frozen=True)
class JobTimeline:
    """A job. `transitions`: (UTC seconds, new state) in order. `lost_a_node`: a lost node ended its last attempt."""

    nodes: int
    transitions: tuple[tuple[float, State], ...]
    lost_a_node: bool


def sum_up(jobs: Iterable[JobTimeline], *, now_s: float) -> History:
    """Return node-days, lost nodes and restart times of past jobs.

    Time counts while a job was RUNNING. An interrupted run that was retried counts as a failure, as does a job that
    ended because of a lost node.
    """
    node_s, failures = 0.0, 0
    restarts_s: list[float] = []
    for job in jobs:
        running_since_s: float | None = None
        interrupted_at_s: float | None = None
        for at_s, state in job.transitions:
            if state is State.RUNNING:
                running_since_s = at_s
                if interrupted_at_s is not None:
                    failures += 1
                    restarts_s.append(max(0.0, at_s - interrupted_at_s))
                    interrupted_at_s = None
            elif running_since_s is not None:
                node_s += job.nodes * max(0.0, at_s - running_since_s)
                running_since_s, interrupted_at_s = None, at_s
        if running_since_s is not None:
            node_s += job.nodes * max(0.0, now_s - running_since_s)
        failures += int(job.lost_a_node)
    return History(node_days=node_s / SECONDS_A_DAY, failures=failures, restarts_s=tuple(restarts_s))


def forecast_message(forecast: Forecast) -> Text:
    """Return the forecast in one line."""
    return Text(
        "forecast.message",
        "Forecast for {nodes:plural node nodes}: one failure every {between:duration}. Save every {every:duration}: "
        "{effective:.1%} effective training time (hourly: {hourly:.1%})",
        nodes=forecast.nodes,
        between=forecast.between_failures_s,
        every=forecast.save_every_s,
        effective=_rounded_down(forecast.effective_share),
        hourly=_rounded_down(forecast.hourly_share),
    )


def forecast_assumptions(forecast: Forecast) -> Text:
    """Return the assumptions of the forecast and their source."""
    values = {
        "source": forecast.rate_source,
        "rate": forecast.rate_per_node_day,
        "restart": forecast.restart_s,
        "save": forecast.save_s,
    }
    if forecast.has_own_history:
        return Text(
            "forecast.own-history",
            "{failures:plural lost node lost nodes} in {days:.1f} node-days here, weighted with {source}: {rate:.2g} "
            "failures per node and day; restart {restart:duration}, save {save:duration}",
            **values,
            failures=forecast.own_failures,
            days=forecast.own_node_days,
        )
    return Text(
        "forecast.assumed",
        "assumed: {rate:.2g} failures per node and day ({source}); restart {restart:duration}, save {save:duration}",
        **values,
    )


def _rounded_down(fraction: float) -> float:
    """Round down to 0.1%, since no job reaches 100%."""
    return int(fraction * 1000) / 1000
