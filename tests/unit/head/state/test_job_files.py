"""What a job's directory on the head holds before the job is acknowledged, and what its nodes get."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs.job import State
from ascendrun.core.jobs.job_copy import COPY_LIMIT, JobCopy, seal, unseal
from ascendrun.head.protocol.control_messages import Submit
from ascendrun.head.state.job_files import copy_for_nodes, job_folder, jobs_without_row, read_copy, read_record
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.head.state.store import Store
from ascendrun.head.survey.submission import Submission, add_jobs


def submission(key: str, **more: object) -> Submission:
    spec = JobSpec(name=key, command=("true",), env={"A": "b"}, env_file=("/etc/secrets.env",))
    return Submission(key, spec, (Host("n1"), Host("n2", port=22)), (), "/j.yaml", **more)  # type: ignore[arg-type]


def submit(store: Store, *submissions: Submission) -> list[str]:
    added = add_jobs(store, Submit(tuple(one.to_json() for one in submissions)), now_s=5.0)
    return [job.id for job, _ in added]


def test_the_copy_of_an_acknowledged_job_makes_its_row_again(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        ids = submit(store, submission("one"))
        ids += submit(store, submission("a", stage="prepare"), submission("b", stage="train", needs="prepare"))
        assert ids == ["j-0001", "j-0002-1", "j-0002-2"]
        for number, stored in enumerate(store.jobs.all(), start=1):
            copy = read_copy(tmp_path, stored.job.id)
            assert copy is not None and copy.number == number
            assert copy.new_job() == stored.job
            assert (copy.key, copy.spec, copy.file) == (stored.key, stored.spec, stored.file)
            assert (list(copy.hosts), list(copy.trees)) == (stored.hosts, stored.trees)
    folder = job_folder(tmp_path, "j-0001")
    assert [path.stat().st_mode & 0o077 for path in (folder.parent, folder, folder / "job.json")] == [0, 0, 0]
    assert sorted(jobs_without_row(tmp_path, ())) == sorted(ids)


def test_a_job_that_cannot_be_stored_leaves_no_copy(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        with sqlite3.connect(tmp_path / "state.db") as other:
            other.execute("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'full'); END")
        other.close()
        with pytest.raises(sqlite3.IntegrityError):
            submit(store, submission("one"))
    assert list(jobs_without_row(tmp_path, ())) == [] and list((tmp_path / "jobs").iterdir()) == []


def test_a_job_without_a_copy_is_not_stored(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        (tmp_path / "jobs").write_text("in the way")
        with pytest.raises(StoreUnusableError):
            submit(store, submission("one"))
        assert store.jobs.all() == ()


def test_nodes_get_no_copy_above_the_limit(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        small = submit(store, submission("small"))[0]
        large = submission("large")
        large = replace(large, spec=JobSpec(name="large", command=("true",), env={"A": os.urandom(COPY_LIMIT).hex()}))
        large_id = submit(store, large)[0]
    values = copy_for_nodes(tmp_path, small, ["node1"])
    assert values is not None
    copy = JobCopy.from_json(json.loads(json.dumps(values)))
    assert (copy.id, tuple(copy.placement)) == (small, ("node1",))
    assert copy_for_nodes(tmp_path, large_id, ()) is None and copy_for_nodes(tmp_path, "j-0009", ()) is None


@pytest.mark.parametrize("damaged", ["", "!", "eJw", "eJyrBQAA"])
def test_a_damaged_packed_copy_is_no_copy(damaged: str) -> None:
    with pytest.raises(ValueError, match="not a copy"):
        JobCopy.from_json({"zlib": damaged})


def test_a_copy_with_a_large_pool_is_small_on_the_nodes(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        hosts = tuple(replace(submission("one").hosts[0], name=f"npu{number:04}") for number in range(1000))
        job_id = submit(store, replace(submission("one"), hosts=hosts))[0]
    copy = copy_for_nodes(tmp_path, job_id, [host.name for host in hosts])
    assert copy is not None and len(json.dumps(copy)) < 20_000
    assert len(JobCopy.from_json(copy).hosts) == 1000


def test_the_newest_record_is_next_to_the_copy(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        submit(store, submission("one"))
        job = replace(store.jobs.find("j-0001").job, state=State.RUNNING)
        store.jobs.save(job, [], now_s=6.0)
        values = read_record(tmp_path, "j-0001")
        assert values is not None and values["state"] == "RUNNING"
    path = job_folder(tmp_path, "j-0001") / "record.json"
    assert path.stat().st_mode & 0o077 == 0
    path.write_text(path.read_text().replace("RUNNING", "STOPPED"))
    assert read_record(tmp_path, "j-0001") is None


SAVE = """
from dataclasses import replace
from pathlib import Path
import sys
from ascendrun.core.jobs.job import State
from ascendrun.head.state.store import Store
store = Store.open(Path(sys.argv[1]))
store.jobs.save(replace(store.jobs.find("j-0001").job, state=State.STOPPED), [], now_s=6.0)
"""


def test_a_state_that_a_command_can_read_is_in_the_record_though_the_controller_dies(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        submit(store, submission("one"))
    environ = {**os.environ, "ASCENDRUN_FAILPOINT": "store.after_commit=kill"}
    died = subprocess.run([sys.executable, "-c", SAVE, str(tmp_path)], env=environ, check=False, capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    values = read_record(tmp_path, "j-0001")
    assert values is not None and values["state"] == "STOPPED"


@pytest.mark.parametrize("flipped", range(0, 60, 7))
def test_a_record_that_was_changed_is_not_read(flipped: int) -> None:
    text = seal({"saved_ns": 1, "state": "RUNNING", "hosts": ["n1"]})
    assert unseal(text)["hosts"] == ["n1"]
    damaged = text[:flipped] + chr(ord(text[flipped]) ^ 1) + text[flipped + 1 :]
    with pytest.raises(ValueError):
        unseal(damaged)
