"""The trainer's loop under bad days: killed, stopped, disk full, parts missing; what comes after equals no bad day."""

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.trainer import checkpoint, optim, schedule
from ascendrun.programs.trainer.data import Batch, Buckets
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.strategies.parallel import wrap
from ascendrun.programs.trainer.task import Settings, Task
from tests.programs.conftest import alone


def thorough(value):
    return pytest.param(value, marks=pytest.mark.thorough)


EVERY_4 = {"save_steps": 4, "ranks": 2}


@pytest.fixture(scope="module")
def straight(tiny_once):
    """straight(way): the run that nothing happened to, on two ranks; made once."""
    made = {}

    def run(way):
        if way not in made:
            made[way] = tiny_once(strategy=way)
        return made[way]

    return run


@pytest.fixture(scope="module")
def stopped(tiny_once):
    """The folder of a sharded run that was stopped after step 14, saved at 12 and 14; to be copied."""
    return tiny_once(strategy="fsdp2", stop_at=[13, 0], save_steps=4).folder


def steps_saved(run):
    return [line["step"] for line in run.metrics() if line.get("event") == "checkpoint"]


def test_a_checkpoint_of_another_training_is_refused_with_what_differs_an_empty_option_too(tiny):
    tiny(max_steps=2, save_steps=1, identity="o/pre").succeed()
    again = tiny(max_steps=2, save_steps=1, identity="")
    assert again.wait() == [78] and "task was o/pre, is (none)" in again.text()


def test_a_checkpoint_in_the_form_of_earlier_zero3_is_refused(tiny):
    folder = tiny(max_steps=2, save_steps=2).succeed().folder / "ckpt"
    (old,) = folder.glob("step-*")
    kept, facts = checkpoint.load(old), checkpoint.facts_of(old)
    shutil.rmtree(old)
    state = {name: value for name, value in kept.items() if name != "counts"}
    checkpoint.save(folder, "step", 2, state, facts=facts)
    again = tiny(max_steps=4)
    assert again.wait() == [78] and "by an earlier release" in again.text()


def test_a_model_that_is_sharded_inside_each_of_two_hosts_learns_the_same(tiny):
    """Four ranks: two shards, each on two ranks."""
    options = {"ranks": 4, "dropout": 0.0, "max_steps": 6}
    ddp = tiny(name="ddp", **options).succeed()
    hsdp = tiny(name="hsdp", strategy="hsdp", shard_size=2, **options).succeed()
    assert hsdp.losses() == pytest.approx(ddp.losses(), rel=1e-5)
    refused = tiny(name="three", strategy="hsdp", shard_size=2, ranks=3)
    assert refused.wait() == [1, 1, 1] and "cannot be divided into groups of 2" in refused.error_files[0].read_text()


def test_all_ways_to_share_a_model_learn_the_same(straight, fork_server):
    fork_server.ask({"import": "deepspeed"})
    replicated = straight("ddp")
    for way in ("fsdp2", "zero3"):
        assert straight(way).losses() == pytest.approx(replicated.losses(), rel=1e-4), way
        for name, weight in straight(way).final().items():
            assert weight == pytest.approx(replicated.final()[name], rel=1e-2, abs=1e-4), (way, name)


def test_one_optimizer_serves_all_epochs_at_the_rate_that_is_told(straight):
    """S3-B2: optimizer and schedule began anew with every epoch. S3-B3: another schedule set rates of its own."""
    run = straight("ddp")
    told = [line["learning_rate"] for line in run.metrics() if "learning_rate" in line]
    kept = checkpoint.load(checkpoint.directories(run.folder / "ckpt", "step")[0][1])
    assert len(told) == 30 and set(kept["counts"].values()) == {30}
    assert told[:3] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01]) and told[3:] == sorted(told[3:], reverse=True)


def test_bfloat16_learns_nearly_what_float32_learns(tiny, straight):
    """S1-B2: words and places are numbers without a fraction, whatever the arithmetic is in."""
    half = tiny(ranks=2, dtype="bfloat16", max_steps=4).succeed()
    assert half.losses() == pytest.approx({step: straight("ddp").losses()[step] for step in half.losses()}, rel=0.02)


def test_gradients_are_clipped_to_the_norm_that_was_asked_for(tiny):
    """AdamW sees no common factor of them, unless it makes them smaller than the number that it adds."""
    begin = tiny(name="begin", learning_rate=0, max_steps=1).succeed().final()

    def moved(clip):
        final = tiny(name=f"clip-{clip}", max_grad_norm=clip, max_steps=5).succeed().final()
        return max(abs(after - before) for name in final for after, before in zip(final[name], begin[name]))

    assert moved(1e-20) < 0.005 < moved(1.0)


