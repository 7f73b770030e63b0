"""The job list is damaged under a running, a killed or an ended controller while a job runs: no job is lost.

Five seeds share one head, so that damage follows damage. `--thorough`: 200 seeds.
"""

import os
import random
import shutil
import signal

import pytest
from test_controller_crashes import Head, await_that, head
from test_head_bad_days import await_state, long_job

from ascendrun.head.loop.daemon import is_running
from tests.lib.store_damage import damage

__all__ = ["head"]
AT_ONCE = 5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        count = 200 if metafunc.config.getoption("--thorough") else 2 * AT_ONCE
        metafunc.parametrize("first", range(0, count, AT_ONCE))


def kill_controller(head: Head) -> None:
    if is_running(head.state_dir):
        os.kill(int((head.state_dir / "controller.lock").read_text()), signal.SIGKILL)
        await_that(lambda: not is_running(head.state_dir))


def end_controller(head: Head) -> None:
    assert head.run("controller", "stop").returncode == 0


def test_no_damage_of_the_store_loses_a_job_or_gives_an_id_twice(head: Head, first: int) -> None:
    running = long_job(head)
    known = {running: "RUNNING"}
    try:
        shutil.copy(head.state_dir / "state.db", head.state_dir / "backup")
        for seed in range(first, first + AT_ONCE):
            rng = random.Random(seed)
            before = head.submit()
            assert before not in known
            known[before] = "QUEUED"
            head.run("stop", before, code=0)
            known[before] = "STOPPED"
            state = rng.choice(("alive", "killed", "ended"))
            {"alive": lambda head: None, "killed": kill_controller, "ended": end_controller}[state](head)
            what = f"seed {seed}: {damage(head.state_dir, rng)}, controller {state}"
            assert head.states() == known, what
            assert head.states() == known, what
        assert head.run("stop", "--now", running).returncode == 0
        await_state(head, running, "STOPPED")
        assert "Traceback" not in (head.state_dir / "controller.log").read_text()
    finally:
        print((head.state_dir / "controller.log").read_text())
        head.run("stop", "--now", running)


def test_nobody_else_reads_anything_of_a_failed_job_or_of_a_rebuilt_store(head: Head) -> None:
    (head.folder / "rank.py").write_text("import sys\nprint('bad', flush=True)\nsys.exit(3)\n")
    old = os.umask(0o022)
    try:
        job = head.submit()
        assert head.run("wait", job).returncode == 1
        head.run("explain", job, code=0)
        end_controller(head)
        (head.state_dir / "state.db").write_bytes(b"damaged")
        assert head.states() == {job: "FAILED"}
    finally:
        os.umask(old)
    found = [path for path in head.state_dir.rglob("*") if head.state_dir / "local" not in path.parents]
    names = {path.name for path in found}
    assert {"job.json", "record.json", "head.json", "gathered", "damaged", "complete"} <= names
    open_to_others = [path for path in found if not path.is_symlink() and path.stat().st_mode & 0o077]
    assert open_to_others == []
