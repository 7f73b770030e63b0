"""Python API: everything that the command line does, as method calls. The command line uses this package only.

import ascendrun

job = ascendrun.connect().jobs.submit("jobs/quickstart.yaml")
for line in job.logs(follow=True):
    print(line.rank, line.text)

A name is imported when it is first used: a command pays only for what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascendrun import lazy_names

if TYPE_CHECKING:
    from ascendrun.backends.ssh import HostKeyScan as HostKeyScan
    from ascendrun.cluster.api import Cluster as Cluster
    from ascendrun.cluster.api import SettingView as SettingView
    from ascendrun.cluster.api import connect as connect
    from ascendrun.cluster.job import Job as Job
    from ascendrun.cluster.job import MetricsRows as MetricsRows
    from ascendrun.core.events import Event as Event
    from ascendrun.core.logs.log_lines import LogLine as LogLine
    from ascendrun.core.logs.log_view import LogView as LogView
    from ascendrun.core.settings import Settings as Settings
    from ascendrun.head.protocol.control_messages import ControllerStatus as ControllerStatus
    from ascendrun.head.protocol.control_messages import FetchReply as FetchReply
    from ascendrun.head.protocol.control_messages import PruneReply as PruneReply
    from ascendrun.head.queue.messages import QueueRow as QueueRow
    from ascendrun.head.state.user_files import load_settings as load_settings
    from ascendrun.health.report.cost import JobUse as JobUse
    from ascendrun.planner.plan import TrainingPlan as TrainingPlan
    from ascendrun.query.bundle.job import Bundle as Bundle
    from ascendrun.query.deep_check import DeepCheck as DeepCheck
    from ascendrun.query.explain import Explanation as Explanation
    from ascendrun.query.explain import JobStacks as JobStacks
    from ascendrun.query.explain import StackGroup as StackGroup
    from ascendrun.query.host_views import DeviceUse as DeviceUse
    from ascendrun.query.host_views import ExecResult as ExecResult
    from ascendrun.query.host_views import HostStatus as HostStatus
    from ascendrun.query.host_views import MachineView as MachineView
    from ascendrun.query.log_files import AttemptFiles as AttemptFiles
    from ascendrun.query.log_files import LogFile as LogFile
    from ascendrun.query.log_files import LogGap as LogGap
    from ascendrun.query.log_follow import EventStream as EventStream
    from ascendrun.query.log_follow import FollowUpdate as FollowUpdate
    from ascendrun.query.notice_view import NoticeTargetView as NoticeTargetView
    from ascendrun.query.notice_view import NoticeTestResult as NoticeTestResult
    from ascendrun.query.submit import ValidStage as ValidStage
    from ascendrun.query.templates import NewJob as NewJob
    from ascendrun.query.templates import Template as Template
    from ascendrun.query.top_source import TopSource as TopSource
    from ascendrun.query.views import JobDetail as JobDetail
    from ascendrun.query.views import JobView as JobView
    from ascendrun.query.views import NodeView as NodeView
    from ascendrun.query.views import RankView as RankView
else:
    __getattr__, __dir__ = lazy_names(__name__)
