"""Copies of a job's metrics for other tools: CSV, Parquet, TensorBoard's event files, MLflow's store."""

from __future__ import annotations

import math
import posixpath
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ascendrun.core.errors import NotFoundError
from ascendrun.core.metrics import ROW_NAMES, as_row
from ascendrun.output_file import write_bytes
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cluster.api import Cluster

POLL_S = 3.0
NO_SCALARS = frozenset({"timestamp", "step", "total_steps", "event", "path", "phase"})
SUFFIX = ".ascendrun"
"""Of event files of an export; others in the same directory stay."""
RUN_TAG = "ascendrun.job"
NOT_IN_MLFLOW = re.compile(r"[^\w\-. /]")
"""What MLflow does not accept in the name of a metric. A name is also a normal relative path."""
MLFLOW_CHARS, BATCH = 250, 500
"""Characters of a name, and metrics in one call: MLflow accepts 1000."""


@dataclass(frozen=True)
class Run:
    """A job, or one stage of a pipeline. `id`: also the name of its directory, and of its run in MLflow; `key`: equal
    for no jobs of two head nodes, which may share a store."""

    id: str
    key: str
    job_name: str
    options: Mapping[str, Any]
    rows: Sequence[Row]


Row = tuple[int, Mapping[str, Any]]
"""An attempt, and the values of a step under the names of docs/metrics.md."""
Write = Callable[[Run, Sequence[Row]], None]
"""Writes new rows of a run."""


def export_job(
    cluster: Cluster, job: str, file_format: str, into: Path | None, *, has_ended: Callable[[], bool], follow: bool
) -> str:
    """Write the metrics of a job, or of each stage of a pipeline; return where they are.

    `file_format`: csv or parquet (`into`: a file), tensorboard (a directory with one for each run) or mlflow (a
    directory with its database; None: MLflow's own choice, such as $MLFLOW_TRACKING_URI). `follow`: until the job has
    ended; only tensorboard and mlflow. Raises NotFoundError without the package, or if there are no metrics.
    """
    if file_format in TABLES:
        rows = [
            {**place, **row, **place}  # a metric may have such a name
            for run in read_runs(cluster, job)
            for attempt, row in kept(run.rows)
            for place in ({"job": run.id, "attempt": attempt},)
        ]
        if not rows:
            raise _no_metrics(job)
        into = into or Path(f"{job}.{file_format}")
        TABLES[file_format](into, rows)
        return str(into)
    where, write = SINKS[file_format](into)
    seen: Counter[tuple[str, int]] = Counter()
    while True:
        is_last = has_ended() or not follow
        for run in read_runs(cluster, job):
            position: Counter[int] = Counter()
            new = []
            for attempt, row in run.rows:
                position[attempt] += 1
                if position[attempt] > seen[run.id, attempt]:
                    new.append((attempt, row))
            seen.update({(run.id, attempt): count - seen[run.id, attempt] for attempt, count in position.items()})
            if new:
                write(run, kept(new))
        if is_last:
            break
        time.sleep(POLL_S)
    if not seen:
        raise _no_metrics(job)
    return where


def read_runs(cluster: Cluster, job: str) -> Iterator[Run]:
    """Yield the job, or the stages of the pipeline that have started."""
    for job_id in [stored.job.id for stored in cluster.jobs.stages(job)] or [job]:
        detail = cluster.jobs.detail(job_id)
        rows = [
            (attempt, as_row(line))
            for attempt in range(1, detail.job.attempt + 1)
            for line in cluster.samples.metrics(job_id, attempt=attempt)
            if line.step is not None and line.event is None
        ]
        options = detail.spec.get("args")
        key = f"{job_id} {detail.job.created_at_s:.6f}"
        yield Run(job_id, key, detail.job.name, options if isinstance(options, Mapping) else {}, rows)


