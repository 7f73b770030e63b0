"""Jobs, their events and notifications, and the controller's lease, in SQLite."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import ConflictError, NotFoundError
from ascendrun.core.events import Event, JobEvent
from ascendrun.core.jobs.job_copy import JobCopy, seal, unseal
from ascendrun.head.state.database import Database, Migration, immediate, unwritable, version_of
from ascendrun.head.state.head_file import HeadFile, JobNumbers, folder_numbers, stamp_of
from ascendrun.head.state.job_files import head_id_of, jobs_without_row, remove_copy, write_copy, write_record
from ascendrun.head.state.state_dir import StoreDamagedError, make_private_file, set_aside
from ascendrun.node.failpoint import failpoint
from ascendrun.text import Text, from_json, to_json

if TYPE_CHECKING:
    from ascendrun.core.jobs.job import Job, State
    from ascendrun.core.machines import Machine, MachineRecord

_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError)
"""Errors of a value that was damaged on disk."""
COMMIT_S = 3.0
"""Seconds in which a job that is being submitted gets its row: its directory is there before."""
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
    for statement in _TYPED_EVENTS:
        db.execute(statement)


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
    "CREATE TABLE machines (key TEXT PRIMARY KEY, record TEXT NOT NULL)",
)


class LostLeaseError(ConflictError):
    """The state directory is not this controller's any more: it was moved away, or another controller took it over."""

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

    def copy(self, number: int) -> JobCopy:
        """Return the copy of the job for its directory and its nodes. `number`: of its row."""
        job = self.job
        return JobCopy(
            id=job.id,
            number=number,
            name=job.name,
            run=job.run,
            key=self.key,
            spec=self.spec,
            hosts=self.hosts,
            trees=self.trees,
            file=self.file,
            submitted_at_s=job.created_at_s,
            pipeline=job.pipeline,
            stage=job.stage,
            needs=job.needs,
            home=job.home,
            priority=job.priority,
            same_as=job.request.same_as,
            user=job.user,
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


Outbox = Callable[["Job", Sequence[JobEvent]], Sequence[tuple[str, str, str]]]
"""(job, its new events) -> notifications as (id, name of the target, body); stored in the events' transaction."""


class Store(Database):
    """The jobs of a state directory."""

    FILE_NAME = "state.db"
    MIGRATIONS = _MIGRATIONS
    BUSY_S = 10.0
    SYNCHRONOUS = "FULL"
    HAS_BACKUP = True

    def __init__(self, connection: sqlite3.Connection, path: Path, token: str | None = None) -> None:
        super().__init__(connection, path)
        self._token = token
        self._numbers: JobNumbers | None = None
        self._inode = _inode_of(path)
        self._folder: int | None = None  # open, so that no other directory gets its inode
        self._opened_stamp = stamp_of(path)
        self.is_suspect = False
        self._new_copies: list[Path] = []
        self._kept: dict[str, Job] = {}
        self._saved_ns = 0
        self.outbox: Outbox | None = None

    @classmethod
    def open(cls, state_dir: Path) -> Store:
        """Open as any database; take the lease from its owner. The caller restores rows (head/loop/rescue.py).

        The caller holds the controller's file lock, so an existing lease belongs to a dead process.
        """
        return super().open(state_dir)

    @classmethod
    def open_for_reading(cls, state_dir: Path, *, busy_s: float | None = None) -> Store:
        """Open as any database. Raises StoreDamagedError also if a job has a directory but no row."""
        until_mono = time.monotonic() + COMMIT_S
        while True:
            store = super().open_for_reading(state_dir, busy_s=busy_s)
            try:
                if not jobs_without_row(state_dir, store.ids()):
                    return store
            except BaseException:
                store.close()
                raise
            store.close()
            if time.monotonic() > until_mono:
                cls._raise_missing(store.path)
            time.sleep(0.05)

    @classmethod
    def _expect_file(cls, path: Path) -> None:
        if (not path.exists() or path.stat().st_size == 0) and HeadFile.load(path.parent) is not None:
            cls._raise_missing(path)

    @classmethod
    def _raise_missing(cls, path: Path) -> None:
        with cls.raising_unusable(path):
            raise sqlite3.DatabaseError("jobs are missing")

    def _refuse_newer(self) -> None:
        """Refuse a newer file as any database; a version that no controller has written is damage."""
        head = HeadFile.load(self.path.parent)
        found, known = version_of(self._db), len(self.MIGRATIONS)
        if head is not None and found > known >= head.schema > 0:
            raise sqlite3.DatabaseError(f"schema {found} instead of {head.schema}")
        super()._refuse_newer()

    def _prepare(self) -> None:
        head = HeadFile.load(self.path.parent)
        if head is None or head.closed != self._opened_stamp:
            self.is_suspect = True
            self._check_structure()
        self._take_over()

    def _take_over(self) -> None:
        """Take the lease and prepare numbers for new jobs. After the loss of rows they start at an unused block."""
        state_dir = self.path.parent
        self._folder = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        head = HeadFile.load(state_dir)
        self._token = os.urandom(16).hex()
        with immediate(self._db):
            lease = self._db.execute("SELECT token FROM lease").fetchone()
            meta = self._db.execute("SELECT value FROM meta WHERE key = 'head_id'").fetchone()
            head_id = head.head_id if head else str(meta[0]) if meta else head_id_of(state_dir) or os.urandom(4).hex()
            self._claim(self._db, head_id)
            rows = self._db.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
        number = max(rows[0] or 0, 0, *folder_numbers(state_dir)) + 1
        if head is not None and (lease is None or lease[0] != head.session):
            number = max(number, head.next_number)
        reserved = max(number, head.next_number if head else 0)
        head = HeadFile(head_id, reserved, self._token, version_of(self._db))
        head.write(state_dir)
        self._numbers = JobNumbers(state_dir, head, next_number=number)

    def _claim(self, db: sqlite3.Connection, head_id: str) -> None:
        """Write the lease of this controller, within a transaction of the caller."""
        db.execute("INSERT OR REPLACE INTO lease VALUES (1, ?, ?, ?)", (self._token, os.getpid(), time.time()))
        db.execute("INSERT OR REPLACE INTO meta VALUES ('head_id', ?)", (head_id,))

    def close(self) -> None:
        """Close the file; of a controller: record that it was closed in order."""
        has_lease = self._numbers is not None and self._has_lease()
        self._db.close()
        if has_lease:
            assert self._numbers is not None
            with suppress(OSError):
                self._numbers.close(stamp_of(self.path))
        self._numbers = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def _has_lease(self) -> bool:
        try:
            row = self._db.execute("SELECT token FROM lease WHERE id = 1").fetchone()
            return row is not None and row[0] == self._token and self.is_in_place()
        except (sqlite3.Error, LostLeaseError):
            return False

    # Damage

    def is_in_place(self) -> bool:
        """Return whether the open file is still the one at its path.

        Raises LostLeaseError: a controller's state directory was removed, moved, or replaced by another.
        """
        found = _inode_of(self.path)
        if found != self._inode and self._folder is not None:
            here = os.fstat(self._folder)
            if _inode_of(self.path.parent) != (here.st_dev, here.st_ino):
                what = Text(
                    "store.directory-replaced",
                    "{path} was removed, moved or replaced; this controller does not use it any more",
                    path=str(self.path.parent),
                )
                raise LostLeaseError(what)
        return found == self._inode

    @contextmanager
    def raising_damaged(self) -> Iterator[None]:
        """Raise StoreDamagedError for a row that cannot be read."""
        try:
            yield
        except _UNREADABLE as error:
            with self.raising_unusable(self.path):
                raise sqlite3.DatabaseError(str(error)) from error

    def replace_if_damaged(self) -> None:
        """Check the file of a running controller; replace it if it is damaged or not in its place any more.

        Afterwards `is_suspect` is set: the caller restores rows. What this connection can still read is copied.
        """
        assert self._numbers is not None, "opened for reading"
        self.is_suspect = True
        with self.raising_unusable(self.path):
            if self.is_in_place() and self._is_sound(self.path):
                self._db.close()
                self._db = self._connect(self.path, self.BUSY_S)  # without the pages that it has in memory
                return
            try:
                copy = self._copied()
            except StoreDamagedError:
                copy = None
            self._db.close()
            self.set_aside_at, self.was_damaged = set_aside(self.path), True
            if copy is not None:
                os.rename(copy, self.path)
            make_private_file(self.path)
            self._db, self._inode = self._connect(self.path, self.BUSY_S), _inode_of(self.path)
            self._migrate()
            with immediate(self._db):
                self._claim(self._db, self._numbers.head_id)

    def _copied(self) -> Path:
        """Return a new file with all that the open one holds. Raises StoreDamagedError."""
        target = self.path.with_name(f"{self.path.name}.new")
        target.unlink(missing_ok=True)
        make_private_file(target)
        with closing(sqlite3.connect(target)) as copy:
            with self.raising_unusable(self.path):
                self._db.backup(copy)
            Store(copy, target)._check_structure()
        return target

    def needs_restore(self) -> bool:
        """Return whether rows must be compared with the directories of their jobs before the store is used."""
        ids = self.ids()
        has_live = self._query("SELECT 1 FROM jobs WHERE has_unconfirmed OR NOT is_drained LIMIT 1")
        is_doubtful = bool(ids) and (self.is_suspect or bool(has_live))
        return self.was_damaged or is_doubtful or bool(jobs_without_row(self.path.parent, ids))

    def raw_rows(self) -> Iterator[RawRow]:
        """Yield every row of `jobs` as it is."""
        columns = ", ".join(RawRow._fields)
        with self._damaged_text():
            return map(RawRow._make, self._query(f"SELECT {columns} FROM jobs ORDER BY number"))

    @contextmanager
    def _damaged_text(self) -> Iterator[None]:
        """Read text that is not UTF-8 any more as well."""
        self._db.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
        try:
            yield
        finally:
            self._db.text_factory = str

    def remove_unreadable(self, db: sqlite3.Connection) -> None:
        """Remove events and machines that cannot be read, within a transaction of the caller."""
        from ascendrun.core.machines import load_machine

        bad: list[tuple[object]] = []
        with self._damaged_text():
            rows = db.execute(f"SELECT number, {_EVENT}, job FROM events").fetchall()
        for number, *row, job in rows:
            try:
                str(load_event(row).message()).encode(), job.encode()
            except _UNREADABLE:
                bad.append((number,))
        db.executemany("DELETE FROM events WHERE number = ?", bad)
        bad = []
        with self._damaged_text():
            rows = db.execute("SELECT key, record FROM machines").fetchall()
        for key, record in rows:
            try:
                load_machine(json.loads(record))
            except _UNREADABLE:
                bad.append((key,))
        db.executemany("DELETE FROM machines WHERE key = ?", bad)

    @property
    def head_id(self) -> str:
        """Return eight hex digits of this state directory: two heads never use one run name on a node."""
        if self._numbers is not None:
            return self._numbers.head_id
        return str(self._query("SELECT value FROM meta WHERE key = 'head_id'")[0][0])

    def reopened(self) -> Store:
        """Return the same store with its own connection, for another thread; it writes by the same lease."""
        with self.raising_unusable(self.path):
            return Store(self._connect(self.path, self.BUSY_S), self.path, self._token)

    def _follow_file(self) -> None:
        """Open the file that a check has put in the place of this one; its owner raises StoreDamagedError instead."""
        if self.is_in_place():
            return
        if self._numbers is not None:
            self._raise_missing(self.path)
        if not self.path.exists():
            raise unwritable(self.path, FileNotFoundError(2, os.strerror(2)))
        self._db.close()
        self._db, self._inode = self._connect(self.path, self.BUSY_S), _inode_of(self.path)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Hold one transaction; refused if another controller has the lease.

        Raises StoreUnusableError if nothing can be written now: the disk is full, or another program locks the file.
        """
        self._new_copies = []
        try:
            self._follow_file()
            with immediate(self._db):
                row = self._db.execute("SELECT token, pid FROM lease WHERE id = 1").fetchone()
                if row is None or row[0] != self._token:
                    pid = row[1] if row else None
                    raise LostLeaseError(
                        Text("store.lease-lost", "controller {pid} took over this state directory", pid=pid)
                    )
                yield self._db
        except BaseException as error:
            for path in self._new_copies:
                with suppress(OSError):
                    remove_copy(path)
            if not isinstance(error, (sqlite3.Error, OSError)):
                raise
            with self.raising_unusable(self.path):
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for queries. Raises StoreUnusableError if another program locks the file too long."""
        with self.raising_unusable(self.path):
            self._follow_file()
            yield self._db

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

        `make_job(number of the row, head_id)` makes the record. A number is not used again if the caller rolls back.
        """
        from ascendrun.core.jobs.job import load_job

        known = db.execute("SELECT record FROM jobs WHERE key = ?", (key,)).fetchone()
        if known:
            with self.raising_damaged():
                return load_job(unseal(known[0]))
        number = self._take_number()
        job = make_job(number, self.head_id)
        db.execute(
            "INSERT INTO jobs (number, id, key, name, state, record, spec, hosts, trees, file, created_at_s)"
            " VALUES (?, ?, ?, '', '', '', ?, ?, ?, ?, ?)",
            (number, job.id, key, json.dumps(spec), json.dumps(hosts), json.dumps(trees), file, now_s),
        )
        stored = StoredJob(job, key, spec, hosts, trees, file)
        self._new_copies.append(write_copy(self.path.parent, stored.copy(number)))
        submitted = Event("submitted", {"name": job.name}, job.pool or job.hosts, attempt=job.attempt, at_s=now_s)
        self._write(db, job, [submitted], now_s)
        return job

    def _take_number(self) -> int:
        assert self._numbers is not None, "opened for reading"
        with self.raising_unusable(self.path):
            return self._numbers.take()

    def put(
        self, db: sqlite3.Connection, copy: JobCopy, job: Job, events: Sequence[Event], *, is_drained: bool
    ) -> None:
        """Insert or replace the row of a job that is rebuilt, within a transaction of the caller."""
        db.execute("DELETE FROM jobs WHERE id = ? OR key = ?", (job.id, copy.key))
        taken = db.execute("SELECT 1 FROM jobs WHERE number = ?", (copy.number,)).fetchone()
        number = self._take_number() if taken else copy.number
        db.execute(
            "INSERT INTO jobs (name, state, record, number, id, key, spec, hosts, trees, file, created_at_s,"
            " is_drained)"
            " VALUES ('', '', '', ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number,
                job.id,
                copy.key,
                *(json.dumps(values) for values in (copy.spec, copy.hosts, copy.trees)),
                copy.file,
                copy.submitted_at_s,
                is_drained,
            ),
        )
        self._write(db, job, events, time.time())

    def save(self, job: Job, events: Sequence[Event], *, now_s: float) -> None:
        """Write the record and the new events of the job in one transaction.

        record.json comes first: a state that a command has read, such as the end of a stop, is in it.
        """
        with self.writing() as db:
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
        added = add_events(db, job.id, events)
        for notice_id, target, body in self.outbox(job, added) if self.outbox is not None and added else ():
            db.execute(
                "INSERT OR IGNORE INTO notices (id, target, job, body, made_at_s, state, due_at_s)"
                " VALUES (?, ?, ?, ?, ?, 'waiting', ?)",
                (notice_id, target, job.id, body, now_s, now_s),
            )
        return text

    def _keep_record(self, job: Job, text: str) -> None:
        """Write a record that is being stored to record.json as well; without space the older one remains."""
        if self._kept.get(job.id) == job:
            return
        with suppress(OSError):
            write_record(self.path.parent, job.id, text)
            self._kept[job.id] = job

    def remove(self, job_ids: Sequence[str]) -> None:
        """Remove the rows of ended jobs and their events. Their ids are not used again."""
        with self.writing() as db:
            for job_id in job_ids:
                db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
                db.execute("DELETE FROM events WHERE job = ?", (job_id,))
        for job_id in job_ids:
            self._kept.pop(job_id, None)

    def mark_drained(self, job_id: str) -> None:
        """Record that every byte of the job's nodes is in the spool."""
        with self.writing() as db:
            db.execute("UPDATE jobs SET is_drained = 1 WHERE id = ?", (job_id,))
        self._kept.pop(job_id, None)

    def machines(self) -> tuple[MachineRecord, ...]:
        """Return the machines that jobs have used."""
        rows = self._query("SELECT record FROM machines ORDER BY key")
        if not rows:
            return ()
        from ascendrun.core.machines import load_machine

        with self.raising_damaged():
            return tuple(load_machine(json.loads(row[0])) for row in rows)

    def save_machines(self, records: Sequence[MachineRecord], events: Sequence[Event] = ()) -> None:
        """Write machines, and events that belong to no job, in one transaction."""
        with self.writing() as db:
            rows = [(one.key, json.dumps(to_json(one))) for one in records]
            db.executemany("INSERT OR REPLACE INTO machines VALUES (?, ?)", rows)
            add_events(db, "", events)

    def held_machines(self) -> tuple[Machine, ...]:
        """Return the machines that no job may use now."""
        jobs = self._jobs("WHERE has_unconfirmed ORDER BY number", [])
        with self.raising_damaged():  # without the classes of the records: most commands show that nothing is held
            has_found = any(json.loads(row[0]).get("found") for row in self._query("SELECT record FROM machines"))
        if not jobs and not has_found:
            return ()
        records = self.machines()
        from ascendrun.core.hosts import load_hosts
        from ascendrun.core.machines import held_machines

        return held_machines([(stored.job, load_hosts(stored.hosts)) for stored in jobs], records)

    def live_jobs(self) -> tuple[StoredJob, ...]:
        """Return jobs that need a controller, oldest first: not over, hosts unconfirmed, or logs not here."""
        return self._jobs("WHERE has_unconfirmed OR NOT is_drained ORDER BY number", [])  # drained: over, all is here

    def all_jobs(self) -> tuple[StoredJob, ...]:
        return self._jobs("ORDER BY number", [])

    def _jobs(self, tail: str, values: list[Any]) -> tuple[StoredJob, ...]:
        rows = self._query(f"SELECT record, key, spec, hosts, trees, file FROM jobs {tail}", values)
        if not rows:
            return ()
        from ascendrun.core.jobs.job import load_job

        with self.raising_damaged():
            return tuple(
                StoredJob(load_job(unseal(record)), key, json.loads(spec), json.loads(hosts), json.loads(trees), file)
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

        rows = self._query(
            "SELECT number, record FROM jobs WHERE substr(name, 1, ?) = ? ORDER BY number DESC",
            (len(ref) + 1, f"{ref}."),
        )
        for number, record in rows:
            with self.raising_damaged():
                job = load_job(unseal(record))
            if job.pipeline is not None and job.name == f"{ref}.{job.stage}":
                newer = self._query("SELECT 1 FROM jobs WHERE name = ? AND number > ?", (ref, number))
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
        begins = [row[0] for row in self._query("SELECT id FROM jobs") if row[0].startswith(ref)]
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
        rows = self._query(f"SELECT {_EVENT} FROM events WHERE job = ? ORDER BY number", (job_id,))
        with self.raising_damaged():
            return tuple(load_event(row) for row in rows)

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
        rows = self._query(
            f"SELECT number, job, {_EVENT} FROM events WHERE {' AND '.join(where)} ORDER BY number LIMIT ?",
            [*values, limit],
        )
        with self.raising_damaged():
            return tuple(JobEvent(number, job_id, load_event(row)) for number, job_id, *row in rows)

    def notices(self, *, limit: int = 200) -> tuple[Mapping[str, Any], ...]:
        """Return the newest notifications with id, target, job, state, tries, due_at_s, tried_at_s, answer."""
        names = ("id", "target", "job", "state", "tries", "due_at_s", "tried_at_s", "answer")
        rows = self._query(f"SELECT {', '.join(names)} FROM notices ORDER BY number DESC LIMIT ?", (limit,))
        return tuple({**dict(zip(names, row)), "answer": _load_reply(row[-1])} for row in rows)

    def has_waiting_notices(self) -> bool:
        return bool(self._query("SELECT 1 FROM notices WHERE state IN ('waiting', 'sending') LIMIT 1"))

    def newest_event(self) -> int:
        """Return the number of the newest event; 0: there is none."""
        return int(self._query("SELECT max(number) FROM events")[0][0] or 0)

    def event_codes(self) -> tuple[str, ...]:
        return tuple(row[0] for row in self._query("SELECT DISTINCT code FROM events ORDER BY code"))

    def job_names(self) -> Mapping[str, str]:
        """Return the name of every job, by id."""
        return dict(self._query("SELECT id, name FROM jobs WHERE id IS NOT NULL"))

    def states(self) -> Mapping[str, State]:
        """Return the state of every job, by id."""
        from ascendrun.core.jobs.job import State

        with self.raising_damaged():
            return {row[0]: State(row[1]) for row in self._query("SELECT id, state FROM jobs")}

    def ids(self) -> frozenset[str]:
        return frozenset(row[0] for row in self._query("SELECT id FROM jobs"))


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


def load_event(row: Sequence[Any]) -> Event:
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


def _inode_of(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
