"""The file of samples: its tables, its versions, and how it is opened."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.node.sampler.sample import GENERATIONS
from ascendrun.text import Text

FILE_NAME = "samples.db"
BUSY_S = 5.0
KNOWN_GENERATIONS = 2 * GENERATIONS
"""Of a node's file the progress in so many is remembered: the node has no older ones, and a job may run for months."""
OTHERWISE = Text("store.move-file-aside", "move the file aside")


@dataclass(frozen=True)
class Level:
    """One coarseness. `step_s` 0: as it came. Its means are in the table KIND_NAME, its peaks in KIND_NAME_peak."""

    name: str
    step_s: int
    kept_s: float


RAW, MINUTE, TEN_MINUTES = Level("raw", 0, 7200.0), Level("minute", 60, 7 * 86400.0), Level("ten", 600, 90 * 86400.0)
LEVELS = (RAW, MINUTE, TEN_MINUTES)

_DEVICE = """name, utilisation, memory_used_bytes, memory_total_bytes, power_w, temperature_c, frequency_mhz, health,
    link_up, link_downs, link_tx_bytes_s, link_rx_bytes_s, ecc_errors, pids, source"""
_HOST = """cpu, load1, memory_used_bytes, memory_total_bytes, disk_free_bytes, disk_read_bytes_s, disk_write_bytes_s,
    net_rx_bytes_s, net_tx_bytes_s"""
_RANK = "pid, device, cpu, rss_bytes, read_bytes_s, write_bytes_s, threads, state"


def _make_tables() -> str:
    """Every kind at every level, alike: a thing, a time, the figures."""
    tables = []
    for kind, columns in (("device", _DEVICE), ("host", _HOST), ("rank", _RANK)):
        for level in ("raw", "minute", "minute_peak", "ten", "ten_peak"):
            tables.append(
                f"CREATE TABLE {kind}_{level} (thing INTEGER NOT NULL, at_s REAL NOT NULL, {columns},"
                " PRIMARY KEY (thing, at_s)) WITHOUT ROWID;"
            )
    return "\n".join(tables)


MIGRATIONS: tuple[str, ...] = (
    _make_tables()
    + """
    CREATE TABLE things (
        id INTEGER PRIMARY KEY, kind TEXT NOT NULL, host TEXT NOT NULL, family TEXT, device INTEGER, job TEXT,
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
    CREATE INDEX raw_texts_by_tool ON raw_texts (host, tool)
    """,
    "CREATE TABLE details (thing INTEGER PRIMARY KEY, at_s REAL NOT NULL, text TEXT NOT NULL)",
)


@contextmanager
def raising_unusable(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreUnusableError(
            Text("store.error", "{path}: {error}", path=str(path), error=str(error)),
            hint=Text(
                "samples.move-aside",
                "free disk space, or move the file aside (jobs keep running; samples on the nodes are read later)",
            ),
        ) from error


def connect(path: Path, *, busy_s: float = BUSY_S) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection
