"""The numbered messages to a standby, in the order in which their files were read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.standby_messages import StandbyChange
from ascendrun.head.spool.standby_copy import PART_BYTES, is_copied, read_parts

WINDOW = 8
"""Parts of large files on their way: a record waits for no more than these."""


class StandbyStream:
    """Use from any thread. One standby is connected at a time. `id` counts them; messages for an earlier one are not
    sent. `number`, `acknowledged`: the newest message, and the newest that is on the standby's disk; `reply_mono`: when
    that was learned."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._turn = threading.Condition()
        self.id = self.number = self.acknowledged = 0
        self.sent_mono = self.reply_mono = 0.0
        self._answer: Answer | None = None

    @property
    def is_open(self) -> bool:
        return self._answer is not None

    def begin(self, answer: Answer) -> int:
        """Send to this standby from now on; return its id."""
        with self._turn:
            self.id, self._answer = self.id + 1, answer
            self._turn.notify_all()
            return self.id

    def end(self) -> None:
        with self._turn:
            self._answer = None
            self._turn.notify_all()

    def skip(self) -> int:
        """Count a change that no standby gets, as one that connects gets everything; return its number."""
        with self._turn:
            self.number += 1
            return self.number

    def acknowledge(self, stream: int, number: int) -> bool:
        """Note what a standby has; return whether it is the one that is connected."""
        with self._turn:
            is_known = stream == self.id and number <= self.number
            if is_known:
                self.acknowledged, self.reply_mono = number, time.monotonic()
                self._turn.notify_all()
            return is_known

    def send(
        self, stream: int, paths: Sequence[str] = (), *, gone: Sequence[str] = (), is_stopped: bool = False
    ) -> int:
        """Send files as they are now, and which of them are missing; return the number of the last message."""
        with self._turn:
            files, body = list[tuple[str, int, bool]](), bytearray()
            gone = [*gone, *(path for path in paths if not (self._root / path).is_file())]
            for path, part, has_more in self._parts(paths):
                if len(body) + len(part) > PART_BYTES and files:
                    self._emit(stream, files, bytes(body), gone)
                    files, body, gone = [], bytearray(), ()
                files.append((path, len(part), has_more))
                body += part
            return self._emit(stream, files, bytes(body), gone, is_stopped)

    def send_large(self, stream: int, path: str) -> None:
        """Send a file that does not change; other messages may come between its parts. Raises OSError."""
        for part, has_more in read_parts(self._root, path):
            self.await_window(stream)
            self._emit(stream, [(path, len(part), has_more)], part)

    def await_window(self, stream: int) -> None:
        """Return when few messages are on their way, or the standby is not connected any more."""
        with self._turn:
            self._turn.wait_for(
                lambda: self.number - self.acknowledged < WINDOW or self._answer is None or stream != self.id
            )

    def _emit(
        self,
        stream: int,
        files: Sequence[tuple[str, int, bool]],
        body: bytes,
        gone: Sequence[str] = (),
        is_stopped: bool = False,
    ) -> int:
        with self._turn:
            if self._answer is not None and stream == self.id:
                self.number, self.sent_mono = self.number + 1, time.monotonic()
                change = StandbyChange(stream, self.number, tuple(files), tuple(gone), is_stopped)
                self._answer(change, body, is_stopped)
            return self.number

    def _parts(self, paths: Sequence[str]) -> Iterator[tuple[str, bytes, bool]]:
        """Yield the files that are copied, in parts: path, bytes, and whether more of the file follow."""
        for path in filter(is_copied, paths):
            try:
                for part, has_more in read_parts(self._root, path):
                    yield path, part, has_more
            except OSError:
                continue
