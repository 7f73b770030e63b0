"""Hangs by their signs: simulated jobs over hours, look by look, with figures of ranks that hang or only wait."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from ascendrun.health.hang import Windows
from ascendrun.health.stacks import Frame
from tests.lib.hang_world import COMPILES, HANGS, READS, SAVES, WAITS, World, hang


@pytest.mark.parametrize("device_type", ["npu", "cuda", "cpu"])
@pytest.mark.parametrize("kind", HANGS)
def test_a_hang_is_known_within_120_seconds_and_names_its_rank(kind: str, device_type: str) -> None:
    world = World(device_type=device_type)
    world.train()
    began_s = world.at_s
    odd = hang(world, kind)
    world.run(300.0)
    assert world.hung and world.hung[0][0] - began_s <= 120.0
    assert all(verdict.ranks == odd for _, verdict in world.hung)
    assert not world.acted
    world.run(700.0)
    assert 900.0 <= world.acted[0][0] - began_s <= 930.0


def test_a_rank_that_continues_resolves_it() -> None:
    world = World()
    world.train()
    hang(world)
    world.run(400.0)
    assert world.hung
    world.train()
    world.hung.clear()
    world.run(60.0, steps=True)
    assert not world.hung and not world.acted


def test_a_stopped_rank_is_known_without_any_python_stack() -> None:
    world = World(stacks=False)
    world.train()
    hang(world)
    world.run(1000.0)
    assert world.hung[0][1].ranks == (5,) and world.acted


def test_ranks_that_all_burn_cpu_without_stacks_are_reported_and_never_stopped() -> None:
    """Waiting in HCCL and compiling in the process look the same."""
    world = World(stacks=False)
    world.train()
    world.busy = False
    world.set(world.ranks, cpu=100.0)
    world.run(4 * 3600.0)
    assert world.hung and not world.acted


def test_a_hang_of_a_job_with_null_is_only_reported() -> None:
    world = World(windows=Windows(hang_s=None))
    world.train()
    hang(world)
    world.run(7200.0)
    assert world.hung and not world.acted


def test_a_host_that_does_not_respond_is_no_hang_while_the_others_train() -> None:
    world = World()
    world.train()
    world.unreachable = frozenset({"npu02"})
    world.run(1800.0, steps=True)
    assert not world.hung


def test_a_host_that_is_gone_while_the_others_wait_for_it_is_acted_on_early() -> None:
    world = World()
    world.train()
    began_s = world.at_s
    world.unreachable = frozenset({"npu02"})
    world.others_wait(4, 5, 6, 7)
    world.run(300.0)
    assert world.hung[0][0] - began_s <= 120.0 and world.hung[0][1].hosts == ("npu02",)
    assert 180.0 <= world.acted[0][0] - began_s <= 210.0 and world.acted[0][1].is_unreachable


def test_a_lost_host_of_a_program_without_phases_is_acted_on_early_if_the_job_can_restart_without_it() -> None:
    def acted_after(may_restart: bool) -> float:
        world = World(tells_phases=False, may_restart=may_restart, stacks=False)
        world.train()
        began_s = world.at_s
        world.unreachable = frozenset({"npu02"})
        world.set([0, 1, 2, 3], cpu=0.5)
        world.busy = False
        world.run(1200.0)
        return world.acted[0][0] - began_s

    assert 180.0 <= acted_after(True) <= 210.0 and acted_after(False) >= 900.0


def test_a_rank_that_saves_while_a_host_is_lost_is_waited_for_without_phases() -> None:
    world = World(tells_phases=False, may_restart=True, stacks=False)
    world.train()
    world.unreachable = frozenset({"npu02"})
    world.set([0, 1, 2, 3], cpu=0.5)
    world.set([0], writes=5e7)
    world.run(600.0)
    assert not world.acted


def test_unreachable_hosts_alone_are_never_a_hang() -> None:
    world = World()
    world.train()
    world.unreachable = frozenset({"npu01", "npu02"})
    world.run(3600.0)
    assert not world.hung


# Slow modes: nothing of this may stop a job, and what its program tells is not even reported.


SLOW_LINK_BYTES_S = 2e5
"""To a store of checkpoints: a 1.5 Mbit/s line that others use too."""
SAVING = {"phases": frozenset({"checkpoint"}), "moves": False, "frames": WAITS, "cpu": 1.0}
MODES: dict[str, tuple[float, bool, dict[str, object], dict[str, object]]] = {
    "checkpoint": (600.0, False, SAVING, {"frames": SAVES, "cpu": 40.0, "writes": 5e7}),
    "checkpoint over a slow link": (600.0, False, SAVING, {"frames": SAVES, "cpu": 2.0, "writes": SLOW_LINK_BYTES_S}),
    "checkpoint on a slow disk": (600.0, False, SAVING, {"frames": SAVES, "cpu": 0.0, "state": "D"}),
    "evaluation": (1500.0, True, {"phases": frozenset({"evaluation"})}, {}),
    "compile in process": (1200.0, False, {"frames": COMPILES, "cpu": 100.0, "moves": False}, {}),
    "a step that computes for 10 minutes": (600.0, True, {"cpu": 100.0}, {}),
}
"""How long, whether devices are busy, how all ranks look, and how rank 0 does. The slow disk blocks its writer."""


def pass_through(world: World, mode: str) -> None:
    seconds, world.busy, of_all, of_first = MODES[mode]
    world.set(world.ranks, **of_all)
    world.set([0], **of_first)
    world.run(seconds)


def compile_below(world: World) -> None:
    """A shape that is new to one rank: its compiler runs 20 minutes, the others wait."""
    world.others_wait(3)
    world.set([3], frames=READS, cpu=400.0, moves=False, below=("ccec", "python3"))
    world.run(1200.0)


def quiet_log(world: World) -> None:
    world.run(1800.0, steps=True)


def laptop_sleep(world: World) -> None:
    world.at_s += 7200.0
    world.age_s += 7200.0
    world.run(60.0)


def head_is_blind(world: World) -> None:
    """The disk of the head node is full: no data of the ranks arrives."""
    watch, end_s = world.watch, world.at_s + 1800.0
    while world.at_s < end_s:
        world.at_s, world.age_s = world.at_s + 15.0, world.age_s + 15.0
        assert watch.observe(replace(world.look(), is_blind=True)) is None
        for one in world.ranks.values():
            one.step, one.reported = one.step + 3, one.reported + 300


SLOW: dict[str, Callable[[World], None]] = {
    **{mode: partial(pass_through, mode=mode) for mode in MODES},
    **{mode.__name__: mode for mode in (compile_below, quiet_log, laptop_sleep, head_is_blind)},
}


@pytest.mark.parametrize("device_type", ["npu", "cuda", "cpu"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_24_hours_of_slow_modes_are_never_taken_for_a_hang(device_type: str, seed: int) -> None:
    world = World(device_type=device_type, seed=seed)
    began_s = world.at_s
    order = random.Random(seed)
    met: set[str] = set()
    while world.at_s - began_s < 24 * 3600.0 or len(met) < len(SLOW):
        world.train(order.uniform(120.0, 900.0))
        mode = order.choice([*SLOW])
        met.add(mode)
        SLOW[mode](world)
        assert not world.acted and not world.hung, f"{mode} is taken for a hang"


def foreign_checkpoint(world: World, bytes_s: float = 5e7) -> None:
    """A program of one's own: rank 0 writes for 10 minutes, the others wait in a barrier."""
    world.others_wait(0)
    world.set([0], frames=SAVES, cpu=60.0 if bytes_s > 1e6 else 2.0, writes=bytes_s)
    world.run(600.0)


