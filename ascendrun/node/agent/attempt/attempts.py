"""Attempts of this node: prepare, start exactly once, stop, and the state of each.

The files of an attempt's directory are authoritative; every step is one file that appears complete or not at all:
prepared.json, supervisor.json (claimed once: by the supervisor, or by an earlier stop), stop.json, ended.json.
"""

from __future__ import annotations

import os
import subprocess
import time
from functools import partial

from ascendrun.node import hold, layout, reap
from ascendrun.node.agent import checks
from ascendrun.node.agent.attempt.launch import START_S, ReadySupervisors, hand_over
from ascendrun.node.agent.attempt.state import ended_in_events, locked, phase, remove_container, stop, wait_gone
from ascendrun.node.agent.leases import Leases
from ascendrun.node.agent.trees import link_tree
from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import claim_json, exists, make_private_dir, read_claim, read_json, remove_tree, write_json
from ascendrun.node.layout import ENDED, IDENTITY, JOB, PREPARED, RENEWED, WHERE
from ascendrun.node.op_errors import OperationError, os_failure
from ascendrun.node.procs import read_text
from ascendrun.node.ranks import PATH_TOKEN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from ascendrun.node.op_errors import Message

PREPARED_KEYS = """tag node_rank ranks launcher cwd setup trees link_tree library ports devices hccl stop start_s max_s
fence_s peers exit_s linger_s rotate_bytes sampling container""".split()


