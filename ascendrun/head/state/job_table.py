"""The tables of jobs and of events: a row for each job, with the record that the lifecycle updates and its sources."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import ConflictError, NotFoundError
from ascendrun.core.events import Event, JobEvent
from ascendrun.core.jobs.job_copy import OF_JOB, JobCopy, seal, unseal
from ascendrun.head.state.job_files import COPY_FILE, RECORD_FILE, job_folder, write_copy, write_record
from ascendrun.head.state.store_file import StoreFile
from ascendrun.node.failpoint import failpoint
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobs.job import Job, State


_EVENT = 'code, "values", hosts, ranks, attempt, at_s'


@dataclass(frozen=True)
class StoredJob:
    """A row of `jobs`: the record that the lifecycle updates, and its sources, as JSON values."""

    job: Job
    key: str
    spec: Mapping[str, Any]
    hosts: Sequence[Mapping[str, Any]]
    trees: Sequence[Mapping[str, Any]]
    file: str | None

    @classmethod
    def of(cls, job: Job, *, hosts: Sequence[Mapping[str, Any]], **row: Any) -> StoredJob:
        """Return a row; its hosts are also those that an engine granted."""
        return cls(job, hosts=[*hosts, *map(asdict, job.granted)], **row)

    def copy(self, number: int) -> JobCopy:
        """Return the copy of the job for its directory and its nodes. `number`: of its row."""
        job, own = self.job, {host.name for host in self.job.granted}
        return JobCopy(
            number=number,
            hosts=[host for host in self.hosts if host["name"] not in own],
            submitted_at_s=job.created_at_s,
            same_as=job.request.same_as,
            **{name: getattr(self, name) for name in ("key", "spec", "trees", "file")},
            **{name: getattr(job, name) for name in OF_JOB},
        )


class RawRow(NamedTuple):
    """Columns of a row of `jobs`; after damage any of them may have any type."""

    number: int
    id: str
    key: str
    name: str
    state: str
    record: str
    spec: str
    hosts: str
    trees: str
    file: str | None
    has_unconfirmed: int
    is_drained: int


Outbox = Callable[["Job | None", Sequence[JobEvent]], Sequence[tuple[str, str, str]]]
"""(job, its new events; None: events of no job) -> notifications as (id, name of the target, body); stored in the
events' transaction."""


def _terminal_states() -> list[str]:
    from ascendrun.core.jobs.job import TERMINAL

    return [state.value for state in TERMINAL]


