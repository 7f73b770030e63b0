"""Stragglers: ranks or nodes that are slower than the others over several windows of steps.

In synchronous training the steps of all ranks take equally long; the slow rank waits least. So ranks
are compared by their own time (step_s - comm_s). If programs do not report that, by the end of the same step: the last
rank is slow. Ranks that do not wait for each other are compared by step time; and all ranks by the wait for data.
Where programs report no time of their collectives, the use of the devices is compared too (load.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from statistics import median
from typing import Callable, Optional

from ascendrun.core.dataclass import dataclass
from ascendrun.core.samples import Newest
from ascendrun.health.samples.step_times import StepTimes
from ascendrun.health.stragglers import causes
from ascendrun.health.stragglers.load import Busy, busier_ranks
from ascendrun.text import Text

WINDOW = 8
"""Reported steps per window; a rank needs half of them. Pauses do not change a median:
an evaluation, a checkpoint, a garbage collection."""
WIDE_WINDOW = 32
"""Steps per window if step times vary widely: small differences are visible only in long windows."""
WINDOWS = 3
"""Number of consecutive windows, including the newest, that must agree."""
LOOKED_AT = 60
SLOWER = 0.10
"""Fraction of the others' own time. Devices of one type differ by 2 to 3%."""
COSTS = 0.05
"""Fraction of the step: a slower rank that costs less than this is not reported."""
STANDARD_ERRORS = 4.0
LATE_S = 0.05
"""The last rank of a step must be later than this, and than the uncertainty of clocks."""
STARTED_S = 300.0
"""Minimum age in seconds up to which metrics are read."""
USES_S = 600.0
"""Age in seconds up to which the use of devices is compared."""
NOW_AND_THEN, SELDOM, APART, FEW = 5, 0.25, 0.25, 4
"""Least number and largest fraction of steps in which one rank alone is slow, by which fraction of a step; and ranks
among which random pauses are no pattern."""
MOST_STEPS = 480


@dataclass(frozen=True)
class Straggler:
    """A slow rank, or with `rank` None a node on which most ranks are slow (`ranks`: these).

    `slower_by`: its time relative to the others', above 1; None: only device metrics show it. `step_fraction`: the
    fraction of each step that the job loses, None: unknown. `since_s`: start as far as known, by the head node's clock.
    `cause`: the likely cause, None: no measured metric explains it. `every`: only one in that many steps is slow.
    """

    rank: int | None
    host: str
    ranks: tuple[int, ...]
    since_s: float | None
    slower_by: float | None
    step_fraction: float | None
    cause: causes.StragglerCause | None
    evidence: tuple[causes.Mark, ...]
    every: int | None = None


@dataclass(frozen=True)
class _Slow:
    since_s: float | None
    excess_s: float
    step_s: float
    slower_by: float
    every: int | None = None


@dataclass(frozen=True)
class _Window:
    """Consecutive steps: each rank's median, its uncertainty, and the duration of a complete step."""

    values: Mapping[int, float]
    errors: Mapping[int, float]
    begins: Mapping[int, float]
    step_s: float

    @property
    def others_s(self) -> float:
        return _others(self.values.values())

    def excess_s(self, rank: int) -> float:
        return self.values[rank] - self.others_s


Value = Callable[[StepTimes], Optional[float]]
Steps = Mapping[int, Sequence[StepTimes]]


