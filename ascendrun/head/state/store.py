"""Jobs, their events, machines and notifications in the file of a state directory."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from ascendrun.core.events import Event
from ascendrun.head.state.job_table import EventTable, JobTable, add_events
from ascendrun.head.state.notice_queue import NoticeQueue
from ascendrun.head.state.store_file import StoreFile
from ascendrun.node.files import write_all_json
from ascendrun.text import to_json

if TYPE_CHECKING:
    from ascendrun.core.machines import Machine, MachineRecord


MACHINES_FOLDER = "machines"


class MachineTable:
    """The machines of a store, each with a file of its own, from which its row is rebuilt. `jobs`: some may hold
    machines."""

    def __init__(self, file: StoreFile, jobs: JobTable) -> None:
        self._file, self._jobs = file, jobs
        self._folder = file.path.parent / MACHINES_FOLDER

    @property
    def has_files(self) -> bool:
        """Return whether any machine has a file; a state directory of an earlier release has none."""
        return self._folder.is_dir()

    def all(self) -> tuple[MachineRecord, ...]:
        """Return the machines that jobs have used."""
        rows = self._file.query("SELECT record FROM machines ORDER BY key")
        if not rows:
            return ()
        from ascendrun.core.dataclass import load_dataclass
        from ascendrun.core.machines import MachineRecord

        with self._file.raising_damaged():
            return tuple(load_dataclass(MachineRecord, json.loads(row[0])) for row in rows)

    def save(self, records: Sequence[MachineRecord], events: Sequence[Event] = (), gone: Collection[str] = ()) -> None:
        """Write machines, and events that belong to no job, in one transaction; their files come first. `gone`: keys of
        machines that are removed."""
        with suppress(OSError):  # without space the older ones remain
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_all_json({str(self._folder / quote(one.key, safe="")): to_json(one) for one in records})
            for key in gone:
                (self._folder / quote(key, safe="")).unlink(missing_ok=True)
            for key in (*(one.key for one in records), *gone):
                self._file.on_change(self._folder / quote(key, safe=""))
        with self._file.writing() as db:
            rows = [(one.key, json.dumps(to_json(one))) for one in records]
            db.executemany("INSERT OR REPLACE INTO machines VALUES (?, ?)", rows)
            db.executemany("DELETE FROM machines WHERE key = ?", [(key,) for key in gone])
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

    def restore(self, db: sqlite3.Connection) -> list[str]:
        """Rebuild rows that are missing, damaged or older than their files, within a transaction of the caller.

        Return the names of the machines that have neither a row nor a file that can be read.
        """
        rows = {str(key): str(record) for key, record in self._file.raw_rows("machines", ("key", "record"))}
        paths = sorted(self._folder.iterdir()) if self.has_files else ()
        files = {unquote(path.name): path.read_text("utf-8", "replace") for path in paths}
        lost: list[str] = []
        for key in sorted({*rows, *files}):
            known = [one for one in (_record_in(key, files.get(key)), _record_in(key, rows.get(key))) if one]
            if known:
                newest = max(known, key=lambda one: one.heard_at_s)
                db.execute("INSERT OR REPLACE INTO machines VALUES (?, ?)", (key, json.dumps(to_json(newest))))
                continue
            db.execute("DELETE FROM machines WHERE key = ?", (key,))
            named = re.search(r'"name": "([^"]+)"', files.get(key, "") + rows.get(key, ""))
            lost.append(named[1] if named else key)
        return lost


def _record_in(key: str, text: str | None) -> MachineRecord | None:
    """Return the record of this machine; None: it is missing or damaged."""
    from ascendrun.core.dataclass import load_dataclass
    from ascendrun.core.machines import MachineRecord

    try:
        record = load_dataclass(MachineRecord, json.loads(text or ""))
        return record if record.key == key else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


class Store(StoreFile):
    """The tables of the file, by subject, over one connection."""

    def __init__(self, connection: sqlite3.Connection, path: Path, token: str | None = None) -> None:
        super().__init__(connection, path, token)
        self.jobs = JobTable(self)
        self.events = EventTable(self)
        self.machines = MachineTable(self, self.jobs)
        self.notices = NoticeQueue(self)