def kept(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without the steps that a later attempt did again."""
    found: list[Row] = []
    again, last = math.inf, math.inf  # the first step of the later attempts, and of those and this one
    attempt = None
    for row in reversed(rows):
        again, attempt = (again, attempt) if row[0] == attempt else (last, row[0])
        if row[1]["step"] < again:
            found.append(row)
            last = min(last, row[1]["step"])
    return found[::-1]


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a row by the name of their curve: train/loss, eval/accuracy, final/accuracy; a metric of
    the program's own has its own name."""
    found = {}
    for name, value in row.items():
        if name not in NO_SCALARS and isinstance(value, (int, float)):
            part, _, rest = name.partition("_")
            curve = f"train/{name}" if name in ROW_NAMES else name
            found[f"{part}/{rest}" if part in ("eval", "final") and rest else curve] = float(value)
    return found


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import csv
    import io

    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, out.getvalue().encode())


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import io

    arrow, parquet = _need("pyarrow"), _need("pyarrow.parquet")
    out = io.BytesIO()
    names = dict.fromkeys(name for row in rows for name in row)
    parquet.write_table(arrow.table({name: [row.get(name) for row in rows] for name in names}), out)
    write_bytes(path, out.getvalue())


def open_tensorboard(into: Path | None) -> tuple[str, Write]:
    """Return a directory with one directory of event files for each run. Those of an earlier export are replaced."""
    files, proto = _need("tensorboard.summary.writer.event_file_writer"), _need("tensorboard.compat.proto.event_pb2")
    folder = into or Path("runs")
    writers: dict[str, Any] = {}
    newest: dict[str, int] = {}

    def write(run: Run, rows: Sequence[Row]) -> None:
        path = folder / run.id
        if run.id not in writers:
            for old in path.glob(f"events.out.tfevents.*{SUFFIX}"):
                old.unlink()
            writers[run.id] = files.EventFileWriter(str(path), filename_suffix=SUFFIX)
        for attempt, row in rows:
            values = [{"tag": name, "simple_value": value} for name, value in scalars(row).items()]
            at = {"step": row["step"], "wall_time": row.get("timestamp", 0.0)}
            if attempt > newest.setdefault(run.id, attempt):  # TensorBoard drops the steps that are done again
                newest[run.id] = attempt
                writers[run.id].add_event(proto.Event(session_log={"status": "START"}, **at))
            writers[run.id].add_event(proto.Event(summary={"value": values}, **at))
        writers[run.id].flush()

    return str(folder), write


def open_mlflow(into: Path | None) -> tuple[str, Write]:
    """Return the store, with one experiment for each name of a job and one run for each job; an earlier export of the
    same job is the same run."""
    mlflow, entities = _need("mlflow"), _need("mlflow.entities")
    if into is not None:
        into.mkdir(parents=True, exist_ok=True)
    uri = mlflow.get_tracking_uri() if into is None else f"sqlite:///{into.absolute()}/mlflow.db"
    client = mlflow.MlflowClient(tracking_uri=uri)
    runs: dict[str, str] = {}

    def find(run: Run) -> str:
        known = client.get_experiment_by_name(run.job_name)
        experiment = known.experiment_id if known is not None else client.create_experiment(run.job_name)
        found = client.search_runs([experiment], filter_string=f"tags.`{RUN_TAG}` = '{run.key}'", max_results=1)
        if found:
            return str(found[0].info.run_id)
        made = client.create_run(experiment, run_name=run.id, tags={RUN_TAG: run.key})
        for name, value in run.options.items():
            client.log_param(made.info.run_id, str(name), value)
        return str(made.info.run_id)

    def write(run: Run, rows: Sequence[Row]) -> None:
        run_id = runs.get(run.id) or runs.setdefault(run.id, find(run))
        points = [
            entities.Metric(mlflow_name(name), value, int(row.get("timestamp", 0) * 1000), row["step"])
            for _, row in rows
            for name, value in scalars(row).items()
        ]
        for first in range(0, len(points), BATCH):
            client.log_batch(run_id, metrics=points[first : first + BATCH])

    return uri, write


def mlflow_name(name: str) -> str:
    return posixpath.normpath("/" + NOT_IN_MLFLOW.sub("_", name)[:MLFLOW_CHARS]).lstrip("/") or "_"


def _need(module: str) -> ModuleType:
    """Return a module of the extra `trackers`. Raises NotFoundError with the command that installs it."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        what = Text("export.no-package", "{package} is not installed in this Python", package=package)
        raise NotFoundError(what, hint="pip install 'ascendrun[trackers]'") from None


def _no_metrics(job: str) -> NotFoundError:
    return NotFoundError.of("export.no-metrics", "{job} has reported no metrics", job=job)


TABLES = {"csv": write_csv, "parquet": write_parquet}
SINKS = {"tensorboard": open_tensorboard, "mlflow": open_mlflow}
FORMATS = (*TABLES, *SINKS)
