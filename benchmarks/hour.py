"""What nodes report in an hour, in ten minutes: the growth of the store, its clean-up, and what the head needs for it.

    python -m benchmarks.hour [--nodes 1000] [--jobs 8] [--seconds 600] [--repeat 1] [--results FOLDER]

The nodes are those of benchmarks.head. They send their samples, metrics, lines and heartbeats of these seconds, and
those of the rest of an hour more, with the times of samples from 150 minutes ago on. The head keeps samples as measured
for two hours, so it removes a part of them, and sums all of them up. Each twelfth of it, 5 minutes, is one row.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ascendrun.head.state.sample_store import MINUTE, RAW, SampleStore
from benchmarks.head import SETTLE_S, Head, cpu_s, family, prefer
from benchmarks.results import RESULTS, Row, Sheet, median, read_rows, shown, table, write_page

COLUMNS = (
    "repeat", "nodes", "minute", "wall_s", "controller_percent", "samples_percent", "fleet_percent", "controller_mb",
    "samples_mb", "store_mb", "free_mb", "wal_mb", "spool_mb", "rows", "deleted", "behind_s", "late_s", "lost", "load",
)  # fmt: skip
HEADINGS = (
    "minute", "wall, s", "controller, % of a core", "samples, % of a core", "nodes, % of a core", "controller, MB",
    "samples, MB", "store, MB", "of it free, MB", "WAL, MB", "other files, MB", "rows as measured",
    "samples of hosts deleted", "store behind, s", "loop late at most, s", "connections lost",
)  # fmt: skip
HOUR_S, PARTS, ORDERS = 3600.0, 12, 5
"""Parts of an hour, and orders of a part: the delay of the loop is known for a minute at a time."""
AGO_S = 150 * 60.0
REST_S = 45.0
"""The store is cleaned up every 30 s."""


def size_mb(*paths: Path) -> float:
    return sum(path.stat().st_size for path in paths if path.exists()) / 1e6


class Hour:
    """An hour that passes on a head. `sent`: samples of hosts with times of the past."""

    def __init__(self, sheet: Sheet, head: Head, seconds: float, repeat: int) -> None:
        self._sheet, self._head, self._seconds, self._repeat = sheet, head, seconds, repeat
        self._since_s, self._more_s = time.time() - AGO_S, HOUR_S - seconds
        self._began_s = self._since_s
        self._until_s = self._since_s + self._more_s
        self._process, self._nodes = head.controller(), psutil.Process(head.fleet.pid)
        self._store = head.state_dir / SampleStore.FILE_NAME
        self._sent = self._lost = 0

    def run(self) -> None:
        self._measure(0, 0.0)
        for part in range(PARTS):
            self._measure(5 * (part + 1), self._seconds / PARTS)
        time.sleep(REST_S)
        self._measure("after", 0.0)

    def _measure(self, minute: int | str, seconds: float) -> None:
        """Let a part pass, or nothing, and add its row."""
        began, before, late_s = time.monotonic(), self._cpu_s(), 0.0
        length_s = self._more_s * seconds / self._seconds / ORDERS
        for _ in range(ORDERS if seconds else 0):
            times = {"since_s": self._since_s, "length_s": length_s, "seconds": seconds / ORDERS}
            result = self._head.order("past", **times)["result"]
            self._since_s += length_s
            self._sent, self._lost = self._sent + result["samples"], result["lost"]
            late_s = max(late_s, self._head.pulse()["late_s"])
        wall_s = time.monotonic() - began
        used = [100 * (now - then) / wall_s for now, then in zip(self._cpu_s(), before)] if seconds else [None] * 3
        names = ("controller_percent", "samples_percent", "fleet_percent")
        memory = [one.memory_info().rss / 1e6 for one in family(self._process)]
        self._sheet.add(
            repeat=self._repeat,
            nodes=self._head.nodes,
            minute=minute,
            wall_s=wall_s if seconds else None,
            **dict(zip(names, used)),
            controller_mb=memory[0],
            samples_mb=sum(memory[1:]),
            **self._sizes(),
            late_s=late_s if seconds else self._head.pulse()["late_s"],
            lost=self._lost,
            load=f"{os.getloadavg()[0]:.1f}",
        )

    def _cpu_s(self) -> list[float]:
        """CPU seconds of the controller with its ended processes, its process for samples, and the nodes."""
        own = cpu_s(self._process)
        nodes = self._nodes.cpu_times()
        return [own[0], sum(own[1:]), nodes.user + nodes.system]

    def _sizes(self) -> dict[str, object]:
        wal = self._store.with_name(f"{self._store.name}-wal")
        files = [path for path in self._head.state_dir.rglob("*") if path.is_file() and path not in (self._store, wal)]
        with sqlite3.connect(f"file:{self._store}?mode=ro", uri=True) as store:
            counts = [
                store.execute(f"SELECT COUNT(*) FROM {kind}_{RAW.name}").fetchone()[0] for kind in SampleStore.KINDS
            ]
            of_past = f"SELECT COUNT(*) FROM host_{RAW.name} WHERE at_s < ?"
            (kept,) = store.execute(of_past, (self._until_s,)).fetchone()
            newest = (f"SELECT MAX(at_s) FROM host_{level.name} WHERE at_s < ?" for level in (RAW, MINUTE))
            stored = [store.execute(query, (self._until_s,)).fetchone()[0] for query in newest]
            (pages,) = store.execute("PRAGMA freelist_count").fetchone()
            (page_bytes,) = store.execute("PRAGMA page_size").fetchone()
        store.close()
        return {
            "store_mb": size_mb(self._store),
            "free_mb": pages * page_bytes / 1e6,
            "wal_mb": size_mb(wal),
            "spool_mb": size_mb(*files),
            "rows": sum(counts),
            "deleted": max(0, self._sent - kept),
            "behind_s": self._since_s - max([self._began_s, *(at_s for at_s in stored if at_s is not None)]),
        }


def render(rows: Sequence[Row]) -> str:
    """Medians over the repetitions."""

    def cell(minute: str, column: str) -> str:
        value = median((row for row in rows if row["minute"] == minute), column)
        return f"{value:.0f}" if column in ("rows", "deleted", "lost") and value is not None else shown(value)

    columns = [column for column in COLUMNS if column not in ("repeat", "nodes", "minute", "load")]
    minutes = dict.fromkeys(row["minute"] for row in rows)
    return table(HEADINGS, ([minute, *(cell(minute, column) for column in columns)] for minute in minutes))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hour", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0, help="in which an hour passes")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    choice = parser.parse_args(argv)
    prefer(os.getpid())
    with Sheet(choice.results, "hour", COLUMNS) as sheet:
        for repeat in range(choice.repeat):
            with Head(choice.nodes) as head:
                head.warm_up()
                of, least = head.start_jobs(choice.jobs)
                head.await_running(least)
                time.sleep(SETTLE_S)
                Hour(sheet, head, choice.seconds, repeat).run()
    command = f"python -m benchmarks.hour --nodes {choice.nodes} --jobs {choice.jobs} --seconds {choice.seconds:g}"
    write_page(
        sheet,
        title="An hour of the head",
        says=f"What {choice.nodes} simulated nodes, {of} with jobs, report in an hour, in {choice.seconds:g} s. "
        "Medians. Samples in excess of these seconds have times from 150 minutes ago on, so that a part is older than "
        "the two hours for which they are kept as measured. *Store behind*: in their time; what it does not have yet "
        "counts as deleted. "
        f"The last row is {REST_S:g} s after the end. *Nodes*: the process "
        "that simulates them. *Other files*: logs, metrics and the store of jobs.",
        body=render(read_rows(sheet.path)),
        command=f"{command} --repeat {choice.repeat}",
    )


if __name__ == "__main__":
    main()
