"""A controller's notices without the controller: a state folder, a settings file, and the notifier at work."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.jobs.reasons import because
from ascendrun.core.notices.settings import read_notices
from ascendrun.head.notify.notifier import Notifier
from ascendrun.head.state.store import Store
from ascendrun.head.state.user_files import load_settings
from tests.lib.demo_jobs import store_job
from tests.lib.vcluster.processes import await_that
from tests.lib.web_service import Say, Service

OK = Say(200, b'{"errcode":0,"code":0}')


class Head:
    """A state folder with a store, a settings file, and a notifier that works as the controller would have it."""

    def __init__(self, folder: Path, *, ask_s: float = 30.0) -> None:
        self.folder = folder
        self.file = folder / "config.yaml"
        self.store = Store.open(folder / "state")
        self.notifier = Notifier(self.store, self.read, files=[self.file], timeout_s=ask_s)
        self.store.jobs.outbox = self.notifier.outbox
        self.jobs: list[Job] = []

    def read(self) -> Any:
        return read_notices(load_settings({}, files=[self.file]))

    def submit(self, name: str = "qwen") -> Job:
        job = store_job(self.store, f"k{len(self.jobs)}", now_s=time.time(), name=name)
        self.jobs.append(job)
        return job

    def move(self, job: Job, state: str, why: str = "because", **changes: Any) -> Job:
        job = self.save(job, state, why, **changes)
        self.beat()
        return job

    def save(self, job: Job, state: str, why: str = "because", **changes: Any) -> Job:
        reason = because("rejected", why=why)
        event = Event("state-changed", {"state": state, "reason": reason}, attempt=job.attempt, at_s=time.time())
        job = replace(job, state=State(state), reason=reason, **changes)
        self.store.jobs.save(job, [event], now_s=time.time())
        return job

    def beat(self) -> None:
        self.notifier.beat([(job.name, job.id) for job in self.jobs])

    def rows(self) -> dict[str, Any]:
        return {row["target"]: row for row in self.store.notices.newest()}

    def await_state(self, target: str, state: str) -> Any:
        await_that(lambda: target in self.rows() and self.rows()[target]["state"] == state)
        return self.rows()[target]

    def due_now(self) -> None:
        """As if the time until the next tries had passed."""
        with self.store.writing() as db:
            db.execute("UPDATE notices SET due_at_s = 0")

    def story(self, job: Job) -> list[str]:
        return [f"{event.code}: {event.message()}" for event in self.store.events.of(job.id)]

    def close(self) -> None:
        self.notifier.close(bound_s=0.2)
        self.store.close()


def target(service: Service, kind: str = "generic", **more: Any) -> dict[str, Any]:
    return {"type": kind, "url": service.url(), **more}
