"""The operations of the agent, by the name of a request: what runs, in which queue, and until when."""

from __future__ import annotations

import collections
import contextlib
import threading
import time

from ascendrun.node.agent.follow import Follower, file_sizes
from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, NamedTuple

    from ascendrun.node.agent.attempt.attempts import Attempts
    from ascendrun.node.agent.execute import Commands
    from ascendrun.node.agent.trees import Trees

    class Operation(NamedTuple):
        """`run(request, body)` returns (fields, body). `queue`: "" runs in the loop itself, immediately; "tag"
        keeps order per attempt; "own" runs in parallel to everything. `deadline_s`: when the head gets
        a reply even if the work is not done; None: the request's own time-out decides."""

        run: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]
        queue: str
        deadline_s: float | None
else:
    Operation = collections.namedtuple("Operation", "run queue deadline_s")


class Operations:
    """`login`: the environment of the login, `clean`: without our own variables; `send(header, body)`: to the head.

    Imports of rare operations are deferred to their first use: hundreds of idle agents start faster.
    """

    def __init__(
        self,
        root: str,
        *,
        agent: list[str],
        umask: int,
        login: dict[bytes, bytes],
        clean: dict[bytes, bytes],
        send: Callable[[dict[str, Any], bytes], None],
    ) -> None:
        self._root, self._agent, self._umask = root, agent, umask
        self._login, self._clean, self._send = login, clean, send
        self._making = threading.RLock()
        self._made: dict[str, Any] = {}
        self.follower = Follower(root, send=send, note_lost=self._note_lost)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        with self._making:
            if name not in self._made:
                self._made[name] = make()
            return self._made[name]

    def _attempts(self) -> Attempts:
        def make() -> Attempts:
            from ascendrun.node.agent.attempt.attempts import Attempts

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

    def commands(self) -> Commands:
        def make() -> Commands:
            from ascendrun.node.agent.execute import Commands

            return Commands(self._clean, self._umask)

        made: Commands = self._once("commands", make)
        return made

    def table(self) -> dict[str, Operation]:
        """Return the operations by name."""
        root, attempts, state = self._root, self._attempts, _state

        def simple(call: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Any:
            return lambda request, body: (call(request) or {}, b"")

        return {
            "ping": Operation(simple(lambda r: {"at_ns": time.time_ns()}), "", None),
            "bye": Operation(simple(lambda r: None), "", None),
            "follow": Operation(
                simple(lambda r: self.follower.follow(r["tag"], r.get("offsets") or {}, r.get("limits") or {})),
                "",
                None,
            ),
            "unfollow": Operation(simple(lambda r: self.follower.unfollow(r["tag"])), "", None),
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
            "processes": Operation(simple(lambda r: state().processes(root, r["tag"])), "own", 30),
            "attempts": Operation(simple(lambda r: state().listing(root)), "own", 30),
            "copy": Operation(simple(lambda r: {"job": state().job_copy(root, r["tag"])}), "own", 30),
            "live": Operation(simple(self._live), "own", 30),
            "stacks": Operation(simple(self._stacks), "own", 30),
            "rank_process": Operation(simple(self._rank_process), "own", 30),
            "probe": Operation(simple(self._probe), "own", 30),
            "exec": Operation(lambda r, body: self.commands().run(r, body), "own", None),
            "survey": Operation(simple(self._survey), "own", None),
            "sample": Operation(simple(self._sample), "own", None),
            "gather": Operation(simple(self._gather), "own", None),
            "grep": Operation(lambda r, body: self._grep(r), "own", None),
            "outputs": Operation(lambda r, body: self._outputs("list", r), "own", None),
            "read_output": Operation(lambda r, body: self._outputs("read", r), "own", None),
            "put_tree": Operation(lambda r, body: (self._trees().put(r["tree"], r, body), b""), "own", 600),
            "put_file": Operation(lambda r, body: (self._put_file(r, body), b""), "own", None),
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

        return Surveys(self._root, login=self._clean, commands=self.commands()).run(request)

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
        tag = request["tag"]
        with contextlib.suppress(OSError):
            self._note_lost(tag)
        phase = _state().phase(self._root, tag)
        return {"files": file_sizes(self._root, tag), "phase": phase}

    def _note_lost(self, tag: str) -> bool:
        return bool(_state().note_lost(self._root, tag))

    def _stacks(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.stacks import take

        return take(*_state().rank_processes(self._root, str(request["tag"])), login=self._login)

    def _rank_process(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the command of a shell next to a rank: see node/shell.py."""
        from ascendrun.node.shell import find_rank

        rank = int(request["rank"])
        found, leaders, _ = _state().rank_processes(self._root, str(request["tag"]))
        process = find_rank(rank, found, leaders, self._agent)
        if process is None:
            raise OperationError("rank-not-running", "rank-not-running", rank=rank)
        return process

    def _checkpoints(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.agent.attempt.checkpoints import listing

        return listing(request)

    def _grep(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        from ascendrun.node.agent.grep import grep

        return grep(self._root, request, agent=self._agent, commands=self.commands(), login=self._clean)

    def _outputs(self, what: str, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        from ascendrun.node.agent.outputs import list_outputs, read_output

        return read_output(self._root, request) if what == "read" else (list_outputs(self._root, request), b"")

    def _put_file(self, request: dict[str, Any], body: bytes) -> dict[str, Any]:
        from ascendrun.node.agent.outputs import put_file

        return put_file(self._root, request, body)

    def _gather(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.agent.artifacts import ArtifactCollection

        return ArtifactCollection(
            self._root, request, login=self._clean, commands=self.commands(), send=self._send
        ).run()

    def _sample(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.sampler.sample import sample_once

        return sample_once(
            self._root,
            request["items"],
            lambda items: self._survey({"items": items, "timeout_s": request.get("timeout_s")})["results"],
        )

    def end_commands(self) -> None:
        with self._making:
            commands: Commands | None = self._made.get("commands")
        if commands is not None:
            commands.end_all()


def _state() -> Any:
    from ascendrun.node.agent.attempt import state as attempt_state

    return attempt_state
