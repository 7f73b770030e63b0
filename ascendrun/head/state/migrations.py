"""The version of an SQLite file of ours: brought to the newest one step by step, refused when it is beyond us."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Union

from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.text import Text

Migration = Union[str, Callable[[sqlite3.Connection], None]]
"""SQL statements, or a function that is called within the transaction."""


@contextmanager
def immediate(connection: sqlite3.Connection) -> Iterator[None]:
    """One transaction that holds the write lock from its beginning."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite itself rolls back when the disk is full
            connection.execute("ROLLBACK")
        raise


def version_of(connection: sqlite3.Connection) -> int:
    """How many steps the file has behind it; 0: nothing was ever written."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def refuse_newer(connection: sqlite3.Connection, path: Path, steps: Sequence[Migration], *, otherwise: Text) -> None:
    """Raises StoreUnusableError for a file of a later release. `otherwise`: the other remedy."""
    if version_of(connection) > len(steps):
        raise StoreUnusableError(
            Text(
                "store.newer",
                "{path} was written by a newer ascendrun (schema {found}; this release supports {known})",
                path=str(path),
                found=version_of(connection),
                known=len(steps),
            ),
            hint=Text("store.use-newer", "use that release, or {otherwise}", otherwise=otherwise),
        )


def migrate(connection: sqlite3.Connection, path: Path, steps: Sequence[Migration], *, otherwise: Text) -> None:
    """Takes the steps that the file lacks, each in one transaction. Raises as refuse_newer."""
    refuse_newer(connection, path, steps, otherwise=otherwise)
    for version in range(version_of(connection), len(steps)):
        with immediate(connection):
            if version_of(connection) > version:
                continue
            step = steps[version]
            if callable(step):
                step(connection)
            else:
                for statement in step.split(";"):
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version + 1}")
