"""A checkout sets itself up on first use, once, whatever happens meanwhile, and then starts with nothing but itself."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascendrun import __version__
from ascendrun.query.train_env import PACKAGES
from tests.lib.vcluster.processes import await_that
from tests.packaging.checkouts import make_checkout, make_wheel, pip_only_from, run

VERSION = f"ascendrun {__version__}\n"


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    wheels = tmp_path_factory.mktemp("wheels")
    make_wheel(wheels, "tiny-base", "1.0", "tiny_base")
    make_wheel(wheels, "tiny-base", "2.0", "tiny_base")
    for module, name in PACKAGES.items():
        make_wheel(wheels, name, "1.0", module)
    return {**pip_only_from(wheels), "ASCENDRUN_PYTHON": ""}


@pytest.fixture(scope="module")
def ready(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that is set up; its path has a space and a quote."""
    checkout = make_checkout(tmp_path_factory.mktemp("first") / "it's a folder")
    started(checkout, environ)
    return checkout


@pytest.fixture
def checkout(ready: Path, tmp_path: Path) -> Path:
    """That checkout, moved: it may be harmed."""
    return Path(shutil.copytree(ready, tmp_path / "moved away" / "checkout", symlinks=True))


def started(checkout: Path, environ: dict[str, str]) -> str:
    """Start ascendrun of a checkout, which prints its version; return what it says meanwhile."""
    start = run([checkout / "bin" / "ascendrun", "--version"], environ)
    assert (start.returncode, start.stdout) == (0, VERSION), start.stderr
    return start.stderr


def begin(checkout: Path, environ: dict[str, str], **options: Any) -> subprocess.Popen[str]:
    """Start ascendrun of a checkout, and do not wait."""
    argv = [checkout / "bin" / "ascendrun", "--version"]
    return subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, **options)


def log_of(checkout: Path) -> str:
    return (checkout / ".venv" / "bootstrap.log").read_text()


def test_the_first_start_says_what_it_does_and_later_starts_are_silent(environ: dict[str, str], tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "some dir")
    link = tmp_path / "link"
    link.symlink_to(checkout / "bin" / "ascendrun")
    homeless = {name: value for name, value in environ.items() if name != "HOME"}
    first = run([link, "--version"], homeless, cwd="/")
    assert (first.returncode, first.stdout) == (0, VERSION), first.stderr
    assert f"{checkout}/.venv is not there yet; installing base" in first.stderr
    assert "base: tiny-base" in first.stderr
    assert first.stderr.endswith("ready\n")
    log = log_of(checkout)
    second = run([link, "--version"], {"PATH": environ["PATH"]}, cwd=tmp_path)
    assert (second.stdout, second.stderr, log_of(checkout)) == (VERSION, "", log)


def test_a_moved_checkout_runs_its_own_code_without_another_setup(environ: dict[str, str], checkout: Path) -> None:
    assert started(checkout, environ) == ""
    where = run([checkout / ".venv/bin/python", "-I", "-c", "import ascendrun; print(ascendrun.__file__)"], environ)
    assert where.stdout == f"{checkout}/ascendrun/__init__.py\n"


