"""The serving agent: replies to the head's frames on standard input and output, and ends with its input."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import sys
import threading
import time

from ascendrun.node import layout, procs, wire
from ascendrun.node.agent.operations import Operation, Operations, node_state
from ascendrun.node.files import make_private_dir, replace_file, write_all
from ascendrun.node.layout import sha256
from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Mapping


READ_BYTES = 1 << 18
LAST_WORK_S = 5.0
"""Seconds that accepted requests may run after the input ended."""
MAX_QUEUES = 64
REVIVE_S = 5.0
"""Seconds after the end of the connection in which the guard of a killed controller, if it is alive, starts another."""
READS_ARCHIVE = frozenset({"prepare", "go", "stop", "processes", "live", "probe"})
"""Operations before which the agent checks that its archive exists. If it does not, the agent exits, and the head
installs it again."""


class WorkQueues:
    """Queues of jobs, each with a thread that exists while the queue has jobs."""

    def __init__(self) -> None:
        self._queues: dict[str, collections.deque[Callable[[], object]]] = {}
        self._idle = threading.Condition()

    def add(self, queue: str, job: Callable[[], object]) -> bool:
        """Add a job. False: too many queues are busy and the job was not accepted."""
        with self._idle:
            waiting = self._queues.get(queue)
            if waiting is not None:
                waiting.append(job)
                return True
            if len(self._queues) >= MAX_QUEUES:
                return False
            self._queues[queue] = collections.deque([job])
        threading.Thread(target=self._run, args=(queue,), daemon=True, name="lane-" + queue).start()
        return True

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every job is done; False at the timeout."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._queues, timeout_s)

    def _run(self, queue: str) -> None:
        while True:
            with self._idle:
                waiting = self._queues[queue]
                if not waiting:
                    del self._queues[queue]
                    self._idle.notify_all()
                    return
                job = waiting.popleft()
            job()


class Pending:
    """A request in progress: gets exactly one reply, by the work or by its deadline."""

    def __init__(self, number: Any, op: str, deadline: float | None) -> None:
        self.number = number
        self.op = op
        self.deadline = deadline
        self.is_answered = False
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Return True for the first caller only, which sends the reply."""
        with self._lock:
            first, self.is_answered = not self.is_answered, True
            return first


