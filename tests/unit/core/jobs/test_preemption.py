"""Which running jobs are stopped for one of a higher priority: over the pure scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.core.jobs.endings import Preempted
from ascendrun.core.jobs.fair_share import Account, FairShare, SharePolicy, Usage
from ascendrun.core.jobs.inputs import NodesFree, WaitingForNodes
from ascendrun.core.jobs.job import State
from ascendrun.core.jobs.reasons import because
from ascendrun.core.jobs.schedule import Claim, Contender, Decision, schedule
from tests.unit.core.jobs.test_schedule import NOW_S, hosts_of, job, running, whole

ANN, BOB = Account("ann"), Account("bob")
AFTER_S = 600.0


def decide(*contenders: Contender, share: FairShare | None = None) -> Mapping[str, Decision]:
    return schedule(contenders, {one.job.id: one.job for one in contenders}.get, now_s=NOW_S, share=share)


def victims(decisions: Mapping[str, Decision]) -> set[str]:
    return {name for name, one in decisions.items() if isinstance(one, Preempted)}


def low(number: int, *hosts: str, ran_s: float = AFTER_S, priority: int = 0, **terms: Any) -> Contender:
    terms = {"preemptible_after_s": AFTER_S, "started_s": NOW_S - ran_s, **terms}
    return whole(running(number, *hosts, priority=priority), **terms)


def high(number: int, *pool: str, nodes: int | None = None, priority: int = 5, **terms: Any) -> Contender:
    return whole(job(number, *pool, nodes=nodes, priority=priority), **terms)


def stopping(one: Contender) -> Contender:
    return replace(one, job=replace(one.job, state=State.STOPPING))


def test_a_job_takes_the_hosts_of_one_of_a_lower_priority_and_both_have_the_reason() -> None:
    decisions = decide(low(1, "a", "b"), high(2, "a"))
    assert decisions["j-0001"] == Preempted(because("preempted-by", ["a"], job="j-0002", name="job2"))
    assert decisions["j-0002"] == WaitingForNodes(because("preempts", ["a"], job="j-0001", name="job1"))


def test_a_job_keeps_its_hosts_that_does_not_allow_it_or_is_as_high_or_has_just_started() -> None:
    assert not victims(decide(whole(running(1, "a")), high(2, "a")))
    assert not victims(decide(low(1, "a", priority=5), high(2, "a")))
    assert not victims(decide(low(1, "a", ran_s=AFTER_S - 1), high(2, "a")))
    assert not victims(decide(low(1, "a"), whole(running(3, "b")), high(2, "a", "b"))), "it would be in vain"


def test_what_becomes_free_is_kept_for_the_job_and_no_other_job_is_stopped() -> None:
    ending, other = stopping(low(1, "a")), low(3, "b")
    decisions = decide(ending, other, high(2, "a", "b", nodes=1), high(4, "a", priority=1, limit_s=1.0))
    assert victims(decisions) == set()
    assert isinstance(decisions["j-0004"], WaitingForNodes)
    back = whole(job(1, "a"), preemptible_after_s=AFTER_S)
    after = decide(other, high(2, "a", "b", nodes=1), back)
    assert hosts_of(after["j-0002"]) == ("a",) and not victims(after)


def test_the_lowest_priority_goes_first_then_the_latest_start() -> None:
    line = (low(1, "a", priority=1), low(3, "b", ran_s=2 * AFTER_S), low(4, "c"))
    assert victims(decide(*line, high(2, "a", "b", "c", nodes=1))) == {"j-0004"}
    assert victims(decide(*line, high(2, "a", "b", "c", nodes=2))) == {"j-0003", "j-0004"}


def test_only_the_first_in_line_takes_hosts() -> None:
    line = (low(1, "a"), whole(running(5, "b")), high(2, "a", "b", priority=9), high(3, "a"))
    assert not victims(decide(*line)), "j-0002 could get what j-0003 frees"


def test_another_account_loses_hosts_only_if_it_has_used_more_of_its_share() -> None:
    def share(ann: float, bob: float) -> FairShare:
        usage = Usage()
        usage.add(ANN, ann, NOW_S)
        usage.add(BOB, bob, NOW_S)
        return FairShare(SharePolicy(), usage)

    line = (low(1, "a", account=BOB), high(2, "a", account=ANN))
    assert victims(decide(*line, share=share(10.0, 20.0))) == {"j-0001"}
    assert not victims(decide(*line, share=share(20.0, 10.0)))
    own = (low(1, "a", account=ANN), high(2, "a", account=ANN))
    assert victims(decide(*own, share=share(20.0, 10.0))) == {"j-0001"}


HOSTS = ("a", "b", "c")


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Contender], Contender]:
    """Draw running jobs that fit on hosts with 4 slots each, and a queued one."""
    left, runs = dict.fromkeys(HOSTS, 4), list[Contender]()
    for number in range(1, draw(st.integers(1, 6)) + 1):
        hosts = sorted(draw(st.sets(st.sampled_from(HOSTS), min_size=1)))
        count = draw(st.integers(1, 4))
        if any(left[host] < count for host in hosts):
            continue
        left.update({host: left[host] - count for host in hosts})
        claims = {host: Claim(host, count, capacity=4) for host in hosts}
        after_s = draw(st.sampled_from([None, 0.0, AFTER_S, 2 * AFTER_S]))
        made = running(number, *hosts, priority=draw(st.integers(0, 6)))
        runs.append(Contender(made, claims, started_s=NOW_S - AFTER_S, preemptible_after_s=after_s))
    wanted = job(99, *HOSTS, nodes=draw(st.integers(1, 3)), priority=4)
    count = draw(st.integers(1, 4))
    return runs, Contender(wanted, {host: Claim(host, count, capacity=4) for host in HOSTS})


@settings(max_examples=200)
@given(worlds())
def test_victims_may_be_stopped_suffice_and_none_of_them_is_needless(world: tuple[list[Contender], Contender]) -> None:
    runs, wanted = world

    def starts_without(gone: Sequence[str] | set[str]) -> bool:
        stay = [one for one in runs if one.job.id not in gone]
        return isinstance(decide(*stay, wanted)[wanted.job.id], NodesFree)

    chosen = victims(decide(*runs, wanted))
    allowed = {one.job.id for one in runs if one.job.priority < 4 and one.preemptible_after_s in (0.0, AFTER_S)}
    assert chosen <= allowed
    assert bool(chosen) == (starts_without(allowed) and not starts_without(()))
    assert not chosen or starts_without(chosen)
    assert not any(starts_without(chosen - {name}) for name in chosen)
    again = [stopping(one) if one.job.id in chosen else one for one in runs]
    assert not victims(decide(*again, wanted)), "one decision is enough"
