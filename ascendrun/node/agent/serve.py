"""The serving agent: replies to the head's frames on standard input and output, and ends with its input."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import sys
import threading
import time

from ascendrun.node import layout, wire
from ascendrun.node.agent import bytecode
from ascendrun.node.agent.follow import Follower, file_sizes
from ascendrun.node.agent.outbox import Outbox, private_copy
from ascendrun.node.files import make_private_dir
from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Mapping, NamedTuple

    from ascendrun.node.agent.attempts import Attempts
    from ascendrun.node.agent.execute import Commands
    from ascendrun.node.agent.trees import Trees

    class Operation(NamedTuple):
        """`run(request, body)` returns (fields, body). `queue`: "" runs in the loop itself, immediately; "tag" and
        "sha256" keep order per attempt or tree; "own" runs in parallel to everything. `deadline_s`: when the head gets
        a reply even if the work is not done; None: the request's own time-out decides."""

        run: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]
        queue: str
        deadline_s: float | None
else:
    Operation = collections.namedtuple("Operation", "run queue deadline_s")

READ_BYTES = 1 << 18
LAST_WORK_S = 5.0
"""Seconds that accepted requests may run after the input ended."""


MAX_QUEUES = 64
READS_ARCHIVE = frozenset({"prepare", "go", "stop", "processes", "live", "probe"})
"""Operations before which the agent checks that its archive exists. If it does not, the agent exits, and the head
installs it again."""