class Attempts:
    """All operations on attempts. `verify_tree(sha256)` raises OperationError; `agent` is the command that starts this
    agent.

    `login`: the environment of the login, `umask`: the user's own. Safe to use from several threads and agents.
    """

    def __init__(
        self, root: str, *, agent: list[str], login: dict[bytes, bytes], umask: int, verify_tree: Callable[[str], None]
    ) -> None:
        self._root = root
        self._agent = agent
        self._login = login
        self._umask = umask
        self._verify_tree = verify_tree
        self._leases = Leases(root)
        self._ready = ReadySupervisors(agent)

    # --- prepare, abort ---

    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check and reserve everything without starting anything. Repeatable until GO."""
        tag = str(request["tag"])
        run, _ = layout.split_tag(tag)
        folder = layout.attempt_dir(self._root, tag)
        try:
            with locked(self._root, tag) as (fence, attempt):
                fence.check(attempt)
                if exists(os.path.join(folder, IDENTITY)):
                    raise OperationError("attempt-stale", "attempt-started", attempt=attempt)
                self._reject_while_older_runs(run, attempt)
                fence.raise_to(attempt, stopped=False)
            kept = self._check(request, run)
            make_private_dir(folder)
            make_private_dir(layout.live_dir(self._root))
            open(layout.live_mark(folder), "ab").close()
            checks.check_directory(folder, make=False)
            streams, not_local = place_streams(folder)
            port, bases = self._leases.prepare(tag, request)
            pointer = None
            if request.get("pointer"):
                from ascendrun.node.agent.attempt.checkpoints import set_back_pointer

                pointer = set_back_pointer(request["pointer"])
            failpoint("prepare.before_record")
            record = {key: request[key] for key in PREPARED_KEYS if key in request}
            for rank in request["ranks"]:  # their files are where the attempt's growing files are
                for name, value in rank["env"].items():
                    if value.startswith(folder + os.sep):
                        rank["env"][name] = streams + value[len(folder) :]
            if request.get("job"):
                write_json(os.path.join(folder, JOB), request["job"])
            if request.get("fence_s") is not None:
                reap.begin_lease(os.path.join(streams, RENEWED), reap.since_boot_ns())
            write_json(os.path.join(folder, PREPARED), record)
            failpoint("prepare.after_record")
            if not (request.get("container") or self._holder()):
                self._ready.start(folder, self._supervisor_env())
        except OSError as error:
            raise os_failure(error, "prepare-attempt", attempt=tag, path=self._root) from error
        return {
            "ready": True,
            "master_port": port,
            "hccl": bases,
            "kept": kept,
            "pointer": pointer,
            "not_local": not_local,
        }

    def renew(self, request: dict[str, Any]) -> dict[str, Any]:
        """Renew the lease of an attempt from `at_ns`, which this returned before, and return the time now."""
        tag, at_ns, now_ns = str(request["tag"]), request.get("at_ns"), reap.since_boot_ns()
        try:
            if at_ns is not None and at_ns <= now_ns:
                streams = layout.streams_dir(layout.attempt_dir(self._root, tag))
                reap.begin_lease(os.path.join(streams, RENEWED), int(at_ns))
        except OSError as error:
            raise os_failure(error, "keep-records", path=self._root) from error
        return {"at_ns": now_ns}

    def _reject_while_older_runs(self, run: str, attempt: int) -> None:
        for other in layout.attempts_of(self._root, run):
            tag = layout.make_tag(run, other)
            if other >= attempt or phase(self._root, tag) != "running":
                continue
            # The head may have read of the end before the supervisor has written the file that makes it the phase.
            if not ended_in_events(layout.attempt_dir(self._root, tag)):
                raise OperationError("attempt-running", "older-attempt-running", attempt=other)

    def _check(self, request: dict[str, Any], run: str) -> list[str]:
        """Check the request; return names of the user's own files in the working directory that replace the tree's."""
        kept: list[str] = []
        home, _ = layout.split_tag(layout.make_tag(str(request.get("home") or run), 1))
        work, checkpoints = layout.work_dir(self._root, home), layout.checkpoints_dir(self._root, run)
        work_of, may_lack = request.get("work_of"), bool(request.get("may_lack_work"))
        if work_of:
            link_work(layout.work_dir(self._root, home, work_of), work, may_lack=may_lack)
        for folder in (work, checkpoints):
            make_private_dir(folder)
        checks.check_room(work)
        checks.check_directory(work, make=False)
        plans = [*request["ranks"], request.get("launcher") or {"env": {}}]
        for folder in dict.fromkeys(plan["env"].get("ASCENDRUN_CHECKPOINT_DIR") for plan in plans):
            if folder:
                checks.check_directory(folder, make=True)
        for sha256 in request.get("trees") or []:
            self._verify_tree(sha256)
        if request.get("link_tree"):
            kept = link_tree(
                layout.tree_dir(self._root, request["link_tree"]), work, trees=os.path.join(self._root, "trees")
            )
        checks.check_cwd(request["cwd"])
        if request.get("container"):
            from ascendrun.node.agent import containers

            containers.make_directories(request["container"])  # what the image has is checked inside
        elif request.get("setup") is None:
            for rank in [request["launcher"]] if request.get("launcher") else request["ranks"]:
                environ = {os.fsdecode(name): os.fsdecode(value) for name, value in self._login.items()}
                path = environ.get("PATH") or os.defpath
                token = os.fsdecode(PATH_TOKEN)
                environ.update({name: value.replace(token, path) for name, value in rank["env"].items()})
                checks.check_command(rank["argv"][0], cwd=request["cwd"], environ=environ)
        elif checks.find_command("bash", os.environ.get("PATH", os.defpath)) is None:
            raise OperationError("python-missing", "no-bash")
        return kept

    def abort(self, tag: str) -> dict[str, Any]:
        """Remove an attempt without GO. Raises OperationError("attempt-running") if it got GO."""
        folder = layout.attempt_dir(self._root, tag)
        self._release(tag)
        if not os.path.isdir(folder):
            return {}
        with locked(self._root, tag):
            if (
                not claim_json(os.path.join(folder, IDENTITY), {"aborted": True})
                and phase(self._root, tag) == "running"
            ):
                raise OperationError("attempt-running", "attempt-running", attempt=tag)
            if not exists(os.path.join(folder, ENDED)):
                remove_attempt(folder)
            remove_tree(layout.live_mark(folder))
        return {}

    # --- go ---

    def go(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start the supervisor, or find the started supervisor: repeatable, from several agents too."""
        tag = str(request["tag"])
        folder = layout.attempt_dir(self._root, tag)
        identity = read_claim(os.path.join(folder, IDENTITY))
        if identity is None:
            with locked(self._root, tag) as (fence, attempt):
                fence.check(attempt)
            prepared = read_json(os.path.join(folder, PREPARED))
            if prepared is None:
                raise OperationError("not-prepared", "not-prepared", attempt=tag)
            port, base = request.get("master_port"), request.get("hccl_base")
            try:
                self._leases.keep(tag, prepared, port=port if prepared.get("ports") else None, base=base)
            except OperationError:
                claimed = self._await_claim(tag, folder)
                if claimed is None:
                    raise
                return {"supervisor_pid": claimed["pid"]}
            failpoint("launch.before_spawn")
            spec = {
                "master_port": port,
                "hccl_base": base,
                "umask": self._umask,
                "secret_env": request.get("secret_env") or {},
                "leases": self._leases.descriptors(tag),
            }
            reply = self._spawn(folder, spec, prepared.get("container"))
            self._leases.release(tag)
            failpoint("agent.after_exec_before_ack")
            if "error" in reply:
                raise OperationError.from_json(reply["error"])
            identity = read_claim(os.path.join(folder, IDENTITY)) or {}
        if "pid" not in identity:
            raise OperationError("attempt-stale", "attempt-stopped-early", attempt=tag)
        return {"supervisor_pid": identity["pid"]}

    def _await_claim(self, tag: str, folder: str) -> dict[str, Any] | None:
        """Return the supervisor that an earlier agent started and that claims the attempt; None: no process holds its
        leases, or that one takes longer than START_S."""
        deadline = time.monotonic() + START_S
        while True:
            may_claim = self._leases.are_elsewhere(tag) and time.monotonic() < deadline
            identity = read_claim(os.path.join(folder, IDENTITY)) or {}
            if "pid" in identity or not may_claim:
                return identity if "pid" in identity else None
            time.sleep(0.02)

    def _spawn(self, folder: str, spec: dict[str, Any], box: dict[str, Any] | None) -> dict[str, Any]:
        """Start the supervisor, in a container if there is `box`; return its first message."""
        env, holder = self._supervisor_env(), self._holder()
        with open(os.path.join(folder, "supervisor.log"), "ab") as log:
            try:
                if box is not None:
                    reply = self._spawn_inside(box, folder, log, spec, holder)
                elif holder:
                    start = partial(hold.spawn, holder, [*self._agent, "supervise", folder], env)
                    reply = hand_over(start, log.fileno(), spec)
                else:
                    reply = self._ready.hand_over(folder, env, log.fileno(), spec)
            except (subprocess.TimeoutExpired, ValueError, OSError) as error:
                lines = read_text(log.name).strip().splitlines() or [str(error)]
                raise OperationError("start-failed", "supervisor-failed", error=lines[-1], log=log.name) from error
        assert isinstance(reply, dict)
        return reply

    def _holder(self) -> str:
        """Return the name of the holder that starts supervisors, "": this agent does."""
        return os.fsdecode(self._login.get(layout.HOLDER_VARIABLE.encode(), b""))

    def _supervisor_env(self) -> dict[bytes, bytes]:
        unwanted = {layout.TAG_VARIABLE.encode(), layout.HOLDER_VARIABLE.encode()}
        return {name: value for name, value in self._login.items() if name not in unwanted}

    def _release(self, tag: str) -> None:
        """Let go what this agent has for an attempt between prepare and GO."""
        self._ready.release(layout.split_tag(tag)[0])
        self._leases.release(tag)

    def _spawn_inside(
        self, box: dict[str, Any], folder: str, log: Any, spec: dict[str, Any], outer: str
    ) -> dict[str, Any]:
        from ascendrun.node.agent import containers

        tag = layout.tag_of(folder)
        holder = containers.start(box, root=self._root, tag=tag, agent=self._agent, log=log, outer=outer)
        argv = [box["python"], *self._agent[1:], "supervise", folder]
        try:
            return hand_over(partial(hold.spawn, holder, argv, None), log.fileno(), spec)
        except (subprocess.TimeoutExpired, ValueError, OSError):
            containers.remove(box, root=self._root, tag=tag)
            raise

    # --- stop ---

    def stop(self, request: dict[str, Any]) -> dict[str, Any]:
        """Request the end: see stop.stop."""
        self._release(str(request["tag"]))
        return stop(self._root, request)

    def forget(self, tag: str) -> dict[str, Any]:
        """Remove the attempt's directory; its fence stays."""
        folder = layout.attempt_dir(self._root, tag)
        self._release(tag)
        identity = read_claim(os.path.join(folder, IDENTITY)) or {}
        if phase(self._root, tag) == "ended" or ("pid" in identity and ended_in_events(folder)):
            wait_gone(identity)  # the supervisor writes the event of the end before its file
        with locked(self._root, tag):
            if phase(self._root, tag) == "running":
                raise OperationError("attempt-running", "attempt-running", attempt=tag)
            remove_container(self._root, tag)
            remove_attempt(folder)
            remove_tree(layout.live_mark(folder))
        return {}


