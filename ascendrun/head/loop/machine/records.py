"""The records of machines, and which of them are not stored yet."""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import replace

from ascendrun.core.events import Event
from ascendrun.core.hosts import Host
from ascendrun.core.machines import ADDRESS_KEY, MachineRecord, address_of, machine_id
from ascendrun.head.agents.connections import Connections, dialled
from ascendrun.head.protocol.remote import AgentConnection
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.head.state.store import MachineTable


class MachineRecords:
    """The known machines. `version` changes with every record."""

    def __init__(self, table: MachineTable, links: Connections) -> None:
        self._table, self._links = table, links
        self._records = {record.key: record for record in table.all()}
        self._unsaved: set[str] = set()
        self._events: list[Event] = []
        self.version = 0

    def __len__(self) -> int:
        return len(self._records)

    def all(self) -> tuple[MachineRecord, ...]:
        """Return all records, those of closed machines too."""
        return tuple(self._records.values())

    def get(self, key: str) -> MachineRecord | None:
        """Return the record with this key, None: there is none."""
        return self._records.get(key)

    @property
    def has_found(self) -> bool:
        """Whether any machine runs attempts that no job explains."""
        return any(record.found for record in self._records.values())

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved or self._events)

    def save(self) -> None:
        """Store what changed. Raises StoreUnusableError: it remains to be stored."""
        if self.has_unsaved:
            self._table.save([self._records[key] for key in self._unsaved], self._events)
            self._unsaved.clear()
            self._events.clear()

    def keep_all(self) -> None:
        """Store every machine with the next `save`: the store may have been rebuilt."""
        self._unsaved |= set(self._records)

    def keep(self, record: MachineRecord) -> None:
        """Replace a record, heard now; it is stored by `save`."""
        self._records[record.key] = replace(record, heard_at_s=time.time())
        self.version += 1
        self._unsaved.add(record.key)

    def forget_found(self, record: MachineRecord, tags: Set[str]) -> None:
        """Remove found attempts from a record."""
        if not tags.isdisjoint(record.found):
            self.keep(replace(record, found={tag: at_s for tag, at_s in record.found.items() if tag not in tags}))

    def announce(self, event: Event) -> None:
        """Store an event that belongs to no job, with the next tick."""
        self._events.append(event)

    def of(self, link: AgentConnection) -> MachineRecord:
        """Return the record of the machine, a new one if it has none, with the address of this connection.

        The key is "" if its agent is of a release that reports none.
        """
        key = machine_id(link.host, link.info.machine_key) or ""
        record = self._records.get(key) or MachineRecord(key, ())
        return (
            record if address_of(link.host) in record.addresses else replace(record, hosts=(*record.hosts, link.host))
        )

    def at(self, host: Host) -> tuple[MachineRecord, ...]:
        """Return the records of a host; a new one, known by its address, if there is none."""
        link = next((link for link in self._links if dialled(link.host) == dialled(host) and link.is_up), None)
        key = None if link is None else machine_id(host, link.info.machine_key)
        address = address_of(host)
        found = [one for one in self._records.values() if address in one.addresses or one.key == key]
        return tuple(found) or (MachineRecord(key or ADDRESS_KEY + address, (host,)),)

    def places_of(self, host: Host) -> set[str]:
        """Return the keys and addresses of the machine of a host."""
        return {place for record in self.at(host) for place in (record.key, *record.addresses)}

    @contextmanager
    def reverting(self) -> Iterator[None]:
        """Forget the changes of the block if they cannot be stored."""
        before = dict(self._records), set(self._unsaved), list(self._events)
        try:
            yield
        except StoreUnusableError:
            self._records, self._unsaved, self._events = before
            raise