def test_frozen_weights_are_in_no_checkpoint(tiny):
    run = tiny(ranks=2, frozen=True, max_steps=2).succeed()
    assert "words.weight" not in run.final() and "head.weight" in run.final()


@pytest.mark.parametrize("way", [thorough("ddp"), "fsdp2"])
def test_a_stop_signal_to_one_rank_saves_and_ends_all_with_0_and_the_rest_is_the_same(tiny, straight, way):
    first = tiny(ranks=2, name="stopped", strategy=way, stop_at=[10, 1]).succeed()
    assert "ending: stopped" in first.text()
    assert steps_saved(first) == [11]
    second = tiny(ranks=2, name="stopped", strategy=way).succeed()
    assert "resumed at step 11/30" in second.text()
    assert second.losses() == straight(way).losses()
    assert second.final() == straight(way).final()


def test_time_that_is_up_ends_a_run_as_a_stop_does(tiny):
    run = tiny(ranks=2, max_time_s=1e-9).succeed()
    assert "ending: time limit" in run.text()
    assert steps_saved(run) == [1]


@pytest.mark.parametrize("way", ["ddp", thorough("fsdp2")])
def test_a_full_disk_is_told_the_last_good_checkpoint_stays_and_training_goes_on(tiny, way):
    run = tiny(strategy=way, full_disk=[5, 13], save_in_background=False, **EVERY_4).succeed()
    assert "the checkpoint of step 8 could not be written" in run.text()
    assert "older checkpoints are unchanged" in run.text()
    assert steps_saved(run) == [4, 16, 20, 24, 28, 30]
    assert not list((run.folder / "ckpt").glob(".*.tmp")), "nothing half written is left"


def test_a_best_model_that_cannot_be_written_holds_up_no_rank_and_is_written_later(tiny):
    run = tiny(strategy="fsdp2", eval_steps=3, best="score", full_disk=[7, 11], **EVERY_4).succeed()
    assert "the checkpoint of step 8 could not be written" in run.text()
    assert steps_saved(run) == [4, 12, 16, 20, 24, 28, 30]
    assert "best: 6" in run.text() and (run.folder / "ckpt" / "best-00000006").is_dir()


def test_a_disk_that_stays_full_leaves_a_checkpoint_to_go_on_from_and_a_stop_does_not_claim_to_be_saved(tiny, straight):
    full = tiny(name="full", full_disk=[5, 99], stop_at=[14, 0], **EVERY_4)
    assert full.wait() == [1, 1]
    assert "could not be written" in full.error_files[0].read_text()
    again = tiny(name="full", **EVERY_4).succeed()
    assert "resumed at step 4/30" in again.text()
    assert again.losses() == straight("ddp").losses()


def test_training_stops_at_a_failed_save_where_that_was_asked_for(tiny):
    run = tiny(full_disk=[5, 99], on_save_failure="stop", **EVERY_4)
    assert run.wait() == [1, 1]
    assert run.losses() and max(run.losses()) < 20
    assert "could not be written" in run.error_files[1].read_text()


@pytest.mark.parametrize(
    "damage", ["a rank's part is missing", "a part is changed", thorough("a part is cut"), thorough("no manifest")]
)
def test_a_sharded_checkpoint_that_is_not_whole_is_passed_over_and_said(tiny, straight, stopped, tmp_path, damage):
    shutil.copytree(stopped, tmp_path / "torn")
    newest = tmp_path / "torn" / "ckpt" / "step-00000014"
    part = newest / "shard-00001.pt"
    if damage == "no manifest":
        (newest / "manifest.json").unlink()
    elif damage == "a rank's part is missing":
        part.unlink()
    else:
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content if damage == "a part is changed" else content[:-1])
    again = tiny(name="torn", strategy="fsdp2", **EVERY_4).succeed()
    assert f"{newest} is skipped" in again.text()
    assert "resumed at step 12/30" in again.text()
    assert again.losses() == straight("fsdp2").losses()


@pytest.fixture
def apart(tmp_path):
    """The environment of two ranks on nodes that share no disk."""
    return {rank: {"ASCENDRUN_CHECKPOINT_DIR": str(tmp_path / f"node{rank}")} for rank in range(2)}


