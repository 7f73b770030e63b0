"""Files that are whole or not there."""

from __future__ import annotations

import pytest

from ascendrun.programs.trainer.checkpoint import replace_text, replacing


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
