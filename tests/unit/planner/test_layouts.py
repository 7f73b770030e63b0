"""The layout of a training, and what recorded runs make of its estimate."""

from typing import Any

import pytest

from ascendrun.planner.cost import Devices, Range, RecordedRun, compare, layouts, with_history
from ascendrun.planner.models import Workload, shape_of
from ascendrun.programs.qwen_lora.rules import presets


def work(preset: str, **changes: Any) -> Workload:
    model = shape_of(presets()[preset])
    assert model is not None
    values: dict[str, Any] = {
        "model": model,
        "trained": sum(64 * sum(sizes) * model.layers for sizes in model.linear.values()),
        "is_frozen": True,
        "steps": 100,
        "samples_per_step": 128,
        "tokens_per_step": 128 * 1000.0,
        "mean_length": 1000.0,
        "micro_rows": 1,
        "micro_length": 2048,
        "micro_learned": 1024,
        "micro_batches": 4,
        "is_exact": True,
        "weight_bytes_saved": 0,
    }
    return Workload(**{**values, **changes})


def npus(**changes: Any) -> Devices:
    return Devices(
        **{"family": "npu", "ranks": 16, "ranks_per_host": 8, "peak_flops": 3e14, "memory_bytes": 64 << 30, **changes}
    )


EVERY = ("ddp", "hsdp", "fsdp2", "zero3")


def test_a_small_model_is_replicated_and_a_large_one_sharded_inside_hosts() -> None:
    small = compare(work("qwen2.5-1.5b"), npus(), layouts(EVERY, recompute=True, offload=False)).chosen
    large = compare(work("qwen2.5-32b"), npus(), layouts(EVERY, recompute=True, offload=False)).chosen
    assert small is not None and small.layout.strategy == "ddp"
    assert large is not None and large.layout.strategy == "hsdp"


def test_a_model_that_fits_in_no_way_has_no_choice() -> None:
    choice = compare(
        work("qwen2.5-72b"), npus(ranks=1, ranks_per_host=1), layouts(("ddp",), recompute=None, offload=False)
    )
    assert choice.chosen is None and choice.options


def test_shards_inside_hosts_move_less_between_them() -> None:
    times = {
        option.layout.strategy: option.step_s
        for option in compare(
            work("qwen2.5-32b"), npus(), layouts(("hsdp", "fsdp2"), recompute=True, offload=False)
        ).options
    }
    assert times["hsdp"] is not None and times["fsdp2"] is not None and times["hsdp"].high < times["fsdp2"].high


def test_one_recorded_run_gives_a_range_of_at_most_twice_its_lower_end() -> None:
    small = work("tiny", is_frozen=False)
    run = RecordedRun("j-1", 4, float(small.trained), 5000.0, small.tokens_per_step, small.flops_per_token)
    same, devices = with_history(small, Devices("cpu", 4, 2), [run])
    assert devices.recorded is not None
    speed = devices.recorded.times(4 / same.flops_per_token)
    assert speed.low < 5000.0 < speed.high <= 2 * speed.low
    assert isinstance(speed, Range)


def test_sizes_that_a_plan_assumes_do_not_make_the_same_training_another_one() -> None:
    """The plan assumes three times the vocabulary that the data has, for the recorded run as for the new one."""
    assumed = work("tiny", is_frozen=False)
    run = RecordedRun("j-1", 4, assumed.trained / 3, 5000.0, assumed.tokens_per_step / 1.4, assumed.flops_per_token / 2)
    same, devices = with_history(assumed, Devices("cpu", 4, 2), [run], lambda run: assumed)
    assert devices.recorded is not None and same.tokens_per_step == run.tokens_per_step
    speed = devices.recorded.times(4 / same.flops_per_token)
    assert (speed.low * speed.high) ** 0.5 == pytest.approx(5000.0) and speed.high <= 2 * speed.low
    twice = work("tiny", is_frozen=False, trained=2 * assumed.trained)
    _, wider = with_history(twice, Devices("cpu", 4, 2), [run], lambda run: assumed)
    assert wider.recorded is not None and wider.recorded.high > 2 * wider.recorded.low