def test_nodes_that_share_no_disk_go_on_from_the_newest_that_all_of_them_have(tiny, straight, tmp_path, apart):
    """One node died after the other had named its part of step 14; what is left of 14 crowds out nothing newer."""
    options = {"name": "apart", "strategy": "fsdp2", "rank_env": apart, **EVERY_4}
    tiny(stop_at=[13, 0], **options).succeed()
    parts = {path.name for path in (tmp_path / "node1" / "step-00000014").iterdir()}
    assert parts == {"manifest.json", "common.pt", "shard-00001.pt"}
    (tmp_path / "node1" / "step-00000014").rename(tmp_path / "node1" / ".step-00000014.lost-1.tmp")
    second = tiny(stop_at=[12, 0], save_total_limit=1, **options).succeed()
    assert "resumed at step 12/30" in second.text()
    again = tiny(**options).succeed()
    assert "resumed at step 13/30" in again.text()
    assert again.losses() == straight("fsdp2").losses()
    assert again.final() == straight("fsdp2").final()


def test_nodes_in_another_order_send_each_other_their_parts_and_new_ones_are_told(tiny, straight, tmp_path, apart):
    options = {"name": "apart", "strategy": "fsdp2", "ranks": 2}
    tiny(rank_env=apart, stop_at=[1, 0], **options).succeed()
    swapped = tiny(rank_env={0: apart[1], 1: apart[0]}, stop_at=[5, 0], **options).succeed()
    assert "resumed at step 2/30" in swapped.text()
    assert swapped.losses().items() <= straight("fsdp2").losses().items()
    shutil.rmtree(tmp_path / "node0")
    shutil.rmtree(tmp_path / "node1")
    options["max_steps"] = 2
    tiny(rank_env=apart, **options).succeed()
    fresh = {0: apart[0], 1: {"ASCENDRUN_CHECKPOINT_DIR": str(tmp_path / "new")}}
    lines = tiny(rank_env=fresh, **options).succeed().out[0].read_text().splitlines()
    assert [line for line in lines if line.startswith("  rank ")] == ["  rank 0 has steps 2", "  rank 1 has none"]


def test_a_loss_that_is_no_number_stops_all_ranks_before_the_step_and_names_the_one(tiny):
    run = tiny(ranks=2, poison=[7, 1], save_steps=4)
    assert run.wait() == [1, 1]
    message = run.error_files[0].read_text()
    assert "step 8: the loss is nan on rank 1 (samples " in message
    assert max(run.losses()) == 7


def test_a_bad_loss_between_log_lines_is_found_a_step_later_and_no_checkpoint_has_it(tiny):
    for save_steps, saved in ((4, [4]), (9, [])):
        run = tiny(ranks=2, name=f"save-{save_steps}", poison=[7, 1], logging_steps=100, save_steps=save_steps)
        assert run.wait() == [1, 1]
        message = run.error_files[0].read_text()
        assert "step 8: the loss is nan on rank 1 (samples " in message and "rank 0" not in message
        assert steps_saved(run) == saved, "step 8 was to be saved, and step 9"


def test_rollouts_are_made_from_the_weights_of_their_step_and_made_again_after_a_kill(tiny):
    options = {"rollouts": 2, "ranks": 2, "max_steps": 12, "save_steps": 4}
    whole = tiny(name="whole", **options).succeed()
    tiny(name="broken", kill=[7, 1], **options).wait()
    again = tiny(name="broken", **options).succeed()
    assert "resumed at step 4/12" in again.text()
    assert (again.losses(), again.final()) == (whole.losses(), whole.final())
    stopped = tiny(name="stopped", stop_at=[4, 0], **options).succeed()
    assert steps_saved(stopped) == [4, 6], "not amid the steps that share rollouts"


def test_a_checkpoint_that_is_being_written_is_finished_when_the_next_loss_is_no_number(tiny):
    run = tiny(ranks=2, poison=[8, 1], save_steps=8)
    assert run.wait() == [1, 1]
    assert steps_saved(run) == [8]
    assert sorted(path.name for path in (run.folder / "ckpt").iterdir()) == [".epochs", "step-00000008"]


def test_a_step_in_which_nothing_is_to_be_learned_is_a_step_like_others(tiny):
    run = tiny(ranks=2, silent=[3, 5]).succeed()
    losses = run.losses()
    assert losses[4] is None and losses[5] is None and losses[6] > 0
    assert "step 4/30 epoch 0.4 loss - " in run.text()


