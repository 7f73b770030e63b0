"""The processes of an attempt on this node: those that the supervisor starts, and all others that belong to it."""

from __future__ import annotations

import os

from ascendrun.node import cgroup, layout, reap
from ascendrun.node.supervisor.exit_watch import EXIT_S, LINGER_S, ExitWatch
from ascendrun.node.supervisor.rank_handle import Rank
from ascendrun.node.supervisor.sampler_process import SamplerProcess
from ascendrun.node.supervisor.spool import ROTATE_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ascendrun.node.supervisor.folder import Folder

METRICS_VARIABLE = "ASCENDRUN_METRICS_FILE"


class Processes:
    """`ranks`: those of this node; `launcher`: the process that starts them, with a number below 0, None: none does.

    `group`: their cgroup, None: they have none.
    """

    def __init__(self, prepared: dict[str, Any], folder: Folder, group: str | None) -> None:
        self._prepared, self._streams, self.group = prepared, folder.streams, group
        self.tag = str(prepared["tag"])
        self.root = layout.root_of(folder.path)
        self.sampler = SamplerProcess(self.tag, folder.path)
        self.ranks = [self._make_rank(plan) for plan in prepared["ranks"]]
        plan = prepared.get("launcher")
        self.launcher = self._make_launcher(plan) if plan else None
        self.all = [*([self.launcher] if self.launcher else []), *self.ranks]

    def has_running(self) -> bool:
        return any(process.runs for process in self.all)

    def find(self) -> list[reap.Who]:
        """Return (pid, start time) of every living process of the attempt but supervisor and sampler."""
        leaders = {one.started.pid: one.start_ticks for one in self.all if one.started is not None}
        return reap.find_attempt(
            self.tag,
            root=self.root,
            supervisor=os.getpid(),
            ranks=leaders,
            extra=cgroup.group_pids(self.group),
            has_sampler=self.sampler.is_on,
        )

    def own_files(self, number: int) -> dict[str, str]:
        """Return the variables that name a rank's own files."""
        stem = os.path.join(self._streams, layout.process_name(number))
        return {METRICS_VARIABLE: stem + ".metrics.0", "TORCHELASTIC_ERROR_FILE": stem + ".error.0"}

    def _make_rank(self, plan: dict[str, Any]) -> Rank:
        watch = ExitWatch(
            exit_s=float(self._prepared.get("exit_s", EXIT_S)), linger_s=float(self._prepared.get("linger_s", LINGER_S))
        )
        metrics = plan["env"].get(METRICS_VARIABLE) or self.own_files(int(plan["rank"]))[METRICS_VARIABLE]
        return self._make(plan, watch, metrics)

    def _make_launcher(self, plan: dict[str, Any]) -> Rank:
        number = layout.process_number(int(self._prepared["node_rank"]))
        watch = ExitWatch(exit_s=EXIT_S, linger_s=LINGER_S)
        return self._make(dict(plan, rank=number, local_rank=0), watch, "")

    def _make(self, plan: dict[str, Any], watch: ExitWatch, metrics: str) -> Rank:
        limit = int(self._prepared.get("rotate_bytes", ROTATE_BYTES))
        return Rank(plan, self._streams, limit=limit, watch=watch, metrics=metrics)
