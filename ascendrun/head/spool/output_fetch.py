"""Fetches outputs of jobs from nodes: those that a job declares, at its end, and others on request; sends files.

The declared outputs of a job that are not here yet are a small file until every host has sent its own, so that this
survives the end of this process and an unreachable host. Nothing else waits for a transfer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Callable, Union

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import ConflictError, NotFoundError
from ascendrun.core.events import Event
from ascendrun.core.hosts import Host
from ascendrun.core.node_messages import Failure
from ascendrun.core.retention import Retention
from ascendrun.head.agents.connections import Links, dialled, post_later
from ascendrun.head.protocol.control_messages import Fetch, FetchReply, Put
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.messages import R, Request
from ascendrun.head.protocol.remote import AgentConnection, Reply
from ascendrun.head.spool.collector import free_bytes_beyond
from ascendrun.head.spool.relay import DIRECT, Relay
from ascendrun.head.spool.transfer import (
    TRIES,
    Ask,
    Progress,
    TransferError,
    disk_full,
    fetch_files,
    send_files,
    send_one,
)  # fmt: skip
from ascendrun.head.state.job_files import outputs_dir, read_waiting, waiting_file, waiting_jobs
from ascendrun.head.waiting import in_background
from ascendrun.node.files import write_json
from ascendrun.text import Text

Slots = AbstractContextManager[object]
AT_ONCE = 4
"""Hosts that send outputs at the same time."""
CONNECT_S = 15.0
"""Seconds after which a host that is not connected is named."""
REPORT_S = 0.5
"""Seconds between two reports of progress."""


@dataclass(frozen=True)
class JobOutputs:
    """The outputs of a job. `folder`: their name on the head node; `run`: whose working directory they are in, None:
    files of hosts, in the home directory.

    `hosts`: of the newest attempt, those that have outputs. `separate`: each host has a directory of its own."""

    job_id: str
    folder: str
    run: str | None
    attempt: int
    patterns: tuple[str, ...]
    hosts: tuple[Host, ...]
    separate: bool


_REMOVED = Failure("job-removed", Text("outputs.job-removed", "the job was removed"))
_Key = tuple[str, Union[str, None], str, tuple[str, ...], Path, bool]


@dataclass
class _Transfer:
    """Files of one host. `is_declared`: what the job declares, to the place for it. `sends`: `patterns` are files of
    this machine, and `into` is on the host."""

    outputs: JobOutputs
    host: Host
    patterns: tuple[str, ...]
    into: Path
    is_declared: bool
    strip: str = ""
    sends: bool = False
    relay: Relay | None = None
    listeners: list[Callable[[FetchReply], None]] = field(default_factory=list)
    progress: Progress = Progress()
    is_running: bool = False
    is_cancelled: bool = False
    tries: int = 0
    is_reported_waiting: bool = False

    @property
    def folder(self) -> Path:
        return self.into / self.host.name if self.outputs.separate and not self.sends else self.into

    @property
    def key(self) -> _Key:
        return self.outputs.job_id, self.outputs.run, self.host.name, self.patterns, self.into, self.sends

    def move(
        self, ask: Ask, slots: Slots, admit: Callable[[int, int], None], report: Callable[[Progress], None]
    ) -> Progress:
        """Do the transfer. Raises TransferError."""
        if self.relay is not None:
            send: Callable[..., None] = partial(self.relay.send, self.host.name, slots)
            return self._send(ask, send, report)
        with slots:
            if self.sends:
                return self._send(ask, send_one, report)
            return self._fetch(ask, admit, report)

    def _send(self, ask: Ask, send: Callable[..., None], report: Callable[[Progress], None]) -> Progress:
        files = list(map(Path, self.patterns))
        return send_files(ask, self.outputs.run, files, str(self.folder), send=send, report=report)

    def _fetch(self, ask: Ask, admit: Callable[[int, int], None], report: Callable[[Progress], None]) -> Progress:
        return fetch_files(
            ask, self.outputs.run, self.patterns, self.folder, strip=self.strip, admit=admit, report=report
        )

    def reply(self, *, ended: bool = False, problem: Failure | None = None) -> FetchReply:
        one = self.progress
        counts = (one.files, one.total_files, one.done_bytes, one.total_bytes, one.missing, one.refused)
        return FetchReply(self.host.name, str(self.folder), *counts, ended=ended, problem=problem)


class OutputFetcher:
    """Use from the controller's thread. `find(job id)` raises NotFoundError; `record(job id, events)` stores events."""

    def __init__(
        self,
        state_dir: Path,
        links: Links,
        find: Callable[[str], JobOutputs],
        record: Callable[[str, Sequence[Event]], None],
        retention: Retention,
        *,
        connect_s: float = CONNECT_S,
    ) -> None:
        self._state_dir, self._links, self._find, self._record = state_dir, links, find, record
        self._retention, self._connect_s = retention, connect_s
        self._transfers: dict[_Key, _Transfer] = {}
        self._slots = threading.Semaphore(AT_ONCE)
        self._one_each: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._admitting = threading.Lock()
        self._cancels: list[tuple[frozenset[str], Callable[[], None]]] = []
        self._admitted: dict[str, dict[str, int]] = defaultdict(dict)

    @property
    def is_busy(self) -> bool:
        return any(one.is_running for one in self._transfers.values())

    def resume(self) -> None:
        """Continue what an earlier controller left, except what failed for a reason that only a user can remove."""
        for job_id in waiting_jobs(self._state_dir):
            hosts = read_waiting(self._state_dir, job_id)
            try:
                outputs = self._find(job_id)
            except NotFoundError:
                waiting_file(self._state_dir, job_id).unlink(missing_ok=True)
                continue
            for host in outputs.hosts:
                if host.name in hosts and hosts[host.name] is None:
                    self._add(outputs, host, outputs.patterns, outputs_dir(self._state_dir, outputs.folder), None)

    def request(self, job_id: str) -> None:
        """Fetch what an ended job declares."""
        outputs = self._find(job_id)
        if not (outputs.patterns and outputs.hosts):
            return
        self._write_waiting(job_id, {host.name: None for host in outputs.hosts})
        for host in outputs.hosts:
            self._add(outputs, host, outputs.patterns, outputs_dir(self._state_dir, outputs.folder), None)

    def serve(self, request: Fetch, answer: Answer) -> None:
        """Fetch for a command that waits. A host that is not connected in time gets a problem as its last reply."""
        outputs = self._started(request.job)
        if request.hosts:
            outputs = replace(outputs, hosts=request.hosts, separate=len(request.hosts) > 1)
        patterns = request.patterns or outputs.patterns
        if not patterns:
            what = Text("outputs.none-declared", "{job} declares no outputs", job=outputs.job_id)
            raise NotFoundError(what, hint=f"ascendrun fetch {outputs.job_id} PATH")
        into = Path(request.into) if request.into is not None else outputs_dir(self._state_dir, outputs.folder)
        listen = _listener(outputs.hosts, answer)
        for host in outputs.hosts:
            self._add(outputs, host, patterns, into, listen, strip=request.strip)

    def serve_put(self, request: Put, answer: Answer) -> None:
        """Send files to hosts for a command that waits."""
        of_job = self._started(request.job)
        target = JobOutputs(of_job.job_id, "", of_job.run, 0, (), request.hosts, separate=False)
        listen, relay = _listener(request.hosts, answer), None
        if len(request.hosts) > 2 * DIRECT:
            relay = Relay({host.name: (host.addr or host.name,) for host in request.hosts})
        for host in request.hosts:
            self._add(target, host, request.files, Path(request.folder), listen, sends=True, relay=relay)

    def _started(self, job_id: str | None) -> JobOutputs:
        """Return the outputs of a job that was started on a host; None: those of hosts."""
        if job_id is None:
            return JobOutputs("", "", None, 0, (), (), separate=False)
        outputs = self._find(job_id)
        if not outputs.hosts:
            raise ConflictError(Text("outputs.not-started", "{job} was not started on a host", job=outputs.job_id))
        return outputs

    def jobs_now(self) -> set[str]:
        """Return the jobs with files on their way."""
        return {one.outputs.job_id for one in self._transfers.values() if one.is_running}

    def cancel(self, jobs: Collection[str], done: Callable[[], None]) -> None:
        """End every transfer of jobs that are removed; call `done` when no thread writes their files any more."""
        for one in tuple(self._transfers.values()):
            if one.outputs.job_id in jobs:
                one.is_cancelled = True
                if not one.is_running:
                    self._end(one, _REMOVED)
        self._cancels.append((frozenset(jobs), done))
        self._finish_cancels()

    def _finish_cancels(self) -> None:
        busy = self.jobs_now()
        ready = [done for jobs, done in self._cancels if not jobs & busy]
        self._cancels = [(jobs, done) for jobs, done in self._cancels if jobs & busy]
        for done in ready:
            done()

    def on_up(self, link: AgentConnection) -> None:
        for one in tuple(self._transfers.values()):
            if not one.is_running and dialled(one.host) == dialled(link.host):
                self._start(one)

    # One transfer

    def _add(
        self,
        outputs: JobOutputs,
        host: Host,
        patterns: tuple[str, ...],
        into: Path,
        listen: Callable[[FetchReply], None] | None,
        *,
        strip: str = "",
        sends: bool = False,
        relay: Relay | None = None,
    ) -> None:
        is_declared = patterns == outputs.patterns and into == outputs_dir(self._state_dir, outputs.folder)
        new = _Transfer(outputs, host, patterns, into, is_declared, strip, sends, relay)
        one = self._transfers.setdefault(new.key, new)
        if listen is not None:
            one.listeners.append(listen)
        self._start(one)

    def _start(self, one: _Transfer) -> None:
        """Start a transfer; one of a host that is not connected waits for it, and the host is named after a while."""
        if not self._links.get(one.host).is_up:
            post_later(self._links, self._connect_s, partial(self._name_host, one))
        elif not one.is_running:
            one.is_running = True
            lock = self._one_each[dialled(one.host)]
            in_background(partial(self._run, one, lock), "outputs")

    def _run(self, one: _Transfer, lock: threading.Lock) -> None:
        """Run the transfer, in a thread of its own: it waits for the node and for the disk."""
        due_mono = 0.0

        def report(progress: Progress) -> None:
            nonlocal due_mono
            if progress.done_bytes > one.progress.done_bytes:
                one.tries = 0
            one.progress = progress
            if time.monotonic() >= due_mono:
                due_mono = time.monotonic() + REPORT_S
                for listen in tuple(one.listeners):
                    listen(one.reply())

        error: TransferError | None = None
        try:
            with lock:
                one.progress = one.move(partial(self._ask, one), self._slots, partial(self._admit, one), report)
        except TransferError as failed:
            error = failed
        self._links.post(partial(self._take_end, one, error))

    def _ask(self, one: _Transfer, request: Request[R], *, deadline_s: float, body: bytes = b"") -> Reply[R]:
        if one.is_cancelled:
            raise TransferError(_REMOVED)
        replies: queue.SimpleQueue[Reply[R]] = queue.SimpleQueue()
        self._links.get(one.host).call(request, body, deadline_s=deadline_s, done=replies.put)
        return replies.get()

    def _admit(self, one: _Transfer, total: int, missing: int) -> None:
        """Check the limit of the job, unless a user requested the transfer, and the disk."""
        job_id, limit = one.outputs.job_id, self._retention.outputs_job_bytes
        with self._admitting:
            sizes = {**self._admitted[job_id], one.host.name: total}
            if not one.listeners and sum(sizes.values()) > limit:
                what = Text(
                    "outputs.limit",
                    "{size:bytes} exceed the limit of {limit:bytes} (setting outputs_job_gib)",
                    size=sum(sizes.values()),
                    limit=limit,
                )
                raise TransferError(Failure("output-limit", what, f"ascendrun fetch {job_id}"))
            if missing > free_bytes_beyond(one.into, self._retention.min_free_bytes):
                raise TransferError(disk_full(one.into))
            self._admitted[job_id] = sizes

    def _take_end(self, one: _Transfer, error: TransferError | None) -> None:
        one.is_running = False
        if one.is_cancelled:
            self._end(one, _REMOVED)
            self._finish_cancels()
            return
        if error is not None and error.is_lost:
            one.tries += 1
            if one.tries < TRIES or not self._links.get(one.host).is_up:
                self._start(one)
                return
        self._end(one, None if error is None else error.failure)

    def _end(self, one: _Transfer, failure: Failure | None) -> None:
        self._transfers.pop(one.key, None)
        if one.is_declared and not one.is_cancelled:
            self._note_end(one, failure)
        for listen in one.listeners:
            listen(one.reply(ended=True, problem=failure))

    def _note_end(self, one: _Transfer, failure: Failure | None) -> None:
        """Record the end of a declared transfer in the events and in the file of what is not here."""
        job_id, progress = one.outputs.job_id, one.progress
        hosts = dict(read_waiting(self._state_dir, job_id))
        if one.host.name not in hosts:
            return
        hosts[one.host.name] = failure
        if failure is None:
            del hosts[one.host.name]
        self._write_waiting(job_id, hosts)
        if failure is not None:
            self._note(one, "outputs-failed", reason=failure.line())
            return
        if progress.missing:
            self._note(one, "outputs-missing", patterns=list(progress.missing))
        if progress.refused:
            self._note(one, "outputs-refused", paths=list(progress.refused))
        if progress.total_files:
            values = {"files": progress.total_files, "size": progress.total_bytes, "directory": str(one.folder)}
            self._note(one, "outputs-fetched", **values)

    def _note(self, one: _Transfer, code: str, **values: object) -> None:
        event = Event(code, values, (one.host.name,), attempt=one.outputs.attempt, at_s=time.time())
        self._record(one.outputs.job_id, [event])

    def _name_host(self, one: _Transfer) -> None:
        """Name a host that is still not connected: to the commands that wait, and in the events of the job."""
        if one.is_running or self._transfers.get(one.key) is not one:
            return
        error = self._links.get(one.host).last_error
        if error is None:  # of many hosts, it is not its turn to be connected yet
            post_later(self._links, self._connect_s, partial(self._name_host, one))
            return
        is_waiting = one.is_declared and one.host.name in read_waiting(self._state_dir, one.outputs.job_id)
        if not is_waiting:
            del self._transfers[one.key]
        elif not one.is_reported_waiting:
            one.is_reported_waiting = True
            self._note(one, "outputs-waiting")
        later = Text("outputs.waiting", "not reachable; fetched when it is reachable again")
        what = later if is_waiting else Text("outputs.unreachable", "not reachable: {reason}", reason=error.message)
        listeners, one.listeners = one.listeners, []
        for listen in listeners:
            listen(one.reply(ended=True, problem=Failure("unreachable", what, error.hint)))

    def _write_waiting(self, job_id: str, hosts: Mapping[str, Failure | None]) -> None:
        path = waiting_file(self._state_dir, job_id)
        if not hosts:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_json(str(path), {name: None if why is None else why.to_json() for name, why in hosts.items()})


def _listener(hosts: Sequence[Host], answer: Answer) -> Callable[[FetchReply], None]:
    """Return what passes the replies of these hosts to a command; its last one is the last reply of all."""
    waiting = {host.name for host in hosts}

    def listen(reply: FetchReply) -> None:
        if reply.ended:
            waiting.discard(reply.host)
        answer(reply, b"", not waiting)

    return listen
