"""Errors of the system in a supervisor's steps, which end neither it nor a rank."""

from __future__ import annotations

import errno
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from ascendrun.node.records import Records


class IoErrors:
    """Each kind of error is recorded once, and at the end how often."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._found: dict[tuple[str, str], list[int]] = {}

    def guard(self, step: str, call: Callable[..., Any], *arguments: Any) -> None:
        """Call, and record an OSError: the other steps continue."""
        try:
            call(*arguments)
        except OSError as error:
            self.note(step, error)

    def note(self, step: str, error: OSError) -> None:
        key = step, errno.errorcode.get(error.errno or 0, str(error.errno))
        entry = self._found.setdefault(key, [0, time.time_ns()])
        entry[0] += 1
        if entry[0] == 1:
            self._record(key)

    def finish(self) -> None:
        for key, (count, _) in self._found.items():
            if count > 1:
                self._record(key)

    def _record(self, key: tuple[str, str]) -> None:
        count, since_ns = self._found[key]
        self._records.add("io_error", step=key[0], errno=key[1], count=count, since_ns=since_ns)
