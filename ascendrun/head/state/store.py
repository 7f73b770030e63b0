"""Jobs, their events, machines and notifications in the file of a state directory."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ascendrun.head.state.event_table import EventTable
from ascendrun.head.state.job_table import JobTable
from ascendrun.head.state.machine_table import MachineTable
from ascendrun.head.state.notice_queue import NoticeQueue
from ascendrun.head.state.store_file import StoreFile


class Store(StoreFile):
    """The tables of the file, by subject, over one connection."""

    def __init__(self, connection: sqlite3.Connection, path: Path, token: str | None = None) -> None:
        super().__init__(connection, path, token)
        self.jobs = JobTable(self)
        self.events = EventTable(self)
        self.machines = MachineTable(self, self.jobs)
        self.notices = NoticeQueue(self)
