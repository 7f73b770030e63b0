"""Two steps of the trainer beside a plain loop of torch, and what must differ between steps, ranks and uses."""

import json
import random
import time
import traceback
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ascendrun.programs.devices.accelerator import open_accelerator
from ascendrun.programs.devices.attention import Segments
from ascendrun.programs.qwen_lora import base
from ascendrun.programs.qwen_lora.sft_task import Rows, forward
from ascendrun.programs.trainer.data import Batch, Loader, Share, keys_of
from ascendrun.programs.trainer.dropout import drop_by_sample, pass_of
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.shards import Encoded
from ascendrun.programs.trainer.strategies.fsdp2 import shard
from ascendrun.programs.trajectory.data import prepare
from ascendrun.programs.trajectory.train import unlabelled
from tests.programs import reduced
from tests.programs.conftest import alone, options_of


@pytest.fixture
def here():
    return alone()


def test_two_steps_are_those_of_a_plain_loop(here, tmp_path):
    """Weighted rows, micro-batches, clipping, warm-up, decay of matrices only. Of ours: the rows and first weights."""
    x, y = reduced.rows()
    plain = reduced.model()
    matrices = [weight for weight in plain.parameters() if weight.ndim == 2]
    vectors = [weight for weight in plain.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98))
    for step, rate in enumerate((0.1 * 1 / 4, 0.1 * 2 / 4)):
        numbers = range(step, reduced.ROWS, 2)
        weights = torch.tensor([[1.0 + number % 3] for number in numbers])
        loss = ((plain(x[list(numbers)]) - y[list(numbers)]).square() * weights).sum() / weights.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    ours = reduced.train(here, reduced.Squares(), tmp_path)
    for mine, wanted in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def test_an_evaluation_has_no_dropout_and_the_training_goes_on_with_it(here, tmp_path):
    task = reduced.Squares()
    module = reduced.train(here, task, tmp_path, eval_steps=1)
    assert len(task.modes) == 2 * len(list(module.modules())) and not any(task.modes)
    assert all(each.training for each in module.modules())


def test_the_last_step_is_evaluated_whatever_the_cadence(here, tmp_path):
    task = reduced.Squares()
    module = reduced.train(here, task, tmp_path, eval_steps=reduced.STEPS + 1)
    assert len(task.modes) == len(list(module.modules()))


def test_the_time_of_an_evaluation_is_none_of_the_training(here, tmp_path, monkeypatch):
    """An evaluation after the first of two steps takes a week."""
    clock, passed_s = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed_s[0])
    task, lines = reduced.Squares(), []
    monkeypatch.setattr(here, "write", lines.append)
    monkeypatch.setattr(task, "evaluate", lambda name, step: passed_s.append(passed_s.pop() + 6e5) or {"loss": 0.0})
    reduced.train(here, task, tmp_path, eval_steps=1, logging_steps=2)
    (speed,) = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
    assert speed > 2 * reduced.ROWS / 6e5


@pytest.mark.parametrize("is_low, best", [(True, 1), (False, 2)])
def test_the_best_model_is_that_of_the_lowest_or_highest_score(here, tmp_path, monkeypatch, is_low, best):
    task = reduced.Squares()
    monkeypatch.setattr(task, "evaluate", lambda name, step: {"score": float(step)})
    reduced.train(here, task, tmp_path, eval_steps=1, best="score", best_is_low=is_low)
    found = [json.loads(path.read_text())["facts"] for path in tmp_path.glob("*/manifest.json")]
    assert {facts["best_step"] for facts in found if "best_step" in facts} == {best}


class Padded(Loader):
    """As for a rank with fewer rows than others: its last pass is a row without weight."""

    def share(self, step):
        share = super().share(step)
        return Share.of(step, share.units, [*share.pieces, Batch(share.pieces[0].tensors, 0.0, 0, 0)])


def test_a_row_that_stands_in_for_an_empty_pass_teaches_nothing(here, tmp_path):
    def weights(kind):
        task = reduced.Squares()
        rows = kind(reduced.Order(), task.collate, rank=0, world_size=1, micro_batch=2, steps=reduced.STEPS)
        return list(reduced.train(here, task, tmp_path / kind.__name__, source=rows).parameters())

    assert all(map(torch.equal, weights(Padded), weights(Loader)))


def test_gradients_of_all_buckets_are_the_mean_of_those_of_the_ranks(launch):
    assert "equal in 3 buckets" in launch("reduced", ["buckets"], ranks=2).succeed().text()


