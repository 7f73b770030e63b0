"""Many small jobs at once, through the controller's door and the store: start them, wait for all, end what is left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.errors import ConflictError, NotFoundError
from ascendrun.core.jobs.job import TERMINAL, State
from ascendrun.head.loop.daemon import is_running
from ascendrun.head.protocol.control_messages import Request, Stop, Submit
from ascendrun.head.state.store import Store
from ascendrun.head.survey.submission import Submission

POLL_S = 0.1
WATCH_S = 2.0

Ask = Callable[[Request[Any]], Any]


class StoreJobs:
    """The jobs of one state folder. `ask(request)`: one question to the controller, which it may be asked twice.
    `ensure_controller` starts one when none runs."""

    def __init__(self, state_dir: Path, ask: Ask, ensure_controller: Callable[[], None]) -> None:
        self._state_dir, self._ask, self._ensure_controller = state_dir, ask, ensure_controller

    def submit_made(self, submission: Submission) -> str:
        """Stores the job and returns its id."""
        return str(self._ask(Submit((submission.to_json(),))).job)

    def await_ended(self, jobs: Sequence[str], *, timeout_s: float) -> tuple[str, ...]:
        """Returns when all have ended, or in time; those that have not."""
        until = time.monotonic() + timeout_s
        look_at = 0.0
        with self._reading() as store:
            while True:
                states = store.states()
                left = tuple(job for job in jobs if states[job] not in TERMINAL)
                now = time.monotonic()
                if not left or now > until:
                    return left
                if now > look_at:  # somebody has to care for them when the controller died
                    look_at = now + WATCH_S
                    if not is_running(self._state_dir):
                        self._ensure_controller()
                time.sleep(POLL_S)

    def outcome(self, job: str) -> tuple[str | None, int]:
        """Why the job did not succeed (None: it did), or the reason why it has not ended; and its attempt."""
        with self._reading() as store:
            record = store.find(job).job
        if record.state is State.SUCCEEDED:
            return None, record.attempt
        reason = record.first_failure.reason() if record.first_failure is not None else record.reason
        return str(reason), record.attempt

    def end(self, jobs: Sequence[str], *, timeout_s: float) -> None:
        """Stops those that still live, at once, and waits for their end."""
        left = self.await_ended(jobs, timeout_s=0.0) if jobs else ()
        for job in left:
            try:
                self._ask(Stop(job, now=True))
            except (ConflictError, NotFoundError):
                continue  # it has just ended by itself
        if left:
            self.await_ended(left, timeout_s=timeout_s)

    @contextmanager
    def _reading(self) -> Iterator[Store]:
        store = Store.open_for_reading(self._state_dir)
        if store is None:
            raise NotFoundError(f"nothing was ever submitted with {self._state_dir}")
        try:
            yield store
        finally:
            store.close()
