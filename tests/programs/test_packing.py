"""Packed rows cost one pass and give the loss of their samples one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

from ascendrun.programs.devices import attention
from ascendrun.programs.trainer.data import Packed
from ascendrun.programs.trainer.packing import IGNORED, pack_rows

RNG = np.random.default_rng(5)
IDS = [RNG.integers(3, 50, length).tolist() for length in (9, 4, 7, 12, 1, 5)]
LABELS = [[IGNORED if i < 2 else word for i, word in enumerate(ids)] for ids in IDS]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention.register(),
    )
    return Qwen2ForCausalLM(config).double()


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
