"""An SQLite file of the state directory: opened, migrated to the newest version, rejected if it is newer."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Callable, ClassVar, TypeVar, Union

from ascendrun.head.state.state_dir import StoreUnusableError, make_private_file, make_state_dir
from ascendrun.text import Text

Migration = Union[str, Callable[[sqlite3.Connection], None]]
"""SQL statements, or a function that is called within the transaction."""
D = TypeVar("D", bound="Database")


class Database:
    """Base of the SQLite files. Open for writing in the controller only. `OTHERWISE`: the other fix for a newer file.

    `SYNCHRONOUS`: FULL keeps each transaction through a power failure. `is_copy`: in memory, since there is no file
    yet, or no controller of this release has migrated it. `HAS_BACKUP`: the file is copied before it is migrated.
    """

    FILE_NAME: ClassVar[str]
    MIGRATIONS: ClassVar[Sequence[Migration]]
    BUSY_S: ClassVar[float]
    SYNCHRONOUS: ClassVar[str]
    OTHERWISE: ClassVar[Text]
    UNUSABLE: ClassVar[Text]
    HAS_BACKUP: ClassVar[bool] = False

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self.path = path
        self.is_copy = False

    def __enter__(self: D) -> D:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    @classmethod
    def open(cls: type[D], state_dir: Path) -> D:
        """Create or migrate the file, open it for writing. Raises StoreUnusableError: no space, in use, damaged."""
        make_state_dir(state_dir)
        path = state_dir / cls.FILE_NAME
        with cls.raising_unusable(path):
            make_private_file(path)
            store = cls(cls._connect(path, cls.BUSY_S), path)
            try:
                store._migrate()
            except BaseException:
                store.close()
                raise
        return store

    @classmethod
    def open_for_reading(cls: type[D], state_dir: Path, *, busy_s: float | None = None) -> D:
        """Open the file for reading; an empty copy if it does not exist. `busy_s`: wait for a lock this long.

        Raises StoreUnusableError.
        """
        path = state_dir / cls.FILE_NAME
        with cls.raising_unusable(path):
            store = cls(cls._connect(path, cls.BUSY_S if busy_s is None else busy_s), path) if path.exists() else None
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
    def _connect(cls, path: Path, busy_s: float) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {cls.SYNCHRONOUS}")
        except BaseException:
            connection.close()
            raise
        return connection

    @classmethod
    @contextmanager
    def raising_unusable(cls, path: Path) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            message = Text("store.error", "{path}: {error}", path=str(path), error=str(error))
            raise StoreUnusableError(message, hint=cls.UNUSABLE) from error

    def _refuse_newer(self) -> None:
        found, known = version_of(self._db), len(self.MIGRATIONS)
        if found > known:
            raise StoreUnusableError(
                Text(
                    "store.newer",
                    "{path} was written by a newer ascendrun (schema {found}; this release supports {known})",
                    path=str(self.path),
                    found=found,
                    known=known,
                ),
                hint=Text("store.use-newer", "use that release, or {otherwise}", otherwise=self.OTHERWISE),
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
                if callable(step):
                    step(self._db)
                else:
                    for statement in step.split(";"):
                        self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {known}")

    def _back_up(self, version: int) -> None:
        """Copy the file to NAME.vVERSION, complete or not at all. Raises OSError and sqlite3.Error."""
        target = self.path.with_name(f"{self.path.name}.v{version}")
        unfinished = target.with_name(f"{target.name}.tmp")
        unfinished.unlink(missing_ok=True)
        make_private_file(unfinished)
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


def _in_memory() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