def test_a_training_goes_on_over_other_ranks_and_in_another_strategy(tiny, fork_server):
    """Weights and moments are found by name and place, whichever ranks wrote them; dropout is by sample."""
    options = {"max_steps": 18}
    plain = tiny(ranks=2, name="plain", **options).succeed()
    ways = [("ddp", 2, 5), ("fsdp2", 3, 9), ("hsdp", 2, 13), ("ddp", 1, None)]
    for strategy, ranks, last in ways:
        stop = {"stop_at": [last, 0]} if last else {}
        run = tiny(ranks=ranks, name="ways", strategy=strategy, shard_size=ranks, **options, **stop).succeed()
    assert "resumed at step 14/18" in run.text()
    assert run.losses() == pytest.approx(plain.losses(), rel=1e-5)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_hpz", [thorough(False), True])
def test_zero3_continues_on_other_ranks_and_in_other_strategies(tiny, fork_server, is_hpz):
    """Each weight is divided, though it is small. Norms show the scale of gradients, to which AdamW is nearly blind."""
    fork_server.ask({"import": "deepspeed"})
    options = {"max_steps": 12, "persisted_elements": 0}
    plain = tiny(ranks=2, name="plain", **options).succeed()
    ways = [("zero3", 2, 1), ("ddp", 1, 3), ("zero3", 3, 5), ("zero3", 2, 7), ("fsdp2", 3, 9), ("zero3", 3, None)]
    for strategy, ranks, last in ways:
        stop = {"stop_at": [last, 0]} if last else {}
        size = ranks if is_hpz and strategy == "zero3" else 0
        run = tiny(ranks=ranks, name="ways", strategy=strategy, shard_size=size, **options, **stop).succeed()
    assert "resumed at step 10/12" in run.text()
    assert run.losses() == pytest.approx(plain.losses(), rel=1e-5)
    assert run.numbers("grad_norm") == pytest.approx(plain.numbers("grad_norm"), rel=1e-4)


def test_muons_momenta_and_cut_moments_go_from_rank_to_rank(tiny):
    options = {"dropout": 0.0, "max_steps": 10, "muon": True, "shard": True, "cut_elements": 64}
    plain = tiny(ranks=1, name="plain", **options).succeed()
    for ranks, last in ((4, 3), (2, 6), (3, None)):
        stop = {"stop_at": [last, 0]} if last else {}
        run = tiny(ranks=ranks, name="moved", **options, **stop).succeed()
    assert "resumed at step 7/10" in run.text()
    assert run.losses() == pytest.approx(plain.losses(), rel=1e-5)


def test_each_of_two_hosts_keeps_a_whole_model_that_is_sharded_inside_a_host(tiny, tmp_path):
    """Four ranks, two on each host; the disk of one host is lost."""
    hosts = {rank: {"ASCENDRUN_CHECKPOINT_DIR": str(tmp_path / f"host{rank // 2}")} for rank in range(4)}
    options = {"strategy": "hsdp", "shard_size": 2, "ranks": 4, "rank_env": hosts, "max_steps": 8}
    whole = tiny(name="whole", **{**options, "rank_env": {}}).succeed()
    tiny(name="lost", stop_at=[3, 0], **options).succeed()
    for host in ("host0", "host1"):
        kept = {path.name for path in (tmp_path / host / "step-00000004").iterdir()}
        assert kept == {"manifest.json", "common.pt", "shard-00000.pt", "shard-00001.pt"}
    shutil.rmtree(tmp_path / "host0")
    again = tiny(name="lost", **options).succeed()
    assert "resumed at step 4/8" in again.text()
    assert (again.losses(), again.final()) == (whole.losses(), whole.final())


def test_the_best_model_is_kept_through_a_crash_and_comes_back_at_the_end(tiny, straight):
    options = {"eval_steps": 3, "best": "score", "strategy": "fsdp2"}
    whole = tiny(ranks=2, name="whole", **options).succeed()
    assert "best: 6" in whole.text()
    assert whole.losses() == straight("fsdp2").losses(), "an evaluation, without dropout, leaves the training as it was"
    assert -9 in tiny(name="broken", kill=[14, 0], **options, **EVERY_4).wait()
    again = tiny(name="broken", **options, **EVERY_4).succeed()
    assert "best: 6" in again.text()
    assert again.final() == whole.final()
    assert sorted(path.name for path in (again.folder / "ckpt").iterdir()) == [
        ".epochs",
        "best-00000006",
        "step-00000028-e0001",
        "step-00000030-e0001",
    ]


def test_a_model_can_be_best_as_it_starts(tiny, straight):
    options = {"eval_steps": 10, "best": "score", "strategy": "fsdp2"}
    started = tiny(ranks=2, name="started", eval_on_start=True, **options).succeed()
    assert "best: 0" in started.text() and "best: 10" in tiny(ranks=2, name="not", **options).succeed().text()
    assert started.losses() == straight("fsdp2").losses()


