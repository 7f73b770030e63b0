"""What the store promises when processes die, race and disagree."""

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.errors import ConflictError, NotFoundError
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Cause, Exit, Job, NodeProgress, Phase, Request, State
from ascendrun.core.jobs.reasons import because
from ascendrun.head.loop.rescue import restore_rows
from ascendrun.head.state.state_dir import StoreDamagedError, StoreUnusableError
from ascendrun.head.state.store import Store
from ascendrun.head.state.store_file import HeadFile, LostLeaseError
from ascendrun.head.state.store_place import on_local_disk
from ascendrun.node import layout
from ascendrun.node.agent import checks
from tests.lib.demo_jobs import add_job, demo_job


def make_job(job_id: str, head_id: str, name: str = "demo") -> Job:
    exits = {1: Exit(3, None, 12, False, True)}
    node = NodeProgress("a", 0, Phase.STARTED, (0, 1), "boot", 0.5, {0: 11}, exits, (0,))
    job = demo_job(id=job_id, name=name, run=f"{head_id}-{job_id}", hosts=(), pool=("a",))
    return replace(job, request=Request(1), nodes=(node,), cause=Cause.FAILURE)


def add(store: Store, key: str, name: str = "demo") -> Job:
    return add_job(store, key, lambda i, h: make_job(i, h, name), spec={"a": 1})


def test_a_controller_that_lost_its_lease_can_write_nothing(tmp_path: Path) -> None:
    old = Store.open(tmp_path)
    job = add(old, "k")
    new = Store.open(tmp_path)
    with pytest.raises(LostLeaseError):
        old.jobs.save(replace(job, state=State.RUNNING), [], now_s=2.0)
    with pytest.raises(LostLeaseError):
        add(old, "other")
    assert new.jobs.find("j-0001").job.state is State.QUEUED


ACK_PROGRAM = """
import sys, pathlib
sys.path.insert(0, {root!r})
from tests.unit.head.state.test_store import add
from ascendrun.head.state.store import Store
store = Store.open(pathlib.Path(sys.argv[1]))
for number in range(10_000):
    print(add(store, f"{{sys.argv[2]}}-{{number}}").id, flush=True)
"""


@pytest.mark.slow
def test_no_acknowledged_job_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[4])
    acknowledged = []
    for round_ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", ACK_PROGRAM.format(root=root), str(tmp_path), str(round_)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        acknowledged += [process.stdout.readline().strip() for _ in range(7)]
        os.kill(process.pid, signal.SIGKILL)
        acknowledged += [line.strip() for line in process.stdout if line.endswith("\n")]
        process.wait()
        process.stdout.close()
    with closing(Store.open(tmp_path)) as store:
        if store.needs_restore():  # killed after the copy of a job and before its row, which no reader accepts
            restore_rows(store)
    reader = Store.open_for_reading(tmp_path)
    assert reader is not None
    assert set(acknowledged) <= {stored.job.id for stored in reader.jobs.all()}
    assert len(set(acknowledged)) == len(acknowledged) >= 35


