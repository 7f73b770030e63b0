"""Where a setting comes from, which source wins, and what is said of a wrong one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ascendrun.cluster.api import Cluster
from ascendrun.core.errors import InvalidInputError
from ascendrun.core.settings import SETTINGS, user_file
from ascendrun.head.state.state_dir import make_spool_dir
from ascendrun.head.state.user_files import load_settings


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_stronger_source_wins_and_says_so(tmp_path: Path) -> None:
    system = write(tmp_path / "system.yaml", "color: never\nexec_timeout_s: 5\nhostfile: all.hosts\n")
    user = write(tmp_path / "user.yaml", "exec_timeout_s: 7\n")
    environ = {"ASCENDRUN_STATE_DIR": "/env", "HOME": "/h"}
    settings = load_settings(environ, flags={"color": "always"}, files=[system, user])
    assert (settings.color, settings.exec_timeout_s, settings.state_dir) == ("always", 7.0, Path("/env"))
    assert settings.hostfile == tmp_path / "all.hosts"
    assert settings.origins == {
        "color": "--color",
        "exec_timeout_s": str(user),
        "state_dir": "$ASCENDRUN_STATE_DIR",
        "hostfile": str(system),
        "transport": "default",
        "lang": "default",
        "default_engine": "default",
        "idle_check_s": "default",
        "head": "default",
        "queue": "default",
        **{setting.name: "default" for setting in SETTINGS if setting.limit},
    }


def test_without_files_everything_is_the_default(tmp_path: Path) -> None:
    settings = load_settings({"XDG_STATE_HOME": "/s"}, files=[tmp_path / "missing"])
    assert settings.state_dir == Path("/s/ascendrun")
    assert set(settings.origins.values()) == {"default"}


def test_the_users_file_follows_xdg() -> None:
    assert user_file({"XDG_CONFIG_HOME": "/c"}) == Path("/c/ascendrun/config.yaml")


def test_every_problem_of_every_source_is_reported_at_once(tmp_path: Path) -> None:
    user = write(tmp_path / "user.yaml", "colour: never\ntimeout_s: soon\ntimeout_s: 5\nhostfile: [a]\n")
    with pytest.raises(InvalidInputError) as caught:
        load_settings({"ASCENDRUN_EXEC_TIMEOUT_S": "-3"}, flags={"color": "pink"}, files=[user])
    places = [(problem.file, problem.line, problem.column) for problem in caught.value.problems]
    assert places == [
        (str(user), 1, 1),
        (str(user), 2, 1),
        (str(user), 3, 1),
        (str(user), 4, 1),
        ("$ASCENDRUN_EXEC_TIMEOUT_S", None, None),
        ("--color", None, None),
    ]


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "[" * 60_000, "\x00", "x" * 70_000, "color: 'a\n"])
def test_a_file_that_is_no_mapping_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    user = write(tmp_path / "user.yaml", text)
    with pytest.raises(InvalidInputError) as caught:
        load_settings({}, files=[user])
    assert {problem.file for problem in caught.value.problems} == {str(user)}


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load_settings({}, files=[write(tmp_path / "user.yaml", "# nothing\n")]).color == "auto"


def test_a_spool_is_private_at_every_level_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "j-0001" / "attempt-1" / "npu1"
    before = os.umask(0)
    try:
        make_spool_dir(folder)
        make_spool_dir(folder)
    finally:
        os.umask(before)
    levels = [folder, *list(folder.parents)[:3]]
    assert [stat.S_IMODE(level.stat().st_mode) for level in levels] == [0o700] * 4


def test_limits_are_given_in_their_unit_and_kept_in_bytes_and_seconds(tmp_path: Path) -> None:
    file = write(tmp_path / "user.yaml", "keep_jobs_days: 1.5\npull_job_gib: 2\n")
    settings = load_settings({"HOME": "/h"}, files=[file])
    assert (settings.retention.keep_jobs_s, settings.retention.pull_job_bytes) == (129_600, 2 << 30)
    shown = {view.name: view.value for view in Cluster(settings).config()}
    assert (shown["keep_jobs_days"], shown["pull_job_gib"], shown["pull_error_mib"]) == ("1.5", "2", "16")
    with pytest.raises(InvalidInputError):
        load_settings({"HOME": "/h", "ASCENDRUN_KEEP_NODE_GIB": "-1"}, files=[])


@pytest.mark.parametrize("text, value", [("off", None), ("600", 600.0)])
def test_idle_hosts_are_checked_at_an_interval_or_never(tmp_path: Path, text: str, value: float | None) -> None:
    settings = load_settings({"ASCENDRUN_IDLE_CHECK_S": text, "HOME": str(tmp_path)}, files=[])
    assert settings.idle_check_s == value
