"""Requests of commands to the controller: each is handled in its thread, and replied to with its error if it fails."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.errors import AscendrunError, ConflictError, NotFoundError
from ascendrun.core.events import Event
from ascendrun.core.retention import DAY_S
from ascendrun.head.agents.connections import post_later
from ascendrun.head.loop.context import Context
from ascendrun.head.loop.live_jobs import LiveJobs
from ascendrun.head.loop.operations import PROCESS_S, STACKS_S, Operations, RankProcess, Stacks
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol import control_messages as messages
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.messages import Done, Request
from ascendrun.head.state.job_files import pruned_at_s
from ascendrun.head.state.state_dir import StoreDamagedError
from ascendrun.head.state.store_file import LostLeaseError
from ascendrun.head.waiting import in_background
from ascendrun.node.failpoint import failpoint
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.hosts import Host
    from ascendrun.core.jobs.job import Job, NodeProgress

Handler = Callable[[Any, Answer], None]
LOOK_S = 3600.0
FIRST_S = 300.0
"""Seconds after the start until old data is looked for; later every LOOK_S."""


class Requests:
    """Requests of commands; those about the controller itself are added to `handlers`. Use from the controller's
    thread. `heal`: checks the store, and replaces it if it is damaged."""

    def __init__(self, context: Context, jobs: LiveJobs, operations: Operations, *, heal: Callable[[], None]) -> None:
        self._context, self._store, self._jobs, self._operations = context, context.store, jobs, operations
        self._heal, self._prune_due_mono = heal, time.monotonic() + FIRST_S
        self.handlers: dict[type[Request[Any]], Handler] = {
            messages.Submit: self._durable(self._submit),
            messages.ReadJob: self._read_job,
            messages.Stop: self._durable(self._stop),
            messages.Retry: self._durable(self._retry),
            messages.Release: self._durable(self._release),
            messages.ChangeMachines: self._durable(self._change_machines),
            messages.HoldJob: self._durable(self._hold),
            messages.Plan: lambda request, answer: operations.plan(request, answer, self._jobs.placement.place),
            messages.Exec: operations.execute,
            messages.Nodes: operations.query_nodes,
            messages.Survey: operations.survey,
            messages.Sample: lambda request, answer: operations.sample(request, answer, context.samples),
            messages.Grep: self._grep,
            messages.Stacks: self._stacks,
            messages.RankProcess: self._rank_process,
            messages.Put: lambda request, answer: context.outputs.serve_put(request, answer),
            messages.Gather: lambda request, answer: context.artifacts.serve(request, answer),
            messages.Fetch: lambda request, answer: context.outputs.serve(request, answer),
            messages.Prune: self._prune,
            messages.Remove: self._remove,
        }

    def serve(self, op: str, header: Mapping[str, Any], answer: Answer) -> None:
        """Call the handler of a request, and reply with its error if it fails; the controller keeps running.

        Raises LostLeaseError only. A handler that finds that the store is damaged is called again after `heal`: it
        has not replied, and nothing was stored.
        """
        kind = next((kind for kind in self.handlers if kind.OP == op), None)
        if kind is None:
            error = ConflictError.of(
                "control.unknown-request",
                "the controller does not support {op}",
                "run `ascendrun controller stop`",
                op=op,
            )
            answer(error, b"", True)
            return
        found = kind

        def begin() -> None:
            request = found.from_header(header)
            handle = partial(self._guarded, answer, lambda: self.handlers[found](request, answer))
            self._context.replica.after_trees(self._trees_of(request), handle)

        self._guarded(answer, begin)

    def _guarded(self, answer: Answer, call: Callable[[], None]) -> None:
        try:
            try:
                call()
            except StoreDamagedError:
                self._heal()
                call()
        except LostLeaseError:
            raise
        except AscendrunError as error:
            answer(error, b"", True)
        except Exception as error:  # a bug: the log has the traceback, the caller gets the error
            traceback.print_exc()
            what, log = f"{type(error).__name__}: {error}", str(self._context.state_dir / "controller.log")
            failure = AscendrunError(
                Text("control.internal", "internal error of the controller: {error}", error=what),
                hint=Text("control.internal.hint", "report this with the traceback in {log}", log=log),
            )
            answer(failure, b"", True)

    def _trees_of(self, request: Request[Any]) -> set[str]:
        """Return the packed directories of the job that a request starts: a standby gets them before the job."""
        trees: list[Mapping[str, Any]] = []
        if isinstance(request, messages.Submit):
            trees = [tree for one in request.submissions for tree in one["trees"]]
        elif isinstance(request, messages.Retry):
            trees = [*self._store.jobs.find(request.job).trees]
        return {str(tree["sha256"]) for tree in trees}

    def _durable(self, handler: Handler) -> Handler:
        """Return a handler whose reply waits until what it stored is on the standby too."""

        def handle(request: Request[Any], answer: Answer) -> None:
            replica = self._context.replica
            handler(request, lambda reply, body, is_last: replica.after(lambda: answer(reply, body, is_last)))

        return handle

    def _submit(self, request: messages.Submit, answer: Answer) -> None:
        from ascendrun.head.loop.early_look import WAITS_S, look_early
        from ascendrun.head.survey.submission import add_jobs

        failpoint("submit.before_txn")
        added = add_jobs(self._store, request, now_s=time.time())
        failpoint("submit.after_commit_before_ack")
        runners = [self._jobs.add(job, submission) for job, submission in added if not job.is_terminal]
        self._jobs.schedule()
        for runner in runners:
            post_later(self._context.links, WAITS_S, partial(look_early, runner, self._operations, self._jobs.steps))
        answer(messages.Submitted(added[0][0].pipeline or added[0][0].id), b"", True)

    def _read_job(self, request: messages.ReadJob, answer: Answer) -> None:
        """Read in a thread: the file may be on a server that hangs."""

        def read() -> None:
            def reply() -> None:
                from ascendrun.head.survey.job_reading import read_for_command

                answer(read_for_command(request, self._context.state_dir), b"", True)

            self._guarded(answer, reply)

        in_background(read, "read-job")

    def _stop(self, request: messages.Stop, answer: Answer) -> None:
        from ascendrun.core.jobs.inputs import StopRequested

        try:
            job = self._store.jobs.find(request.job).job
        except NotFoundError:
            if not self._jobs.machines.reconciler.stop_found(request.job, request.by, now=request.now):
                raise
            answer(Done(), b"", True)
            return
        if job.is_terminal:
            what = Text("job.already-ended", "{job} has already ended: {state}", job=job.id, state=job.state.value)
            raise ConflictError(what)
        now_s = time.time()
        values = {"grace_s": 0.0 if request.now else job.grace_s, "by": request.by}
        self._store.jobs.save(job, [Event("stop-requested", values, attempt=job.attempt, at_s=now_s)], now_s=now_s)
        self._jobs.steps.feed(job.id, StopRequested(now=request.now, by=request.by))
        self._jobs.steps.work_off()
        answer(Done(), b"", True)

    def _retry(self, request: messages.Retry, answer: Answer) -> None:
        from ascendrun.core.jobs.inputs import RetryRequested

        stored = self._store.jobs.find(request.job)
        job = stored.job
        if job.attempt == request.attempt:
            if not job.is_terminal or job.state.value == "SUCCEEDED":
                what = Text(
                    "retry.not-failed",
                    "{job} is {state}; only a job that failed or was stopped is retried",
                    job=job.id,
                    state=job.state.value,
                )
                raise ConflictError(what)
            self._jobs.adopt(stored)
            self._jobs.steps.feed(job.id, RetryRequested(request.by))
            self._jobs.steps.work_off()
            self._jobs.schedule()
        answer(Done(), b"", True)

    def _release(self, request: messages.Release, answer: Answer) -> None:
        self._jobs.machines.release(request.host, request.by, lambda error: answer(error or Done(), b"", True))

    def _change_machines(self, request: messages.ChangeMachines, answer: Answer) -> None:
        self._jobs.machines.change(request, lambda error: answer(error or Done(), b"", True))

    def _hold(self, request: messages.HoldJob, answer: Answer) -> None:
        from ascendrun.core.jobs.inputs import HoldChanged

        job = self._store.jobs.find(request.job).job
        if request.by is not None and job.state.value not in ("QUEUED", "BACKOFF"):
            raise ConflictError(
                Text("job.not-queued", "{job} is not in the queue: {state}", job=job.id, state=job.state.value),
                hint=f"ascendrun stop {job.id}",
            )
        is_of_admin = self._context.queue is not None and job.held_by not in (None, job.user)
        if is_of_admin and request.ended_by == job.user:
            raise ConflictError.of(
                "job.held-by-admin",
                "{job} is held by {admin}, an administrator of the shared queue",
                "ask {admin} to run: ascendrun unhold {owner}/{job}",
                job=job.id,
                admin=job.held_by,
                owner=job.user,
            )
        self._jobs.steps.feed(job.id, HoldChanged(request.by, request.ended_by))
        self._jobs.steps.work_off()
        answer(Done(), b"", True)

    def _running_hosts(self, job: Job, nodes: Sequence[NodeProgress]) -> list[Host]:
        """Return those of the nodes that run ranks. Raises ConflictError if none does."""
        runner = self._jobs.steps.runners.get(job.id)
        names = {node.host for node in nodes if node.may_run_processes}
        if runner is None or not names:
            what = Text("stacks.not-running", "{job} has no running ranks ({state})", job=job.id, state=job.state.value)
            raise ConflictError(what)
        return [host for host in runner.hosts if host.name in names]

    def _stacks(self, request: messages.Stacks, answer: Answer) -> None:
        job = self._store.jobs.find(request.job).job
        hosts = self._running_hosts(job, job.nodes)
        self._operations.run(Stacks(hosts, self._operations, answer, agent.Stacks(job.run_id), STACKS_S))

    def _rank_process(self, request: messages.RankProcess, answer: Answer) -> None:
        job = self._store.jobs.find(request.job).job
        nodes = [node for node in job.nodes if request.rank in node.ranks]
        if any(request.rank in node.exits for node in nodes):
            what = Text("shell.rank-ended", "rank {rank} of {job} has ended", rank=request.rank, job=job.id)
            raise ConflictError(what, hint=f"ascendrun show {job.id}")
        hosts, asked = self._running_hosts(job, nodes), agent.RankProcess(job.run_id, request.rank)
        self._operations.run(RankProcess(hosts, self._operations, answer, asked, PROCESS_S))

    def _grep(self, request: messages.Grep, answer: Answer) -> None:
        from ascendrun.head.spool.grep import relay
        from ascendrun.head.survey.submission import load_subject

        subject = load_subject(self._store.jobs.find(request.job))
        relay(self._context.links, subject, request, answer)

    # Removal of old data

    def tick(self) -> None:
        """Remove old data once a day, on this machine and on the nodes that are connected."""
        if time.monotonic() < self._prune_due_mono:
            return
        self._prune_due_mono = time.monotonic() + LOOK_S
        if time.time() - (pruned_at_s(self._context.state_dir) or 0.0) > DAY_S:
            self._prune(messages.Prune(), lambda reply, body, is_last: None, hosts_up_only=True)

    def _prune(self, request: messages.Prune, answer: Answer, *, hosts_up_only: bool = False) -> None:
        from ascendrun.head.loop.pruning import PruneOperation

        live = {runner.job.id for runner in self._jobs}
        parts = self._store, self._operations, answer, self._context.retention
        self._operations.run(PruneOperation(request, *parts, live=live, hosts_up_only=hosts_up_only))

    def _remove(self, request: messages.Remove, answer: Answer) -> None:
        from ascendrun.head.loop.pruning import RemoveOperation

        live = {runner.job.id for runner in self._jobs}
        parts = self._store, self._operations, answer, self._context.outputs
        self._operations.run(RemoveOperation(request, *parts, live=live))
