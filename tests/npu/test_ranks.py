"""Several ranks on simulated devices: collectives, whole trainings, and what is said when one fails."""

import importlib.util
import json

import pytest

from ascendrun.ascend.signatures import scan
from tests.npu.conftest import plogs
from tests.programs.conftest import TINY

HURRY = {"ASCENDRUN_SIM_NPU_SPEEDUP": "60", "HCCL_EXEC_TIMEOUT": "68", "HCCL_CONNECT_TIMEOUT": "120"}
"""HCCL's 120 seconds pass in two."""


def answers(run):
    return [json.loads((run.folder / f"answer-{rank}.json").read_text()) for rank in range(len(run.pids))]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_gives_what_gloo_gives(launch, ranks):
    on_npu = launch("check", ["collectives"], name="npu", ranks=ranks)
    on_cpu = launch("check", ["collectives"], name="cpu", ranks=ranks, family="cpu")
    assert answers(on_npu.succeed()) == answers(on_cpu.succeed())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_a_training_over_hccl_has_the_losses_of_one_over_gloo(launch, strategy):
    if strategy == "zero3" and importlib.util.find_spec("deepspeed") is None:
        pytest.fail("deepspeed is not in .venv, below .venv-npu: bin/setup-env zero3", pytrace=False)
    strategies = {
        "npu": strategy,
        "cpu": "ddp",
    }  # all three learn the same, so one that costs little stands for them on the CPU
    losses = {
        family: launch(
            "tiny",
            [json.dumps({"strategy": used, "max_steps": 6, "dropout": 0.0})],
            name=family,
            ranks=2,
            family=family,
        )
        .succeed()
        .losses()
        for family, used in strategies.items()
    }
    assert len(losses["npu"]) == 6
    assert losses["npu"] == pytest.approx(losses["cpu"], rel=2e-4)


def test_a_classifier_trained_there_answers_there_as_on_the_cpu(launch):
    options = [*TINY, "--num_train_epochs=1", "--grammar=motion", "--profile_dir=trace"]
    trained = launch("trajectory", options, name="trained").succeed()
    assert list(trained.folder.glob("trace/rank-00000/*_ascend_pt")), "torch_npu's profiler ran"
    assert "Qwen2MLP x " in trained.text() and "Qwen2RMSNorm x " in trained.text()
    check = launch("check", ["classifier", str(trained.folder / "out" / "best")], name="check").succeed()
    off, on_npu, on_cpu = json.loads((check.folder / "answer-0.json").read_text())
    assert off < 1e-4 and on_npu == on_cpu


def test_a_stopped_training_resumes_on_npu_as_if_it_had_not_been_stopped(launch):
    def options(**more):
        return [json.dumps({"max_steps": 8, "dropout": 0.0, **more})]

    straight = launch("tiny", options(), name="straight", ranks=2).succeed().losses()
    launch("tiny", options(stop_at=[4, 1]), name="broken", ranks=2).succeed()
    assert launch("tiny", options(), name="broken", ranks=2).succeed().losses() == straight


def codes(run):
    text = run.text() + plogs(run)
    return {hit.signature.code for hit in scan(enumerate(text.splitlines(), 1))}


def test_a_device_that_is_lost_in_the_middle_ends_its_rank_with_the_runtimes_code(launch, tmp_path):
    switch = tmp_path / "faults"
    run = launch("tiny", [json.dumps({"epochs": 100_000})], env={"ASCENDRUN_SIM_NPU_FAULTS_FILE": str(switch)})
    run.until_step(2)
    switch.write_text("device-lost")
    assert run.wait() == [1]
    assert {"ACL-507899", "device-heartbeat-lost"} <= codes(run)


def test_a_multi_bit_ecc_error_names_itself_and_the_peer_only_waits(launch):
    run = launch("tiny", ["{}"], ranks=2, env={"ASCENDRUN_SIM_NPU_FAULTS": "hbm-ecc:1@4", **HURRY})
    assert run.wait() == [1, 1]
    assert "error code is 507054" in run.out[1].read_text()
    assert "507054" not in run.out[0].read_text()
    assert "ACL-507054" in codes(run)


def test_a_silent_rank_is_named_by_its_peer_after_hccls_timeout(launch):
    # Its first calls of HCCL are the broadcasts of the weights.
    run = launch("tiny", ["{}"], ranks=2, env={"ASCENDRUN_SIM_NPU_FAULTS": "silent:1@40", **HURRY})
    until_rank_0_ended(run)
    text = run.out[0].read_text()
    assert "EI0002" in text and "from remote rank [1]" in text and "error code is 507048" in text
    assert {"EI0002", "hccl-culprit-stuck"} <= codes(run), codes(run)


def test_a_rank_that_never_joins_is_named_after_the_connect_timeout(launch):
    run = launch("tiny", ["{}"], ranks=2, env={"ASCENDRUN_SIM_NPU_FAULTS": "absent:1", **HURRY})
    until_rank_0_ended(run)
    assert "Failed to connect agent[1,]" in run.text() + plogs(run)
    assert "EI0015" in codes(run)


def test_ranks_that_reduce_different_amounts_are_told_so(launch):
    run = launch("check", ["disagree"], ranks=2)
    assert run.wait() == [1, 1]
    assert "EI0005" in codes(run)


def until_rank_0_ended(run):
    """Rank 1 never ends: it is silent."""
    from tests.lib.vcluster.processes import await_that

    await_that(lambda: run.server.ask({"poll": run.pids[0]}) is not None, run.text)
