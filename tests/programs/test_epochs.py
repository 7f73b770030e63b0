"""A replaced attempt that still runs cannot change, remove or pass off anything of its successor."""

import json
import os
import shutil

import pytest
import torch

from ascendrun.programs.trainer import checkpoint
from ascendrun.programs.trainer.checkpoint import Claim, SupersededError

STATE = {"weights": torch.arange(10.0)}
EVERY_4 = {"save_steps": 4, "ranks": 2}


def claimed(parent, number, tag=""):
    claim = Claim(parent, number, f"token-{number}", tag)
    assert claim.take()
    return claim


def names(parent):
    return sorted(path.name for path in parent.glob("[!.]*-*"))


def test_a_number_is_claimed_once_and_a_claim_without_a_checkpoint_is_no_constraint(tmp_path):
    first = claimed(tmp_path, 3)
    assert not Claim(tmp_path, 3, "another").take()
    assert checkpoint.starts(tmp_path) == {3: None} and checkpoint.newest_epoch(tmp_path) == 3
    first.begin(12, "save-1")
    assert checkpoint.starts(tmp_path) == {3: 12}
    (tmp_path / ".epochs" / "000004.json").write_text("")  # killed between the claim and its content
    assert checkpoint.starts(tmp_path) == {3: 12, 4: None}


def test_names_of_releases_without_epochs_are_epoch_0_and_are_loaded(tmp_path):
    assert checkpoint.newest_epoch(tmp_path) == -1
    checkpoint.save(tmp_path, "step", 4, STATE)
    assert checkpoint.newest_epoch(tmp_path) == 0
    checkpoint.save(tmp_path, "step", 4, STATE, claim=claimed(tmp_path, 1))
    checkpoint.save(tmp_path, "step", 2, STATE, claim=Claim(tmp_path, 1, "token-1"))
    folders = [folder.name for _, folder in checkpoint.directories(tmp_path, "step")]
    assert folders == ["step-00000004-e0001", "step-00000004", "step-00000002-e0001"]


@pytest.mark.parametrize("moment", ["before the parts", "before the name", "before pruning"])
def test_a_successor_at_any_moment_of_a_save_keeps_all_that_it_has(tmp_path, moment):
    old = claimed(tmp_path, 0)
    checkpoint.save(tmp_path, "step", 4, STATE, claim=old)

    def succeed():
        new = claimed(tmp_path, 1)
        new.begin(4, "")
        for step in (6, 8):
            checkpoint.save(tmp_path, "step", step, STATE, claim=new)
        (tmp_path / ".step-00000010-e0001.x.tmp").mkdir()

    if moment == "before the parts":
        succeed()
    fresh = checkpoint.open_fresh(tmp_path, "step", 12, "x", claim=old)
    parts = {checkpoint.COMMON: checkpoint.write_part(fresh, checkpoint.COMMON, STATE)}
    if moment == "before the name":
        succeed()
    if moment == "before pruning":
        checkpoint.commit(fresh, "step", 12, parts, facts={}, claim=old)
        succeed()
        checkpoint.prune(tmp_path, newest=12, keep=1, best_steps=[], epoch=0)
        checkpoint.clear_leftovers(tmp_path, epoch=0)
    else:
        with pytest.raises(SupersededError):
            checkpoint.commit(fresh, "step", 12, parts, facts={}, claim=old)
    assert {"step-00000006-e0001", "step-00000008-e0001"} <= set(names(tmp_path))
    assert (tmp_path / ".step-00000010-e0001.x.tmp").is_dir()
    assert all(checkpoint.fault(folder) is None for _, folder in checkpoint.directories(tmp_path, "step"))


def test_what_a_frozen_writer_names_after_its_successor_began_is_never_loaded_and_pruned(tmp_path):
    """It was frozen between the check and the rename."""
    checkpoint.save(tmp_path, "step", 4, STATE)
    new = claimed(tmp_path, 1)
    new.begin(4, "")
    checkpoint.save(tmp_path, "step", 6, STATE, claim=new)
    checkpoint.save(tmp_path, "best", 8, STATE)
    checkpoint.save(tmp_path, "step", 12, STATE)
    line = checkpoint.starts(tmp_path)
    assert not checkpoint.is_on_line(0, 12, line)
    assert checkpoint.is_on_line(0, 4, line) and checkpoint.is_on_line(1, 6, line)
    checkpoint.prune(tmp_path, newest=6, keep=5, best_steps=[8], epoch=1)
    assert names(tmp_path) == ["best-00000008", "step-00000004", "step-00000006-e0001"]


def test_of_two_best_models_of_a_step_the_one_on_the_line_is_read(tmp_path):
    checkpoint.save(tmp_path, "best", 6, STATE)
    for number in (1, 2):
        claim = claimed(tmp_path, number)
        claim.begin(4 if number == 1 else 8, "")
        checkpoint.save(tmp_path, "best", 6, STATE, claim=claim)
    assert checkpoint.best_folder(tmp_path, 6).name == "best-00000006-e0002"
    shutil.rmtree(tmp_path / "best-00000006-e0002")
    assert checkpoint.best_folder(tmp_path, 6).name == "best-00000006-e0001"


def test_an_earlier_attempt_of_the_same_run_that_starts_late_does_not_supersede(tmp_path):
    claimed(tmp_path, 0, "run-j-0001.2")
    assert Claim(tmp_path, 1, "x", "run-j-0001.1").is_late()
    assert not Claim(tmp_path, 1, "x", "run-j-0001.3").is_late()
    assert not Claim(tmp_path, 1, "x", "run-j-0007.1").is_late()
    assert not Claim(tmp_path, 1, "x", "").is_late()


def test_a_superseded_training_ends_on_all_ranks_with_75_and_saves_nothing_more(tiny, tmp_path):
    run = tiny(superseded_at=[5, 0], save_in_background=False, **EVERY_4)
    assert run.wait() == [75, 75]
    assert all("SupersededError" in file.read_text() for file in run.error_files)
    assert names(run.folder / "ckpt") == ["step-00000004"]
    assert not list((run.folder / "ckpt").glob(".step*"))


def test_a_late_first_attempt_ends_before_its_first_step(tiny, tmp_path):
    env = {"ASCENDRUN_CHECKPOINT_DIR": str(tmp_path / "common")}
    second = {rank: {**env, "ASCENDRUN_RUN_ID": "run.2"} for rank in range(2)}
    first = {rank: {**env, "ASCENDRUN_RUN_ID": "run.1"} for rank in range(2)}
    tiny(name="second", max_steps=4, rank_env=second, **EVERY_4).succeed()
    late = tiny(name="first", max_steps=8, rank_env=first, **EVERY_4)
    assert late.wait() == [75, 75] and not late.losses()
    assert os.listdir(tmp_path / "common" / ".epochs") == ["000000.json"]


def test_a_step_that_was_set_aside_is_passed_over_and_not_used_later(tiny):
    tiny(stop_at=[8, 0], **EVERY_4).succeed()  # saved at 4, 8 and 9
    skip = {rank: {"ASCENDRUN_RESUME_SKIP": "9,7"} for rank in range(2)}
    again = tiny(rank_env=skip, stop_at=[9, 0], **EVERY_4).succeed()
    assert "resumed at step 8/30" in again.text() and "step-00000009 is skipped" in again.text()
    content = json.loads((again.folder / "ckpt" / ".epochs" / "000001.json").read_text())
    assert (content["from_step"], names(again.folder / "ckpt")) == (8, ["step-00000008", "step-00000010-e0001"])
