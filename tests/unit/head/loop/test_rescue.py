"""A damaged, lost or outdated job list is rebuilt from the directories of its jobs, and no id is given twice."""

import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs.job import Job, NodeProgress, Phase, State
from ascendrun.core.jobs.reasons import because
from ascendrun.core.machines import Closure, MachineRecord, MachineState
from ascendrun.head.loop.rescue import restore_rows
from ascendrun.head.state import state_dir as paths
from ascendrun.head.state.job_files import read_copy
from ascendrun.head.state.job_table import StoredJob
from ascendrun.head.state.store import Store
from tests.lib.store_damage import damage, overwrite
from tests.thorough import examples
from tests.unit.head.state.test_job_files import submission, submit


def open_store(state_dir: Path) -> Store:
    store = Store.open(state_dir)
    if store.needs_restore():
        restore_rows(store)
    return store


def run(store: Store, job_id: str) -> Job:
    job = store.jobs.find(job_id).job
    nodes = tuple(NodeProgress(host, number, Phase.STARTED, (number,)) for number, host in enumerate(job.hosts))
    job = replace(job, state=State.RUNNING, nodes=nodes, world_size=2, go_sent_at_s=6.0, started_at_s=7.0)
    store.jobs.save(job, [], now_s=7.0)
    return job


def end(store: Store, job_id: str) -> Job:
    job = replace(run(store, job_id), state=State.SUCCEEDED, ended_at_s=8.0, reason=because("succeeded", count=2))
    job = replace(job, nodes=tuple(replace(node, phase=Phase.ENDED) for node in job.nodes))
    store.jobs.save(job, [], now_s=8.0)
    paths.make_spool_dir(paths.spool_dir(store.path.parent, job_id, 1) / "n1")
    (paths.spool_dir(store.path.parent, job_id, 1) / paths.SPOOL_COMPLETE).touch()
    store.jobs.mark_drained(job_id)
    return job


DRAINED = Closure(MachineState.DRAINED, "fan", "wang", 5.0, None, False)
MACHINES = (
    MachineRecord("address:10.0.0.2:22", (Host("n2", addr="10.0.0.2"),), drain=DRAINED, heard_at_s=9.0),
    MachineRecord("k1", (Host("n1"),), boot_id="b", heard_at_s=9.0),
)


@pytest.fixture
def jobs(tmp_path: Path) -> dict[str, Job]:
    """A queued, a running, an ended job, and a pipeline; the controller has ended."""
    with open_store(tmp_path) as store:
        submit(store, submission("queued"), submission("running"), submission("ended"))
        submit(store, submission("running"))
        submit(store, submission("ended"))
        submit(store, submission("a", stage="prepare"), submission("b", stage="train", needs="prepare"))
        run(store, "j-0002")
        end(store, "j-0003")
        store.machines.save(MACHINES)
        found = {stored.job.id: stored.job for stored in store.jobs.all()}
    assert len(found) == 5
    return found


def listed(store: Store) -> dict[str, Job]:
    return {stored.job.id: stored.job for stored in store.jobs.all()}


LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: path.unlink(),
    "emptied": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, 5000),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "header": lambda path: overwrite(path, 0, b"a letter"),
    "newer": lambda path: overwrite(path, 60, (99).to_bytes(4, "big")),
    "no version": lambda path: overwrite(path, 60, bytes(4)),
    "read only": lambda path: overwrite(path, 18, b"\x07"),
    "other": lambda path: path.write_bytes(b"this is a letter, not a database\n" * 100),
}


@pytest.mark.parametrize("how", LOSSES)
def test_every_job_is_back_after_the_loss_of_the_list(tmp_path: Path, jobs: dict[str, Job], how: str) -> None:
    LOSSES[how](tmp_path / "state.db")
    if how != "read only":
        with pytest.raises(paths.StoreDamagedError):
            Store.open_for_reading(tmp_path).jobs.all()
    with open_store(tmp_path) as store:
        assert listed(store) == jobs
        assert [stored.job.id for stored in store.jobs.live()] == ["j-0001", "j-0002", "j-0004-1", "j-0004-2"]
        assert submit(store, submission("queued")) == ["j-0001"], "its key is known"
        assert submit(store, submission("new"))[0] > "j-0100"
        codes = {event.event.code for event in store.events.stream()}
        assert {"job-rebuilt", "store-rebuilt"} <= codes
    told = json.loads((tmp_path / paths.REBUILT_FILE).read_text())
    assert sorted(told["jobs"]) == sorted(jobs) and told["lost"] == []
    assert how == "deleted" or Path(told["file"]).exists()
    with open_store(tmp_path) as store:
        assert not store.needs_restore() or not restore_rows(store)


