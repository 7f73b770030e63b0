"""Who keeps the others waiting: found where there is one, and nobody blamed where there is none."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median
from typing import Any, Callable

import pytest

from ascendrun.core.metrics import MetricsLine
from ascendrun.core.samples import DeviceSample, Newest
from ascendrun.health.samples.step_times import StepTimes, make_step_times
from ascendrun.health.stragglers.causes import Others, StragglerCause
from ascendrun.health.stragglers.detect import Straggler, describe_cause, describe_slowness, find_stragglers
from tests.lib.training_world import World

NO_COMM = ("step_s", "at_s")


def look(world: World, samples: Newest | None = None, *, error_s: float | None = 0.001) -> tuple[Straggler, ...]:
    return find_stragglers(
        world.step_times(error_s=error_s),
        samples or world.samples(),
        hosts_of_ranks=world.hosts_of_ranks,
        now_s=world.ended_s,
    )


SHAPES = ((2, 8), (1, 2), (2, 1), (1, 8), (8, 8))


def healthy(seed: int) -> World:
    shape, noise = SHAPES[seed % len(SHAPES)], (0.02, 0.05, 0.1, 0.2)[seed % 4]
    return World(nodes=shape[0], per_node=shape[1], steps=40 + 3 * seed % 150, seed=seed, noise=noise)


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_has_no_straggler_whatever_its_pauses(seed: int) -> None:
    assert look(healthy(seed).run(), Newest()) == ()


@pytest.mark.thorough
def test_of_very_many_healthy_runs_none_has_a_straggler() -> None:
    assert [seed for seed in range(20, 60) if look(healthy(seed).run(), Newest())] == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tells", [NO_COMM, ("at_s",), ("step_s",)], ids="+".join)
def test_a_healthy_run_whose_program_tells_less_has_none_either(seed: int, tells: tuple[str, ...]) -> None:
    assert look(World(seed=seed, noise=0.1, tells=tells, skew_s={"npu01": 40.0}).run(), Newest()) == ()


@pytest.mark.parametrize("seed", range(4))
def test_the_slow_rank_is_named_though_all_steps_take_equally_long(seed: int) -> None:
    world = World(seed=seed, slower=lambda rank, step: 1.3 if rank == 5 else 1.0).run()
    step_s = {line.step_s for lines in world.lines.values() for line in lines if line.step == 50}
    assert len(step_s) == 1
    [found] = look(world)
    assert (found.rank, found.host, found.ranks) == (5, "npu00", (5,))
    assert found.slower_by == pytest.approx(1.3, abs=0.08)
    assert found.step_fraction == pytest.approx(0.3 / 1.5, abs=0.06)


def of_rank_5(factor: float, when: Callable[[int], bool] = lambda step: True) -> dict[str, Any]:
    return {"slower": lambda rank, step: factor if rank == 5 and when(step) else 1.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 240, "noise": 0.2, **of_rank_5(1.25)},
        {"steps": 400, "log_every": 10, "pauses": False, **of_rank_5(1.3)},
    ],
    ids=["a little slower among steps that differ much", "every tenth step is logged"],
)
def test_a_slow_rank_shows_over_many_steps(changes: dict[str, Any]) -> None:
    assert [found.rank for found in look(World(**changes).run())] == [5]


@pytest.mark.parametrize(
    "changes",
    [
        of_rank_5(3.0, lambda step: step == 40),
        of_rank_5(3.0, range(40, 44).__contains__),
        of_rank_5(3.0, range(40, 54).__contains__),
        {"steps": 120, **of_rank_5(1.5, lambda step: step < 90)},  # as fast as the others again
        {"slower": lambda rank, step: 1.5 if rank >= 4 else 1.0},  # most are slower than a few
        {"compute_s": 0.1, "shared_s": 5.0, **of_rank_5(1.4)},  # nobody notices
        *({"steps": few, **of_rank_5(3.0)} for few in (0, 1, 10)),  # too little is told
    ],
)
def test_who_is_slow_for_a_moment_or_unnoticed_or_one_of_most_is_no_straggler(changes: dict[str, Any]) -> None:
    assert look(World(**changes).run()) == ()


def test_since_when_is_told_to_the_window() -> None:
    world = World(steps=200, slower=lambda rank, step: 1.5 if rank == 5 and step > 100 else 1.0).run()
    [found] = look(world)
    began_s = next(line.at_s for line in world.lines[5] if line.step == 100)
    assert began_s is not None and found.since_s is not None
    assert abs(found.since_s - began_s) < 20 * 1.7


@pytest.mark.parametrize(("nodes", "slow"), [(4, 2), (2, 1)])
def test_a_slow_node_is_told_as_the_node_though_it_has_half_of_all_ranks(nodes: int, slow: int) -> None:
    [found] = look(World(nodes=nodes, slower=lambda rank, step: 1.4 if rank // 8 == slow else 1.0).run())
    ranks = tuple(range(8 * slow, 8 * slow + 8))
    assert (found.rank, found.host, found.ranks) == (None, f"npu0{slow}", ranks)


def test_two_slow_ranks_of_different_nodes_are_both_named_the_slowest_first() -> None:
    world = World(slower=lambda rank, step: {3: 1.3, 12: 1.6}.get(rank, 1.0)).run()
    assert [found.rank for found in look(world)] == [12, 3]


def test_ranks_that_do_not_wait_for_each_other_are_compared_by_their_steps() -> None:
    steps = {
        rank: make_step_times(
            MetricsLine(step=step, step_s=1.6 if rank == 2 else 1.0) for step in range(1, 50 if rank == 2 else 80)
        )
        for rank in range(4)
    }
    [found] = find_stragglers(steps, Newest(), hosts_of_ranks=dict.fromkeys(range(4), "a"), now_s=0.0)
    assert (found.rank, found.slower_by) == (2, 1.6)


def late(rank: int, *, error_s: float | None) -> tuple[StepTimes, ...]:
    return tuple(
        StepTimes(step, at_s=1000.0 + step + (0.3 if rank == 2 else 0.0), step_s=1.0, error_s=error_s)
        for step in range(1, 60)
    )


def test_where_nothing_else_is_told_who_is_always_last_is_named_once_clocks_are_known() -> None:
    hosts = {rank: f"h{rank}" for rank in range(4)}
    [found] = find_stragglers(
        {rank: late(rank, error_s=0.002) for rank in range(4)}, Newest(), hosts_of_ranks=hosts, now_s=1060.0
    )
    assert (found.rank, found.host) == (2, "h2")
    for error_s in (None, 0.5):
        unsure = {rank: late(rank, error_s=error_s) for rank in range(4)}
        assert find_stragglers(unsure, Newest(), hosts_of_ranks=hosts, now_s=1060.0) == ()


def test_one_rank_that_writes_alone_is_compared_with_nobody() -> None:
    world = World(slower=lambda rank, step: 3.0 if rank == 0 else 1.0).run()
    world.lines = {0: world.lines[0], **{rank: [] for rank in world.ranks if rank}}
    assert look(world) == ()


Change = Callable[[int, float], object]


def at_rank_5(value: object) -> Change:
    return lambda rank, part: value if rank == 5 else None


@pytest.mark.parametrize(
    "sign, changes",
    [
        (StragglerCause.FREQUENCY, {"frequency_mhz": at_rank_5(1200.0)}),
        (StragglerCause.FREQUENCY, {"frequency_mhz": lambda rank, part: 1800.0 - 900.0 * part if rank == 5 else None}),
        (StragglerCause.TEMPERATURE, {"frequency_mhz": at_rank_5(1200.0), "temperature_c": at_rank_5(98.0)}),
        (StragglerCause.TEMPERATURE, {"temperature_c": at_rank_5(98.0)}),
        (StragglerCause.LINK, {"link_downs": lambda rank, part: 2 + int(10 * part) if rank == 5 else None}),
        (StragglerCause.LINK, {"link_up": at_rank_5(False)}),
        (StragglerCause.LINK, {"link_tx_bytes_s": at_rank_5(1e9)}),
        (StragglerCause.CPU, {"cpu": lambda rank, part: 99.0 if rank == 0 else None}),
        (StragglerCause.CPU, {"memory_used_bytes": lambda rank, part: 1020 * 2**30 if rank == 0 else None}),
        (StragglerCause.CPU, {"rank_cpu": at_rank_5(20.0)}),
        (StragglerCause.SHARED, {"pids": at_rank_5((1005, 77777))}),
        (StragglerCause.HEALTH, {"health": at_rank_5("Warning")}),
        (None, {}),
    ],
    ids=lambda value: (
        value.value if isinstance(value, StragglerCause) else "-".join(value) if isinstance(value, dict) else None
    ),
)
def test_the_likeliest_sign_is_found(sign: StragglerCause | None, changes: dict[str, Change]) -> None:
    world = World(slower=lambda rank, step: 1.3 if rank == 5 else 1.0).run()
    [found] = look(world, world.samples(**changes))
    assert (found.rank, found.cause) == (5, sign)
    assert bool(found.evidence) == (sign is not None)
    for lang in ("en", "zh"):
        for text in (describe_slowness(found), describe_cause(found)):
            assert text.render(lang) and "{" not in text.render(lang) and "?" not in text.render(lang)


def test_a_rank_that_waits_for_its_data_is_told_so_unless_the_hosts_cores_are_used_up() -> None:
    world = World(data_more_s=lambda rank, step: 0.5 if rank == 5 else 0.0).run()
    [found] = look(world)
    assert (found.rank, found.cause) == (5, StragglerCause.DATA)
    starved = world.samples(cpu=lambda rank, part: 99.0 if rank == 0 else None)
    [found] = look(world, starved)
    assert (found.rank, found.cause) == (5, StragglerCause.CPU)


def test_waiting_for_data_is_seen_where_nothing_tells_of_the_collectives() -> None:
    world = World(tells=("step_s", "data_s"), data_more_s=lambda rank, step: 0.5 if rank == 5 else 0.0).run()
    [found] = look(world)
    assert (found.rank, found.cause) == (5, StragglerCause.DATA)


def test_a_node_that_is_slow_and_hot_is_told_with_its_sign() -> None:
    world = World(nodes=4, slower=lambda rank, step: 1.4 if rank // 8 == 2 else 1.0).run()
    hot = world.samples(
        temperature_c=lambda rank, part: 99.0 if rank // 8 == 2 else None,
        frequency_mhz=lambda rank, part: 1300.0 if rank // 8 == 2 else None,
    )
    [found] = look(world, hot)
    assert (found.rank, found.host, found.cause) == (None, "npu02", StragglerCause.TEMPERATURE)


def test_figures_alone_tell_of_a_low_clock_only_where_no_times_of_steps_say_otherwise() -> None:
    world = World().run()
    low = world.samples(frequency_mhz=at_rank_5(1000.0))
    assert look(world, low) == ()
    [found] = find_stragglers({}, low, hosts_of_ranks=world.hosts_of_ranks, now_s=world.ended_s)
    assert (found.rank, found.host, found.slower_by, found.cause) == (5, "npu00", None, StragglerCause.FREQUENCY)


def test_a_device_that_idles_may_lower_its_clock() -> None:
    world = World().run()
    idle = world.samples(frequency_mhz=at_rank_5(1000.0), utilisation=at_rank_5(0.0))
    assert find_stragglers({}, idle, hosts_of_ranks=world.hosts_of_ranks, now_s=world.ended_s) == ()


def test_a_link_that_is_down_slows_all_alike_and_is_named_for_itself() -> None:
    world = World().run()
    [found] = look(world, world.samples(link_up=at_rank_5(False)))
    assert (found.rank, found.slower_by, found.cause) == (5, None, StragglerCause.LINK)
    assert look(world, world.samples(link_up=lambda rank, part: False)) == ()  # no such network here
    alone = World(nodes=1).run()
    assert look(alone, alone.samples(link_up=at_rank_5(False))) == ()  # nobody outside to talk to


def test_old_figures_do_not_count() -> None:
    world = World(slower=lambda rank, step: 1.3 if rank == 5 else 1.0, steps=60, pauses=False).run()
    old = world.samples(frequency_mhz=at_rank_5(1000.0))
    [found] = find_stragglers(
        world.step_times(), old, hosts_of_ranks=world.hosts_of_ranks, now_s=world.ended_s + 10_000.0
    )
    assert found.cause is StragglerCause.FREQUENCY  # the steps are as old as they
    assert find_stragglers({}, old, hosts_of_ranks=world.hosts_of_ranks, now_s=world.ended_s + 10_000.0) == ()


def test_the_slowness_and_the_likely_cause_are_texts_with_values() -> None:
    world = World(seed=3, slower=lambda rank, step: 1.3 if rank == 5 else 1.0).run()
    [found] = look(world, world.samples(frequency_mhz=at_rank_5(1200.0)))
    slowness, cause = describe_slowness(found), describe_cause(found)
    assert (slowness.key, slowness.values["step_fraction"]) == ("straggler.slower-costs", found.step_fraction)
    assert cause.values["cause"].key == "straggler.frequency"
    [metric] = cause.values["metrics"]
    assert (metric.key, metric.values) == ("straggler.clock", {"here": 1200.0, "others": 1800.0})


FOREIGN = {"tells": (), "steps": 500, "compute_s": 1.0}


def by_use(world: World, samples: Newest) -> tuple[Straggler, ...]:
    return find_stragglers({}, samples, hosts_of_ranks=world.hosts_of_ranks, now_s=world.ended_s)


@pytest.mark.parametrize("kind", ["npu", "cpu"])
def test_of_a_program_that_tells_nothing_the_rank_that_never_waits_is_named(kind: str) -> None:
    world = World(slower=lambda rank, step: 1.3 if rank == 5 else 1.0, **FOREIGN).run()
    [found] = by_use(world, world.used(kind))
    assert (found.rank, found.host, found.cause) == (5, "npu00", StragglerCause.WORK)
    assert found.slower_by == pytest.approx(1.3, abs=0.06)
    assert found.step_fraction == pytest.approx(0.23, abs=0.05)
    assert describe_cause(found).values["metrics"][0].key == f"straggler.busy-{kind}"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["npu", "cuda", "cpu"])
def test_devices_of_a_sound_training_are_used_alike_and_nobody_is_blamed(kind: str, seed: int) -> None:
    world = World(seed=seed, noise=0.1, **FOREIGN).run()
    assert by_use(world, world.used(kind)) == ()


def test_use_that_counts_waiting_tells_nothing() -> None:
    world = World(slower=lambda rank, step: 1.5 if rank == 5 else 1.0, **FOREIGN).run()
    assert by_use(world, world.used("cuda")) == ()


def test_a_node_whose_devices_never_wait_is_named_as_the_node() -> None:
    world = World(slower=lambda rank, step: 1.4 if rank >= 8 else 1.0, **FOREIGN).run()
    [found] = by_use(world, world.used())
    assert (found.rank, found.host) == (None, "npu01")


def test_one_rank_that_works_while_all_others_pause_is_no_straggler() -> None:
    world = World(**FOREIGN).run()
    samples = world.used()
    alone = tuple(
        replace(one, utilisation=95.0 if (one.host, one.device) == ("npu00", 0) else 0.0)
        if world.ended_s - 400 <= one.at_s < world.ended_s - 100
        else one
        for one in samples.devices
    )
    assert by_use(world, Newest(alone, (), samples.ranks)) == ()


def test_steps_that_take_equally_long_do_not_contradict_a_low_clock() -> None:
    world = World(tells=NO_COMM).run()
    [found] = look(world, world.samples(frequency_mhz=at_rank_5(1000.0)))
    assert (found.rank, found.cause) == (5, StragglerCause.FREQUENCY)


def test_a_host_without_free_cores_is_named_where_no_times_are_told() -> None:
    world = World().run()
    [found] = by_use(world, world.samples(cpu=lambda rank, part: 99.0 if rank == 8 else None))
    assert (found.rank, found.host, found.cause, found.slower_by) == (None, "npu01", StragglerCause.CPU, None)


@pytest.mark.parametrize("seed", range(3))
def test_one_slow_step_in_ten_is_found_by_what_it_costs(seed: int) -> None:
    world = World(seed=seed, steps=240, slower=lambda rank, step: 3.0 if rank == 5 and step % 10 == 3 else 1.0).run()
    [found] = look(world)
    assert found.rank == 5 and found.every in (9, 10, 11) and describe_slowness(found).values["every"] == found.every
    assert found.step_fraction == pytest.approx(0.07, abs=0.03)
    first = World(seed=seed, steps=240, slower=lambda rank, step: 3.0 if rank == 0 and step % 10 == 3 else 1.0).run()
    assert look(first) == ()  # rank 0 saves, evaluates and logs for all


@pytest.mark.parametrize("seed", range(20))
def test_the_median_of_the_others_is_that_of_all_without_their_own(seed: int) -> None:
    lot = random.Random(seed)
    clocks = [lot.choice([None, 800, 1000, 1000, 1800]) for _ in range(lot.randrange(1, 12))]
    samples = [DeviceSample(0.0, "h", n, "npu", frequency_mhz=clock) for n, clock in enumerate(clocks)]
    own = lot.sample(samples, lot.randrange(len(samples) + 1))
    rest = [one.frequency_mhz for one in samples if one not in own and one.frequency_mhz is not None]
    found = Others(samples).without(own).middle("frequency_mhz")
    assert found == (median(rest) if rest else None)
