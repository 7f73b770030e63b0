"""Terms of heads on this machine: a head of a lower term changes nothing here, and a voter grants one lease at a time.

A term is a fencing token: the machines on which a head id may act have increasing terms, and each term belongs to one
of them, by the claims of a majority of the voters. Times are those since boot; after a boot a voter lets the time of a
lease pass once more before it grants a claim. A damaged file counts as an unknown lease, a missing one as well unless
the first term is claimed.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import os
import time

from ascendrun.node import layout, procs
from ascendrun.node.agent.checks import network_of
from ascendrun.node.files import UnreadableError, make_private_dir, read_json, write_json
from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, Optional, Tuple

    Change = Callable[[Optional["State"]], Tuple[Optional["State"], "dict[str, Any]"]]

LONGEST_S = 300.0
"""Most seconds of a lease (core/standby_settings.py)."""

State = collections.namedtuple("State", "term instance host until_s lease_s boot_id in_sync order")
"""`term`: the highest that was seen. Of voters: `instance`, `host`: the head that holds the lease, "": unknown;
`until_s`: seconds since the boot `boot_id`; `in_sync`: whether the copy of the standby is complete; `order`: of the
last renewal, [session of the controller, number]."""


class Terms:
    """The files of this machine, one for each head id. `now_s`: seconds since boot."""

    def __init__(
        self,
        root: str,
        now_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        boot_id: Callable[[], str] = procs.boot_id,
    ) -> None:
        self._root, self._now_s, self._boot_id = root, now_s, boot_id

    def admit(self, head_id: str, term: int) -> None:
        """Note the term of a head that acts here. Raises OperationError when a later one was seen, OSError."""
        seen = self._read(self._path(head_id))
        if seen is None or seen.term < term:
            self._change(head_id, lambda state: (self._raised(state, term), {}))
            seen = self._read(self._path(head_id))
        if seen is not None and seen.term > term:
            raise OperationError("superseded", "superseded", term=seen.term)

    def renew(self, request: dict[str, Any]) -> dict[str, Any]:
        """Extend the lease of a head, which holds its term by a majority. One that was overtaken by a newer renewal is
        ignored. Raises OSError: nothing has changed."""

        def change(state: State | None) -> tuple[State, dict[str, Any]]:
            term, owner, order = request["term"], (request["term"], request["instance"]), list(request["order"])
            if state is not None and state.term > term:
                return state, self._vote(state, "superseded")
            was_in_sync = False
            if state is not None and (state.term, state.instance) == owner:
                if order <= state.order:
                    return state, self._vote(state, "overtaken")
                was_in_sync = state.in_sync
            in_sync = request.get("in_sync")
            held = self._held(request, was_in_sync if in_sync is None else bool(in_sync), order)
            return held, self._vote(held, "")

        return self._change(request["head_id"], change)

    def claim(self, request: dict[str, Any]) -> dict[str, Any]:
        """Grant a term to one head. `asks`: only reply what it would do; `may_lose`: also to one without a complete
        copy. Raises OSError: nothing has changed."""

        def change(state: State | None) -> tuple[State | None, dict[str, Any]]:
            term, is_first = request["term"], state is None and request["term"] == 1
            state = state or self._unknown()
            is_same = (state.term, state.instance) == (term, request["instance"])
            if not is_first and not is_same:
                why = "superseded" if state.term >= term else self._refusal(state, request)
                if why:
                    return state, self._vote(state, why)
            if request.get("asks"):
                return None if is_first else state, dict(self._vote(state, ""), granted=True)
            held = self._held(request, is_same and state.in_sync, state.order if is_same else [0, 0])
            return held, self._vote(held, "")

        return self._change(request["head_id"], change)

    def _refusal(self, state: State, request: dict[str, Any]) -> str:
        if state.until_s > self._now_s():
            return "held" if state.instance else "unknown"
        return "" if state.in_sync or request.get("may_lose") else "out-of-sync"

    def _vote(self, state: State, why: str) -> dict[str, Any]:
        wait_s = max(0.0, state.until_s - self._now_s())
        seen = {"term": state.term, "host": state.host, "in_sync": state.in_sync, "order": state.order}
        return dict(seen, granted=not why, why=why, wait_s=wait_s)

    def _held(self, request: dict[str, Any], in_sync: bool, order: list[int]) -> State:
        lease_s = min(float(request["lease_s"]), LONGEST_S)
        owner = int(request["term"]), str(request["instance"]), str(request["host"])
        return State(*owner, self._now_s() + lease_s, lease_s, self._boot_id(), in_sync, order)

    def _unknown(self) -> State:
        return State(0, "", "", self._now_s() + LONGEST_S, LONGEST_S, self._boot_id(), False, [0, 0])

    def _raised(self, state: State | None, term: int) -> State:
        state = state or self._unknown()
        return state if state.term >= term else state._replace(term=term, instance="", host="", in_sync=False)

    # The file

    def _path(self, head_id: str) -> str:
        return layout.term_file(self._root, head_id, is_local=network_of(self._root) is None)

    def _change(self, head_id: str, change: Change) -> dict[str, Any]:
        """Read, change and write a state while no other agent does. On return it is on disk. None: as it was read."""
        path = self._path(head_id)
        make_private_dir(os.path.dirname(path))
        with _locked(path + ".lock"):
            known = self._read(path)
            state = known
            if known is not None and known.boot_id != self._boot_id():
                state = known._replace(boot_id=self._boot_id(), until_s=self._now_s() + known.lease_s)
            new, reply = change(state)
            if new is not None and new != known:
                write_json(path, new._asdict())
        return reply

    def _read(self, path: str) -> State | None:
        """Return the state; None: none was written. A damaged one is as one from before a boot, its lease unknown."""
        try:
            found = read_json(path)
            return None if found is None else _checked(found)
        except UnreadableError as error:
            if error.errno != errno.EBADMSG:
                raise
        except (KeyError, TypeError, ValueError):
            pass
        return self._unknown()._replace(boot_id="")


def _checked(found: dict[str, Any]) -> State:
    """Raise KeyError, TypeError, ValueError for a state that no agent wrote."""
    order = [int(number) for number in found["order"]]
    texts = {name: str(found[name]) for name in ("instance", "host", "boot_id")}
    seconds = {name: float(found[name]) for name in ("until_s", "lease_s")}
    return State(term=int(found["term"]), in_sync=bool(found["in_sync"]), order=order, **texts, **seconds)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
