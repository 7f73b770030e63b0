"""No id is given twice, whatever becomes of state.db."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.head.state.store import Store
from ascendrun.head.state.store_file import BLOCK, HEAD_FILE, HeadFile
from tests.unit.head.state.test_store import add, add_pipeline


def ids(state_dir: Path, *keys: str) -> list[str]:
    with Store.open(state_dir) as store:
        return [add(store, key).id for key in keys]


def remove_store(state_dir: Path) -> None:
    for path in state_dir.glob("state.db*"):
        path.unlink()


def test_numbers_follow_each_other_over_controllers(tmp_path: Path) -> None:
    assert ids(tmp_path, "a", "b") + ids(tmp_path, "c") == ["j-0001", "j-0002", "j-0003"]


def test_a_store_that_vanished_gives_no_id_twice_and_keeps_the_head(tmp_path: Path) -> None:
    given = ids(tmp_path, "a", "b")
    head = HeadFile.load(tmp_path)
    assert head is not None and head.next_number == 1 + BLOCK
    remove_store(tmp_path)
    shutil.rmtree(tmp_path / "jobs", ignore_errors=True)
    assert not set(ids(tmp_path, "c")) & set(given)
    after = HeadFile.load(tmp_path)
    assert after is not None and after.head_id == head.head_id


def test_an_old_backup_gives_no_id_twice(tmp_path: Path) -> None:
    given = ids(tmp_path, "a")
    shutil.copy(tmp_path / "state.db", tmp_path / "backup")
    given += ids(tmp_path, "b")
    shutil.rmtree(tmp_path / "jobs", ignore_errors=True)
    shutil.copy(tmp_path / "backup", tmp_path / "state.db")
    assert not set(ids(tmp_path, "c", "d")) & set(given)


def test_a_number_is_reserved_on_disk_before_it_is_given(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    for number in range(BLOCK + 1):
        add(store, str(number))
    head = HeadFile.load(tmp_path)
    assert head is not None and head.next_number > BLOCK + 1
    (tmp_path / HEAD_FILE).unlink()
    (tmp_path / HEAD_FILE).mkdir()
    with pytest.raises(StoreUnusableError):
        for number in range(2 * BLOCK):
            add(store, f"unreserved-{number}")
    assert len(store.jobs.all()) <= head.next_number - 1


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '{"head_id": 1, "next_number": 7}', '{"head_id": "00000000"}']
)
def test_a_state_directory_without_a_sound_head_file_is_taken_over(tmp_path: Path, content: str | None) -> None:
    with Store.open(tmp_path) as store:
        add(store, "a")
        add_pipeline(store, "b", "train")
        head_id = store.head_id
    (tmp_path / HEAD_FILE).unlink()
    if content is not None:
        (tmp_path / HEAD_FILE).write_text(content)
    assert ids(tmp_path, "c") == ["j-0003"]
    assert json.loads((tmp_path / HEAD_FILE).read_text())["head_id"] == head_id


def test_folders_of_jobs_that_no_file_knows_keep_their_ids(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "j-0041-2").mkdir(parents=True)
    assert ids(tmp_path, "a") == ["j-0042"]
