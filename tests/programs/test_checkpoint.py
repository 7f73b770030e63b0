"""Checkpoints that are whole or not there."""

import json
import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ascendrun.programs.trainer import checkpoint
from ascendrun.programs.trainer.checkpoint import replace_text, replacing
from ascendrun.programs.trainer.strategies.fsdp2 import InvalidWeightsError, read_into

STATE = {"weights": torch.arange(1000.0), "step": 3, "history": [{"a": 1.5}]}


def test_what_is_saved_is_loaded_and_the_newest_wins(tmp_path):
    checkpoint.save(tmp_path, "step", 2, {"step": 2})
    checkpoint.save(tmp_path, "step", 10, STATE)
    (_, newest), (_, older) = checkpoint.directories(tmp_path, "step")
    assert (newest.name, older.name) == ("step-00000010", "step-00000002")
    loaded = checkpoint.load(newest)
    assert torch.equal(loaded["weights"], STATE["weights"]) and loaded["history"] == STATE["history"]


@pytest.mark.parametrize(
    "damage", ["truncate", "flip", "no state", "no manifest", "half a manifest", "empty manifest", "another fact"]
)
def test_a_damaged_checkpoint_has_a_fault_and_the_one_before_it_none(tmp_path, damage):
    old = checkpoint.save(tmp_path, "step", 1, STATE)
    new = checkpoint.save(tmp_path, "step", 2, STATE, facts={"best_step": 2, "lr": 0.1})
    state, manifest = new / checkpoint.COMMON, new / checkpoint.MANIFEST
    if damage == "truncate":
        os.truncate(state, state.stat().st_size - 1)
    elif damage == "flip":
        data = bytearray(state.read_bytes())
        data[len(data) // 2] ^= 1
        state.write_bytes(data)
    elif damage == "no state":
        state.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "another fact":
        manifest.write_text(manifest.read_text().replace('"best_step": 2', '"best_step": 6'))
    else:
        manifest.write_text("" if damage == "empty manifest" else manifest.read_text()[:40])
    assert checkpoint.fault(new) and checkpoint.fault(old) is None


def test_a_writer_killed_at_any_moment_leaves_the_older_checkpoint_or_a_whole_new_one(tmp_path):
    checkpoint.save(tmp_path, "step", 1, STATE)
    for delay_s in (0.0, 0.002, 0.004, 0.006, 0.01, 0.02):
        pid = os.fork()
        if pid == 0:
            for step in range(2, 1000):
                checkpoint.save(tmp_path, "step", step, STATE)
            os._exit(0)
        time.sleep(delay_s)  # the moment of the kill is the point of this test
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        faults = [checkpoint.fault(folder) for _, folder in checkpoint.directories(tmp_path, "step")]
        assert faults and set(faults) == {None}
    checkpoint.clear_leftovers(tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_a_state_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    with pytest.raises(Exception, match="pickle"):
        checkpoint.save(tmp_path, "step", 1, {"bad": lambda: None})
    assert list(tmp_path.iterdir()) == []


def test_pruning_keeps_the_newest_and_the_best_that_they_name(tmp_path):
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3)):
        if step == best:
            checkpoint.save(tmp_path, "best", best, STATE)
        checkpoint.save(tmp_path, "step", step, STATE, facts={"best_step": best})
    checkpoint.save(tmp_path, "best", 5, STATE)
    checkpoint.prune(tmp_path, newest=4, keep=2, best_steps=[5])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best-00000003",
        "best-00000005",
        "step-00000003",
        "step-00000004",
    ]


def test_pruning_counts_only_what_led_to_the_checkpoint_just_saved(tmp_path):
    """Newer ones are of a course that was left: torn, not on all nodes, or of a training begun anew."""
    for step in (8, 12, 14, 11):
        checkpoint.save(tmp_path, "step", step, STATE)
    checkpoint.prune(tmp_path, newest=11, keep=2, best_steps=[])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000008", "step-00000011"]


def test_leftovers_that_their_owners_remove_meanwhile_are_no_trouble(tmp_path):
    """The ranks of a node remove their marks while its first rank cleans up; it died of that, once in a while."""
    marks = [tmp_path / f".seen-{number}.tmp" for number in range(400)]

    def owners(both):
        both.wait()
        for mark in reversed(marks):
            mark.unlink(missing_ok=True)

    for _ in range(5):
        for mark in marks:
            mark.touch()
        both = threading.Barrier(2)
        others = threading.Thread(target=owners, args=(both,))
        others.start()
        try:
            both.wait()
            checkpoint.clear_leftovers(tmp_path)
        finally:
            others.join()
    assert not list(tmp_path.iterdir())


def test_no_folder_means_no_checkpoint(tmp_path):
    assert checkpoint.directories(tmp_path / "absent", "step") == []


# --- files that are whole or not there ---


def test_a_file_is_replaced_when_it_is_whole_in_a_folder_that_may_be_new(tmp_path):
    path = tmp_path / "new" / "report.json"
    replace_text(path, "one")
    with replacing(path) as fresh:
        fresh.write_text("two")
        assert path.read_text() == "one"
    assert path.read_text() == "two" and list(path.parent.iterdir()) == [path]


def test_a_file_that_could_not_be_written_leaves_the_old_one_and_nothing_beside_it(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    with pytest.raises(OSError), replacing(path) as fresh:
        fresh.write_text("half")
        raise OSError("no space left")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_two_writers_at_once_do_not_meet(tmp_path):
    path = tmp_path / "model.pt"
    with replacing(path) as one, replacing(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


# --- pretrained weights reach a model from files, each rank reading its own part ---


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
