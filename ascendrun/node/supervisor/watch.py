"""Main loop of the supervisor: one attempt's ranks on this node, from the first process to the last."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import threading
import time
from functools import partial

from ascendrun.node import cgroup, head_lease, layout, procs, reap, stacks, stopping
from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import UnreadableError, exists, make_private_dir, read_json, write_json
from ascendrun.node.layout import IDENTITY, PREPARED, RENEWED, ROLL, STOP, STOP_TAKEN, WHERE
from ascendrun.node.op_errors import OperationError, message
from ascendrun.node.ranks import put_port, rank_environ, start_rank
from ascendrun.node.records import Records, free_reserve, write_end
from ascendrun.node.supervisor import exit_watch
from ascendrun.node.supervisor.forked_ranks import ForkedRanks
from ascendrun.node.supervisor.launched import Launched
from ascendrun.node.supervisor.rank_handle import Rank, drain, read_some
from ascendrun.node.supervisor.sampler_process import SamplerProcess
from ascendrun.node.supervisor.spool import ROTATE_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from ascendrun.node.op_errors import Message

METRICS_VARIABLE = "ASCENDRUN_METRICS_FILE"
TICK_S = 1.0
SWEEP_S = 0.02
PATIENT_SWEEP_S = 0.2
BATCH_S = 0.005
"""Seconds of pause after small reads: frequent output causes 200 wake-ups a second, not one per line."""
SMALL_BYTES = 1 << 16
CLEAN_CHECKS = 2
LAST_TRY_S = 120.0
"""Seconds after the ranks' end that their last output waits for its disk; on a full disk it does not wait."""
ROLL_COST = 100.0
"""The search for descendants takes at most one hundredth of the time."""
LEFTOVERS_S = 5.0
HEAD_SIGNALS_S = 1.0
"""A SIGTERM so soon after SIGUSR1 is a stop by the head: the agent could not write its request."""


