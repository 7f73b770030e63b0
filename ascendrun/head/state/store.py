"""Jobs, their events, machines and notifications in the file of a state directory."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.core.events import Event
from ascendrun.head.state.job_table import EventTable, JobTable, add_events
from ascendrun.head.state.notice_queue import NoticeQueue
from ascendrun.head.state.store_file import StoreFile
from ascendrun.text import to_json

if TYPE_CHECKING:
    from ascendrun.core.machines import Machine, MachineRecord


class MachineTable:
    """The machines of a store. `jobs`: some may hold machines."""

    def __init__(self, file: StoreFile, jobs: JobTable) -> None:
        self._file, self._jobs = file, jobs

    def all(self) -> tuple[MachineRecord, ...]:
        """Return the machines that jobs have used."""
        rows = self._file.query("SELECT record FROM machines ORDER BY key")
        if not rows:
            return ()
        from ascendrun.core.dataclass import load_dataclass
        from ascendrun.core.machines import MachineRecord

        with self._file.raising_damaged():
            return tuple(load_dataclass(MachineRecord, json.loads(row[0])) for row in rows)

    def save(self, records: Sequence[MachineRecord], events: Sequence[Event] = ()) -> None:
        """Write machines, and events that belong to no job, in one transaction."""
        with self._file.writing() as db:
            rows = [(one.key, json.dumps(to_json(one))) for one in records]
            db.executemany("INSERT OR REPLACE INTO machines VALUES (?, ?)", rows)
            add_events(db, "", events)

    def held(self) -> tuple[Machine, ...]:
        """Return the machines that no job may use now."""
        jobs = self._jobs.unconfirmed()
        with (
            self._file.raising_damaged()
        ):  # without the classes of the records: most commands show that nothing is held
            has_found = any(json.loads(row[0]).get("found") for row in self._file.query("SELECT record FROM machines"))
        if not jobs and not has_found:
            return ()
        records = self.all()
        from ascendrun.core.hosts import load_hosts
        from ascendrun.core.machines import held_machines

        return held_machines([(stored.job, load_hosts(stored.hosts)) for stored in jobs], records)

    def remove_unreadable(self) -> None:
        """Remove machines that cannot be read, within a transaction of the caller."""
        from ascendrun.core.dataclass import load_dataclass
        from ascendrun.core.machines import MachineRecord

        self._file.remove_unreadable(
            "machines", ("key", "record"), lambda row: load_dataclass(MachineRecord, json.loads(row[0]))
        )


class Store(StoreFile):
    """The tables of the file, by subject, over one connection."""

    def __init__(self, connection: sqlite3.Connection, path: Path, token: str | None = None) -> None:
        super().__init__(connection, path, token)
        self.jobs = JobTable(self)
        self.events = EventTable(self)
        self.machines = MachineTable(self, self.jobs)
        self.notices = NoticeQueue(self)
