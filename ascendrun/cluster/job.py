"""The class `Job`: one job, or one pipeline, of a cluster, for programs and notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.errors import AscendrunError, DeadlineExceededError, HostsFailedError, NotFoundError
from ascendrun.core.logs.folding import unfold
from ascendrun.core.logs.log_lines import LogLine
from ascendrun.core.logs.log_view import LogView
from ascendrun.core.metrics import as_row
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts

if TYPE_CHECKING:
    from ascendrun.cluster.api import Cluster
    from ascendrun.health.report.data import Report
    from ascendrun.query.explain import Explanation
    from ascendrun.query.views import JobDetail, JobView


class MetricsRows(list[dict[str, Any]]):
    """Rows of metrics: names of docs/metrics.md and values. A row has only the values that its line had."""

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with one column for each name. Raises NotFoundError without pandas."""
        try:
            import pandas
        except ImportError:
            what = Text("api.no-pandas", "pandas is not installed in this Python")
            raise NotFoundError(what, hint="pip install pandas") from None
        return pandas.DataFrame(list(self))


class Job:
    """A job, or a pipeline, by its `id`. Every property and call reads the present state.

    In a notebook it is shown as a table. Calls raise only children of AscendrunError; NotFoundError after its removal.
    """

    def __init__(self, cluster: Cluster, job_id: str, warnings: Sequence[Text] = (), sweep: str = "") -> None:
        """`warnings`, `sweep`: of its submission; the id of the sweep of which it is the first job."""
        self._cluster, self.id, self.warnings, self.sweep = cluster, job_id, tuple(warnings), sweep

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs that were submitted with it: all of its sweep, in their order; else this one."""
        found = self._cluster.samples.sweep(self.sweep) if self.sweep else ()
        return tuple(Job(self._cluster, one.id) for one in found) or (self,)

    @property
    def view(self) -> JobView:
        """The job as `ps` shows it: name, state, reason, hosts, progress, times, exit code."""
        return self._cluster.jobs.pipeline(self.id) or self._cluster.jobs.detail(self.id).job

    @property
    def detail(self) -> JobDetail:
        """The job as `show` shows it: also its nodes, ranks and events. Of a pipeline: its representative stage."""
        return self._cluster.jobs.detail(self.id)

    @property
    def state(self) -> str:
        """Its state, as in `ps`: RUNNING, SUCCEEDED, …"""
        return self.view.state

    def wait(self, *, timeout_s: float | None = None) -> JobView:
        """Return the view of the job, or of the complete pipeline, when it has ended. Raises DeadlineExceededError."""
        self._cluster.jobs.wait(self.id, timeout_s=timeout_s)
        return self.view

    def follow(self, *, every_s: float = 1.0) -> JobView:
        """Show a bar with its steps until it has ended, in a notebook as a widget; return its view. Raises
        NotFoundError without tqdm."""
        try:
            from tqdm.auto import tqdm
        except ImportError:
            raise NotFoundError(Text("api.no-tqdm", "tqdm is not installed"), hint="pip install tqdm") from None
        with tqdm(unit="step") as bar:
            while True:
                view = self.view
                found = view.progress or {}
                bar.total, bar.n = found.get("total_steps") or bar.total, found.get("step") or bar.n
                bar.set_description(f"{view.name} {view.state}", refresh=False)
                shown = {name: _short(found[name]) for name in ("loss", "tokens_per_s") if found.get(name) is not None}
                bar.set_postfix(shown)
                if view.ended_at_s is not None:
                    return view
                with suppress(DeadlineExceededError):
                    self.wait(timeout_s=every_s)

    def stop(self, *, now: bool = False) -> JobView:
        """Request a stop and return immediately; `now`: without time to save. Raises ConflictError if it has ended."""
        return self._cluster.jobs.stop(self.id, now=now)

    def logs(
        self, view: LogView | None = None, *, attempt: int | None = None, follow: bool = False
    ) -> Iterator[LogLine]:
        """Yield each line of each rank, in order of time, of a pipeline stage after stage: host, rank, stream, text,
        `at_s` (arrival, UTC seconds) and attempt. `view`: selects lines; None: all. `attempt` None: the newest.
        `follow`: until it has ended, also later attempts."""
        view = replace(view or LogView(), folds=False)
        for job_id in self._jobs():
            yield from unfold(self._cluster.logs.lines(job_id, view, attempt=attempt, follow=follow))

    def metrics(self, *, rank: int = 0, attempt: int | None = None) -> MetricsRows:
        """Return the metrics that a rank reported, or else those that were read from its output, in order.

        Of a pipeline each row has its `stage`. `attempt` None: the newest.
        """
        stages = {stored.job.id: stored.job.stage for stored in self._cluster.jobs.stages(self.id)} or {self.id: None}
        return MetricsRows(
            {**({} if stage is None else {"stage": stage}), **as_row(line)}
            for job_id, stage in stages.items()
            for line in self._cluster.samples.metrics(job_id, rank=rank, attempt=attempt)
        )

    def export(self, file_format: str, into: str | Path | None = None, *, follow: bool = False) -> str:
        """Write its metrics for other tools; return where they are. `file_format`: csv, parquet, tensorboard, mlflow.

        `into`: a file, of the last two a directory; None: ID.csv, ./runs, or MLflow's own store. `follow`: until it
        has ended (the last two). Raises NotFoundError if a package is missing or there are no metrics.
        """
        from ascendrun.cluster.export import export_job

        target = None if into is None else Path(into)
        has_ended = lambda: self.view.ended_at_s is not None  # noqa: E731
        return export_job(self._cluster, self.id, file_format, target, has_ended=has_ended, follow=follow)

    def fetch(self, *paths: str, into: str | Path | None = None) -> tuple[Path, ...]:
        """Fetch files that the job left on its nodes; return the directories with them, when all are there.

        `paths`: files, directories or patterns; (): the `outputs` of the job file. `into` None: the directory of its
        outputs. Raises NotFoundError if a path matches no file, HostsFailedError with each host that sent not all.
        """
        ended = [reply for reply in self._cluster.files.fetch(self.id, paths, into=into) if reply.ended]
        problems = [reply.problem.problem_of(reply.host) for reply in ended if reply.problem is not None]
        if problems:
            hosts = [problem.file for problem in problems]
            what = Text(
                "api.not-fetched", "{job}: not all files of {hosts:hosts} were fetched", job=self.id, hosts=hosts
            )
            raise HostsFailedError(what, problems=problems)
        missing = sorted({path for reply in ended for path in reply.missing})
        if paths and missing:
            raise NotFoundError.of("api.no-files", "{job}: no file matches {paths}", job=self.id, paths=missing)
        return tuple(dict.fromkeys(Path(reply.folder) for reply in ended if reply.files))

    def report(self) -> Report:
        """Return the course of the job, where its time went and its cost."""
        return self._cluster.diagnosis.report(self.id)

    def explain(self, *, attempt: int | None = None) -> Explanation:
        """Return why an attempt ended, with evidence; of a running job, anomalies. `attempt` None: the newest."""
        return self._cluster.diagnosis.explain(self.id, attempt=attempt)

    def _jobs(self) -> list[str]:
        return [stored.job.id for stored in self._cluster.jobs.stages(self.id)] or [self.id]

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def _repr_html_(self) -> str:
        """Return a table of the job for a notebook."""
        try:
            view = self.view
        except AscendrunError as error:
            return f"<b>{html.escape(self.id)}</b> {html.escape(str(error.message))}"
        rows = {
            "id": view.id,
            "name": view.name,
            "state": view.state,
            "reason": str(view.reason),
            "nodes": fold_hosts(view.hosts),
            "ranks": "" if view.world_size is None else str(view.world_size),
            **{f"stage {stage.stage}": stage.state.value for stage in view.stages},
            **{name: _short(value) for name, value in (view.progress or {}).items()},
        }
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in rows.items()
            if value
        )
        return f"<table>{cells}</table>"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
