"""Start of an attempt's ranks, their output, and the records of their ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

from ascendrun.node import layout, procs, reap
from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import read_some, to_bytes
from ascendrun.node.join import AGENT_TOKEN, Joined, JoinServer
from ascendrun.node.op_errors import OperationError, message
from ascendrun.node.ranks import put_port, rank_environ, start_rank
from ascendrun.node.supervisor import processes
from ascendrun.node.supervisor.processes import drain
from ascendrun.node.supervisor.sampler_process import ForkedRanks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ascendrun.node.records import IoErrors, Records
    from ascendrun.node.supervisor.processes import Ending, Processes, Rank

ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
REFUSED = 1 << 8
"""The wait status "exit code 1", for a rank that is not started."""


class RankSet:
    """The ranks of this node and their sampler. `spec`: what GO brought.

    Their files are registered in `poll`; `read(fds)` takes what is ready.
    """

    def __init__(
        self, prepared: dict[str, Any], spec: dict[str, Any], processes: Processes, ending: Ending, records: Records
    ) -> None:
        self.prepared, self._spec = prepared, spec
        self.processes, self.ending, self._records = processes, ending, records
        self._master_port: int | None = spec.get("master_port")
        self._leases: dict[str, list[int]] = spec.get("leases") or {}
        self.poll = select.poll()
        self.forked = ForkedRanks(
            lambda event, values: records.add(event, stopped=ending.stopping_by is not None, **values), self.poll
        )
        self._launched = Launched(self, processes.launcher) if processes.launcher else None
        self._by_pid: dict[int, Rank] = {}
        self._streams: dict[int, tuple[Rank, str]] = {}
        self._first_good_exit_s: float | None = None

    # --- start ---

    def start_all(self, io_errors: IoErrors) -> None:
        """Start the ranks, or their launcher, then the sampler."""
        if self._launched is not None:
            self._launched.start()
        else:
            setup = self.prepared.get("setup")
            for rank in self.processes.ranks:
                own = dict(self.processes.own_files(rank.number), **rank.plan["env"])
                if not self.start(rank, rank.plan["argv"], self.environ(own), self.prepared["cwd"], setup=setup):
                    break
        sampler = self.processes.sampler
        io_errors.guard("start-sampler", sampler.start, self.prepared)
        if sampler.fd is not None:
            self.poll.register(sampler.fd, select.POLLIN)

    def environ(self, own: dict[str, str]) -> dict[bytes, bytes]:
        """Return the environment of a process. `own`: variables of the plan."""
        root, library = self.processes.root, self.prepared.get("library")
        return rank_environ(
            os.environb,
            own,
            master_port=self._master_port,
            hccl_base=self._spec.get("hccl_base"),
            secret=self._spec.get("secret_env") or {},
            tag=self.processes.tag,
            root=root,
            library=layout.tree_dir(root, library) if library else None,
        )

    def start(self, rank: Rank, argv: list[str], env: dict[bytes, bytes], cwd: str, *, setup: str | None) -> bool:
        """Start the process and record it; False: the system refused, which is recorded and ends the others."""
        try:
            self._start(rank, argv, env, cwd, setup)
        except OperationError as refusal:
            self._records.add("start_failed", rank=None if rank.is_launcher else rank.number, **refusal.as_json())
            rank.code, rank.has_ended = 127, True
            self._record_exit(rank, 127 << 8, None)
            key = "launcher-not-started" if rank.is_launcher else "rank-not-started"
            self.ending.stop("failure", message(key, rank=rank.number))
            return False
        return True

    def _start(self, rank: Rank, argv: list[str], env: dict[bytes, bytes], cwd: str, setup: str | None) -> None:
        started, status_fd = start_rank(
            [put_port(part, self._master_port) for part in argv],
            env,
            cwd=cwd,
            setup=setup,
            umask=int(self._spec["umask"]),
            enter=lambda: reap.enter_group(self.processes.group),
            keep=self._leases.get("devices") or (),  # whoever outlives this process keeps the devices leased
        )
        failpoint("agent.after_fork_before_record")
        stat = procs.read_stat(started.pid)
        rank.started, rank.status_fd, rank.start_ticks = started, status_fd, stat.start if stat else -1
        self._by_pid[started.pid] = rank
        for stream, pipe in (("out", started.stdout), ("err", started.stderr)):
            assert pipe is not None
            self._streams[pipe.fileno()] = rank, stream
            self.poll.register(pipe.fileno(), select.POLLIN)
        self._records.add(
            "rank_started",
            rank=rank.number,
            local_rank=rank.plan["local_rank"],
            pid=started.pid,
            start=rank.start_ticks,
        )
        failpoint("agent.after_record")

    # --- output ---

    def read(self, fds: list[int]) -> int:
        """Read what is ready; return the bytes of output."""
        moved = 0
        for fd in fds:
            if fd == self.processes.sampler.fd:
                self._add_forked_ranks(fd)
            elif fd not in self._streams:
                if not self.forked.handle(fd) and self._launched is not None:
                    self._launched.handle(fd)
            else:
                moved += self._read_stream(fd)
        return moved

    def _read_stream(self, fd: int) -> int:
        rank, stream = self._streams[fd]
        chunk = read_some(fd)
        if chunk:
            rank.spools[stream].write(chunk, time.time_ns())
        elif chunk is not None:
            self._unwatch(fd)
        return len(chunk or b"")

    def _add_forked_ranks(self, fd: int) -> None:
        found = self.processes.sampler.found_ranks()
        if found is None:
            self.poll.unregister(fd)
        for rank in found or ():
            self.forked.add(rank["rank"], rank["pid"], rank["start"])

    def _unwatch(self, fd: int) -> None:
        rank, stream = self._streams.pop(fd)
        self.poll.unregister(fd)
        assert rank.started is not None
        pipe = rank.started.stdout if stream == "out" else rank.started.stderr
        assert pipe is not None
        pipe.close()

    # --- ends ---

    def reap(self) -> None:
        """Record every end first, then decide: of two that ended together the first counts as the cause."""
        bad = None
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            rank = self._by_pid.pop(pid, None)
            if rank is None:
                continue
            failpoint("agent.after_exit_before_record")
            rank.end(status)
            self._read_last(rank)
            self._record_exit(rank, status, usage)
            if self._launched is not None:
                self._launched.end(rank)
            if rank.result == 0 and self._first_good_exit_s is None:
                self._first_good_exit_s = time.monotonic()
            # A launcher ends because of a rank, unless it ended the rank.
            if rank.result != 0 and not rank.stopped_by_launcher and (bad is None or bad.is_launcher):
                bad = rank
        # While a stop is in progress, a rank that dies of the signal must not shorten the time of another to save.
        if bad is not None and self.ending.stopping_by is None and self.processes.has_running():
            key = ("launcher" if bad.is_launcher else "rank") + ("-exited" if bad.signal is None else "-killed")
            self.ending.stop("failure", message(key, rank=bad.number, code=bad.code, signal=bad.signal))

    def _read_last(self, rank: Rank) -> None:
        if rank.status_fd is not None:
            os.set_blocking(rank.status_fd, False)
            rank.setup_result = read_some(rank.status_fd, 1) or b""
            os.close(rank.status_fd)
        for fd, (owner, stream) in list(self._streams.items()):
            if owner is rank and drain(fd, rank.spools[stream]):
                self._unwatch(fd)

    def _record_exit(self, rank: Rank, status: int, usage: Any) -> None:
        setup_failed = rank.status_fd is not None and rank.setup_result != b"o"  # it, not the command, ended the rank
        if setup_failed and self.ending.stopping_by is None and rank.result != 0:
            self._records.add(
                "start_failed",
                rank=None if rank.is_launcher else rank.number,
                code="setup-failed",
                message=self._explain_setup(rank),
            )
        fields: dict[str, Any] = {"status": status, "exited_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
        if usage is not None:
            fields.update(cpu_s=round(usage.ru_utime + usage.ru_stime, 3), max_rss_bytes=usage.ru_maxrss * 1024)
        if rank.killed_as_finished:
            fields["note"] = "killed-at-exit"
        if rank.check_done(last=True):
            fields["done"] = True
        rank.was_stopped = self.ending.stopping_by is not None or rank.stopped_by_launcher
        self._records.add(
            "rank_exited", rank=rank.number, code=rank.code, signal=rank.signal, stopped=rank.was_stopped, **fields
        )
        failpoint("agent.after_exit_record")

    def _explain_setup(self, rank: Rank) -> dict[str, Any]:
        if rank.setup_result == b"m":
            return message("no-command-after-setup", path=rank.plan["argv"][0])
        output = rank.spools["err"].tail(2000).decode("utf-8", "replace").strip()
        return message("setup-failed", status=rank.result, output=output or None)

    def check(self, now: float) -> None:
        """Look at ranks that are not children of this process, and at those that do not exit."""
        self.forked.check()
        for rank in self.processes.ranks:
            if rank.runs:
                self._check_hung(rank, now)

    def _check_hung(self, rank: Rank, now: float) -> None:
        if rank.check_done():
            rank.watch.see_done(now)
        if self.ending.stopping_by is not None:
            return
        why = rank.watch.check(
            now, cpu_s=rank.cpu_s(), written_bytes=rank.written_bytes, other_exited_s=self._first_good_exit_s
        )
        if why is None:
            return
        self._records.add("rank_lingers", rank=rank.number, why=why, after_s=rank.watch.limits_s[why])
        if why == processes.FINISHED:
            rank.killed_as_finished = True
            rank.send(signal.SIGKILL)

    # --- the end ---

    def release_leases(self) -> None:
        for fd in (fd for fds in self._leases.values() for fd in fds):
            with contextlib.suppress(OSError):  # closed in any case
                os.close(fd)

    def read_rest(self) -> None:
        """Read what is left of the output, after the last process."""
        for fd, (rank, stream) in list(self._streams.items()):
            drain(fd, rank.spools[stream])
            self._unwatch(fd)

    def record_dropped(self, io_errors: IoErrors, now: float, *, last: bool = False) -> None:
        """Write the output that waits for the disk, and record what is lost; `last`: all of it."""
        for rank in self.processes.all:
            for stream, spool in rank.spools.items():
                if not spool.flush() and spool.error is not None:
                    io_errors.note("logs", spool.error)
                for generation, had in spool.cuts:
                    self._records.add("log_cut", rank=rank.stream_number, stream=stream, generation=generation, had=had)
                spool.cuts.clear()
            for stream, generation, offset, count in rank.new_holes(now, last=last):
                self._records.add(
                    "log_dropped",
                    rank=rank.stream_number,
                    stream=stream,
                    generation=generation,
                    offset=offset,
                    bytes=count,
                    reason=rank.spools[stream].drop_reason.strip(),
                )


class Launched:
    """A launcher (torchrun, deepspeed, accelerate) of a node and its ranks, which the supervisor starts on its
    behalf. `launcher`: its own process.

    The launcher starts join.py in place of each rank. Its signals reach the rank while the supervisor does not end the
    attempt: from then on only the supervisor's steps count, since launchers give ranks less time to save.
    """

    def __init__(self, ranks: RankSet, launcher: Rank) -> None:
        self._ranks, self._launcher = ranks, launcher
        self._plan = ranks.prepared["launcher"]
        self._server = JoinServer()
        self._joins: dict[int, Joined] = {}

    def start(self) -> None:
        """Start the launcher, which starts `PYTHON AGENT join COMMAND` for each rank."""
        ranks = self._ranks
        ranks.poll.register(self._server.fileno(), select.POLLIN)
        python, agent = self._plan["argv"][0], os.path.abspath(sys.argv[0])
        own = [agent if word == AGENT_TOKEN else word for word in self._plan["argv"]]
        argv = [*own, python, "-I", "-S", agent, "join", *self._plan["command"]]
        env = ranks.environ(self._plan["env"])
        env[to_bytes(layout.JOIN_VARIABLE)] = to_bytes(self._server.name)
        ranks.start(self._launcher, argv, env, ranks.prepared["cwd"], setup=ranks.prepared.get("setup"))

    def handle(self, fd: int) -> None:
        """Handle an event of the socket or of a connection."""
        if fd == self._server.fileno():
            for new in self._server.accept_all():
                self._joins[new.fileno()] = new
                self._ranks.poll.register(new.fileno(), select.POLLIN)
            return
        joined = self._joins.get(fd)
        if joined is None:
            return
        signals, is_closed = joined.read()
        if is_closed:
            self._leave(joined)
        elif joined.request is not None and joined.rank is None:
            self._start_rank(joined, joined.request)
        elif joined.rank is not None and self._ranks.ending.stopping_by is None:
            for number in signals:
                joined.rank.stopped_by_launcher = joined.rank.stopped_by_launcher or number in ENDING
                joined.rank.send(number)

    def end(self, rank: Rank) -> None:
        """Let the launcher see the end of a rank."""
        joined = next((one for one in self._joins.values() if one.rank is rank), None)
        if joined is not None and rank.result is not None:
            self._close(joined, -rank.result if rank.result < 0 else rank.result << 8)

    def _start_rank(self, joined: Joined, request: dict[str, Any]) -> None:
        ranks, all_ranks = self._ranks, self._ranks.processes.ranks
        wanted = request["rank"]
        if wanted is None and len(all_ranks) == 1:  # accelerate sets no RANK for a single one
            wanted = all_ranks[0].number
        waiting = [rank for rank in all_ranks if rank.started is None and not rank.has_ended]
        rank = next((rank for rank in waiting if rank.number == wanted), None)
        if rank is None or ranks.ending.stopping_by is not None:
            self._close(joined, REFUSED)
            return
        joined.rank = rank
        env = {to_bytes(name): to_bytes(value) for name, value in {**request["env"], **rank.plan["env"]}.items()}
        if not ranks.start(rank, request["argv"], env, request["cwd"], setup=None):
            self.end(rank)

    def _leave(self, joined: Joined) -> None:
        """The launcher killed the process in place of the rank: then the rank ends too."""
        rank = joined.rank
        if rank is not None and rank.runs and self._ranks.ending.stopping_by is None:
            rank.stopped_by_launcher = True
            rank.send(signal.SIGKILL)
        self._close(joined, None)

    def _close(self, joined: Joined, status: int | None) -> None:
        self._ranks.poll.unregister(joined.fileno())
        del self._joins[joined.fileno()]
        joined.close(status)
