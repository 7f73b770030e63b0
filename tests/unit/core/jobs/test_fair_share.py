"""Fair share, quotas and backfill: over the pure scheduler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.core.jobs.fair_share import Account, FairShare, Quota, SharePolicy, Usage
from ascendrun.core.jobs.inputs import NodesFree, WaitingForNodes
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.jobs.reasons import because
from ascendrun.core.jobs.schedule import RESERVE_S, Contender, Decision, first_in_line, schedule
from tests.unit.core.jobs.test_schedule import NOW_S, hosts_of, job, running, whole

ANN, BOB = Account("ann"), Account("bob")
DAY_S = 86_400.0


def share(used: Mapping[Account, float], shares: Mapping[str, float] = {}, **quotas: Quota) -> FairShare:
    usage = Usage()
    for account, device_seconds in used.items():
        usage.add(account, device_seconds, NOW_S)
    return FairShare(SharePolicy(shares=shares, quotas=quotas), usage)


def decide(
    *contenders: Contender, given: FairShare | None = None, now_s: float = NOW_S, first: frozenset[str] = frozenset()
) -> Mapping[str, Decision]:
    return schedule(contenders, {one.job.id: one.job for one in contenders}.get, now_s=now_s, share=given, first=first)


def first_of(*line: Contender, given: FairShare | None) -> str:
    """Return the job that gets the only host."""
    return next(name for name, decision in decide(*line, given=given).items() if isinstance(decision, NodesFree))


def mine(number: int, account: Account, *pool: str, limit_s: float | None = None, **changes: Any) -> Contender:
    return whole(job(number, *(pool or ("a",)), **changes), account=account, limit_s=limit_s)


def test_a_use_is_worth_half_after_a_half_life_also_when_it_is_added_late() -> None:
    usage, late = Usage(7 * DAY_S), Usage(7 * DAY_S)
    usage.add(ANN, 100.0, 0.0)
    usage.add(ANN, 8.0, 14 * DAY_S)
    late.add(ANN, 8.0, 14 * DAY_S)
    late.add(ANN, 100.0, 0.0)
    assert usage.at(7 * DAY_S + 14 * DAY_S)[ANN] == pytest.approx(12.5 + 4.0)
    assert late.at(14 * DAY_S)[ANN] == pytest.approx(usage.at(14 * DAY_S)[ANN])
    again = Usage.from_json(json.loads(json.dumps(usage.to_json())))
    assert again.at(20 * DAY_S) == usage.at(20 * DAY_S)


def test_a_long_use_decays_while_it_lasts() -> None:
    whole_span, parts = Usage(DAY_S), Usage(DAY_S)
    whole_span.add_span(ANN, 8, 0.0, 3 * DAY_S)
    for step in range(3):
        parts.add_span(ANN, 8, step * DAY_S, (step + 1) * DAY_S)
    assert whole_span.at(3 * DAY_S)[ANN] == pytest.approx(parts.at(3 * DAY_S)[ANN])
    short = Usage(DAY_S)
    short.add_span(ANN, 8, 0.0, 1.0)
    assert short.at(1.0)[ANN] == pytest.approx(8.0, rel=1e-4)


def test_the_account_with_the_least_use_of_its_share_is_first_and_without_shares_nothing_changes() -> None:
    line = (mine(1, ANN), mine(2, BOB))
    assert first_of(*line, given=None) == "j-0001"
    assert first_of(*line, given=share({ANN: 60.0, BOB: 50.0})) == "j-0002"
    assert first_of(*line, given=share({ANN: 60.0, BOB: 50.0}, {"ann": 2})) == "j-0001"
    high = replace(line[0], job=replace(line[0].job, priority=9))
    assert first_of(high, line[1], given=share({ANN: 60.0, BOB: 50.0})) == "j-0002", "a priority is within an account"
    assert first_of(line[0], mine(3, ANN, priority=1), given=share({})) == "j-0003"


def test_a_project_with_a_share_counts_with_its_user() -> None:
    small, large = Account("ann", "small"), Account("bob", "large")
    used = {small: 50.0, large: 60.0}
    line = (mine(1, small), mine(2, large))
    assert first_of(*line, given=share(used)) == "j-0001"
    assert first_of(*line, given=share(used, {"project:large": 3})) == "j-0002"


def test_accounts_that_are_equal_take_turns() -> None:
    line = [mine(number, ANN if number < 4 else BOB, "a", "b", nodes=1) for number in (1, 2, 3, 4)]
    placed = [name for name, one in decide(*line, given=share({})).items() if isinstance(one, NodesFree)]
    assert placed == ["j-0001", "j-0004"]


def test_who_is_first_in_line_stays_so_when_the_use_of_its_account_grows() -> None:
    busy = whole(running(1, "a"), limit_s=100.0, started_s=NOW_S, account=Account("eve"))
    late = {"since_s": NOW_S - RESERVE_S, "limit_s": 50.0}
    wide, other = mine(2, ANN, "a", "b", **late), mine(3, BOB, "a", "b", limit_s=500.0)
    before = decide(busy, wide, other, given=share({ANN: 50.0, BOB: 60.0}))
    assert first_in_line(before) == {"j-0002"}
    after = decide(busy, wide, other, given=share({ANN: 70.0, BOB: 60.0}), first=first_in_line(before))
    assert list(after) == ["j-0002", "j-0003"] and first_in_line(after) == {"j-0002"}
    urgent = mine(4, ANN, "a", "b", priority=1, limit_s=50.0)
    among = decide(busy, wide, other, urgent, given=share({ANN: 70.0, BOB: 60.0}), first=first_in_line(before))
    assert list(among) == ["j-0004", "j-0003", "j-0002"], "its account keeps the place"
    new = mine(2, ANN, "a", "b", limit_s=50.0)
    after = decide(busy, new, other, given=share({ANN: 70.0, BOB: 60.0}), first=first_in_line(before))
    assert list(after) == ["j-0003", "j-0002"], "not if it has not waited for long"


def test_each_separate_part_of_the_hosts_has_its_first_in_line() -> None:
    busy = whole(running(1, "a", "b"), limit_s=100.0, started_s=NOW_S)
    line = [whole(job(number, host), limit_s=50.0) for number, host in ((2, "a"), (3, "b"), (4, "a"))]
    assert first_in_line(decide(busy, *line)) == {"j-0002", "j-0003"}


def test_a_job_above_its_quota_waits_for_that_and_stops_nobody() -> None:
    busy = replace(mine(1, ANN, "a"), job=running(1, "a"))
    late = {"since_s": NOW_S - RESERVE_S}
    line = (busy, mine(2, ANN, "b", **late), mine(3, BOB, "b"))
    decisions = decide(*line, given=share({}, ann=Quota(devices=12)))
    why = because("above-quota", name="ann", used=8, count=8, limit=12)
    assert decisions["j-0002"] == WaitingForNodes(why) and hosts_of(decisions["j-0003"]) == ("b",)
    decisions = decide(*line, given=share({ANN: 3600.0 * 20}, ann=Quota(device_hours=20.0)))
    assert decisions["j-0002"] == WaitingForNodes(because("above-hours", name="ann", used=20, limit=20.0))
    assert hosts_of(decide(*line, given=share({}, ann=Quota(16, 20.0)))["j-0002"]) == ("b",)
    of_project = {"project:llm": Quota(devices=8)}
    both = (mine(5, Account("ann", "llm"), "a"), mine(6, Account("bob", "llm"), "b"))
    second = decide(*both, given=share({}, **of_project))["j-0006"]
    assert isinstance(second, WaitingForNodes) and second.reason.values["name"] == "project:llm"


def test_a_short_job_passes_the_first_in_line_and_a_longer_one_does_not() -> None:
    busy = whole(running(1, "a"), limit_s=300.0, started_s=NOW_S - 100)
    first = whole(job(2, "a", "b"), limit_s=50.0)

    def decision(limit_s: float | None) -> Decision:
        return decide(busy, first, whole(job(3, "b"), limit_s=limit_s))["j-0003"]

    assert hosts_of(decision(200.0)) == ("b",)
    behind = because("queued-behind", ["b"], job="j-0002", name="job2")
    assert decision(201.0) == WaitingForNodes(behind, NOW_S + 250)
    assert decision(None) == WaitingForNodes(behind, NOW_S + 250)
    waits = decide(busy, first)["j-0002"]
    assert isinstance(waits, WaitingForNodes) and waits.start_s == NOW_S + 200
    overdue = replace(busy, started_s=NOW_S - 1000)
    assert isinstance(decide(overdue, first, whole(job(3, "b"), limit_s=1.0))["j-0003"], WaitingForNodes)


def test_a_job_of_any_length_uses_hosts_that_the_first_in_line_does_not_need() -> None:
    busy = whole(running(1, "a", "b"), limit_s=100.0, started_s=NOW_S)
    first = whole(job(2, "a", "b", "c", nodes=2), limit_s=50.0)
    assert hosts_of(decide(busy, first, whole(job(3, "c")))["j-0003"]) == ("c",)


# A small world in which jobs arrive, run and end; the oldest is the first in line.

HOSTS = ("a", "b", "c", "d")


@st.composite
def worlds(draw: st.DrawFn) -> list[tuple[Contender, float]]:
    """Draw jobs with how long each really runs: not longer than its limit, if it has one."""
    jobs = []
    for number in range(1, draw(st.integers(2, 8)) + 1):
        pool = sorted(draw(st.sets(st.sampled_from(HOSTS), min_size=1)))
        at_s = float(draw(st.integers(0, 10)) * 100)
        limit_s = draw(st.one_of(st.integers(1, 12).map(lambda n: n * 100.0), st.none()))
        real_s = min(limit_s or 1200.0, draw(st.integers(1, 12)) * 100.0)
        nodes = draw(st.integers(1, len(pool)))
        made = replace(job(number, *pool, nodes=nodes), created_at_s=at_s, since_s=at_s)
        jobs.append((whole(made, limit_s=limit_s), real_s))
    return jobs


def expected_s(first: Contender, used: Mapping[str, float], now_s: float) -> float:
    """Return when a job would start if no other did, by trying every time. `used`: expected end by host."""
    for at_s in sorted({now_s, *used.values()}):
        if sum(used.get(host, now_s) <= at_s for host in first.job.pool) >= first.job.request.nodes:
            return at_s
    raise AssertionError


@settings(max_examples=150)
@given(worlds())
def test_the_first_in_line_starts_no_later_than_without_backfill_and_nothing_starves(
    world: list[tuple[Contender, float]],
) -> None:
    jobs, real_s = {one.job.id: one for one, _ in world}, {one.job.id: real for one, real in world}
    ends, latest, waiting = dict[str, float](), dict[str, float](), set(jobs)
    times = {one.job.created_at_s for one in jobs.values()}
    times |= {at_s + RESERVE_S for at_s in times}
    while waiting:
        assert times, "every job starts"
        now_s = min(times)
        times.remove(now_s)
        runs = [one for one in jobs.values() if one.job.state is State.RUNNING and ends[one.job.id] > now_s]
        line = [jobs[name] for name in waiting if jobs[name].job.created_at_s <= now_s]
        used = {host: max(now_s, one.ends_s(one.started_s or 0.0)) for one in runs for host in one.job.hosts}
        if line:
            first = min(line, key=lambda one: (one.job.created_at_s, one.job.id))
            name = first.job.id
            latest[name] = min(latest.get(name, float("inf")), expected_s(first, used, now_s))
        for name, decision in decide(*runs, *line, now_s=now_s).items():
            assert isinstance(decision, NodesFree) or now_s < latest.get(name, float("inf")), f"{name} is late"
            if isinstance(decision, NodesFree):
                placed: Job = replace(jobs[name].job, state=State.RUNNING, hosts=decision.hosts)
                jobs[name] = replace(jobs[name], job=placed, started_s=now_s)
                ends[name] = now_s + real_s[name]
                times.add(ends[name])
                waiting.remove(name)