class JobTable:
    """The jobs of a store."""

    def __init__(self, file: StoreFile) -> None:
        self._file, self._state_dir = file, file.path.parent
        self._kept: dict[str, Job] = {}
        self._saved_ns = 0
        self.outbox: Outbox | None = None

    def live(self) -> tuple[StoredJob, ...]:
        """Return jobs that need a controller, oldest first: not over, hosts unconfirmed, or logs not here."""
        return self._select("WHERE has_unconfirmed OR NOT is_drained ORDER BY number", [])  # drained: over, all is here

    def unconfirmed(self) -> tuple[StoredJob, ...]:
        """Return jobs whose processes may still live on hosts."""
        return self._select("WHERE has_unconfirmed ORDER BY number", [])

    def unended(self) -> tuple[StoredJob, ...]:
        """Return jobs that have not ended, oldest first."""
        from ascendrun.core.jobs.job import TERMINAL, State

        live = [state.value for state in State if state not in TERMINAL]  # by the index: most jobs have ended
        return self._select(f"WHERE state IN ({', '.join('?' * len(live))}) ORDER BY number", live)

    def newest_ended(self, most: int) -> tuple[StoredJob, ...]:
        """Return at most so many jobs that have ended, those submitted last first."""
        ended = _terminal_states()
        where = f"WHERE state IN ({', '.join('?' * len(ended))}) ORDER BY number DESC LIMIT ?"
        return self._select(where, [*ended, most])

    def all(self) -> tuple[StoredJob, ...]:
        return self._select("ORDER BY number", [])

    def _select(self, tail: str, values: list[Any]) -> tuple[StoredJob, ...]:
        rows = self._file.query(f"SELECT record, key, spec, hosts, trees, file FROM jobs {tail}", values)
        if not rows:
            return ()
        from ascendrun.core.jobs.job import load_job

        with self._file.raising_damaged():
            return tuple(
                StoredJob.of(
                    load_job(unseal(record)),
                    key=key,
                    spec=json.loads(spec),
                    hosts=json.loads(hosts),
                    trees=json.loads(trees),
                    file=file,
                )
                for record, key, spec, hosts, trees, file in rows
            )

    def stages(self, pipeline: str) -> tuple[StoredJob, ...]:
        """Return the jobs of a pipeline by its id, oldest first; () if there is no such pipeline."""
        if not re.fullmatch(r"j-[0-9]+", pipeline):
            return ()
        return self._select("WHERE id GLOB ? ORDER BY number", [f"{pipeline}-*"])

    def pipeline_id(self, ref: str) -> str | None:
        """Return the pipeline with the id or name `ref` (the newest of that name); None: there is none, or a newer job
        of that name is not a pipeline."""
        if self.stages(ref):
            return ref
        from ascendrun.core.jobs.job import load_job

        rows = self._file.query(
            "SELECT number, record FROM jobs WHERE substr(name, 1, ?) = ? ORDER BY number DESC",
            (len(ref) + 1, f"{ref}."),
        )
        for number, record in rows:
            with self._file.raising_damaged():
                job = load_job(unseal(record))
            if job.pipeline is not None and job.name == f"{ref}.{job.stage}":
                newer = self._file.query("SELECT 1 FROM jobs WHERE name = ? AND number > ?", (ref, number))
                return None if newer else job.pipeline
        return None

    def find(self, ref: str) -> StoredJob:
        """Return a job by id, by name (the newest live job of that name, else the newest), or by the start of an id.

        Of a pipeline: its representative stage. Raises NotFoundError, ConflictError.
        """
        found = self._select("WHERE id = ?", [ref])
        pipeline = self.pipeline_id(ref) if not found else None
        if pipeline is not None:
            from ascendrun.core.jobs.job import representative_stage

            stages = self.stages(pipeline)
            return stages[representative_stage([one.job for one in stages])]
        found = found or self._select("WHERE name = ? ORDER BY number DESC", [ref])
        if found:
            return next((stored for stored in found if not stored.job.is_terminal), found[0])
        begins = [row[0] for row in self._file.query("SELECT id FROM jobs") if row[0].startswith(ref)]
        if len(begins) > 1:
            raise ConflictError(
                Text("job.ambiguous", "{job} matches several jobs: {found}", job=ref, found=begins[:5]),
                hint=Text("job.longer-id", "give more characters of the id"),
            )
        if not self.names():
            raise NotFoundError(
                Text("job.none", "{job}: job not found ({path} has no jobs)", job=ref, path=str(self._state_dir)),
                hint=Text("job.submit-first", "run `ascendrun submit jobs/quickstart.yaml`"),
            )
        if not begins or not ref:
            raise NotFoundError.of(
                "job.not-found", "job {job:quote} not found", "list all jobs: ascendrun ps -a", job=ref
            )
        return self._select("WHERE id = ?", begins)[0]

    def names(self) -> Mapping[str, str]:
        """Return the name of every job, by id."""
        return dict(self._file.query("SELECT id, name FROM jobs WHERE id IS NOT NULL"))

    def states(self) -> Mapping[str, State]:
        """Return the state of every job, by id."""
        from ascendrun.core.jobs.job import State

        with self._file.raising_damaged():
            return {row[0]: State(row[1]) for row in self._file.query("SELECT id, state FROM jobs")}

    def raw_rows(self) -> Iterator[RawRow]:
        """Yield every row as it is."""
        return map(RawRow._make, self._file.raw_rows("jobs", RawRow._fields))

    def add(self, *, make_job: Callable[[str, str], Job], **row: Any) -> Job:
        """Insert as `insert`, in a transaction; `make_job(id, head_id)`. On return the job is on disk."""
        with self._file.writing() as db:
            return self.insert(db, make_job=lambda number, head_id: make_job(job_id_of(number), head_id), **row)

    def insert(
        self, db: sqlite3.Connection, *, key: str, make_job: Callable[[int, str], Job], now_s: float, **row: Any
    ) -> Job:
        """Store a new job within a transaction of the caller; with a known `key` return its job and store nothing.

        `row`: the other fields of StoredJob. `make_job(number of the row, head_id)` makes the record. A number is not
        used again if the caller rolls back.
        """
        from ascendrun.core.jobs.job import load_job

        known = db.execute("SELECT record FROM jobs WHERE key = ?", (key,)).fetchone()
        if known:
            with self._file.raising_damaged():
                return load_job(unseal(known[0]))
        number = self._file.take_number()
        job = make_job(number, self._file.head_id)
        copy = StoredJob(job, key, **row).copy(number)
        _add_row(db, number, copy, is_drained=False)
        self._file.new_files.append(write_copy(self._state_dir, copy))
        self._file.on_change(self._file.new_files[-1])
        code, more = ("submitted", {}) if job.engine is None else ("submitted-to-engine", {"engine": job.engine})
        submitted = Event(code, {"name": job.name, **more}, job.pool or job.hosts, attempt=job.attempt, at_s=now_s)
        self._write(db, job, [submitted], now_s)
        return job

    def put(
        self, db: sqlite3.Connection, copy: JobCopy, job: Job, events: Sequence[Event], *, is_drained: bool
    ) -> None:
        """Insert or replace the row of a job that is rebuilt, within a transaction of the caller."""
        db.execute("DELETE FROM jobs WHERE id = ? OR key = ?", (job.id, copy.key))
        taken = db.execute("SELECT 1 FROM jobs WHERE number = ?", (copy.number,)).fetchone()
        number = self._file.take_number() if taken else copy.number
        _add_row(db, number, copy, is_drained=is_drained)
        self._file.on_change(job_folder(self._state_dir, job.id) / COPY_FILE)
        self._write(db, job, events, time.time())

    def save(self, job: Job, events: Sequence[Event], *, now_s: float) -> None:
        """Write the record and the new events of the job in one transaction.

        record.json comes first: a state that a command has read, such as the end of a stop, is in it.
        """
        with self._file.writing() as db:
            self._keep_record(job, self._write(db, job, events, now_s))
        failpoint("store.after_commit")

    def _write(self, db: sqlite3.Connection, job: Job, events: Sequence[Event], now_s: float) -> str:
        """Write the record and the events; return the text of the record."""
        from ascendrun.core.jobs.job import dump_job

        self._saved_ns = max(time.time_ns(), self._saved_ns + 1)
        text = seal({"saved_ns": self._saved_ns, **dump_job(job)})
        updated = db.execute(
            "UPDATE jobs SET name = ?, state = ?, record = ?, has_unconfirmed = ?, is_drained = is_drained AND ?"
            " WHERE id = ?",
            (job.name, job.state.value, text, bool(job.held_hosts), job.is_terminal, job.id),
        )
        if updated.rowcount != 1:
            raise sqlite3.DatabaseError(f"no row of {job.id}")
        self._add_events(db, job, events, now_s)
        return text

    def record(self, event: Event) -> None:
        """Write an event that belongs to no job, and its notifications, in one transaction."""
        with self._file.writing() as db:
            self._add_events(db, None, [event], event.at_s)

    def _add_events(self, db: sqlite3.Connection, job: Job | None, events: Sequence[Event], now_s: float) -> None:
        added = add_events(db, "" if job is None else job.id, events)
        for notice_id, target, body in self.outbox(job, added) if self.outbox is not None and added else ():
            db.execute(
                "INSERT OR IGNORE INTO notices (id, target, job, body, made_at_s, state, due_at_s)"
                " VALUES (?, ?, ?, ?, ?, 'waiting', ?)",
                (notice_id, target, None if job is None else job.id, body, now_s, now_s),
            )

    def _keep_record(self, job: Job, text: str) -> None:
        """Write a record that is being stored to record.json as well; without space the older one remains."""
        if self._kept.get(job.id) == job:
            return
        with suppress(OSError):
            write_record(self._state_dir, job.id, text)
            self._kept[job.id] = job
            self._file.on_change(job_folder(self._state_dir, job.id) / RECORD_FILE)

    def remove(self, job_ids: Sequence[str]) -> None:
        """Remove the rows of ended jobs and their events. Their ids are not used again."""
        with self._file.writing() as db:
            for job_id in job_ids:
                db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
                db.execute("DELETE FROM events WHERE job = ?", (job_id,))
        for job_id in job_ids:
            self._kept.pop(job_id, None)
            self._file.on_change(job_folder(self._state_dir, job_id))

    def mark_drained(self, job_id: str) -> None:
        """Record that every byte of the job's nodes is in the spool."""
        with self._file.writing() as db:
            db.execute("UPDATE jobs SET is_drained = 1 WHERE id = ?", (job_id,))
        self._kept.pop(job_id, None)


