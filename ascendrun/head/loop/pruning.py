"""Removal of data of ended jobs: old logs here and on the nodes, staged directories that nothing uses, entire jobs."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.core.errors import ConflictError
from ascendrun.core.hosts import Host, load_hosts
from ascendrun.core.jobs.job import Job
from ascendrun.core.node_messages import Failure
from ascendrun.core.retention import Removal, Retention, Stored, choose_removals
from ascendrun.head.agents.connections import dialled
from ascendrun.head.loop.operations import HostOperation, Operations
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol import control_messages as messages
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool.collector import allocated_bytes
from ascendrun.head.state import job_files
from ascendrun.head.state.job_table import StoredJob
from ascendrun.head.state.state_dir import tree_file
from ascendrun.head.state.store import Store
from ascendrun.head.waiting import in_background
from ascendrun.node.files import write_json
from ascendrun.node.layout import make_run
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.spool.output_fetch import OutputFetcher

KEPT_FILES = frozenset({job_files.COPY_FILE, job_files.RECORD_FILE, job_files.PRUNED_FILE})
NODE_S = 600.0
REQUESTED = "requested"
LATER = Text("remove.copying.hint", "repeat the command later, or add --force")
"""Why something was removed."""
_PACKED = re.compile(r"([0-9a-f]{64})\.tar")


class PruneOperation(HostOperation):
    """One run of `prune`: one reply for this machine, and one for each host.

    `live`: ids of jobs with a runner. `hosts_up_only`: leave out hosts without a connection, instead of connecting.
    """

    CONNECT_TRIES = 3

    def __init__(
        self,
        request: messages.Prune,
        store: Store,
        operations: Operations,
        answer: Answer,
        retention: Retention,
        *,
        live: Collection[str],
        hosts_up_only: bool = False,
    ) -> None:
        self._request, older_s = request, request.older_s
        self._retention = retention if older_s is None else replace(retention, keep_jobs_s=older_s, keep_node_s=older_s)
        self._store, self._state_dir, self._head_id = store, store.path.parent, store.head_id
        stored = store.jobs.all()
        self._jobs = {one.job.id: one.job for one in prunable_jobs(stored, live=live, keep=request.keep)}
        hosts = hosts_of([one for one in stored if one.job.id in self._jobs])
        if hosts_up_only:
            connected = {dialled(link.host) for link in operations.links if link.is_up}  # `get` would start to connect
            hosts = [host for host in hosts if dialled(host) in connected]
        self._is_head_done = False
        super().__init__(hosts, operations, answer, agent.Usage(store.head_id), NODE_S)

    @property
    def is_done(self) -> bool:
        return self._is_head_done and not self.waiting

    def start(self) -> None:
        in_background(self._prune_head, "prune")
        super().start()

    # This machine

    def _prune_head(self) -> None:
        """Run in a thread of its own: large directories take long."""
        now_s, limits = time.time(), self._retention
        sizes = {job_id: allocated_bytes(job_files.job_folder(self._state_dir, job_id)) for job_id in self._jobs}
        stored = [
            Stored(job_id, self._jobs[job_id].ended_at_s or now_s, size)
            for job_id, size in sizes.items()
            if has_logs(job_files.job_folder(self._state_dir, job_id))
        ]
        chosen = choose_removals(stored, now_s=now_s, max_age_s=limits.keep_jobs_s, max_bytes=limits.keep_jobs_bytes)
        failed = None
        try:
            if not self._request.dry_run:
                for one in chosen:
                    remove_logs(self._state_dir, one, now_s=now_s)
                write_json(str(self._state_dir / job_files.PRUNED_FILE), {"at_s": now_s})
        except OSError as error:
            failed = Failure("io-error", f"{error.filename}: {error.strerror}")
        self._post(partial(self._finish_head, messages.PruneReply(None, chosen, refused=failed)))

    def _finish_head(self, reply: messages.PruneReply) -> None:
        """Remove packed directories too: in the controller's thread, where no job is submitted meanwhile."""
        packed, max_age_s = self._unused(packed_trees(self._state_dir)), self._retention.keep_node_s
        trees = choose_removals(packed, now_s=time.time(), max_age_s=max_age_s, max_bytes=float("inf"))
        for one in () if self._request.dry_run else trees:
            with suppress(OSError):  # the next run tries again
                tree_file(self._state_dir, one.name).unlink()
        self._is_head_done = True
        self._answer(replace(reply, trees=trees), b"", self.is_done)
        self._ended()

    def _unused(self, trees: Sequence[Stored]) -> list[Stored]:
        """Return those that no job needs that has not ended, now: one may have been submitted since the request."""
        used = {str(tree["sha256"]) for one in self._store.jobs.live() if not one.job.is_terminal for tree in one.trees}
        return [one for one in trees if one.name not in used]

    # Nodes

    def _take(self, host: str, reply: Reply[agent.UsageReply], received_s: float) -> None:
        if host not in self.waiting:
            return
        if reply.error is not None:
            self._reply(messages.PruneReply(host, refused=reply.error))
            return
        now_s, limits = time.time(), self._retention
        runs = {make_run(self._head_id, job_id): job for job_id, job in self._jobs.items()}
        stored = [
            Stored(run, runs[run].ended_at_s or now_s, size) for run, size in reply.message.runs.items() if run in runs
        ]
        chosen = choose_removals(stored, now_s=now_s, max_age_s=limits.keep_node_s, max_bytes=limits.keep_node_bytes)
        trees = [Stored(tree, now_s - idle_s, int(size)) for tree, (size, idle_s) in reply.message.trees.items()]
        unused = choose_removals(self._unused(trees), now_s=now_s, max_age_s=limits.keep_node_s, max_bytes=float("inf"))
        planned = messages.PruneReply(host, tuple(replace(one, name=runs[one.name].id) for one in chosen), unused)
        if self._request.dry_run or not (chosen or unused):
            self._reply(planned)
            return
        idle_s = {one.name: reply.message.trees[one.name][1] for one in unused}
        request = agent.Prune(tuple(one.name for one in chosen), idle_s)
        link = next(self._links.get(one) for one in self._hosts if one.name == host)
        link.call(request, deadline_s=NODE_S, done=lambda reply: self._post(partial(self._removed, planned, reply)))

    def _removed(self, planned: messages.PruneReply, reply: Reply[agent.PruneReply]) -> None:
        if reply.error is not None:
            self._reply(messages.PruneReply(planned.host, refused=reply.error))
            return
        gone = {key.partition("-")[2] or key for key in reply.message.removed}
        jobs = tuple(one for one in planned.jobs if one.name in gone)
        self._reply(replace(planned, jobs=jobs, trees=tuple(one for one in planned.trees if one.name in gone)))