def link_work(earlier: str, work: str, *, may_lack: bool) -> None:
    """Use the working directory of the machine that ran the earlier stage, `earlier`, as `work`."""
    if os.path.isdir(earlier) and not os.path.lexists(work):
        make_private_dir(os.path.dirname(work))
        os.symlink(earlier, work)
    is_there = os.path.isdir(earlier) and os.path.samefile(earlier, work)
    if not (is_there or may_lack):
        raise OperationError("stage-files-missing", "stage-files-missing", path=earlier)


def place_streams(folder: str) -> tuple[str, Message | None]:
    """Return the directory for an attempt's growing files, made: a local one if the attempt's is on a network file
    system and the local disk is usable; and why it is not, None: it is, or need not be. Raises OSError,
    OperationError."""
    is_placed = layout.streams_dir(folder) != folder
    if not is_placed and not checks.network_of(folder):
        return folder, None
    streams = layout.local_streams_dir(folder)
    try:
        if os.path.islink(layout.local_base()) or checks.network_of(layout.LOCAL):
            raise OperationError("bad-directory", "local-on-network", path=layout.local_base())
        for path in (layout.local_base(), streams):
            make_private_dir(path)
        checks.check_room(streams)
        checks.check_directory(streams, make=False)
    except (OSError, OperationError) as error:
        if is_placed:
            raise
        failed = os_failure(error, "write-in", path=streams) if isinstance(error, OSError) else error
        return folder, failed.message
    write_json(os.path.join(folder, WHERE), {"streams": streams})
    return streams, None


def remove_attempt(folder: str) -> None:
    streams = layout.streams_dir(folder)
    if streams != folder:
        remove_tree(streams)
    if os.path.isdir(folder):
        remove_tree(folder)
