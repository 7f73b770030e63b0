"""The controller's loop: requests, replies of nodes and timers, each handled in one thread."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.errors import AscendrunError, ControllerReplacedError, SupersededError
from ascendrun.core.retention import Retention
from ascendrun.core.settings import SETTINGS
from ascendrun.head.agents.connections import Connections
from ascendrun.head.loop.context import Context
from ascendrun.head.loop.guard import LOCK_NAME, environment, guard_pid, is_guard_lost
from ascendrun.head.loop.live_jobs import LiveJobs
from ascendrun.head.loop.monitors import Monitors, PulseWriter
from ascendrun.head.loop.operations import Operations
from ascendrun.head.loop.replica import OPS as STANDBY_OPS
from ascendrun.head.loop.requests import Requests
from ascendrun.head.loop.steps import Guard
from ascendrun.head.loop.watch import LoopWatch
from ascendrun.head.notify.notifier import Notifier, NotifierMaker
from ascendrun.head.protocol import control_messages as messages
from ascendrun.head.protocol.agent_bootstrap import AgentImage
from ascendrun.head.protocol.agent_messages import AgentInfo, WatchHead
from ascendrun.head.protocol.control_socket import RESTARTS, RESTARTS_HINT, Answer, ControlServer
from ascendrun.head.protocol.file_messages import ArtifactData
from ascendrun.head.protocol.messages import Done, Message
from ascendrun.head.protocol.release import import_everything, own_release, release_on_disk
from ascendrun.head.protocol.remote import AgentConnection, ConnectionListener, Fence
from ascendrun.head.ssh.transport import Backend
from ascendrun.head.state.job_table import StoredJob
from ascendrun.head.state.state_dir import clock_now
from ascendrun.head.state.store import Store
from ascendrun.head.state.store_file import LostLeaseError, give_up
from ascendrun.head.waiting import run_within
from ascendrun.node.loader import read_sources
from ascendrun.node.procs import boot_id

if TYPE_CHECKING:
    from ascendrun.core.standby_settings import Standby
    from ascendrun.head.agents.lease import HeadLease

TICK_S = 0.25
PRELOAD_AFTER_S = 10.0
"""Seconds from the first job until the modules for later are imported: its start has the processor for itself."""
RESTING_TICK_S = 1.0
"""Seconds between ticks without a live job, so that hundreds of open connections cost almost nothing."""
AWAY_S = 5.0
"""A longer time between two ticks means that this process was suspended, or that the clock was set."""
TOGETHER = 1000
"""Posted calls that run before their results are stored: a thousand ranks start in few commits. Those for which there
is no time before the next tick wait: a thousand connections at once would hold the loop for seconds."""
SWITCH_S, SWITCH_HOSTS = 0.0005, 100
"""Python lets a busy thread run for 5 ms, and who handles a reply would wait so long after each system call. With more
hosts the time grows, to 5 ms with 1000: the loop is what is busy then, and with less it is late by seconds."""
IDLE_S = 600.0
"""Seconds without a live job and a request after which the controller ends; connections stay open until then."""


ALLOCATOR = {-8: 1, -3: 32 << 10, -1: 128 << 10}
"""M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's malloc.h, with the values of `give_back_memory`."""


def switch_interval_s(hosts: int) -> float:
    """Return how long a thread runs before another one gets the interpreter, with so many connections."""
    return SWITCH_S * max(1.0, hosts / SWITCH_HOSTS)


def give_back_memory() -> None:
    """Have glibc return the memory of large blocks: replies of many hosts come at once, in as many threads, and by
    default leave a heap for each few of them. Another libc stays as it is."""
    import ctypes

    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for name, value in ALLOCATOR.items():
            libc.mallopt(name, value)