def prunable_jobs(stored: Sequence[StoredJob], *, live: Collection[str], keep: Collection[str]) -> list[StoredJob]:
    """Return the jobs whose logs may go: ended, complete, holding no host; of pipelines only if every stage is.

    `keep`: ids and names that stay.
    """
    busy = {_group(one.job) for one in stored if not one.job.is_terminal or one.job.held_hosts or one.job.id in live}
    return [
        one
        for one in stored
        if _group(one.job) not in busy and not {one.job.id, one.job.name, one.job.pipeline} & set(keep)
    ]


def _group(job: Job) -> str:
    return job.pipeline or job.id


def hosts_of(stored: Sequence[StoredJob]) -> Sequence[Host]:
    """Return the hosts of jobs; of two hosts of one name the newer job's."""
    used = {host.name: host for one in stored for host in load_hosts(one.hosts) if host.name in one.job.used_hosts}
    return tuple(used.values())


def has_logs(folder: Path) -> bool:
    """Return whether a job has more than its records here, also after a removal that was interrupted."""
    return folder.is_dir() and any(entry.name not in KEPT_FILES for entry in os.scandir(folder))


def remove_logs(state_dir: Path, one: Removal, *, now_s: float) -> None:
    """Remove a job's copies of node files; what the job was stays. Raises OSError."""
    folder = job_files.job_folder(state_dir, one.name)
    write_json(str(folder / job_files.PRUNED_FILE), {"at_s": now_s, "bytes": one.size_bytes})
    for entry in os.scandir(folder):
        if entry.name in KEPT_FILES:
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def packed_trees(state_dir: Path) -> list[Stored]:
    """Return the packed directories that were staged from here, with their last use."""
    found = []
    for path in (state_dir / "trees").glob("*.tar"):
        match = _PACKED.fullmatch(path.name)
        if match:
            facts = path.stat()
            found.append(Stored(match.group(1), facts.st_mtime, facts.st_blocks * 512))
    return found


class RemoveOperation(HostOperation):
    """One run of `rm`. Raises ConflictError, before anything is removed. `live`: ids of jobs with a runner."""

    def __init__(
        self,
        request: messages.Remove,
        store: Store,
        operations: Operations,
        answer: Answer,
        outputs: OutputFetcher,
        *,
        live: Collection[str],
    ) -> None:
        self._request, self._store, self._state_dir, self._outputs = request, store, store.path.parent, outputs
        stored = [store.jobs.find(job_id) for job_id in request.jobs]
        for one in stored:
            self._check(one, live)
        runs = tuple(dict.fromkeys(run for one in stored for run in (one.job.run, one.job.home or one.job.run)))
        self._names = {one.job.pipeline or one.job.id for one in stored}
        self._failed: list[str] = []
        self._is_head_done = False
        super().__init__(hosts_of(stored), operations, answer, agent.Prune(runs, {}, everything=True), NODE_S)

    @property
    def is_done(self) -> bool:
        return self._is_head_done

    def start(self) -> None:
        super().start()
        if not self._hosts:
            self._remove_here()

    def _check(self, one: StoredJob, live: Collection[str]) -> None:
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
            raise ConflictError(Text("remove.copying", "logs of {job} are still being copied", job=job.id), hint=LATER)
        if job.id in self._outputs.jobs_now():
            raise ConflictError(Text("remove.fetching", "files of {job} are being copied", job=job.id), hint=LATER)
        waiting = job_files.read_waiting(self._state_dir, job.id)
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
        # No transfer begins without the job, and none makes directories.
        self._outputs.cancel(self._request.jobs, partial(in_background, self._remove_files, "remove"))

    def _remove_files(self) -> None:
        """Run in a thread of its own: large directories take long."""
        folders = [job_files.job_folder(self._state_dir, job_id) for job_id in self._request.jobs]
        folders += [job_files.outputs_dir(self._state_dir, name) for name in self._names]
        removed, failed = [], None
        for folder in folders:
            removed.append(Removal(folder.name, allocated_bytes(folder), REQUESTED))
            try:
                if folder.is_dir():
                    shutil.rmtree(folder)
            except OSError as error:
                failed = Failure("io-error", f"{error.filename}: {error.strerror}")
        for job_id in self._request.jobs:
            job_files.waiting_file(self._state_dir, job_id).unlink(missing_ok=True)
        self._post(partial(self._finish, messages.PruneReply(None, tuple(removed), refused=failed)))

    def _finish(self, reply: messages.PruneReply) -> None:
        self._is_head_done = True
        self._answer(reply, b"", True)
        self._ended()
