"""Jobs, their events and notifications, and the controller's lease, in SQLite."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.errors import ConflictError, NotFoundError
from ascendrun.core.events import Event, JobEvent
from ascendrun.head.state.database import Database, Migration, immediate
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.text import Text, from_json, to_json

if TYPE_CHECKING:
    from ascendrun.core.jobs.job import Job, State

_EVENT = 'code, "values", hosts, ranks, attempt, at_s'


_TYPED_EVENTS = (
    """CREATE TABLE typed_events (
        number INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, code TEXT NOT NULL, "values" TEXT NOT NULL,
        hosts TEXT NOT NULL, ranks TEXT NOT NULL, attempt INTEGER, at_s REAL NOT NULL)""",
    "DROP TABLE events",
    "ALTER TABLE typed_events RENAME TO events",
    "CREATE INDEX events_by_job ON events (job, number)",
)


def _type_events(db: sqlite3.Connection) -> None:
    db.execute(_TYPED_EVENTS[0])
    if any(db.execute(f"SELECT 1 FROM {table}").fetchone() for table in ("jobs", "events", "notices")):
        from ascendrun.head.state.old_stores import type_events

        type_events(db)
    for statement in _TYPED_EVENTS[1:]:
        db.execute(statement)


def _rename_keys(db: sqlite3.Connection) -> None:
    if db.execute("SELECT 1 FROM jobs WHERE record != ''").fetchone():
        from ascendrun.head.state.old_stores import rename_keys

        rename_keys(db)


_MIGRATIONS: tuple[Migration, ...] = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE lease (
        id INTEGER PRIMARY KEY CHECK (id = 1), token TEXT NOT NULL, pid INTEGER NOT NULL, taken_at_s REAL NOT NULL);
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, key TEXT UNIQUE NOT NULL, name TEXT NOT NULL,
        state TEXT NOT NULL, record TEXT NOT NULL, spec TEXT NOT NULL, hosts TEXT NOT NULL, trees TEXT NOT NULL,
        file TEXT, created_at_s REAL NOT NULL, has_unconfirmed INTEGER NOT NULL DEFAULT 0,
        is_drained INTEGER NOT NULL DEFAULT 0);
    CREATE INDEX jobs_by_state ON jobs (state);
    CREATE TABLE events (
        job TEXT NOT NULL, seq INTEGER NOT NULL, at_s REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
        PRIMARY KEY (job, seq)) WITHOUT ROWID;
    """,
    """  -- voice: ok name of a table that is already on disk
    CREATE TABLE story (
        number INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, seq INTEGER NOT NULL, at_s REAL NOT NULL,
        kind TEXT NOT NULL, text TEXT NOT NULL, UNIQUE (job, seq));
    INSERT INTO story (job, seq, at_s, kind, text)
        SELECT job, seq, at_s, kind, text FROM events ORDER BY at_s, job, seq;
    DROP TABLE events;
    ALTER TABLE story RENAME TO events;
    CREATE TABLE notices (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, target TEXT NOT NULL, job TEXT, body TEXT NOT NULL,
        made_at_s REAL NOT NULL, state TEXT NOT NULL, due_at_s REAL NOT NULL, tries INTEGER NOT NULL DEFAULT 0,
        cuts INTEGER NOT NULL DEFAULT 0, tried_at_s REAL, answer TEXT, UNIQUE (id, target));
    CREATE INDEX notices_by_due ON notices (target, state, due_at_s);
    """,
    _type_events,
    _rename_keys,
)


class LostLeaseError(ConflictError):
    """Another controller took over this state directory; this one must not write any more."""

    code = "lease-lost"


@dataclass(frozen=True)
class StoredJob:
    """A row of `jobs`: the record that the lifecycle updates, and its sources, as JSON values."""

    job: Job
    key: str
    spec: Mapping[str, Any]
    hosts: Sequence[Mapping[str, Any]]
    trees: Sequence[Mapping[str, Any]]
    file: str | None


