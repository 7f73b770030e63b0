"""Stopping a pipeline while its stages end by themselves: a controller that answers as the real one would."""

import importlib.util
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ascendrun
from ascendrun.cluster import Cluster, Job, LogView, MetricsRows
from ascendrun.cluster.files import Files
from ascendrun.core.errors import ConflictError, HostsFailedError, NotFoundError
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Job as Record
from ascendrun.core.jobs.job import NodeProgress, State
from ascendrun.core.node_messages import Failure
from ascendrun.core.settings import Settings
from ascendrun.head.protocol.control_messages import ControllerStatus, FetchReply
from ascendrun.head.protocol.control_socket import Answer, ControlServer
from ascendrun.head.protocol.messages import Done
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.head.state.store import Store
from tests.lib.demo_jobs import insert_job
from tests.lib.story_cluster import Desk, StoryJob, end, make_job, run, says

PIPELINE = "j-0001"


def insert_stages(state_dir: Path, *states: State, **more: Any) -> None:
    """Store a pipeline of the stages prepare and train in these states."""
    store = Store.open(state_dir)
    for number, (stage, state) in enumerate(zip(("prepare", "train"), states), start=1):
        own = {"name": f"pipe.{stage}", "pipeline": PIPELINE, "stage": stage, "hosts": ("a",)}
        insert_job(store, id=f"{PIPELINE}-{number}", state=state, **own, **more)
    store.close()


