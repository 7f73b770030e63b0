"""An SQLite file of the state directory: opened, migrated to the newest version, rejected if it is newer."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ascendrun.head.state import state_dir as paths
from ascendrun.text import Text

D = TypeVar("D", bound="Database")


class Database:
    """Base of the SQLite files. Open for writing in the controller only.

    `MIGRATIONS`: SQL of one version each; the first makes the tables of a new file. `HAS_BACKUP`: the file is copied
    before it is migrated. `is_copy`: in memory, since there is no file yet, or no controller of this release has
    migrated it. `SYNCHRONOUS`: FULL keeps each transaction through a power failure. `was_damaged`: a damaged file was
    moved to `set_aside_at` (None: it was missing), and this one is new.
    """

    FILE_NAME: ClassVar[str]
    MIGRATIONS: ClassVar[Sequence[str]]
    BUSY_S: ClassVar[float]
    SYNCHRONOUS: ClassVar[str]
    HAS_BACKUP: ClassVar[bool] = False

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self.path = path
        self.is_copy = False
        self.was_damaged = False
        self.set_aside_at: Path | None = None

    def __enter__(self: D) -> D:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    @classmethod
    def open(cls: type[D], state_dir: Path) -> D:
        """Create or migrate the file, open it for writing; a damaged file is set aside. Raises StoreUnusableError."""
        paths.make_state_dir(state_dir)
        path = state_dir / cls.FILE_NAME
        try:
            return cls._open(path)
        except paths.StoreDamagedError as error:
            if str(error.__cause__).startswith(_READ_OR_WRITE) and cls._is_sound(path):
                raise
            with cls.raising_unusable(path):
                set_aside_at = paths.set_aside(path)
        store = cls._open(path, is_new=True)
        store.was_damaged, store.set_aside_at = True, set_aside_at
        return store

    @classmethod
    def _open(cls: type[D], path: Path, *, is_new: bool = False) -> D:
        with cls.raising_unusable(path):
            if not is_new:
                cls._expect_file(path)
            paths.make_private_file(path)
            store = cls(cls._connect(path, cls.BUSY_S), path)
            try:
                store._migrate()
                store._prepare()
            except BaseException:
                store._db.close()
                raise
        return store

    @classmethod
    def _is_sound(cls, path: Path) -> bool:
        """Check the file as another process sees it: a connection may have sound pages in its memory."""
        try:
            with cls.raising_unusable(path), closing(cls._connect(path, cls.BUSY_S)) as other:
                cls(other, path)._check_structure()
        except paths.StoreDamagedError:
            return False
        return True

    @classmethod
    def _expect_file(cls, path: Path) -> None:
        """Raise StoreDamagedError if the file is missing although it was written before."""

    def _prepare(self) -> None:
        """Check and change the file before it is written. Raises StoreDamagedError, then it is set aside."""

    def _check_structure(self) -> None:
        """Raise StoreDamagedError if pages, indexes, tables or the version are damaged. Reads the entire file."""
        with self.raising_unusable(self.path):
            problems = self._db.execute("PRAGMA integrity_check(1)").fetchone()
            if problems[0] != "ok":
                raise sqlite3.DatabaseError(problems[0])
            with closing(_in_memory()) as sound:
                version = version_of(self._db)
                for step in self.MIGRATIONS[:version]:
                    _execute(sound, step)
                if _names(sound) - _names(self._db) or version not in range(1, len(self.MIGRATIONS) + 1):
                    raise sqlite3.DatabaseError("missing tables")

    def query(self, sql: str, values: Sequence[object] | Mapping[str, object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query. Raises StoreUnusableError."""
        with self.raising_unusable(self.path):
            return self._db.execute(sql, values).fetchall()

    @classmethod
    def open_for_reading(cls: type[D], state_dir: Path, *, busy_s: float | None = None) -> D:
        """Open the file for reading; an empty copy if it does not exist. `busy_s`: wait for a lock this long.

        Raises StoreUnusableError.
        """
        path = state_dir / cls.FILE_NAME
        with cls.raising_unusable(path):
            cls._expect_file(path)
            waits_s = cls.BUSY_S if busy_s is None else busy_s
            store = cls(cls._connect(path, waits_s, writes=False), path) if path.exists() else None
            try:
                if store is None or version_of(store._db) == 0:
                    empty = cls(_in_memory(), path)
                    empty.is_copy = True
                    empty._migrate()
                    if store is not None:
                        store.close()
                    return empty
                store._refuse_newer()
                if version_of(store._db) < len(cls.MIGRATIONS):
                    store._read_older()
                store._db.execute("PRAGMA query_only = ON")
            except BaseException:
                if store is not None:
                    store.close()
                raise
        return store

    def _read_older(self) -> None:
        """Migrate a copy in memory: a reader does not change the file, the next controller does."""
        copy = _in_memory()
        self._db.backup(copy)
        self._db.close()
        self._db, self.is_copy = copy, True
        self._migrate()

    @classmethod
    def _connect(cls, path: Path, busy_s: float, *, writes: bool = True) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
        try:
            if writes:  # of two that change the mode of a new file at the same time, one fails at once
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {cls.SYNCHRONOUS}")
        except BaseException:
            connection.close()
            raise
        return connection

    @classmethod
    @contextmanager
    def raising_unusable(cls, path: Path) -> Iterator[None]:
        """Raise StoreUnusableError, StoreDamagedError for what a disk or a file can cause. A broken constraint is an
        error of the program, and is raised as it is."""
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except (sqlite3.Error, OSError) as error:
            if is_damage(error):
                raise paths.StoreDamagedError(
                    Text("store.damaged", "{path} is damaged: {error}", path=str(path), error=str(error)),
                    hint=Text("store.damaged.hint", "run `ascendrun controller stop`; the next controller replaces it"),
                ) from error
            raise unwritable(path, error) from error

    def _refuse_newer(self) -> None:
        found, known = version_of(self._db), len(self.MIGRATIONS)
        if found > known:
            raise paths.StoreUnusableError(
                Text(
                    "store.newer",
                    "{path} was written by a newer ascendrun (schema {found}; this release supports {known})",
                    path=str(self.path),
                    found=found,
                    known=known,
                ),
                hint=Text("store.use-newer", "use that release, or set another ASCENDRUN_STATE_DIR"),
            )

    def _migrate(self) -> None:
        """Execute the migrations that the file lacks in one transaction: no reader ever sees a version in between."""
        self._refuse_newer()
        known, found = len(self.MIGRATIONS), version_of(self._db)
        if found == known:
            return
        if found and self.HAS_BACKUP and not self.is_copy:
            self._back_up(found)
        with immediate(self._db):
            for step in self.MIGRATIONS[version_of(self._db) :]:
                _execute(self._db, step)
            self._db.execute(f"PRAGMA user_version = {known}")

    def _back_up(self, version: int) -> None:
        """Copy the file to NAME.vVERSION, complete or not at all. Raises OSError and sqlite3.Error."""
        target = self.path.with_name(f"{self.path.name}.v{version}")
        unfinished = target.with_name(f"{target.name}.tmp")
        unfinished.unlink(missing_ok=True)
        paths.make_private_file(unfinished)
        with closing(sqlite3.connect(unfinished)) as copy:
            self._db.backup(copy)
        os.replace(unfinished, target)