def test_an_old_backup_is_brought_up_to_date(tmp_path: Path, jobs: dict[str, Job]) -> None:
    shutil.copy(tmp_path / "state.db", tmp_path / "backup")
    with open_store(tmp_path) as store:
        ended = end(store, "j-0001")
        new = submit(store, submission("new"))
        later = run(store, new[0])
    shutil.copy(tmp_path / "backup", tmp_path / "state.db")
    with pytest.raises(paths.StoreDamagedError):
        Store.open_for_reading(tmp_path)
    with open_store(tmp_path) as store:
        assert listed(store) == {**jobs, "j-0001": ended, new[0]: later}
        assert submit(store, submission("newer"))[0] > "j-0100"


def test_one_damaged_row_is_rebuilt_and_the_others_keep_their_events(tmp_path: Path, jobs: dict[str, Job]) -> None:
    with sqlite3.connect(tmp_path / "state.db") as db:
        db.execute("UPDATE jobs SET record = replace(record, 'RUNNING', 'STOPPED') WHERE id = 'j-0002'")
        db.execute("UPDATE jobs SET is_drained = 1 WHERE id = 'j-0001'")
        db.execute("""UPDATE jobs SET hosts = '[{"name": "other"}]' WHERE id = 'j-0003'""")
        db.execute("UPDATE events SET hosts = '[' WHERE job = 'j-0004-1'")
    db.close()
    with pytest.raises(paths.StoreDamagedError):
        Store.open_for_reading(tmp_path).jobs.all()
    with open_store(tmp_path) as store:
        assert listed(store) == jobs
        assert store.jobs.find("j-0003").hosts[0]["name"] == "n1"
        assert {stored.job.id for stored in store.jobs.live()} == {"j-0001", "j-0002", "j-0004-1", "j-0004-2"}
        assert [event.code for event in store.events.of("j-0002")] == ["submitted", "job-rebuilt"]
        assert submit(store, submission("new")) == ["j-0006"], "no number was lost"


def records(state_dir: Path, job_id: str, host: str, *lines: dict[str, object]) -> None:
    folder = paths.spool_dir(state_dir, job_id, 1) / host
    paths.make_spool_dir(folder)
    text = "".join(json.dumps({"seq": seq, **line}) + "\n" for seq, line in enumerate(lines))
    (folder / "events.0").write_text(text)


def start(rank: int, at_s: float) -> dict[str, object]:
    return {"event": "rank_started", "rank": rank, "pid": 7 + rank, "at_ns": int(at_s * 1e9)}


def exit_(rank: int, at_s: float, code: int, **more: object) -> dict[str, object]:
    return {"event": "rank_exited", "rank": rank, "code": code, "signal": None, "at_ns": int(at_s * 1e9), **more}


def ended(at_s: float) -> dict[str, object]:
    return {"event": "ended", "leftovers": [], "at_ns": int(at_s * 1e9)}


def lose_everything_but_copies(state_dir: Path) -> None:
    (state_dir / "state.db").unlink()
    for path in state_dir.glob("jobs/*/record.json"):
        path.unlink()


@pytest.mark.parametrize("code, state", [(0, State.SUCCEEDED), (3, State.FAILED)])
def test_a_job_whose_records_are_complete_has_its_end(
    tmp_path: Path, jobs: dict[str, Job], code: int, state: State
) -> None:
    records(tmp_path, "j-0003", "n1", start(0, 10), exit_(0, 20, code), ended(21))
    records(tmp_path, "j-0003", "n2", start(1, 11), exit_(1, 22, 0), ended(23))
    (paths.spool_dir(tmp_path, "j-0003", 1) / paths.SPOOL_COMPLETE).touch()
    lose_everything_but_copies(tmp_path)
    with open_store(tmp_path) as store:
        job = store.jobs.find("j-0003").job
        assert (job.state, job.ended_at_s, job.attempt) == (state, 23.0, 1)
        assert "j-0003" not in {stored.job.id for stored in store.jobs.live()}


