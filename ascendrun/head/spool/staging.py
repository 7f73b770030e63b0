"""A job's directories on their way to its hosts: packed once, named by their hash, as one file each, where they are
missing. To many hosts they are relayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.jobs.plan import Tree
from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol.file_messages import PutTree
from ascendrun.head.protocol.messages import Request
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool.relay import Relay, Relaying
from ascendrun.head.spool.transfer import TransferError, send_file
from ascendrun.head.state.state_dir import tree_file
from ascendrun.text import Text


class TreePush:
    """Sends a job's trees to one host, one request at a time.

    `query(request, body, deadline_s, then)` calls the agent; `done` is called once, with why it failed, None: they are
    there. `relay`: of this round, None: this machine sends everything.
    """

    def __init__(
        self,
        state_dir: Path,
        trees: Sequence[Tree],
        *,
        query: Callable[[Request[Any], bytes, float, Callable[[Reply[Any]], None]], None],
        done: Callable[[Failure | None], None],
        host: str = "",
        relay: Relay | None = None,
    ) -> None:
        self._query, self._done = query, done
        self._host, self._relay = host, relay
        self._steps = self._send_all(state_dir, trees)
        self.total_bytes = sum(tree.size_bytes for tree in trees)
        self.done_bytes = 0
        """Bytes on the node, sent now or already there."""

    def send_next(self) -> None:
        """Begin, or continue: there is a source."""
        self._go_on(partial(next, self._steps))

    def _go_on(self, run: Callable[[], tuple[Request[Any], bytes, float] | None]) -> None:
        try:
            step = run()
        except StopIteration:
            self._done(None)
        except TransferError as error:
            self._done(error.failure)
        else:
            if step is not None:
                self._query(*step, lambda reply: self._go_on(partial(self._steps.send, reply)))

    def _send_all(self, state_dir: Path, trees: Sequence[Tree]) -> Relaying[None]:
        before = 0

        def arrived(have: int) -> None:
            self.done_bytes = before + min(have, tree.size_bytes)

        for tree in trees:
            path = tree_file(state_dir, tree.sha256)
            try:
                request = PutTree(tree.sha256, tree.size_bytes)
                if self._relay is None:
                    yield from send_file(path, request, arrived)
                else:
                    yield from self._relay.receive(self._host, path, request, arrived, self.send_next)
            except OSError as error:
                what = Text(
                    "staging.copy-unreadable",
                    "cannot read the packed {name} on the head node: {path}: {error}",
                    name=tree.name,
                    path=str(path),
                    error=error.strerror,
                )
                hint = Text("staging.copy-unreadable.hint", "submit the job again")
                raise TransferError(Failure("tree-missing", what, hint)) from error
            before += tree.size_bytes
            self.done_bytes = before


def push_once_per_home(
    hosts: Sequence[str], homes: Mapping[str, str], push: Callable[[str, Callable[[], None]], None]
) -> None:
    """Call `push(host, then)` for a host of each home (core/reports.shared_homes); `then` pushes to the others, which
    find the directories there."""
    waiting: dict[str, list[str]] = {}
    for host in hosts:
        waiting.setdefault(homes.get(host, host), []).append(host)

    def push_rest(rest: list[str]) -> None:
        for host in rest:
            push(host, lambda: None)

    for first, *rest in waiting.values():
        push(first, partial(push_rest, rest))