@contextmanager
def immediate(connection: sqlite3.Connection) -> Iterator[None]:
    """Hold one transaction with the write lock from its start."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite itself rolls back if the disk is full
            connection.execute("ROLLBACK")
        raise


def version_of(connection: sqlite3.Connection) -> int:
    """Return how many migrations the file has; 0: nothing was ever written."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def is_damage(error: BaseException) -> bool:
    """Return whether an error of SQLite may mean that the file is damaged: it is not busy, full or unreadable."""
    if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, (sqlite3.IntegrityError, sqlite3.DataError)):
        return False
    return not isinstance(error, sqlite3.OperationalError) or not str(error).startswith(_PASSING)


_PASSING = (
    "database is locked",
    "database table is locked",
    "database schema is locked",
    "database or disk is full",
    "unable to open database file",
    "interrupted",
    "out of memory",
    "locking protocol",
)
"""Messages of SQLite for states that end without a change of the file."""
_READ_OR_WRITE = "disk I/O error"
"""Message of SQLite for a file that was cut, but also for a disk that fails or a quota that is used up."""


def unwritable(path: Path, error: Exception) -> paths.StoreUnusableError:
    """Return the error for a file that cannot be read or written now."""
    try:
        found = os.statvfs(path.parent)
    except OSError:
        free = None
    else:
        free = found.f_bavail * found.f_frsize
    return paths.StoreUnusableError(
        Text(
            "store.cannot-write",
            "cannot write {path}: {error} ({free:bytes} free)",
            path=str(path),
            error=str(error),
            free=free,
        ),
        hint=Text("store.free-space", "free disk space, or end the program that uses the file (jobs keep running)"),
    )


def _execute(connection: sqlite3.Connection, step: str) -> None:
    for statement in step.split(";"):
        connection.execute(statement)


def _names(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    """Return the tables and indexes."""
    return set(connection.execute("SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"))


def _in_memory() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