def test_a_job_that_a_user_stopped_is_stopped(tmp_path: Path, jobs: dict[str, Job]) -> None:
    stop = {"event": "stopping", "by": "head", "at_ns": int(15e9), "reason": {"code": "stop-requested"}}
    for rank, host in enumerate(("n1", "n2")):
        records(tmp_path, "j-0003", host, start(rank, 10), stop, exit_(rank, 20, 0, stopped=True), ended(21))
    (paths.spool_dir(tmp_path, "j-0003", 1) / paths.SPOOL_COMPLETE).touch()
    lose_everything_but_copies(tmp_path)
    with open_store(tmp_path) as store:
        assert store.jobs.find("j-0003").job.state is State.STOPPED


def test_a_complete_job_whose_servers_were_stopped_has_succeeded(tmp_path: Path) -> None:
    roles = ({"name": "serve", "command": ("a",), "ends_job": False}, {"name": "work", "command": ("b",)})
    spec = JobSpec.model_validate({"name": "gang", "nodes": 2, "devices": {"per_node": 1}, "roles": roles})
    with open_store(tmp_path) as store:
        submit(store, replace(submission("gang"), spec=spec))
        run(store, "j-0001")
    stop = {"event": "stopping", "by": "head", "at_ns": int(21e9)}
    stop["reason"] = {"key": "stop-requested", "values": {"why": "completed"}}
    records(tmp_path, "j-0001", "n1", start(0, 10), stop, exit_(0, 22, 1, stopped=True), ended(23))
    records(tmp_path, "j-0001", "n2", start(1, 10), exit_(1, 20, 0), ended(21))
    (paths.spool_dir(tmp_path, "j-0001", 1) / paths.SPOOL_COMPLETE).touch()
    lose_everything_but_copies(tmp_path)
    with open_store(tmp_path) as store:
        found = store.jobs.find("j-0001").job
        assert (found.state, found.reason.code) == (State.SUCCEEDED, "completed")
        assert [(node.role, node.ends_job) for node in found.nodes] == [("serve", False), ("work", True)]


def test_a_job_with_records_of_a_start_is_not_started_again(tmp_path: Path, jobs: dict[str, Job]) -> None:
    records(tmp_path, "j-0002", "n1", start(0, 10))
    lose_everything_but_copies(tmp_path)
    with open_store(tmp_path) as store:
        job = store.jobs.find("j-0002").job
        assert (job.state, job.attempt) == (State.STARTING, 1) and job.go_sent_at_s is not None
        assert [(node.phase, node.ranks) for node in job.nodes] == [(Phase.GO_SENT, (0,)), (Phase.GO_SENT, (1,))]
        assert store.jobs.find("j-0001").job.state is State.QUEUED


def test_the_spool_of_another_run_is_moved_aside_and_tells_nothing(tmp_path: Path, jobs: dict[str, Job]) -> None:
    records(tmp_path, "j-0001", "n1", start(0, 10))
    folder = paths.spool_dir(tmp_path, "j-0001", 1)
    (folder / paths.SPOOL_RUN).write_text("other000-j-0001.1")
    (tmp_path / "state.db").unlink()
    with open_store(tmp_path) as store:
        assert store.jobs.find("j-0001").job.state is State.QUEUED
    for _ in range(2):
        paths.claim_spool_dir(folder, f"{jobs['j-0001'].run}.1")
    assert (folder.with_name("attempt-1.other-1") / "n1" / "events.0").exists()
    assert [path.name for path in folder.iterdir()] == [paths.SPOOL_RUN]
    assert folder.stat().st_mode & 0o077 == (folder / paths.SPOOL_RUN).stat().st_mode & 0o077 == 0


def test_a_running_controller_notices_that_its_file_was_moved_and_loses_nothing(
    tmp_path: Path, jobs: dict[str, Job]
) -> None:
    with open_store(tmp_path) as store:
        second = store.reopened()
        before = store.events.stream()
        (tmp_path / "state.db").rename(tmp_path / "moved")
        running = store.jobs.find("j-0002")
        with pytest.raises(paths.StoreDamagedError):
            store.jobs.save(running.job, [], now_s=9.0)
        store.replace_if_damaged()
        restore_rows(store, [running])
        assert listed(store) == jobs and store.events.stream()[: len(before)] == before
        with second.writing():
            pass
        assert listed(second) == jobs
        second.close()
    with Store.open_for_reading(tmp_path) as reader:
        assert listed(reader) == jobs


