"""Delivery of notifications in one thread for each target, so that an unreachable target delays no other."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.errors import ConflictError, NotFoundError
from ascendrun.head.state.settings_watch import LOOK_S, SettingsWatch, redacted_traceback
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.head.state.store import Store
from ascendrun.head.state.store_file import LostLeaseError
from ascendrun.node.failpoint import failpoint
from ascendrun.text import Text, to_json

if TYPE_CHECKING:
    from ascendrun.core.events import JobEvent
    from ascendrun.core.jobs.job import Job
    from ascendrun.core.notices import Notice, NoticeSettings, Target
    from ascendrun.head.notify.http_client import Cancellation
    from ascendrun.head.state.notice_queue import NoticeQueue, Waiting

TIMEOUT_S = 10.0
"""Seconds that one service has for its complete response."""
CLOSE_S = 3.0
"""Seconds that the controller's end waits for due notifications; the next controller sends the rest."""
REST_S = 2.0
SICK_S = 30.0
"""Seconds without a turn of the controller's loop after which the dead man's switch is no longer pinged."""
BLOCK_S = 60.0
"""Maximum seconds without delivery to a target after a failure, unless the target requested more."""
DIAGNOSIS_S = 60.0
"""Seconds for which the notification of a failure waits for its diagnosis; then it has what is known."""
KEEP_UP_S = 3600.0
"""Seconds for which undeliverable notifications keep an otherwise idle controller running."""


ReadSettings = Callable[[], "NoticeSettings | None"]


