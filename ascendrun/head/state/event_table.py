"""The table of events, of all jobs and of the head itself."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Sequence
from typing import Any

from ascendrun.core.events import Event, JobEvent
from ascendrun.head.state.store_file import StoreFile

_EVENT = 'code, "values", hosts, ranks, attempt, at_s'


class EventTable:
    """The events of a store."""

    def __init__(self, file: StoreFile) -> None:
        self._file = file

    def of(self, job_id: str) -> tuple[Event, ...]:
        """Return all events of a job, oldest first."""
        rows = self._file.query(f"SELECT {_EVENT} FROM events WHERE job = ? ORDER BY number", (job_id,))
        with self._file.raising_damaged():
            return tuple(_load_event(row) for row in rows)

    def stream(
        self,
        *,
        after: int = 0,
        job: str | None = None,
        pipeline: str | None = None,
        since_s: float | None = None,
        codes: Collection[str] | None = None,
        limit: int = 10_000,
    ) -> tuple[JobEvent, ...]:
        """Return events of all jobs with numbers greater than `after`, in order; `pipeline`: only of its jobs; `codes`:
        only these."""
        where: list[str] = ["number > ?"]
        values: list[Any] = [after]
        stages = None if pipeline is None else f"{pipeline}-*"
        for condition, value in (("job = ?", job), ("job GLOB ?", stages), ("at_s >= ?", since_s)):
            if value is not None:
                where.append(condition)
                values.append(value)
        if codes is not None:
            where.append(f"code IN ({', '.join('?' * len(codes))})")
            values += sorted(codes)
        rows = self._file.query(
            f"SELECT number, job, {_EVENT} FROM events WHERE {' AND '.join(where)} ORDER BY number LIMIT ?",
            [*values, limit],
        )
        with self._file.raising_damaged():
            return tuple(JobEvent(number, job_id, _load_event(row)) for number, job_id, *row in rows)

    def newest(self) -> int:
        """Return the number of the newest event; 0: there is none."""
        return int(self._file.query("SELECT max(number) FROM events")[0][0] or 0)

    def codes(self) -> tuple[str, ...]:
        """Return the codes of all events, each once."""
        return tuple(row[0] for row in self._file.query("SELECT DISTINCT code FROM events ORDER BY code"))

    def remove_unreadable(self) -> None:
        """Remove events that cannot be read, within a transaction of the caller."""

        def load(row: Sequence[Any]) -> None:
            job, *event = row
            str(_load_event(event).message()).encode(), job.encode()

        self._file.remove_unreadable("events", ("number", "job", _EVENT), load)


def add_events(db: sqlite3.Connection, job_id: str, events: Sequence[Event]) -> tuple[JobEvent, ...]:
    """Append events of a job, within a transaction of the caller."""
    added = []
    for event in events:
        cursor = db.execute(
            f"INSERT INTO events (job, {_EVENT}) VALUES (?, ?, ?, ?, ?, ?, ?)", (job_id, *_dump_event(event))
        )
        added.append(JobEvent(int(cursor.lastrowid or 0), job_id, event))
    return tuple(added)


def _dump_event(event: Event) -> tuple[Any, ...]:
    record = event.to_json()
    columns = (json.dumps(record[name], ensure_ascii=False, default=str) for name in ("values", "hosts", "ranks"))
    return (event.code, *columns, event.attempt, event.at_s)


def _load_event(row: Sequence[Any]) -> Event:
    code, values, hosts, ranks, attempt, at_s = row
    lists = {"values": json.loads(values), "hosts": json.loads(hosts), "ranks": json.loads(ranks)}
    return Event.from_json({"code": code, **lists, "attempt": attempt, "at_s": at_s})