class WorkQueues:
    """Queues of jobs, each with a thread that exists while the queue has jobs."""

    def __init__(self) -> None:
        self._queues: dict[str, collections.deque[Callable[[], None]]] = {}
        self._idle = threading.Condition()

    def add(self, queue: str, job: Callable[[], None]) -> bool:
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
        self._answered = False
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Return True for the first caller only, which sends the reply."""
        with self._lock:
            first, self._answered = not self._answered, True
            return first

    @property
    def is_answered(self) -> bool:
        return self._answered


class Agent:
    """The main loop. Fast operations run in it, the others in threads, so that a heartbeat is never late."""

    def __init__(self, root: str, *, agent: list[str], umask: int, in_fd: int, out_fd: int) -> None:
        login = dict(os.environb)
        clean = {name: value for name, value in login.items() if name.decode("utf-8", "replace") not in layout.OURS}
        self._root = root
        self._agent = agent
        self._umask = umask
        self._in_fd = in_fd
        self._queues = WorkQueues()
        self._login, self._clean_login = login, clean
        self._making = threading.RLock()
        self._made: dict[str, Any] = {}
        self._follower = Follower(
            root,
            send=lambda header, body: self.outbox.send(header, body),
            note_lost=lambda tag: self._attempts().note_lost(tag),
        )
        self.outbox = Outbox(
            out_fd, lambda: self.close(0), lambda: wire.BEAT_S if self._follower.is_busy else wire.RESTING_BEAT_S
        )
        self._pending: list[Pending] = []
        self._own_queues = 0
        self._operations = self._make_operations()

    # Imports of rare operations are deferred to their first use: hundreds of idle agents start faster.

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        with self._making:
            if name not in self._made:
                self._made[name] = make()
            return self._made[name]

    def _attempts(self) -> Attempts:
        def make() -> Attempts:
            from ascendrun.node.agent.attempts import Attempts

            return Attempts(
                self._root,
                agent=self._agent,
                login=self._login,
                umask=self._umask,
                verify_tree=lambda sha256: self._trees().verify(sha256),
            )

        made: Attempts = self._once("attempts", make)
        return made

    def _trees(self) -> Trees:
        def make() -> Trees:
            from ascendrun.node.agent.trees import Trees

            return Trees(self._root)

        made: Trees = self._once("trees", make)
        return made

    def _commands(self) -> Commands:
        def make() -> Commands:
            from ascendrun.node.agent.execute import Commands

            return Commands(self._clean_login, self._umask)

        made: Commands = self._once("commands", make)
        return made

    def _make_operations(self) -> dict[str, Operation]:
        attempts, trees = self._attempts, self._trees

        def simple(call: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Any:
            return lambda request, body: (call(request) or {}, b"")

        return {
            "ping": Operation(simple(lambda r: {"at_ns": time.time_ns()}), "", None),
            "bye": Operation(simple(lambda r: None), "", None),
            "follow": Operation(
                simple(lambda r: self._follower.follow(r["tag"], r.get("offsets") or {}, r.get("limits") or {})),
                "",
                None,
            ),
            "unfollow": Operation(simple(lambda r: self._follower.unfollow(r["tag"])), "", None),
            "tree_have": Operation(simple(lambda r: {"have": trees().have(r["sha256"])}), "sha256", 30),
            "tree_put": Operation(
                lambda r, body: (trees().put(r["sha256"], r["offset"], r["total"], body), b""), "sha256", 600
            ),
            "prepare": Operation(simple(lambda r: attempts().prepare(r)), "tag", 300),
            "go": Operation(simple(lambda r: attempts().go(r)), "tag", 30),
            "renew": Operation(simple(lambda r: attempts().renew(r)), "own", 30),
            "abort": Operation(simple(lambda r: attempts().abort(r["tag"])), "tag", 30),
            "stop": Operation(simple(lambda r: attempts().stop(r)), "tag", 60),
            "forget": Operation(simple(lambda r: attempts().forget(r["tag"])), "tag", 120),
            "release": Operation(simple(self._release), "release", 60),
            "usage": Operation(simple(self._usage), "own", 120),
            "prune": Operation(simple(self._prune), "own", 600),
            "files": Operation(simple(self._files), "own", 30),
            "checkpoints": Operation(simple(self._checkpoints), "own", 30),
            "processes": Operation(simple(lambda r: attempts().processes(r["tag"])), "own", 30),
            "attempts": Operation(simple(lambda r: attempts().listing()), "own", 30),
            "copy": Operation(simple(lambda r: {"job": attempts().job_copy(r["tag"])}), "own", 30),
            "live": Operation(simple(self._live), "own", 30),
            "stacks": Operation(simple(lambda r: attempts().stacks(str(r["tag"]))), "own", 30),
            "rank_process": Operation(
                simple(lambda r: attempts().rank_process(str(r["tag"]), int(r["rank"]))), "own", 30
            ),
            "probe": Operation(simple(self._probe), "own", 30),
            "exec": Operation(lambda r, body: self._commands().run(r, body), "own", None),
            "survey": Operation(simple(self._survey), "own", None),
            "sample": Operation(simple(self._sample), "own", None),
            "gather": Operation(simple(self._gather), "own", None),
            "grep": Operation(lambda r, body: self._grep(r), "own", None),
            "outputs": Operation(lambda r, body: self._outputs("list", r), "own", None),
            "read_output": Operation(lambda r, body: self._outputs("read", r), "own", None),
            "put_file": Operation(lambda r, body: (self._put_file(r, body), b""), "own", None),
            "hash_output": Operation(lambda r, body: self._outputs("hash", r), "own", None),
        }

    def _live(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node import procs
        from ascendrun.node.agent.agent_info import node_state

        return dict(node_state(self._root), boot_id=procs.boot_id())

    def _probe(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.agent.routes import probe

        return probe(self._root, request.get("peers") or {})

    def _survey(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.agent.survey import Surveys

        return Surveys(self._root, login=self._clean_login, commands=self._commands()).run(request)

    def _release(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.agent.log_prune import release

        return release(self._root, request)

    def _usage(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.agent.prune import total_bytes, usage

        head_id = request.get("head_id")
        if head_id is None:
            return {"runs": {}, "trees": {}, "total_bytes": total_bytes(self._root)}
        return usage(self._root, str(head_id))

    def _prune(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.agent.prune import prune

        return prune(self._root, request, self._attempts().forget)

    def _files(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the sizes of an attempt's files, with the record of its supervisor's loss, and its phase: one that has
        ended does not grow."""
        with contextlib.suppress(OSError):
            self._attempts().note_lost(request["tag"])
        phase = self._attempts().phase(request["tag"])
        return {"files": file_sizes(self._root, request["tag"]), "phase": phase}

    def _checkpoints(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.agent.checkpoints import listing

        return listing(request)

    def _grep(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        from ascendrun.node.agent.grep import grep

        return grep(self._root, request, agent=self._agent, commands=self._commands(), login=self._clean_login)

    def _outputs(self, what: str, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        from ascendrun.node.agent.outputs import hash_output, list_outputs, read_output

        if what == "read":
            return read_output(self._root, request)
        return {"list": list_outputs, "hash": hash_output}[what](self._root, request), b""

    def _put_file(self, request: dict[str, Any], body: bytes) -> dict[str, Any]:
        from ascendrun.node.agent.outputs import put_file

        return put_file(self._root, request, body)

    def _gather(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.agent.artifacts import ArtifactCollection

        return ArtifactCollection(
            self._root, request, login=self._clean_login, commands=self._commands(), send=self.outbox.send
        ).run()

    def _sample(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.sampler.sample import sample_once

        return sample_once(
            self._root,
            request["items"],
            lambda items: self._survey({"items": items, "timeout_s": request.get("timeout_s")})["results"],
        )

    def run(self) -> int:
        """Run until the input ends, `bye`, or an invalid frame."""
        from ascendrun.node.agent.agent_info import hello

        self.outbox.send(hello(self._root, self._agent[-1]))
        self._queues.add("keep", lambda: bytecode.keep_interpreter(self._agent[-1]))
        self._queues.add("keep", lambda: bytecode.keep_compiled(self._agent[-1]))
        self._queues.add("keep", self._get_ready)
        reader = wire.FrameReader()
        while True:
            readable, _, _ = select.select([self._in_fd], [], [], self._wait_s())
            self._expire(time.monotonic())
            if not readable:
                continue
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

    def _get_ready(self) -> None:
        """Import modules in advance for the first command."""
        self._commands()

    def close(self, status: int) -> None:
        """End commands, let accepted requests finish, and exit even if threads still hang."""
        with self._making:
            commands: Commands | None = self._made.get("commands")
        if commands is not None:
            commands.end_all()
        self._queues.wait_idle(LAST_WORK_S)
        self.outbox.flush(1.0)
        os._exit(status)

    # --- requests ---

    def _take(self, header: dict[str, Any], body: bytes) -> None:
        name = str(header.get("op"))
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

    def _wait_s(self) -> float | None:
        self._pending = [pending for pending in self._pending if not pending.is_answered]
        deadlines = [pending.deadline for pending in self._pending if pending.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _expire(self, now: float) -> None:
        for pending in self._pending:
            if pending.deadline is not None and pending.deadline <= now and pending.take():
                self._refuse(pending.number, OperationError("deadline", "deadline", op=pending.op))


def explain(error: Exception, op: str) -> OperationError:
    """Return the exception of an operation as an OperationError."""
    if isinstance(error, OperationError):
        return error
    if isinstance(error, (KeyError, TypeError, ValueError, AttributeError)):
        return OperationError("bad-request", "bad-request", op=op, error=f"{type(error).__name__}: {error}")
    import traceback

    sys.stderr.write("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    return OperationError("internal", "internal", op=op, error=f"{type(error).__name__}: {error}")


def agent_command() -> list[str]:
    """Return the command that starts this agent in another role."""
    executable = sys.executable or os.readlink("/proc/self/exe")
    return [executable, "-I", "-S", os.path.abspath(sys.argv[0])]


def main() -> int:
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
    agent = Agent(root, agent=agent_command(), umask=umask, in_fd=in_fd, out_fd=out_fd)
    agent.close(agent.run())
    return 0
