"""Ranks that a launcher (torchrun, deepspeed, accelerate) starts: the supervisor starts them on its behalf."""

from __future__ import annotations

import os
import select
import signal
import sys

from ascendrun.node import layout
from ascendrun.node.ranks import to_bytes
from ascendrun.node.supervisor.joins import Joined, JoinServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    from ascendrun.node.supervisor.ending import Ending
    from ascendrun.node.supervisor.joins import Request
    from ascendrun.node.supervisor.processes import Processes
    from ascendrun.node.supervisor.rank_handle import Rank

    class Owner(Protocol):
        """See rank_set.RankSet."""

        prepared: dict[str, Any]
        poll: select.poll
        processes: Processes
        ending: Ending

        def environ(self, own: dict[str, str]) -> dict[bytes, bytes]: ...

        def start(
            self, rank: Rank, argv: list[str], env: dict[bytes, bytes], cwd: str, *, setup: str | None
        ) -> bool: ...


ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
REFUSED = 1 << 8
"""The wait status "exit code 1", for a rank that is not started."""


class Launched:
    """The launcher of a node and its ranks. `launcher`: its own process.

    The launcher starts join.py in place of each rank. Its signals reach the rank while the supervisor does not end the
    attempt: from then on only the supervisor's steps count, since launchers give ranks less time to save.
    """

    def __init__(self, supervisor: Owner, launcher: Rank) -> None:
        self._supervisor, self._launcher = supervisor, launcher
        self._plan = supervisor.prepared["launcher"]
        self._server = JoinServer()
        self._joins: dict[int, Joined] = {}
        self._by_rank: dict[int, Joined] = {}

    def start(self) -> None:
        """Start the launcher, which starts `PYTHON AGENT join COMMAND` for each rank."""
        supervisor = self._supervisor
        supervisor.poll.register(self._server.fileno(), select.POLLIN)
        python, agent = self._plan["argv"][0], os.path.abspath(sys.argv[0])
        argv = [*self._plan["argv"], python, "-I", "-S", agent, "join", *self._plan["command"]]
        env = supervisor.environ(self._plan["env"])
        env[to_bytes(layout.JOIN_VARIABLE)] = to_bytes(self._server.name)
        setup = supervisor.prepared.get("setup")
        supervisor.start(self._launcher, argv, env, supervisor.prepared["cwd"], setup=setup)

    def handle(self, fd: int) -> None:
        """Handle an event of the socket or of a connection."""
        if fd == self._server.fileno():
            joined = self._server.accept()
            while joined is not None:
                self._joins[joined.fileno()] = joined
                self._supervisor.poll.register(joined.fileno(), select.POLLIN)
                joined = self._server.accept()
            return
        joined = self._joins.get(fd)
        if joined is None:
            return
        signals, is_closed = joined.read()
        if is_closed:
            self._leave(joined)
        elif joined.request is not None and joined.rank is None:
            self._start_rank(joined, joined.request)
        else:
            self._pass_on(joined, signals)

    def end(self, rank: Rank) -> None:
        """Let the launcher see the end of a rank."""
        joined = self._by_rank.pop(rank.number, None)
        if joined is not None and rank.result is not None:
            self._close(joined, -rank.result if rank.result < 0 else rank.result << 8)

    def _rank_of(self, joined: Joined) -> Rank | None:
        return next((rank for rank in self._supervisor.processes.ranks if rank.number == joined.rank), None)

    def _start_rank(self, joined: Joined, request: Request) -> None:
        supervisor = self._supervisor
        waiting = [rank for rank in supervisor.processes.ranks if rank.started is None and not rank.has_ended]
        wanted = request.rank
        if wanted is None and len(supervisor.processes.ranks) == 1:  # accelerate sets no RANK for a single one
            wanted = supervisor.processes.ranks[0].number
        rank = next((rank for rank in waiting if rank.number == wanted), None)
        if rank is None or supervisor.ending.stopping_by is not None:
            self._close(joined, REFUSED)
            return
        joined.rank = rank.number
        self._by_rank[rank.number] = joined
        env = {to_bytes(name): to_bytes(value) for name, value in request.env.items()}
        env.update((to_bytes(name), to_bytes(value)) for name, value in rank.plan["env"].items())
        if not supervisor.start(rank, request.argv, env, request.cwd, setup=None):
            self.end(rank)

    def _pass_on(self, joined: Joined, signals: bytes) -> None:
        rank = self._rank_of(joined)
        if rank is None or self._supervisor.ending.stopping_by is not None:
            return
        for number in signals:
            rank.stopped_by_launcher = rank.stopped_by_launcher or number in ENDING
            rank.send(number)

    def _leave(self, joined: Joined) -> None:
        """The launcher killed the process in place of the rank: then the rank ends too."""
        rank = self._rank_of(joined)
        if rank is not None and rank.runs and self._supervisor.ending.stopping_by is None:
            rank.stopped_by_launcher = True
            rank.send(signal.SIGKILL)
        self._close(joined, None)

    def _close(self, joined: Joined, status: int | None) -> None:
        self._supervisor.poll.unregister(joined.fileno())
        del self._joins[joined.fileno()]
        if joined.rank is not None:
            self._by_rank.pop(joined.rank, None)
        if status is None:
            joined.close()
        else:
            joined.finish(status)
