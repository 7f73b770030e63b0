"""Requests nodes for the files that may explain an attempt's end, and stores them; never delays the end itself.

A pending request is a small file until its host has replied, so that it survives this process and an unreachable host.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import NotFoundError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.draft import Transition
from ascendrun.core.jobs.job import Cause, Job, State
from ascendrun.core.rank_env import FLIGHT_FILE
from ascendrun.head.agents.connections import Links, ask, dialled, post_later
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.control_messages import Gather, GatherReply
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.file_messages import ArtifactData
from ascendrun.head.protocol.remote import AgentConnection, Reply
from ascendrun.head.spool.artifact_store import FOLDER, INDEX, hosts_collected, read_request, requests_dir
from ascendrun.head.spool.transfer import LOST, TRIES, make_folder
from ascendrun.head.state.state_dir import make_spool_dir, spool_dir
from ascendrun.health.survey import scripts
from ascendrun.node import layout
from ascendrun.node.files import names_in, write_json
from ascendrun.text import Text

GATHER_S = 60.0
"""Seconds that a host may take to collect its files."""
GIVE_UP_S = 24 * 3600.0
"""A host that has not reconnected by then has no useful files left."""
CONNECT_S = 15.0
"""Seconds after which a waiting command gets the names of the hosts that are not connected."""
HOST_BYTES = 96 << 20
_NAME = re.compile(r"^[a-z][a-z0-9-]{0,40}$")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=@-]")

PLOG_BASES = ["$ASCEND_PROCESS_LOG_PATH", "$ASCEND_WORK_PATH/log", "~/ascend/log"]
JOURNAL = ["journalctl", "-k", "-b", "--no-pager", "-o", "short-monotonic"]
PORT_ITEMS = ("link", "net_health", "link_stat", "stat", "optical")
CARD_VIEWS = ("health", "ecc")
KERNEL_WORDS = [
    r"out of memory|oom[-_]|killed process",
    r"hardware error|machine check|\bmce\b|edac|\becc\b|uncorrect",
    r"davinci|devdrv|devmm|hisi|hns3|\bhdc|ascend|\bnpu|tsdrv|\bsvm",
    r"nvrm|\bxid\b|nvlink",
    r"link is (?:not ready|down|up)|link (?:down|up)|carrier|mlx5|\broce|\bbond\d|tx timeout|transmit queue",
    r"i/o error|ext4-fs|xfs|\bnfs|no space|read-only|readonly|nvme|blk_update",
    r"segfault|general protection|traps:|hung_task|blocked for more than|lockup|stall|call trace|kernel bug|\bbug:",
    r"thermal|throttl|temperature",
    r"pcie|\baer\b|bus error|dpc:",
]


def items_for(device_type: str) -> list[dict[str, Any]]:
    """Return the items to request from a node, as node/agent/artifacts.py expects them."""
    kernel = {"keep": KERNEL_WORDS, "around": 2, "kernel_time": True}
    items = [
        _commands("dmesg", "excerpt.txt", ["dmesg"], JOURNAL, timeout_s=15, max_bytes=None, **kernel),
        _files("supervisor", ["$ASCENDRUN_ATTEMPT_DIR"], ["supervisor.log"], max_bytes=1 << 20),
        _files("flight-recorder", ["$ASCENDRUN_ATTEMPT_DIR"], [f"{FLIGHT_FILE}*"], max_bytes=16 << 20, max_files=64),
        _commands("disk", "df.txt", ["sh", "-c", "df -Pk; echo; df -Pi"], timeout_s=10, max_bytes=None),
    ]
    if device_type in ("npu", "auto"):
        items += _npu_items()
    if device_type in ("cuda", "auto"):
        items.append(_commands("nvidia-smi", "query.txt", ["nvidia-smi", "-q"], timeout_s=20))
    return items


def _npu_items() -> list[dict[str, Any]]:
    def script(name: str, file: str, text: str, *words: str, timeout_s: float) -> dict[str, Any]:
        return _commands(name, file, ["sh", "-c", text, "ascendrun", *words], timeout_s=timeout_s)

    def logs(name: str, *patterns: str, max_bytes: int, max_files: int) -> dict[str, Any]:
        own: dict[str, Any] = {"since_start": True, "pid_regex": r"(?:plog|device)-(\d+)_"}
        return _files(name, PLOG_BASES, list(patterns), max_bytes=max_bytes, max_files=max_files, **own)

    patterns = ["*", "*/*", "*/*/*"]
    system = _files("device-log", ["/var/log/npu/slog"], patterns, kind="list", file="system.txt", since_start=True)
    return [
        logs("plog", "debug/plog/plog-*", "run/plog/plog-*", max_bytes=32 << 20, max_files=128),
        logs("device-log", "debug/device-*/device-*", "run/device-*/device-*", max_bytes=8 << 20, max_files=64),
        system,
        script("npu-smi", "table.txt", scripts.TABLE, timeout_s=20),
        script("npu-smi", "cards.txt", scripts.CARDS, *CARD_VIEWS, timeout_s=45),
        script("hccn", "ports.txt", scripts.PORTS, *PORT_ITEMS, timeout_s=45),
    ]


def _commands(
    name: str, file: str, *commands: list[str], timeout_s: float, max_bytes: int | None = 1 << 20, **more: Any
) -> dict[str, Any]:
    """Return an item: the output of the first command that works. `max_bytes` None: the node's default."""
    limit = {} if max_bytes is None else {"max_bytes": max_bytes}
    item = {"name": name, "kind": "argv", "file": file, "timeout_s": timeout_s, "commands": list(commands)}
    return {**item, **limit, **more}


