"""bundle lists what is in the archive before and after, and says where it is."""

import tarfile
import time

import pytest

from ascendrun.core.jobs.job import Job
from ascendrun.head.state.store import Store
from tests.lib.demo_jobs import store_job
from tests.lib.story_cluster import Desk


@pytest.fixture
def job(desk: Desk) -> Job:
    with Store.open(desk.folder / "state") as store:
        return store_job(store, spec={"env": {"API_KEY": "q1w2e3r4t5"}}, now_s=time.time(), hosts=("n1",))


def test_the_list_comes_first_and_the_same_list_after(desk: Desk, job: Job) -> None:
    dry = desk.say("bundle", "demo", "--dry-run")
    assert dry.code == 0 and "dry run" in dry.err and not list(desk.folder.glob("*.tar.gz"))
    done = desk.say("bundle", "demo")
    assert done.code == 0 and done.out == dry.out and "spec.json" in done.out
    path = desk.folder / f"ascendrun-{job.id}.tar.gz"
    assert str(path.name) in done.err and "sha256" in done.err and "1 secret " in done.err
    assert desk.say("bundle", "demo", "--layout", "ascend-fd").code == 0  # beside the other, not over it
    assert (desk.folder / f"ascend-fd-{job.id}.tar.gz").exists()
    with tarfile.open(path) as tar:
        assert {name.partition("/")[2] for name in tar.getnames()} == {
            "MANIFEST.json",
            *(line.split()[0] for line in done.out.splitlines()[1:]),
        }


def test_a_request_that_cannot_be_met_is_refused(desk: Desk, job: Job) -> None:
    unknown, unwritable = desk.say("bundle", "other"), desk.say("bundle", "demo", "-O", "/nowhere/at/all/x.tar.gz")
    assert unknown.code == 4 and "'other'" in unknown.err
    assert unwritable.code == 2 and "-O FILE.tar.gz" in unwritable.err
