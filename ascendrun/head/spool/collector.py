"""The head's copy of the nodes' files: exact bytes, once, by (file, generation, offset)."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ascendrun.head.state.state_dir import make_spool_dir
from ascendrun.node.layout import PULLED_FILE
from ascendrun.node.records import parse_events

KEEP_BYTES = 16 << 30
"""What a node may keep of one attempt's logs; below that nothing is deleted there."""
PRUNE_EVERY_S = 60.0
LOG_FILE = re.compile(r"^rank-\d+\.(?:out|err)$")


class SpoolGapError(Exception):
    """The data begins behind the end of our copy: follow again from `offsets()`."""


class NodeSpool:
    """The copy of one node's files of one attempt. The files' own sizes say how far it is: nothing else to keep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._events_read = 0
        self._synced: dict[tuple[str, str], int] = {}
        self._writing = threading.Lock()  # a connection that is given up may still speak while the next one does

    def offsets(self) -> dict[str, dict[str, int]]:
        """{file: {generation: bytes that are here}}, as the agent's `follow` wants it."""
        offsets: dict[str, dict[str, int]] = {}
        if self.folder.is_dir():
            for entry in os.scandir(self.folder):
                match = PULLED_FILE.match(entry.name)
                if match:
                    offsets.setdefault(match.group(1), {})[match.group(2)] = entry.stat().st_size
        return offsets

    def write(self, file: str, generation: int, offset: int, data: bytes) -> None:
        """Appends what is new in `data`, which stands at `offset` of the node's file.

        Bytes that are here already are not written again. Raises SpoolGapError when some between are missing,
        ValueError
        when `file` is no name that a node may use, OSError when the head's disk is full.
        """
        name = f"{file}.{generation}"
        if not PULLED_FILE.match(name):
            raise ValueError(f"a node sent a file named {name!r}")
        with self._writing:
            self._append(name, offset, data)

    def _append(self, name: str, offset: int, data: bytes) -> None:
        if not self.folder.is_dir():
            make_spool_dir(self.folder)
        fd = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(fd).st_size
            if offset > size:
                raise SpoolGapError(f"{name}: have {size} bytes, got {offset}")
            rest = memoryview(data)[size - offset :]
            while rest:
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)

    def new_events(self) -> Sequence[Mapping[str, Any]]:
        """The complete lines of the node's `events` that were not returned before, in order.

        A torn line (a power cut, a full disk) is passed over, as the node itself does.
        """
        path = self.folder / "events.0"
        if not path.exists():
            return []
        with open(path, "rb") as file:
            file.seek(self._events_read)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._events_read += end
        return parse_events(data[:end])

    def has_closed_logs(self) -> bool:
        """Whether one of the ranks' logs is here in more than one generation."""
        return any(LOG_FILE.match(file) and len(generations) > 1 for file, generations in self.offsets().items())

    def safe_logs(self) -> dict[str, dict[str, int]]:
        """{file: {generation: bytes}} of the ranks' logs and their times, as far as they are on our disk for good.

        The newest generation that is here of a file may still grow and is left out. Raises OSError.
        """
        safe: dict[str, dict[str, int]] = {}
        for file, generations in self.offsets().items():
            if not LOG_FILE.match(file[: -len(".times")] if file.endswith(".times") else file):
                continue
            newest = max(int(generation) for generation in generations)
            for generation, size in generations.items():
                if int(generation) < newest:
                    if self._synced.get((file, generation)) != size:
                        sync_file(self.folder / f"{file}.{generation}")
                        self._synced[(file, generation)] = size
                    safe.setdefault(file, {})[generation] = size
        return safe

    def differs_from(self, sizes: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
        """The files of the node that are not whole here, given the sizes that they have there."""
        have = self.offsets()
        return tuple(
            f"{file}.{generation}"
            for file, generations in sizes.items()
            for generation, size in generations.items()
            if size and have.get(file, {}).get(generation, 0) < size
        )


class LogPruner:
    """Of one attempt: has nodes delete closed log files that are stored here, so that they do not fill a node's disk.

    `prune(host, have)` gets how much of which file is stored (see NodeSpool.safe_logs); called in a thread, since only
    what is on this disk is safe and syncing may take long.
    """

    def __init__(self, prune: Callable[[str, Mapping[str, Mapping[str, int]]], None]) -> None:
        self._prune = prune
        self._due_mono = time.monotonic() + PRUNE_EVERY_S
        self._working = threading.Lock()

    def tick(self, spools: Iterable[tuple[str, NodeSpool]]) -> None:
        """Call periodically with the spools of the hosts that are connected."""
        now = time.monotonic()
        if now < self._due_mono:
            return
        self._due_mono = now + PRUNE_EVERY_S
        with_more = [(host, spool) for host, spool in spools if spool.has_closed_logs()]
        if with_more:
            threading.Thread(target=self._work, args=(with_more,), daemon=True, name="prune").start()

    def _work(self, spools: list[tuple[str, NodeSpool]]) -> None:
        if not self._working.acquire(blocking=False):
            return
        try:
            for host, spool in spools:
                try:
                    have = spool.safe_logs()
                except OSError:  # our disk is full or dying: then nothing is safe here
                    continue
                self._prune(host, have)
        finally:
            self._working.release()


def sync_file(path: Path) -> None:
    """Until the disk has it; a file that is not there needs nothing. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
