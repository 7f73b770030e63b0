"""Metrics of a job as tables and as event files, of one attempt after the other."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
from pathlib import Path

import pytest

from ascendrun.cluster.export import kept, mlflow_name, scalars
from ascendrun.core.errors import NotFoundError
from tests.lib.story_cluster import Desk, StoryJob, make_job

needs_board = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="not on this Python")


def write_attempt(
    desk: Desk, attempt: int, *lines: str, state: str = "RUNNING", ended_at_s: float | None = None
) -> None:
    desk.cluster.view = make_job(state=state, attempt=attempt, ended_at_s=ended_at_s)
    desk.cluster.write(0, "".join(f"{line}\n" for line in lines).encode(), at_s=100.0 + attempt)


def curve(folder: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of a directory of event files, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in read.Scalars("train/loss")]


def test_a_table_has_the_steps_of_all_attempts_and_each_once(desk: Desk) -> None:
    write_attempt(desk, 1, *(f"iter {step}: loss {step}.5, lr: 1e-4" for step in (1, 2, 3)))
    write_attempt(desk, 2, "iter 2: loss 20.5", "iter 3: loss 30.5", state="SUCCEEDED", ended_at_s=2.0)
    where = StoryJob(desk.cluster, "j-0001").export("csv", desk.folder / "loss.csv")
    rows = list(csv.DictReader(Path(where).read_text().splitlines()))
    found = [(row["attempt"], row["step"], row["loss"], row["learning_rate"]) for row in rows]
    assert found == [("1", "1", "1.5", "0.0001"), ("2", "2", "20.5", ""), ("2", "3", "30.5", "")]


def test_the_last_of_three_attempts_counts() -> None:
    rows = [(1, {"step": step}) for step in (1, 2, 3)] + [(2, {"step": 3})] + [(3, {"step": step}) for step in (2, 3)]
    assert [(attempt, row["step"]) for attempt, row in kept(rows)] == [(1, 1), (3, 2), (3, 3)]


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="not on this Python")
def test_a_parquet_file_has_the_same_columns(desk: Desk) -> None:
    import pyarrow.parquet

    write_attempt(desk, 1, "iter 1: loss 1.5, lr: 1e-4", "iter 2: loss 2.5")
    table = pyarrow.parquet.read_table(StoryJob(desk.cluster, "j-0001").export("parquet", desk.folder / "a.parquet"))
    assert table.column("loss").to_pylist() == [1.5, 2.5] and table.column("learning_rate").to_pylist() == [1e-4, None]


@needs_board
def test_event_files_follow_a_job_over_its_attempts(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    write_attempt(desk, 1, *(f"iter {step}: loss {step}.5" for step in (1, 2, 3)))

    def next_attempt(_: float) -> None:
        write_attempt(desk, 2, "iter 3: loss 30.5", state="SUCCEEDED", ended_at_s=2.0)

    monkeypatch.setattr("ascendrun.cluster.export.time.sleep", next_attempt)
    where = StoryJob(desk.cluster, "j-0001").export("tensorboard", desk.folder / "runs", follow=True)
    expected = [(1, 1.5), (2, 2.5), (3, 30.5)]
    assert curve(Path(where) / "j-0001") == expected
    mine = desk.folder / "runs" / "j-0001" / "events.out.tfevents.1.mine"
    mine.touch()
    StoryJob(desk.cluster, "j-0001").export("tensorboard", desk.folder / "runs")
    assert curve(Path(where) / "j-0001") == expected and mine.exists(), "a second export replaces the first"


def test_what_is_missing_is_named(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.cluster.view = make_job(state="SUCCEEDED", attempt=1, ended_at_s=2.0)
    with pytest.raises(NotFoundError) as none:
        StoryJob(desk.cluster, "j-0001").export("csv", desk.folder / "x.csv")
    assert none.value.message.key == "export.no-metrics" and not (desk.folder / "x.csv").exists()
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(NotFoundError) as package:
        StoryJob(desk.cluster, "j-0001").export("mlflow")
    assert package.value.hint == "pip install 'ascendrun[trackers]'"
    assert desk.say("export", "j-0001", "--format", "csv", "-f").code == 2


def test_a_metric_keeps_the_name_that_the_program_gave(desk: Desk) -> None:
    values = {"loss": 1.5, "rewards/mean": -0.25, "attempt": 7, "own": 3, "kl": "nan", "note": "text", "ok": True}
    write_attempt(desk, 1, "started", state="SUCCEEDED", ended_at_s=2.0)
    (desk.cluster.spool / "n1" / "rank-0.metrics.0").write_text(
        "".join(json.dumps({"timestamp": 1.0, "step": step, **values}) + "\n" for step in (1, 2))
    )
    where = StoryJob(desk.cluster, "j-0001").export("csv", desk.folder / "all.csv")
    rows = list(csv.DictReader(Path(where).read_text().splitlines()))
    assert [(row["loss"], row["rewards/mean"], row["own"]) for row in rows] == [("1.5", "-0.25", "3.0")] * 2
    assert rows[0].keys() == {"job", "attempt", "rewards/mean", "own", "timestamp", "step", "loss"}
    assert scalars({"step": 1, "loss": 1.5, "rewards/mean": -0.25}) == {"train/loss": 1.5, "rewards/mean": -0.25}


@pytest.mark.parametrize(
    ("name", "expected"), [("rewards/mean", "rewards/mean"), ("a(b)", "a_b_"), ("/../x//y/", "x/y"), ("损失", "损失")]
)
def test_mlflow_accepts_the_name(name: str, expected: str) -> None:
    assert mlflow_name(name) == expected
    if importlib.util.find_spec("mlflow") is not None:
        importlib.import_module("mlflow.utils.validation")._validate_metric_name(expected)