def test_modules_in_the_current_folder_or_on_pythonpath_do_not_shadow_ours(
    environ: dict[str, str], ready: Path, tmp_path: Path
) -> None:
    (tmp_path / "ascendrun.py").write_text("raise SystemExit('shadowed')")
    shadowed = run([ready / "bin" / "ascendrun", "--version"], {**environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert (shadowed.stdout, shadowed.stderr) == (VERSION, "")


def test_changed_constraints_are_brought_in_step(environ: dict[str, str], checkout: Path) -> None:
    (checkout / "constraints.txt").write_text("tiny-base==2.0\n")
    start = started(checkout, environ)
    assert "setup.cfg or constraints.txt has changed; bringing base in" in start
    asked = run([checkout / ".venv/bin/python", "-c", "import tiny_base; print(tiny_base.version)"], environ)
    assert asked.stdout == "2.0\n"


def test_a_copy_that_borrows_the_environment_of_another_checkout_does_not_turn_it_to_itself(
    environ: dict[str, str], checkout: Path, tmp_path: Path
) -> None:
    owner = checkout
    borrower = make_checkout(tmp_path / "borrower")
    (borrower / ".venv").symlink_to(owner / ".venv")
    (borrower / "constraints.txt").write_text("tiny-base==2.0\n")
    assert "bringing base" in started(borrower, environ)
    where = run([owner / ".venv/bin/python", "-I", "-c", "import ascendrun; print(ascendrun.__file__)"], environ)
    assert where.stdout == f"{owner}/ascendrun/__init__.py\n"


def test_a_setup_that_was_killed_is_redone(environ: dict[str, str], tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    first = begin(checkout, environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    await_that((checkout / ".venv" / "pyvenv.cfg").exists, "the setup begins")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not (checkout / ".venv" / "ready-base").exists()
    second = started(checkout, environ)
    assert "was left unfinished" in second


@pytest.mark.parametrize("harm", ["cut file", "lost record", "lost python"])
def test_a_harmed_environment_is_made_anew(environ: dict[str, str], checkout: Path, harm: str) -> None:
    site = next((checkout / ".venv" / "lib").glob("python*/site-packages"))
    (checkout / ".venv" / "ready-base").unlink()
    if harm == "lost python":
        (checkout / ".venv/bin/python").unlink()
        (checkout / ".venv/bin/python").symlink_to("/nowhere/python3")
    else:
        (checkout / ".venv" / "setup.begun").write_text("base\n")
        harmed = site / ("tiny_base.py" if harm == "cut file" else "tiny_base-1.0.dist-info/RECORD")
        harmed.write_text("")
    started(checkout, environ)
    assert (site / "tiny_base.py").read_text() == "version = '1.0'\n"
    assert log_of(checkout).count(" -m venv ") == 2


def test_a_setup_killed_before_its_python_was_there_is_told_as_unfinished(
    environ: dict[str, str], checkout: Path
) -> None:
    (checkout / ".venv" / "ready-base").unlink()
    (checkout / ".venv/bin/python").unlink()
    (checkout / ".venv" / "setup.begun").write_text("base\n")
    start = started(checkout, environ)
    assert "was left unfinished" in start and "lost" not in start


def test_an_unfinished_setup_whose_files_are_whole_goes_on_from_there(environ: dict[str, str], checkout: Path) -> None:
    (checkout / ".venv" / "ready-base").unlink()
    (checkout / ".venv" / "setup.begun").write_text("base\n")
    started(checkout, environ)
    assert log_of(checkout).count(" -m venv ") == 1
    assert not (checkout / ".venv" / "setup.begun").exists()


def test_two_first_starts_at_once_make_one_environment(environ: dict[str, str], tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    starts = [begin(checkout, environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [start.communicate(timeout=120) for start in starts]
    assert [answer[0] for answer in answers] == [VERSION] * 3, answers
    assert log_of(checkout).count(" -m venv ") == 1


def test_a_failed_install_shows_the_end_of_its_log_and_the_next_start_mends_it(
    environ: dict[str, str], tmp_path: Path
) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    failed = run([checkout / "bin" / "ascendrun", "--version"], {**environ, "PIP_FIND_LINKS": str(tmp_path)})
    assert (failed.returncode, failed.stdout) == (3, "")
    assert "base: tiny-base: exit code 1" in failed.stderr
    assert "| ERROR: " in failed.stderr
    assert f"log: {checkout}/.venv/bootstrap.log" in failed.stderr
    started(checkout, environ)
    assert log_of(checkout).count(" -m venv ") == 1


def test_no_python_at_all_is_told_with_the_way_out(environ: dict[str, str], tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "readlink", "cat", "cksum"):
        (tools / name).symlink_to(str(shutil.which(name)))
    start = run([checkout / "bin" / "ascendrun", "--version"], {"PATH": str(tools)})
    assert start.returncode == 3
    assert "no Python 3.9 or newer on PATH" in start.stderr
    assert "ASCENDRUN_PYTHON=/path/to/python3" in start.stderr
    assert not (checkout / ".venv").exists()


def test_a_python_that_cannot_be_used_is_refused_not_replaced(
    environ: dict[str, str], ready: Path, tmp_path: Path
) -> None:
    start = run([ready / "bin" / "ascendrun", "--version"], {**environ, "ASCENDRUN_PYTHON": "/no/such/python"})
    assert (start.returncode, start.stdout) == (3, "")
    assert "ASCENDRUN_PYTHON=/no/such/python does not run" in start.stderr
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && { echo Python 3.8.1; exit; }\nexit 3\n')
    old.chmod(0o755)
    start = run([ready / "bin" / "ascendrun", "--version"], {**environ, "ASCENDRUN_PYTHON": str(old)})
    assert start.returncode == 3
    assert f"ASCENDRUN_PYTHON={old} is Python 3.8.1; ascendrun needs 3.9 or newer" in start.stderr


def test_a_named_python_is_used_and_a_working_environment_of_another_is_kept(
    environ: dict[str, str], checkout: Path
) -> None:
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    made_with = os.path.realpath(checkout / ".venv/bin/python")
    start = run([checkout / "bin" / "ascendrun", "--version"], {**environ, "ASCENDRUN_PYTHON": base})
    if base == made_with:
        assert (start.returncode, start.stdout) == (0, VERSION), start.stderr
    else:
        assert start.returncode == 3
        assert f"was made with {made_with}" in start.stderr


def test_the_training_stack_is_added_where_a_bundled_program_needs_it(environ: dict[str, str], checkout: Path) -> None:
    ask = "from ascendrun.query.train_env import ensure_training_stack as ensure; ensure(print); import torch, h3"
    added, names = run([checkout / ".venv/bin/python", "-I", "-c", ask], environ), list(PACKAGES.values())
    assert added.returncode == 0, added.stderr
    assert added.stdout.splitlines()[0] == (f"installing {', '.join(names)} for the bundled programs, takes minutes")
    steps = [line for line in added.stdout.splitlines() if "train:" in line]
    assert [step.split("train: ")[1].split(" ...")[0] for step in steps] == ["torch", ", ".join(names[1:])]
    again = run([checkout / ".venv/bin/python", "-I", "-c", ask], environ)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_a_training_stack_that_cannot_be_installed_stops_with_its_log(
    environ: dict[str, str], checkout: Path, tmp_path: Path
) -> None:
    ask = "from ascendrun.query.train_env import ensure_training_stack as ensure; ensure()"
    failed = run([checkout / ".venv/bin/python", "-I", "-c", ask], {**environ, "PIP_FIND_LINKS": str(tmp_path)})
    assert failed.returncode == 1
    assert "train: torch: exit code 1" in failed.stderr
    assert "PreflightError: cannot install the training packages" in failed.stderr
    started(checkout, environ)
