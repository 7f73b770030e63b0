"""The head's side of a standby: what the store is rebuilt from is copied there before anything is done about it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Callable, NamedTuple, Protocol

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError, ConflictError, UnreachableError
from ascendrun.core.events import Event
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.standby_messages import Acknowledge, Follow, StandbyChange
from ascendrun.head.spool.standby_copy import PART_BYTES, differing, files_of, is_copied, list_groups, read_parts
from ascendrun.head.ssh.host_keys import OWN_FILE
from ascendrun.head.state.job_table import add_events
from ascendrun.head.state.store import Store
from ascendrun.head.state.store_file import HEAD_FILE, stamp_of
from ascendrun.text import Text

ACKNOWLEDGED_S = 5.0
"""Seconds without an acknowledgement after which the standby is out of sync."""
BEAT_S = 1.0
WINDOW = 8
"""Parts of large files on their way: a record waits for no more than these."""
OPS = (Follow.OP, Acknowledge.OP)


class Voters(Protocol):
    """Where it is recorded whether the standby may take over. `done` is called in the controller's thread when a
    majority has recorded it."""

    def set_in_sync(self, in_sync: bool, done: Callable[[], None]) -> None: ...


@dataclass(frozen=True)
class StandbyStatus:
    """`host`: the standby that is connected, or was last; None: none was. `in_sync`: it has everything. `number`,
    `acknowledged`: the newest change, and the newest that it has."""

    host: str | None
    in_sync: bool
    number: int
    acknowledged: int


class _Held(NamedTuple):
    number: int
    since_mono: float
    call: Callable[[], None]


class Replica:
    """Use from the controller's thread. `post` runs a call there. Before `begin` there is no standby, nothing waits.

    While `_waits`, the voters may let the standby take over: what is to be done waits for its acknowledgement.
    """

    def __init__(
        self, store: Store, post: Callable[[Callable[[], None]], None], guard: Callable[[Callable[[], object]], object]
    ) -> None:
        self._store, self._root, self._post, self._guard = store, store.path.parent, post, guard
        self._voters: Voters | None = None
        self._waits = self._is_leaving = False
        self._in_sync = False
        self._sending = threading.Condition()  # numbers, and what is read from disk, in the order of the stream
        self._number = self._acknowledged = self._stream = 0
        self._answer: Answer | None = None
        self._host: str | None = None
        self._sent_mono = 0.0
        self._copied: int | None = None
        """The number with which the copy of this stream is complete; None: not yet known."""
        self._trees: set[str] = set()
        self._changed: dict[str, None] = {}
        self._held: deque[_Held] = deque()
        self._known_hosts: list[int] = []

    def begin(self, voters: Voters) -> None:
        """Wait for a standby from now on. The voters first record that none is in sync: nothing is known about it."""
        self._voters, self._waits, self._store.on_change = voters, True, self._note
        self.leave()

    @property
    def status(self) -> StandbyStatus:
        return StandbyStatus(self._host, self._in_sync, self._number, self._acknowledged)

    @property
    def is_waiting(self) -> bool:
        return bool(self._held or self._changed)

    def _note(self, path: Path) -> None:
        self._changed[path.relative_to(self._root).as_posix()] = None

    def after(self, call: Callable[[], None]) -> None:
        """Run `call` when all that is stored so far is on the standby too, in order; immediately if none is in sync."""
        if not self._waits:
            call()
            return
        self._held.append(_Held(self._number + bool(self._changed), time.monotonic(), call))
        self._release()

    def after_trees(self, hashes: Collection[str], call: Callable[[], None]) -> None:
        """Run `call` when the packed directories of a submission have been sent."""
        if self._answer is None or not self._waits or self._trees.issuperset(hashes):
            call()
        else:
            _in_thread(self._send_trees, self._stream, set(hashes) - self._trees, partial(self._post, call))

    def flush(self) -> None:
        """Send what has changed as one message; called once for each turn of the loop."""
        changed, self._changed = self._changed, {}
        if changed and self._answer is not None:
            self._send(self._stream, tuple(changed))
        elif changed and self._waits:
            self._number += 1  # nobody gets it: a standby that connects gets everything
        if changed and self._waits:
            self._held.append(_Held(self._number, time.monotonic(), lambda: None))
        self._release()

    def tick(self) -> None:
        """Handle time: a standby that does not acknowledge, and one that expects to receive something."""
        now = time.monotonic()
        known_hosts, before = stamp_of(self._root / OWN_FILE), self._known_hosts
        if known_hosts != before:  # commands write it
            self._known_hosts = known_hosts
            self._note(self._root / OWN_FILE)
        if self._answer is not None and now - self._sent_mono > BEAT_S:
            self._send(self._stream)
        if self._waits and self._held and now - self._held[0].since_mono > ACKNOWLEDGED_S:
            self.leave()

    def leave(self) -> None:
        """Have the voters record that no standby is in sync."""
        if self._voters is not None and not self._is_leaving:
            self._is_leaving = True
            self._voters.set_in_sync(False, self._left)

    def close(self, *, is_planned: bool) -> None:
        """End the stream. `is_planned`: the head was stopped by a command, and the standby must not take over."""
        self.flush()
        self._send(self._stream, is_stopped=is_planned)
        self._end_stream()

    # Messages of a standby

    def serve(self, op: str, header: Mapping[str, Any], answer: Answer) -> None:
        try:
            if op == Acknowledge.OP:
                self._take(Acknowledge.from_header(header))
            else:
                self._follow(Follow.from_header(header), answer)
        except AscendrunError as error:
            answer(error, b"", True)

    def _follow(self, request: Follow, answer: Answer) -> None:
        if self._voters is None:
            raise ConflictError.of(
                "standby.not-set",
                "the settings have no standby",
                "write the block `standby` into the settings of both machines: docs/standby.md",
            )
        if self._waits and HEAD_FILE not in request.groups:
            self.leave()  # it is not the copy of which the voters know
            raise UnreachableError(Text("standby.new-copy", "the voters know of an older copy"))
        with self._sending:
            self._stream, self._answer, self._copied = self._stream + 1, answer, None
            self._sending.notify_all()
        self._host, self._trees = request.standby, set(request.trees)
        _in_thread(self._send_copy, self._stream, request, _wanted_trees(self._store))

    def _take(self, message: Acknowledge) -> None:
        if message.stream != self._stream or message.number > self._number:
            return
        with self._sending:
            self._acknowledged = message.number
            self._sending.notify_all()
        self._release()

    def _has(self, number: int) -> bool:
        return self._copied is not None and self._acknowledged >= max(number, self._copied)

    def _release(self) -> None:
        """Run what waits for nothing more, and enter the synchronous state once the copy is complete."""
        while self._held and (not self._waits or self._has(self._held[0].number)):
            self._guard(self._held.popleft().call)
        is_caught_up = not self._is_leaving and not self._changed and self._has(self._number)
        if is_caught_up and not self._in_sync and self._voters is not None:
            missing = _wanted_trees(self._store) - self._trees
            if missing:  # of jobs that were submitted meanwhile
                self._copied = None
                _in_thread(self._send_trees, self._stream, missing, partial(self._end_copy, self._stream))
                return
            self._in_sync = self._waits = True
            self._guard(partial(_record, self._store, "standby-in-sync", self._host))
            self.flush()
            self.after(self._entered)

    def _entered(self) -> None:
        if self._voters is not None and self._in_sync:
            self._voters.set_in_sync(True, lambda: None)

    def _left(self) -> None:
        self._is_leaving = self._waits = False
        if self._in_sync:
            self._in_sync = False
            self._guard(partial(_record, self._store, "standby-out-of-sync", self._host))
        self._end_stream()  # a standby that responds again connects again
        self._release()

    def _end_stream(self) -> None:
        with self._sending:
            self._answer = self._copied = None
            self._sending.notify_all()

    # The stream: `_send` from any thread

    def _send_copy(self, stream: int, request: Follow, trees: set[str]) -> None:
        send, gone = differing(list_groups(self._root), request.groups)
        self._send(stream, gone=[*gone, *(f"trees/{sha256}.tar" for sha256 in sorted(set(request.trees) - trees))])
        for group in send:
            self._await_window(stream)
            self._send(stream, files_of(self._root, group))
        self._send_trees(stream, trees - set(request.trees), lambda: None)
        self._end_copy(stream)

    def _send_trees(self, stream: int, hashes: Collection[str], then: Callable[[], None]) -> None:
        for sha256 in sorted(hashes):
            path = f"trees/{sha256}.tar"
            try:
                for part, has_more in read_parts(self._root, path):
                    self._await_window(stream)
                    self._emit(stream, [(path, len(part), has_more)], part)
            except OSError:
                pass  # the start of its job reports what is missing here
            self._post(partial(self._trees.add, sha256))
        then()

    def _end_copy(self, stream: int) -> None:
        number = self._send(stream)

        def note() -> None:
            if stream == self._stream:
                self._copied = number
                self._release()

        self._post(note)

    def _await_window(self, stream: int) -> None:
        with self._sending:
            self._sending.wait_for(
                lambda: self._number - self._acknowledged < WINDOW or self._answer is None or stream != self._stream
            )

    def _send(
        self, stream: int, paths: Sequence[str] = (), *, gone: Sequence[str] = (), is_stopped: bool = False
    ) -> int:
        """Send files as they are now, and which of them are missing; return the number of the last message."""
        with self._sending:
            files, body = list[tuple[str, int, bool]](), bytearray()
            gone = [*gone, *(path for path in paths if not (self._root / path).is_file())]
            for path, part, has_more in _parts(self._root, paths):
                if len(body) + len(part) > PART_BYTES and files:
                    self._emit(stream, files, bytes(body), gone)
                    files, body, gone = [], bytearray(), ()
                files.append((path, len(part), has_more))
                body += part
            return self._emit(stream, files, bytes(body), gone, is_stopped)

    def _emit(
        self,
        stream: int,
        files: Sequence[tuple[str, int, bool]],
        body: bytes,
        gone: Sequence[str] = (),
        is_stopped: bool = False,
    ) -> int:
        with self._sending:
            if self._answer is None or stream != self._stream:
                return self._number
            self._number, self._sent_mono = self._number + 1, time.monotonic()
            change = StandbyChange(stream, self._number, tuple(files), tuple(gone), is_stopped)
            self._answer(change, body, is_stopped)
            return self._number


def _in_thread(call: Callable[..., None], *values: object) -> None:
    threading.Thread(target=call, args=values, name="standby", daemon=True).start()


def _parts(root: Path, paths: Sequence[str]) -> Iterator[tuple[str, bytes, bool]]:
    """Yield the files that are copied, in parts: path, bytes, and whether more of the file follow."""
    for path in filter(is_copied, paths):
        try:
            for part, has_more in read_parts(root, path):
                yield path, part, has_more
        except OSError:
            continue


def _record(store: Store, code: str, host: str | None) -> None:
    with store.writing() as db:
        add_events(db, "", [Event(code, {"host": str(host)}, at_s=time.time())])


def _wanted_trees(store: Store) -> set[str]:
    """Return the hashes of the packed directories of jobs that are not over."""
    return {str(tree["sha256"]) for stored in store.jobs.unended() for tree in stored.trees}