def _files(name: str, bases: list[str], patterns: list[str], *, kind: str = "glob", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "bases": bases, "patterns": patterns, **more}


def failed_attempt(before: Job, after: Job, transitions: Sequence[Transition]) -> int | None:
    """Return the attempt that a step has ended with a failure after GO was sent; None: none was.

    A job that the user stopped has not failed.
    """
    for move in transitions:
        if move.target is State.FAILED and after.go_sent_at_s is not None and after.cause is not Cause.USER:
            return after.attempt
        if move.target is State.BACKOFF and before.go_sent_at_s is not None and before.cause is not Cause.USER:
            return before.attempt
    return None


def unrequested_attempt(job: Job, *, now_s: float) -> int | None:
    """Return the attempt with which a job failed recently: a controller that was killed just then sent no requests.
    None: it did not fail, or too long ago."""
    if job.state is not State.FAILED or job.go_sent_at_s is None or job.cause is Cause.USER:
        return None
    return job.attempt if now_s - (job.ended_at_s or 0.0) < GIVE_UP_S else None


@dataclass(frozen=True)
class Subject:
    """Part of a job that a request to its hosts requires. `used`: the names of the hosts of each attempt."""

    job_id: str
    run: str
    device_type: str
    attempt: int
    hosts: tuple[Host, ...]
    used: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def hosts_of(self, attempt: int) -> tuple[Host, ...]:
        return tuple(host for host in self.hosts if host.name in self.used.get(attempt, (host.name,)))


@dataclass
class _Pending:
    subject: Subject
    attempt: int
    host: Host
    is_requested: bool = False
    tries: int = 0
    done: list[Callable[[Text | str | None], None]] = field(default_factory=list)

    @property
    def tag(self) -> str:
        return layout.make_tag(self.subject.run, self.attempt)