class Controller:
    """One for each state directory; the caller holds its lock. Use from `run`'s thread, except marked methods."""

    def __init__(
        self,
        state_dir: Path,
        backend: Backend,
        *,
        idle_s: float = IDLE_S,
        notifier: NotifierMaker = Notifier,
        retention: Retention | None = None,
        idle_check_s: float | None = None,
        shared_queue: Path | None = None,
        standby: Standby | None = None,
    ) -> None:
        """Open the store and take its lease. `shared_queue`: its directory. Raises StoreUnusableError, SupersededError,
        UnreachableError: the voters of a `standby` did not grant the first term."""
        release = own_release()  # before anything can replace the files
        self._state_dir, self._idle_s, self._idle_check_s = state_dir, idle_s, idle_check_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # signal handlers may write to it
        self._guard = Guard()
        self._store, self._is_restored = Store.open(state_dir), False
        if self._store.needs_restore():
            self._restore()
        self._notifier = notifier(self._store)
        self._store.jobs.outbox = self._notifier.outbox
        listener = ConnectionListener(
            on_up=lambda link: self.post(lambda: self._on_up(link)),
            on_down=lambda link, error: self.post(lambda: self._on_down(link, error)),
            on_event=self._on_link_event,
        )
        fence, self._lease = self._take_term(backend, standby)
        self._links = Connections(backend, AgentImage(read_sources()), listener, self.post, fence)
        self._context = Context(self._store, self._links, retention or Retention(), self._guard)
        if self._lease is not None:
            self._context.lease, self._context.steps.may_act = self._lease, partial(self._lease.allows, "go")
        self._jobs = LiveJobs(self._context)
        self._operations = Operations(self._links)
        self._monitors = Monitors(self._context, self._jobs, self._operations, idle_check_s)
        self._requests = Requests(self._context, self._jobs, self._operations, heal=self._heal)
        self._requests.handlers.update(
            {messages.Status: self._status, messages.Shutdown: self._shutdown, messages.CheckStore: self._check_store}
        )
        if shared_queue is not None:
            from ascendrun.head.loop.machine.share_use import known_here
            from ascendrun.head.queue.client import SharedQueue
            from ascendrun.head.queue.others import OtherUsers

            known = partial(known_here, state_dir)
            self._context.queue = SharedQueue(shared_queue, self._store.head_id, self.post, known)
            self._context.other_users = OtherUsers(shared_queue, state_dir)
        self._watch = LoopWatch()
        self._pulse = PulseWriter(state_dir, release, self._watch)
        self._ticked = (time.monotonic(), time.time())
        self._busy_mono = time.monotonic()
        self._open_requests = 0
        self._has_preloaded = False
        self._has_ended = threading.Event()
        self._is_over = self._is_stopped = False  # stopped: by a command
        self._is_replaced = False  # on disk, by another release
        self.restarts = False
        """Whether this process is to become the release on disk, with a guard, when `run` has returned."""
        self._server = ControlServer(state_dir, self._on_request, will_restart=self._will_restart)

    def _take_term(self, backend: Backend, standby: Standby | None) -> tuple[Fence | None, HeadLease | None]:
        """Return what this head shows to nodes, None: it never had a standby, and its lease, None: it needs none."""
        head = self._store.update_head()
        if standby is None and not head.term:
            return None, None
        from ascendrun.head.agents.lease import FixedTerm, HeadLease, claim_first

        if standby is None:
            return FixedTerm(head.head_id, self._store.update_head(voters=()).term), None
        standby.require_voters(head.voters)
        if not head.term:
            claim_first(backend, standby, self._store)
        host, head = os.uname().nodename, self._store.update_head(voters=[host.name for host in standby.voters])
        lease = HeadLease(standby, head, host, lambda vote: give_up(self._store, vote.host))
        return lease, lease

    # From any thread

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the controller's own thread, in order."""
        self._inbox.put(call)

    def _on_request(self, op: str, header: Mapping[str, Any], body: bytes, answer: Answer) -> None:
        if op in STANDBY_OPS:  # a stream that stays open is not a request in progress
            self.post(lambda: self._context.replica.serve(op, header, answer))
            return

        def answer_open(reply: Message | AscendrunError | None, body: bytes, is_last: bool) -> None:
            answer(reply, body, is_last)
            if is_last:
                self.post(self._close_request)

        self.post(lambda: self._serve(op, header, answer_open))

    def _will_restart(self, release: object) -> bool:
        """Return whether this process restarts soon: its files are of another release, which a command noticed."""
        if not self._is_replaced and release not in (None, own_release()):
            self._is_replaced = release_on_disk() != own_release()
        return self._is_replaced

    def _on_link_event(self, link: AgentConnection, event: Message, body: bytes) -> None:
        if isinstance(event, ArtifactData):
            self._context.take(link, event, body)
        else:
            self._jobs.handle_message(link, event, body)

    # The loop

    def run(self) -> None:
        """Run until stopped, idle, or the lease is lost."""
        signal.signal(signal.SIGTERM, lambda *_: self.post(self._end))
        signal.signal(signal.SIGINT, lambda *_: self.post(self._end))
        if self._lease is not None:
            self._lease.begin(self._links)
            self._context.replica.begin(self._lease)
        self._jobs.adopt_missing()
        self._search_lost()
        self._context.resume()
        self._guard(self._notifier.start)
        self._server.start()
        next_tick = time.monotonic()
        self._watch.start()
        try:
            while not self._is_over:
                run_within(self._inbox, self._guard, until_mono=next_tick, most=TOGETHER)
                if time.monotonic() >= next_tick:
                    self._watch.beat(TICK_S)
                    self._guard(self._tick)
                    wait_s = TICK_S if self._is_busy() else RESTING_TICK_S
                    next_tick = time.monotonic() + wait_s
                    self._watch.expect(wait_s)
                self._guard(self._jobs.steps.work_off)
                self._guard(self._context.replica.flush)
                if self._guard.store_is_damaged:
                    self._guard(self._heal)
                if self._is_busy():
                    next_tick = min(next_tick, time.monotonic() + TICK_S)
        except LostLeaseError as error:
            print(f"controller: {error.message}", flush=True)
        finally:
            self._close()

    def _close(self) -> None:
        self._has_ended.set()
        self._watch.close()
        self._guard(partial(self._context.replica.close, is_planned=self._is_stopped))
        self._server.close()
        if self.restarts:
            with suppress(queue.Empty):
                for _ in range(TOGETHER):
                    self._guard(self._inbox.get_nowait())  # requests that came too late have a reply
        self._guard(self._notifier.close)
        self._links.close()
        self._store.close()
        self._context.close()

    def _end(self) -> None:
        self._is_over = True

    def _tick(self) -> None:
        was_away = self._was_away()
        sys.setswitchinterval(switch_interval_s(self._links.count))
        if not self._store.is_in_place():
            self._heal()
        self._links.busy_hosts = sum(len(runner.job.hosts) for runner in self._jobs if not runner.job.is_terminal)
        self._links.tick()
        self._context.replica.tick()
        if self._lease is not None:
            self._lease.tick()
        self._pulse.tick(self._jobs)
        if self._jobs:
            if not self._has_preloaded:
                self._has_preloaded = True
                give_back_memory()
                threading.Thread(target=import_everything, args=(PRELOAD_AFTER_S, self._has_ended)).start()
            self._jobs.tick(was_away=was_away)
            self._context.kept_facts.tick()
        self._monitors.tick()
        self._notifier.beat([(runner.job.name, runner.job.id) for runner in self._jobs if not runner.job.is_terminal])
        self._guard(self._requests.tick)
        if (self._is_replaced or is_guard_lost()) and not self._is_over and self._is_quiet():
            self._is_over = self.restarts = True
        if self._is_busy() or self._idle_check_s is not None:
            self._busy_mono = time.monotonic()
        elif self._lease is None and time.monotonic() - self._busy_mono > self._idle_s:
            self._is_over = True

    def _was_away(self) -> bool:
        """Return whether this process was suspended: missing messages then mean nothing about the nodes."""
        before, self._ticked = self._ticked, (time.monotonic(), time.time())
        return max(abs(now - then) for now, then in zip(self._ticked, before)) > AWAY_S

    def _is_busy(self) -> bool:
        """Return whether any work is in progress."""
        is_working = self._operations.is_busy or self._notifier.is_waiting or self._context.is_fetching
        return is_working or self._jobs.is_busy(now_s=time.time())

    def _is_quiet(self) -> bool:
        """Return whether nothing is in progress that an immediate restart would repeat or refuse."""
        is_starting = any(runner.job.state.value in ("CHECKING", "STAGING", "STARTING") for runner in self._jobs)
        return not (self._open_requests or self._operations.is_busy or is_starting)

    def _on_up(self, link: AgentConnection) -> None:
        watch = watch_request(self._state_dir, link.info)
        if watch is not None:
            link.call(watch, deadline_s=AWAY_S, done=lambda reply: None)
        self._jobs.on_up(link)
        self._operations.on_up()
        self._context.on_up(link)

    def _on_down(self, link: AgentConnection, error: AscendrunError) -> None:
        if isinstance(error, SupersededError):
            give_up(self._store, "")
        self._jobs.on_down(link, error)
        self._operations.on_down(link, error)

    # The store

    def _heal(self) -> None:
        """Check the store; replace it and rebuild rows if it is damaged. Jobs keep running."""
        self._guard.store_is_damaged = False
        self._store.replace_if_damaged()
        self._restore(self._jobs.stored())
        self._jobs.adopt_missing()
        self._search_lost()

    def _restore(self, known: Sequence[StoredJob] = ()) -> None:
        from ascendrun.head.loop.rescue import restore_rows

        self._is_restored = restore_rows(self._store, known) or self._is_restored

    def _search_lost(self) -> None:
        """After a loss of rows: engines may run jobs of which nothing is left here."""
        if self._is_restored:
            self._is_restored = False
            self._guard(self._jobs.allocations.search)

    # Requests

    def _serve(self, op: str, header: Mapping[str, Any], answer: Answer) -> None:
        if self.restarts:
            answer(ControllerReplacedError(RESTARTS, hint=RESTARTS_HINT), b"", True)
            return
        self._busy_mono = time.monotonic()
        self._open_requests += 1
        self._requests.serve(op, header, answer)

    def _close_request(self) -> None:
        self._open_requests -= 1

    def _check_store(self, request: messages.CheckStore, answer: Answer) -> None:
        self._heal()
        answer(Done(), b"", True)

    def _status(self, request: messages.Status, answer: Answer) -> None:
        live = [runner.job.id for runner in self._jobs if not runner.job.is_terminal]
        pulse = self._pulse.make(self._jobs, clock_now())
        standby = None if self._lease is None else self._lease.status()
        answer(messages.ControllerStatus(os.getpid(), tuple(live), pulse, guard_pid(), standby), b"", True)

    def _shutdown(self, request: messages.Shutdown, answer: Answer) -> None:
        answer(Done(), b"", True)
        self._is_over = self._is_stopped = True


@cache
def _this_place() -> tuple[str, int]:
    """Return boot and network namespace of this process; read once, not for each of a thousand agents."""
    return boot_id(), os.stat("/proc/self/ns/net").st_ino


def watch_request(state_dir: Path, info: AgentInfo) -> WatchHead | None:
    """Return what an agent on this machine, of this user and outside containers, gets; None: it is elsewhere."""
    if info.uid != os.geteuid() or (info.boot_id, info.net_ns) != _this_place():
        return None
    argv, full = [sys.executable, "-m", "ascendrun.head.loop.guard"], environment(str(state_dir))
    names = {setting.variable for setting in SETTINGS} | {"XDG_CONFIG_HOME", "PYTHONPATH"}
    return WatchHead(str(state_dir / LOCK_NAME), argv, {name: full[name] for name in names & full.keys()})
