"""The class `ascendrun.Cluster`: all calls, by subject, and the head node behind them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import ControllerReplacedError, UnreachableError
from ascendrun.core.settings import (
    BLOCKS,
    ENGINE_BLOCK,
    POWER_BLOCK,
    REQUESTER_VARIABLE,
    SETTINGS,
    SHARE_BLOCK,
    Settings,
)
from ascendrun.head.state.user_files import load_settings
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cluster.checks import Checks
    from ascendrun.cluster.controller import Controller
    from ascendrun.cluster.diagnosis import Diagnosis
    from ascendrun.cluster.files import Files
    from ascendrun.cluster.hosts import Hosts
    from ascendrun.cluster.job_files import JobFiles
    from ascendrun.cluster.jobs import Jobs
    from ascendrun.cluster.logs import Logs
    from ascendrun.cluster.queue import Queue
    from ascendrun.cluster.samples import Samples
    from ascendrun.core.hosts import Host
    from ascendrun.head.protocol.control_messages import Survey, SurveyReply
    from ascendrun.head.protocol.control_socket import ControlClient
    from ascendrun.head.protocol.messages import R, Request
    from ascendrun.head.state.store import Store
    from ascendrun.head.survey.submission import Submission
    from ascendrun.health.survey.check_context import CheckContext
    from ascendrun.query.notice_view import NoticeTargetView, NoticeTestResult

PARTS = {
    "job_files": "JobFiles",
    "jobs": "Jobs",
    "logs": "Logs",
    "diagnosis": "Diagnosis",
    "samples": "Samples",
    "hosts": "Hosts",
    "checks": "Checks",
    "files": "Files",
    "controller": "Controller",
    "queue": "Queue",
}
"""Modules and classes of the parts of a cluster."""


@dataclass(frozen=True)
class SettingView:
    """One setting as `config` shows it. `value` None: not set."""

    name: str
    value: str | None
    origin: str
    meaning: Text


def connect(state_dir: str | Path | None = None) -> Cluster:
    """Return the cluster of a state directory; None: that of the settings, as for the command line."""
    return Cluster(state_dir=state_dir)


def take_rebuilt(settings: Settings) -> Mapping[str, Any] | None:
    """Return what was rebuilt after damage to the job list, once: jobs, lost, file, at_s. None: nothing new."""
    from ascendrun.head.state.state_dir import REBUILT_FILE

    path = settings.state_dir / REBUILT_FILE
    if not path.exists():
        return None
    from ascendrun.node.files import read_json

    found = read_json(str(path))
    path.unlink(missing_ok=True)
    return found


class Cluster:
    """One state directory: its store, its controller (started when a call needs it), its jobs.

    Every call raises only children of AscendrunError. A part is imported when it is first used.
    """

    job_files: JobFiles
    jobs: Jobs
    logs: Logs
    diagnosis: Diagnosis
    samples: Samples
    hosts: Hosts
    checks: Checks
    files: Files
    controller: Controller
    queue: Queue

    def __init__(self, settings: Settings | None = None, *, state_dir: str | Path | None = None) -> None:
        """Read the settings. `settings` None: from the environment and the settings files, as the command line does."""
        self.settings = settings or load_settings(
            os.environ, flags={} if state_dir is None else {"state_dir": str(state_dir)}
        )
        self.head = Head(self.settings)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Part:
            if name not in PARTS:
                raise AttributeError(name)
            part = getattr(import_module(f"ascendrun.cluster.{name}"), PARTS[name])(self)
            setattr(self, name, part)
            return part

    def _repr_html_(self) -> str:
        """Return a table of the live jobs and the newest that have ended, for a notebook."""
        from html import escape

        jobs = self.jobs.list(ended=20, folded=True)
        rows = ((job.id, job.name, job.state, ", ".join(job.hosts), str(job.reason)) for job in jobs)
        lines = ("".join(f"<td>{escape(value)}</td>" for value in row) for row in rows)
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    def config(self) -> tuple[SettingView, ...]:
        """Return every setting with its value and origin; notification targets without credentials.

        Raises InvalidInputError: a block of notifications is invalid.
        """
        settings = self.settings
        views = []
        for setting in SETTINGS:
            value = setting.value(settings)
            text = None if value is None else f"{value:g}" if isinstance(value, float) else str(value)
            views.append(SettingView(setting.name, text, settings.origins[setting.name], setting.meaning))
        shown: dict[str, list[str]] = {block: [] for block in BLOCKS}
        origins: dict[str, str] = {}
        if settings.blocks:
            from ascendrun.core.engines import read_engines
            from ascendrun.core.notices.settings import read_notices
            from ascendrun.core.power_settings import read_power
            from ascendrun.core.share_settings import read_share
            from ascendrun.head.notify.delivery import where_of

            for name, engine in read_engines(settings).items():
                shown[ENGINE_BLOCK].append(f"{name} ({engine['type']})")
                origins[ENGINE_BLOCK] = engine["file"]
            notices = read_notices(settings)
            origins.update(notices.origins)
            power = read_power(settings)
            if power is not None:
                shown[POWER_BLOCK], origins[POWER_BLOCK] = [power.command[0]], power.file
            share = read_share(settings)
            if share is not None:
                files = [str(blocks.file) for blocks in settings.blocks if SHARE_BLOCK in blocks.root.entries]
                origins[SHARE_BLOCK] = files[-1]
                shown[SHARE_BLOCK] = sorted({*share.shares, *share.quotas}) or [f"{share.half_life_s / 86_400:g} d"]
            for target in notices.targets:
                name = f"{target.name} ({target.type})" if target.name != target.type else target.name
                shown[target.block].append(f"{name} {where_of(target)}")
        for block, meaning in BLOCKS.items():
            views.append(SettingView(block, ", ".join(shown[block]) or None, origins.get(block, "default"), meaning))
        return tuple(views)

    def notification_targets(self) -> tuple[NoticeTargetView, ...]:
        """Return where notifications go and the result of the last one of each target; without credentials."""
        from ascendrun.core.notices.settings import read_notices
        from ascendrun.query.notice_view import view_targets

        return view_targets(read_notices(self.settings), self.settings.state_dir)

    def test_notifications(self, name: str | None = None) -> tuple[NoticeTestResult, ...]:
        """Send a test notification to one target, or to all."""
        from ascendrun.core.notices.settings import read_notices
        from ascendrun.query.notice_view import send_tests

        return send_tests(read_notices(self.settings), name=name)


POLL_S = 0.1
REPEAT_S = 20.0
"""Seconds for which a request is sent again that a controller did not serve: it died, or became another release."""
SURVEY_S = 180.0
"""Seconds, more than the sum of all deadlines of a survey: connect, probe, compare, connection tests."""


class Head:
    """Requests to the controller of one state directory, and reading of its store."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    def state_dir(self) -> Path:
        return self.settings.state_dir

    @property
    def user(self) -> str:
        """Return who changes jobs and hosts with this cluster."""
        from getpass import getuser

        return os.environ.get(REQUESTER_VARIABLE) or getuser()

    @property
    def sender(self) -> str:
        """Return the user and the machine of a command."""
        return f"{self.user}@{os.uname().nodename}"

    def client(self, *, start_s: float | None = None) -> ControlClient:
        """Return a connection to the controller. Raises UnreachableError when none starts: within `start_s`, None: as
        long as it makes progress."""
        from ascendrun.head.protocol.control_socket import ControlClient

        try:
            return ControlClient(self.state_dir)
        except UnreachableError:
            from ascendrun.head.loop.daemon import START_LIMIT_S, start_controller

            start_controller(self.state_dir, limit_s=START_LIMIT_S if start_s is None else start_s)
            return ControlClient(self.state_dir)

    def request(self, request: Request[R], *, timeout_s: float = 60.0, repeat: bool = False) -> R:
        """Return the controller's reply. `repeat`: send the request again if the controller dies before it replies."""
        until = time.monotonic() + REPEAT_S
        while True:
            try:
                with self.client() as client:
                    return client.call(request, timeout_s=timeout_s)
            except ControllerReplacedError:
                if time.monotonic() > until:
                    raise
            except UnreachableError:
                if not repeat or time.monotonic() > until:
                    raise
            time.sleep(POLL_S)  # a killed controller's socket may still accept for a moment

    def stream(self, request: Request[R], *, timeout_s: float) -> Iterator[tuple[R, bytes]]:
        """Yield the controller's replies as they arrive, each with its bytes."""
        with self.client() as client:
            yield from client.stream(request, timeout_s=timeout_s)

    def survey(self, hosts: Sequence[Host], submission: Submission | None, **choice: Any) -> CheckContext:
        """Return what every host reports about itself; with `submission` in the environment of this job. `choice`: the
        other fields of the request Survey."""
        from ascendrun.head.protocol.control_messages import Survey
        from ascendrun.head.survey.survey_reader import read_world

        request = Survey(tuple(hosts), None if submission is None else submission.to_json(), **choice)
        replies = self.answers(request)
        return read_world(replies, submission, device_type=request.device_type, now_s=time.time())

    def answers(self, request: Survey) -> list[SurveyReply]:
        """Return the raw replies of all hosts of a survey."""
        return [reply for reply, _ in self.stream(request, timeout_s=SURVEY_S)]

    def store(self) -> Store:
        from ascendrun.head.state.store import Store

        return Store.open_for_reading(self.state_dir)


class Part:
    """Calls of one subject of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._head = cluster, cluster.head
