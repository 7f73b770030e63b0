"""The file of the jobs: opened under the controller's lease, checked for damage, replaced when it is damaged."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Callable, NoReturn, TypeVar

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.core.errors import ConflictError
from ascendrun.head.state.database import Database, immediate, unwritable, version_of
from ascendrun.head.state.job_files import folders_of_jobs, head_id_of, jobs_without_row, remove_copy
from ascendrun.head.state.state_dir import StoreDamagedError, StoreUnusableError, make_private_file, set_aside
from ascendrun.head.state.store_place import note_head, other_owner
from ascendrun.node.files import read_json, write_json
from ascendrun.text import Text

_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError)
"""Errors of a value that was damaged on disk."""
COMMIT_S = 3.0
"""Seconds in which a job that is being submitted gets its row: its directory is there before."""
HEAD_FILE = "head.json"
BLOCK = 100
"""Numbers that are reserved with one write."""
MOST_VALUES = 900
"""Values of one statement: SQLite had a limit of 999."""
_HEAD_ID = re.compile(r"[0-9a-f]{8}")
F = TypeVar("F", bound="StoreFile")
_SCHEMA = """
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
        number INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, code TEXT NOT NULL, "values" TEXT NOT NULL,
        hosts TEXT NOT NULL, ranks TEXT NOT NULL, attempt INTEGER, at_s REAL NOT NULL);
    CREATE INDEX events_by_job ON events (job, number);
    CREATE TABLE notices (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, target TEXT NOT NULL, job TEXT, body TEXT NOT NULL,
        made_at_s REAL NOT NULL, state TEXT NOT NULL, due_at_s REAL NOT NULL, tries INTEGER NOT NULL DEFAULT 0,
        cuts INTEGER NOT NULL DEFAULT 0, tried_at_s REAL, answer TEXT, UNIQUE (id, target));
    CREATE INDEX notices_by_due ON notices (target, state, due_at_s);
    CREATE TABLE machines (key TEXT PRIMARY KEY, record TEXT NOT NULL)
"""


class LostLeaseError(ConflictError, code="lease-lost"):
    """The state directory is not this controller's any more: it was moved away, or another controller took it over."""


@dataclass(frozen=True)
class HeadFile:
    """head.json: the id of this head and the numbers of its jobs, apart from state.db, so that no id is given twice.

    `head_id`: eight hex digits. `next_number`: every number below it may have been given to a job. `session`: the
    lease of the last controller; a state.db with another lease is not the one that it wrote. `schema`: the version of
    state.db. `closed`: the stamp of state.db when that controller ended; None: it did not end in order. `term`: by
    which it acts on nodes, 0: it never had a standby; `instance`: random id of this machine's claim of it
    (node/agent/terms.py); `voters`: that grant it. `superseded`: the machine that continues with a higher
    term, "": unknown, None: none does."""

    head_id: str
    next_number: int
    session: str = ""
    schema: int = 0
    closed: list[int] | None = None
    term: int = 0
    instance: str = ""
    voters: tuple[str, ...] = ()
    superseded: str | None = None

    @classmethod
    def load(cls, state_dir: Path) -> HeadFile | None:
        """Return the file's content; None: missing or damaged."""
        try:
            found = load_dataclass(cls, read_json(str(state_dir / HEAD_FILE)) or {})
        except (TypeError, OSError):
            return None
        is_valid = isinstance(found.head_id, str) and _HEAD_ID.fullmatch(found.head_id)
        return found if is_valid and type(found.next_number) is int and found.next_number > 0 else None

    def write(self, state_dir: Path) -> None:
        """Replace the file; on return it is on disk. Raises OSError."""
        write_json(str(state_dir / HEAD_FILE), asdict(self))
        note_head(state_dir, {name: getattr(self, name) for name in ("head_id", "next_number", "term", "instance")})


