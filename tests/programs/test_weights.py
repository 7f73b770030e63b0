"""Pretrained weights reach a model from files, each rank reading its own part."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ascendrun.programs.trainer.strategies.weights import InvalidWeightsError, read_into


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight
        self.adapter = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.zeros(()))


def test_weights_come_from_several_files_under_either_name_of_a_tied_one(tmp_path):
    words, scale = torch.randn(7, 4), torch.tensor(3.0)
    save_file({"base.head.weight": words}, tmp_path / "a.safetensors")
    save_file({"base.scale": scale}, tmp_path / "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"base.head.weight": "a.safetensors", "base.scale": "b.safetensors"}})
    )
    model = Tied()
    adapter = model.adapter.weight.clone()
    read_into(model, tmp_path, name_in_file=lambda name: None if "adapter" in name else f"base.{name}")
    assert torch.equal(model.words.weight, words) and model.scale == 3 and torch.equal(model.adapter.weight, adapter)


def test_files_that_do_not_fit_are_refused_with_what_is_missing(tmp_path):
    with pytest.raises(InvalidWeightsError, match="neither model.safetensors nor"):
        read_into(Tied(), tmp_path)
    save_file({"words.weight": torch.zeros(7, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidWeightsError, match="no file has the weight scale"):
        read_into(Tied(), tmp_path)
    save_file({"words.weight": torch.zeros(8, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidWeightsError, match=r"words.weight has shape \[8, 4\], expected \[7, 4\]"):
        read_into(Tied(), tmp_path, name_in_file=lambda name: name if "words" in name else None)


def test_a_sharded_model_made_without_weights_learns_as_a_replicated_one_from_the_same_files(tiny, tmp_path):
    alone = tiny(name="made", max_steps=2).succeed()
    save_file(torch.load(alone.folder / "final.pt"), tmp_path / "model.safetensors")
    options = {"load": str(tmp_path), "max_steps": 4, "dropout": 0.0, "ranks": 2}
    replicated = tiny(name="ddp", strategy="ddp", **options).succeed()
    sharded = tiny(name="fsdp2", strategy="fsdp2", **options).succeed()
    assert sharded.losses() == pytest.approx(replicated.losses(), rel=1e-4)
