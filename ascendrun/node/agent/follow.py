"""Transfer of growing files of the attempts: every byte once, from the head's offset, joined into few packets."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from ascendrun.node import layout
from ascendrun.node.failpoint import failpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Tuple

    Offsets = Dict[Tuple[str, int], int]

CHUNK_BYTES = 1 << 16
ROUND_CHUNKS = 4
"""Chunks that one file may send before the others have their turn."""
AHEAD_BYTES = 1 << 20
"""With more than this waiting, events overtake logs."""
EVENTS = ("events", 0)
BATCH_S = 0.1
POLL_S = 0.04
"""Seconds; also the most by which hosts differ in sending a line that their ranks print at the same time."""
LOST_CHECK_S = 1.0


def file_sizes(root: str, tag: str) -> dict[str, dict[str, int]]:
    """Return {file: {generation: bytes}} of every pulled file of the attempt; empty when there is no such attempt."""
    sizes: dict[str, dict[str, int]] = {}
    try:
        with os.scandir(layout.attempt_dir(root, tag)) as entries:
            for entry in entries:
                match = layout.PULLED_FILE.match(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    size = entry.stat(follow_symlinks=False).st_size
                    sizes.setdefault(match.group(1), {})[match.group(2)] = size
    except FileNotFoundError:
        return {}
    return sizes


class Follow:
    """One followed attempt. Has no thread: `poll` does one round."""

    def __init__(
        self, root: str, tag: str, offsets: dict[str, dict[str, int]], send: Callable[[dict[str, Any], bytes], None]
    ) -> None:
        self._root = root
        self._tag = tag
        self._send = send
        self._folder = layout.attempt_dir(root, tag)
        self._sent: Offsets = {
            (file, int(generation)): int(offset)
            for file, generations in offsets.items()
            for generation, offset in generations.items()
        }
        self._reported_truncated: set[tuple[str, int, int]] = set()
        self._unreadable: set[tuple[str, int]] = set()
        self._last_batch_s = 0.0

    def poll(self, now_s: float) -> bool:
        """Send due data; True when there is more to send now.

        Output of a rank before an event is sent before that event, unless so much waits that the event would be late.
        """
        news = self._news()  # read first: anything logged before it is on disk when the other files are read
        found = self._grown()
        waiting_bytes = sum(size - self._sent.get(key, 0) for key, size in found)
        has_logs = bool(found)
        full = any(size - self._sent.get(key, 0) >= CHUNK_BYTES for key, size in found)
        if news and waiting_bytes > AHEAD_BYTES:
            found = news + found
        elif news:
            found = found + news
        elif not full and now_s - self._last_batch_s < BATCH_S:
            return False
        more = False
        unfinished: set[str] = set()
        for key, size in found:
            if key[0] in unfinished:
                continue  # a generation is sent completely before the next: readers do not return to it
            if self._send_file(key, size):
                unfinished.add(key[0])
                more = more or key not in self._unreadable
        if has_logs:  # events do not count: a rank's first output follows directly after its start event
            self._last_batch_s = now_s
        return more

    def _news(self) -> list[tuple[tuple[str, int], int]]:
        """Return the events file, when it has grown."""
        try:
            size = os.lstat(os.path.join(self._folder, "%s.%d" % EVENTS)).st_size
        except FileNotFoundError:
            return []
        return [(EVENTS, size)] if size > self._sent.get(EVENTS, 0) else []

    def _grown(self) -> list[tuple[tuple[str, int], int]]:
        """Return the other files that have new data, by name and generation."""
        found = []
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    match = layout.PULLED_FILE.match(entry.name)
                    if not match or entry.name == "%s.%d" % EVENTS or not entry.is_file(follow_symlinks=False):
                        continue
                    key = (match.group(1), int(match.group(2)))
                    size = entry.stat(follow_symlinks=False).st_size
                    if size < self._sent.get(key, 0):
                        self._report_truncated(key, size)
                    if size > self._sent.get(key, 0):
                        found.append((key, size))
        except FileNotFoundError:
            return []
        return sorted(found)

    def _report_truncated(self, key: tuple[str, int], size: int) -> None:
        """Report a truncated file: sent bytes are no longer there; continue from its new end."""
        self._send(
            {
                "event": "truncated",
                "tag": self._tag,
                "file": key[0],
                "generation": key[1],
                "size": size,
                "sent": self._sent[key],
            },
            b"",
        )
        self._sent[key] = size

    def _send_file(self, key: tuple[str, int], size: int) -> bool:
        """Send a part of the file; True when there is more of it to send."""
        path = os.path.join(self._folder, "%s.%d" % key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False  # released, or the attempt was forgotten
        except OSError as error:
            self._report_unreadable(key, error)
            return True
        try:
            for _ in range(ROUND_CHUNKS):
                offset = self._sent.get(key, 0)
                chunk = os.pread(fd, min(CHUNK_BYTES, size - offset), offset)
                if not chunk:
                    return False
                self._send(
                    {"event": "data", "tag": self._tag, "file": key[0], "generation": key[1], "offset": offset}, chunk
                )
                self._sent[key] = offset + len(chunk)
                failpoint("run.after_data")
        finally:
            os.close(fd)
        self._unreadable.discard(key)
        return self._sent[key] < size

    def _report_unreadable(self, key: tuple[str, int], error: OSError) -> None:
        """Report, once, a file that cannot be opened now: its bytes, and those behind them, are sent when it can."""
        if key not in self._unreadable:
            self._unreadable.add(key)
            self._send(
                {"event": "follow_held", "tag": self._tag, "file": key[0], "generation": key[1], "error": str(error)},
                b"",
            )


class Follower:
    """Thread that polls all followed attempts. `note_lost(tag)` is called once a second per attempt."""

    def __init__(
        self, root: str, *, send: Callable[[dict[str, Any], bytes], None], note_lost: Callable[[str], Any]
    ) -> None:
        self._root = root
        self._send = send
        self._note_lost = note_lost
        self._follows: dict[str, Follow] = {}
        self._lost_check_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: list[threading.Thread] = []

    def follow(self, tag: str, offsets: dict[str, dict[str, int]]) -> None:
        """Follow an attempt, replacing an earlier follow of the tag. Raises ValueError on an invalid tag."""
        entry = Follow(self._root, tag, offsets, self._send)
        with self._lock:
            self._follows[tag] = entry
            self._lost_check_s[tag] = 0.0
            if not self._thread:
                self._thread.append(threading.Thread(target=self._run, daemon=True, name="follower"))
                self._thread[0].start()
        self._changed.set()

    @property
    def is_busy(self) -> bool:
        return bool(self._follows)

    def unfollow(self, tag: str) -> None:
        with self._lock:
            self._follows.pop(tag, None)

    def _run(self) -> None:
        while True:
            with self._lock:
                follows = list(self._follows.items())
            if not follows:
                self._changed.wait()
                self._changed.clear()
                continue
            now = time.monotonic()
            more = False
            for tag, follow in follows:
                more = self._poll_one(tag, follow, now) or more
            if not more:
                self._changed.wait(POLL_S)
                self._changed.clear()

    def _poll_one(self, tag: str, follow: Follow, now: float) -> bool:
        try:
            if now - self._lost_check_s.get(tag, now) >= LOST_CHECK_S:
                self._lost_check_s[tag] = now
                with contextlib.suppress(OSError):  # a full disk: recorded when there is space
                    self._note_lost(tag)
            return follow.poll(now)
        except OSError as error:
            # One attempt's files may be unreadable (a dead disk); the others continue, and the head gets a report.
            self._send({"event": "follow_failed", "tag": tag, "error": str(error)}, b"")
            self.unfollow(tag)
            return False