def _add_row(db: sqlite3.Connection, number: int, copy: JobCopy, *, is_drained: bool) -> None:
    sources = (json.dumps(values) for values in (copy.spec, copy.hosts, copy.trees))
    db.execute(
        "INSERT INTO jobs (name, state, record, number, id, key, spec, hosts, trees, file, created_at_s, is_drained)"
        " VALUES ('', '', '', ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (number, copy.id, copy.key, *sources, copy.file, copy.submitted_at_s, is_drained),
    )


def job_id_of(number: int) -> str:
    """Return the job id of a row number, such as j-0003."""
    return f"j-{number:04d}"


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
        record = event.to_json()
        columns = (json.dumps(record[name], ensure_ascii=False, default=str) for name in ("values", "hosts", "ranks"))
        cursor = db.execute(
            f"INSERT INTO events (job, {_EVENT}) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (job_id, event.code, *columns, event.attempt, event.at_s),
        )
        added.append(JobEvent(int(cursor.lastrowid or 0), job_id, event))
    return tuple(added)


def _load_event(row: Sequence[Any]) -> Event:
    code, values, hosts, ranks, attempt, at_s = row
    lists = {"values": json.loads(values), "hosts": json.loads(hosts), "ranks": json.loads(ranks)}
    return Event.from_json({"code": code, **lists, "attempt": attempt, "at_s": at_s})
