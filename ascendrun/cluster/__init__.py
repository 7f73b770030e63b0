"""Python API: everything that the command line does, as method calls. The command line uses this package only.

import ascendrun

job = ascendrun.connect().submit("jobs/quickstart.yaml")
for line in job.logs(follow=True):
    print(line.rank, line.text)

A name is imported when it is first used: a command pays only for what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascendrun.backends.trust import HostKeyScan
    from ascendrun.cluster.api import Cluster, connect
    from ascendrun.cluster.job import Job, MetricsRows
    from ascendrun.core.events import Event
    from ascendrun.core.logs.log_lines import LogLine
    from ascendrun.core.logs.log_view import LogView
    from ascendrun.core.settings import Settings
    from ascendrun.head.protocol.control_messages import ControllerStatus
    from ascendrun.health.report.usage import JobUse
    from ascendrun.planner.plan import TrainingPlan
    from ascendrun.query.bundle.job import Bundle
    from ascendrun.query.deep_check import DeepCheck
    from ascendrun.query.event_stream import EventStream
    from ascendrun.query.explain import Explanation, JobStacks, StackGroup
    from ascendrun.query.host_views import DeviceUse, ExecResult, HostStatus, MachineView
    from ascendrun.query.log_files import AttemptFiles, LogFile
    from ascendrun.query.log_follow import FollowUpdate
    from ascendrun.query.log_gaps import LogGap
    from ascendrun.query.new_job import NewJob
    from ascendrun.query.notice_view import NoticeTargetView, NoticeTestResult
    from ascendrun.query.submit import ValidStage
    from ascendrun.query.templates import Template
    from ascendrun.query.top_source import SampledCluster, TopSource
    from ascendrun.query.views import JobDetail, JobView, NodeView, RankView

__all__ = [
    "AttemptFiles",
    "Bundle",
    "Cluster",
    "ControllerStatus",
    "DeepCheck",
    "DeviceUse",
    "Event",
    "EventStream",
    "ExecResult",
    "Explanation",
    "FetchReply",
    "FollowUpdate",
    "HostKeyScan",
    "HostStatus",
    "MachineView",
    "Job",
    "JobDetail",
    "JobStacks",
    "JobUse",
    "JobView",
    "LogFile",
    "LogGap",
    "LogLine",
    "LogView",
    "MetricsRows",
    "NewJob",
    "NodeView",
    "NoticeTargetView",
    "NoticeTestResult",
    "PruneReply",
    "RankView",
    "SampledCluster",
    "Settings",
    "StackGroup",
    "Template",
    "TopSource",
    "TrainingPlan",
    "ValidStage",
    "connect",
]

_MODULES = {
    "backends.trust": ("HostKeyScan",),
    "cluster.api": ("Cluster", "connect"),
    "cluster.job": ("Job", "MetricsRows"),
    "core.events": ("Event",),
    "core.logs.log_lines": ("LogLine",),
    "core.logs.log_view": ("LogView",),
    "core.settings": ("Settings",),
    "head.protocol.control_messages": ("ControllerStatus", "FetchReply", "PruneReply"),
    "health.report.usage": ("JobUse",),
    "query.bundle.job": ("Bundle",),
    "query.deep_check": ("DeepCheck",),
    "query.event_stream": ("EventStream",),
    "query.explain": ("Explanation", "JobStacks", "StackGroup"),
    "query.host_views": ("DeviceUse", "ExecResult", "HostStatus", "MachineView"),
    "query.log_files": ("AttemptFiles", "LogFile"),
    "query.log_follow": ("FollowUpdate",),
    "query.log_gaps": ("LogGap",),
    "planner.plan": ("TrainingPlan",),
    "query.new_job": ("NewJob",),
    "query.notice_view": ("NoticeTargetView", "NoticeTestResult"),
    "query.submit": ("ValidStage",),
    "query.templates": ("Template",),
    "query.top_source": ("SampledCluster", "TopSource"),
    "query.views": ("JobDetail", "JobView", "NodeView", "RankView"),
}
"""Module that defines each name of this package."""


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"ascendrun.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