class ArtifactFetcher:
    """Use from the controller's thread, except `take`. `find(job id)` returns the subject; raises NotFoundError.
    `collected(job id, attempt)` is called when no connected host of an attempt has still to reply."""

    def __init__(
        self,
        state_dir: Path,
        links: Links,
        find: Callable[[str], Subject],
        collected: Callable[[str, int], None] = lambda job_id, attempt: None,
    ) -> None:
        self._state_dir, self._links, self._find, self._collected = state_dir, links, find, collected
        self._pending: dict[tuple[str, int, str], _Pending] = {}
        self._receiving: dict[tuple[str, str], _Receiving] = {}

    def resume(self) -> None:
        """Continue the requests that an earlier controller left."""
        folder = requests_dir(self._state_dir)
        for name in names_in(folder):
            pending = read_request(folder / name)
            try:
                if pending is None or time.time() - pending[3] > GIVE_UP_S:
                    raise NotFoundError(f"{name} is too old")
                subject = self._find(pending[0])
                self._add(subject, pending[1], next(host for host in subject.hosts if host.name == pending[2]))
            except (NotFoundError, StopIteration):
                (folder / name).unlink()

    def fetch(self, job_id: str, attempt: int, *, only_missing: bool = False) -> None:
        """Request the artifacts of all hosts of the job, or of those without any on this machine."""
        subject = self._find(job_id)
        there = hosts_collected(spool_dir(self._state_dir, job_id, attempt)) if only_missing else ()
        for host in subject.hosts_of(attempt):
            if host.name not in there:
                self._add(subject, attempt, host)

    def is_waiting(self, job_id: str, attempt: int) -> bool:
        """Return whether a connected host of the attempt has still to reply."""
        return any(one.is_requested and key[:2] == (job_id, attempt) for key, one in self._pending.items())

    def serve(self, request: Gather, answer: Answer) -> None:
        """Fetch for a command that waits; one reply for each host.

        A host that does not reply in time gets a problem as its reply; its artifacts arrive when it is reachable again.
        """
        subject = self._find(request.job)
        attempt = request.attempt or subject.attempt
        hosts = subject.hosts_of(attempt)
        waiting = {host.name for host in hosts}

        def reply(host: str, problem: Text | str | None) -> None:
            if host in waiting:
                waiting.discard(host)
                answer(GatherReply(host, problem), b"", not waiting)

        def give_up(*, connected_too: bool) -> None:
            for host in hosts:
                if connected_too or not self._links.get(host).is_up:
                    reply(host.name, Text("artifacts.later", "not reachable; collected when it is reachable again"))

        for host in hosts:
            self._add(subject, attempt, host, done=partial(reply, host.name))
        for seconds, is_last in ((CONNECT_S, False), (GATHER_S + 2 * CONNECT_S, True)):
            post_later(self._links, seconds, partial(give_up, connected_too=is_last))

    def on_up(self, link: AgentConnection) -> None:
        for pending in tuple(self._pending.values()):
            if not pending.is_requested and dialled(pending.host) == dialled(link.host):
                self._request(pending)

    def take(self, link: AgentConnection, part: ArtifactData, body: bytes) -> None:
        """Store bytes of an artifact; called in the thread of the connection."""
        receiving = self._receiving.get((part.tag, dialled(link.host)))
        if receiving is not None:
            receiving.write(part.name, part.file, part.offset, body)

    def _add(
        self, subject: Subject, attempt: int, host: Host, done: Callable[[Text | str | None], None] | None = None
    ) -> None:
        key = (subject.job_id, attempt, host.name)
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = _Pending(subject, attempt, host)
            folder = requests_dir(self._state_dir)
            folder.mkdir(mode=0o700, exist_ok=True)
            write_json(
                str(self._request_file(pending)),
                {"job": subject.job_id, "attempt": attempt, "host": host.name, "at_s": time.time()},
            )
        if done is not None:
            pending.done.append(done)
        if not pending.is_requested and self._links.get(host).is_up:
            self._request(pending)

    def _request(self, pending: _Pending) -> None:
        pending.is_requested = True
        pending.tries += 1
        attempt_dir = spool_dir(self._state_dir, pending.subject.job_id, pending.attempt)
        self._receiving[(pending.tag, dialled(pending.host))] = _Receiving(attempt_dir / pending.host.name)
        request = agent.Gather(pending.tag, items_for(pending.subject.device_type), GATHER_S)
        then = partial(self._take_reply, pending)
        ask(self._links, pending.host, request, deadline_s=GATHER_S + 30.0, then=then)

    def _take_reply(self, pending: _Pending, reply: Reply[agent.GatherReply]) -> None:
        receiving = self._receiving.pop((pending.tag, dialled(pending.host)))
        pending.is_requested = False
        error = reply.error
        if error is None:
            self._end(pending, receiving.finish(reply.message))
            return
        receiving.drop()
        if error.code in LOST and pending.tries < TRIES:
            if self._links.get(pending.host).is_up:
                self._request(pending)
            return
        self._end(pending, error.message)

    def _end(self, pending: _Pending, problem: Text | str | None) -> None:
        del self._pending[(pending.subject.job_id, pending.attempt, pending.host.name)]
        self._request_file(pending).unlink(missing_ok=True)  # the directory may have been cleared
        for done in pending.done:
            done(problem)
        if not self.is_waiting(pending.subject.job_id, pending.attempt):
            self._collected(pending.subject.job_id, pending.attempt)

    def _request_file(self, pending: _Pending) -> Path:
        name = f"{pending.subject.job_id}.{pending.attempt}.{pending.host.name}"
        return requests_dir(self._state_dir) / f"{_UNSAFE.sub('_', name)}.json"


