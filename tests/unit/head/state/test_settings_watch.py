"""Settings that are read again: the first reading is awaited, a later one only after a pause of the caller."""

import threading
from pathlib import Path

import pytest

from ascendrun.head.state import settings_watch
from ascendrun.head.state.settings_watch import SettingsWatch
from tests.lib.vcluster.processes import await_that

LONG_S = 20.0


def test_the_last_settings_are_there_while_the_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_watch, "LOOK_S", 0.0)
    monkeypatch.setattr(settings_watch, "PATIENCE_S", 3 * LONG_S)
    is_returned = threading.Event()
    order: list[bool] = []

    def read() -> str:
        if file.read_text() == "new":
            order.append(is_returned.wait(LONG_S))
        return file.read_text()

    file = tmp_path / "settings"
    file.write_text("old")
    watch = SettingsWatch(read, [file], log=print)
    assert watch.get() == "old"
    (tmp_path / "next").write_text("new")
    (tmp_path / "next").replace(file)
    assert watch.get() == "old"
    is_returned.set()
    await_that(lambda: watch.get() == "new")
    assert order == [True], "the caller had its answer before the file was read"


def test_a_caller_that_has_paused_gets_the_settings_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOOK_S": 0.0, "STALE_S": 0.0, "PATIENCE_S": LONG_S}.items():
        monkeypatch.setattr(settings_watch, name, value)
    file = tmp_path / "settings"
    watch = SettingsWatch(lambda: file.read_text() if file.exists() else None, [file], log=print)
    assert watch.get() is None
    for text in ("old", "new settings"):
        file.write_text(text)
        assert watch.get() == text
