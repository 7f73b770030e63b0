"""A cluster that plays a story: each look at the job takes one step. As a program: the command line over a story."""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ascendrun.cluster import Cluster, ExecResult, HostStatus, Job, JobDetail, JobView, NodeView, RankView
from ascendrun.cluster.api import Part
from ascendrun.cluster.controller import Controller
from ascendrun.cluster.hosts import Hosts
from ascendrun.cluster.jobs import Jobs
from ascendrun.core.errors import ConflictError, DeadlineExceededError, NotFoundError
from ascendrun.core.events import Event
from ascendrun.core.findings import Finding, Severity
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.reasons import Reason, because
from ascendrun.core.machines import Machine
from ascendrun.core.names import expand_names
from ascendrun.core.settings import Settings
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.health.comparison import DoctorReport, make_report
from ascendrun.health.survey.check_context import CheckContext

HOSTS = ("n1", "n2")
Step = Callable[["StoryCluster"], None]


def told(reason: str) -> Reason:
    """A reason with these words: a code that is not known is shown as it is."""
    return Reason(reason)


def make_job(*, reason: str = "waits for its turn", **changes: Any) -> JobView:
    job = JobView(
        id="j-0001",
        name="demo",
        state="QUEUED",
        reason=told(reason),
        attempt=0,
        hosts=HOSTS,
        world_size=4,
        created_at_s=1_763_600_000.0,
        started_at_s=None,
        ended_at_s=None,
        exit_code=None,
        file="/x/job.yaml",
        progress=None,
    )
    return replace(job, **changes)


class StoryJob(Job):
    """Its view is not a step of the story."""

    @property
    def view(self) -> JobView:
        return self._cluster.view


class StoryJobs(Jobs):
    _cluster: StoryCluster

    def submit(
        self,
        job_file: Path,
        *,
        overrides: Sequence[str] = (),
        hostfile: Path | None = None,
        key: str | None = None,
        resume: str | None = None,
        from_stage: str | None = None,
        until_stage: str | None = None,
        only_stages: Sequence[str] = (),
        priority: int = 0,
        hosts: str | None = None,
        exclude: str | None = None,
        engine: str | None = None,
        install_log: Callable[[str], None] | None = None,
    ) -> Job:
        self._cluster.job_files.validate(job_file, overrides=overrides, hostfile=hostfile)
        self._cluster.calls.append(("submit", job_file.name, tuple(overrides), hostfile))
        return StoryJob(self._cluster, self._cluster.view.id)

    def list(self, *, everything: bool = False, folded: bool = False) -> tuple[JobView, ...]:
        self._cluster.calls.append(("jobs", everything))
        ended = self._cluster.view.state in ("SUCCEEDED", "FAILED", "STOPPED")
        return (self._cluster.view,) if everything or not ended else ()

    def detail(self, ref: str) -> JobDetail:
        if ref not in (self._cluster.view.id, self._cluster.view.name):
            raise NotFoundError(f"no job {ref!r}", hint="ascendrun ps -a")
        if self._cluster.story:
            self._cluster.story.pop(0)(self._cluster)
        nodes = tuple(NodeView(host, i, (2 * i, 2 * i + 1), "ALIVE", "STARTED") for i, host in enumerate(HOSTS))
        return JobDetail(
            job=self._cluster.view,
            run=f"abcd-{self._cluster.view.id}",
            directories=dict.fromkeys(HOSTS, f"~/.ascendrun/nodes/*/runs/abcd-{self._cluster.view.id}"),
            nodes=nodes,
            ranks=self._cluster.ranks,
            events=self._cluster.job_events,
            first_failure=self._cluster.first_failure,
            unconfirmed_hosts=self._cluster.unconfirmed,
            spec={"name": "demo"},
            spares=self._cluster.spares,
        )

    def stop(self, ref: str, *, now: bool = False) -> JobView:
        self._cluster.calls.append(("stop", ref, now))
        if ref not in (self._cluster.view.id, self._cluster.view.name):
            raise NotFoundError(f"no job {ref!r}")
        if self._cluster.view.state in ("SUCCEEDED", "FAILED", "STOPPED"):
            raise ConflictError(f"{ref} has already ended: {self._cluster.view.state}")
        self._cluster.view = replace(self._cluster.view, state="STOPPING", reason=told("stopped by you"))
        return self._cluster.view

    def wait(self, ref: str, *, timeout_s: float | None = None) -> JobDetail:
        self._cluster.calls.append(("wait", ref, timeout_s))
        while self._cluster.view.ended_at_s is None:
            if not self._cluster.story:
                raise DeadlineExceededError(f"{ref} is still {self._cluster.view.state} after {timeout_s:g} s")
            self.detail(ref)
        return self.detail(ref)


