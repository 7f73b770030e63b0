"""The Lightning plugin on simulated devices, with the real torch_npu."""

import importlib.util
import json
import os

import pytest

from tests.npu.test_ranks import answers

if os.environ.get("CI") != "true" and importlib.util.find_spec("pytorch_lightning") is None:
    pytest.skip("bin/setup-env lightning", allow_module_level=True)


def facts(run, rank=0):
    return json.loads((run.folder / f"facts-{rank}.json").read_text())


def losses(run):
    return [loss for *_, loss in facts(run)["seen"]]


def test_one_device_and_two_over_hccl_train_as_on_the_cpu(launch):
    for ranks in (1, 2):
        options = [json.dumps({"epochs": 1, "rows": 16, "precision": "32", "device": "auto", "save_steps": 2})]
        on_npu = launch("lightning", options, name=f"npu-{ranks}", ranks=ranks).succeed()
        on_cpu = launch("lightning", options, name=f"cpu-{ranks}", ranks=ranks, family="cpu").succeed()
        assert [facts(on_npu, rank)["device"] for rank in range(ranks)] == [f"npu:{rank}" for rank in range(ranks)]
        assert losses(on_npu) == pytest.approx(losses(on_cpu), rel=1e-4)


def test_what_lightning_chooses_itself_for_an_npu_is_wrong_and_the_plugins_choice_is_not(launch):
    found = answers(launch("check", ["lightning"]).succeed())[0]
    assert found["alone"] == ["cpu", "cuda"]  # the device of strategy auto, and of mixed precision: silently
    assert found["settings"] == ["npu:0", "npu"]
    assert found["start_method"] == "spawn" and found["named"] is True


def test_ddp_opens_no_stream_of_cuda(launch):
    """Lightning's own strategy does where the device has a number, and has no fall-back without CUDA."""
    assert answers(launch("check", ["streams"], ranks=2).succeed()) == [{"plugin": 0, "lightning": 1}] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "auto"])
def test_workers_are_spawned_and_mixed_precision_trains(launch, precision):
    options = [json.dumps({"epochs": 1, "workers": 1, "precision": precision, "device": "auto"})]
    run = launch("lightning", options, ranks=2).succeed()
    assert len(losses(run)) == 3 and facts(run)["device"] == "npu:0"


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_fsdp_over_hccl_learns_as_over_gloo(launch, precision):
    options = [json.dumps({"epochs": 1, "precision": precision, "strategy": "fsdp", "device": "auto"})]
    on_npu = launch("lightning", options, name="npu", ranks=2).succeed()
    on_cpu = launch("lightning", options, name="cpu", ranks=2, family="cpu").succeed()
    assert losses(on_npu)[0] == pytest.approx(losses(on_cpu)[0], rel=1e-4 if precision == "32" else 1e-2)


@pytest.mark.thorough
def test_a_stop_on_npus_resumes_to_the_bit(launch):
    options = {"epochs": 1, "precision": "32", "device": "auto"}
    whole = launch("lightning", [json.dumps(options)], name="whole", ranks=2).succeed()
    cut = launch("lightning", [json.dumps({**options, "stop_at": 1})], name="cut", ranks=2)
    assert cut.wait() == [0, 0], cut.text()
    again = launch("lightning", [json.dumps(options)], name="cut", ranks=2).succeed()
    assert losses(again) == losses(whole)[-1:]
