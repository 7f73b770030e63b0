"""The start of an attempt: its directories are staged, every node prepares it, then each gets GO."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.core.events import Event
from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.plan_text import prepare_request
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import shared_homes
from ascendrun.head.loop.job.copies import JobCopies
from ascendrun.head.loop.job.leases import Leases
from ascendrun.head.loop.job.live_job import LiveJob
from ascendrun.head.loop.job.survey import JobSurvey
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.state.job_files import copy_for_nodes
from ascendrun.head.state.state_dir import claim_spool_dir, spool_dir, write_placement
from ascendrun.head.survey.staging import TreePush, push_once_per_home, read_secret_env

CHECK_S = 60.0
STAGE_S = 120.0


class JobStart:
    """Staging, readiness and GO of the present attempt, after `survey`."""

    def __init__(self, live: LiveJob, survey: JobSurvey, copies: JobCopies) -> None:
        self._live, self._survey, self._copies = live, survey, copies
        self._copy = copy_for_nodes(live.context.state_dir, live.job.id)
        self._pushes: dict[str, TreePush] = {}

    def stage(self) -> None:
        self._pushes = {}
        push_once_per_home(self._live.job.hosts, shared_homes(self._survey.reports), self._push)

    def _push(self, host: str, then: Callable[[], None]) -> None:
        attempt = self._live.job.attempt

        def staged(failure: Failure | None) -> None:
            if failure is not None:
                self._live.refuse(host, failure)
            elif self._live.job.attempt == attempt:
                self._live.feed(inputs.NodeStaged(host))
                then()

        self._pushes[host] = self.send_trees(host, staged)

    def send_trees(self, host: str, done: Callable[[Failure | None], None]) -> TreePush:
        """Send the job's directories to a host; `done` gets why that failed, None: they are there."""
        push = TreePush(
            self._live.context.state_dir,
            self._live.trees,
            query=lambda request, body, then: self._live.call(host, request, body, deadline_s=STAGE_S, then=then),
            done=done,
        )
        push.send_next()
        return push

    def staged_bytes(self) -> dict[str, tuple[int, int]]:
        """Return, by host, the bytes of the job's directories that are there, and their total."""
        return {host: (push.done_bytes, push.total_bytes) for host, push in self._pushes.items()}

    def prepare(self, host: str) -> None:
        live, plan = self._live, self._survey.plan
        assert plan is not None, "PrepareNodes before the plan"
        node = next(node for node in plan.nodes if node.host == host)

        def prepared(reply: Reply[agent.PrepareReply]) -> None:
            if reply.error is None:
                self._note_pointer(host, reply.message.pointer)
                hccl = reply.message.hccl if plan.hccl_bases else None
                live.feed(inputs.NodeReady(host, reply.message.master_port, hccl))
            elif reply.error.code == "stage-files-missing":
                live.feed(inputs.StageFilesMissing(host))
            else:
                live.refuse(host, reply.error)

        copy = None if self._copy is None else {**self._copy, "placement": list(live.job.hosts)}
        files, may_lack = live.job.node(host).replaces, live.job.request.may_lack_files
        more = {} if files is None else {"work_of": files.machine_key, "may_lack_work": may_lack}
        request = agent.Prepare.from_header({**prepare_request(node, plan), **more, "job": copy})
        live.call(host, request, deadline_s=CHECK_S, then=prepared)

    def _note_pointer(self, host: str, pointer: Mapping[str, Any] | None) -> None:
        if pointer is not None:
            job = self._live.job
            values = {"path": pointer["path"], "before": pointer["before"], "step": pointer["step"]}
            event = Event("checkpoint-pointer-repaired", values, (host,), attempt=job.attempt, at_s=time.time())
            self._live.context.record(job.id, [event])

    def record_placement(self) -> None:
        job, state_dir = self._live.job, self._live.context.state_dir
        folder = spool_dir(state_dir, job.id, job.attempt)
        with suppress(OSError):  # no space: the record of the job has it
            claim_spool_dir(folder, job.run_id)
            write_placement(folder, job.hosts)

    def go(self, host: str, leases: Leases) -> None:
        live = self._live
        try:
            secret_env = read_secret_env(live.spec)
        except AscendrunError as error:
            live.refuse(host, Failure.of(error))
            return

        def started(reply: Reply[agent.GoReply]) -> None:
            if reply.error is None:
                self._copies.present.follow(host)
            elif reply.error.code not in ("connection-lost", "deadline"):  # else repeated: it may have been received
                live.refuse(host, reply.error)

        leases.begin(host)
        request = agent.Go(live.job.run_id, live.job.master_port, secret_env, live.job.hccl_base)
        live.call(host, request, then=started)
