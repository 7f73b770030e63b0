"""Which samples make which step: the same for any number of ranks and workers, every sample where it must be."""

import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from torch.nn import functional

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.data import IGNORED, Batch, Buckets, Loader, Packed, deal, pack_rows
from tests.lib.vcluster.processes import await_that, is_alive
from tests.programs.conftest import tiny_qwen2

LENGTHS = np.random.default_rng(0).integers(10, 200, 53).tolist()


def numbers_of(units):
    return [number for unit in units for number in unit]


def collate(units, step):
    numbers = numbers_of(units)
    return Batch(
        {"numbers": torch.tensor(numbers)},
        weight=float(len(numbers)),
        samples=len(numbers),
        tokens=sum(LENGTHS[i] for i in numbers),
    )


def plans():
    return [
        Buckets(LENGTHS, batch_size=5, window=3, seed=1),
        Packed(LENGTHS, row_tokens=256, batch_size=5, seed=1, window=20),
    ]


@pytest.mark.parametrize("plan", plans(), ids=["buckets", "packed"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batch", [0, 1, 2])
def test_every_sample_is_in_one_piece_of_one_rank_an_epoch(plan, world_size, micro_batch):
    for epoch in (0, 4):
        dealt = []
        for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
            pieces = [deal(plan.units(step), rank, world_size, micro_batch=micro_batch) for rank in range(world_size)]
            assert len({len(mine) for mine in pieces}) == 1, "ranks with unlike numbers of passes wait for each other"
            assert all(len(piece) <= (micro_batch or 99) for mine in pieces for piece in mine)
            dealt += [number for mine in pieces for piece in mine for number in numbers_of(piece)]
        assert sorted(dealt) == list(range(53))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_passes_by_tokens_hold_every_row_once_and_no_more_than_fit(world_size, micro_batch):
    plan, most = Buckets(LENGTHS, batch_size=20, window=1, seed=1), 300
    for step in range(plan.steps_per_epoch):
        units = plan.units(step)
        ranks = [
            deal(units, rank, world_size, micro_tokens=most, micro_batch=micro_batch, length_of=plan.length_of)
            for rank in range(world_size)
        ]
        assert len({len(mine) for mine in ranks}) == 1, "ranks with unlike numbers of passes wait for each other"
        pieces = [numbers_of(piece) for mine in ranks for piece in mine if piece]
        assert sorted(number for piece in pieces for number in piece) == sorted(numbers_of(units))
        assert all(len(piece) * max(LENGTHS[i] for i in piece) <= most for piece in pieces)
        assert all(len(piece) <= (micro_batch or 99) for piece in pieces)


def test_passes_by_tokens_need_little_padding_where_a_batch_needs_much():
    plan = Buckets(LENGTHS, batch_size=53, seed=1)
    pieces = [numbers_of(piece) for piece in deal(plan.units(0), 0, 1, micro_tokens=600, length_of=plan.length_of)]
    padded = sum(len(piece) * max(LENGTHS[i] for i in piece) for piece in pieces)
    assert padded < 1.15 * sum(LENGTHS) < 53 * max(LENGTHS) / 1.5


def test_a_row_longer_than_a_pass_goes_alone():
    plan = Buckets([500, 100, 100], batch_size=3, seed=1)
    pieces = deal(plan.units(0), 0, 1, micro_tokens=200, length_of=plan.length_of)
    assert [list(map(plan.length_of, piece)) for piece in pieces] == [[500], [100, 100]]


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: Buckets(LENGTHS, batch_size=5, seed=seed),
        lambda seed: Packed(LENGTHS, row_tokens=256, batch_size=5, seed=seed),
    ],
)
def test_an_order_follows_from_seed_and_step_whatever_was_asked_before(make):
    straight, jumping = make(3), make(3)
    steps = 3 * straight.steps_per_epoch
    orders = [list(straight.units(step)) for step in range(steps)]
    for step in (steps - 1, 0, steps // 2, 1):
        assert list(jumping.units(step)) == orders[step]
    assert orders[:5] != [list(make(4).units(step)) for step in range(5)]
    assert numbers_of(orders[0]) != numbers_of(orders[straight.steps_per_epoch])


def test_batches_hold_rows_of_like_length():
    lengths = np.random.default_rng(0).integers(10, 200, 400).tolist()

    def padding(plan):
        batches = [numbers_of(plan.units(step)) for step in range(plan.steps_per_epoch)]
        return sum(max(lengths[i] for i in batch) * len(batch) for batch in batches) / sum(lengths)

    assert padding(Buckets(lengths, batch_size=8, window=25, seed=1)) < 1.1
    assert padding(Buckets(lengths, batch_size=8, window=1, seed=1)) > 1.5


def test_packed_rows_are_nearly_full_and_never_too_full():
    lengths = np.random.default_rng(0).lognormal(4, 0.8, 2000).clip(4, 512).astype(int).tolist()
    plan = Packed(lengths, row_tokens=512, batch_size=4, seed=1)
    fills = [sum(lengths[i] for i in row) for row in plan.rows(0)]
    assert max(fills) <= 512
    assert np.mean(fills) > 0.97 * 512
    with pytest.raises(InvalidDataError, match="a sample of 600 tokens does not fit in sequences of 512"):
        Packed([600], row_tokens=512, batch_size=1, seed=0)


def test_a_rank_without_a_sample_gets_a_stand_in_that_weighs_nothing():
    loader = Loader(Buckets([3], batch_size=1, seed=0), collate, rank=1, world_size=2, micro_batch=0, steps=1)
    share = loader.share(0)
    assert (share.weight, share.tokens, share.samples, share.units) == (0.0, 0, 0, [])
    assert share.pieces[0].tensors["numbers"].tolist() == [0]
    loader.close()


def whose_parent(units, step):
    return Batch({"pids": torch.tensor([os.getpid()])}, weight=1.0, tokens=1, samples=1)


def test_a_worker_ignores_the_stop_signal_and_dies_with_its_rank():
    read, write = os.pipe()
    rank = os.fork()
    if rank == 0:
        loader = Loader(
            Buckets(LENGTHS, batch_size=5, seed=1),
            whose_parent,
            rank=0,
            world_size=1,
            micro_batch=0,
            steps=9,
            workers=1,
            context=multiprocessing.get_context("fork"),
        )
        worker = int(loader.share(0).pieces[0].tensors["pids"])
        os.kill(worker, signal.SIGTERM)
        loader.share(3)
        os.write(write, str(worker).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    worker = int(os.read(read, 20))
    os.waitpid(rank, 0)
    await_that(lambda: not is_alive(worker), f"worker {worker} ends")


def test_two_worker_processes_and_a_thread_deal_the_same_shares():
    def shares(**how):
        loader = Loader(
            Buckets(LENGTHS, batch_size=5, seed=1), collate, rank=1, world_size=2, micro_batch=2, steps=20, **how
        )
        found = [[piece.tensors["numbers"].tolist() for piece in loader.share(step).pieces] for step in range(2, 20)]
        loader.close()
        return found

    assert shares() == shares(workers=2, context=multiprocessing.get_context("fork"))


# --- packed rows cost one pass and give the loss of their samples one by one ---


RNG = np.random.default_rng(5)
IDS = [RNG.integers(3, 50, length).tolist() for length in (9, 4, 7, 12, 1, 5)]
LABELS = [[IGNORED if i < 2 else word for i, word in enumerate(ids)] for ids in IDS]


@pytest.fixture(scope="module")
def model():
    return tiny_qwen2(vocab_size=50).double()


def loss_of(model, ids, labels, **more):
    logits = model(input_ids=ids, **more).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def test_the_loss_and_gradients_of_packed_rows_are_those_of_the_samples_one_by_one(model):
    """S3-B7: nothing was packed, for want of a way that learns the same."""
    alone = sum(
        loss_of(model, torch.tensor([ids]), torch.tensor([labels])) for ids, labels in zip(IDS, LABELS) if len(ids) > 1
    )
    wanted = gradients(model, alone)
    rows = Packed([len(ids) for ids in IDS], row_tokens=16, batch_size=9, seed=0).units(0)
    assert max(len(row) for row in rows) > 1
    batch = pack_rows(rows, IDS, LABELS, pad_id=0, multiple=5)
    packed = loss_of(model, batch["ids"], batch["labels"], position_ids=batch["positions"], segments=batch["segments"])
    torch.testing.assert_close(packed, alone)
    torch.testing.assert_close(gradients(model, packed), wanted)


def test_without_segments_neighbours_would_be_seen(model):
    batch = pack_rows([(0, 2)], IDS, LABELS, pad_id=0)
    more = {"position_ids": batch["positions"], "segments": batch["segments"]}
    usual = model(input_ids=batch["ids"], **more).logits[:, 9:]
    changed = batch["ids"].clone()
    changed[0, :9] = 7
    other = model(input_ids=changed, **more).logits[:, 9:]
    torch.testing.assert_close(usual, other)
    naked = model(input_ids=changed).logits[:, 9:]
    assert not torch.allclose(naked, other, atol=1e-4)


def test_positions_begin_anew_and_no_sample_foretells_the_next():
    batch = pack_rows([(1, 4), (5,)], IDS, LABELS, pad_id=0, multiple=4)
    assert batch["ids"].shape == (2, 8)
    assert batch["positions"][0].tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert batch["numbers"].tolist() == [[1, 1, 1, 1, 2, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]]
    assert batch["segments"].lengths == (4, 1, 3, 5, 3)
    assert batch["labels"][0, 4] == IGNORED
