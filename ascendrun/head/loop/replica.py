"""The head's side of a standby: what the store is rebuilt from is copied there before anything is done about it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Callable, NamedTuple, Protocol

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError, ConflictError, UnreachableError
from ascendrun.core.events import Event
from ascendrun.head.loop.standby_stream import StandbyStream
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.standby_messages import Acknowledge, Follow
from ascendrun.head.spool.standby_copy import differing, files_of, list_groups
from ascendrun.head.ssh.host_keys import OWN_FILE
from ascendrun.head.state.store import Store
from ascendrun.head.state.store_file import HEAD_FILE, stamp_of
from ascendrun.head.waiting import in_background
from ascendrun.text import Text

ACKNOWLEDGED_S = 5.0
"""Seconds without an acknowledgement after which the standby is out of sync."""
MISSING_S = 600.0
"""Seconds without a complete copy after which that is reported."""
BEAT_S = 1.0
UNSENT = float("inf")
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
    """A call that waits for a message; UNSENT: for the next one with changes."""

    number: float
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
        self._incomplete_mono: float | None = None
        """Since when the copy is incomplete; None: it is complete, or this has been reported."""
        self._stream = StandbyStream(self._root)
        self._host: str | None = None
        self._copied: int | None = None
        """The number with which the copy of this stream is complete; None: not yet known."""
        self._trees: set[str] = set()
        self._changed: dict[str, None] = {}
        self._held: deque[_Held] = deque()
        self._known_hosts: list[int] = []
        self._transfers: dict[int, float] = {}
        """Since when packed directories are sent for which a submission waits, by a number."""

    def begin(self, voters: Voters) -> None:
        """Wait for a standby from now on. The voters first record that none is in sync: nothing is known about it."""
        self._voters, self._waits, self._store.on_change = voters, True, self._note
        self._incomplete_mono = time.monotonic()
        self.leave()

    @property
    def status(self) -> StandbyStatus:
        return StandbyStatus(self._host, self._in_sync, self._stream.number, self._stream.acknowledged)

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
        number = UNSENT if self._changed else self._stream.number
        self._held.append(_Held(number, time.monotonic(), call))
        self._release()

    def after_trees(self, hashes: Collection[str], call: Callable[[], None]) -> None:
        """Run `call` when the packed directories of a submission have been sent."""
        if not self._stream.is_open or not self._waits or self._trees.issuperset(hashes):
            call()
            return
        number = max(self._transfers, default=0) + 1
        self._transfers[number] = time.monotonic()

        def done() -> None:
            del self._transfers[number]
            call()

        _in_thread(self._send_trees, self._stream.id, set(hashes) - self._trees, partial(self._post, done))

    def flush(self) -> None:
        """Send what has changed as one message; called once for each turn of the loop."""
        changed, self._changed = self._changed, {}
        if changed and self._waits:
            is_open = self._stream.is_open
            number = self._stream.send(self._stream.id, tuple(changed)) if is_open else self._stream.skip()
            self._held.append(_Held(UNSENT, time.monotonic(), lambda: None))
            self._held = deque(held._replace(number=min(held.number, number)) for held in self._held)
        elif changed and self._stream.is_open:
            self._stream.send(self._stream.id, tuple(changed))
        self._release()

    def tick(self) -> None:
        """Handle time: a standby that does not acknowledge, and one that expects to receive something."""
        now = time.monotonic()
        known_hosts, before = stamp_of(self._root / OWN_FILE), self._known_hosts
        if known_hosts != before:  # commands write it
            self._known_hosts = known_hosts
            self._note(self._root / OWN_FILE)
        if self._stream.is_open and now - self._stream.sent_mono > BEAT_S:
            self._stream.send(self._stream.id)
        since_mono = [held.since_mono for held in islice(self._held, 1)]
        since_mono += [max(at_mono, self._stream.reply_mono) for at_mono in self._transfers.values()]
        if self._waits and since_mono and now - min(since_mono) > ACKNOWLEDGED_S:
            self.leave()
        if self._incomplete_mono is not None and now - self._incomplete_mono > MISSING_S:
            self._incomplete_mono = None
            self._record("standby-missing", seconds=MISSING_S)

    def leave(self) -> None:
        """Have the voters record that no standby is in sync."""
        if self._voters is not None and not self._is_leaving:
            self._is_leaving = True
            self._voters.set_in_sync(False, self._left)

    def close(self, *, is_planned: bool) -> None:
        """End the stream. `is_planned`: the head was stopped by a command, and the standby must not take over."""
        self.flush()
        self._stream.send(self._stream.id, is_stopped=is_planned)
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
            from ascendrun.core.standby_settings import not_set  # with pydantic: few controllers need it

            raise not_set(ConflictError)
        if self._waits and HEAD_FILE not in request.groups:
            self.leave()  # it is not the copy of which the voters know
            raise UnreachableError(Text("standby.new-copy", "the voters know of an older copy"))
        self._copied = None
        self._host, self._trees = request.standby, set(request.trees)
        _in_thread(self._send_copy, self._stream.begin(answer), request, _wanted_trees(self._store))

    def _take(self, message: Acknowledge) -> None:
        if self._stream.acknowledge(message.stream, message.number):
            self._release()

    def _has(self, number: float) -> bool:
        return self._copied is not None and self._stream.acknowledged >= max(number, self._copied)

    def _release(self) -> None:
        """Run what waits for nothing more, and enter the synchronous state once the copy is complete."""
        while self._held and (not self._waits or self._has(self._held[0].number)):
            self._guard(self._held.popleft().call)
        is_caught_up = not self._is_leaving and not self._changed and self._has(self._stream.number)
        if is_caught_up and not self._in_sync and self._voters is not None:
            missing = _wanted_trees(self._store) - self._trees
            if missing:  # of jobs that were submitted meanwhile
                self._copied = None
                then = partial(self._end_copy, self._stream.id)
                _in_thread(self._send_trees, self._stream.id, missing, then)
                return
            self._in_sync, self._waits, self._incomplete_mono = True, True, None
            self._record("standby-in-sync")
            self.flush()
            self.after(self._entered)

    def _entered(self) -> None:
        if self._voters is not None and self._in_sync:
            self._voters.set_in_sync(True, lambda: None)

    def _left(self) -> None:
        self._is_leaving = self._waits = False
        if self._in_sync:
            self._in_sync, self._incomplete_mono = False, time.monotonic()
            self._record("standby-out-of-sync")
        self._end_stream()  # a standby that responds again connects again
        self._release()

    def _record(self, code: str, **values: object) -> None:
        event = Event(code, {"host": self._host or "-", **values}, at_s=time.time())
        self._guard(partial(self._store.jobs.record, event))

    def _end_stream(self) -> None:
        self._stream.end()
        self._copied = None

    # In a thread

    def _send_copy(self, stream: int, request: Follow, trees: set[str]) -> None:
        send, gone = differing(list_groups(self._root), request.groups)
        gone += [f"trees/{sha256}.tar" for sha256 in sorted(set(request.trees) - trees)]
        self._stream.send(stream, gone=gone)
        for group in send:
            self._stream.await_window(stream)
            self._stream.send(stream, files_of(self._root, group))
        self._send_trees(stream, trees - set(request.trees), lambda: None)
        self._end_copy(stream)

    def _send_trees(self, stream: int, hashes: Collection[str], then: Callable[[], None]) -> None:
        for sha256 in sorted(hashes):
            with suppress(OSError):  # the start of its job reports what is missing here
                self._stream.send_large(stream, f"trees/{sha256}.tar")
            self._post(partial(self._note_tree, stream, sha256))
        then()

    def _note_tree(self, stream: int, sha256: str) -> None:
        if stream == self._stream.id:  # else the standby that got parts of it is not connected any more
            self._trees.add(sha256)

    def _end_copy(self, stream: int) -> None:
        number = self._stream.send(stream)

        def note() -> None:
            if stream == self._stream.id:
                self._copied = number
                self._release()

        self._post(note)


def _in_thread(call: Callable[..., None], *values: object) -> None:
    in_background(partial(call, *values), "standby")


def _wanted_trees(store: Store) -> set[str]:
    """Return the hashes of the packed directories of jobs that are not over."""
    return {str(tree["sha256"]) for stored in store.jobs.unended() for tree in stored.trees}