@pytest.mark.parametrize("metrics", [True, False])
@pytest.mark.parametrize("device_type", ["npu", "cuda", "cpu"])
def test_24_hours_of_a_foreign_program_are_never_acted_on(device_type: str, metrics: bool) -> None:
    world = World(device_type=device_type, metrics=metrics, tells_phases=False, stacks=False)
    began_s = world.at_s
    order = random.Random(7)
    while world.at_s - began_s < 24 * 3600.0:
        world.train(order.uniform(120.0, 900.0))
        world.run(60.0, steps=True, logs=True)
        slow_step = SLOW["a step that computes for 10 minutes"]
        order.choice([foreign_checkpoint, slow_step, quiet_log, laptop_sleep, compile_below])(world)
        assert not world.acted


@pytest.mark.parametrize("bytes_s", [5e7, SLOW_LINK_BYTES_S])
@pytest.mark.parametrize("metrics", [True, False])
@pytest.mark.parametrize("device_type", ["npu", "cuda", "cpu"])
def test_a_rank_that_writes_is_reported_only_when_it_has_stopped_to(
    device_type: str, metrics: bool, bytes_s: float
) -> None:
    world = World(device_type=device_type, metrics=metrics, tells_phases=False, stacks=False)
    world.train(60.0)
    world.run(300.0, steps=True, logs=True)
    foreign_checkpoint(world, bytes_s)
    assert not world.hung
    world.set([0], writes=0.0, moves=False, cpu=0.5, frames=READS)
    world.run(300.0)
    assert world.hung and not world.acted