def test_an_error_of_the_disk_does_not_replace_a_sound_file(tmp_path: Path, jobs: dict[str, Job]) -> None:
    """A quota that is used up is reported by SQLite as a cut file is."""

    class Full(Store):
        def _take_over(self) -> None:
            raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(paths.StoreDamagedError):
        Full.open(tmp_path)
    assert not (tmp_path / "damaged").exists()
    with open_store(tmp_path) as store:
        assert listed(store) == jobs
        store.replace_if_damaged()
        assert not store.was_damaged


def test_what_a_running_controller_knows_is_newer_than_what_is_on_disk(tmp_path: Path, jobs: dict[str, Job]) -> None:
    with open_store(tmp_path) as store:
        newer = replace(store.jobs.find("j-0002"), job=replace(jobs["j-0002"], attempt=4))
        shutil.rmtree(tmp_path / "jobs")
        overwrite(tmp_path / "state.db", 0, bytes(4096))
        store.replace_if_damaged()
        restore_rows(store, [newer])
        assert store.jobs.find("j-0002").job.attempt == 4
        assert submit(store, submission("next")) == ["j-0006"]


def test_a_state_directory_of_an_earlier_release_gets_copies_of_its_jobs(tmp_path: Path, jobs: dict[str, Job]) -> None:
    shutil.rmtree(tmp_path / "jobs")
    (tmp_path / "head.json").unlink()
    with open_store(tmp_path) as store:
        assert listed(store) == jobs
    (tmp_path / "state.db").unlink()
    with open_store(tmp_path) as store:
        assert listed(store) == jobs


def test_a_job_that_cannot_be_rebuilt_is_reported(tmp_path: Path, jobs: dict[str, Job]) -> None:
    (tmp_path / "jobs" / "j-0003" / "job.json").write_text("{")
    (tmp_path / "state.db").unlink()
    with open_store(tmp_path) as store:
        assert set(listed(store)) == set(jobs) - {"j-0003"}
    assert json.loads((tmp_path / paths.REBUILT_FILE).read_text())["lost"] == ["j-0003"]
    Store.open_for_reading(tmp_path).close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(examples(10, 200)))


def test_a_machine_that_cannot_be_rebuilt_is_reported_by_its_name(tmp_path: Path, jobs: dict[str, Job]) -> None:
    (tmp_path / "state.db").unlink()
    (drained, *_) = [path for path in (tmp_path / "machines").iterdir() if b"wang" in path.read_bytes()]
    drained.write_bytes(drained.read_bytes()[:-9])
    with open_store(tmp_path) as store:
        assert store.machines.all() == MACHINES[1:]
        [rebuilt] = [event for event in store.events.of("") if event.code == "store-rebuilt"]
    assert rebuilt.values["machines"] == ["n2"]
    assert json.loads((tmp_path / paths.REBUILT_FILE).read_text())["machines"] == ["n2"]


@pytest.mark.parametrize("controller", ["ended", "killed", "running"])
def test_no_damage_loses_a_job_or_gives_an_id_twice(
    tmp_path: Path, jobs: dict[str, Job], controller: str, seed: int
) -> None:
    rng = random.Random(seed)
    shutil.copy(tmp_path / "state.db", tmp_path / "backup")
    store = open_store(tmp_path)
    known = {**jobs, "j-0001": end(store, "j-0001")}
    new = submit(store, submission("new"))[0]
    known[new] = run(store, new)
    state_dir = tmp_path
    if controller == "ended":
        store.close()
    if controller == "killed":
        state_dir = tmp_path / "killed"
        shutil.copytree(tmp_path, state_dir)
        store.close()
    how = damage(state_dir, rng)
    with suppress(paths.StoreUnusableError), Store.open_for_reading(state_dir) as reader:
        assert set(listed(reader)) == set(known), how
    if controller == "running":
        live = [stored for stored in in_memory(known, tmp_path) if not stored.job.is_terminal]
        store.replace_if_damaged()
        restore_rows(store, live)
    else:
        store = open_store(state_dir)
    assert listed(store) == known, how
    assert store.machines.all() == MACHINES, how
    assert submit(store, submission("next"))[0] not in known
    with Store.open_for_reading(state_dir) as reader:
        assert len(listed(reader)) == len(known) + 1, how
        reader.events.stream()
    store.close()


def in_memory(known: dict[str, Job], state_dir: Path) -> list[StoredJob]:
    """The jobs as a running controller has them in memory."""
    copies = {job_id: read_copy(state_dir, job_id) for job_id in known}
    return [
        StoredJob(known[job_id], copy.key, copy.spec, copy.hosts, copy.trees, copy.file)
        for job_id, copy in copies.items()
        if copy is not None
    ]