class Agent:
    """The main loop. Fast operations run in it, the others in threads, so that a heartbeat is never late.

    `keep()` stores modules that were compiled.
    """

    def __init__(
        self,
        root: str,
        *,
        agent: list[str],
        umask: int,
        in_fd: int,
        out_fd: int,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        login = dict(os.environb)
        clean = {name: value for name, value in login.items() if name.decode("utf-8", "replace") not in layout.OURS}
        self._root = root
        self._agent = agent
        self._in_fd = in_fd
        self._keep = keep
        self._queues = WorkQueues()
        self._can = Operations(
            root,
            agent=agent,
            umask=umask,
            login=login,
            clean=clean,
            send=lambda header, body: self.outbox.send(header, body),
        )
        is_busy = self._can.follower.is_busy
        self._beat_s = wire.BEAT_S
        self.outbox = Outbox(out_fd, lambda: self.close(0), lambda: self._beat_s if is_busy() else wire.RESTING_BEAT_S)
        self._operations = self._can.table()
        self._operations["watch_head"] = Operation(self._watch_head, "", None)
        self._operations["fence"] = Operation(self._take_fence, "own", 30)
        self._fence: tuple[str, int] | None = None
        self._head: tuple[str, list[str], dict[str, str]] | None = None
        self._pending: list[Pending] = []
        self._own_queues = 0

    def run(self) -> int:
        """Run until the input ends, `bye`, an invalid frame, or silence of the head."""
        self.outbox.send(hello(self._root, self._agent[-1]))
        self._queues.add("keep", lambda: keep_interpreter(self._agent[-1]))
        self._queues.add("keep", self._can.commands)  # imports modules in advance for the first command
        self._queues.add("keep", self._keep)
        reader = wire.FrameReader()
        silent_mono = time.monotonic() + wire.HEAD_SILENT_S
        while True:
            self._pending = [pending for pending in self._pending if not pending.is_answered]
            deadlines = [pending.deadline for pending in self._pending if pending.deadline is not None]
            wait_s = max(0.0, min([*deadlines, silent_mono]) - time.monotonic())
            readable, _, _ = select.select([self._in_fd], [], [], wait_s)
            self._expire(time.monotonic())
            if not readable:
                if time.monotonic() >= silent_mono:
                    return 0
                continue
            silent_mono = time.monotonic() + wire.HEAD_SILENT_S
            data = os.read(self._in_fd, READ_BYTES)
            if not data:
                return 0
            try:
                frames = reader.feed(data)
            except wire.FrameError as error:
                sys.stderr.write(f"ascendrun agent: {error}\n")
                return 2
            for header, body in frames:
                self._take(header, body)
                if header.get("op") == "bye":
                    return 0

    def close(self, status: int) -> None:
        """End commands, let accepted requests finish, and exit even if threads still hang."""
        self._can.end_commands()
        self._queues.wait_idle(LAST_WORK_S)
        self._keep()
        self.outbox.flush(1.0)
        if self._head is not None:
            revive(*self._head)
        os._exit(status)

    def _watch_head(self, request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        self._head = request["lock"], request["argv"], request["env"]
        return {}, b""

    def _take_fence(self, request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Serve a head of this term from now on. The reply is read when lower ones change nothing more."""
        self._fence = request["head_id"], request["term"]
        self._can.terms.admit(*self._fence)
        return dict(node_state(self._root)), b""

    # --- requests ---

    def _take(self, header: dict[str, Any], body: bytes) -> None:
        name = str(header.get("op"))
        self._beat_s = min(wire.MOST_BEAT_S, header.get("beat_s", self._beat_s))
        operation = self._operations.get(name)
        if operation is None:
            self._refuse(header.get("id"), OperationError("unknown-op", "unknown-op", op=name, version=wire.PROTOCOL))
            return
        deadline_s = header.get("deadline_s") or operation.deadline_s
        pending = Pending(header.get("id"), name, time.monotonic() + deadline_s if deadline_s else None)

        def job() -> None:
            self._work(pending, operation, header, body)

        if not operation.queue:
            job()
            return
        if pending.deadline is not None:
            self._pending.append(pending)
        if not self._queues.add(self.queue_of(name, header), job):
            pending.take()
            self._refuse(pending.number, OperationError("busy", "busy"))

    def queue_of(self, op: str, header: Mapping[str, Any]) -> str:
        """Return the queue of a request. Requests of one queue run one after the other."""
        kind = self._operations[op].queue
        if kind == "own":
            self._own_queues += 1
            return "own-%d" % self._own_queues
        if kind == "release":  # a slow disk must not delay the stop of the same attempt
            return "release-{}".format(header.get("tag"))
        return f"{kind}-{header.get(kind)}"

    def _work(self, pending: Pending, operation: Operation, header: dict[str, Any], body: bytes) -> None:
        if operation.queue and pending.op in READS_ARCHIVE and self._is_removed():
            self.close(0)
        try:
            if self._fence is not None and pending.op not in wire.READING:
                self._can.terms.admit(*self._fence)
            fields, reply_body = operation.run(header, body)
            failure = None
        except Exception as error:  # the agent serves other requests too: an error of one is reported and printed
            failure = explain(error, pending.op)
        if not pending.take():
            return
        if failure is not None:
            self._refuse(pending.number, failure)
        else:
            self.outbox.send(dict(fields, re=pending.number, ok=True), reply_body)

    def _is_removed(self) -> bool:
        """Return whether the agent's own archive is gone: it can start no supervisor and import nothing more."""
        try:
            os.stat(self._agent[-1])
        except FileNotFoundError:
            return True
        except OSError:  # the file system does not respond well, which may pass
            pass
        return False

    def _refuse(self, number: Any, failure: OperationError) -> None:
        self.outbox.send({"re": number, "ok": False, "error": failure.as_json()})

    # --- deadlines ---

    def _expire(self, now: float) -> None:
        for pending in self._pending:
            if pending.deadline is not None and pending.deadline <= now and pending.take():
                self._refuse(pending.number, OperationError("deadline", "deadline", op=pending.op))


def revive(lock: str, argv: list[str], env: dict[str, str]) -> None:
    """Become the guard of a new controller on this machine, the head node. Return if the last one ended on purpose."""
    until = time.monotonic() + REVIVE_S
    with contextlib.suppress(OSError):
        while procs.read_line(lock).isdigit():  # not after an end on purpose
            if time.monotonic() >= until:
                os.execve(argv[0], argv, {**os.environ, **env})  # it does nothing while a controller runs
            time.sleep(0.1)


def explain(error: Exception, op: str) -> OperationError:
    """Return the exception of an operation as an OperationError."""
    if isinstance(error, OperationError):
        return error
    if isinstance(error, (KeyError, TypeError, ValueError, AttributeError)):
        return OperationError("bad-request", "bad-request", op=op, error=f"{type(error).__name__}: {error}")
    import traceback

    sys.stderr.write("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    return OperationError("internal", "internal", op=op, error=f"{type(error).__name__}: {error}")


def main(*, keep: Callable[[], None]) -> int:
    """Run `serve`, the command that the loader starts."""
    umask = os.umask(0o077)
    root = layout.node_root(os.environ)
    try:
        make_private_dir(root)
    except (OperationError, OSError) as error:
        sys.stderr.write(f"ascendrun agent: cannot use {root}: {error}\n")
        return 96
    null = os.open(os.devnull, os.O_RDONLY)
    in_fd, out_fd = private_copy(0, null), private_copy(1, 2)
    os.write(out_fd, wire.MAGIC)
    command = [sys.executable or os.readlink("/proc/self/exe"), "-I", "-S", os.path.abspath(sys.argv[0])]
    agent = Agent(root, agent=command, umask=umask, in_fd=in_fd, out_fd=out_fd, keep=keep)
    agent.close(agent.run())
    return 0


LIMIT_BYTES = 4 << 20
JOIN_BYTES = 1 << 18
"""Bytes: waiting frames are joined into writes of about this size: the head's cost is per packet, not per byte."""


class Outbox:
    """`on_broken` is called once, in the writer's thread, when the reader is gone; `beat_s` returns the maximum length
    of the next pause."""

    def __init__(self, fd: int, on_broken: Callable[[], None], beat_s: Callable[[], float]) -> None:
        self._fd = fd
        self._beat_s, self._next_s = beat_s, wire.BEAT_S  # the pause of which the head knows by the last beat
        self._on_broken = on_broken
        self._frames: collections.deque[bytes] = collections.deque()
        self._waiting_bytes = 0
        self._busy = False
        self._broken = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="writer").start()

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Queue a frame; wait while the reader is slow. Without a reader frames are dropped."""
        frame = wire.pack(header, body)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes < LIMIT_BYTES or self._broken)
            if not self._broken:
                self._frames.append(frame)
                self._waiting_bytes += len(frame)
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written; False at the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._broken or not (self._frames or self._busy), timeout_s)

    def _run(self) -> None:
        while True:
            data = self._take()
            try:
                write_all(self._fd, data)
            except OSError:
                with self._changed:
                    self._broken = True
                    self._changed.notify_all()
                self._on_broken()
                return

    def _take(self) -> bytes:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: bool(self._frames), min(self._next_s, self._beat_s())):
                self._next_s = self._beat_s()
                return wire.pack({"event": "beat", "at_ns": time.time_ns(), "rests": self._next_s > wire.MOST_BEAT_S})
            joined = []
            size = 0
            while self._frames and size < JOIN_BYTES:
                joined.append(self._frames.popleft())
                size += len(joined[-1])
            self._waiting_bytes -= size
            self._busy = True
            self._changed.notify_all()
            return b"".join(joined)


def private_copy(fd: int, replacement: int) -> int:
    """Return a private copy of a standard stream; `replacement` replaces it, so no stray print or child uses it."""
    mine = os.dup(fd)
    os.set_inheritable(mine, False)
    os.dup2(replacement, fd)
    return mine


def hello(root: str, agent_path: str) -> dict[str, Any]:
    """Return the agent's first event."""
    with open(agent_path, "rb") as file:
        digest = sha256(file.read()).hexdigest()
    return {
        "event": "hello",
        "protocol": wire.PROTOCOL,
        "agent_sha256": digest,
        "pid": os.getpid(),
        "boot_id": procs.boot_id(),
        "machine_id": procs.read_line("/etc/machine-id"),
        "hostname": os.uname().nodename,
        "user": procs.user_name(os.geteuid()),
        "uid": os.geteuid(),
        "root": root,
        "python": sys.executable or os.readlink("/proc/self/exe"),
        "python_version": ".".join(str(part) for part in sys.version_info[:3]),
        "kernel": os.uname().release,
        "arch": os.uname().machine,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "at_ns": time.time_ns(),
        "machine_key": layout.machine_key(),
        "net_ns": inode("/proc/self/ns/net"),
        **node_state(root),
    }


def inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def keep_interpreter(agent_path: str) -> None:
    """Store the path of this agent's interpreter in agent-<hash>.<host name>.python, for the login line of
    node/loader.py, which empties it at each start. Never raises: without it the next login searches for a Python again.
    """
    if agent_path.endswith(".pyz") and sys.executable:
        path = "%s.%s.python" % (agent_path[: -len(".pyz")], os.uname().nodename)
        with contextlib.suppress(OSError):
            replace_file(path, os.fsencode(sys.executable) + b"\n", durable=False)
