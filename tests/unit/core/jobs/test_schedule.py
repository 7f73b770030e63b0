"""Who is placed where, and who waits for what: over the pure scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.jobs.inputs import DependencyFailed, NodesFree, SparesFree, WaitingForNodes
from ascendrun.core.jobs.job import ACTIVE_STATES, Job, NodeProgress, Request, StageFiles, State
from ascendrun.core.jobs.reasons import Reason, because, needed
from ascendrun.core.jobs.restart import PastAttempt
from ascendrun.core.jobs.schedule import RESERVE_S, Claim, Contender, Decision, schedule
from ascendrun.text import Text
from tests.lib.demo_jobs import demo_job

NOW_S = 10_000.0
WHY = Text("x", "x")


def job(number: int, *pool: str, nodes: int | None = None, state: State = State.QUEUED, **changes: Any) -> Job:
    made = demo_job(
        id=f"j-{number:04d}",
        name=f"job{number}",
        run=f"h-j-{number:04d}",
        hosts=pool[:nodes] if state in ACTIVE_STATES else (),
        created_at_s=float(number),
        since_s=NOW_S - 1.0,
        state=state,
        pool=pool,
        request=Request(len(pool) if nodes is None else nodes),
    )
    return replace(made, **changes)


def whole(one: Job, **more: Any) -> Contender:
    return Contender(one, {host: Claim(host, 8) for host in one.pool}, **more)


def part(one: Job, count: int, capacity: int = 4) -> Contender:
    return Contender(one, {host: Claim(host, count, capacity=capacity) for host in one.pool})


def ids(one: Job, *devices: int, capacity: int | None = None) -> Contender:
    return Contender(one, {host: Claim(host, len(devices), capacity, devices) for host in one.pool})


def running(number: int, *pool: str, **changes: Any) -> Job:
    return job(number, *pool, state=State.RUNNING, **changes)


def decide(*contenders: Contender, known: Mapping[str, Job] | None = None) -> Mapping[str, Decision]:
    every = {one.job.id: one.job for one in contenders}
    return schedule(contenders, {**every, **(known or {})}.get, now_s=NOW_S)


def hosts_of(decision: Decision) -> tuple[str, ...]:
    assert isinstance(decision, NodesFree), decision
    return decision.hosts


def why(decision: Decision) -> Text:
    assert isinstance(decision, (WaitingForNodes, DependencyFailed)), decision
    return decision.reason


def test_a_job_waits_for_the_node_that_another_holds_and_says_whose() -> None:
    decision = decide(whole(running(1, "a", "b")), whole(job(2, "b", "c")))
    assert decision == {"j-0002": WaitingForNodes(because("nodes-in-use", ["b"], job="j-0001", name="job1"))}


def test_a_job_takes_the_free_hosts_of_its_pool_in_the_order_of_the_file() -> None:
    assert hosts_of(decide(whole(running(1, "b")), whole(job(2, "a", "b", "c", "d", nodes=2)))["j-0002"]) == ("a", "c")


def test_younger_jobs_pass_one_that_waits_until_it_has_waited_long() -> None:
    def decisions(since_s: float) -> Mapping[str, Decision]:
        return decide(whole(running(1, "a")), whole(job(2, "a", "b", since_s=since_s)), whole(job(3, "b")))

    assert hosts_of(decisions(NOW_S - RESERVE_S + 1)["j-0003"]) == ("b",)
    behind = decisions(NOW_S - RESERVE_S)["j-0003"]
    assert behind == WaitingForNodes(because("queued-behind", ["b"], job="j-0002", name="job2"))


def test_a_higher_priority_is_placed_first_and_then_the_oldest() -> None:
    decisions = decide(whole(job(1, "a")), whole(job(2, "a", priority=5)), whole(job(3, "a", priority=5)))
    assert hosts_of(decisions["j-0002"]) == ("a",)
    assert [why(decisions[name]).values["job"] for name in ("j-0001", "j-0003")] == ["j-0002", "j-0002"]


def test_slots_are_shared_until_they_are_full() -> None:
    busy = [part(running(1, "a"), 2), part(running(2, "a"), 1)]
    assert hosts_of(decide(*busy, part(job(3, "a"), 1))["j-0003"]) == ("a",)
    assert isinstance(decide(*busy, part(job(3, "a"), 2))["j-0003"], WaitingForNodes)


def test_named_devices_clash_only_when_they_overlap() -> None:
    busy = ids(running(1, "a"), 0, 1)
    assert hosts_of(decide(busy, ids(job(2, "a"), 2, 3))["j-0002"]) == ("a",)
    assert isinstance(decide(busy, ids(job(2, "a"), 1, 2))["j-0002"], WaitingForNodes)
    assert isinstance(decide(busy, whole(job(2, "a")))["j-0002"], WaitingForNodes)


def test_two_names_of_one_machine_share_its_claims() -> None:
    busy = whole(running(1, "a"), places={"a": "key"})
    assert isinstance(decide(busy, whole(job(2, "npu-a"), places={"npu-a": "key"}))["j-0002"], WaitingForNodes)


def test_a_host_that_cannot_be_used_stops_only_the_job_that_needs_it_and_reserves_nothing() -> None:
    barred = {"unusable": {"a": WHY}}
    old = NOW_S - 10 * RESERVE_S
    decisions = decide(whole(job(1, "a", "b", since_s=old), **barred), whole(job(2, "a", "b", nodes=1), **barred))
    reason = why(decisions["j-0001"])
    assert (reason.code, reason.hosts) == ("too-few-hosts", ("a",))
    assert (reason.values["needed"], reason.values["usable"], reason.why) == (2, 1, WHY)
    assert hosts_of(decisions["j-0002"]) == ("b",)


def test_each_host_that_cannot_be_used_has_its_own_reason() -> None:
    excluded, unidentified = because("host-excluded"), because("host-unidentified")
    barred = {"a": excluded, "b": unidentified, "c": excluded}
    reason = why(decide(whole(job(1, "a", "b", "c"), unusable=barred))["j-0001"])
    assert isinstance(reason, Reason) and reason.hosts == ("a", "b", "c")
    assert reason.why == because(
        "host-and-others", ["a", "c"], why=excluded, others=because("host-why", ["b"], why=unidentified)
    )


def test_a_host_that_does_not_respond_is_used_only_at_the_first_start_and_without_others() -> None:
    away = {"away": {"a": WHY}}
    assert hosts_of(decide(whole(job(1, "a", "b", "c", nodes=2), **away))["j-0001"]) == ("b", "c")
    busy = decide(whole(running(2, "c")), whole(job(1, "a", "b", "c", nodes=2), **away))
    assert why(busy["j-0001"]).hosts == ("c",), "it waits for the one that responds"
    new = job(1, "a", "b", created_at_s=NOW_S - 5.0)
    assert hosts_of(decide(whole(new, **away))["j-0001"]) == ("b", "a"), "it fails there with the error"
    assert why(decide(whole(job(1, "a", "b"), **away))["j-0001"]).code == "too-few-hosts", "nobody waits for its start"
    again = job(1, "a", "b", past=(PastAttempt(1, ("a", "b"), 1.0, 2.0),))
    assert why(decide(whole(again, **away))["j-0001"]).code == "too-few-hosts"


def test_a_restart_keeps_its_hosts_at_their_node_ranks_and_a_replacement_takes_the_rank_of_the_lost_one() -> None:
    past = (PastAttempt(1, ("c", "a", "b"), 1.0, 2.0),)
    one = job(1, "a", "b", "c", "d", "e", nodes=3, past=past, attempt=2)
    assert hosts_of(decide(whole(one))["j-0001"]) == ("c", "a", "b")
    assert hosts_of(decide(whole(one, unusable={"c": WHY}))["j-0001"]) == ("d", "a", "b")
    assert hosts_of(decide(whole(one, avoided=frozenset({"a"})))["j-0001"]) == ("c", "d", "b")
    assert hosts_of(decide(whole(one, avoided=frozenset("ade")))["j-0001"]) == ("c", "a", "b"), "there are no others"
    spare = replace(one, spares=("e",))
    assert hosts_of(decide(whole(spare, unusable={"a": WHY}))["j-0001"]) == ("c", "e", "b")


def test_spares_are_claimed_with_the_placement_and_do_not_delay_it() -> None:
    one = job(1, "a", "b", "c", nodes=1)
    one = replace(one, request=Request(1, spares=2))
    decision = decide(whole(running(2, "b")), whole(one), whole(job(3, "c")))
    assert decision["j-0001"] == NodesFree(("a",), ("c",))
    assert why(decision["j-0003"]).values["job"] == "j-0001"


def test_a_job_that_pauses_keeps_its_hosts_for_a_while() -> None:
    def waits(since_s: float) -> bool:
        paused = job(1, "a", state=State.BACKOFF, hosts=("a",), since_s=since_s)
        return isinstance(decide(whole(paused), whole(job(2, "a")))["j-0002"], WaitingForNodes)

    assert waits(NOW_S - 10.0) and not waits(NOW_S - RESERVE_S)


def test_a_held_job_claims_nothing() -> None:
    decisions = decide(whole(job(1, "a", held_by="wang", since_s=0.0)), whole(job(2, "a")))
    assert why(decisions["j-0001"]).values["user"] == "wang" and hosts_of(decisions["j-0002"]) == ("a",)


def test_a_stage_that_waits_for_another_keeps_no_place_and_one_whose_need_is_gone_stops_nobody() -> None:
    jobs = [
        whole(running(1, "a", stage="a")),
        whole(job(2, "b", needs="j-0001", since_s=0.0)),
        whole(job(3, "b", needs="j-0009")),
        whole(job(4, "b")),
        whole(job(5, "c", needs="j-0008")),
        whole(job(6, "c", needs="j-0008")),
    ]
    decisions = decide(*jobs, known={"j-0008": job(8, "c", state=State.SUCCEEDED)})
    assert why(decisions["j-0002"]) == because("waiting-for-job", needed=needed("j-0001", "a"), job="j-0001")
    assert isinstance(decisions["j-0003"], DependencyFailed)
    assert hosts_of(decisions["j-0004"]) == ("b",)
    # Two that need the same one start together where there is room, one after the other where there is not.
    assert hosts_of(decisions["j-0005"]) == ("c",)
    assert why(decisions["j-0006"]) == because("queued-behind", ["c"], job="j-0005", name="job5")


def test_a_stage_waits_for_an_unreachable_host_that_has_its_files() -> None:
    prepare = job(1, "a", "b", nodes=1, state=State.SUCCEEDED, hosts=("a",))
    train = replace(job(2, "a", "b"), request=Request(1, same_as="j-0001"))
    reason = why(decide(whole(train, away={"a": WHY}), known={"j-0001": prepare})["j-0002"])
    assert (reason.code, reason.hosts) == ("too-few-hosts", ("a",))


def test_a_stage_moves_when_a_person_gives_up_the_host_that_has_its_files() -> None:
    prepare = job(1, "a", "b", "c", nodes=2, state=State.SUCCEEDED, hosts=("a", "b"))
    train = replace(job(2, "a", "b", "c", nodes=2), request=Request(2, same_as="j-0001"))
    decisions = decide(whole(train, unusable={"a": WHY}, lost={"a"}), known={"j-0001": prepare})
    assert hosts_of(decisions["j-0002"]) == ("b", "c")


def test_a_host_that_replaces_one_given_up_requires_the_files_of_the_stages_that_are_needed() -> None:
    ended = {"nodes": 2, "state": State.SUCCEEDED}
    prepare = replace(job(1, *"abc", **ended, hosts=("a", "b"), stage="prepare"), nodes=at_hosts("a", "b"))
    filtered = replace(job(2, *"abc", **ended, hosts=("a",), stage="filter", needs="j-0001"), nodes=at_hosts("a"))
    filtered = replace(filtered, request=Request(1, same_as="j-0001"))
    train = replace(job(3, "a", "b", "c"), needs="j-0002", request=Request(2, same_as="j-0002"))
    known = {one.id: one for one in (prepare, filtered)}
    lost = whole(train, unusable={"a": WHY}, lost={"a"})
    assert decide(lost, known=known)["j-0003"] == NodesFree(
        ("b", "c"), replaced={"c": StageFiles("a", "key-a", "prepare")}
    )
    assert decide(whole(train), known=known)["j-0003"] == NodesFree(("a", "b"))
    again = whole(replace(train, needs=None), unusable={"a": WHY}, lost={"a"})
    assert decide(again, known=known)["j-0003"] == NodesFree(("b", "c")), "it makes them itself"


def at_hosts(*hosts: str) -> tuple[NodeProgress, ...]:
    return tuple(NodeProgress(host, rank, machine_key=f"key-{host}") for rank, host in enumerate(hosts))


def test_a_stage_uses_the_hosts_that_have_the_files_of_the_stages_before_it() -> None:
    prepare = job(1, "a", "b", "c", nodes=2, state=State.SUCCEEDED, hosts=("c", "b"))
    filtered = job(2, "a", "b", "c", nodes=1, state=State.SUCCEEDED, hosts=("c",))
    filtered = replace(filtered, request=Request(1, same_as="j-0001"))
    train = replace(job(3, "a", "b", "c"), request=Request(2, same_as="j-0002"))
    known = {one.id: one for one in (prepare, filtered)}
    assert hosts_of(decide(whole(train), known=known)["j-0003"]) == ("c", "b")
    assert why(decide(whole(running(4, "b")), whole(train), known=known)["j-0003"]).hosts == ("b",)
    reason = why(decide(whole(train, unusable={"c": WHY}), known=known)["j-0003"])
    assert (reason.code, reason.hosts) == ("too-few-hosts", ("c",))


HOSTS = "abcdef"


@st.composite
def queues(draw: st.DrawFn) -> list[Contender]:
    """Jobs of one head node: some run on hosts of their own, the others wait."""
    free = list(HOSTS)
    contenders = []
    for number in range(1, draw(st.integers(2, 7))):
        pool = tuple(draw(st.lists(st.sampled_from(HOSTS), min_size=1, max_size=6, unique=True)))
        nodes = draw(st.integers(1, len(pool)))
        one = job(
            number, *pool, nodes=nodes, priority=draw(st.integers(0, 2)), since_s=NOW_S - draw(st.integers(0, 900))
        )
        mine = [host for host in pool if host in free]
        if draw(st.booleans()) and len(mine) >= nodes:
            one = replace(one, state=State.RUNNING, hosts=tuple(mine[:nodes]))
            free = [host for host in free if host not in one.hosts]
        one = replace(one, request=replace(one.request, spares=draw(st.integers(0, 2))))
        barred = draw(st.sets(st.sampled_from(HOSTS), max_size=3))
        contenders.append(whole(one, unusable=dict.fromkeys(sorted(barred), WHY)))
    return contenders


@given(queues())
def test_no_host_is_claimed_twice_and_no_free_set_is_left_unused(contenders: list[Contender]) -> None:
    decisions = decide(*contenders)
    used = [host for one in contenders if one.job.state is State.RUNNING for host in one.job.hosts]
    placed = [one for one in contenders if isinstance(decisions.get(one.job.id), NodesFree)]
    for one in placed:
        decision = decisions[one.job.id]
        assert isinstance(decision, NodesFree) and len(decision.hosts) == one.job.request.nodes
        assert {*decision.hosts, *decision.spares} <= set(one.job.pool) - set(one.unusable)
        used += [*decision.hosts, *decision.spares]
    assert len(used) == len(set(used)), "no host is claimed twice"
    reserving = []
    for one in sorted(contenders, key=lambda one: (-one.job.priority, one.job.created_at_s, one.job.id)):
        usable = set(one.job.pool) - set(one.unusable)
        if one.job.state is State.QUEUED and one not in placed:
            if NOW_S - one.job.since_s >= RESERVE_S and len(usable) >= one.job.request.nodes:
                reserving.append(one)
            elif len(usable - set(used)) >= one.job.request.nodes:
                assert reserving, "enough usable hosts are free and reserved by nobody"
    for one in placed:  # what cannot be placed although everybody ends reserves nothing
        assert len(set(one.job.pool) - set(one.unusable)) >= one.job.request.nodes


def elastic(one: Job, least: int = 1) -> Job:
    return replace(one, request=replace(one.request, min_nodes=least))


def test_a_job_with_min_nodes_starts_on_the_hosts_that_are_there_and_not_below() -> None:
    pool = ("a", "b", "c")
    past = (PastAttempt(1, pool, 1.0, 2.0),)
    gone = {"a": WHY}
    assert hosts_of(decide(whole(elastic(job(1, *pool, past=past), 2), away=gone))["j-0001"]) == ("c", "b")
    short = decide(whole(elastic(job(1, *pool, past=past), 2), away=gone, unusable={"b": WHY}))["j-0001"]
    assert (why(short).code, why(short).values["needed"], why(short).values["usable"]) == ("too-few-hosts", 2, 1)
    assert hosts_of(decide(whole(running(2, "b")), whole(elastic(job(1, *pool))))["j-0001"]) == ("a", "c")


def test_a_running_job_that_lacks_hosts_gets_free_ones_that_no_job_in_line_wants() -> None:
    small = elastic(replace(running(1, "a", "b", "c", "d", nodes=4), hosts=("b",)))
    assert decide(whole(small)) == {"j-0001": SparesFree(("a", "c", "d"))}
    assert decide(whole(replace(small, spares=("a",)), avoided={"c"})) == {"j-0001": SparesFree(("a", "d", "c"))}
    assert decide(whole(small), whole(running(2, "a")), whole(job(3, "c", "b")))["j-0001"] == SparesFree(("d",))
    held = decide(whole(small), whole(job(3, "c", "b", held_by="ann")))["j-0001"]
    assert held == SparesFree(("a", "c", "d")), "a held job waits for no host"
    assert decide(whole(small, unusable={"a": WHY}, away={"c": WHY, "d": WHY})) == {}
    assert decide(whole(running(1, "a", "b"))) == {}, "it has what it requested"
    claimed = replace(small, spares=("a", "c", "d"))
    assert decide(whole(claimed)) == {}
    assert decide(whole(claimed, away={"c": WHY})) == {}, "it may be back before the next checkpoint"
    assert decide(whole(replace(small, request=Request(4)))) == {}, "a record that was rebuilt may lack hosts"


def test_a_job_gives_back_the_hosts_with_which_it_would_grow_when_another_waits_for_them() -> None:
    small = elastic(replace(running(1, "a", "b", "c", nodes=3), hosts=("b",), spares=("a", "c")))
    found = decide(whole(small), whole(job(2, "a")))
    assert (hosts_of(found["j-0002"]), found["j-0001"]) == (("a",), SparesFree(("c",))), "a new job starts there"
    found = decide(whole(small), whole(job(2, "a", "b", nodes=2)))
    assert isinstance(found["j-0002"], WaitingForNodes) and found["j-0001"] == SparesFree(("c",))
    found = decide(whole(replace(small, spares=())), whole(job(2, "a", "b", nodes=2)))
    assert found["j-0001"] == SparesFree(("c",)), "nor is it claimed again"
    found = decide(whole(small), whole(job(2, "a", "x", nodes=2), unusable={"x": WHY}))
    assert "j-0001" not in found, "a job that could not start on them does not wait for them"
    first = elastic(replace(running(3, "c", "d", nodes=2), hosts=("d",)))
    assert decide(whole(first), whole(small)) == {}, "a job that lacks hosts takes none that another has claimed"