class StoryHosts(Hosts):
    _cluster: StoryCluster

    def execute(
        self, hosts: Sequence[Host], argv: Sequence[str], *, timeout_s: float | None = None
    ) -> Iterator[ExecResult]:
        self._cluster.calls.append(("execute", tuple(host.name for host in hosts), tuple(argv), timeout_s))
        yield from self._cluster.answers

    def nodes(
        self, hosts: Sequence[Host], *, timeout_s: float = 15.0, with_usage: bool = False
    ) -> Iterator[HostStatus]:
        self._cluster.calls.append(("nodes", tuple(host.name for host in hosts), timeout_s))
        yield from self._cluster.statuses

    def held(self) -> tuple[Machine, ...]:
        return self._cluster.machines

    def known(self, names: str) -> tuple[Host, ...]:
        return tuple(map(Host, expand_names(names)))

    def undrain(self, hosts: Sequence[Host]) -> tuple[Host, ...]:
        self._cluster.calls.append(("undrain", tuple(host.name for host in hosts)))
        return tuple(hosts)

    def release(self, host: str) -> None:
        self._cluster.calls.append(("release", host))
        found = [machine for machine in self._cluster.machines if host in machine.names]
        if not found:
            raise NotFoundError(f"{host} is not held")
        if found[0].holds[0].processes:
            raise ConflictError(f"{host} shows processes")


class StoryChecks(Part):
    """Not Checks, whose imports would hide what a command loads."""

    _cluster: StoryCluster

    def doctor(self, hosts: Sequence[Host], *, is_full: bool) -> DoctorReport:
        """The light checks: the disks of the hosts in `refused` are full."""
        assert not is_full
        full = [
            Finding("disk-full", Severity.FAIL, (host,), {"path": "/r", "free": 5}) for host in self._cluster.refused
        ]
        return make_report(CheckContext({}), tuple(full), checks=1, wall_s=0.1)

    def before_opening(self, hosts: Sequence[Host]) -> tuple[DoctorReport, set[str]]:
        """The light checks, and the hosts in `refused`."""
        return self.doctor(hosts, is_full=False), {host.name for host in hosts} & {*self._cluster.refused}


class StoryController(Controller):
    _cluster: StoryCluster

    def ensure(self) -> None:
        self._cluster.calls.append(("ensure_controller",))


