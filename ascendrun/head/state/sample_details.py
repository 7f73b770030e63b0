"""What the tools said of each device beyond its figures, the newest alone, in the file of samples."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Callable

from ascendrun.core.samples import DeviceDetail
from ascendrun.head.state.migrations import version_of
from ascendrun.head.state.sample_file import FILE_NAME, connect, raising_unusable

SINCE_VERSION = 2
"""A file that no controller of this release has opened yet has no such table."""


def add_details(
    db: sqlite3.Connection, details: Iterable[DeviceDetail], thing_of: Callable[[DeviceDetail], int]
) -> None:
    """Within the transaction that keeps the samples; an older detail never replaces a newer one."""
    db.executemany(
        "INSERT INTO details VALUES (?, ?, ?) ON CONFLICT (thing) DO UPDATE SET at_s = excluded.at_s,"
        " text = excluded.text WHERE excluded.at_s >= at_s",
        [
            (thing_of(one), one.at_s, json.dumps({"bus": one.bus_id, "processes": one.processes, "values": one.values}))
            for one in details
        ],
    )


def read_details(state_dir: Path, *, since_s: float) -> tuple[DeviceDetail, ...]:
    """Those that were heard since then. Raises StoreUnusableError."""
    path = state_dir / FILE_NAME
    if not path.exists():
        return ()
    with raising_unusable(path):
        connection = connect(path)
        try:
            if version_of(connection) < SINCE_VERSION:
                return ()
            rows = connection.execute(
                "SELECT details.at_s, host, device, family, text FROM details JOIN things ON things.id = thing"
                " WHERE details.at_s >= ? ORDER BY host, device",
                (since_s,),
            ).fetchall()
        finally:
            connection.close()
    return tuple(_detail(*row) for row in rows)


def _detail(at_s: float, host: str, device: int, family: str, text: str) -> DeviceDetail:
    said = json.loads(text)
    return DeviceDetail(
        at_s,
        host,
        device,
        family,
        bus_id=said["bus"],
        values=said["values"],
        processes=tuple((int(pid), memory_mb) for pid, memory_mb in said["processes"]),
    )