Outbox = Callable[["Job", Sequence[JobEvent]], Sequence[tuple[str, str, str]]]
"""(job, its new events) -> notifications as (id, name of the target, body); stored in the events' transaction."""


class Store(Database):
    """The jobs of a state directory."""

    FILE_NAME = "state.db"
    MIGRATIONS = _MIGRATIONS
    BUSY_S = 10.0
    SYNCHRONOUS = "FULL"
    HAS_BACKUP = True
    OTHERWISE = Text("store.other-directory", "set another ASCENDRUN_STATE_DIR")
    UNUSABLE = Text("store.move-aside", "move the file aside to start with an empty store (jobs keep running)")

    def __init__(self, connection: sqlite3.Connection, path: Path, token: str | None = None) -> None:
        super().__init__(connection, path)
        self._token = token
        self.outbox: Outbox | None = None

    @classmethod
    def open(cls, state_dir: Path) -> Store:
        """Open as any database; take the lease from its owner.

        The caller holds the controller's file lock, so an existing lease belongs to a dead process.
        """
        import secrets  # here, because a reader does not need its hash functions

        store = super().open(state_dir)
        store._token = secrets.token_hex(16)
        with immediate(store._db):
            store._db.execute(
                "INSERT OR REPLACE INTO lease VALUES (1, ?, ?, ?)", (store._token, os.getpid(), time.time())
            )
            store._db.execute("INSERT OR IGNORE INTO meta VALUES ('head_id', ?)", (secrets.token_hex(4),))
        return store

    @property
    def head_id(self) -> str:
        """Return eight hex digits of this state directory: two heads never use one run name on a node."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'head_id'").fetchone()
        return str(row[0])

    def reopened(self) -> Store:
        """Return the same store with its own connection, for another thread; it writes by the same lease."""
        with self.raising_unusable(self.path):
            return Store(self._connect(self.path, self.BUSY_S), self.path, self._token)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Hold one transaction; refused if another controller has the lease.

        Raises StoreUnusableError if nothing can be written now: the disk is full, or another program locks the file.
        """
        try:
            with immediate(self._db):
                row = self._db.execute("SELECT token, pid FROM lease WHERE id = 1").fetchone()
                if row is None or row[0] != self._token:
                    pid = row[1] if row else None
                    raise LostLeaseError(
                        Text("store.lease-lost", "controller {pid} took over this state directory", pid=pid)
                    )
                yield self._db
        except sqlite3.OperationalError as error:
            raise _unwritable(self.path, error) from error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for queries. Raises StoreUnusableError if another program locks the file too long."""
        try:
            yield self._db
        except sqlite3.OperationalError as error:
            raise _unwritable(self.path, error) from error

    def add_job(self, *, make_job: Callable[[str, str], Job], **row: Any) -> Job:
        """Insert as `insert`, in a transaction; `make_job(id, head_id)`. On return the job is on disk."""
        with self.writing() as db:
            return self.insert(db, make_job=lambda number, head_id: make_job(job_id_of(number), head_id), **row)

    def insert(
        self,
        db: sqlite3.Connection,
        *,
        key: str,
        make_job: Callable[[int, str], Job],
        spec: Mapping[str, Any],
        hosts: Sequence[Mapping[str, Any]],
        trees: Sequence[Mapping[str, Any]],
        file: str | None,
        now_s: float,
    ) -> Job:
        """Store a new job within a transaction of the caller; with a known `key` return its job and store nothing.

        `make_job(number of the row, head_id)` makes the record.
        """
        from ascendrun.core.jobs.job import load_job

        known = db.execute("SELECT record FROM jobs WHERE key = ?", (key,)).fetchone()
        if known:
            return load_job(json.loads(known[0]))
        cursor = db.execute(
            "INSERT INTO jobs (key, name, state, record, spec, hosts, trees, file, created_at_s)"
            " VALUES (?, '', '', '', ?, ?, ?, ?, ?)",
            (key, json.dumps(spec), json.dumps(hosts), json.dumps(trees), file, now_s),
        )
        job = make_job(int(cursor.lastrowid or 0), self.head_id)
        db.execute("UPDATE jobs SET id = ? WHERE number = ?", (job.id, cursor.lastrowid))
        submitted = Event("submitted", {"name": job.name}, job.hosts, attempt=job.attempt, at_s=now_s)
        self._write(db, job, [submitted], now_s)
        return job

    def save(self, job: Job, events: Sequence[Event], *, now_s: float) -> None:
        """Write the record and the new events of the job in one transaction."""
        with self.writing() as db:
            self._write(db, job, events, now_s)

    def _write(self, db: sqlite3.Connection, job: Job, events: Sequence[Event], now_s: float) -> None:
        from ascendrun.core.jobs.job import dump_job

        db.execute(
            "UPDATE jobs SET name = ?, state = ?, record = ?, has_unconfirmed = ? WHERE id = ?",
            (job.name, job.state.value, json.dumps(dump_job(job), default=str), bool(job.unconfirmed), job.id),
        )
        added = add_events(db, job.id, events)
        for notice_id, target, body in self.outbox(job, added) if self.outbox is not None and added else ():
            db.execute(
                "INSERT OR IGNORE INTO notices (id, target, job, body, made_at_s, state, due_at_s)"
                " VALUES (?, ?, ?, ?, ?, 'waiting', ?)",
                (notice_id, target, job.id, body, now_s, now_s),
            )

    def mark_drained(self, job_id: str) -> None:
        """Record that every byte of the job's nodes is in the spool."""
        with self.writing() as db:
            db.execute("UPDATE jobs SET is_drained = 1 WHERE id = ?", (job_id,))

    def live_jobs(self) -> tuple[StoredJob, ...]:
        """Return jobs that need a controller, oldest first: not over, hosts unconfirmed, or logs not here."""
        return self._jobs("WHERE has_unconfirmed OR NOT is_drained ORDER BY number", [])  # drained: over, all is here

    def all_jobs(self) -> tuple[StoredJob, ...]:
        return self._jobs("ORDER BY number", [])

    def _jobs(self, tail: str, values: list[Any]) -> tuple[StoredJob, ...]:
        rows = self._db.execute(f"SELECT record, key, spec, hosts, trees, file FROM jobs {tail}", values).fetchall()
        if not rows:
            return ()
        from ascendrun.core.jobs.job import load_job

        return tuple(
            StoredJob(load_job(json.loads(record)), key, json.loads(spec), json.loads(hosts), json.loads(trees), file)
            for record, key, spec, hosts, trees, file in rows
        )

    def stages(self, pipeline: str) -> tuple[StoredJob, ...]:
        """Return the jobs of a pipeline by its id, oldest first; () if there is no such pipeline."""
        if not re.fullmatch(r"j-[0-9]+", pipeline):
            return ()
        return self._jobs("WHERE id GLOB ? ORDER BY number", [f"{pipeline}-*"])

    def pipeline_id(self, ref: str) -> str | None:
        """Return the pipeline with the id or name `ref` (the newest of that name); None: there is none, or a newer job
        of that name is not a pipeline."""
        if self.stages(ref):
            return ref
        from ascendrun.core.jobs.job import load_job

        rows = self._db.execute(
            "SELECT number, record FROM jobs WHERE substr(name, 1, ?) = ? ORDER BY number DESC",
            (len(ref) + 1, f"{ref}."),
        )
        for number, record in rows:
            job = load_job(json.loads(record))
            if job.pipeline is not None and job.name == f"{ref}.{job.stage}":
                newer = self._db.execute("SELECT 1 FROM jobs WHERE name = ? AND number > ?", (ref, number)).fetchone()
                return None if newer else job.pipeline
        return None

    def find(self, ref: str) -> StoredJob:
        """Return a job by id, by name (the newest live job of that name, else the newest), or by the start of an id.

        Of a pipeline: its representative stage. Raises NotFoundError, ConflictError.
        """
        found = self._jobs("WHERE id = ?", [ref])
        pipeline = self.pipeline_id(ref) if not found else None
        if pipeline is not None:
            from ascendrun.core.jobs.pipelines import representative_stage

            stages = self.stages(pipeline)
            return stages[representative_stage([one.job for one in stages])]
        found = found or self._jobs("WHERE name = ? ORDER BY number DESC", [ref])
        if found:
            return next((stored for stored in found if not stored.job.is_terminal), found[0])
        begins = [row[0] for row in self._db.execute("SELECT id FROM jobs") if row[0].startswith(ref)]
        if len(begins) > 1:
            raise ConflictError(
                Text("job.ambiguous", "{job} matches several jobs: {found}", job=ref, found=begins[:5]),
                hint=Text("job.longer-id", "give more characters of the id"),
            )
        if not self.job_names():
            raise NotFoundError(
                Text("job.none", "{job}: job not found ({path} has no jobs)", job=ref, path=str(self.path.parent)),
                hint=Text("job.submit-first", "run `ascendrun submit jobs/quickstart.yaml`"),
            )
        if not begins or not ref:
            raise NotFoundError(
                Text("job.not-found", "job {job:quote} not found", job=ref),
                hint=Text("job.list-all", "list all jobs: ascendrun ps -a"),
            )
        return self._jobs("WHERE id = ?", begins)[0]

    def events(self, job_id: str) -> tuple[Event, ...]:
        """Return all events of a job, oldest first."""
        rows = self._db.execute(f"SELECT {_EVENT} FROM events WHERE job = ? ORDER BY number", (job_id,))
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
        rows = self._db.execute(
            f"SELECT number, job, {_EVENT} FROM events WHERE {' AND '.join(where)} ORDER BY number LIMIT ?",
            [*values, limit],
        )
        return tuple(JobEvent(number, job_id, _load_event(row)) for number, job_id, *row in rows)

    def notices(self, *, limit: int = 200) -> tuple[Mapping[str, Any], ...]:
        """Return the newest notifications with id, target, job, state, tries, due_at_s, tried_at_s, answer."""
        names = ("id", "target", "job", "state", "tries", "due_at_s", "tried_at_s", "answer")
        rows = self._db.execute(f"SELECT {', '.join(names)} FROM notices ORDER BY number DESC LIMIT ?", (limit,))
        return tuple({**dict(zip(names, row)), "answer": _load_reply(row[-1])} for row in rows)

    def has_waiting_notices(self) -> bool:
        row = self._db.execute("SELECT 1 FROM notices WHERE state IN ('waiting', 'sending') LIMIT 1").fetchone()
        return row is not None

    def event_codes(self) -> tuple[str, ...]:
        return tuple(row[0] for row in self._db.execute("SELECT DISTINCT code FROM events ORDER BY code"))

    def job_names(self) -> Mapping[str, str]:
        """Return the name of every job, by id."""
        return dict(self._db.execute("SELECT id, name FROM jobs WHERE id IS NOT NULL").fetchall())

    def states(self) -> Mapping[str, State]:
        """Return the state of every job, by id."""
        from ascendrun.core.jobs.job import State

        return {row[0]: State(row[1]) for row in self._db.execute("SELECT id, state FROM jobs")}


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


def dump_reply(reply: Text | str) -> str:
    """Return the reply to a notification for its column."""
    return json.dumps(to_json(reply), ensure_ascii=False)


def _load_reply(column: str | None) -> Text | str | None:
    """Load the reply; also of an earlier release, which stored the plain text."""
    try:
        return None if column is None else from_json(json.loads(column))
    except ValueError:
        return column


def job_id_of(number: int) -> str:
    """Return the job id of a row number, such as j-0003."""
    return f"j-{number:04d}"


def _unwritable(path: Path, error: sqlite3.OperationalError) -> StoreUnusableError:
    free = os.statvfs(path.parent)
    return StoreUnusableError(
        Text(
            "store.cannot-write",
            "cannot write {path}: {error} ({free:bytes} free)",
            path=str(path),
            error=str(error),
            free=free.f_bavail * free.f_frsize,
        ),
        hint=Text("store.free-space", "free disk space, or end the program that uses the file (jobs keep running)"),
    )
