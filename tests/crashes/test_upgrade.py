"""A release that is replaced on disk while jobs run: the controller becomes it when it is quiet; no job notices."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_controller_crashes import CODE, DEADLINE_S, Head
from test_guard import status
from test_head_bad_days import long_job

from ascendrun.head.loop.daemon import is_running
from tests.lib.vcluster.processes import await_that, is_alive

PRELOAD = """
import sys, threading
from pathlib import Path
from ascendrun.head.protocol import release
release.PRELOAD_PAUSE_S = 0.0
release.import_everything(0.0, threading.Event())
head = release.PACKAGE / "head"
names = {".".join(path.relative_to(release.PACKAGE.parent).with_suffix("").parts) for path in head.rglob("*.py")}
print({name for name in names if not name.endswith("__init__")} - set(sys.modules))
"""


class CopiedHead(Head):
    """The command line of a copy of the package, which a test may change."""

    def environ(self, failpoint: str = "") -> dict[str, str]:
        return {**super().environ(failpoint), "PYTHONPATH": str(self.folder / "release")}

    def replace(self, file: str, old: str, new: str) -> None:
        path = self.folder / "release" / "ascendrun" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


@pytest.fixture
def head(tmp_path: Path) -> Iterator[CopiedHead]:
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(CODE / "ascendrun", tmp_path / "release" / "ascendrun", ignore=skipped)
    head = CopiedHead(tmp_path)
    yield head
    head.run("stop", "--now", "j-0001")
    head.run("controller", "stop")


def test_a_replaced_release_takes_over_with_the_same_pid_lock_and_guard(head: CopiedHead) -> None:
    job = long_job(head)
    before, ranks = status(head), head.show(job)["ranks"]
    assert before.pulse is not None
    with open(head.state_dir / "controller.lock") as lock:
        inode = os.fstat(lock.fileno()).st_ino
    head.replace("head/loop/live_jobs.py", '"""The live jobs:', '"""New. The live jobs:')
    assert head.run("controller", "status").returncode == 0

    def is_new() -> bool:
        assert is_running(head.state_dir), "the lock is never free"
        pulse = status(head).pulse
        return pulse is not None and pulse.release != before.pulse.release  # type: ignore[union-attr]

    await_that(is_new)
    after = status(head)
    assert (after.pid, after.guard_pid, after.jobs) == (before.pid, before.guard_pid, before.jobs)
    assert (head.state_dir / "controller.lock").stat().st_ino == inode
    await_that(lambda: head.show(job)["job"]["state"] == "RUNNING")
    assert [rank["pid"] for rank in head.show(job)["ranks"]] == [rank["pid"] for rank in ranks]


def test_a_release_whose_agents_have_another_protocol_takes_over_a_running_job_and_gives_it_back(
    head: CopiedHead,
) -> None:
    job = long_job(head)
    ranks, releases = head.show(job)["ranks"], [status(head).pulse]
    for old, new in (("\nPROTOCOL = ", "\nPROTOCOL = 1"), ("\nPROTOCOL = 1", "\nPROTOCOL = ")):
        head.replace("node/wire.py", old, new)

        def is_new() -> bool:
            pulse = status(head).pulse
            return None not in (pulse, releases[-1]) and pulse.release != releases[-1].release  # type: ignore[union-attr]

        await_that(is_new)
        releases.append(status(head).pulse)
        head.run("exec", "--hostfile", "two.hosts", "--", "true", code=0)  # by agents of this release
        await_that(lambda: head.show(job)["job"]["state"] == "RUNNING")
        assert [rank["pid"] for rank in head.show(job)["ranks"]] == [rank["pid"] for rank in ranks]
    head.run("stop", "--now", job, code=0)
    await_that(lambda: head.show(job)["job"]["state"] == "STOPPED")
    assert head.show(job)["job"]["attempt"] == 1


def test_a_request_of_a_newer_protocol_waits_for_the_new_controller(head: CopiedHead) -> None:
    job = long_job(head)
    head.replace("head/protocol/control_socket.py", "\nPROTOCOL = ", "\nPROTOCOL = 1")
    head.run("stop", "--now", job, code=0)
    await_that(lambda: head.show(job)["job"]["state"] == "STOPPED")


def test_a_replaced_release_is_stopped_by_the_new_one_and_does_not_come_back(head: CopiedHead) -> None:
    long_job(head)
    before = status(head)
    head.replace("head/loop/live_jobs.py", '"""The live jobs:', '"""New. The live jobs:')
    head.run("controller", "stop", code=0)
    assert not is_running(head.state_dir)
    await_that(lambda: not is_alive(before.pid))


def test_a_stopped_controller_does_not_wait_for_later_imports(head: CopiedHead) -> None:
    head.replace("head/loop/controller.py", "PRELOAD_AFTER_S = 10.0", "PRELOAD_AFTER_S = 3600.0")
    long_job(head)
    guard_pid = status(head).guard_pid
    assert guard_pid is not None and head.run("controller", "stop").returncode == 0
    await_that(lambda: not is_alive(guard_pid))


def test_later_imports_are_done_early() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRELOAD], cwd=CODE, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout.strip() == "set()", done.stdout