@dataclass
class StoryCluster(Cluster):
    """`calls`: what was asked of it, in order."""

    settings: Settings
    story: list[Step] = field(default_factory=list)
    view: JobView = field(default_factory=make_job)
    ranks: tuple[RankView, ...] = ()
    first_failure: Reason | None = None
    unconfirmed: tuple[str, ...] = ()
    answers: Sequence[ExecResult] = ()
    statuses: Sequence[HostStatus] = ()
    machines: tuple[Machine, ...] = ()
    job_events: tuple[Event, ...] = ()
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    spares: Mapping[str, str | None] = field(default_factory=dict)
    refused: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__init__(self.settings)
        self.jobs, self.hosts, self.checks = StoryJobs(self), StoryHosts(self), StoryChecks(self)
        self.controller = StoryController(self)

    # what a story does

    @property
    def spool(self) -> Path:
        return spool_dir(self.settings.state_dir, self.view.id, max(1, self.view.attempt))

    def write(self, rank: int, data: bytes, *, stream: str = "out", at_s: float | None = None) -> None:
        folder = self.spool / HOSTS[rank // 2]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank}.{stream}.0"
        with open(path, "ab") as log:
            log.write(data)
        with open(folder / f"rank-{rank}.{stream}.times.0", "ab") as times:
            times.write(struct.pack(">QQ", path.stat().st_size, int((time.time() if at_s is None else at_s) * 1e9)))

    def complete(self) -> None:
        self.spool.mkdir(parents=True, exist_ok=True)
        (self.spool / "complete").touch()


@dataclass
class Run:
    """How a command line ended."""

    code: int
    out: str
    err: str
    raw_out: bytes


@dataclass
class Desk:
    """`cluster` stands behind the command line; `say` runs one."""

    cluster: StoryCluster
    say: Callable[..., Run]
    folder: Path

    @property
    def job_file(self) -> Path:
        return self.folder / "job.yaml"

    def write_settings(self, text: str) -> Path:
        file = self.folder / "config" / "ascendrun" / "config.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file


def state(name: str, **changes: Any) -> Step:
    def step(cluster: StoryCluster) -> None:
        reason = told(changes.pop("reason", ""))
        cluster.view = replace(cluster.view, state=name, reason=reason, **changes)

    return step


def says(data: bytes, *ranks: int, stream: str = "out") -> Step:
    """The ranks say it at one moment, however long the files take to write: what is of one moment folds."""

    def say(cluster: StoryCluster) -> None:
        now_s = time.time()
        for rank in ranks or range(4):
            cluster.write(rank, data, stream=stream, at_s=now_s)

    return say


def end(name: str, **changes: Any) -> list[Step]:
    """The job has ended; its last bytes are here."""
    return [lambda cluster: cluster.complete(), state(name, ended_at_s=1_763_600_090.0, **changes)]


def run(attempt: int = 1, **changes: Any) -> Step:
    return state("RUNNING", attempt=attempt, started_at_s=1_763_600_000.0, world_size=4, **changes)


def once_exists(variable: str) -> Step:
    """The story stands still until the file named by the variable is there."""

    def step(cluster: StoryCluster) -> None:
        if not os.path.exists(os.environ[variable]):
            cluster.story.insert(0, step)

    return step


def rank_fails(rank: int, code: int) -> Step:
    def step(cluster: StoryCluster) -> None:
        cluster.ranks = tuple(
            RankView(
                one,
                HOSTS[one // 2],
                100 + one,
                code if one == rank else None,
                None if one == rank else 15,
                1_763_600_050.0 + one,
                one != rank,
                False,
            )
            for one in range(4)
        )
        cluster.first_failure = because("rank-exited", [HOSTS[rank // 2]], [rank], code=code)

    return step


STORIES: dict[str, Callable[[], list[Step]]] = {
    "good": lambda: [
        state("CHECKING", reason="asking n[1-2]", attempt=1),
        run(),
        says(b"hello\n"),
        says(b"only two\n", 2),
        *end("SUCCEEDED", progress={"step": 10, "loss": 0.25}),
    ],
    "bad": lambda: [
        run(),
        says(b"working\n"),
        says(b"Traceback\nValueError: no data\n", 3, stream="err"),
        rank_fails(3, 7),
        *end("FAILED", reason="rank 3 on n2 ended with exit code 7"),
    ],
    "again": lambda: [
        run(),
        says(b"first\n"),
        lambda cluster: cluster.complete(),
        run(attempt=2),
        says(b"second\n"),
        *end("SUCCEEDED"),
    ],
    "live": lambda: [
        run(progress={"step": 3, "loss": 2.5, "tokens_per_s": 15300.0}),
        says(b"line one\n"),
        once_exists("STORY_MAY_END"),
        *end("SUCCEEDED"),
    ],
}


def main() -> int:
    from ascendrun.cli import main as command_line

    story = STORIES[sys.argv[1]]()
    make: Any = lambda settings: StoryCluster(settings, story)  # noqa: E731  # a cluster only as far as a story goes
    return command_line(sys.argv[2:], make_cluster=make)


if __name__ == "__main__":
    sys.exit(main())
