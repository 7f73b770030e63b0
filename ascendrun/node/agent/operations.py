"""The operations of the agent, by the name of a request: what runs, in which queue, and until when."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time

from ascendrun.node import layout, procs
from ascendrun.node.agent.follow import Follower, file_sizes
from ascendrun.node.files import claim_json, make_private_dir, read_json, remove_tree
from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from ascendrun.node.agent.attempt.attempts import Attempts
    from ascendrun.node.agent.execute import Commands
    from ascendrun.node.agent.terms import Terms
    from ascendrun.node.agent.trees import Trees

Operation = collections.namedtuple("Operation", "run queue deadline_s")
"""`run(request, body)` returns (fields, body). `queue`: "" runs in the loop itself, immediately; "tag" keeps order per
attempt, "head_id" per head; "own" runs in parallel to everything. `deadline_s`: when the head gets a reply even if the
work is not done; None: the request's own time-out decides."""


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
        self._made_attempts: Attempts | None = None
        self._made_commands: Commands | None = None
        self.follower = Follower(root, send=send, note_lost=self._note_lost)

    def _attempts(self) -> Attempts:
        from ascendrun.node.agent.attempt.attempts import Attempts

        with self._making:
            if self._made_attempts is None:
                self._made_attempts = Attempts(
                    self._root,
                    agent=self._agent,
                    login=self._login,
                    umask=self._umask,
                    verify_tree=lambda sha256: self._trees().verify(sha256),
                )
            return self._made_attempts

    def _trees(self) -> Trees:
        from ascendrun.node.agent.trees import Trees

        return Trees(self._root)

    @property
    def terms(self) -> Terms:
        from ascendrun.node.agent.terms import Terms

        return Terms(self._root)

    def _place(self, put: dict[str, Any]) -> tuple[str, Callable[[int], bool]]:
        """Return the part of a PutTree or PutFile, and what completes it."""
        if "tree" in put:
            return self._trees().place(put["tree"], int(put["size_bytes"]))
        from ascendrun.node.agent.transfer import file_place

        return file_place(self._root, put)

    def _put(self, put: dict[str, Any], body: bytes) -> dict[str, Any]:
        if "tree" in put:
            return self._trees().put(put["tree"], put, body)
        done: dict[str, Any] = _transfer().put_file(self._root, put, body)
        return done

    def _take(self, request: dict[str, Any]) -> dict[str, Any]:
        """Read from another node what is not here yet: an earlier request may have completed it after its deadline."""
        found = self._put(dict(request["put"], sha256=None), b"")
        if found["done"]:
            return dict(found, is_met=True)
        taken: dict[str, Any] = _relay().take(*self._place(request["put"]), request)
        return taken

    def commands(self) -> Commands:
        from ascendrun.node.agent.execute import Commands

        with self._making:
            if self._made_commands is None:
                self._made_commands = Commands(self._clean, self._umask)
            return self._made_commands

    def table(self) -> dict[str, Operation]:
        """Return the operations by name."""
        root, attempts = self._root, self._attempts

        def simple(call: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Any:
            return lambda request, body: (call(request) or {}, b"")

        return {
            "ping": Operation(simple(lambda r: {"at_ns": time.time_ns()}), "", None),
            "bye": Operation(simple(lambda r: None), "", None),
            "follow": Operation(
                simple(
                    lambda r: self.follower.follow(
                        r["tag"], *((r.get(name) or {}) for name in ("offsets", "limits", "windows"))
                    )
                ),
                "",
                None,
            ),
            "acknowledge": Operation(
                simple(
                    lambda r: self.follower.acknowledge(*(r[name] for name in ("tag", "file", "generation", "offset")))
                ),
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
            "release": Operation(simple(lambda r: _prune().release(root, r)), "release", 60),
            "usage": Operation(simple(lambda r: _prune().usage(root, r.get("head_id"))), "own", 120),
            "prune": Operation(simple(lambda r: _prune().prune(root, r, attempts().forget)), "own", 600),
            "files": Operation(simple(self._files), "own", 30),
            "checkpoints": Operation(simple(self._checkpoints), "own", 30),
            "processes": Operation(simple(lambda r: _state().processes(root, r["tag"])), "own", 30),
            "copy": Operation(simple(lambda r: {"job": _state().job_copy(root, r["tag"])}), "own", 30),
            "renew_head": Operation(simple(lambda r: self.terms.renew(r)), "head_id", 30),
            "claim_head": Operation(simple(lambda r: self.terms.claim(r)), "head_id", 30),
            "live": Operation(simple(lambda r: dict(node_state(root), boot_id=procs.boot_id())), "own", 30),
            "stacks": Operation(simple(self._stacks), "own", 30),
            "rank_process": Operation(simple(self._rank_process), "own", 30),
            "probe": Operation(simple(self._probe), "own", 30),
            "exec": Operation(lambda r, body: self.commands().run(r, body), "own", None),
            "survey": Operation(simple(self._survey), "own", None),
            "sample": Operation(simple(self._sample), "own", None),
            "gather": Operation(simple(self._gather), "own", None),
            "grep": Operation(lambda r, body: self._grep(r), "own", None),
            "outputs": Operation(simple(lambda r: _transfer().list_outputs(root, r)), "own", None),
            "read_output": Operation(lambda r, body: _transfer().read_output(root, r), "own", None),
            "put_tree": Operation(lambda r, body: (self._put(r, body), b""), "own", None),
            "offer": Operation(simple(lambda r: _relay().offer(self._place(r["put"])[0], r)), "own", 30),
            "take": Operation(simple(self._take), "own", None),
            "put_file": Operation(lambda r, body: (self._put(r, body), b""), "own", None),
        }

    def _probe(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.agent.network import probe

        return probe(self._root, request.get("peers") or {})

    def _survey(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.agent.survey import Surveys

        return Surveys(self._root, login=self._clean, commands=self.commands(), agent=self._agent).run(request)

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
        """Return the command of a shell next to a rank: see node/stacks.py."""
        from ascendrun.node.stacks import find_rank

        rank = int(request["rank"])
        found, leaders, _ = _state().rank_processes(self._root, str(request["tag"]))
        process = find_rank(rank, found, leaders, self._agent)
        if process is None:
            raise OperationError("rank-not-running", "rank-not-running", rank=rank)
        box = _state().container_of(self._root, str(request["tag"]))
        if box is not None and box["runtime"] != "apptainer":
            from ascendrun.node.agent.containers import container_name

            name = container_name(self._root, str(request["tag"]))
            return {"argv": [*self._agent, "enter", box["runtime"], name, box["python"], *process["argv"][-2:]]}
        return process

    def _checkpoints(self, request: dict[str, Any]) -> dict[str, Any]:
        from ascendrun.node.agent.attempt.checkpoints import listing

        return listing(request)

    def _grep(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        from ascendrun.node.agent.grep import grep

        return grep(self._root, request, agent=self._agent, commands=self.commands(), login=self._clean)

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
            commands = self._made_commands
        if commands is not None:
            commands.end_all()


def node_state(root: str) -> dict[str, Any]:
    """Return {incarnation, neighbours, live}: the id of this machine's directory in ROOT, made once; the keys of the
    other machines that use ROOT; the tags of attempts that were prepared and have not ended. None: not readable."""
    folder = layout.node_dir(root)
    path = os.path.join(folder, "incarnation.json")
    try:
        found = read_json(path)
        if found is None:
            make_private_dir(layout.live_dir(root))
            claim_json(path, {"incarnation": os.urandom(8).hex()})
            found = read_json(path) or {}
        live = [tag for tag in sorted(os.listdir(layout.live_dir(root))) if is_live(root, tag)]
        neighbours = sorted(name for name in os.listdir(os.path.dirname(folder)) if name != layout.machine_key())
    except (OSError, OperationError):
        return {"incarnation": None, "neighbours": None, "live": None}
    return {"incarnation": found.get("incarnation"), "neighbours": neighbours, "live": live}


def is_live(root: str, tag: str) -> bool:
    """Return whether the listed attempt has not ended; otherwise remove it from the list: its supervisor could not."""
    try:
        folder = layout.attempt_dir(root, tag)
    except ValueError:  # NFS keeps removed files that are open under other names
        return False
    if not os.path.exists(os.path.join(folder, layout.ENDED)):
        return True
    remove_tree(layout.live_mark(folder))
    return False


def _state() -> Any:
    from ascendrun.node.agent.attempt import state as attempt_state

    return attempt_state


def _prune() -> Any:
    from ascendrun.node.agent import prune

    return prune


def _relay() -> Any:
    from ascendrun.node.agent import relay

    return relay


def _transfer() -> Any:
    from ascendrun.node.agent import transfer

    return transfer
