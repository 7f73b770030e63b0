"""Notifications that wait for delivery, in the store: a delivery is recorded before it starts."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.events import Event
from ascendrun.head.state.job_table import add_events
from ascendrun.head.state.store_file import StoreFile
from ascendrun.text import Text, from_json, to_json

QUEUE_LIMIT = 1000
"""Notifications that wait for one target; above it the oldest are dropped."""
KEPT_S = 30 * 86400.0
"""Seconds for which delivered notifications are stored."""
MOST_INTERRUPTIONS = 1
"""After more interruptions of a delivery the notification may have arrived twice; it is not sent again."""


@dataclass(frozen=True)
class Waiting:
    """One notification for one target. `tries`: number of attempts so far."""

    number: int
    id: str
    job: str | None
    body: Mapping[str, Any]
    made_at_s: float
    due_at_s: float
    tries: int


class NoticeQueue:
    """The notifications of a store. A thread that delivers them has its own connection (`reopened`)."""

    def __init__(self, file: StoreFile) -> None:
        self._file = file

    def recover(self, *, now_s: float) -> None:
        """Recover for a new controller: notifications that the last one was sending are sent again, once."""
        lost = Text(
            "notice.interrupted",
            "interrupted {count} times during delivery; it may have arrived",
            count=MOST_INTERRUPTIONS + 1,
        )
        with self._file.writing() as db:
            rows = db.execute(
                "SELECT number, job, target FROM notices WHERE state = 'sending' AND cuts >= ?", (MOST_INTERRUPTIONS,)
            ).fetchall()
            for number, job, target in rows:
                db.execute(
                    "UPDATE notices SET state = 'unknown', answer = ? WHERE number = ?", (_dump_reply(lost), number)
                )
                if job is not None:
                    add_events(db, job, [_failed(target, None, 1, lost, now_s)])
            db.execute("UPDATE notices SET state = 'waiting', cuts = cuts + 1 WHERE state = 'sending'")
            _forget_old(db, now_s)

    def newest(self, *, limit: int = 200) -> tuple[Mapping[str, Any], ...]:
        """Return the newest notifications with id, target, job, state, tries, due_at_s, tried_at_s, answer."""
        names = ("id", "target", "job", "state", "tries", "due_at_s", "tried_at_s", "answer")
        rows = self._file.query(f"SELECT {', '.join(names)} FROM notices ORDER BY number DESC LIMIT ?", (limit,))
        found = [dict(zip(names, row)) for row in rows]
        return tuple({**one, "answer": from_json(json.loads(one["answer"] or "null"))} for one in found)

    def targets(self) -> tuple[str, ...]:
        """Return the names of targets with waiting notifications."""
        rows = self._file.query("SELECT DISTINCT target FROM notices WHERE state IN ('waiting', 'sending')")
        return tuple(row[0] for row in rows)

    def next(self, target: str) -> Waiting | None:
        """Return the notification that is due first."""
        rows = self._file.query(
            "SELECT number, id, job, body, made_at_s, due_at_s, tries FROM notices WHERE target = ?"
            " AND state = 'waiting' ORDER BY due_at_s, number LIMIT 1",
            (target,),
        )
        return next((Waiting(row[0], row[1], row[2], json.loads(row[3]), *row[4:]) for row in rows), None)

    def sent_at_s(self, target: str, *, since_s: float) -> list[float]:
        """Return when notifications were sent to the target, since `since_s`."""
        rows = self._file.query(
            "SELECT tried_at_s FROM notices WHERE target = ? AND tried_at_s >= ? ORDER BY tried_at_s DESC LIMIT 200",
            (target, since_s),
        )
        return [row[0] for row in rows]

    def begin(self, waiting: Waiting, body: str, *, now_s: float) -> None:
        """Record that it will be sent now, with this body."""
        with self._file.writing() as db:
            db.execute(
                "UPDATE notices SET state = 'sending', body = ?, tries = tries + 1, tried_at_s = ? WHERE number = ?",
                (body, now_s, waiting.number),
            )

    def again(self, waiting: Waiting, *, due_at_s: float, reply: Text | str) -> None:
        with self._file.writing() as db:
            db.execute(
                "UPDATE notices SET state = 'waiting', due_at_s = ?, answer = ? WHERE number = ?",
                (due_at_s, _dump_reply(reply), waiting.number),
            )

    def finish(self, waiting: Waiting, target: str, *, state: str, reply: Text | str, now_s: float) -> None:
        """Record the result. `state`: delivered, or a failure, which also becomes an event of the job."""
        with self._file.writing() as db:
            db.execute(
                "UPDATE notices SET state = ?, answer = ? WHERE number = ?", (state, _dump_reply(reply), waiting.number)
            )
            _forget_old(db, now_s)
            if state != "delivered" and waiting.job is not None:
                add_events(db, waiting.job, [_failed(target, str(waiting.body["kind"]), 1, reply, now_s)])

    def give_up_beyond(self, target: str, *, now_s: float) -> int:
        """Drop the oldest waiting notifications above QUEUE_LIMIT; return how many."""
        rows = self._file.query(
            "SELECT number, job FROM notices WHERE target = ? AND state = 'waiting'"
            " ORDER BY number DESC LIMIT -1 OFFSET ?",
            (target, QUEUE_LIMIT),
        )
        if rows:
            english = "more than {limit} notifications are waiting; the oldest were dropped"
            full = Text("notice.queue-full", english, limit=QUEUE_LIMIT)
            with self._file.writing() as db:
                for number, _ in rows:
                    values = (_dump_reply(full), number)
                    db.execute("UPDATE notices SET state = 'given up', answer = ? WHERE number = ?", values)
                newest_job = rows[0][1]
                if newest_job is not None:
                    add_events(db, newest_job, [_failed(target, None, len(rows), full, now_s)])
        return len(rows)


def _failed(target: str, kind: str | None, count: int, reply: Text | str, now_s: float) -> Event:
    values = {"target": target, "kind": kind, "count": count, "reply": reply}
    return Event("notification-failed", values, at_s=now_s)


def _forget_old(db: sqlite3.Connection, now_s: float) -> None:
    """Delete old rows, not only at a start: a controller may run for months."""
    db.execute("DELETE FROM notices WHERE state NOT IN ('waiting', 'sending') AND made_at_s < ?", (now_s - KEPT_S,))


def _dump_reply(reply: Text | str) -> str:
    """Return the reply to a notification for its column."""
    return json.dumps(to_json(reply), ensure_ascii=False)
