"""Transfer of growing files of the attempts: every byte once, from the head's offset, joined into few packets."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from ascendrun.node import layout
from ascendrun.node.failpoint import failpoint
from ascendrun.node.op_errors import OperationError
from ascendrun.node.records import EVENTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Tuple

    Offsets = Dict[Tuple[str, int], int]

CHUNK_BYTES = 1 << 16
ROUND_CHUNKS = 4
"""Chunks that one file may send before the others have their turn."""
AHEAD_BYTES = 1 << 20
"""With more than this waiting, events overtake logs."""
BATCH_S = 0.1
FIRST_POLL_S, FIRST_S = 0.01, 10.0
"""Interval until an attempt has output, for at most FIRST_S: its user waits for the first line."""
POLL_S = 0.04
"""Seconds; also the most by which hosts differ in sending a line that their ranks print at the same time."""
LOST_CHECK_S = 1.0
RETRY_S = 0.5
"""Seconds after an error of the file system until it is read again."""


def file_sizes(root: str, tag: str) -> dict[str, dict[str, int]]:
    """Return {file: {generation: bytes}} of every pulled file of the attempt; empty when there is no such attempt."""
    sizes: dict[str, dict[str, int]] = {}
    for (file, generation), facts in stream_files(layout.streams_dir(layout.attempt_dir(root, tag))).items():
        sizes.setdefault(file, {})[str(generation)] = facts.st_size
    return sizes


def stream_files(folder: str) -> dict[tuple[str, int], os.stat_result]:
    """Return the facts of every pulled file by (file, generation); {}: there is no such directory. Raises OSError."""
    found = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                match = layout.PULLED_FILE.match(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        found[match.group(1), int(match.group(2))] = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return {}
    return found


class Follow:
    """One followed attempt. Has no thread: `poll` does one round.

    A file system that fails holds bytes back, it loses none: what cannot be read is reported once and read later.
    """

    def __init__(
        self,
        root: str,
        tag: str,
        offsets: dict[str, dict[str, int]],
        send: Callable[[dict[str, Any], bytes], None],
        limits: dict[str, int],
        windows: dict[str, Any] | None = None,
    ) -> None:
        """`windows`: of a file, [bytes, generation, offset]: no more is sent beyond this place, until it moves."""
        self._root = root
        self._tag = tag
        self._send = send
        self._attempt_dir = layout.attempt_dir(root, tag)
        self._streams_dir: str | None = None
        self._sent: Offsets = {
            (file, int(generation)): int(offset)
            for file, generations in offsets.items()
            for generation, offset in generations.items()
        }
        self._events = {generation for file, generation in self._sent if file == EVENTS} or {0}
        self._limits = limits
        self._limited: set[tuple[str, int]] = set()
        self._windows = {file: (int(most), int(at), int(end)) for file, (most, at, end) in (windows or {}).items()}
        self._unreadable: set[tuple[str, int]] = set()
        self._first_until_s = time.monotonic() + FIRST_S
        self._last_batch_s = 0.0
        self._retry_s = 0.0
        self._is_held = False

    def poll_s(self, now_s: float) -> float:
        """Return the interval of its polls."""
        return FIRST_POLL_S if not self._last_batch_s and now_s < self._first_until_s else POLL_S

    def acknowledge(self, file: str, generation: int, offset: int) -> None:
        """Move the place from which the window of a file counts; from any thread."""
        if file in self._windows:
            self._windows[file] = self._windows[file][0], generation, offset

    @property
    def _folder(self) -> str:
        """Return the directory of the followed files; their place is final when the attempt is prepared."""
        if self._streams_dir is not None:
            return self._streams_dir
        folder = layout.streams_dir(self._attempt_dir)
        if os.path.exists(os.path.join(self._attempt_dir, layout.PREPARED)):
            self._streams_dir = folder
        return folder

    def poll(self, now_s: float) -> bool:
        """Send due data; True when there is more to send now.

        Output of a rank before an event is sent before that event, unless so much waits that the event would be late.
        """
        if now_s < self._retry_s:
            return False
        try:
            news = self._news()  # read first: anything logged before it is on disk when the other files are read
            found = self._grown()
        except OSError as error:
            self._retry_s = now_s + RETRY_S
            if not self._is_held:
                self._is_held = True
                self._tell("follow_held", (EVENTS, max(self._events)), error=str(error))
            return False
        self._is_held = False
        waiting_bytes = sum(size - self._sent.get(key, 0) for key, size in found)
        has_logs = bool(found)
        is_new = any(key not in self._sent and key not in self._unreadable for key, _ in found)  # such as a first line
        is_due = is_new or any(size - self._sent.get(key, 0) >= CHUNK_BYTES for key, size in found)
        if news and waiting_bytes > AHEAD_BYTES:
            found = news + found
        elif news:
            found = found + news
        elif not is_due and now_s - self._last_batch_s < BATCH_S:
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
        """Return the known generations of events that have grown. Raises OSError."""
        found = []
        for generation in sorted(self._events):
            key = EVENTS, generation
            try:
                size = os.lstat(os.path.join(self._folder, "%s.%d" % key)).st_size
            except FileNotFoundError:
                continue
            found += self._compare(key, size)
        return found

    def _grown(self) -> list[tuple[tuple[str, int], int]]:
        """Return the other files that have new data, by name and generation. Raises OSError."""
        found = []
        for key, facts in stream_files(self._folder).items():
            if key[0] == EVENTS:
                self._events.add(key[1])  # a new generation is read in the next round
            else:
                found += self._compare(key, facts.st_size)
        return self._within_windows(sorted(found))

    def _within_windows(self, found: list[tuple[tuple[str, int], int]]) -> list[tuple[tuple[str, int], int]]:
        """Return what may be sent of it now: of a file with a window as much as that has left, the oldest first."""
        left = {file: self._left(file) for file in self._windows.keys() & {key[0] for key, _ in found}}
        kept = []
        for key, size in found:
            sent = self._sent.get(key, 0)
            if key[0] in left:
                size = min(size, sent + left[key[0]])
                left[key[0]] -= size - sent
            if size > sent:
                kept.append((key, size))
        return kept

    def _left(self, file: str) -> int:
        most, at, end = self._windows[file]
        beyond = [
            sent - (end if generation == at else 0)
            for (name, generation), sent in self._sent.items()
            if name == file and generation >= at
        ]
        return max(0, most - sum(beyond))

    def _compare(self, key: tuple[str, int], size: int) -> list[tuple[tuple[str, int], int]]:
        """Return the file if it has new data; report it if it was truncated, and, once, if only its start is sent."""
        if size < self._sent.get(key, 0):  # sent bytes are no longer there: continue from its new end
            self._tell("truncated", key, size=size, sent=self._sent[key])
            self._sent[key] = size
        limit = self._limits.get(key[0].rpartition(".")[2])
        if limit is not None and size > limit:
            if limit and key not in self._limited:  # a limit of 0 is the head's own pause
                self._limited.add(key)
                self._tell("follow_limited", key, size=size, limit=limit)
            size = limit
        return [(key, size)] if size > self._sent.get(key, 0) else []

    def _send_file(self, key: tuple[str, int], size: int) -> bool:
        """Send a part of the file; True when there is more of it to send."""
        fd = -1
        try:
            path = os.path.join(self._folder, "%s.%d" % key)
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            for _ in range(ROUND_CHUNKS):
                offset = self._sent.get(key, 0)
                chunk = os.pread(fd, min(CHUNK_BYTES, size - offset), offset)
                if not chunk:
                    return False
                self._tell("data", key, chunk, offset=offset)
                self._sent[key] = offset + len(chunk)
                failpoint("run.after_data")
        except FileNotFoundError:
            return False  # released, or the attempt was forgotten
        except OSError as error:
            if key not in self._unreadable:  # its bytes, and those behind them, are sent when it can be read
                self._unreadable.add(key)
                self._tell("follow_held", key, error=str(error))
            return True
        finally:
            if fd >= 0:
                with contextlib.suppress(OSError):  # closed in any case
                    os.close(fd)
        self._unreadable.discard(key)
        return self._sent[key] < size

    def _tell(self, event: str, key: tuple[str, int], body: bytes = b"", **fields: Any) -> None:
        self._send({"event": event, "tag": self._tag, "file": key[0], "generation": key[1], **fields}, body)


class Follower:
    """Thread that polls all followed attempts. Another calls `note_lost(tag)` once a second per attempt: it reads the
    attempt's directory, whose server may hang while the output is on a local disk."""

    def __init__(
        self, root: str, *, send: Callable[[dict[str, Any], bytes], None], note_lost: Callable[[str], Any]
    ) -> None:
        self._root = root
        self._send = send
        self._note_lost = note_lost
        self._follows: dict[str, Follow] = {}
        self._lock = threading.Lock()
        self._changed, self._followed = threading.Event(), threading.Event()
        self._has_threads = False

    def follow(
        self, tag: str, offsets: dict[str, dict[str, int]], limits: dict[str, int], windows: dict[str, Any]
    ) -> None:
        """Follow an attempt, replacing an earlier follow of the tag. Raises ValueError on an invalid tag.

        `limits`: bytes of one file that are sent, by its kind (the last word of its name); other kinds have none.
        `windows`: see Follow."""
        entry = Follow(self._root, tag, offsets, self._send, limits, windows)
        with self._lock:
            self._follows[tag] = entry
            if not self._has_threads:
                self._has_threads = True
                threading.Thread(target=self._run, daemon=True, name="follower").start()
                threading.Thread(target=self._check_lost, daemon=True, name="lost").start()
        self._changed.set()
        self._followed.set()

    def acknowledge(self, tag: str, file: str, generation: int, offset: int) -> None:
        """Move the window of a followed file; nothing if it is not followed."""
        with self._lock:
            entry = self._follows.get(tag)
        if entry is not None:
            entry.acknowledge(file, generation, offset)
            self._changed.set()

    def is_busy(self) -> bool:
        return bool(self._follows)

    def unfollow(self, tag: str) -> None:
        with self._lock:
            self._follows.pop(tag, None)

    def _run(self) -> None:
        while True:
            with self._lock:
                follows = list(self._follows.values())
            if not follows:
                self._changed.wait()
                self._changed.clear()
                continue
            now = time.monotonic()
            more = False
            for follow in follows:
                more = follow.poll(now) or more
            if not more:
                self._changed.wait(min(follow.poll_s(now) for follow in follows))
                self._changed.clear()

    def _check_lost(self) -> None:
        pause = threading.Event()
        while True:
            self._followed.wait()
            with self._lock:
                tags = list(self._follows)
                if not tags:
                    self._followed.clear()
            for tag in tags:
                with contextlib.suppress(OSError, OperationError):  # recorded when the disk can be written
                    self._note_lost(tag)
            pause.wait(LOST_CHECK_S)
