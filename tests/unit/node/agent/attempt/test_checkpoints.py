"""The list of checkpoints of a directory: names, layouts that need no library, and the line of the epochs."""

import hashlib
import json
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest

from ascendrun.node.agent.attempt.checkpoints import listing, pickle_scalars, set_back_pointer


def ours(parent: Path, name: str, *, here: tuple[str, ...] = ("common.pt",), parts: tuple[str, ...] = ()) -> Path:
    folder = parent / name
    folder.mkdir(parents=True)
    for part in here:
        (folder / part).write_bytes(b"x" * 10)
    every = {part: {"bytes": 10, "sha256": "-"} for part in (parts or here)}
    manifest = {"step": 1, "facts": {"save": "a-1"}, "parts": every, "here": list(here)}
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest}))
    return folder


def zipped(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}.")


def found(folder: Path, **more: int) -> list[tuple[str, bool, str]]:
    answer = listing({"folder": str(folder), **more})["checkpoints"]
    return [(Path(each["path"]).name, each["whole"], each["why"]) for each in answer]


def test_no_directory_and_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    assert found(tmp_path / "absent") == []
    for name in ("step-1", "checkpoint-x", "epoch_3", ".step-00000004.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000001").write_text("a file")
    assert found(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut", "gone", "no manifest", "other manifest", "half a manifest"])
def test_a_damaged_checkpoint_of_ours_is_listed_with_the_reason(tmp_path: Path, damage: str) -> None:
    ours(tmp_path, "step-00000004")
    newest = ours(tmp_path, "step-00000008-e0001", here=("common.pt", "shard-00000.pt"))
    part, manifest = newest / "common.pt", newest / "manifest.json"
    if damage == "cut":
        part.write_bytes(b"x" * 9)
    elif damage == "gone":
        part.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        text = manifest.read_text()
        manifest.write_text(text.replace("a-1", "a-2") if damage == "other manifest" else text[:40])
    (name, is_whole, why), older = found(tmp_path)
    assert name == "step-00000008-e0001" and not is_whole and why
    assert older == ("step-00000004", True, "")


def test_parts_here_and_all_parts_are_told(tmp_path: Path) -> None:
    ours(tmp_path, "step-00000004", here=("shard-00001.pt",), parts=("common.pt", "shard-00000.pt", "shard-00001.pt"))
    (entry,) = listing({"folder": str(tmp_path)})["checkpoints"]
    assert entry["parts"] == ["shard-00001.pt"] and len(entry["of"]) == 3
    assert (entry["step"], entry["save"], entry["bytes"], entry["whole"]) == (4, "a-1", 10, True)


def test_what_a_replaced_attempt_named_late_is_off_the_line(tmp_path: Path) -> None:
    for name in ("step-00000004", "step-00000006-e0001", "step-00000012"):
        ours(tmp_path, name)
    (tmp_path / ".epochs").mkdir()
    (tmp_path / ".epochs" / "000001.json").write_text('{"from_step": 4}')
    (tmp_path / ".epochs" / "000002.json").write_text('{"from_step": null}')
    (tmp_path / ".epochs" / "000003.json").write_text("")
    assert found(tmp_path) == [
        ("step-00000012", False, "replaced"),
        ("step-00000006-e0001", True, ""),
        ("step-00000004", True, ""),
    ]


def test_a_limit_counts_complete_ones(tmp_path: Path) -> None:
    for step in range(1, 9):
        folder = ours(tmp_path, f"step-{step:08d}")
        if step == 7:
            (folder / "common.pt").unlink()
    assert [name[-1] for name, _, _ in found(tmp_path, limit=2)] == ["8", "7", "6"]


def test_megatrons_rank_folders_are_those_of_the_step_before(tmp_path: Path) -> None:
    """The layout is taken from the source of Megatron-LM (megatron/training/checkpointing.py), not from a run."""
    for step in (10, 20):
        for rank in ("mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"):
            zipped(tmp_path / f"iter_{step:07d}" / rank / "model_optim_rng.pt")
    whole = [("iter_0000020", True, ""), ("iter_0000010", True, "")]
    assert found(tmp_path) == whole
    rank = tmp_path / "iter_0000020" / "mp_rank_01_001"
    shutil.rmtree(rank)
    assert found(tmp_path) == [("iter_0000020", False, "missing"), whole[1]]
    rank.mkdir()
    assert found(tmp_path) == [("iter_0000020", False, "missing"), whole[1]]
    zipped(rank / "model_optim_rng.pt")
    zipped(rank / "distrib_optim.pt")
    assert found(tmp_path) == whole
    (rank / "distrib_optim.pt").write_bytes(b"PK\x03\x04 cut")
    assert found(tmp_path) == [("iter_0000020", False, "wrong-size"), whole[1]]


def test_a_layout_that_changed_is_taken_when_a_second_checkpoint_has_it(tmp_path: Path) -> None:
    """A job on half the ranks writes fewer folders than before."""
    for step, ranks in ((10, 2), (20, 1)):
        for rank in range(ranks):
            zipped(tmp_path / f"iter_{step:07d}" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    assert [is_whole for _, is_whole, _ in found(tmp_path)] == [False, True]
    zipped(tmp_path / "iter_0000030" / "mp_rank_00" / "model_optim_rng.pt")
    assert [is_whole for _, is_whole, _ in found(tmp_path)] == [True, True, True]


def test_a_distributed_checkpoint_of_fewer_ranks_is_complete_by_its_index(tmp_path: Path) -> None:
    for step, ranks in ((10, 3), (20, 2)):
        files = {f"__{rank}_0.distcp": 0 for rank in range(ranks)}
        index = [{"relative_path": name, "offset": 0, "length": 10} for name in files]
        (tmp_path / f"step{step}").mkdir()
        (tmp_path / f"step{step}" / ".metadata").write_bytes(pickle.dumps(index))
        for name in files:
            zipped(tmp_path / f"step{step}" / name)
    assert [is_whole for _, is_whole, _ in found(tmp_path)] == [True, True]
    (tmp_path / "step20" / "__1_0.distcp").unlink()
    assert [is_whole for _, is_whole, _ in found(tmp_path)] == [False, True]


def test_a_pickle_is_read_as_texts_and_numbers_and_never_executed() -> None:
    assert list(pickle_scalars(b"cos\nsystem\n(S'exit 1'\ntR.")) == ["exit 1"]


@pytest.mark.parametrize(
    ("form", "name", "newer", "back"),
    [
        ("deepspeed", "latest", "global_step8", "global_step4"),
        ("megatron", "latest_checkpointed_iteration.txt", "8", "4"),
    ],
)
def test_a_pointer_to_a_newer_checkpoint_is_set_back_and_its_text_kept(
    tmp_path: Path, form: str, name: str, newer: str, back: str
) -> None:
    folder = {"deepspeed": "global_step4", "megatron": "iter_0000004"}[form]
    chosen = {"format": form, "path": str(tmp_path / folder), "step": 4}
    pointer = tmp_path / name
    assert set_back_pointer(chosen) is None and not list(tmp_path.iterdir()), "there is none"
    pointer.write_text(newer + "\n")
    assert set_back_pointer(chosen) == {"path": str(pointer), "before": newer, "step": 4}
    assert (pointer.read_text(), (tmp_path / (name + ".old")).read_text()) == (back, newer)
    assert set_back_pointer(chosen) is None, "again: it is right already"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, name + ".old"])


@pytest.mark.parametrize("text", ["release", "", "global_step3", "\xff"])
def test_a_pointer_that_names_no_newer_step_stays(tmp_path: Path, text: str) -> None:
    (tmp_path / "latest").write_text(text, encoding="latin-1")
    assert set_back_pointer({"format": "deepspeed", "path": str(tmp_path / "global_step4"), "step": 4}) is None
    assert set_back_pointer({"format": "transformers", "path": str(tmp_path / "checkpoint-2"), "step": 2}) is None
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
