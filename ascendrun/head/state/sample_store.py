"""What was measured, in a SQLite file of its own: samples as they came for two hours, then ever coarser means.

Beside the store of jobs, never in it: figures come by the thousand, may be lost with a power cut, and may be thrown
away as a whole. Together with the rows stands how far each node's file was read, so every line counts once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendrun.core.sample_rollup import IDENTITY, figures_of, mean_of, peak_of
from ascendrun.core.samples import DeviceDetail, DeviceSample, HostSample, Newest, RankSample, RawText, Sample
from ascendrun.head.state.migrations import immediate, migrate, refuse_newer, version_of
from ascendrun.head.state.sample_details import add_details
from ascendrun.head.state.sample_file import (
    BUSY_S,
    FILE_NAME,
    KNOWN_GENERATIONS,
    LEVELS,
    MIGRATIONS,
    MINUTE,
    OTHERWISE,
    RAW,
    TEN_MINUTES,
    Level,
    connect,
    raising_unusable,
)
from ascendrun.head.state.state_dir import make_private_file, make_state_dir

LINGERING_S = 10.0
"""So long after its end a minute is summed up: what its last second said may still be on the way."""
RAW_TEXTS = 20
"""So many texts that were not understood are kept of each tool on each host, and so many characters of each:"""
RAW_TEXT_CHARS = 65536
SUMMED_AT_ONCE = 2
"""Stretches of time, of all things, that one step sums up."""
SWEPT_AT_ONCE = 200
"""Things that one step of forgetting looks at."""

_KINDS: Mapping[str, type[Any]] = {"device": DeviceSample, "host": HostSample, "rank": RankSample}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True)
class _Thing:
    id: int
    kind: str
    key: tuple[Any, ...]


class SampleStore:
    """Open it for writing in the controller alone; everybody may read."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self.path = path
        self._ids: dict[tuple[Any, ...], int] = {}
        self._swept = 0

    @classmethod
    def open(cls, state_dir: Path) -> SampleStore:
        """Opens or makes it for writing. Raises StoreUnusableError: no space, not ours, held, broken."""
        make_state_dir(state_dir)
        path = state_dir / FILE_NAME
        with raising_unusable(path):
            make_private_file(path)
            connection = connect(path)
            try:
                migrate(connection, path, MIGRATIONS, otherwise=OTHERWISE)
            except BaseException:
                connection.close()
                raise
        return cls(connection, path)

    @classmethod
    def open_for_reading(cls, state_dir: Path, *, busy_s: float = BUSY_S) -> SampleStore | None:
        """The samples as a reader sees them, or None when nothing was ever measured here.

        `busy_s`: how long a lock is waited for. Raises StoreUnusableError.
        """
        path = state_dir / FILE_NAME
        if not path.exists():
            return None
        with raising_unusable(path):
            connection = connect(path, busy_s=busy_s)
            try:
                refuse_newer(connection, path, MIGRATIONS, otherwise=OTHERWISE)
                is_empty = version_of(connection) == 0
                connection.execute("PRAGMA query_only = ON")
            except BaseException:
                connection.close()
                raise
        if is_empty:
            connection.close()
            return None
        return cls(connection, path)

    def close(self) -> None:
        self._db.close()

    # Writing

    def add(
        self,
        samples: Iterable[Sample],
        *,
        raw: Iterable[RawText] = (),
        details: Iterable[DeviceDetail] = (),
        progress: Mapping[tuple[str, int], int] = {},
    ) -> None:
        """Everything in one transaction. A second sample of one thing at one time replaces the first.

        `progress`: {(source, generation): offset} up to which a node's file has been read with this.
        Raises StoreUnusableError; then nothing of it was stored.
        """
        rows: dict[str, list[tuple[Any, ...]]] = {}
        newest: dict[int, float] = {}
        unsummed = set()
        with raising_unusable(self.path), self._transaction() as db:
            for sample in samples:
                kind = _NAMES[type(sample)]
                thing = self._id_of(kind, sample)
                rows.setdefault(kind, []).append((thing, *_row_of(sample)))
                newest[thing] = max(newest.get(thing, 0.0), sample.at_s)
                unsummed.add((thing, _floor(sample.at_s, MINUTE.step_s), MINUTE.step_s))
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
            self._add_raw(db, raw)
            add_details(db, details, lambda detail: self._id_of("device", detail))

    def progress(self, source: str) -> Mapping[int, int]:
        """{generation: offset} up to which a node's file has been read; {}: not begun. Raises StoreUnusableError."""
        with raising_unusable(self.path):
            rows = self._db.execute("SELECT generation, offset FROM progress WHERE source = ?", (source,)).fetchall()
        return {int(generation): int(offset) for generation, offset in rows}

    def all_progress(self) -> Mapping[str, Mapping[int, int]]:
        """The same of every source that is not forgotten."""
        found: dict[str, dict[int, int]] = {}
        with raising_unusable(self.path):
            for source, generation, offset in self._db.execute("SELECT source, generation, offset FROM progress"):
                found.setdefault(source, {})[int(generation)] = int(offset)
        return found

    def forget_progress(self, source: str) -> None:
        """The source's file will not be read again. Raises StoreUnusableError."""
        with raising_unusable(self.path):
            self._db.execute("DELETE FROM progress WHERE source = ?", (source,))

    def tend(self, *, now_s: float) -> bool:
        """Sums up some of the stretches that are over, then forgets some of what is too old: one bounded step.

        True: there is more to do at once. Raises StoreUnusableError.
        """
        with raising_unusable(self.path), self._transaction() as db:
            return self._sum_up(db, now_s) or self._sweep(db, now_s)

    def _id_of(self, kind: str, sample: Sample | DeviceDetail) -> int:
        names = IDENTITY[_KINDS[kind]]
        key = (kind, *(getattr(sample, name) for name in names))
        known = self._ids.get(key)
        if known is not None:
            return known
        where = " AND ".join(f"{name} = ?" for name in ("kind", *names))
        row = self._db.execute(f"SELECT id FROM things WHERE {where}", key).fetchone()
        if row is None:
            made = self._db.execute(
                f"INSERT INTO things (kind, {', '.join(names)}, newest_s) VALUES ({', '.join('?' * len(key))}, 0)", key
            )
            row = (made.lastrowid,)
        self._ids[key] = int(row[0])
        return self._ids[key]

    def _insert(self, kind: str, level: str, rows: Sequence[tuple[Any, ...]]) -> None:
        columns = ("thing", "at_s", *figures_of(_KINDS[kind]))
        self._db.executemany(
            f"INSERT OR REPLACE INTO {kind}_{level} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
            rows,
        )

    @staticmethod
    def _add_raw(db: sqlite3.Connection, raw: Iterable[RawText]) -> None:
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
        """All things that have something new between `at_s` and one step later."""
        dues = {
            row[0]
            for row in db.execute("SELECT thing FROM unsummed WHERE step_s = ? AND at_s = ?", (level.step_s, at_s))
        }
        means: dict[str, list[tuple[Any, ...]]] = {}
        peaks: dict[str, list[tuple[Any, ...]]] = {}
        for thing in self._things(ids=dues):
            fine = self._rows(thing, finer.name, at_s, at_s + level.step_s)
            high = fine if finer is RAW else self._rows(thing, f"{finer.name}_peak", at_s, at_s + level.step_s)
            if fine:
                means.setdefault(thing.kind, []).append((thing.id, *_row_of(mean_of(fine, at_s=at_s))))
                peaks.setdefault(thing.kind, []).append((thing.id, *_row_of(peak_of(high or fine, at_s=at_s))))
        for kind in means:
            self._insert(kind, level.name, means[kind])
            self._insert(kind, f"{level.name}_peak", peaks[kind])
        db.execute("DELETE FROM unsummed WHERE step_s = ? AND at_s = ?", (level.step_s, at_s))
        if level is MINUTE:
            ten_s = _floor(at_s, TEN_MINUTES.step_s)
            db.executemany(
                "INSERT OR IGNORE INTO unsummed VALUES (?, ?, ?)",
                [(thing, ten_s, TEN_MINUTES.step_s) for thing in dues],
            )

    def _sweep(self, db: sqlite3.Connection, now_s: float) -> bool:
        """Some things more, in turn; the mark of how far back each level goes moves before the first row goes."""
        if self._swept == 0:
            for level in LEVELS:
                before_s = _floor(now_s - level.kept_s, TEN_MINUTES.step_s)
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
        """The newest sample of everything that was measured since then; None: of every host. Raises
        StoreUnusableError."""
        found: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
        with raising_unusable(self.path), self._snapshot():
            for thing in self._things(since_s=since_s, hosts=hosts):
                found[thing.kind].extend(self._rows(thing, RAW.name, since_s, None, newest_only=True))
        for samples in found.values():
            samples.sort(key=lambda sample: tuple(getattr(sample, name) for name in IDENTITY[type(sample)]))
        return Newest(tuple(found["device"]), tuple(found["host"]), tuple(found["rank"]))

    def device_series(
        self,
        *,
        since_s: float,
        until_s: float,
        host: str | None = None,
        device: int | None = None,
        every_s: float = 0.0,
        peaks: bool = False,
    ) -> tuple[DeviceSample, ...]:
        """All samples of devices in a time, in time order, each stretch from the finest level that still has it.

        `every_s`: one in so many seconds is enough, coarser levels are read where they exist. `peaks`: the highest
        instead of the mean of what was summed up. Raises StoreUnusableError.
        """
        return self._series("device", since_s, until_s, {"host": host, "device": device}, every_s, peaks)

    def host_series(
        self, *, since_s: float, until_s: float, host: str | None = None, every_s: float = 0.0, peaks: bool = False
    ) -> tuple[HostSample, ...]:
        """The same of hosts."""
        return self._series("host", since_s, until_s, {"host": host}, every_s, peaks)

    def rank_series(
        self,
        *,
        since_s: float,
        until_s: float,
        job: str | None = None,
        rank: int | None = None,
        host: str | None = None,
        every_s: float = 0.0,
        peaks: bool = False,
    ) -> tuple[RankSample, ...]:
        """The same of ranks, of all attempts."""
        return self._series("rank", since_s, until_s, {"job": job, "rank": rank, "host": host}, every_s, peaks)

    def raw(self, *, hosts: Collection[str] | None = None, tool: str | None = None) -> tuple[RawText, ...]:
        """The texts that nobody understood, oldest first. Raises StoreUnusableError."""
        with raising_unusable(self.path):
            rows = self._db.execute("SELECT at_s, host, tool, text, why FROM raw_texts ORDER BY id").fetchall()
        return tuple(
            text
            for text in (RawText(*row) for row in rows)
            if (hosts is None or text.host in hosts) and tool in (None, text.tool)
        )

    def _series(
        self, kind: str, since_s: float, until_s: float, wanted: Mapping[str, Any], every_s: float, peaks: bool
    ) -> tuple[Any, ...]:
        found: list[Any] = []
        with raising_unusable(self.path), self._snapshot():
            spans = self._spans(since_s, until_s, every_s)
            for thing in self._things(since_s=since_s):
                if thing.kind != kind or not _fits(thing, wanted):
                    continue
                for level, begin_s, end_s in spans:
                    table = f"{level.name}_peak" if peaks and level is not RAW else level.name
                    found.extend(self._rows(thing, table, begin_s, end_s))
        found.sort(key=lambda sample: sample.at_s)
        return tuple(found)

    def _spans(self, since_s: float, until_s: float, every_s: float) -> list[tuple[Level, float, float]]:
        """Which level tells of which stretch: each from where the finer one begins back to where it was pruned."""
        floors, end_s = self._floors(), until_s
        spans: list[tuple[Level, float, float]] = []
        for level, coarser in zip(LEVELS, (*LEVELS[1:], None)):
            begin_s = max(since_s, floors[level.name])
            if coarser is not None and coarser.step_s <= every_s:  # then only what is not summed up yet
                begin_s = max(begin_s, self._summed_up_to(coarser))
            if begin_s < end_s:
                spans.append((level, begin_s, end_s))
                end_s = begin_s
        return spans

    def _summed_up_to(self, level: Level) -> float:
        row = self._db.execute("SELECT MIN(at_s) FROM unsummed WHERE step_s <= ?", (level.step_s,)).fetchone()
        return _floor(row[0], level.step_s) if row[0] is not None else float("inf")

    def _floors(self) -> Mapping[str, float]:
        floors = {level.name: 0.0 for level in LEVELS}
        floors.update(self._db.execute("SELECT level, before_s FROM pruned").fetchall())
        return floors

    def _things(
        self, *, ids: Collection[int] | None = None, since_s: float = 0.0, hosts: Collection[str] | None = None
    ) -> list[_Thing]:
        rows = self._db.execute(
            "SELECT id, kind, host, family, device, job, attempt, rank FROM things WHERE newest_s >= ?", (since_s,)
        ).fetchall()
        return [
            _Thing(row[0], row[1], _key_of(row))
            for row in rows
            if (ids is None or row[0] in ids) and (hosts is None or row[2] in hosts)
        ]

    def _rows(
        self, thing: _Thing, table: str, begin_s: float, end_s: float | None, *, newest_only: bool = False
    ) -> list[Any]:
        """Samples with begin_s <= at_s < end_s, in order."""
        made = _KINDS[thing.kind]
        names = ("at_s", *figures_of(made))
        order = "DESC LIMIT 1" if newest_only else "ASC"
        rows = self._db.execute(
            f"SELECT {', '.join(names)} FROM {thing.kind}_{table} WHERE thing = ? AND at_s >= ? AND at_s < ?"
            f" ORDER BY at_s {order}",
            (thing.id, begin_s, float("inf") if end_s is None else end_s),
        )
        key = dict(zip(IDENTITY[made], thing.key))
        return [made(**key, **_figures_from(names, row)) for row in rows]

    # Transactions

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with immediate(self._db):
                yield self._db
        except BaseException:
            self._ids.clear()  # what was new among them is gone again
            raise

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Several looks see one state."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")


def _fits(thing: _Thing, wanted: Mapping[str, Any]) -> bool:
    have = dict(zip(IDENTITY[_KINDS[thing.kind]], thing.key))
    return all(value is None or have[name] == value for name, value in wanted.items())


def _key_of(row: Sequence[Any]) -> tuple[Any, ...]:
    values = dict(zip(("id", "kind", "host", "family", "device", "job", "attempt", "rank"), row))
    return tuple(values[name] for name in IDENTITY[_KINDS[row[1]]])


def _row_of(sample: Sample) -> tuple[Any, ...]:
    figures = []
    for name in figures_of(type(sample)):
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


def _floor(at_s: float, step_s: int) -> float:
    return at_s // step_s * step_s
