"""A report from what lies in a state folder: store, metrics of every attempt, samples of the job's own devices."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.cli.commands.report import describe_report
from ascendrun.cli.report.page import list_tiles, make_page
from ascendrun.core.errors import NotFoundError
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import NodeProgress, State
from ascendrun.core.jobs.reasons import because
from ascendrun.core.samples import DeviceSample, RankSample
from ascendrun.head.spool.metrics_reader import find_metrics, read_first_rank
from ascendrun.head.state.job_files import write_plan
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.store import Store
from ascendrun.health.report.data import Fewer, Report
from ascendrun.query.report_reader import read_report
from tests.lib.demo_jobs import insert_job, store_job

BEGAN_S = 1_790_000_000.0
STORY = [
    (1.0, "CHECKING: x"),
    (2.0, "STAGING: x"),
    (3.0, "STARTING: x"),
    (4.0, "RUNNING: x"),
    (64.0, "STOPPING: x"),
    (65.0, "BACKOFF: x"),
    (66.0, "QUEUED: attempt 2"),
    (67.0, "CHECKING: x"),
    (68.0, "STAGING: x"),
    (69.0, "STARTING: x"),
    (70.0, "RUNNING: x"),
    (130.0, "SUCCEEDED: all exited 0"),
]


def make_state(state_dir: Path) -> None:
    """A job of two attempts on two hosts, of which the first failed after 40 of its 50 steps were saved."""
    store = Store.open(state_dir)
    spec = {"devices": {"family": "npu", "per_node": 1}}
    job = store_job(store, spec=spec, file="two.yaml", now_s=BEGAN_S, name="two", created_at_s=BEGAN_S)
    for after_s, text in STORY:
        state, _, reason = text.partition(": ")
        values = {"state": state, "reason": because("rejected", why=reason)}
        store.jobs.save(job, [Event("state-changed", values, at_s=BEGAN_S + after_s)], now_s=BEGAN_S + after_s)
    nodes = tuple(NodeProgress(host=host, node_rank=k, ranks=(k,)) for k, host in enumerate("ab"))
    ended = replace(job, state=State.SUCCEEDED, attempt=2, ended_at_s=BEGAN_S + 130.0, world_size=2, nodes=nodes)
    store.jobs.save(ended, [], now_s=BEGAN_S + 130.0)
    store.close()
    write(
        state_dir,
        1,
        "a",
        [{"step": step, "at_s": BEGAN_S + 10 + step, "step_s": 1.0, "loss": 2.0} for step in range(1, 51)],
    )
    write(
        state_dir,
        2,
        "b",
        [{"event": "resume", "step": 40, "at_s": BEGAN_S + 575}]
        + [{"step": step, "at_s": BEGAN_S + 535 + step, "step_s": 1.0, "loss": 1.0} for step in range(41, 91)],
        skew_s=500.0,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written once: every line of the story is synced to the disk."""
    state_dir = tmp_path_factory.mktemp("made") / "state"
    make_state(state_dir)
    return state_dir


def write(
    state_dir: Path,
    attempt: int,
    host: str,
    lines: list[dict[str, Any]],
    *,
    skew_s: float | None = None,
    job: str = "j-0001",
) -> None:
    folder = state_dir / "jobs" / job / f"attempt-{attempt}" / host
    folder.mkdir(parents=True)
    (folder / "rank-0.metrics.0").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if skew_s is not None:
        reading = {"at_s": BEGAN_S, "offset_s": skew_s, "error_s": 0.001}
        (folder / "clock").write_text(json.dumps(reading) + "\n")


def spend(report: Report) -> dict[str, float]:
    return {one.use: one.seconds for one in report.time if one.seconds}


def test_both_attempts_are_read_each_with_its_hosts_clock_taken_off(made: Path) -> None:
    report = read_report(made, "two", now_s=BEGAN_S + 1000)
    assert [(one.first_step, one.last_step, one.resumed) for one in report.attempts] == [(1, 50, None), (41, 90, 40)]
    assert spend(report) == {
        "queue": 1.0,
        "checks": 1.0,
        "staging": 1.0,
        "start-up": 1.0 + 6.0,
        "training": 40.0 + 50.0,
        "lost": 14.0 + 1.0 + 1.0 + 4.0 + 5.0,
        "ending": 5.0,
    }
    assert report.wall_s == 130.0 and report.cost.devices == 2 and report.cost.energy_kwh is None