FAIL_PROGRAM = """
import sys, pathlib
sys.path.insert(0, {root!r})
from tests.unit.head.state.test_store import add
from ascendrun.core.errors import AscendrunError
from ascendrun.head.state.store import Store
try:
    store = Store.open(pathlib.Path(sys.argv[1]))
    for number in range(3):
        print(add(store, str(number)).id, flush=True)
except AscendrunError as error:
    print("refused", error.code, file=sys.stderr)
"""


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("strace") is None, reason="without strace no system call fails")
def test_no_acknowledged_job_is_lost_when_the_nth_write_or_sync_fails(tmp_path: Path) -> None:
    root, calls, number, refused = str(Path(__file__).resolve().parents[4]), "pwrite64,fdatasync,fsync", 0, 0
    while True:
        number += 1
        folder, trace = tmp_path / f"state-{number}", tmp_path / "trace"
        folder.mkdir(mode=0o700)
        inject = f"inject={calls}:error={('EIO', 'ENOSPC')[number % 2]}:when={number}"
        argv = ["strace", "-f", "-qq", "-o", str(trace), "-e", f"trace={calls}", "-e", inject]
        argv += [sys.executable, "-c", FAIL_PROGRAM.format(root=root), str(folder)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "Traceback" not in done.stderr, (number, done.stderr)
        with closing(Store.open(folder)) as store:
            if store.needs_restore():
                restore_rows(store)
            assert set(done.stdout.split()) <= {stored.job.id for stored in store.jobs.all()}, (number, inject)
        refused += "refused" in done.stderr
        if "INJECTED" not in trace.read_text():
            break
    assert number > 10 and refused > 5 and len(done.stdout.split()) == 3


@pytest.mark.skipif(shutil.which("strace") is None, reason="without strace no system call is seen")
def test_a_power_cut_after_an_acknowledgement_loses_nothing_that_it_rests_on(tmp_path: Path) -> None:
    """All that was written before is synced, files under new names with their folders."""
    folder, trace, root = tmp_path / "state", tmp_path / "trace", str(Path(__file__).resolve().parents[4])
    folder.mkdir(mode=0o700)
    calls = "trace=write,pwrite64,ftruncate,rename,fsync,fdatasync"
    argv = ["strace", "-y", "-qq", "-o", str(trace), "-e", calls, sys.executable, "-c", FAIL_PROGRAM.format(root=root)]
    subprocess.run([*argv, str(folder)], check=True, capture_output=True, timeout=120)
    unsynced: set[str] = set()
    acknowledged = 0
    for call, of_file, rest in re.findall(r"^(\w+)\((?:\d+<([^>]*)>)?(.*)", trace.read_text(), re.MULTILINE):
        if call == "rename" and str(folder) in rest:
            old, new = re.findall(r'"([^"]*)"', rest)
            assert old not in unsynced, rest
            unsynced.add(os.path.dirname(new))
        elif call.endswith("sync"):
            unsynced.discard(of_file)
        elif of_file.startswith(str(folder)) and not of_file.endswith("-shm"):  # that one is made anew
            unsynced.add(of_file)
        elif of_file.startswith("pipe:") and '"j-' in rest:
            assert not unsynced, rest
            acknowledged += 1
    assert acknowledged == 3


def test_a_repeated_submission_is_one_job(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    assert add(store, "same") == add(store, "same")
    assert len(store.jobs.all()) == 1


def test_a_record_survives_the_trip_to_disk_unchanged(tmp_path: Path) -> None:
    job = add(Store.open(tmp_path), "k")
    reader = Store.open_for_reading(tmp_path)
    assert reader is not None
    assert reader.jobs.find("j-0001").job == job


def test_a_failed_write_leaves_neither_record_nor_story_behind(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    job = add(store, "k")
    with pytest.raises(AttributeError):
        nothing: Any = None
        store.jobs.save(
            replace(job, state=State.RUNNING),
            [Event("waiting", {"reason": because("rejected", why="fine")}), nothing],
            now_s=2.0,
        )
    assert store.jobs.find("j-0001").job.state is State.QUEUED
    assert [event.code for event in store.events.of("j-0001")] == ["submitted"]


def test_readers_work_before_anything_was_ever_submitted(tmp_path: Path) -> None:
    reader = Store.open_for_reading(tmp_path / "nothing here")
    assert reader.jobs.all() == () and reader.events.of("j-0001") == ()
    with pytest.raises(NotFoundError) as caught:
        reader.jobs.find("j-0001")
    assert caught.value.message.key == "job.none"
    assert not (tmp_path / "nothing here").exists()


def make_newer(state_dir: Path, *, noted: int) -> None:
    """A store with a schema of a later release, and the newest schema that its head file has noted."""
    Store.open(state_dir).close()
    with sqlite3.connect(state_dir / "state.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    head = HeadFile.load(state_dir)
    assert head is not None
    replace(head, schema=noted).write(state_dir)


def test_a_newer_schema_is_refused_with_the_way_out(tmp_path: Path) -> None:
    make_newer(tmp_path, noted=99)
    with pytest.raises(StoreUnusableError, match=".") as caught:
        Store.open(tmp_path)
    assert caught.value.message.key == "store.newer"
    assert "ASCENDRUN_STATE_DIR" in str(caught.value.hint)


def test_a_schema_that_no_controller_has_noted_is_damage(tmp_path: Path) -> None:
    make_newer(tmp_path, noted=0)  # as of a release that noted none: it knew no newer one
    with pytest.raises(StoreDamagedError):
        Store.open_for_reading(tmp_path)
    Store.open(tmp_path).close()
    assert list(tmp_path.glob("damaged/*"))


def test_a_file_that_is_no_database_is_kept_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(b"this is a letter, not a database\n" * 100)
    with Store.open(tmp_path) as store:
        assert store.set_aside_at is not None and store.set_aside_at.read_bytes().startswith(b"this is a letter")
        assert store.set_aside_at.parent.stat().st_mode & 0o077 == 0 and store.jobs.all() == ()


def test_names_find_the_newest_and_ids_may_be_shortened(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    for number, name in enumerate(["one", "two", "two"]):
        add(store, str(number), name)
    assert store.jobs.find("two").job.id == "j-0003"
    store.jobs.save(replace(store.jobs.find("j-0003").job, state=State.FAILED, ended_at_s=3.0), [], now_s=3.0)
    assert store.jobs.find("two").job.id == "j-0002", "a live job precedes an ended one"
    store.jobs.save(replace(store.jobs.find("j-0002").job, state=State.FAILED, ended_at_s=3.0), [], now_s=3.0)
    assert store.jobs.find("two").job.id == "j-0003"
    assert store.jobs.find("j-0001").job.name == "one"
    with pytest.raises(ConflictError) as caught:
        store.jobs.find("j-")
    assert caught.value.message.key == "job.ambiguous"
    with pytest.raises(NotFoundError):
        store.jobs.find("three")


def add_pipeline(store: Store, key: str, name: str) -> str:
    def make(number: int, head_id: str) -> Job:
        job_id = f"j-{number:04d}"
        return replace(make_job(f"{job_id}-1", head_id, f"{name}.prepare"), pipeline=job_id, stage="prepare")

    with store.writing() as db:
        job = store.jobs.insert(db, key=key, make_job=make, spec={}, hosts=[], trees=[], file=None, now_s=1.0)
    return str(job.pipeline)


def test_a_name_of_a_job_and_of_a_pipeline_means_the_newer_of_them_everywhere(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    add(store, "1", "train")
    pipeline = add_pipeline(store, "2", "train")
    assert store.jobs.pipeline_id("train") == pipeline == "j-0002" and store.jobs.find("train").job.id == "j-0002-1"
    add(store, "3", "train")
    assert store.jobs.pipeline_id("train") is None and store.jobs.find("train").job.id == "j-0003"
    assert store.jobs.pipeline_id(pipeline) == pipeline and store.jobs.find(pipeline).job.id == "j-0002-1"


def test_everything_of_the_state_dir_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    store = Store.open(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    store.close()


def test_a_directory_that_will_be_on_a_network_file_system_is_on_a_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = tmp_path / "not" / "there"
    assert on_local_disk(later) == later
    monkeypatch.setattr(checks, "NETWORK", [checks.file_system_of(str(tmp_path))])
    assert on_local_disk(later) == Path(layout.local_base(), "state")


class NextRelease(Store):
    MIGRATIONS = (*Store.MIGRATIONS, "CREATE TABLE of_the_next_release (x)")


def version_and_jobs(path: Path) -> tuple[int, list[tuple[str]]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("PRAGMA user_version").fetchone()[0], db.execute("SELECT id FROM jobs").fetchall()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of this release, with a job."""
    with Store.open(tmp_path / "state") as store:
        add(store, "k")
    return tmp_path / "state" / "state.db"


def test_a_controller_migrates_a_copied_file_and_a_reader_only_its_own_copy(file: Path) -> None:
    backup = file.with_name("state.db.v1")
    with NextRelease.open_for_reading(file.parent) as reader:
        assert reader.is_copy and reader.jobs.find("j-0001").job.name == "demo"
    assert version_and_jobs(file) == (1, [("j-0001",)]) and not backup.exists()
    for expected in (True, False):  # the second start has nothing to migrate
        with NextRelease.open(file.parent) as store:
            assert store.jobs.find("j-0001").job.name == "demo"
        assert version_and_jobs(file) == (2, [("j-0001",)]) and backup.exists() is expected
        if expected:
            assert version_and_jobs(backup) == (1, [("j-0001",)]) and backup.stat().st_mode & 0o777 == 0o600
            backup.unlink()


def test_a_migration_that_fails_leaves_the_file_as_it_was(file: Path) -> None:
    class Broken(NextRelease):
        MIGRATIONS = (*NextRelease.MIGRATIONS, "INSERT INTO meta VALUES ('head_id', '')")

    with pytest.raises(sqlite3.IntegrityError):
        Broken.open(file.parent)
    assert version_and_jobs(file) == (1, [("j-0001",)])
    Store.open(file.parent).close()
