"""Device memory in use on idle machines: memory that a job did not release closes a machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from ascendrun.core.hosts import Host
from ascendrun.core.machines import TAKEN_S
from ascendrun.head.loop.machine.closures import Closures
from ascendrun.head.loop.machine.records import MachineRecords
from ascendrun.text import Text


class IdleMemory:
    """The memory that is in use on the devices of machines before a start."""

    def __init__(self, records: MachineRecords, closures: Closures) -> None:
        self._records, self._closures = records, closures

    def idle(self, host: Host) -> Mapping[int, int]:
        """Return the least MB that were in use on each device of the machine before a start."""
        found = [record.idle_memory for record in self._records.at(host)]
        return {int(device): mb for memory in found for device, mb in memory.items()}

    def note(self, host: Host, memory: Mapping[int, int], taken: Text | None) -> None:
        """Note the MB that are in use on each device before a start. `taken`: memory that was not released, None: all
        was; after TAKEN_S the machine goes into quarantine."""
        if not memory:
            return
        now_s = time.time()
        for record in self._records.at(host):
            known = record.idle_memory
            noted = replace(record, taken_since_s=record.taken_since_s or now_s)
            if taken is None:
                least = {str(device): min(mb, known.get(str(device), mb)) for device, mb in memory.items()}
                noted = replace(record, idle_memory={**known, **least}, taken_since_s=None)
            if noted != record:
                self._records.keep(noted)
            if noted.taken_since_s is not None and now_s - noted.taken_since_s > TAKEN_S and taken is not None:
                self._closures.quarantine(host, taken)