def find_stragglers(
    steps: Steps, samples: Newest, *, hosts_of_ranks: Mapping[int, str], now_s: float
) -> tuple[Straggler, ...]:
    """Return the stragglers of one attempt, the slowest first; (): none, or too few reports.

    `steps`: of each rank, oldest first. `samples`: of the job's hosts, any number per device, in order of time.
    """
    known = {rank: found for rank, found in steps.items() if rank in hosts_of_ranks and found}
    compared, by_time = _slow_by_time(known)
    places = causes.Places.of(samples, hosts_of_ranks)
    busy: Mapping[int, Busy] = {} if compared else busier_ranks(samples, places, since_s=now_s - USES_S)
    by_use = {rank: _Slow(one.since_s, one.idle, 1.0, one.slower_by) for rank, one in busy.items()}
    waiting = _slow_ranks(known, lambda one: one.data_s, of_step=True)[1]
    slow = {**_slow_now_and_then(known), **by_use, **waiting, **by_time}
    stragglers = []
    for host, rank, ranks in _by_host(slow, hosts_of_ranks):
        mine = [slow[one] for one in ranks]
        begins = [one.since_s for one in mine if one.since_s is not None]
        excess_s, step_s = median(one.excess_s for one in mine), median(one.step_s for one in mine)
        figures_s = min([now_s - STARTED_S, *begins])
        marks = causes.find_marks(host, ranks, samples, places, lame=set(slow), since_s=figures_s)
        waits = None if mine[0] in by_use.values() else _waits_for_data(ranks, known, excess_s)
        marks = (*([waits] if waits else []), *(busy[one].mark for one in ranks[:1] if one in busy), *marks)
        slower_by, fraction = round(median(one.slower_by for one in mine), 4), round(min(1.0, excess_s / step_s), 4)
        since_s, cause = min(begins, default=None), causes.likely_cause(marks)
        stragglers.append(Straggler(rank, host, ranks, since_s, slower_by, fraction, cause, marks, mine[0].every))
    more = causes.slow_by_metrics(samples, places, without=set(slow), compared=compared, since_s=now_s - STARTED_S)
    stragglers += [Straggler(rank, host, (rank,), None, None, None, mark.cause, (mark,)) for host, rank, mark in more]
    if not slow and not compared:
        stragglers += _crowded_hosts(samples, hosts_of_ranks, since_s=now_s - STARTED_S)
    return tuple(sorted(stragglers, key=lambda one: (-(one.slower_by or 0.0), one.host, one.ranks)))


def _slow_by_time(steps: Steps) -> tuple[set[int], Mapping[int, _Slow]]:
    """Compare ranks by the first of the three methods for which they report enough. Steps that end together and take
    equally long compare nobody: the ranks wait for each other."""
    compared, slow = _slow_ranks(steps, lambda one: one.own_s)
    if compared:
        return compared, slow
    compared, slow = _slow_ranks(_from_the_end(steps), lambda one: one.step_s)
    if not slow:
        compared, slow = _slow_ranks(_lateness(steps), lambda one: one.own_s, of_step=True)
    return (compared, slow) if slow else (set(), {})


