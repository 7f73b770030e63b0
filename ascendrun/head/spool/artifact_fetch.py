"""Asks nodes for what may explain an attempt's end, keeps it with the attempt; never delays the end itself.

A wish is a small file until its host has answered, so that it outlives this process and a host that is away.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ascendrun.core.errors import NotFoundError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.job import Cause, Job, State
from ascendrun.core.jobs.lifecycle import Transition
from ascendrun.head.agents.connections import Connections, dialled
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.control_messages import Gather, GatherReply
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.remote import Link, Reply
from ascendrun.head.spool.artifact_store import FOLDER, INDEX, hosts_gathered, read_wish, wishes_dir
from ascendrun.head.state.state_dir import make_spool_dir, spool_dir
from ascendrun.health.survey import npu_scripts
from ascendrun.node import layout
from ascendrun.node.files import write_json
from ascendrun.text import Text

GATHER_S = 60.0
"""How long a host may look for its things."""
GIVE_UP_S = 24 * 3600.0
"""A host that has not come back by then has nothing of interest left."""
CONNECT_S = 15.0
"""Somebody who waits for the answer is told by then which hosts do not answer."""
HOST_BYTES = 96 << 20
TRIES = 3
_NAME = re.compile(r"^[a-z][a-z0-9-]{0,40}$")
_ODD = re.compile(r"[^A-Za-z0-9._+=@-]")

PLOG_BASES = ["$ASCEND_PROCESS_LOG_PATH", "$ASCEND_WORK_PATH/log", "~/ascend/log"]
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
    """What to ask a node for, as node/agent/artifacts.py wants it."""
    items: list[dict[str, Any]] = [
        {
            "name": "dmesg",
            "kind": "argv",
            "file": "excerpt.txt",
            "keep": KERNEL_WORDS,
            "around": 2,
            "kernel_time": True,
            "timeout_s": 15,
            "commands": [["dmesg"], ["journalctl", "-k", "-b", "--no-pager", "-o", "short-monotonic"]],
        },
        {
            "name": "supervisor",
            "kind": "glob",
            "bases": ["$ASCENDRUN_ATTEMPT_DIR"],
            "patterns": ["supervisor.log"],
            "max_bytes": 1 << 20,
        },
        {
            "name": "disk",
            "kind": "argv",
            "file": "df.txt",
            "timeout_s": 10,
            "commands": [["sh", "-c", "df -Pk; echo; df -Pi"]],
        },
    ]
    if device_type in ("npu", "auto"):
        items += _npu_items()
    if device_type in ("cuda", "auto"):
        items.append(
            {
                "name": "nvidia-smi",
                "kind": "argv",
                "file": "query.txt",
                "commands": [["nvidia-smi", "-q"]],
                "timeout_s": 20,
                "max_bytes": 1 << 20,
            }
        )
    return items


def _npu_items() -> list[dict[str, Any]]:
    def script(name: str, file: str, text: str, *words: str, timeout_s: float) -> dict[str, Any]:
        return {
            "name": name,
            "kind": "argv",
            "file": file,
            "timeout_s": timeout_s,
            "max_bytes": 1 << 20,
            "commands": [["sh", "-c", text, "ascendrun", *words]],
        }

    plog = {"bases": PLOG_BASES, "since_start": True, "pid_regex": r"(?:plog|device)-(\d+)_"}
    return [
        {
            "name": "plog",
            "kind": "glob",
            **plog,
            "max_bytes": 32 << 20,
            "max_files": 128,
            "patterns": ["debug/plog/plog-*", "run/plog/plog-*"],
        },
        {
            "name": "device-log",
            "kind": "glob",
            **plog,
            "max_bytes": 8 << 20,
            "max_files": 64,
            "patterns": ["debug/device-*/device-*", "run/device-*/device-*"],
        },
        {
            "name": "device-log",
            "kind": "list",
            "file": "system.txt",
            "bases": ["/var/log/npu/slog"],
            "patterns": ["*", "*/*", "*/*/*"],
            "since_start": True,
        },
        script("npu-smi", "table.txt", npu_scripts.TABLE, timeout_s=20),
        script("npu-smi", "cards.txt", npu_scripts.CARDS, *CARD_VIEWS, timeout_s=45),
        script("hccn", "ports.txt", npu_scripts.PORTS, *PORT_ITEMS, timeout_s=45),
    ]


def failed_attempt(before: Job, after: Job, transitions: Sequence[Transition]) -> int | None:
    """The attempt that a step has ended with a failure after its ranks were told to start; None: none was.

    What somebody stopped has not failed.
    """
    for move in transitions:
        if move.target is State.FAILED and after.go_sent_at_s is not None and after.cause is not Cause.USER:
            return after.attempt
        if move.target is State.BACKOFF and before.go_sent_at_s is not None and before.cause is not Cause.USER:
            return before.attempt
    return None


def left_unasked(job: Job, *, now_s: float) -> int | None:
    """The attempt with which a job has failed a while ago: a head that was killed just then has not asked its hosts.
    None: it did not fail, or too long ago."""
    if job.state is not State.FAILED or job.go_sent_at_s is None or job.cause is Cause.USER:
        return None
    return job.attempt if now_s - (job.ended_at_s or 0.0) < GIVE_UP_S else None


@dataclass(frozen=True)
class Subject:
    """What must be known of a job to ask its hosts."""

    job_id: str
    run: str
    device_type: str
    attempt: int
    hosts: tuple[Host, ...]


@dataclass
class _Wish:
    subject: Subject
    attempt: int
    host: Host
    is_asked: bool = False
    tries: int = 0
    told: list[Callable[[Text | str | None], None]] = field(default_factory=list)

    @property
    def tag(self) -> str:
        return layout.make_tag(self.subject.run, self.attempt)


class Gatherer:
    """Use from the controller's thread, except `take`. `find(job id)` gives the subject; raises NotFoundError."""

    def __init__(
        self,
        state_dir: Path,
        links: Connections,
        post: Callable[[Callable[[], None]], None],
        find: Callable[[str], Subject],
    ) -> None:
        self._state_dir, self._links, self._post, self._find = state_dir, links, post, find
        self._wishes: dict[tuple[str, int, str], _Wish] = {}
        self._receiving: dict[tuple[str, Host], _Receiving] = {}

    def resume(self) -> None:
        """Takes up the wishes that an earlier controller left."""
        folder = wishes_dir(self._state_dir)
        for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
            wish = read_wish(folder / name)
            try:
                if wish is None or time.time() - wish[3] > GIVE_UP_S:
                    raise NotFoundError(f"{name} is too old")
                subject = self._find(wish[0])
                self._want(subject, wish[1], next(host for host in subject.hosts if host.name == wish[2]))
            except (NotFoundError, StopIteration):
                (folder / name).unlink()

    def gather(self, job_id: str, attempt: int) -> None:
        """Wishes for everything of the job's hosts."""
        subject = self._find(job_id)
        for host in subject.hosts:
            self._want(subject, attempt, host)

    def gather_missing(self, job_id: str, attempt: int) -> None:
        """The same of those hosts of which nothing is here."""
        subject = self._find(job_id)
        there = hosts_gathered(spool_dir(self._state_dir, job_id, attempt))
        for host in subject.hosts:
            if host.name not in there:
                self._want(subject, attempt, host)

    def serve(self, request: Gather, answer: Answer) -> None:
        """Fetch for a command that waits; one reply for each host.

        A host that does not answer in time is said to be away; its things come when it is back.
        """
        subject = self._find(request.job)
        attempt = request.attempt or subject.attempt
        waiting = {host.name for host in subject.hosts}

        def say(host: str, problem: Text | str | None) -> None:
            if host in waiting:
                waiting.discard(host)
                answer(GatherReply(host, problem), b"", not waiting)

        def give_up(late: frozenset[str]) -> None:
            for host in sorted(late & waiting):
                say(host, "does not answer now; what it has is gathered when it does")

        def look() -> None:
            give_up(frozenset(host.name for host in subject.hosts if not self._links.get(host).is_up))

        for host in subject.hosts:
            self._want(subject, attempt, host, told=partial(say, host.name))
        for seconds, call in ((CONNECT_S, look), (GATHER_S + 2 * CONNECT_S, lambda: give_up(frozenset(waiting)))):
            timer = threading.Timer(seconds, partial(self._post, call))
            timer.daemon = True
            timer.start()

    def on_up(self, link: Link) -> None:
        for wish in tuple(self._wishes.values()):
            if not wish.is_asked and dialled(wish.host) == dialled(link.host):
                self._ask(wish)

    def take(self, link: Link, part: agent.ArtifactData, body: bytes) -> None:
        """Bytes of a gathered file; called in the link's thread."""
        receiving = self._receiving.get((part.tag, dialled(link.host)))
        if receiving is not None:
            receiving.write(part.name, part.file, part.offset, body)

    def _want(
        self, subject: Subject, attempt: int, host: Host, told: Callable[[Text | str | None], None] | None = None
    ) -> None:
        key = (subject.job_id, attempt, host.name)
        wish = self._wishes.get(key)
        if wish is None:
            wish = self._wishes[key] = _Wish(subject, attempt, host)
            folder = wishes_dir(self._state_dir)
            folder.mkdir(mode=0o700, exist_ok=True)
            write_json(
                str(self._wish_file(wish)),
                {"job": subject.job_id, "attempt": attempt, "host": host.name, "at_s": time.time()},
            )
        if told is not None:
            wish.told.append(told)
        if not wish.is_asked and self._links.get(host).is_up:
            self._ask(wish)

    def _ask(self, wish: _Wish) -> None:
        wish.is_asked = True
        wish.tries += 1
        attempt_dir = spool_dir(self._state_dir, wish.subject.job_id, wish.attempt)
        self._receiving[(wish.tag, dialled(wish.host))] = _Receiving(attempt_dir / wish.host.name)
        self._links.get(wish.host).call(
            agent.Gather(wish.tag, items_for(wish.subject.device_type), GATHER_S),
            deadline_s=GATHER_S + 30.0,
            done=lambda reply: self._post(lambda: self._hear(wish, reply)),
        )

    def _hear(self, wish: _Wish, reply: Reply[agent.GatherReply]) -> None:
        receiving = self._receiving.pop((wish.tag, dialled(wish.host)))
        wish.is_asked = False
        error = reply.error
        if error is None:
            self._end(wish, receiving.finish(reply.message))
            return
        receiving.drop()
        if error.code in ("link-lost", "deadline") and wish.tries < TRIES:
            if self._links.get(wish.host).is_up:
                self._ask(wish)
            return
        self._end(wish, error.message)

    def _end(self, wish: _Wish, problem: Text | str | None) -> None:
        del self._wishes[(wish.subject.job_id, wish.attempt, wish.host.name)]
        self._wish_file(wish).unlink(missing_ok=True)  # somebody may have cleared the folder
        for told in wish.told:
            told(problem)

    def _wish_file(self, wish: _Wish) -> Path:
        name = f"{wish.subject.job_id}.{wish.attempt}.{wish.host.name}"
        return wishes_dir(self._state_dir) / f"{_ODD.sub('_', name)}.json"