class StoreFile(Database):
    """The file of a state directory that one controller writes.

    The caller of `open` holds the controller's file lock, so an existing lease belongs to a dead process: it is taken
    over. The caller restores rows then (head/loop/rescue.py).
    """

    FILE_NAME = "state.db"
    MIGRATIONS = (_SCHEMA,)
    BUSY_S = 10.0
    SYNCHRONOUS = "FULL"
    HAS_BACKUP = True

    def __init__(self, connection: sqlite3.Connection, path: Path, token: str | None = None) -> None:
        super().__init__(connection, path)
        self._token = token
        self._head: HeadFile | None = None  # of the controller that has the lease
        self._next_number = 0
        self._inode = _inode_of(path)
        self._folder: int | None = None  # open, so that no other directory gets its inode
        self._opened_stamp = stamp_of(path)
        self.is_suspect = False
        self.new_files: list[Path] = []
        self.on_change: Callable[[Path], None] = lambda path: None
        """Called with each file, and removed directory, from which rows are rebuilt."""

    @classmethod
    def open_for_reading(cls: type[F], state_dir: Path, *, busy_s: float | None = None) -> F:
        """Open as any database. Raises StoreDamagedError also if a job has a directory but no row."""
        until_mono = time.monotonic() + COMMIT_S
        while True:
            store = super().open_for_reading(state_dir, busy_s=busy_s)
            try:
                if not jobs_without_row(state_dir, store.ids(among=folders_of_jobs(state_dir))):
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
        if head is not None and found > known >= head.schema:
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
        in_folders = (int(name.split("-")[1]) for name in folders_of_jobs(state_dir))
        number = max(rows[0] or 0, 0, *in_folders) + 1
        if head is not None and (lease is None or lease[0] != head.session):
            number = max(number, head.next_number)
        reserved = max(number, head.next_number if head else 0)
        self._head = replace(
            head or HeadFile(head_id, reserved),
            next_number=reserved,
            session=self._token,
            schema=version_of(self._db),
            closed=None,
        )
        self._next_number = number
        self._head.write(state_dir)

    def _claim(self, db: sqlite3.Connection, head_id: str) -> None:
        """Write the lease of this controller, within a transaction of the caller."""
        db.execute("INSERT OR REPLACE INTO lease VALUES (1, ?, ?, ?)", (self._token, os.getpid(), time.time()))
        db.execute("INSERT OR REPLACE INTO meta VALUES ('head_id', ?)", (head_id,))

    def close(self) -> None:
        """Close the file; of a controller: record that it was closed in order."""
        head = self._head if self._head is not None and self._has_lease() else None
        self._db.close()
        if head is not None:
            with suppress(OSError):
                replace(head, closed=stamp_of(self.path)).write(self.path.parent)
        self._head = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def update_head(
        self,
        *,
        term: int | None = None,
        instance: str | None = None,
        voters: Sequence[str] | None = None,
        superseded: str | None = None,
    ) -> HeadFile:
        """Return head.json of the controller that has the lease, with new values of those given. Raises
        StoreUnusableError."""
        assert self._head is not None, "opened for reading"
        given = {"term": term, "instance": instance, "voters": voters, "superseded": superseded}
        changed = load_dataclass(HeadFile, {**asdict(self._head), **{k: v for k, v in given.items() if v is not None}})
        if changed != self._head:
            with self.raising_unusable(self.path):
                changed.write(self.path.parent)
            self._head = changed
        return changed

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
        found, owner = _inode_of(self.path), other_owner(self.path.parent)
        if owner is not None:
            raise LostLeaseError(Text("store.elsewhere", "the jobs of this user are on {host}", host=owner))
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
        assert self._head is not None, "opened for reading"
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
                self._claim(self._db, self._head.head_id)

    def _copied(self) -> Path:
        """Return a new file with all that the open one holds. Raises StoreDamagedError."""
        target = self.path.with_name(f"{self.path.name}.new")
        target.unlink(missing_ok=True)
        make_private_file(target)
        with closing(sqlite3.connect(target)) as copy:
            with self.raising_unusable(self.path):
                self._db.backup(copy)
            type(self)(copy, target)._check_structure()
        return target

    def needs_restore(self) -> bool:
        """Return whether rows must be compared with the directories of their jobs before the store is used."""
        ids = self.ids()
        has_live = self.query("SELECT 1 FROM jobs WHERE has_unconfirmed OR NOT is_drained LIMIT 1")
        has_machines = bool(self.query("SELECT 1 FROM machines LIMIT 1"))
        is_doubtful = (bool(ids) and bool(has_live)) or (self.is_suspect and (bool(ids) or has_machines))
        return self.was_damaged or is_doubtful or bool(jobs_without_row(self.path.parent, ids))

    def raw_rows(self, table: str, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        """Return every row of a table as it is: text that is not UTF-8 any more as well."""
        self._db.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
        try:
            return self.query(f"SELECT {', '.join(columns)} FROM {table} ORDER BY 1")
        finally:
            self._db.text_factory = str

    def remove_unreadable(self, table: str, columns: Sequence[str], load: Callable[[Sequence[Any]], object]) -> None:
        """Remove the rows that `load` cannot read, within a transaction of the caller; the first column is the key."""
        bad: list[tuple[object]] = []
        for row in self.raw_rows(table, columns):
            try:
                load(row[1:])
            except _UNREADABLE:
                bad.append((row[0],))
        self._db.executemany(f"DELETE FROM {table} WHERE {columns[0]} = ?", bad)

    # Access

    @property
    def head_id(self) -> str:
        """Return eight hex digits of this state directory: two heads never use one run name on a node."""
        if self._head is not None:
            return self._head.head_id
        return str(self.query("SELECT value FROM meta WHERE key = 'head_id'")[0][0])

    def reopened(self: F) -> F:
        """Return the same store with its own connection, for another thread; it writes by the same lease."""
        with self.raising_unusable(self.path):
            return type(self)(self._connect(self.path, self.BUSY_S), self.path, self._token)

    def _follow_file(self) -> None:
        """Open the file that a check has put in the place of this one; its owner raises StoreDamagedError instead."""
        if self.is_in_place():
            return
        if self._head is not None:
            self._raise_missing(self.path)
        if not self.path.exists():
            raise unwritable(self.path, FileNotFoundError(2, os.strerror(2)))
        self._db.close()
        self._db, self._inode = self._connect(self.path, self.BUSY_S), _inode_of(self.path)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Hold one transaction; refused if another controller has the lease. `new_files` go away if it fails.

        Raises StoreUnusableError if nothing can be written now: the disk is full, or another program locks the file.
        """
        self.new_files = []
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
            for path in self.new_files:
                with suppress(OSError):
                    remove_copy(path)
            if not isinstance(error, (sqlite3.Error, OSError)):
                raise
            with self.raising_unusable(self.path):
                raise

    def query(self, sql: str, values: Sequence[object] | Mapping[str, object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query. Raises StoreUnusableError if another program locks the file too long."""
        if self._token is not None and self._head is None:  # of another thread of the controller
            with self.raising_unusable(self.path):
                self._follow_file()
        return super().query(sql, values)

    def take_number(self) -> int:
        """Return a number for the row of a new job, which a reservation on disk covers; it is not used again."""
        assert self._head is not None, "opened for reading"
        if self._next_number >= self._head.next_number:
            reserved = replace(self._head, next_number=self._next_number + BLOCK)
            with self.raising_unusable(self.path):
                reserved.write(self.path.parent)
            self._head = reserved
            self.on_change(self.path.parent / HEAD_FILE)
        self._next_number += 1
        return self._next_number - 1

    def ids(self, *, among: Sequence[str] | None = None) -> frozenset[str]:
        """Return the ids of jobs: of those `among` that have a row, None: of all."""
        if among is None:
            return frozenset(row[0] for row in self.query("SELECT id FROM jobs"))
        parts = [among[start : start + MOST_VALUES] for start in range(0, len(among), MOST_VALUES)]
        found = (self.query(f"SELECT id FROM jobs WHERE id IN ({', '.join('?' * len(part))})", part) for part in parts)
        return frozenset(row[0] for rows in found for row in rows)


def continues_elsewhere(host: str) -> Text:
    if not host:
        return Text("store.superseded-unknown", "another machine continues as this head")
    return Text("store.superseded", "{host} continues as this head", host=host)


def give_up(store: StoreFile, host: str) -> NoReturn:
    """Write down that `host` ("": unknown) continues as this head, and then nothing more, by no thread. Raises
    LostLeaseError."""
    with suppress(StoreUnusableError):  # the nodes refuse this machine anyway
        store.update_head(superseded=host)
        with store.writing() as db:
            db.execute("DELETE FROM lease")
    raise LostLeaseError(continues_elsewhere(host))


def superseded_by(state_dir: Path) -> str | None:
    """Return the machine that continues as this head, "": unknown; None: none does."""
    head = HeadFile.load(state_dir)
    return None if head is None else head.superseded


def _inode_of(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def stamp_of(path: Path) -> list[int]:
    """Return what changes whenever a database file or its log is written or replaced; [] for a missing file."""
    stamp: list[int] = []
    for name in (path.name, f"{path.name}-wal"):
        try:
            found = os.stat(path.with_name(name))
        except OSError:
            continue
        stamp += [found.st_ino, found.st_size, found.st_mtime_ns] if found.st_size else []
    return stamp