class Stages:
    """Two stages of one pipeline in a store. The first one ends with success as soon as the second one is stopped."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.stopped: list[str] = []
        insert_stages(state_dir, State.RUNNING, State.QUEUED)

    def serve(self, op: str, header: Any, body: bytes, answer: Answer) -> None:
        if op == "status":
            answer(ControllerStatus(1), b"", True)
            return
        store = Store.open(self.state_dir)
        try:
            job = store.jobs.find(str(header["job"])).job
            if job.is_terminal:
                answer(ConflictError(f"{job.id} has already ended"), b"", True)
                return
            self.stopped.append(job.id)
            self.end(store, job, State.STOPPED)
            self.end(store, store.jobs.find(f"{PIPELINE}-1").job, State.SUCCEEDED)
            answer(Done(), b"", True)
        finally:
            store.close()

    def end(self, store: Store, job: Record, state: State) -> None:
        store.jobs.save(
            replace(job, state=state, ended_at_s=time.time()),
            [Event("state-changed", {"state": state.value})],
            now_s=time.time(),
        )


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[Stages]:
    made = Stages(tmp_path)
    server = ControlServer(tmp_path, made.serve)
    server.start()
    yield made
    server.close()


def test_a_stage_that_ends_while_the_others_are_stopped_is_no_conflict(stages: Stages) -> None:
    cluster = Cluster(Settings(state_dir=stages.state_dir))
    cluster.jobs.stop("pipe")
    assert stages.stopped == [f"{PIPELINE}-2"]  # the last one first, so that none begins meanwhile
    with pytest.raises(ConflictError, match="already ended"):
        cluster.jobs.stop("pipe")


def test_a_job_is_found_by_id_name_and_pipeline(tmp_path: Path) -> None:
    cluster = ascendrun.connect(tmp_path)
    with pytest.raises(NotFoundError):
        cluster.jobs.find("pipe")
    insert_stages(tmp_path, State.SUCCEEDED, State.SUCCEEDED, ended_at_s=2.0)
    for ref in ("j-0001", "pipe"):
        job = cluster.jobs.find(ref)
        assert (job.id, job.state, job.view.name) == ("j-0001", "SUCCEEDED", "pipe")
    assert cluster.jobs.find("pipe.train").id == "j-0001-2" and repr(job) == "Job('j-0001')"
    assert all(f"<th style='text-align:left'>stage {stage}</th>" in job._repr_html_() for stage in ("prepare", "train"))
    assert "j-0009" in Job(cluster, "j-0009")._repr_html_(), "a job that was removed"
    assert "<tr><td>j-0001</td><td>pipe</td><td>SUCCEEDED</td>" in cluster._repr_html_()


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED])
def test_a_job_that_was_restarted_after_its_last_step_shows_that_step_when_it_has_ended(
    tmp_path: Path, state: State
) -> None:
    with Store.open(tmp_path) as store:
        insert_job(store, id="j-0001", state=state, hosts=("a",), nodes=(NodeProgress("a", 0, ranks=(0,)),), attempt=3)
    for attempt, text in ((1, b"step 3: loss 2.5\n"), (2, b"step 6: loss 2.0\n"), (3, b"nothing left to do\n")):
        output = spool_dir(tmp_path, "j-0001", attempt) / "a" / "rank-0.out.0"
        output.parent.mkdir(parents=True)
        output.write_bytes(text)
    progress = Cluster(Settings(state_dir=tmp_path)).jobs.find("j-0001").view.progress
    assert progress is not None and progress["step"] == 6


def test_lines_are_typed_and_not_merged_until_the_job_has_ended(desk: Desk) -> None:
    desk.cluster.story = [run(), says(b"step 1\n"), says(b"only here\n", 2, stream="err"), *end("SUCCEEDED")]
    job = StoryJob(desk.cluster, "j-0001")
    lines = list(job.logs(follow=True))
    assert sorted((line.rank, line.host, line.stream, line.text) for line in lines) == [
        (0, "n1", "out", "step 1"),
        (1, "n1", "out", "step 1"),
        (2, "n2", "err", "only here"),
        (2, "n2", "out", "step 1"),
        (3, "n2", "out", "step 1"),
    ]
    assert all(line.at_s is not None and line.attempt == 1 for line in lines)
    assert [line.text for line in job.logs(LogView(streams=["err"]))] == ["only here"]
    assert job.wait().state == "SUCCEEDED"


@pytest.mark.skipif(importlib.util.find_spec("tqdm") is None, reason="tqdm is not installed")
def test_a_job_is_followed_with_a_bar_until_it_has_ended(
    desk: Desk, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    desk.cluster.story = [run(), says(b"x\n"), *end("SUCCEEDED")]
    desk.cluster.view = replace(desk.cluster.view, progress={"step": 30, "total_steps": 120, "loss": 2.25})
    assert StoryJob(desk.cluster, "j-0001").follow(every_s=0.0).state == "SUCCEEDED"
    shown = capsysbinary.readouterr().err.decode()
    assert "30/120" in shown and "loss=2.25" in shown and "SUCCEEDED" in shown.splitlines()[-1]


def test_metrics_are_rows_under_the_names_of_the_documentation(desk: Desk) -> None:
    desk.cluster.view = make_job(state="SUCCEEDED", attempt=1, ended_at_s=2.0)
    desk.cluster.write(0, b"iter 3: loss 2.5, lr: 1e-4\niter 4: loss 2.25\n", at_s=100.0)
    rows = StoryJob(desk.cluster, "j-0001").metrics()
    assert [(row["timestamp"], row["step"], row["loss"]) for row in rows] == [(100.0, 3, 2.5), (100.0, 4, 2.25)]
    assert rows[0]["learning_rate"] == 1e-4 and "learning_rate" not in rows[1]


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed")
def test_rows_become_a_data_frame() -> None:
    frame = MetricsRows([{"step": 1, "loss": 2.5}, {"step": 2}]).to_pandas()
    assert list(frame.columns) == ["step", "loss"] and frame["step"].tolist() == [1, 2]


@pytest.mark.skipif(importlib.util.find_spec("pandas") is not None, reason="pandas is installed")
def test_without_pandas_rows_name_what_is_missing() -> None:
    with pytest.raises(NotFoundError) as error:
        MetricsRows([{"step": 1}]).to_pandas()
    assert error.value.hint == "pip install pandas"


def test_fetch_returns_directories_and_names_each_host_that_sent_not_all(desk: Desk) -> None:
    replies: list[FetchReply] = []

    class Fetching(Files):
        def fetch(self, ref: str, paths: object = (), *, into: object = None) -> object:
            return iter(replies)

    desk.cluster.files = Fetching(desk.cluster)
    job = StoryJob(desk.cluster, "j-0001")
    here = FetchReply("n1", "/o/n1", 2, 2, 9, 9, (), ended=True)
    replies[:] = [
        FetchReply("n1", "/o/n1", 0, 2, 0, 9),
        here,
        FetchReply("n2", "/o/n2", 0, 0, 0, 0, ("x",), ended=True),
    ]
    assert job.fetch() == (Path("/o/n1"),)
    with pytest.raises(NotFoundError):
        job.fetch("x")
    replies[:] = [
        here,
        FetchReply("n2", "/o/n2", 0, 3, 0, 9, ended=True, problem=Failure("unreachable", "gone", "wait")),
    ]
    with pytest.raises(HostsFailedError) as error:
        job.fetch()
    ((problem,), code) = (error.value.problems, error.value.exit_code)
    assert (problem.file, problem.message, problem.hint, code) == ("n2", "gone", "wait", 6)


def test_a_notebook_shows_the_job_as_a_table_and_nothing_of_it_as_markup(desk: Desk) -> None:
    desk.cluster.view = make_job(
        state="RUNNING", name="<b>x</b>", reason="4 ranks running", progress={"step": 3, "loss": 2.123456789}
    )
    text = StoryJob(desk.cluster, "j-0001")._repr_html_()
    assert "<b>" not in text and "&lt;b&gt;x&lt;/b&gt;" in text
    assert "<td>2.12346</td>" in text and "<td>n[1-2]</td>" in text