class IoErrors:
    """Errors of the system in the steps of a supervisor: each kind is recorded once, and at the end how often."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._found: dict[tuple[str, str], list[int]] = {}

    def note(self, step: str, error: OSError) -> None:
        key = step, errno.errorcode.get(error.errno or 0, str(error.errno))
        entry = self._found.setdefault(key, [0, time.time_ns()])
        entry[0] += 1
        if entry[0] == 1:
            self._record(key)

    def finish(self) -> None:
        for key, (count, _) in self._found.items():
            if count > 1:
                self._record(key)

    def _record(self, key: tuple[str, str]) -> None:
        count, since_ns = self._found[key]
        self._records.add("io_error", step=key[0], errno=key[1], count=count, since_ns=since_ns)


class FolderThread:
    """Looks at the attempt's directory in a thread, for one on a network: its server may hang, the ranks' output must
    not.

    `look()` returns a request to stop, None: none, or raises OSError. `wake()` is called after a new request.
    """

    def __init__(self, look: Callable[[], dict[str, Any] | None], *, wake: Callable[[], Any], every_s: float) -> None:
        self._look, self._wake, self._every_s = look, wake, every_s
        self._asked = threading.Event()
        self._is_over = False
        self.order: dict[str, Any] | None = None
        self.error: OSError | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="folder").start()

    def ask(self, *, last: bool = False) -> None:
        """Look now; `last`: no more."""
        self._is_over = last
        self._asked.set()

    def _run(self) -> None:
        while not self._is_over:
            try:
                order = self._look()
            except OSError as error:
                self.error = error
            else:
                if order is not None and order != self.order:
                    self.order = order
                    with contextlib.suppress(BlockingIOError):  # the loop has been woken often enough
                        self._wake()
            self._asked.wait(self._every_s)
            self._asked.clear()


class Supervisor:
    """The main loop. Decisions are made once per iteration: after all events have been read.

    An error of the system in one step never ends the supervisor or a rank: it is recorded and the other steps continue.
    """

    def __init__(
        self, folder: str, prepared: dict[str, Any], spec: dict[str, Any], records: Records, identity: dict[str, Any]
    ) -> None:
        self.folder = folder
        self.streams_dir = layout.streams_dir(folder)
        self.tag = str(prepared["tag"])
        self.prepared = prepared
        self.spec = spec
        self.records = records
        self.io_errors = IoErrors(records)
        self.identity = identity
        self.group: str | None = identity["cgroup"]
        self.master_port: int | None = spec.get("master_port")
        self.leases: dict[str, list[int]] = spec.get("leases") or {}
        self.ranks = [self._make_rank(plan) for plan in prepared["ranks"]]
        self.launched = Launched(self) if prepared.get("launcher") else None
        self.processes = [*([self.launched.launcher] if self.launched else []), *self.ranks]
        self.by_pid: dict[int, Rank] = {}
        self.streams: dict[int, tuple[Rank, str]] = {}
        self.poll = select.poll()
        self.ladder = stopping.Ladder()
        self.roll: list[reap.Who] = []
        self.next_roll_s = 0.0
        self.sampler = SamplerProcess(self.tag, folder)
        self.forked = ForkedRanks(self._record_forked, self.poll)
        self.stopping_by: str | None = None
        self.lease_began_ns = 0
        self.stop_seen: Any = None
        self.asked_s: float | None = None
        self.killed_s: float | None = None
        self.clean_checks = 0
        self.first_good_exit_s: float | None = None
        self.started_s = time.monotonic()
        self.leftovers: list[dict[str, Any]] = []
        self.is_over = False
        exit_s = float(prepared.get("exit_s", exit_watch.EXIT_S))
        self.tick_s = max(0.02, min(TICK_S, exit_s / 4))
        self.next_tick_s = 0.0
        self.wake_fd = self._catch_signals()
        self.folder_thread: FolderThread | None = None

    def run(self) -> None:
        self._check_lease()
        if not self._check_stop_file() and self.stopping_by is None:
            self._start_ranks()
            self._guard("start-sampler", self.sampler.start, self.prepared)
            if self.sampler.fd is not None:
                self.poll.register(self.sampler.fd, select.POLLIN)
        if self.streams_dir != self.folder:  # after the last fork
            wake = partial(os.write, self.alarm_fd, b"\0")
            self.folder_thread = FolderThread(self._look_at_folder, wake=wake, every_s=self.tick_s)
            self.folder_thread.start()
        while not self.is_over:
            self._turn()
        self._finish()

    # --- start ---

    def _make_rank(self, plan: dict[str, Any]) -> Rank:
        default = self._own_files(int(plan["rank"]))[METRICS_VARIABLE]
        watch = exit_watch.ExitWatch(
            exit_s=float(self.prepared.get("exit_s", exit_watch.EXIT_S)),
            linger_s=float(self.prepared.get("linger_s", exit_watch.LINGER_S)),
        )
        return Rank(
            plan,
            self.streams_dir,
            limit=int(self.prepared.get("rotate_bytes", ROTATE_BYTES)),
            watch=watch,
            metrics=plan["env"].get(METRICS_VARIABLE) or default,
        )

    def _own_files(self, number: int) -> dict[str, str]:
        """Return the variables that name a rank's own files."""
        stem = os.path.join(self.streams_dir, layout.process_name(number))
        return {METRICS_VARIABLE: stem + ".metrics.0", "TORCHELASTIC_ERROR_FILE": stem + ".error.0"}

    def _catch_signals(self) -> int:
        ours, theirs = os.pipe()
        for fd in (ours, theirs):
            os.set_blocking(fd, False)
        for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self.alarm_fd = theirs
        signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        self.poll.register(ours, select.POLLIN)
        return ours

    def _start_ranks(self) -> None:
        if self.launched is not None:
            self.launched.start()
            return
        for rank in self.ranks:
            argv, own = rank.plan["argv"], dict(self._own_files(rank.number), **rank.plan["env"])
            if not self.start(rank, argv, self.environ(own), self.prepared["cwd"], setup=self.prepared.get("setup")):
                return

    def environ(self, own: dict[str, str]) -> dict[bytes, bytes]:
        """Return the environment of a process. `own`: variables of the plan."""
        root, library = layout.root_of(self.folder), self.prepared.get("library")
        return rank_environ(
            os.environb,
            own,
            master_port=self.master_port,
            hccl_base=self.spec.get("hccl_base"),
            secret=self.spec.get("secret_env") or {},
            tag=self.tag,
            root=root,
            library=layout.tree_dir(root, library) if library else None,
        )

    def start(self, rank: Rank, argv: list[str], env: dict[bytes, bytes], cwd: str, *, setup: str | None) -> bool:
        """Start the process and record it; False: the system refused, which is recorded and ends the others."""
        try:
            self._start(rank, argv, env, cwd, setup)
        except OperationError as refusal:
            self.records.add("start_failed", rank=None if rank.is_launcher else rank.number, **refusal.as_json())
            rank.code, rank.has_ended = 127, True
            self._record_exit(rank, 127 << 8, None)
            key = "launcher-not-started" if rank.is_launcher else "rank-not-started"
            self._stop("failure", message(key, rank=rank.number))
            return False
        return True

    def _start(self, rank: Rank, argv: list[str], env: dict[bytes, bytes], cwd: str, setup: str | None) -> None:
        started = start_rank(
            [put_port(part, self.master_port) for part in argv],
            env,
            cwd=cwd,
            setup=setup,
            umask=int(self.spec["umask"]),
            enter=lambda: cgroup.enter_group(self.group),
            keep=self.leases.get("devices") or (),  # whoever outlives this process keeps the devices leased
        )
        failpoint("agent.after_fork_before_record")
        stat = procs.read_stat(started.pid)
        rank.started, rank.start_ticks = started, stat.start if stat else -1
        self.by_pid[started.pid] = rank
        self.watch(started.out_fd, rank, "out")
        self.watch(started.err_fd, rank, "err")
        self.records.add(
            "rank_started",
            rank=rank.number,
            local_rank=rank.plan["local_rank"],
            pid=started.pid,
            start=rank.start_ticks,
        )
        failpoint("agent.after_record")

    def watch(self, fd: int, rank: Rank, stream: str) -> None:
        self.streams[fd] = (rank, stream)
        self.poll.register(fd, select.POLLIN)

    # --- one iteration ---

    def has_running(self) -> bool:
        return any(process.runs for process in self.processes)

    def _turn(self) -> None:
        ready = self.poll.poll(self._wait_ms())
        self._guard("read-output", self._read_output, ready)
        self._guard("signals", self._handle_signals)
        self._guard("exits", self._reap)
        now = time.monotonic()
        if now >= self.next_tick_s:
            self.next_tick_s = now + self.tick_s
            self._guard("checks", self._tick, now)
            self._guard("lease", self._check_lease)
        self._guard("stop", self._climb, now)
        if not self.has_running() or self.killed_s is not None:
            self._guard("processes", self._sweep, now)

    def _guard(self, step: str, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except OSError as error:
            self.io_errors.note(step, error)

    def _read_output(self, ready: list[tuple[int, int]]) -> None:
        moved = self._read_ready([fd for fd, _ in ready])
        if 0 < moved < SMALL_BYTES:
            select.select([self.wake_fd], [], [], BATCH_S)

    def _wait_ms(self) -> int:
        now = time.monotonic()
        if self.killed_s is not None or not self.has_running():
            patient = self.killed_s is not None and now - self.killed_s > 1.0
            return int((PATIENT_SWEEP_S if patient else SWEEP_S) * 1000)
        until = self.next_tick_s
        step = self.ladder.next_s()
        if step is not None:
            until = min(until, step)
        return max(0, int((until - now) * 1000) + 1)

    def _read_ready(self, fds: list[int]) -> int:
        moved = 0
        for fd in fds:
            if fd == self.sampler.fd:
                self._add_forked_ranks(fd)
            elif fd not in self.streams:
                if not self.forked.handle(fd) and self.launched is not None:
                    self.launched.handle(fd)
            else:
                moved += self._read_stream(fd)
        return moved

    def _read_stream(self, fd: int) -> int:
        rank, stream = self.streams[fd]
        chunk = read_some(fd)
        if chunk:
            rank.spools[stream].write(chunk, time.time_ns())
        elif chunk is not None:
            self._unwatch(fd)
        return len(chunk or b"")

    def _add_forked_ranks(self, fd: int) -> None:
        found = self.sampler.found_ranks()
        if found is None:
            self.poll.unregister(fd)
        for rank in found or ():
            self.forked.add(rank["rank"], rank["pid"], rank["start"])

    def _record_forked(self, event: str, values: dict[str, Any]) -> None:
        self.records.add(event, stopped=self.stopping_by is not None, **values)

    def _unwatch(self, fd: int) -> None:
        rank, stream = self.streams.pop(fd)
        self.poll.unregister(fd)
        assert rank.started is not None
        pipe = rank.started.process.stdout if stream == "out" else rank.started.process.stderr
        assert pipe is not None
        pipe.close()

    def _handle_signals(self) -> None:
        received = read_some(self.wake_fd, 4096) or b""
        now = time.monotonic()
        if signal.SIGUSR1 in received:
            self.asked_s = now
        if signal.SIGTERM in received:
            if self.asked_s is not None and now - self.asked_s < HEAD_SIGNALS_S:
                self._stop("head", message("stop-requested"))
            else:
                self._stop("node", message("supervisor-terminated"))
        if signal.SIGUSR1 in received and self.folder_thread is not None:
            self.folder_thread.ask()
        if received:
            self._check_stop_file()

    def _tick(self, now: float) -> None:
        if self.folder_thread is None:
            self._keep_folder()
        if not self.records.flush() and self.records.error is not None:
            self.io_errors.note("records", self.records.error)
        self._guard("roll", self._write_roll, now)
        self._check_stop_file()
        limit_s = self.prepared.get("max_s")
        if limit_s is not None and now - self.started_s >= limit_s:
            self._stop("limit", message("run-limit", limit_s=limit_s))
        for process in self.processes:
            self._record_dropped(process, now, last=False)
        self.forked.check()
        for rank in self.ranks:
            if rank.runs:
                self._check_hung_ranks(rank, now)

    # --- ends ---

    def _reap(self) -> None:
        """Record every end first, then decide: of two that ended together the first counts as the cause."""
        bad = None
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            rank = self.by_pid.pop(pid, None)
            if rank is None:
                continue
            failpoint("agent.after_exit_before_record")
            rank.end(status)
            self._read_last(rank)
            self._record_exit(rank, status, usage)
            if self.launched is not None:
                self.launched.end(rank)
            if rank.result == 0 and self.first_good_exit_s is None:
                self.first_good_exit_s = time.monotonic()
            # A launcher ends because of a rank, unless it ended the rank.
            if rank.result != 0 and not rank.stopped_by_launcher and (bad is None or bad.is_launcher):
                bad = rank
        # While a stop is in progress, a rank that dies of the signal must not shorten the time of another to save.
        if bad is not None and self.stopping_by is None and self.has_running():
            key = ("launcher" if bad.is_launcher else "rank") + ("-exited" if bad.signal is None else "-killed")
            self._stop("failure", message(key, rank=bad.number, code=bad.code, signal=bad.signal))

    def _read_last(self, rank: Rank) -> None:
        assert rank.started is not None
        if rank.started.status_fd is not None:
            os.set_blocking(rank.started.status_fd, False)
            rank.setup_result = read_some(rank.started.status_fd, 1) or b""
            os.close(rank.started.status_fd)
        for fd, (owner, stream) in list(self.streams.items()):
            if owner is rank and drain(fd, rank.spools[stream]):
                self._unwatch(fd)

    def _record_exit(self, rank: Rank, status: int, usage: Any) -> None:
        if rank.setup_failed() and self.stopping_by is None and rank.result != 0:
            self.records.add(
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
        rank.was_stopped = self.stopping_by is not None or rank.stopped_by_launcher
        self.records.add(
            "rank_exited", rank=rank.number, code=rank.code, signal=rank.signal, stopped=rank.was_stopped, **fields
        )
        failpoint("agent.after_exit_record")

    def _explain_setup(self, rank: Rank) -> dict[str, Any]:
        if rank.setup_result == b"m":
            return message("no-command-after-setup", path=rank.plan["argv"][0])
        output = rank.spools["err"].tail(2000).decode("utf-8", "replace").strip()
        return message("setup-failed", status=rank.result, output=output or None)

    # --- hung at exit ---

    def _check_hung_ranks(self, rank: Rank, now: float) -> None:
        if rank.check_done():
            rank.watch.see_done(now)
        if self.stopping_by is not None:
            return
        why = rank.watch.check(
            now, cpu_s=rank.cpu_s(), written_bytes=rank.written_bytes, other_exited_s=self.first_good_exit_s
        )
        if why is None:
            return
        self.records.add("rank_lingers", rank=rank.number, why=why, after_s=rank.watch.limit_s(why))
        if why == exit_watch.FINISHED:
            rank.killed_as_finished = True
            rank.send(signal.SIGKILL)

    # --- stopping ---

    def _check_stop_file(self) -> bool:
        """Return True when a stop was requested, now or before. A file that cannot be read is no request."""
        order: dict[str, Any] | None = None
        error: OSError | None = None
        if self.folder_thread is not None:
            order, error, self.folder_thread.error = self.folder_thread.order, self.folder_thread.error, None
        else:
            try:
                order = read_json(os.path.join(self.folder, STOP))
            except UnreadableError as failure:
                error = failure
        if error is not None:
            self.io_errors.note("stop-file", error)
        if order is None:
            return self.stop_seen is not None
        if order != self.stop_seen:
            self.stop_seen = order
            self._acknowledge_stop()
            by, key = ("hung", "stop-hung") if order.get("hung") else ("head", "stop-requested")
            self._stop(by, message(key), now=bool(order.get("now")), grace_s=order.get("grace_s"))
        return True

    def _check_lease(self) -> None:
        """End the ranks when the head has not renewed the attempt's lease for too long; see node/head_lease.py."""
        fence_s = self.prepared.get("fence_s")
        if fence_s is None:
            return
        try:
            began_ns = head_lease.began_ns(os.path.join(self.streams_dir, RENEWED))
            self.lease_began_ns = max(self.lease_began_ns, began_ns)
        except OSError as error:
            self.io_errors.note("lease", error)
        if head_lease.is_over(self.lease_began_ns, fence_s=fence_s, grace_s=float(self.prepared["stop"]["grace_s"])):
            self._stop("fence", message("head-unreachable", limit_s=fence_s))

    def _acknowledge_stop(self) -> None:
        """Rename the request's file: a supervisor that leaves it is recognised as hung."""
        with contextlib.suppress(OSError):
            os.replace(os.path.join(self.folder, STOP), os.path.join(self.folder, STOP_TAKEN))

    def _stop(self, by: str, reason: Message, *, now: bool = False, grace_s: float | None = None) -> None:
        """Set the steps to the end; steps slower than the current ones change nothing."""
        plan = self.prepared["stop"]
        at = time.monotonic()
        grace_s = 0.0 if now else float(plan["grace_s"] if grace_s is None else grace_s)
        steps = (
            stopping.kill_now(at) if now else stopping.steps_for(by, now_s=at, signal=plan["signal"], grace_s=grace_s)
        )
        if not self.ladder.set(steps):
            return
        self.stopping_by = self.stopping_by or by
        fields = {"done": True} if all(rank.check_done() for rank in self.ranks) else {}
        self.records.add("stopping", reason=reason, by=by, signal=steps[0].signal, grace_s=grace_s, **fields)
        failpoint("stop.after_mark")
        self._climb(at)

    def _climb(self, now: float) -> None:
        for step in self.ladder.due(now):
            number = getattr(signal, "SIG" + step.signal)
            if step.signal == "KILL":
                failpoint("stop.before_kill")
                self.killed_s = self.killed_s or now
            if step.signal == "ABRT":
                stacks.abort(self._find())
                continue
            if not step.everything:
                running = [rank for rank in self.ranks if rank.runs]
                for process in running or self.processes:  # a launcher would kill ranks that save for long
                    process.send(number)
                continue
            for pid, start in self._find():
                procs.send_signal(pid, start, number)
            failpoint("stop.after_kill_before_confirm" if step.signal == "KILL" else "stop.after_term")

    def _find(self) -> list[tuple[int, int]]:
        leaders = {one.started.pid: one.start_ticks for one in self.processes if one.started is not None}
        return reap.find_attempt(
            self.tag,
            root=layout.root_of(self.folder),
            supervisor=os.getpid(),
            ranks=leaders,
            extra=cgroup.group_pids(self.group),
            has_sampler=self.sampler.is_on,
        )

    def _sweep(self, now: float) -> None:
        """Check, twice, that no process is left after the ranks' end and KILL: a process may fork during a check."""
        found = self._find()
        if not found and not self.has_running():
            self.clean_checks += 1
            self.is_over = self.clean_checks >= CLEAN_CHECKS
            return
        self.clean_checks = 0
        if self.killed_s is None:
            self._end_remaining(len(found), now)
            return
        for pid, start in found:
            procs.send_signal(pid, start, signal.SIGKILL)
        if now - self.killed_s >= stopping.UNKILLABLE_S:
            self.leftovers = procs.describe_all(found, since_ns=time.time_ns() - int((now - self.killed_s) * 1e9))
            self.is_over = True

    def _end_remaining(self, count: int, now: float) -> None:
        if not self.ladder.set(stopping.steps_for("finished", now_s=now, signal="TERM", grace_s=0.0)):
            return
        if self.stopping_by is None:
            self.stopping_by = "finished"
            self.records.add(
                "stopping",
                reason=message("processes-remain", count=count),
                by="finished",
                signal="TERM",
                grace_s=stopping.REMAINING_GRACE_S,
            )
        self._climb(now)

    # --- the end ---

    def _record_dropped(self, rank: Rank, now: float, *, last: bool) -> None:
        for stream, spool in rank.spools.items():
            if not spool.flush() and spool.error is not None:
                self.io_errors.note("logs", spool.error)
            while spool.cuts:
                generation, had = spool.cuts.pop(0)
                self.records.add("log_cut", rank=rank.stream_number, stream=stream, generation=generation, had=had)
        for stream, generation, offset, count in rank.new_holes(now, last=last):
            self.records.add(
                "log_dropped",
                rank=rank.stream_number,
                stream=stream,
                generation=generation,
                offset=offset,
                bytes=count,
                reason=rank.spools[stream].drop_reason.strip(),
            )

    def _look_at_folder(self) -> dict[str, Any] | None:
        """Return the request to stop, None: none. Raises OSError: unknown."""
        self._keep_folder()
        return read_json(os.path.join(self.folder, STOP))

    def _keep_folder(self) -> None:
        """Make the attempt's folders again if they were removed: the records of the ranks' ends need a place."""
        if self.streams_dir != self.folder and not exists(self.streams_dir):
            make_private_dir(self.streams_dir)
        if exists(self.folder):
            return
        make_private_dir(self.folder)
        if self.streams_dir != self.folder:
            write_json(os.path.join(self.folder, WHERE), {"streams": self.streams_dir})
        write_json(os.path.join(self.folder, IDENTITY), self.identity)
        write_json(os.path.join(self.folder, PREPARED), self.prepared)

    def _write_roll(self, now: float) -> None:
        """Record the living descendants. After this process's death they have a trace, also without an environment."""
        if now < self.next_roll_s:
            return
        table = procs.snapshot()
        self.next_roll_s = now + max(TICK_S, ROLL_COST * (time.monotonic() - now))
        found = reap.descendants(table, {os.getpid()}) - {os.getpid()}
        roll = sorted((pid, table[pid].start) for pid in found if not table[pid].is_dead)
        if roll != self.roll:
            value = {"boot_id": self.identity["boot_id"], "seen": roll}
            write_json(os.path.join(self.streams_dir, ROLL), value, durable=False)
            self.roll = roll

    def _write_last_output(self) -> None:
        deadline = time.monotonic() + LAST_TRY_S
        spools = [spool for process in self.processes for spool in process.spools.values()]
        while time.monotonic() < deadline:
            errors = [spool.error for spool in spools if not spool.flush(now=True)]
            if all(error is None or error.errno in (errno.ENOSPC, errno.EDQUOT) for error in errors):
                break
            select.select([], [], [], self.tick_s)  # time.sleep fails where a test shifts this host's clock
            self._guard("checks", self._tick, time.monotonic())
        for spool in spools:
            spool.close()

    def _finish(self) -> None:
        for fd, (rank, stream) in list(self.streams.items()):
            drain(fd, rank.spools[stream])
            self._unwatch(fd)
        self._write_last_output()
        for process in self.processes:
            self._record_dropped(process, time.monotonic(), last=True)
        self.io_errors.finish()
        if self.folder_thread is not None:
            self.folder_thread.ask(last=True)
        self._guard("forked-ranks", self.forked.check)
        self.sampler.end()
        failpoint("finish.before_terminal")
        if not self.leftovers:
            self._release_leases()
        free_reserve(self.streams_dir)
        write_end(
            self.folder,
            self.records,
            leftovers=self.leftovers,
            wait_s=TICK_S,
            codes={str(one.number): one.result for one in self.processes},
            exits={str(one.number): one.summary() for one in self.processes if one.has_ended},
        )
        cgroup.remove_group(self.group)
        if self.leftovers:
            self._await_leftovers()

    def _release_leases(self) -> None:
        for fd in (fd for fds in self.leases.values() for fd in fds):
            with contextlib.suppress(OSError):  # closed in any case
                os.close(fd)

    def _await_leftovers(self) -> None:
        """Stay until the processes that SIGKILL did not end are gone, and record that."""
        left = [(one["pid"], one["start"]) for one in self.leftovers]
        while procs.describe_all(left):
            select.select([self.wake_fd], [], [], LEFTOVERS_S)
            if signal.SIGTERM in (read_some(self.wake_fd, 4096) or b""):
                return
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        self.records.add("leftovers_gone", durable=True)
        while not self.records.flush() and self.records.error is not None and self.records.error.errno != errno.ENOENT:
            select.select([], [], [], LEFTOVERS_S)