class Notifier:
    """Notifier of one controller. `read_settings` may raise InvalidInputError: the last valid settings remain.

    `files`: the settings files, checked for changes. Without targets, nothing is imported and no thread runs.
    """

    def __init__(
        self,
        store: Store,
        read_settings: ReadSettings = lambda: None,
        *,
        files: Sequence[Path] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._watch = SettingsWatch(read_settings, files, log=_log)
        self._head, self._head_id = socket.gethostname(), store.head_id
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self._cancellations: set[Cancellation] = set()
        self._beat_mono = time.monotonic()
        self._live: tuple[tuple[str, str], ...] = ()
        self._waiting: dict[str, float] = {}
        self._fresh = False
        self._round = 0
        self._last_fault = ""

    # Calls of the controller

    def start(self) -> None:
        """Resume the deliveries of the last controller. Raises LostLeaseError, StoreUnusableError."""
        if self.settings() is None and not self._store.notices.targets():
            return
        with self._store.reopened() as store:
            store.notices.recover(now_s=time.time())
            names = store.notices.targets()
        for name in names:
            self._ensure_thread(name)

    def outbox(self, job: Job | None, events: Sequence[JobEvent]) -> list[tuple[str, str, str]]:
        """Return the notifications for new events of a job, None: of no job; called within the transaction that stores
        the events."""
        try:
            return self._decide(job, events)
        except Exception:  # a failed notification must not keep a job from its next state
            self._log_exception()
            return []

    def _decide(self, job: Job | None, events: Sequence[JobEvent]) -> list[tuple[str, str, str]]:
        settings = self.settings()
        if settings is None:
            return []
        from ascendrun.core.notices import notice_of

        rows = []
        for item in events:
            notice = notice_of(job, item, head_id=self._head_id, head=self._head)
            if notice is not None:
                body = json.dumps(to_json(notice), default=str)
                rows += [(notice.id, target.name, body) for target in settings.targets if target.selects(notice)]
        self._fresh = self._fresh or bool(rows)
        return rows

    def beat(self, live: Sequence[tuple[str, str]]) -> None:
        """Handle a turn of the controller's loop. `live`: (name, id) of the jobs that have not ended."""
        self._beat_mono = time.monotonic()
        self._live = tuple(live)
        settings = self.settings()
        if settings is not None and settings.deadman is not None and live:
            self._ensure_thread("deadman", self._ping)
        if self._fresh:
            self._fresh = False
            for target in settings.targets if settings is not None else ():
                self._ensure_thread(target.name)
            with self._news:
                self._round += 1
                self._news.notify_all()

    @property
    def is_waiting(self) -> bool:
        """Return whether something may still be delivered soon: an idle controller keeps running for that."""
        now_mono = time.monotonic()
        return self._fresh or any(now_mono - since_mono < KEEP_UP_S for since_mono in tuple(self._waiting.values()))

    def close(self, *, bound_s: float = CLOSE_S) -> None:
        """Wait a moment for due notifications, then end every thread. Returns about `bound_s` later at most."""
        self.beat(self._live)
        until = time.monotonic() + bound_s
        while self._waiting and time.monotonic() < until - bound_s / 3:
            time.sleep(0.02)
        self._stop.set()
        with self._news:
            self._news.notify_all()
        with self._lock:
            cancellations, threads = tuple(self._cancellations), tuple(self._threads.values())
        for cancellation in cancellations:
            cancellation.cancel()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    # Settings

    def settings(self) -> NoticeSettings | None:
        """Return the present settings of the files; None: no targets."""
        settings = self._watch.get()
        return settings if settings is not None and settings.targets else None

    def _target(self, name: str) -> Target | None:
        settings = self.settings()
        return (
            next((target for target in settings.targets if target.name == name), None) if settings is not None else None
        )

    # The threads

    def _ensure_thread(self, name: str, work: Callable[[], None] | None = None) -> None:
        """Start a thread for the target, unless it has one; `work`: pings of a dead man's switch; None: deliveries."""
        key = f"{name} press" if work is not None else name
        with self._lock:
            if self._stop.is_set() or key in self._threads:
                return
            thread = threading.Thread(target=work or (lambda: self._work(name)), name=f"notices-{key}", daemon=True)
            self._threads[key] = thread
        if work is None:
            self._waiting[name] = time.monotonic()
        thread.start()

    def _work(self, name: str) -> None:
        store = self._reopen_store()
        if store is None:
            return
        blocked_mono = 0.0
        try:
            while not self._stop.is_set():
                round_ = self._round
                try:
                    rest_s, block_s = self._step(store, name, blocked_mono)
                    blocked_mono = max(blocked_mono, time.monotonic() + block_s)
                except LostLeaseError:
                    return
                except Exception:  # a full disk, an internal error: the next turn may succeed; the log has it
                    self._log_exception()
                    rest_s = REST_S
                with self._news:
                    if rest_s > 0 and not self._stop.is_set() and self._round == round_:
                        self._news.wait(min(rest_s, REST_S))
        finally:
            self._waiting.pop(name, None)
            store.close()

    def _reopen_store(self) -> Store | None:
        """Retry until the store opens (a full disk, a lock); None: the controller ends before that."""
        while not self._stop.is_set():
            try:
                return self._store.reopened()
            except StoreUnusableError:
                self._log_exception()
                self._stop.wait(REST_S)
        return None

    def _step(self, store: Store, name: str, blocked_mono: float) -> tuple[float, float]:
        """Deliver what is due first. Return the pause, and how long to send nothing to the target."""
        from ascendrun.core.notices import GIVE_UP_S, LIMITS, LONGEST_WAIT_S, free_at_s

        queue, now_s = store.notices, time.time()
        queue.give_up_beyond(name, now_s=now_s)
        waiting = queue.next(name)
        if waiting is None:
            self._waiting.pop(name, None)
            return REST_S, 0.0
        self._waiting.setdefault(name, time.monotonic())
        target = self._target(name)
        if target is None:
            removed = Text("notice.target-removed", "the settings no longer contain this target")
            queue.finish(waiting, name, state="given up", reply=removed, now_s=now_s)
            return 0.0, 0.0
        if now_s - waiting.made_at_s > GIVE_UP_S:
            late = Text("notice.too-late", "not delivered within {limit_s:duration}", limit_s=GIVE_UP_S)
            queue.finish(waiting, name, state="given up", reply=late, now_s=now_s)
            return 0.0, 0.0
        wait_s = (
            waiting.due_at_s - now_s if waiting.due_at_s - now_s <= LONGEST_WAIT_S * 1.5 else 0.0
        )  # the clock was set
        limits = LIMITS[target.type]
        sent_s = queue.sent_at_s(name, since_s=now_s - max(window_s for _, window_s in limits))
        wait_s = max(wait_s, free_at_s(sent_s, limits, now_s=now_s) - now_s, blocked_mono - time.monotonic())
        if wait_s > 0:
            return wait_s, 0.0
        notice = self._diagnosed(store, waiting)
        if notice is None:
            awaited = Text("notice.awaits-diagnosis", "the diagnosis of the failure is awaited")
            queue.again(waiting, due_at_s=now_s + LOOK_S, reply=awaited)
            return 0.0, 0.0
        return 0.0, self._send(queue, waiting, notice, target)

    @staticmethod
    def _diagnosed(store: Store, waiting: Waiting) -> Notice | None:
        """Return the notification with what failed first; None: the diagnosis is awaited. A repeated one is the same
        each time."""
        from ascendrun.core.notices import Notice, with_diagnosis

        notice = load_dataclass(Notice, waiting.body)
        if notice.job is None or waiting.tries:
            return notice
        try:
            job = store.jobs.find(notice.job).job
        except (NotFoundError, ConflictError):  # removed meanwhile
            return notice
        return with_diagnosis(notice, job, is_late=time.time() - waiting.made_at_s >= DIAGNOSIS_S)

    def _send(self, queue: NoticeQueue, waiting: Waiting, notice: Notice, target: Target) -> float:
        """Try once; return how long to send nothing to the target."""
        from ascendrun.core.notices import retry_after_s
        from ascendrun.head.notify.delivery import deliver

        queue.begin(waiting, json.dumps(to_json(notice), default=str), now_s=time.time())
        failpoint("notices.before_send")
        with self._cancellation() as cancellation:
            timeout_s = self._timeout_s
            result = deliver(notice, target, timeout_s=timeout_s, cancellation=cancellation, stop=self._stop)
        failpoint("notices.after_send")
        now_s = time.time()
        if result.outcome != "retry":
            state = "delivered" if result.outcome == "delivered" else "refused"
            queue.finish(waiting, target.name, state=state, reply=result.reply, now_s=now_s)
            return 0.0
        wait_s = retry_after_s(waiting.tries + 1, notice_id=waiting.id, requested_s=result.wait_s)
        queue.again(waiting, due_at_s=now_s + wait_s, reply=result.reply)
        return wait_s if result.wait_s is not None else min(wait_s, BLOCK_S)

    @contextmanager
    def _cancellation(self) -> Iterator[Cancellation]:
        """Yield what `close` cancels."""
        from ascendrun.head.notify.http_client import Cancellation

        cancellation = Cancellation()
        with self._lock:
            self._cancellations.add(cancellation)
        try:
            yield cancellation
        finally:
            self._cancellations.discard(cancellation)

    def _ping(self) -> None:
        """Ping the dead man's switch while the controller's loop runs and a job that it watches is live."""
        from ascendrun.head.notify.delivery import ping

        due_mono = 0.0
        while not self._stop.wait(min(1.0, max(0.01, due_mono - time.monotonic()))):
            target, now_mono = self._target("deadman"), time.monotonic()
            if target is None or now_mono < due_mono:
                continue
            is_live = any(target.is_for(name, job_id) for name, job_id in self._live)
            if not is_live or now_mono - self._beat_mono > SICK_S:
                continue
            due_mono = now_mono + target.interval_s
            timeout_s = min(self._timeout_s, target.interval_s)
            try:
                with self._cancellation() as cancellation:
                    problem = ping(target, timeout_s=timeout_s, cancellation=cancellation)
                if problem:
                    self._log_once(f"notices: cannot request the URL of the dead man's switch: {problem}")
            except Exception:  # a bug must not look like a dead controller; the log has it, credentials masked
                self._log_exception()

    def _log_exception(self) -> None:
        self._log_once(redacted_traceback())

    def _log_once(self, text: str) -> None:
        """Write to the controller's log, once for a repeated text."""
        if text != self._last_fault:
            self._last_fault = text
            _log(text)


NotifierMaker = Callable[[Store], Notifier]


def _log(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass  # the log's own disk may be full
