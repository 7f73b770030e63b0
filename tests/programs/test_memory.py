"""Memory that the planner estimates before a device is in use, next to the peak of real ranks."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascendrun.planner import cost, rules
from ascendrun.planner.models import flops_per_token
from ascendrun.planner.training import Training
from ascendrun.programs.devices.accelerator import Accelerator
from ascendrun.programs.trainer.metrics import mfu, mfu_words, peak_flops
from benchmarks.memory.cases import SMALL
from tests.programs.memory_oracle import Case, chat_step, finetuning_step, pretraining_step
from tests.thorough import examples

pytestmark = pytest.mark.counts
WITHIN, OF_SHAPES = 0.15, 0.1
QUICK = ("alone, float32", "ddp, float32, two pieces")
"""The others take longer, and run when asked for."""
LOOKS = 3
"""What gloo has under way between two ranks counts too, and on a busy machine that piles up in one run of many."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in SMALL]
)
def test_the_estimate_is_near_the_measured_peak(launch, fork_server, tmp_path, name):
    for module in ("peft", "deepspeed") if "zero3" in name else ("peft",):
        fork_server.ask({"import": module})
    found = []
    for attempt in range(LOOKS):
        out = tmp_path / f"out-{attempt}.json"
        launch("memory", [name, "cpu", str(out)], name=f"run-{attempt}", ranks=SMALL[name].ranks).succeed()
        found.append(json.loads(out.read_text()))
        if found[-1]["estimated"] == pytest.approx(found[-1]["measured"], rel=WITHIN):
            return
    pytest.fail(f"not within {WITHIN:.0%} in any of {LOOKS} runs: {found}")


@st.composite
def cases(draw):
    """Steps of up to a few MB, of any shape."""
    heads, hidden = draw(st.sampled_from([2, 4])), draw(st.sampled_from([64, 128, 256, 384]))
    rows, length = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([64, 256, 512]))
    return Case(
        family=draw(st.sampled_from(["cpu", "cuda"])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        recomputes=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        hidden=hidden,
        layers=draw(st.integers(2, 6)),
        heads=heads,
        kv_heads=draw(st.sampled_from([1, heads])),
        inner=round(hidden / 3) * 8,
        words=draw(st.sampled_from([300, 2000, 8000])),
        rows=rows,
        length=length,
        learned=length // draw(st.sampled_from([1, 2, 6])),
    )


@pytest.mark.parametrize("step", [chat_step, pretraining_step, finetuning_step])
@settings(max_examples=examples(3, 20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_the_formula_is_near_the_simulated_step_of_any_shape(usual_positions, step, case):
    """The simulation sees what operators keep; the formula knows sizes only. On a GPU and with dropout on CPUs too."""
    found, work = step(case)
    devices = cost.Devices(case.family, 1, 1, compute_bytes=4 if case.dtype == "float32" else 2)
    memory = cost.memory_of(work, devices, cost.Layout("ddp", case.recomputes))
    assert work.trained == found.trained
    assert memory.total - memory.parts["overhead"] == pytest.approx(found.whole_step, rel=OF_SHAPES)


@pytest.mark.parametrize(
    "batch, ranks, micro, code, values",
    [
        (32, 8, 8, "uneven-batch", {"unit": 64, "ranks": 8}),
        (100, 16, 1, "uneven-batch", {"batch": 100, "unit": 16}),
        (4, 16, 0, "idle-ranks", {"idle": 12}),
    ],
)
def test_batches_that_do_not_divide_are_named_with_the_nearest_that_do(batch, ranks, micro, code, values):
    (problem,) = batch_problems(batch, ranks, micro)
    assert problem.code == code and values.items() <= problem.message.values.items()


def batch_problems(batch, ranks, micro):
    options = {"global_batch_size": batch, "micro_batch_size": micro}
    return list(rules.batch_problems(Training("", options, frozenset(), ranks, ranks, (), "cpu")))


def test_a_batch_that_divides_is_no_problem():
    assert batch_problems(128, 16, 8) == []


# --- tokens a second and the share of the cards' peak that they take are one number seen twice ---


CARD = Accelerator("npu", torch.device("cpu"), "Ascend910B3", None)


def test_a_speed_that_no_card_has_shows_as_more_than_the_whole_of_its_peak():
    """S3-B10: 50 to 80 rows of 2048 tokens a second on 16 cards, 32.5 billion frozen weights."""
    work = flops_per_token(parameters=32_500_000_000, trainable=0, layers=64, hidden=5120, mean_length=2048)
    peak = peak_flops(CARD)
    shares = [mfu(rows * 2048, work, peak, 16) for rows in (50, 80)]
    assert 2 < shares[0] < shares[1] < 5
    assert all("--peak_tflops" in mfu_words(share) for share in shares)
    assert mfu_words(0.412) == " MFU 41.2%" and mfu_words(None) == ""
    assert 0.4 < mfu(16 * 768, 6 * 32.5e9, peak, 16) < 0.6, "a published speed, all weights trained"


def test_a_frozen_weight_is_worth_two_thirds_of_a_trained_one():
    whole = flops_per_token(parameters=1000, trainable=1000, layers=0, hidden=0, mean_length=0)
    frozen = flops_per_token(parameters=1000, trainable=0, layers=0, hidden=0, mean_length=0)
    assert (whole, frozen) == (6000, 4000)


def test_a_card_of_unknown_peak_has_no_share_to_tell_unless_the_peak_is_given():
    unknown = Accelerator("npu", torch.device("cpu"), "Ascend9999", None)
    assert peak_flops(unknown) is None and mfu(1e4, 1e9, None, 1) is None
    assert peak_flops(unknown, 100.0) == 1e14
