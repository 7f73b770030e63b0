"""The tables of samples: one for each kind of series and each resolution."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.measurement import metrics_of
from ascendrun.core.samples import DeviceDetail, DeviceSample, HostSample, RankSample, Sample
from ascendrun.head.state.database import Database, immediate

KINDS: Mapping[str, type[Any]] = {"device": DeviceSample, "host": HostSample, "rank": RankSample}


@dataclass(frozen=True)
class Level:
    """One resolution. `step_s` 0: as measured. Its means are in the table KIND_NAME, its peaks in KIND_NAME_peak."""

    name: str
    step_s: int
    kept_s: float


RAW, MINUTE, TEN_MINUTES = Level("raw", 0, 7200.0), Level("minute", 60, 7 * 86400.0), Level("ten", 600, 90 * 86400.0)
LEVELS = (RAW, MINUTE, TEN_MINUTES)

TABLES = ("raw", "minute", "minute_peak", "ten", "ten_peak")

MIGRATIONS: tuple[str, ...] = (
    "".join(
        f"CREATE TABLE {kind}_{table} (thing INTEGER NOT NULL, at_s REAL NOT NULL, {', '.join(metrics_of(sample))},"
        " PRIMARY KEY (thing, at_s)) WITHOUT ROWID;"
        for kind, sample in KINDS.items()
        for table in TABLES
    )
    + """
    CREATE TABLE things (
        id INTEGER PRIMARY KEY, kind TEXT NOT NULL, host TEXT NOT NULL, device_type TEXT, device INTEGER, job TEXT,
        attempt INTEGER, rank INTEGER, newest_s REAL NOT NULL);
    CREATE INDEX things_by_time ON things (newest_s);
    CREATE TABLE unsummed (thing INTEGER NOT NULL, at_s REAL NOT NULL, step_s INTEGER NOT NULL,
        PRIMARY KEY (step_s, at_s, thing)) WITHOUT ROWID;
    CREATE TABLE pruned (level TEXT PRIMARY KEY, before_s REAL NOT NULL) WITHOUT ROWID;
    CREATE TABLE progress (source TEXT NOT NULL, generation INTEGER NOT NULL, offset INTEGER NOT NULL,
        PRIMARY KEY (source, generation)) WITHOUT ROWID;
    CREATE TABLE raw_texts (
        id INTEGER PRIMARY KEY, at_s REAL NOT NULL, host TEXT NOT NULL, tool TEXT NOT NULL, text TEXT NOT NULL,
        why TEXT NOT NULL);
    CREATE INDEX raw_texts_by_tool ON raw_texts (host, tool);
    CREATE TABLE details (thing INTEGER PRIMARY KEY, at_s REAL NOT NULL, text TEXT NOT NULL)
    """,
)
"""`things`: the series, one for each device, host and rank. Every kind has the same tables at every level."""


@dataclass(frozen=True)
class Series:
    id: int
    kind: str
    key: Mapping[str, Any]


class SampleTables(Database):
    """The file of samples: its series and their rows at every level."""

    FILE_NAME = "samples.db"
    MIGRATIONS = MIGRATIONS
    BUSY_S = 5.0
    SYNCHRONOUS = "NORMAL"
    KINDS = KINDS

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        super().__init__(connection, path)
        self._ids: dict[tuple[Any, ...], int] = {}
        self._swept = 0
        self._names = {kind: name for name, kind in self.KINDS.items()}
        self._columns: dict[str, tuple[str, ...]] = {}

    def _prepare(self) -> None:
        """Add the columns of metrics that the file does not have."""
        missing = [
            f"ALTER TABLE {kind}_{table} ADD COLUMN {column}"
            for kind, sample in self.KINDS.items()
            for column in metrics_of(sample).keys() - set(self._columns_of(kind))
            for table in TABLES
        ]
        if missing:
            with immediate(self._db):
                for statement in missing:
                    self._db.execute(statement)
            self._columns.clear()

    def _columns_of(self, kind: str) -> tuple[str, ...]:
        """Return the metrics that the file has: a reader may be newer than the controller that wrote it."""
        if kind not in self._columns:
            found = {row[1] for row in self._db.execute(f"PRAGMA table_info({kind}_{RAW.name})")}
            self._columns[kind] = tuple(name for name in metrics_of(self.KINDS[kind]) if name in found)
        return self._columns[kind]

    def _id_of(self, kind: str, sample: Sample | DeviceDetail) -> int:
        fields = self.KINDS[kind].KEY
        key = (kind, *(getattr(sample, name) for name in fields))
        known = self._ids.get(key)
        if known is not None:
            return known
        where = " AND ".join(f"{name} = ?" for name in ("kind", *fields))
        row = self._db.execute(f"SELECT id FROM things WHERE {where}", key).fetchone()
        if row is None:
            made = self._db.execute(
                f"INSERT INTO things (kind, {', '.join(fields)}, newest_s) VALUES ({', '.join('?' * len(key))}, 0)", key
            )
            row = (made.lastrowid,)
        self._ids[key] = int(row[0])
        return self._ids[key]

    def _insert(self, kind: str, level: str, rows: Sequence[tuple[Any, ...]]) -> None:
        columns = ("thing", "at_s", *metrics_of(self.KINDS[kind]))
        self._db.executemany(
            f"INSERT OR REPLACE INTO {kind}_{level} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
            rows,
        )

    def _series_of(
        self, *, ids: Collection[int] | None = None, since_s: float = 0.0, hosts: Collection[str] | None = None
    ) -> list[Series]:
        names = ("host", "device_type", "device", "job", "attempt", "rank")
        rows = self._db.execute(f"SELECT id, kind, {', '.join(names)} FROM things WHERE newest_s >= ?", (since_s,))
        return [
            Series(number, kind, {name: key[names.index(name)] for name in self.KINDS[kind].KEY})
            for number, kind, *key in rows.fetchall()
            if (ids is None or number in ids) and (hosts is None or key[0] in hosts)
        ]

    def _rows(
        self, series: Series, table: str, start_s: float, end_s: float, *, newest_only: bool = False
    ) -> list[Any]:
        """Return samples with start_s <= at_s < end_s, in order."""
        names = ("at_s", *self._columns_of(series.kind))
        rows = self._db.execute(
            f"SELECT {', '.join(names)} FROM {series.kind}_{table} WHERE thing = ? AND at_s >= ? AND at_s < ?"
            f" ORDER BY at_s {'DESC LIMIT 1' if newest_only else 'ASC'}",
            (series.id, start_s, end_s),
        )
        return [self.KINDS[series.kind](**series.key, **_figures_from(names, row)) for row in rows]

    def _floors(self) -> Mapping[str, float]:
        floors = {level.name: 0.0 for level in LEVELS}
        floors.update(self._db.execute("SELECT level, before_s FROM pruned").fetchall())
        return floors

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with immediate(self._db):
                yield self._db
        except BaseException:
            self._ids.clear()  # rows added in the transaction are gone again
            raise

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Let several queries see one state."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")


def row_of(sample: Sample) -> tuple[Any, ...]:
    figures = []
    for name in metrics_of(type(sample)):
        value = getattr(sample, name)
        figures.append(" ".join(str(pid) for pid in value) if name == "pids" and value is not None else value)
    return (sample.at_s, *figures)


def _figures_from(names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    values = dict(zip(names, row))
    if values.get("pids") is not None:
        values["pids"] = tuple(int(pid) for pid in str(values["pids"]).split())
    if values.get("link_up") is not None:
        values["link_up"] = bool(values["link_up"])
    return values


def floor(at_s: float, step_s: int) -> float:
    return at_s // step_s * step_s