def test_a_report_compares_with_the_plan_and_with_the_same_training_on_fewer_ranks(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    for name, ranks, speed in (("one", 1, 100.0), ("other", 1, 7.0), ("four", 4, 300.0)):
        batch = {"global_batch_size": 8 * ranks, "hidden_size": 8 if name == "other" else 64}
        spec = {"program": "trajectory", "args": batch, "devices": {"type": "cpu"}}
        times = {"created_at_s": BEGAN_S, "ended_at_s": BEGAN_S + 60}
        own = {"state": State.SUCCEEDED, "attempt": 1, "world_size": ranks, "hosts": ("a",)}
        job = store_job(store, name, spec=spec, now_s=BEGAN_S, name=name, **times, **own)
        line = {"step": 1, "at_s": BEGAN_S + 9, "step_s": 1.0, "tokens_per_s": speed, "samples_per_s": 9.0, "mfu": 0.4}
        folder = tmp_path / "jobs" / job.id / "attempt-1" / "a"
        folder.mkdir(parents=True)
        (folder / "rank-0.metrics.0").write_text(json.dumps(line) + "\n")
    write_plan(tmp_path, job.id, {"tokens_per_s": [250.0, 500.0], "memory_bytes": [2.0**30, 2.0**31]})
    report = read_report(tmp_path, "four", now_s=BEGAN_S + 60)
    store.close()
    assert report.fewer == Fewer("j-0001", 1, 0.75) and report.measured["tokens_per_s"] == 300.0
    tiles = {label: value for value, label in list_tiles(report)}
    assert "300 tokens/s, 9 samples/s, MFU 40.0%" in tiles.values() and "75.0%" in tiles.values()
    assert tiles["tokens/s, measured (planned)"] == "300 (250 – 500)"
    assert tiles["memory of a device, measured (planned)"].startswith("– (")


def test_energy_is_that_of_the_jobs_own_devices(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    samples = SampleStore.open(tmp_path)
    measured: list[DeviceSample | RankSample] = []
    for second in range(0, 140, 2):
        for host in "ab":
            measured += [DeviceSample(BEGAN_S + second, host, device, "npu", power_w=200.0) for device in range(4)]
            measured.append(RankSample(BEGAN_S + second, host, "j-0001", 1, "ab".index(host), device=3))
    samples.add(measured)
    samples.close()
    report = read_report(tmp_path, "j-0001", now_s=BEGAN_S + 1000)
    assert [(one.host, one.device) for one in report.devices] == [("a", 3), ("b", 3)]
    held_s = 130.0 - 1.0 - 2.0  # all but its two waits and the pause between
    assert report.cost.energy_kwh == pytest.approx(2 * 200.0 * held_s / 3.6e6, rel=0.02)


def test_where_no_job_is_there_is_no_report(made: Path, tmp_path: Path) -> None:
    for state_dir, ref in ((tmp_path, "j-0001"), (made, "j-0009")):
        with pytest.raises(NotFoundError):
            read_report(state_dir, ref, now_s=0.0)


def test_of_very_long_metrics_some_lines_are_read_and_how_many_is_known(tmp_path: Path) -> None:
    line = json.dumps({"step": 1, "loss": 2.0, "pad": "x" * 90})
    folder = tmp_path / "a"
    folder.mkdir()
    count = 5000
    (folder / "rank-0.metrics.0").write_text("".join(f"{line}\n" for _ in range(count)) + '{"event": "end"}\n')
    lines, every = read_first_rank(tmp_path, most=1000)
    assert every > 1 and len(lines) == count // every + 1 and lines[-1].event == "end"


def test_where_rank_0_wrote_nothing_the_next_one_is_read(tmp_path: Path) -> None:
    for rank, text in ((0, ""), (3, '{"step": 1}\n')):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"rank-{rank}.metrics.0").write_text(text)
    assert set(find_metrics(tmp_path)) == {0, 3}
    found: tuple[object, ...] = read_first_rank(tmp_path)[0]
    assert len(found) == 1


def test_of_a_pipeline_time_and_cost_are_those_of_all_stages(tmp_path: Path) -> None:
    """A stage waits in the queue while the one before it runs: no stage runs for 20 s of 200."""
    store = Store.open(tmp_path)
    for job_id, stage, since_s, until_s in (("j-0001-1", "base", 10.0, 100.0), ("j-0001-2", "sft", 110.0, 200.0)):
        own = {"name": f"chat.{stage}", "pipeline": "j-0001", "stage": stage, "hosts": ("a",)}
        times = {"created_at_s": BEGAN_S, "ended_at_s": BEGAN_S + until_s}
        spec = {"devices": {"type": "npu", "per_node": 4}}
        job = insert_job(store, spec=spec, id=job_id, state=State.SUCCEEDED, world_size=1, **own, **times)
        for at_s, state in ((BEGAN_S + since_s, "RUNNING"), (BEGAN_S + until_s, "SUCCEEDED")):
            moved = Event("state-changed", {"state": state, "reason": because("rejected", why="x")}, at_s=at_s)
            store.jobs.save(job, [moved], now_s=at_s)
    report = read_report(tmp_path, "j-0001", now_s=BEGAN_S + 300)
    spent = {use.use: use.seconds for use in report.time if use.seconds}
    assert report.wall_s == sum(spent.values()) == 200.0 and spent["queue"] == 20.0
    assert report.cost.device_hours == pytest.approx(4 * 180 / 3600) and report.cost.held_s == 180.0
    alone = read_report(tmp_path, "j-0001-2", now_s=BEGAN_S + 300)
    assert {use.use: use.seconds for use in alone.time}["queue"] == 110.0


def test_of_a_pipeline_the_scores_of_every_stage_are_read_and_of_one_stage_only_its_own(tmp_path: Path) -> None:
    """The final scores of a stage count more than its last evaluation; a stage that was tried again is there once."""
    store = Store.open(tmp_path)
    for stage, job_id, state in (
        ("base", "j-0001-1", State.SUCCEEDED),
        ("evaluate", "j-0001-2", State.FAILED),
        ("evaluate", "j-0001-3", State.SUCCEEDED),
    ):
        own = {"name": f"chat.{stage}", "pipeline": "j-0001", "stage": stage, "hosts": ("a",)}
        times = {"created_at_s": BEGAN_S, "ended_at_s": BEGAN_S + 100.0}
        insert_job(store, id=job_id, state=state, attempt=1, world_size=1, **own, **times)
    start = {"event": "start", "world_size": 2, "tokens_per_step": 600, "flops_per_step": 4e11, "peak_flops": 1e12}
    steps = [{"step": step, "loss": 3.0 - step, "step_s": 0.5} for step in (1, 2)]
    lines = [start, *steps, {"step": 2, "eval_loss": 1.5}, {"done": True, "final_loss": 1.25}]
    write(tmp_path, 1, "a", lines, job="j-0001-1")
    write(tmp_path, 1, "a", [{"step": 2, "eval_sums": 0.5}], job="j-0001-3")

    report = read_report(tmp_path, "chat", now_s=BEGAN_S + 200)
    assert report == read_report(tmp_path, "j-0001", now_s=BEGAN_S + 200) and report.id == "j-0001-3"
    known = [(row.stage, row.job, row.state, row.steps, row.tokens_per_s, row.mfu, row.loss) for row in report.stages]
    assert known == [
        ("base", "j-0001-1", "SUCCEEDED", 2, 1200.0, 0.4, 1.0),
        ("evaluate", "j-0001-3", "SUCCEEDED", None, None, None, None),
    ]
    assert [row.scores for row in report.stages] == [{"loss": 1.25}, {"sums": 0.5}]
    told = describe_report(report)
    assert "base      j-0001-1" in told and "loss 1.25" in told and "sums 0.5" in told
    assert "1,200" in told and "40.0%" in told
    assert "loss 1.25" in make_page(report)
    assert read_report(tmp_path, "j-0001-1", now_s=BEGAN_S + 200).stages == ()