def flush(world: World, seconds: float) -> None:
    """Rank 0 has written its checkpoint and waits in fsync: no byte, no CPU; the others wait for it."""
    world.others_wait(0)
    world.set([0], frames=SAVES, cpu=0.0, state="D", moves=False, writes=0.0, flushes=True)
    world.run(seconds)


@pytest.mark.parametrize(("metrics", "tells_phases"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("device_type", ["npu", "cuda", "cpu"])
def test_a_rank_in_fsync_hangs_only_in_something_else(device_type: str, metrics: bool, tells_phases: bool) -> None:
    world = World(device_type=device_type, metrics=metrics, tells_phases=tells_phases)
    world.train(60.0)
    world.run(300.0, steps=True, logs=True)
    flush(world, 1200.0)
    assert not world.hung
    world.set([0], cpu=0.5, state="S", frames=READS, flushes=False)
    world.run(300.0)
    assert world.hung and world.hung[0][1].ranks == (0,) and not world.acted


def test_a_disk_that_never_takes_a_checkpoint_is_a_hang_in_the_end() -> None:
    world = World(tells_phases=False)
    world.train(60.0)
    flush(world, 4 * 900.0)
    assert not world.hung
    world.run(2 * 3600.0)
    assert world.hung and world.acted and world.acted[0][1].ranks == (0,)


def test_a_layer_of_fsdp2_that_waits_for_its_peers_does_not_compile() -> None:
    """Its hooks run through torch/_dynamo/eval_frame.py: with it on each stack, no hang was ever reported."""
    world = World(device_type="cpu")
    world.train()
    hook = (Frame("/x/torch/_dynamo/eval_frame.py", "_fn", 1446), Frame("/x/torch/nn/modules/module.py", "inner", 1811))
    world.others_wait(5)
    world.set(world.ranks, frames=(*WAITS[:1], *hook, *WAITS[1:]))
    world.set([5], state="T", cpu=0.0)
    world.run(1000.0)
    assert world.hung[0][1].ranks == (5,) and world.acted


def test_a_rank_that_stops_after_a_compilation_is_found() -> None:
    world = World()
    world.train()
    compile_below(world)
    world.set([3], frames=READS, cpu=0.5, moves=False, below=())
    world.run(1000.0)
    assert world.hung[0][1].ranks == (3,) and world.acted


def test_nothing_is_judged_before_the_first_step() -> None:
    world = World(age_s=0.0)
    world.others_wait(0)
    world.run(1700.0)
    assert not world.hung


def prepare_data(world: World, seconds: float) -> None:
    """Rank 0 reads and tokenizes before the first step; the others wait for it, and all report the phase."""
    world.others_wait(0)
    world.set(world.ranks, phases=frozenset({"data"}))
    world.set([0], frames=READS, cpu=100.0, moves=True)
    world.run(seconds)


def test_data_that_are_prepared_for_an_hour_are_no_hang_and_the_model_has_its_time_after_them() -> None:
    world = World(age_s=0.0)
    prepare_data(world, 3500.0)
    world.set(world.ranks, phases=frozenset())
    world.others_wait(0)
    world.run(1700.0)
    assert not world.hung and not world.acted


def test_data_that_are_never_ready_are_a_hang_in_the_end() -> None:
    world = World(age_s=0.0)
    prepare_data(world, 60.0)
    world.set([0], moves=False, cpu=0.5, state="D")
    world.run(2 * 3600.0)
    assert world.hung and world.hung[0][1].ranks == (0,)


def test_a_rank_with_rare_reports_gets_wider_windows() -> None:
    world = World()
    world.train()
    watch = world.watch
    world.others_wait(5)
    world.set([5], state="T", cpu=0.0)
    for _ in range(60):  # 15 minutes; a report comes every 2
        world.at_s += 15.0
        assert not (verdict := watch.observe(replace(world.look(), interval_s=120.0))) or not verdict.is_hung


def test_a_finding_names_rank_place_and_call() -> None:
    world = World()
    world.train()
    hang(world, "a deadlock")
    world.run(130.0)
    verdict = world.hung[0][1]
    assert (verdict.where, verdict.others) == ("w/data.py:read_shard", "all_reduce")
    text = verdict.finding()
    assert text.key == "hang.finding-others"
    assert text.values["what"].key == "hang.is-in" and text.values["what"].values["ranks"] == [5]