def _slow_now_and_then(steps: Steps) -> Mapping[int, _Slow]:
    """Return ranks that alone are slow in some of their steps, from the oldest third of the steps to the newest: the
    median does not show it. Rank 0 is left out, since it saves, logs and evaluates for all."""
    by_step: dict[int, dict[int, StepTimes]] = defaultdict(dict)
    for rank, found in steps.items():
        for one in found[-MOST_STEPS:]:
            if one.own_s is not None and one.step_s:
                by_step[one.step][rank] = one
    whole = [by_step[step] for step in sorted(by_step) if len(by_step[step]) > max(1, len(steps) / 2)]
    if len(whole) < 2 * WIDE_WINDOW or len(steps) < FEW:
        return {}
    step_s = median(one.step_s or 0.0 for ranks in whole for one in ranks.values())
    alone: dict[int, dict[int, float]] = defaultdict(dict)
    for number, ranks in enumerate(whole):
        (second_s, _), (first_s, rank) = sorted((one.own_s or 0.0, rank) for rank, one in ranks.items())[-2:]
        if first_s - second_s >= APART * step_s:
            alone[rank][number] = first_s - second_s
    alone.pop(0, None)
    counts = sorted(map(len, alone.values()))
    slow = {}
    for rank, excess in alone.items():
        lost_s, all_s = sum(excess.values()), sum(next(iter(ranks.values())).step_s or 0.0 for ranks in whole)
        least, most = max(NOW_AND_THEN, 3 * (counts[-2] if len(counts) > 1 else 0)), SELDOM * len(whole)
        thirds = {3 * number // len(whole) for number in excess}
        if least <= len(excess) <= most and len(thirds) == 3 and lost_s >= COSTS * all_s:
            every = round(len(whole) / len(excess))
            slow[rank] = _Slow(
                whole[min(excess)][rank].at_s,
                lost_s / len(whole),
                all_s / len(whole),
                1 + lost_s / (all_s - lost_s),
                every,
            )
    return slow


def _crowded_hosts(samples: Newest, hosts_of_ranks: Mapping[int, str], *, since_s: float) -> list[Straggler]:
    """Return the hosts without free cores, unlike the others: their ranks are probably slow."""
    hosts = {host: tuple(rank for rank, at in hosts_of_ranks.items() if at == host) for host in hosts_of_ranks.values()}
    return [
        Straggler(None, host, ranks, None, None, None, marks[0].cause, tuple(marks))
        for host, ranks in hosts.items()
        if len(hosts) > 1 and (marks := causes.host_marks(host, samples, hosts, since_s=since_s))
    ]


def _from_the_end(steps: Steps) -> Steps:
    """Number each rank's steps from its newest step: ranks that do not wait for each other diverge."""
    most = max((len(found) for found in steps.values()), default=0)
    return {
        rank: tuple(replace(one, step=number) for number, one in enumerate(found, most - len(found)))
        for rank, found in steps.items()
    }


def _lateness(steps: Steps) -> Steps:
    """Replace `own_s` by how much later than the others a rank completed the step."""
    ends: dict[int, list[float]] = defaultdict(list)
    for found in steps.values():
        for one in found:
            if one.at_s is not None and one.error_s is not None:
                ends[one.step].append(one.at_s)
    first = {step: _others(times) for step, times in ends.items() if len(times) > len(steps) / 2}
    return {
        rank: tuple(
            StepTimes(one.step, one.at_s, one.step_s, max(0.0, one.at_s - first[one.step] - max(LATE_S, one.error_s)))
            for one in found
            if one.step in first and one.at_s is not None and one.error_s is not None
        )
        for rank, found in steps.items()
    }


def _slow_ranks(steps: Steps, value: Value, *, of_step: bool = False) -> tuple[set[int], Mapping[int, _Slow]]:
    """Return (compared ranks, slow ranks). `of_step`: the excess is relative to the complete step."""
    compared, slow = _slow_over(_windows(steps, value, WINDOW), of_step=of_step)
    wide = _slow_over(_windows(steps, value, WIDE_WINDOW), of_step=of_step)[1]
    return compared, {**wide, **slow}


def _slow_over(windows: Sequence[_Window], *, of_step: bool) -> tuple[set[int], Mapping[int, _Slow]]:
    compared = set(windows[-1].values) if len(windows) >= WINDOWS else set()
    slow: dict[int, _Slow] = {}
    verdicts = [_slow_in(window, of_step=of_step) for window in windows]
    for rank in compared:
        streak = 0
        while streak < len(verdicts) and rank in verdicts[-1 - streak]:
            streak += 1
        if streak >= WINDOWS:
            last = windows[-WINDOWS:]
            excess_s = median(window.excess_s(rank) for window in last)
            step_s = median(window.step_s for window in last)
            base_s = step_s if of_step else median(window.others_s for window in last)
            slow[rank] = _Slow(windows[-streak].begins.get(rank), excess_s, step_s, 1.0 + excess_s / base_s)
    return compared, slow


def _slow_in(window: _Window, *, of_step: bool) -> set[int]:
    """Return the slow ranks of one window; () if they are more than half: then they only have more work."""
    others_s, usual_error = window.others_s, median(window.errors.values())
    least_s = max(COSTS * window.step_s, SLOWER * (window.step_s if of_step else others_s))
    slow = {
        rank
        for rank, value in window.values.items()
        if value - others_s >= least_s and value - others_s > STANDARD_ERRORS * max(usual_error, window.errors[rank])
    }
    return slow if 2 * len(slow) <= len(window.values) else set()


def _others(values: Iterable[float]) -> float:
    """Return the median of the faster half: if one of two nodes is slow, half of the ranks are slow."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


def _windows(steps: Steps, value: Value, size: int) -> list[_Window]:
    """Return windows that most ranks reported, oldest first, with equal steps on every rank."""
    reported = {
        rank: [(one, number) for one in found for number in (value(one),) if number is not None]
        for rank, found in steps.items()
    }
    numbers = sorted({one.step for found in reported.values() for one, _ in found})
    gaps = [later - earlier for earlier, later in zip(numbers, numbers[1:])]
    span = size * int(median(gaps)) if gaps else 0
    if not span:
        return []
    chunks: dict[int, dict[int, list[tuple[StepTimes, float]]]] = defaultdict(lambda: defaultdict(list))
    oldest = numbers[-1] // span - LOOKED_AT
    for rank, found in reported.items():
        for one, number in found:
            if one.step // span >= oldest:
                chunks[one.step // span][rank].append((one, number))
    made = (_make_window(chunks[index], size) for index in sorted(chunks))
    return [window for window in made if window is not None and len(window.values) >= max(2, len(steps) / 2)]


def _make_window(chunk: Mapping[int, Sequence[tuple[StepTimes, float]]], size: int) -> _Window | None:
    enough = {rank: found for rank, found in chunk.items() if 2 * len(found) >= size}
    whole = [one.step_s for found in enough.values() for one, _ in found if one.step_s]
    if not whole:
        return None
    values, errors, begins = {}, {}, {}
    for rank, found in enough.items():
        numbers = [number for _, number in found]
        values[rank] = median(numbers)
        spread = 1.4826 * median(abs(number - values[rank]) for number in numbers)
        errors[rank] = 1.2533 * spread / sqrt(len(numbers))
        times = [one.at_s - (one.step_s or 0.0) for one, _ in found if one.at_s is not None]
        if times:
            begins[rank] = times[0]
    return _Window(values, errors, begins, median(whole))


def _by_host(
    slow: Mapping[int, _Slow], hosts_of_ranks: Mapping[int, str]
) -> list[tuple[str, int | None, tuple[int, ...]]]:
    """Return (host, rank, ranks): a host with at least 3/4 slow ranks is one entry, with `rank` None."""
    here: dict[str, list[int]] = defaultdict(list)
    for rank, host in sorted(hosts_of_ranks.items()):
        here[host].append(rank)
    found: list[tuple[str, int | None, tuple[int, ...]]] = []
    for host, ranks in here.items():
        lame = tuple(rank for rank in ranks if rank in slow)
        if len(ranks) > 1 and len(here) > 1 and 4 * len(lame) >= 3 * len(ranks):
            found.append((host, None, lame))
        else:
            found += [(host, rank, (rank,)) for rank in lame]
    return found


def _waits_for_data(ranks: Sequence[int], steps: Steps, excess_s: float) -> causes.Mark | None:
    """Return the wait for data if it is at least half of the excess."""
    reported = {
        rank: [one.data_s for one in found[-WINDOW * WINDOWS :] if one.data_s is not None]
        for rank, found in steps.items()
    }
    waits = {rank: median(found) for rank, found in reported.items() if found}
    here = [waits[rank] for rank in ranks if rank in waits]
    others = [wait for rank, wait in waits.items() if rank not in ranks]
    if not here or not others or median(here) - _others(others) < excess_s / 2:
        return None
    seconds, usual_s = round(median(here), 4), round(_others(others), 4)
    text = Text("straggler.data-wait", "{here:.3g} s per step (others {others:.3g} s)", here=seconds, others=usual_s)
    return causes.Mark(causes.StragglerCause.DATA, text)


# ---------------------------------------------------------------- messages

_CAUSES: Mapping[causes.StragglerCause, Text] = {
    causes.StragglerCause.FREQUENCY: Text("straggler.frequency", "low device clock"),
    causes.StragglerCause.TEMPERATURE: Text("straggler.temperature", "high device temperature"),
    causes.StragglerCause.LINK: Text("straggler.link", "network link"),
    causes.StragglerCause.DATA: Text("straggler.data", "waiting for data"),
    causes.StragglerCause.CPU: Text("straggler.cpu", "not enough CPU or memory on the host"),
    causes.StragglerCause.SHARED: Text("straggler.shared", "another process uses the device"),
    causes.StragglerCause.HEALTH: Text("straggler.health", "device health"),
    causes.StragglerCause.WORK: Text(
        "straggler.work", "more work than the other ranks, or a slower device: samples do not distinguish them"
    ),
}


def describe_slowness(straggler: Straggler) -> Text:
    """Return how much slower it is; it follows the name of the ranks or hosts."""
    if straggler.slower_by is None:
        return Text("straggler.metrics-only", "with unusual device metrics")
    slower = straggler.slower_by - 1
    if straggler.every is not None:
        return Text(
            "straggler.now-and-then",
            "slow in one of {every} steps, which costs {step_fraction:percent} of the time",
            every=straggler.every,
            step_fraction=straggler.step_fraction,
        )
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
    marks = tuple(mark.text for mark in straggler.evidence if mark.cause is straggler.cause)
    cause = _CAUSES[straggler.cause]
    return Text("straggler.cause-and-metrics", "{cause} ({metrics})", cause=cause, metrics=marks) if marks else cause
