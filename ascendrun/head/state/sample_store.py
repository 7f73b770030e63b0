"""Samples in an SQLite file: as measured for two hours, then means of one and of ten minutes.

Separate from the store of jobs: there are thousands of samples, they may be lost in a power failure and may be deleted.
The offset up to which each node's file was read is stored in the same transaction, so that every line counts once.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.measurement import mean_of, metrics_of, peak_of
from ascendrun.core.samples import DeviceDetail, DeviceSample, HostSample, Newest, RankSample, RawText, Sample
from ascendrun.head.state.database import Database, immediate
from ascendrun.node.sampler.sample import GENERATIONS

LINGERING_S = 10.0
"""Seconds after its end at which a minute is summed up: data of its last second may arrive late."""
RAW_TEXTS = 20
"""Unparsed texts that are kept of each tool on each host, and below the characters that are kept of each:"""
RAW_TEXT_CHARS = 65536
SUMMED_AT_ONCE = 2
"""Time ranges, of all series, that one step sums up."""
SWEPT_AT_ONCE = 200
"""Series that one step of deletion checks."""

KNOWN_GENERATIONS = 2 * GENERATIONS
"""Generations of a node's file with stored progress: the node has no older ones, and a job may run for months."""

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


class SampleStore(Database):
    """The samples of a state directory: series, and their rows at every level."""

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

    # Writing

    def add(
        self,
        samples: Iterable[Sample],
        *,
        raw: Iterable[RawText] = (),
        details: Iterable[DeviceDetail] = (),
        progress: Mapping[tuple[str, int], int] = {},
    ) -> None:
        """Store everything in one transaction. A second sample of one series at one time replaces the first.

        `progress`: {(source, generation): offset} up to which a node's file has been read, including these samples.
        Raises StoreUnusableError; then nothing was stored.
        """
        rows: dict[str, list[tuple[Any, ...]]] = {}
        newest: dict[int, float] = {}
        unsummed = set()
        with self.raising_unusable(self.path), self._transaction() as db:
            for sample in samples:
                kind = self._names[type(sample)]
                thing = self._id_of(kind, sample)
                rows.setdefault(kind, []).append((thing, *row_of(sample)))
                newest[thing] = max(newest.get(thing, 0.0), sample.at_s)
                unsummed.add((thing, floor(sample.at_s, MINUTE.step_s), MINUTE.step_s))
            for kind, values in rows.items():
                self._insert(kind, RAW.name, values)
            db.executemany(
                "UPDATE things SET newest_s = max(newest_s, ?) WHERE id = ?",
                [(at_s, thing) for thing, at_s in newest.items()],
            )
            db.executemany("INSERT OR IGNORE INTO unsummed VALUES (?, ?, ?)", unsummed)
            db.executemany(
                "INSERT OR REPLACE INTO progress VALUES (?, ?, ?)", [(*key, offset) for key, offset in progress.items()]
            )
            db.executemany(
                "DELETE FROM progress WHERE source = ? AND generation <= ?",
                [(source, generation - KNOWN_GENERATIONS) for source, generation in progress],
            )
            for text in raw:
                db.execute(
                    "INSERT INTO raw_texts (at_s, host, tool, text, why) VALUES (?, ?, ?, ?, ?)",
                    (text.at_s, text.host, text.tool, text.text[:RAW_TEXT_CHARS], text.why),
                )
                db.execute(
                    "DELETE FROM raw_texts WHERE host = ? AND tool = ? AND id NOT IN (SELECT id FROM raw_texts"
                    " WHERE host = ? AND tool = ? ORDER BY id DESC LIMIT ?)",
                    (text.host, text.tool, text.host, text.tool, RAW_TEXTS),
                )
            db.executemany(
                "INSERT INTO details VALUES (?, ?, ?) ON CONFLICT (thing) DO UPDATE SET at_s = excluded.at_s,"
                " text = excluded.text WHERE excluded.at_s >= at_s",
                [
                    (
                        self._id_of("device", one),
                        one.at_s,
                        json.dumps({"bus": one.bus_id, "processes": one.processes, "values": one.values}),
                    )
                    for one in details
                ],
            )

    def all_progress(self) -> Mapping[str, Mapping[int, int]]:
        """Return {source: {generation: offset}} up to which each node's file was read. Raises StoreUnusableError."""
        found: dict[str, dict[int, int]] = {}
        with self.raising_unusable(self.path):
            for source, generation, offset in self._db.execute("SELECT source, generation, offset FROM progress"):
                found.setdefault(source, {})[int(generation)] = int(offset)
        return found

    def forget_progress(self, source: str) -> None:
        """Delete the progress of a file that will not be read again. Raises StoreUnusableError."""
        with self.raising_unusable(self.path):
            self._db.execute("DELETE FROM progress WHERE source = ?", (source,))

    def tend(self, *, now_s: float) -> bool:
        """Sum up some of the completed time ranges, then delete some old rows: one bounded step.

        True: more work is due now. Raises StoreUnusableError.
        """
        with self.raising_unusable(self.path), self._transaction() as db:
            return self._sum_up(db, now_s) or self._sweep(db, now_s)

    # Summing up

    def _sum_up(self, db: sqlite3.Connection, now_s: float) -> bool:
        for finer, level in ((RAW, MINUTE), (MINUTE, TEN_MINUTES)):
            times = [
                row[0]
                for row in db.execute(
                    "SELECT DISTINCT at_s FROM unsummed WHERE step_s = ? AND at_s < ? ORDER BY at_s LIMIT ?",
                    (level.step_s, now_s - level.step_s - LINGERING_S, SUMMED_AT_ONCE),
                )
            ]
            for at_s in times:
                self._sum_up_stretch(db, finer, level, at_s)
            if len(times) == SUMMED_AT_ONCE:
                return True
        return False

    def _sum_up_stretch(self, db: sqlite3.Connection, finer: Level, level: Level, at_s: float) -> None:
        """Sum up all series with new data between `at_s` and one step later."""
        found = db.execute("SELECT thing FROM unsummed WHERE step_s = ? AND at_s = ?", (level.step_s, at_s))
        dues = {row[0] for row in found}
        means: dict[str, list[tuple[Any, ...]]] = {}
        peaks: dict[str, list[tuple[Any, ...]]] = {}
        for series in (one for kind in self.KINDS for one in self._series_of(kind, {"id": dues})):
            fine = self._rows(series, finer.name, at_s, at_s + level.step_s)
            high = fine if finer is RAW else self._rows(series, f"{finer.name}_peak", at_s, at_s + level.step_s)
            if fine:
                means.setdefault(series.kind, []).append((series.id, *row_of(mean_of(fine, at_s=at_s))))
                peaks.setdefault(series.kind, []).append((series.id, *row_of(peak_of(high or fine, at_s=at_s))))
        for kind in means:
            self._insert(kind, level.name, means[kind])
            self._insert(kind, f"{level.name}_peak", peaks[kind])
        db.execute("DELETE FROM unsummed WHERE step_s = ? AND at_s = ?", (level.step_s, at_s))
        if level is MINUTE:
            ten_s = floor(at_s, TEN_MINUTES.step_s)
            db.executemany(
                "INSERT OR IGNORE INTO unsummed VALUES (?, ?, ?)",
                [(thing, ten_s, TEN_MINUTES.step_s) for thing in dues],
            )

    def _sweep(self, db: sqlite3.Connection, now_s: float) -> bool:
        """Delete from more series, in turn; the mark of each level's oldest time moves before rows are deleted."""
        if self._swept == 0:
            for level in LEVELS:
                before_s = floor(now_s - level.kept_s, TEN_MINUTES.step_s)
                db.execute(
                    "INSERT INTO pruned VALUES (?, ?) ON CONFLICT (level) DO UPDATE"
                    " SET before_s = max(before_s, excluded.before_s)",
                    (level.name, before_s),
                )
        floors = self._floors()
        rows = db.execute(
            "SELECT id, kind, newest_s FROM things WHERE id > ? ORDER BY id LIMIT ?", (self._swept, SWEPT_AT_ONCE)
        ).fetchall()
        for thing, kind, newest_s in rows:
            for level in LEVELS:
                for table in (level.name,) if level is RAW else (level.name, f"{level.name}_peak"):
                    db.execute(f"DELETE FROM {kind}_{table} WHERE thing = ? AND at_s < ?", (thing, floors[level.name]))
            if newest_s < floors[TEN_MINUTES.name]:
                db.execute("DELETE FROM things WHERE id = ?", (thing,))
                db.execute("DELETE FROM details WHERE thing = ?", (thing,))
                self._ids.clear()
        db.execute("DELETE FROM raw_texts WHERE at_s < ?", (now_s - MINUTE.kept_s,))
        self._swept = int(rows[-1][0]) if len(rows) == SWEPT_AT_ONCE else 0
        return self._swept != 0

    # Reading

    def newest(self, *, since_s: float, hosts: Collection[str] | None = None) -> Newest:
        """Return the newest device, host, rank samples since then; `hosts` None: all. Raises StoreUnusableError."""
        found: dict[str, list[Any]] = {}
        with self.raising_unusable(self.path), self._snapshot():
            for kind, sample in self.KINDS.items():  # one query for any number of series
                figures = ("at_s", *self._columns_of(kind))
                rows = self._db.execute(
                    f"SELECT {', '.join((*sample.KEY, *map('raw.{}'.format, figures)))} FROM things"
                    f" JOIN {kind}_{RAW.name} AS raw ON thing = id AND at_s = newest_s"
                    f" WHERE kind = ? AND newest_s >= ? ORDER BY {', '.join(sample.KEY)}",
                    (kind, since_s),
                )
                values = (_figures_from((*sample.KEY, *figures), row) for row in rows)
                found[kind] = [sample(**one) for one in values if hosts is None or one["host"] in hosts]
        return Newest(tuple(found["device"]), tuple(found["host"]), tuple(found["rank"]))

    def device_series(self, **wanted: Any) -> tuple[DeviceSample, ...]:
        """Return samples of devices as `_read_series` does; of one `host`, one `device`. Raises StoreUnusableError."""
        return self._read_series("device", **wanted)

    def host_series(self, **wanted: Any) -> tuple[HostSample, ...]:
        """Return samples of hosts in the same way, of one `host`."""
        return self._read_series("host", **wanted)

    def rank_series(self, **wanted: Any) -> tuple[RankSample, ...]:
        """Return samples of ranks in the same way, of all attempts; of one `job`, `rank`, `host`."""
        return self._read_series("rank", **wanted)

    def details(self, *, since_s: float) -> tuple[DeviceDetail, ...]:
        """Return the newest detail of every device since then, if there is any. Raises StoreUnusableError."""
        with self.raising_unusable(self.path):
            rows = self._db.execute(
                "SELECT details.at_s, host, device, device_type, text FROM details JOIN things ON things.id = thing"
                " WHERE details.at_s >= ? ORDER BY host, device",
                (since_s,),
            ).fetchall()
        details = []
        for at_s, host, device, device_type, text in rows:
            saved = json.loads(text)
            processes = tuple((int(pid), memory_mb) for pid, memory_mb in saved["processes"])
            details.append(DeviceDetail(at_s, host, device, device_type, saved["bus"], saved["values"], processes))
        return tuple(details)

    def raw(self, *, hosts: Collection[str] | None = None, tool: str | None = None) -> tuple[RawText, ...]:
        """Return the unparsed texts, oldest first. Raises StoreUnusableError."""
        with self.raising_unusable(self.path):
            rows = self._db.execute("SELECT at_s, host, tool, text, why FROM raw_texts ORDER BY id").fetchall()
        return tuple(
            text
            for text in (RawText(*row) for row in rows)
            if (hosts is None or text.host in hosts) and tool in (None, text.tool)
        )

    def _read_series(
        self, kind: str, *, since_s: float, until_s: float, every_s: float = 0.0, peaks: bool = False, **key: Any
    ) -> tuple[Any, ...]:
        """Return all samples of a period in time order, each time range from the finest level that still has it.

        `every_s`: one sample in this many seconds is sufficient, coarser levels are read if they exist. `peaks`: the
        maximum, not the mean, of summed-up data. `key`: names the series; None: any, a frozenset: these.
        """
        wanted = {name: v if isinstance(v, frozenset) else {v} for name, v in key.items() if v is not None}
        found: list[Any] = []
        with self.raising_unusable(self.path), self._snapshot():
            spans = self._spans(since_s, until_s, every_s)
            for series in self._series_of(kind, wanted, since_s=since_s):
                for level, start_s, end_s in spans:
                    table = f"{level.name}_peak" if peaks and level is not RAW else level.name
                    found.extend(self._rows(series, table, start_s, end_s))
        found.sort(key=lambda sample: sample.at_s)
        return tuple(found)

    def _spans(self, since_s: float, until_s: float, every_s: float) -> list[tuple[Level, float, float]]:
        """Return the level to read for each time range: each up to the finer level's start, back to its own pruning."""
        floors, end_s = self._floors(), until_s
        spans: list[tuple[Level, float, float]] = []
        for level, coarser in zip(LEVELS, (*LEVELS[1:], None)):
            start_s = max(since_s, floors[level.name])
            if coarser is not None and coarser.step_s <= every_s:  # then only data that is not summed up yet
                unsummed = "SELECT MIN(at_s) FROM unsummed WHERE step_s <= ?"
                first_s = self._db.execute(unsummed, (coarser.step_s,)).fetchone()[0]
                start_s = max(start_s, float("inf") if first_s is None else floor(first_s, coarser.step_s))
            if start_s < end_s:
                spans.append((level, start_s, end_s))
                end_s = start_s
        return spans

    # Series and rows

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

    def _series_of(self, kind: str, wanted: Mapping[str, Collection[Any]], *, since_s: float = 0.0) -> list[Series]:
        """Return the series of a kind that have one of the `wanted` values of each name."""
        names = self.KINDS[kind].KEY
        places = [(("id", *names).index(name), values) for name, values in wanted.items()]
        query = f"SELECT id, {', '.join(names)} FROM things WHERE kind = ? AND newest_s >= ?"
        return [
            Series(row[0], kind, dict(zip(names, row[1:])))
            for row in self._db.execute(query, (kind, since_s)).fetchall()
            if all(row[place] in values for place, values in places)
        ]

    def _rows(self, series: Series, table: str, start_s: float, end_s: float) -> list[Any]:
        """Return samples with start_s <= at_s < end_s, in order."""
        names = ("at_s", *self._columns_of(series.kind))
        rows = self._db.execute(
            f"SELECT {', '.join(names)} FROM {series.kind}_{table} WHERE thing = ? AND at_s >= ? AND at_s < ?"
            " ORDER BY at_s",
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
