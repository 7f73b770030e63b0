"""Removal of old data of ended jobs: logs on this machine and on the nodes, staged directories that nothing uses."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.core.hosts import Host, load_hosts
from ascendrun.core.jobs.job import Job
from ascendrun.core.node_messages import Failure
from ascendrun.core.retention import Removal, Retention, Stored, choose_removals
from ascendrun.head.agents.connections import Connections, dialled
from ascendrun.head.agents.node_query import CONNECT_TRIES
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol import control_messages as messages
from ascendrun.head.protocol.agent_bootstrap import is_permanent
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.remote import AgentConnection, Reply
from ascendrun.head.spool.collector import allocated_bytes
from ascendrun.head.state.job_files import COPY_FILE, PRUNED_FILE, RECORD_FILE, job_folder
from ascendrun.head.state.job_table import StoredJob
from ascendrun.head.state.store import Store
from ascendrun.node.files import write_json
from ascendrun.node.layout import make_run

KEPT_FILES = frozenset({COPY_FILE, RECORD_FILE, PRUNED_FILE})
NODE_S = 600.0
_PACKED = re.compile(r"([0-9a-f]{64})\.tar")


class PruneOperation:
    """One run of `prune`. `answer` gets one reply for this machine, then one for each host. Use from one thread.

    `live`: ids of jobs with a runner. `hosts_up_only`: leave out hosts without a connection, instead of connecting.
    """

    def __init__(
        self,
        request: messages.Prune,
        store: Store,
        links: Connections,
        retention: Retention,
        *,
        live: Collection[str],
        post: Callable[[Callable[[], None]], None],
        answer: Answer,
        hosts_up_only: bool = False,
    ) -> None:
        self._request, self._links, self._post, self._answer = request, links, post, answer
        older_s = request.older_s
        self._retention = retention if older_s is None else replace(retention, keep_jobs_s=older_s, keep_node_s=older_s)
        self._state_dir, self._head_id = store.path.parent, store.head_id
        stored = store.jobs.all()
        self._jobs = {one.job.id: one.job for one in prunable_jobs(stored, live=live, keep=request.keep)}
        self._used_trees = {str(tree["sha256"]) for one in stored if not one.job.is_terminal for tree in one.trees}
        self._waiting = hosts_of([one for one in stored if one.job.id in self._jobs])
        if hosts_up_only:
            connected = {dialled(link.host) for link in links if link.is_up}  # `get` would start to connect
            self._waiting = {name: host for name, host in self._waiting.items() if dialled(host) in connected}
        self._asked: set[str] = set()
        self._is_head_done = False

    @property
    def is_done(self) -> bool:
        return self._is_head_done and not self._waiting

    def start(self) -> None:
        threading.Thread(target=self._prune_head, daemon=True, name="prune").start()
        for host in self._waiting.values():
            link = self._links.get(host)
            if not link.is_up:
                link.connect()
        self.on_up()

    def on_up(self) -> None:
        for name, host in tuple(self._waiting.items()):
            link = self._links.get(host)
            if link.is_up and name not in self._asked:
                self._asked.add(name)
                done = partial(self._later, self._choose, name)
                link.call(agent.Usage(self._head_id), deadline_s=NODE_S, done=done)

    def on_down(self, link: AgentConnection, error: AscendrunError) -> None:
        for name, host in tuple(self._waiting.items()):
            if self._links.get(host) is link and (is_permanent(error) or link.failures >= CONNECT_TRIES):
                self._reply(messages.PruneReply(name, refused=Failure.of(error)))

    # This machine

    def _prune_head(self) -> None:
        """Run in a thread of its own: large directories take long."""
        now_s, limits = time.time(), self._retention
        sizes = {job_id: allocated_bytes(job_folder(self._state_dir, job_id)) for job_id in self._jobs}
        stored = [
            Stored(job_id, self._jobs[job_id].ended_at_s or now_s, size)
            for job_id, size in sizes.items()
            if has_logs(job_folder(self._state_dir, job_id))
        ]
        chosen = choose_removals(stored, now_s=now_s, max_age_s=limits.keep_jobs_s, max_bytes=limits.keep_jobs_bytes)
        packed = [one for one in packed_trees(self._state_dir) if one.name not in self._used_trees]
        trees = choose_removals(packed, now_s=now_s, max_age_s=limits.keep_node_s, max_bytes=float("inf"))
        failed = None
        try:
            if not self._request.dry_run:
                for one in chosen:
                    remove_logs(self._state_dir, one, now_s=now_s)
                for one in trees:
                    (self._state_dir / "trees" / f"{one.name}.tar").unlink(missing_ok=True)
                write_json(str(self._state_dir / PRUNED_FILE), {"at_s": now_s})
        except OSError as error:
            failed = Failure("io-error", f"{error.filename}: {error.strerror}")
        self._post(lambda: self._reply(messages.PruneReply(None, chosen, trees, failed)))

    # Nodes

    def _later(self, take: Callable[..., None], name: str, reply: Reply[agent.UsageReply]) -> None:
        self._post(lambda: take(name, reply))

    def _choose(self, name: str, reply: Reply[agent.UsageReply]) -> None:
        if reply.error is not None:
            self._reply(messages.PruneReply(name, refused=reply.error))
            return
        now_s, limits = time.time(), self._retention
        runs = {make_run(self._head_id, job_id): job for job_id, job in self._jobs.items()}
        stored = [
            Stored(run, runs[run].ended_at_s or now_s, size) for run, size in reply.message.runs.items() if run in runs
        ]
        chosen = choose_removals(stored, now_s=now_s, max_age_s=limits.keep_node_s, max_bytes=limits.keep_node_bytes)
        trees = [Stored(tree, now_s - idle_s, int(size)) for tree, (size, idle_s) in reply.message.trees.items()]
        unused = choose_removals(trees, now_s=now_s, max_age_s=limits.keep_node_s, max_bytes=float("inf"))
        planned = messages.PruneReply(name, tuple(replace(one, name=runs[one.name].id) for one in chosen), unused)
        if self._request.dry_run or not (chosen or unused):
            self._reply(planned)
            return
        idle_s = {one.name: reply.message.trees[one.name][1] for one in unused}
        request = agent.Prune(tuple(one.name for one in chosen), idle_s)
        done = partial(self._removed, name, planned)
        self._links.get(self._waiting[name]).call(
            request, deadline_s=NODE_S, done=lambda reply: self._post(partial(done, reply))
        )

    def _removed(self, name: str, planned: messages.PruneReply, reply: Reply[agent.PruneReply]) -> None:
        if reply.error is not None:
            self._reply(messages.PruneReply(name, refused=reply.error))
            return
        gone = {key.partition("-")[2] or key for key in reply.message.removed}
        jobs = tuple(one for one in planned.jobs if one.name in gone)
        self._reply(replace(planned, jobs=jobs, trees=tuple(one for one in planned.trees if one.name in gone)))

    def _reply(self, reply: messages.PruneReply) -> None:
        if reply.host is None:
            self._is_head_done = True
        elif self._waiting.pop(reply.host, None) is None:
            return
        self._answer(reply, b"", self.is_done)


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


def hosts_of(stored: Sequence[StoredJob]) -> dict[str, Host]:
    """Return the hosts of jobs by name; of two hosts of one name the newer job's."""
    return {host.name: host for one in stored for host in load_hosts(one.hosts) if host.name in one.job.used_hosts}


def has_logs(folder: Path) -> bool:
    """Return whether a job has more than its records here, also after a removal that was interrupted."""
    return folder.is_dir() and any(entry.name not in KEPT_FILES for entry in os.scandir(folder))


def remove_logs(state_dir: Path, one: Removal, *, now_s: float) -> None:
    """Remove a job's copies of node files; what the job was stays. Raises OSError."""
    folder = job_folder(state_dir, one.name)
    write_json(str(folder / PRUNED_FILE), {"at_s": now_s, "bytes": one.size_bytes})
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
