"""Attempts of this node: prepare, start exactly once, stop, and the state of each.

The files of an attempt's directory are authoritative; every step is one file that appears complete or not at all:
prepared.json, supervisor.json (claimed once: by the supervisor, or by an earlier stop), stop.json, ended.json.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import threading
import time

from ascendrun.node import cgroup, layout, procs, reap
from ascendrun.node.agent import checks, ports
from ascendrun.node.agent.fence import locked
from ascendrun.node.agent.trees import link_tree
from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import claim_json, make_private_dir, read_json, remove_tree, write_json
from ascendrun.node.layout import ENDED, IDENTITY, LOST, PREPARED, STOP
from ascendrun.node.op_errors import OperationError, os_failure
from ascendrun.node.records import Records, free_reserve, read_events, write_end
from ascendrun.node.stopping import UNKILLABLE_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

START_S = 20.0
"""Seconds that a supervisor may take to report its start."""
NOTICE_S = 5.0
"""Seconds that a supervisor may take to exit after it has written the end."""
OBEY_S = 5.0
"""Seconds that it may take to read a request to stop immediately, before the agent kills it and takes over its work."""

PREPARED_KEYS = (
    "tag",
    "node_rank",
    "ranks",
    "cwd",
    "setup",
    "trees",
    "link_tree",
    "ports",
    "stop",
    "start_s",
    "max_s",
    "exit_s",
    "linger_s",
    "rotate_bytes",
    "sampling",
)


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
        self._ports: dict[str, ports.ReservedPort] = {}
        self._ports_lock = threading.Lock()

    # --- prepare, abort ---

    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check and reserve everything without starting anything. Repeatable until GO."""
        tag = str(request["tag"])
        run, _ = layout.split_tag(tag)
        folder = layout.attempt_dir(self._root, tag)
        try:
            with locked(self._root, tag) as (fence, attempt):
                fence.check(attempt)
                if os.path.exists(os.path.join(folder, IDENTITY)):
                    raise OperationError("attempt-stale", "attempt-started", attempt=attempt)
                self._reject_while_older_runs(run, attempt)
                fence.raise_to(attempt, stopped=False)
            kept = self._check(request, run)
            make_private_dir(folder)
            checks.check_directory(folder, make=False)
            port = self._reserve_port(tag, request.get("ports") or [])
            failpoint("prepare.before_record")
            record = {key: request[key] for key in PREPARED_KEYS if key in request}
            write_json(os.path.join(folder, PREPARED), record)
            failpoint("prepare.after_record")
        except OSError as error:
            raise os_failure(error, "prepare-attempt", attempt=tag, path=self._root) from error
        return {"ready": True, "master_port": port, "kept": kept}

    def _reject_while_older_runs(self, run: str, attempt: int) -> None:
        for other in self._attempts_of(run):
            tag = layout.make_tag(run, other)
            if other < attempt and self.phase(tag) == "running":
                raise OperationError("attempt-running", "older-attempt-running", attempt=other)

    def _check(self, request: dict[str, Any], run: str) -> list[str]:
        """Check the request; return names of the user's own files in the working directory that replace the tree's."""
        kept: list[str] = []
        home, _ = layout.split_tag(layout.make_tag(str(request.get("home") or run), 1))
        work, checkpoints = layout.work_dir(self._root, home), layout.checkpoints_dir(self._root, run)
        for folder in (work, checkpoints):
            make_private_dir(folder)
        checks.check_room(work)
        checks.check_directory(work, make=False)
        for folder in checks.checkpoint_directories(request["ranks"]):
            checks.check_directory(folder, make=True)
        for sha256 in request.get("trees") or []:
            self._verify_tree(sha256)
        if request.get("link_tree"):
            kept = link_tree(
                layout.tree_dir(self._root, request["link_tree"]), work, trees=os.path.join(self._root, "trees")
            )
        checks.check_cwd(request["cwd"])
        if request.get("setup") is None:
            for rank in request["ranks"]:
                environ = {os.fsdecode(name): os.fsdecode(value) for name, value in self._login.items()}
                environ.update(rank["env"])
                checks.check_command(rank["argv"][0], cwd=request["cwd"], environ=environ)
        elif checks.find_command("bash", os.environ.get("PATH", os.defpath)) is None:
            raise OperationError("python-missing", "no-bash")
        return kept

    def _reserve_port(self, tag: str, numbers: list[int]) -> int | None:
        if not numbers:
            return None
        with self._ports_lock:
            reserved = self._ports.get(tag)
            if reserved is not None and reserved.number in numbers:
                return reserved.number
            reserved = ports.reserve_first(numbers)
            if reserved is None:
                raise OperationError("port-taken", "ports-in-use", ports=numbers)
            self._ports[tag] = reserved
            return reserved.number

    def _release(self, tag: str) -> None:
        with self._ports_lock:
            reserved = self._ports.pop(tag, None)
        if reserved is not None:
            reserved.release()

    def abort(self, tag: str) -> dict[str, Any]:
        """Remove an attempt without GO. Raises OperationError("attempt-running") if it got GO."""
        folder = layout.attempt_dir(self._root, tag)
        self._release(tag)
        if not os.path.isdir(folder):
            return {}
        with locked(self._root, tag):
            if not claim_json(os.path.join(folder, IDENTITY), {"aborted": True}) and self.phase(tag) == "running":
                raise OperationError("attempt-running", "attempt-running", attempt=tag)
            if not os.path.exists(os.path.join(folder, ENDED)):
                remove_tree(folder)
        return {}

    # --- go ---

    def go(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start the supervisor, or find the started supervisor: repeatable, from several agents too."""
        tag = str(request["tag"])
        folder = layout.attempt_dir(self._root, tag)
        identity = read_json(os.path.join(folder, IDENTITY))
        if identity is None:
            with locked(self._root, tag) as (fence, attempt):
                fence.check(attempt)
            if read_json(os.path.join(folder, PREPARED)) is None:
                raise OperationError("not-prepared", "not-prepared", attempt=tag)
            self._release(tag)
            failpoint("launch.before_spawn")
            reply = self._spawn(
                folder,
                {
                    "master_port": request.get("master_port"),
                    "umask": self._umask,
                    "secret_env": request.get("secret_env") or {},
                },
            )
            failpoint("agent.after_exec_before_ack")
            if "error" in reply:
                raise OperationError.from_json(reply["error"])
            identity = read_json(os.path.join(folder, IDENTITY)) or {}
        if "pid" not in identity:
            raise OperationError("attempt-stale", "attempt-stopped-early", attempt=tag)
        return {"supervisor_pid": identity["pid"]}

    def _spawn(self, folder: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Start the supervisor; return its first message. Secrets use the pipe: never argv, environment or disk."""
        env = {name: value for name, value in self._login.items() if name != layout.TAG_VARIABLE.encode()}
        with open(os.path.join(folder, "supervisor.log"), "ab") as log:
            child = subprocess.Popen(
                self._agent + ["supervise", folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        try:
            out, _ = child.communicate(json.dumps(spec).encode("utf-8"), timeout=START_S)
            reply = json.loads(out.decode("utf-8"))
        except (subprocess.TimeoutExpired, ValueError, OSError) as error:
            child.kill()
            child.communicate()
            raise OperationError(
                "start-failed", "supervisor-failed", error=last_line(log.name) or str(error), log=log.name
            ) from error
        assert isinstance(reply, dict)
        return reply

    # --- stop ---

    def stop(self, request: dict[str, Any]) -> dict[str, Any]:
        """Request the end; the event `ended` confirms it. Also for attempts that are unknown here: they can never start
        after this."""
        tag = str(request["tag"])
        folder = layout.attempt_dir(self._root, tag)
        order = {
            "now": bool(request.get("now")),
            "grace_s": request.get("grace_s"),
            "reason": request.get("reason"),
            "at_ns": time.time_ns(),
        }
        try:
            self._record_stop(tag, folder, order)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not free_reserve(folder):
                raise os_failure(error, "stop-attempt", attempt=tag, path=self._root) from error
            self._record_stop(tag, folder, order)
        self._release(tag)
        identity = read_json(os.path.join(folder, IDENTITY)) or {}
        if "pid" in identity and procs.is_alive(identity):
            procs.send_signal(identity["pid"], identity["start"], signal.SIGUSR1)
            if order["now"] and not self._is_obeyed(tag, folder):
                procs.send_signal(identity["pid"], identity["start"], signal.SIGKILL)
                self._wait_gone(identity)
                self._end_without_supervisor(tag, folder, identity)
        elif self.phase(tag) != "ended":
            self._end_without_supervisor(tag, folder, identity)
        return {}

    def _record_stop(self, tag: str, folder: str, order: dict[str, Any]) -> None:
        with locked(self._root, tag) as (fence, attempt):
            fence.raise_to(attempt, stopped=True)
            make_private_dir(folder)
            write_json(os.path.join(folder, STOP), order)
            failpoint("stop.after_wish")
            claim_json(os.path.join(folder, IDENTITY), {"stopped": True})

    def _is_obeyed(self, tag: str, folder: str) -> bool:
        """Return whether the supervisor took the request within OBEY_S; it may hang (dead disk, debugger) or die."""
        deadline = time.monotonic() + OBEY_S
        while os.path.exists(os.path.join(folder, STOP)) and self.phase(tag) == "running":
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return self.phase(tag) != "lost"

    def _wait_gone(self, identity: dict[str, Any]) -> None:
        deadline = time.monotonic() + NOTICE_S
        while procs.is_alive(identity) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _end_without_supervisor(self, tag: str, folder: str, identity: dict[str, Any]) -> None:
        """Kill the remaining processes of an attempt without a supervisor and write its end."""
        if "pid" in identity:
            self.note_lost(tag)
        leaders = (
            {event["pid"]: event["start"] for event in read_events(folder) if event.get("event") == "rank_started"}
            if identity.get("boot_id") == procs.boot_id()
            else {}
        )
        group = identity.get("cgroup")
        leftovers = end_everything(
            lambda: reap.find_attempt(tag, root=self._root, ranks=leaders, extra=cgroup.group_pids(group))
        )
        cgroup.remove_group(group)
        with locked(self._root, tag):
            if self.phase(tag) == "ended":
                return
            records = Records(folder)
            free_reserve(folder)
            try:
                write_end(folder, records, leftovers=leftovers, codes=exit_codes(folder))
            except OSError as error:
                raise os_failure(error, "record-end", attempt=tag) from error
            finally:
                records.close()

    # --- state ---

    def phase(self, tag: str) -> str | None:
        """Return prepared, running, ended or lost; None: no such attempt here."""
        folder = layout.attempt_dir(self._root, tag)
        identity = read_json(os.path.join(folder, IDENTITY))
        if self._has_ended(folder):
            return "ended"
        if identity is None:
            return "prepared" if os.path.exists(os.path.join(folder, PREPARED)) else None
        if self._ended_in_events(folder):
            return "ended"
        return "running" if procs.is_alive(identity) else "lost"

    def listing(self) -> dict[str, Any]:
        found = []
        runs = os.path.join(self._root, "runs")
        for run in sorted(os.listdir(runs) if os.path.isdir(runs) else []):
            for attempt in self._attempts_of(run):
                tag = layout.make_tag(run, attempt)
                phase = self.phase(tag)
                if phase is not None:
                    identity = read_json(os.path.join(layout.attempt_dir(self._root, tag), IDENTITY)) or {}
                    found.append(
                        {
                            "tag": tag,
                            "phase": phase,
                            "supervisor_pid": identity.get("pid"),
                            "boot_id": identity.get("boot_id"),
                        }
                    )
        return {"attempts": found}

    def note_lost(self, tag: str) -> bool:
        """Write `supervisor_lost`, once, when the supervisor is gone and the attempt has not ended."""
        folder = layout.attempt_dir(self._root, tag)
        identity = read_json(os.path.join(folder, IDENTITY)) or {}
        if "pid" not in identity or self.phase(tag) != "lost":
            return False
        reason = "node-rebooted" if identity.get("boot_id") != procs.boot_id() else "supervisor-killed"
        if not claim_json(os.path.join(folder, LOST), {"at_ns": time.time_ns(), "reason": reason}):
            return False
        records = Records(folder)
        records.add("supervisor_lost", pid=identity["pid"], reason=reason)
        records.close()
        return True

    def processes(self, tag: str) -> dict[str, Any]:
        """Return all living processes of the attempt except the supervisor and its sampler."""
        folder = layout.attempt_dir(self._root, tag)
        identity = read_json(os.path.join(folder, IDENTITY)) or {}
        supervisor = identity["pid"] if "pid" in identity and procs.is_alive(identity) else 0
        found = reap.find_attempt(
            tag,
            root=self._root,
            supervisor=supervisor,
            has_sampler=bool(supervisor),
            extra=cgroup.group_pids(identity.get("cgroup")),
        )
        return {"pids": [pid for pid, _ in found]}

    def forget(self, tag: str) -> dict[str, Any]:
        """Remove the attempt's directory; its fence stays."""
        folder = layout.attempt_dir(self._root, tag)
        self._release(tag)
        identity = read_json(os.path.join(folder, IDENTITY)) or {}
        if self.phase(tag) == "ended":
            self._wait_gone(identity)
        with locked(self._root, tag):
            if self.phase(tag) == "running":
                raise OperationError("attempt-running", "attempt-running", attempt=tag)
            if os.path.isdir(folder):
                remove_tree(folder)
        return {}

    def _attempts_of(self, run: str) -> list[int]:
        try:
            names = os.listdir(layout.run_dir(self._root, run))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(name[8:]) for name in names if name.startswith("attempt-") and name[8:].isdigit())

    def _has_ended(self, folder: str) -> bool:
        return os.path.exists(os.path.join(folder, ENDED))

    def _ended_in_events(self, folder: str) -> bool:
        return any(event.get("event") == "ended" for event in read_events(folder))


def end_everything(find: Callable[[], list[Any]]) -> list[int]:
    """Send KILL until two checks find nothing; return the pids that survive it (blocked in the kernel)."""
    deadline = time.monotonic() + UNKILLABLE_S
    clean = 0
    found = find()
    while clean < 2 and time.monotonic() < deadline:
        for pid, start in found:
            procs.send_signal(pid, start, signal.SIGKILL)
        clean = 0 if found else clean + 1
        time.sleep(0.02)
        found = find()
    return [pid for pid, _ in found]


def exit_codes(folder: str) -> dict[str, int | None]:
    """Return the exit codes of the ranks by the events; None: started, end unknown."""
    codes: dict[str, int | None] = {}
    for event in read_events(folder):
        if event.get("event") == "rank_started":
            codes[str(event["rank"])] = None
        elif event.get("event") == "rank_exited":
            codes[str(event["rank"])] = event["code"] if event["signal"] is None else -event["signal"]
    return codes


def last_line(path: str) -> str:
    try:
        with open(path, "rb") as file:
            lines = file.read()[-4000:].decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