class _Receiving:
    """Artifacts of one host, in a temporary place until all are here. `write` in the connection's thread only."""

    def __init__(self, host_dir: Path) -> None:
        self._host_dir = host_dir
        self._part = host_dir / f"{FOLDER}.part-{os.getpid()}-{time.monotonic_ns()}"
        self._names: dict[tuple[str, str], str] = {}
        self._problem: Text | str | None = None
        self._room = HOST_BYTES

    def write(self, name: str, file: str, offset: int, data: bytes) -> None:
        self._room -= len(data)
        if self._problem is not None or not _NAME.match(name) or self._room < 0:
            return
        try:
            path = self._part / name / self._safe(name, file)
            make_spool_dir(self._host_dir)
            make_folder(path.parent)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(fd, data, offset)
            finally:
                os.close(fd)
        except OSError as error:
            self._problem = _not_stored(error)

    def _safe(self, name: str, file: str) -> str:
        """Return a path below this directory for any name that a node sends; two files never share a path."""
        if (name, file) not in self._names:
            parts = [_UNSAFE.sub("_", part).lstrip(".")[:120] for part in file.split("/")[-6:]]
            safe = "/".join(part for part in parts if part) or "file"
            while (name, safe) in ((other, used) for (other, _), used in self._names.items()):
                safe += "_"
            self._names[(name, file)] = safe
        return self._names[(name, file)]

    def finish(self, reply: agent.GatherReply) -> Text | str | None:
        """Move the files into place and replace those of an earlier request; return the problem, None: none."""
        for file in reply.files:
            if file.get("bytes") == 0:  # an empty file came without a frame
                self.write(str(file["name"]), str(file["file"]), 0, b"")
        if self._problem is not None:
            self.drop()
            return self._problem
        files = [
            {**file, "file": self._safe(str(file["name"]), str(file["file"]))}
            for file in reply.files
            if _NAME.match(str(file["name"]))
        ]
        index = {**vars(reply), "files": files}
        place, old = self._host_dir / FOLDER, self._host_dir / f"{self._part.name}.old"
        try:
            make_spool_dir(self._host_dir)
            self._part.mkdir(mode=0o700, exist_ok=True)
            write_json(str(self._part / INDEX), index)
            if place.is_dir():
                os.rename(place, old)
            os.rename(self._part, place)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            self.drop()
            return _not_stored(error)
        return None

    def drop(self) -> None:
        shutil.rmtree(self._part, ignore_errors=True)


def _not_stored(error: OSError) -> Text:
    return Text("artifacts.not-stored", "cannot store it on the head node: {error}", error=error.strerror)