def test_a_seed_writes_no_stack_for_devices_that_are_not_there(here, monkeypatch):
    """As torch.manual_seed does at each step, for each kind of device that is not initialized."""
    stacks: list[object] = []
    monkeypatch.setattr(traceback, "format_stack", lambda *given: stacks.append(given) or [])
    here.accelerator.seed(7)
    assert torch.initial_seed() == 7 and stacks == []


def test_each_step_of_each_rank_has_random_numbers_of_its_own(launch):
    """Micro-batches of one step go on with the numbers of the step."""
    text = launch("reduced", ["seeds"], ranks=2).succeed().text()
    assert f"{2 * reduced.STEPS} seeds of {2 * reduced.STEPS * 2} steps" in text


@pytest.mark.parametrize("rank", range(4))
def test_ranks_beside_each_other_hold_a_model_of_hsdp_together(rank):
    """Ranks of one host are numbered one after the other; between hosts only gradients are exchanged."""
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        here = Runtime(rank, rank % 2, 4, None, open_accelerator("cpu", 0))
        group = shard(nn.Linear(4, 4), here, reduced.FLOAT, offload=False, shard_size=2)
        assert dist.get_process_group_ranks(group) == [rank - rank % 2, rank - rank % 2 + 1]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("count", [2, 3])
def test_samples_in_one_row_have_the_loss_that_each_has_alone(count):
    torch.manual_seed(2)
    model = base.build(base.shape_config("tiny", vocab_size=64)).eval()
    samples = []
    for length in (5, 9, 7)[:count]:
        ids = torch.randint(0, 64, (length,)).tolist()
        samples.append(Encoded(ids, ids, 0))
    rows = Rows(samples, ("all",), 0, 1)
    with torch.no_grad():
        packed = forward(model, rows.batch([tuple(range(count))]).tensors).sum()
        alone = sum(forward(model, rows.batch([(number,)]).tensors).sum() for number in range(count))
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_pretraining_reads_no_ship_of_another_split():
    ships = {name: [f"a ship of {name}"] for name in ("train", "val", "test", "unlabelled")}
    assert unlabelled(SimpleNamespace(encoded=ships)) == ["a ship of train", "a ship of unlabelled"]


def test_unlabelled_tracks_of_validation_and_test_ships_are_in_no_training(tmp_path):
    """Each ship has two tracks with its class and one without."""
    chance = random.Random(3)
    with open(tmp_path / "texts.jsonl", "w") as file:
        for track in range(60):
            words = [f"W_{chance.randrange(40)}" for _ in range(30)]
            row = {"text": " ".join(words), "ship": f"ship {track // 3}", "source_file": f"{track}.txt"}
            file.write(json.dumps(row if track % 3 == 2 else {**row, "label": track // 3 % 2}) + "\n")
    given = f"--data_path={tmp_path / 'texts.jsonl'}", "--val_size=0.2", "--test_size=0.2"
    records = prepare(options_of("trajectory", *given)).records
    ships = {name: {record.ship for record in part} for name, part in records.items()}
    assert ships["val"] and ships["test"] and ships["unlabelled"] == ships["train"]
    assert sum(record.label is None for record in records["unlabelled"]) == len(ships["train"])


def dropped(units, lengths, *, step=3, width=64):
    """What two modules leave of ones, in rows of samples of these lengths, padded to the longest."""
    size = max(map(sum, lengths))
    tensors = {"ids": torch.zeros(len(units), size, dtype=torch.int64), "segments": Segments.of_rows(lengths, size)}
    batch = Batch(tensors, 1.0, 1, 1, keys=keys_of(units, tensors))
    modules = nn.ModuleList([nn.Dropout(0.25), nn.Dropout(0.25)])
    drop_by_sample(modules)
    with pass_of(batch, torch.device("cpu"), seed=1, step=step):
        return [module(torch.ones(len(units), size, width)) for module in modules]


def test_a_sample_drops_the_same_numbers_in_any_row():
    (alone, other), (packed, _) = dropped([(7,)], [[300]]), dropped([(3, 7), (5,)], [[200, 300], [400]])
    assert torch.equal(packed[0, 200:500], alone[0])
    for differs in (other[0], dropped([(7,)], [[300]], step=4)[0][0], dropped([(8,)], [[300]])[0][0]):
        assert (alone[0] == differs).float().mean() < 0.7
    assert set(alone.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    for fractions in (alone, alone[0].mean(0), alone[0].mean(1)):
        assert float((fractions * 0.75).mean()) == pytest.approx(0.75, abs=0.01)
    assert float((alone[0] > 0).float().mean(0).std()) == pytest.approx((0.25 * 0.75 / 300) ** 0.5, rel=0.35)
    assert float((alone[0] > 0).float().mean(1).std()) == pytest.approx((0.25 * 0.75 / 64) ** 0.5, rel=0.2)
