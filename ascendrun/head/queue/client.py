"""The shared queue as a controller sees it: it reports its jobs, and gets what is decided about them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.errors import AscendrunError, ConflictError, UnreachableError
from ascendrun.core.jobs.endings import Preempted
from ascendrun.core.jobs.inputs import DependencyFailed, NodesFree, SparesFree, WaitingForNodes
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.jobs.reasons import because
from ascendrun.core.jobs.schedule import Contender, Decision, schedule
from ascendrun.core.jobs.stage_hosts import replaced_files
from ascendrun.core.machines import QueueDrain, merge_drains
from ascendrun.head.protocol.control_socket import ControlClient, uid_of
from ascendrun.head.queue.entries import JOBS, Entry, entry_of
from ascendrun.head.queue.messages import QUEUE_NAME, Answer, Contend, Decided
from ascendrun.head.waiting import in_background
from ascendrun.text import Text

POLL_S, IDLE_S = 1.0, 5.0
"""Seconds between reports, and of a controller without jobs: it learns which hosts are drained."""
CALL_S = 15.0
FRESH_S = 10.0
"""Age of an answer after which it is not used: less than a new server waits before it grants anything."""

NO_ANSWER = Text("queue.no-answer", "no answer yet")


class QueueClient(ControlClient):
    """A connection to the shared queue."""

    NAME = QUEUE_NAME

    def __init__(self, folder: Path) -> None:
        """Connect. Raises UnreachableError; ConflictError if another user than the owner of the directory serves it."""
        super().__init__(folder)
        status = os.stat(folder)
        if uid_of(self._socket) not in (0, status.st_uid) or status.st_mode & 0o022:
            self.close()
            english = "the shared queue {path} does not belong to who serves it, or others may write there"
            raise ConflictError(Text("queue.not-owner", english, path=str(folder)), hint=f"ls -ld {folder}")

    @staticmethod
    def not_running(state_dir: Path, error: OSError) -> UnreachableError:
        return UnreachableError.of(
            "queue.not-running",
            "the shared queue {path} does not respond: {error}",
            "its administrator starts it: ascendrun controller run --shared {path}",
            path=str(state_dir),
            error=error.strerror,
        )


class SharedQueue:
    """Use from the controller's thread. `head`: the id of its store; `post` runs a call in its thread; `known`, in any
    thread, returns fields of Contend that a new server may not know, with the half-life of that server."""

    def __init__(
        self,
        folder: Path,
        head: str,
        post: Callable[[Callable[[], None]], None],
        known: Callable[[float], Mapping[str, Any]],
    ) -> None:
        self._folder, self._head, self._post, self._known = folder, head, post, known
        self.turn = 0
        """Increases when something new was decided."""
        self.drains: tuple[QueueDrain, ...] = ()
        """Of the administrators, as known here."""
        self._entries: tuple[Entry, ...] = ()
        self._reported: tuple[Entry, ...] | None = None
        self._answers: Mapping[str, Answer] = {}
        self._heard_mono = time.monotonic()
        self._problem: Text | str = NO_ANSWER
        self._wake, self._is_closed = threading.Event(), False
        self._is_talking = False

    @property
    def is_open(self) -> bool:
        """Whether jobs are reported, or were in the newest report that arrived."""
        return bool(self._entries) or bool(self._reported)

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    # The controller's jobs

    def decide(self, contenders: Sequence[Contender], find: Callable[[str], Job | None]) -> Mapping[str, Decision]:
        """Report the jobs, and return what is decided about them so far: here, what concerns the jobs of this user
        alone, else by the queue."""
        own = schedule(contenders, find, now_s=time.time())
        shared = [one for one in contenders if _is_shared(one.job, own.get(one.job.id))]
        shared.sort(key=lambda one: (one.job.state is State.QUEUED, -one.job.priority, one.job.created_at_s))
        self._report(tuple(entry_of(one, find) for one in shared[:JOBS]))
        decisions = {job: one for job, one in own.items() if job not in {one.job.id for one in shared}}
        for one in shared[:JOBS]:
            decision = self._decision(one, own.get(one.job.id), find)
            if decision is not None:
                decisions[one.job.id] = decision
        full = WaitingForNodes(because("queue-full", limit=JOBS))
        return {**decisions, **{one.job.id: full for one in shared[JOBS:]}}

    def _decision(self, one: Contender, own: Decision | None, find: Callable[[str], Job | None]) -> Decision | None:
        job, answer = one.job, self._answers.get(one.job.id)
        if isinstance(own, WaitingForNodes) and own.reason.code == "too-few-hosts":
            return own
        if time.monotonic() - self._heard_mono > FRESH_S:
            away = because("queue-away", why=self._problem, path=str(self._folder))
            return WaitingForNodes(away) if job.state is State.QUEUED else None
        if answer is None or answer.since_s != job.since_s:
            return None
        if {*answer.hosts, *answer.spares} & {*one.unusable}:
            return None  # drained since: the next report gives it back
        if answer.hosts and job.state is State.QUEUED:
            return NodesFree(answer.hosts, answer.spares, replaced_files(job, one.lost, answer.hosts, find))
        if answer.reason is None and job.lacks_hosts:
            return SparesFree(answer.spares)
        if answer.reason is None or job.state is State.QUEUED:
            return None if answer.reason is None else WaitingForNodes(answer.reason, answer.start_s)
        return Preempted(answer.reason) if one.is_preemptible(time.time()) else None

    def _report(self, entries: tuple[Entry, ...]) -> None:
        if entries and not self.is_open:
            self._heard_mono = time.monotonic()  # it had nothing to report
        if not self._is_talking:
            self._is_talking = True
            in_background(self._talk, "shared-queue")
        if entries != self._entries:
            self._entries = entries
            self._wake.set()

    # The connection, in its own thread

    def _talk(self) -> None:
        while not self._is_closed:
            try:
                with QueueClient(self._folder) as client:
                    sent: tuple[Entry, ...] | None = None
                    drains_s = 0.0
                    half_life_s: float | None = None
                    while not self._is_closed:
                        known = self._known(half_life_s) if half_life_s else {}
                        self._wake.clear()
                        entries = self._entries
                        new = None if entries == sent else entries
                        request = Contend(self._head, new, drains_s, **known)
                        reply = client.call(request, timeout_s=CALL_S)
                        sent, half_life_s = entries, reply.half_life_s if half_life_s is None else 0.0
                        drains_s = max([drains_s, *(one.closure.since_s for one in reply.drains)])
                        self._post(partial(self._take, reply, entries))
                        self._wake.wait(POLL_S if entries else IDLE_S)
            except (AscendrunError, OSError, ValueError) as error:  # ValueError: it is no server of ours
                why = error.message if isinstance(error, AscendrunError) else str(error)
                self._post(lambda why=why: self._lose(why))  # type: ignore[misc]
                self._wake.clear()
                self._wake.wait(POLL_S)

    def _take(self, reply: Decided, entries: tuple[Entry, ...]) -> None:
        self._heard_mono, self._problem, self._reported = time.monotonic(), NO_ANSWER, entries
        self.turn += reply.answers != self._answers or bool(reply.drains)
        self._answers = reply.answers
        self.drains = merge_drains(self.drains, reply.drains)

    def _lose(self, why: Text | str) -> None:
        self._problem = why


def _is_shared(job: Job, own: Decision | None) -> bool:
    """Return whether others are concerned: not of a job that has ended, waits for another one or is held by its user,
    or gets its hosts from an engine."""
    if job.is_terminal or job.engine is not None or isinstance(own, DependencyFailed):
        return False
    return job.state is not State.QUEUED or (
        job.held_by is None
        and not (isinstance(own, WaitingForNodes) and own.reason.code in ("waiting-for-job", "held-by-user"))
    )
