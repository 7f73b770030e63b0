"""Removal of an ended job or pipeline: its files on the nodes, then on this machine, then its place in the list."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection
from functools import partial
from typing import Callable

from ascendrun.core.errors import ConflictError
from ascendrun.core.node_messages import Failure
from ascendrun.core.retention import Removal
from ascendrun.head.loop.operations import HostOperation, OperationContext
from ascendrun.head.loop.pruning import NODE_S, hosts_of
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol import control_messages as messages
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool.collector import allocated_bytes
from ascendrun.head.state.job_files import job_folder
from ascendrun.head.state.job_table import StoredJob
from ascendrun.head.state.outputs import outputs_dir, read_waiting, waiting_file
from ascendrun.head.state.store import Store
from ascendrun.text import Text

REQUESTED = "requested"
"""Why something was removed."""


class RemoveOperation(HostOperation):
    """One run of `rm`. Raises ConflictError, before anything is removed. `live`: ids of jobs with a runner; `fetching`:
    of jobs with files on their way. `cancel(jobs, done)`: ends their transfers."""

    def __init__(
        self,
        request: messages.Remove,
        store: Store,
        context: OperationContext,
        *,
        live: Collection[str],
        fetching: Collection[str],
        cancel: Callable[[Collection[str], Callable[[], None]], None],
    ) -> None:
        self._request, self._store, self._state_dir, self._cancel = request, store, store.path.parent, cancel
        stored = [store.jobs.find(job_id) for job_id in request.jobs]
        for one in stored:
            self._check(one, live, fetching)
        self._runs = tuple(dict.fromkeys(run for one in stored for run in (one.job.run, one.job.home or one.job.run)))
        self._names = {one.job.pipeline or one.job.id for one in stored}
        self._failed: list[str] = []
        self._is_head_done = False
        super().__init__(tuple(hosts_of(stored).values()), context)

    @property
    def is_done(self) -> bool:
        return self._is_head_done

    def start(self) -> None:
        for host in self._hosts:
            link = self._links.get(host)
            if not link.is_up:
                link.connect()
            request = agent.Prune(self._runs, {}, everything=True)
            link.call(request, deadline_s=NODE_S, done=self._done_of(host))
        if not self._hosts:
            self._remove_here()

    def _check(self, one: StoredJob, live: Collection[str], fetching: Collection[str]) -> None:
        job = one.job
        if not job.is_terminal:
            what = Text("remove.live", "{job} has not ended: {state}", job=job.id, state=job.state.value)
            raise ConflictError(what, hint=f"ascendrun stop {job.id}")
        if job.held_hosts:
            what = Text("remove.held", "processes of {job} may run on {hosts:hosts}", job=job.id, hosts=job.held_hosts)
            raise ConflictError(what, hint=f"ascendrun show {job.id}")
        if self._request.force:
            return
        if job.id in live:
            raise ConflictError(
                Text("remove.copying", "logs of {job} are still being copied", job=job.id),
                hint=Text("remove.copying.hint", "repeat the command later, or add --force"),
            )
        if job.id in fetching:
            raise ConflictError(
                Text("remove.fetching", "files of {job} are being copied", job=job.id),
                hint=Text("remove.copying.hint", "repeat the command later, or add --force"),
            )
        waiting = read_waiting(self._state_dir, job.id)
        if waiting:
            raise ConflictError(
                Text("remove.unfetched", "outputs of {job} are only on {hosts:hosts}", job=job.id, hosts=list(waiting)),
                hint=Text("remove.unfetched.hint", "run `ascendrun fetch {job}`, or add --force", job=job.id),
            )

    # Nodes

    def _take(self, host: str, reply: Reply[agent.PruneReply], received_s: float) -> None:
        if host not in self.waiting:
            return
        self.waiting.discard(host)
        removed = () if reply.error else tuple(Removal(*item, REQUESTED) for item in reply.message.removed.items())
        if reply.error is not None:
            self._failed.append(host)
        self._answer(messages.PruneReply(host, removed, refused=reply.error), b"", False)
        if not self.waiting:
            self._remove_here()

    # This machine

    def _remove_here(self) -> None:
        if self._failed and not self._request.force:
            what = Text("remove.kept", "the job stays in the list: not removed on {hosts:hosts}", hosts=self._failed)
            self._finish(messages.PruneReply(None, refused=Failure("not-removed", what)))
            return
        self._store.jobs.remove(self._request.jobs)
        thread = threading.Thread(target=self._remove_files, daemon=True, name="remove")
        self._cancel(self._request.jobs, thread.start)  # no transfer begins without the job, and none makes directories

    def _remove_files(self) -> None:
        """Run in a thread of its own: large directories take long."""
        folders = [job_folder(self._state_dir, job_id) for job_id in self._request.jobs]
        folders += [outputs_dir(self._state_dir, name) for name in self._names]
        removed, failed = [], None
        for folder in folders:
            removed.append(Removal(folder.name, allocated_bytes(folder), REQUESTED))
            try:
                if folder.is_dir():
                    shutil.rmtree(folder)
            except OSError as error:
                failed = Failure("io-error", f"{error.filename}: {error.strerror}")
        for job_id in self._request.jobs:
            waiting_file(self._state_dir, job_id).unlink(missing_ok=True)
        self._post(partial(self._finish, messages.PruneReply(None, tuple(removed), refused=failed)))

    def _finish(self, reply: messages.PruneReply) -> None:
        self._is_head_done = True
        self._answer(reply, b"", True)
        self._ended()
