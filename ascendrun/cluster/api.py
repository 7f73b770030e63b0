"""The class `ascendrun.Cluster`: all calls, by subject."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.cluster.checks import Checks
from ascendrun.cluster.controller import Controller
from ascendrun.cluster.diagnosis import Diagnosis
from ascendrun.cluster.files import Files
from ascendrun.cluster.head import Head
from ascendrun.cluster.hosts import Hosts
from ascendrun.cluster.job_files import JobFiles
from ascendrun.cluster.jobs import Jobs
from ascendrun.cluster.logs import Logs
from ascendrun.cluster.samples import Samples
from ascendrun.core.settings import Settings
from ascendrun.head.state.user_files import load_settings

if TYPE_CHECKING:
    from ascendrun.query.notice_view import NoticeTargetView, NoticeTestResult
    from ascendrun.query.settings_view import SettingView


def connect(state_dir: str | Path | None = None) -> Cluster:
    """Return the cluster of a state directory; None: that of the settings, as for the command line."""
    return Cluster(state_dir=state_dir)


class Cluster:
    """One state directory: its store, its controller (started when a call needs it), its jobs.

    Every call raises only children of AscendrunError.
    """

    def __init__(self, settings: Settings | None = None, *, state_dir: str | Path | None = None) -> None:
        """Read the settings. `settings` None: from the environment and the settings files, as the command line does."""
        self.settings = settings or load_settings(
            os.environ, flags={} if state_dir is None else {"state_dir": str(state_dir)}
        )
        self.head = Head(self.settings)
        self.job_files = JobFiles(self)
        self.jobs = Jobs(self)
        self.logs = Logs(self)
        self.diagnosis = Diagnosis(self)
        self.samples = Samples(self)
        self.hosts = Hosts(self)
        self.checks = Checks(self)
        self.files = Files(self)
        self.controller = Controller(self)

    def config(self) -> tuple[SettingView, ...]:
        """Return every setting with its value and origin; notification targets without credentials."""
        from ascendrun.query.settings_view import view_settings

        return view_settings(self.settings)

    def notification_targets(self) -> tuple[NoticeTargetView, ...]:
        """Return where notifications go and the result of the last one of each target; without credentials."""
        from ascendrun.core.notice_settings import read_notices
        from ascendrun.query.notice_view import view_targets

        return view_targets(read_notices(self.settings), self.settings.state_dir)

    def test_notifications(self, name: str | None = None) -> tuple[NoticeTestResult, ...]:
        """Send a test notification to one target, or to all."""
        from ascendrun.core.notice_settings import read_notices
        from ascendrun.query.notice_view import send_tests

        return send_tests(read_notices(self.settings), name=name)