def test_training_ends_early_when_no_evaluation_is_better(tiny):
    run = tiny(ranks=2, eval_steps=3, best="score", early_stopping_patience=3).succeed()
    assert "ending: early stopping" in run.text()
    assert max(run.losses()) == 15


def test_every_rank_says_where_its_time_went_and_rank_0_what_was_learnt(tiny):
    run = tiny(ranks=2, logging_steps=5, peak_tflops=0.001, flops_per_token=1e4).succeed()
    start, *lines = run.metrics()
    assert start["event"] == "start" and start["total_steps"] == 30 and start["world_size"] == 2
    times = {"step", "timestamp", "step_s", "data_s", "forward_s", "backward_s", "optimizer_s", "comm_s"}
    learnt = {"loss", "loss_even", "loss_odd", "learning_rate", "grad_norm", "tokens_per_s", "samples_per_s", "mfu"}
    assert times | learnt | {"device_memory_bytes"} <= set(lines[0])
    other = run.metrics(1)[1]
    assert times <= set(other) and "loss" not in other
    phases = sum(lines[1][name] for name in times if name.endswith("_s") and name not in ("timestamp", "step_s"))
    assert 0.5 * lines[1]["step_s"] < phases <= 1.01 * lines[1]["step_s"]
    assert lines[0]["samples_even"] + lines[0]["samples_odd"] == 30
    assert lines[-1]["event"] == "end"


def test_the_micro_batch_is_what_the_rank_with_the_least_room_can_take_and_learns_the_same(tiny):
    whole = tiny(ranks=2, name="whole", dropout=0.0).succeed()
    found = tiny(ranks=2, name="found", dropout=0.0, room=[7, 2]).succeed()
    assert "micro-batch of 4: rank 1 is out of memory" in found.text()
    assert "micro-batch found: 2" in found.text()
    assert found.losses() == pytest.approx(whole.losses(), rel=1e-4)
    none = tiny(ranks=2, name="none", room=[7, 0.5])
    assert none.wait() == [1, 1]
    assert "a single sample does not fit on the device of rank 1" in none.error_files[0].read_text()


def test_a_profile_of_a_few_steps_is_written_by_every_rank(tiny, tmp_path):
    tiny(ranks=2, max_steps=8, profile_dir=str(tmp_path / "trace"), profile_steps=2).succeed()
    assert all(list((tmp_path / "trace" / f"rank-{rank:05d}").glob("*.json*")) for rank in range(2))


# --- waits of the host for its device ---


class Reads(TorchDispatchMode):
    """The number of times that a value of a tensor was asked for, by operator."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class Noted(Task):
    """Fits a line; notes how often values were read when each step begins."""

    parts = ("even",)
    evaluations = {"often": 5, "seldom": 10}

    def __init__(self, reads):
        self.reads, self.seen, self.evaluated = reads, [], []

    def collate(self, units, step):
        numbers = torch.tensor([number for unit in units for number in unit], dtype=torch.float32)
        return Batch({"x": numbers[:, None] / 10}, weight=len(numbers), tokens=len(numbers), samples=len(numbers))

    def loss(self, model, tensors):
        self.seen.append(self.reads.count)
        total = functional.mse_loss(model(tensors["x"]), 2 * tensors["x"], reduction="sum")
        return total, {"even": (total.detach(), tensors["x"].sum())}

    def evaluate(self, name, step):
        self.evaluated.append((name, step))
        return {name: float(step)}


def test_no_value_is_read_in_a_step_that_logs_nothing(tmp_path):
    """Clipping, AdamW and Muon, the loss and its parts: none of them."""
    here = alone()
    module = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1))
    matrices = [weight for weight in module.parameters() if weight.ndim == 2]
    vectors = [weight for weight in module.parameters() if weight.ndim < 2]
    rate = schedule.scaled(0.01, schedule.cosine(20))
    plan = optim.OptimizerPlan([optim.Group(matrices, "muon", rate), optim.Group(vectors, "adamw", rate)])
    precision = Precision(torch.float32, torch.float32, False, "float32")
    engine = wrap(module, here, strategy="none", make_optimizer=lambda _: plan, precision=precision)
    with Reads() as reads:
        task = Noted(reads)
        settings = Settings(steps=20, logging_steps=10, save_in_background=False)
        rows = Buckets([1] * 40, batch_size=4, seed=1)
        Loop(here, engine, rows, task, settings, folder=tmp_path).run()
    assert len(task.seen) == 20 and len(set(task.seen)) == 1, task.seen
    assert task.evaluated == [("often", 5), ("often", 10), ("seldom", 10), ("often", 15), ("often", 20), ("seldom", 20)]