class _Receiving:
    """One host's things as they come: beside their place until all are here. `write` in the link's thread only."""

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
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(fd, data, offset)
            finally:
                os.close(fd)
        except OSError as error:
            self._problem = _not_stored(error)

    def _safe(self, name: str, file: str) -> str:
        """A path below our folder, whatever the node calls its file; two files never share one."""
        if (name, file) not in self._names:
            parts = [_ODD.sub("_", part).lstrip(".")[:120] for part in file.split("/")[-6:]]
            safe = "/".join(part for part in parts if part) or "file"
            while (name, safe) in ((one, used) for (one, _), used in self._names.items()):
                safe += "_"
            self._names[(name, file)] = safe
        return self._names[(name, file)]

    def finish(self, reply: agent.GatherReply) -> Text | str | None:
        """Puts what came in its place, instead of what an earlier look brought; a sentence when that failed."""
        for one in reply.files:
            if one.get("bytes") == 0:  # an empty file came without a frame
                self.write(str(one["name"]), str(one["file"]), 0, b"")
        if self._problem is not None:
            self.drop()
            return self._problem
        files = [
            {**one, "file": self._safe(str(one["name"]), str(one["file"]))}
            for one in reply.files
            if _NAME.match(str(one["name"]))
        ]
        index = {
            "start_ns": reply.start_ns,
            "boot_ns": reply.boot_ns,
            "at_ns": reply.at_ns,
            "files": files,
            "problems": list(reply.problems),
        }
        place, old = self._host_dir / FOLDER, self._host_dir / f"{self._part.name}.old"
        try:
            make_spool_dir(self._host_dir)
            self._part.mkdir(mode=0o700, exist_ok=True)
            (self._part / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
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
