"""Checkpoints that are whole or not there."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from ascendrun.programs.trainer import checkpoint
from ascendrun.programs.trainer.checkpoint import replace_text, replacing

STATE = {"weights": torch.arange(1000.0), "step": 3, "history": [{"a": 1.5}]}


def test_what_is_saved_is_loaded_and_the_newest_wins(tmp_path):
    checkpoint.save(tmp_path, "step", 2, {"step": 2})
    checkpoint.save(tmp_path, "step", 10, STATE)
    (_, newest), (_, older) = checkpoint.listed(tmp_path, "step")
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
        faults = [checkpoint.fault(folder) for _, folder in checkpoint.listed(tmp_path, "step")]
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
    assert checkpoint.listed(tmp_path / "absent", "step") == []


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
