"""Survey of this node: many small queries in parallel, each with its own deadline.

A request's `items` are the queries; this module does not interpret the results. Each item is {name, kind, ...} and
may have its own `timeout_s`. The result of one that failed is {"error": message, "late": bool}.

    argv        {argv, max_bytes}     -> {code, signal, timed_out, truncated, wall_s, out, err}
    shell_argv  the same, in the job's own set-up and environment (`shell`), exactly as a rank is started;
                adds {setup: "fine" | "failed" | "no-command" | null (no set-up)}
    file        {path, max_bytes}     -> {text}
    files       {paths, max_bytes}    -> {texts: {path: text}}; paths may be patterns; unreadable files are omitted
    listdir     {path}                -> {names}
    glob        {patterns}            -> {paths}
    stat        {paths, below}        -> {stats: {path: {kind, bytes, mode, uid, gid, mtime_s} | {missing} | {error}}};
                where the variable `below` holds a directory, the paths are below it
    size        {paths, max_files}    -> {sizes: {path: {kind, bytes, files, truncated} | {missing} | {error}}}
    disk        {paths}               -> {disks: {path: {at, free_bytes, total_bytes, free_inodes, total_inodes}}}
    write_probe {paths}               -> {folders: {path: {at, wall_s, free_bytes, uid} | {at, error, code}}}
    limits      {}                    -> {limits: {name: [soft, hard]}}; None: unlimited
    bind        {ports}               -> {taken: {port: {uid, pid, command}}}; None: not visible to this user
    openers     {patterns}            -> {openers: [{path, pid, uid, user, command, tag}], hidden}
    leases      {}                    -> {leases: [{type, key, device, uid, user, since_s, tag}]}; see leases.listing
    training    {paths}               -> {paths: {path: …}}, see node/agent/training_files.py
    listen, tcp                       see node/agent/network.py
"""

from __future__ import annotations

import os
import time
from functools import partial

from ascendrun.node import layout
from ascendrun.node.agent import file_probes, network
from ascendrun.node.agent.execute import Commands, work_off
from ascendrun.node.files import make_private_dir
from ascendrun.node.op_errors import OperationError, message
from ascendrun.node.ranks import rank_environ, to_bytes, with_setup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Mapping

    Item = Dict[str, Any]
    Raw = Dict[str, Any]

AT_ONCE = 12
ITEM_S = 8.0
SURVEY_S = 30.0
OUT_BYTES = 1 << 16
MARGIN_S = 0.5
"""Seconds after the threads' own deadlines; a call that has not noticed its deadline by then hangs in the kernel."""


class Surveys:
    """Surveys in the login's environment, and in the job's where an item requests it."""

    def __init__(self, root: str, *, login: Mapping[bytes, bytes], commands: Commands) -> None:
        self._root = root
        self._login = login
        self._commands = commands

    def run(self, request: dict[str, Any]) -> Raw:
        """Return {"results": {item's name: raw result}}: every item has one, even if this node partly hangs."""
        shell = request.get("shell")
        items = list(request["items"])
        end = time.monotonic() + float(request.get("timeout_s") or SURVEY_S)
        # Items that wait for peers get their own threads, so that they do not block the others.
        waiting = sum(1 for item in items if item["kind"] in ("listen", "tcp"))
        jobs = [partial(_guarded, partial(self._examine, item, shell, end)) for item in items]
        found = work_off(jobs, at_once=AT_ONCE + waiting, end=end + MARGIN_S)
        late = {"error": message("timed-out"), "late": True}
        return {"results": {item["name"]: raw or late for item, raw in zip(items, found)}}

    def _examine(self, item: Item, shell: dict[str, Any] | None, end: float) -> Raw:
        now = time.monotonic()
        deadline = min(end, now + float(item.get("timeout_s") or ITEM_S))
        if deadline <= now:
            return {"error": message("no-time-left-for-check"), "late": True}
        if item["kind"] in ("argv", "shell_argv"):
            return self._run(item, None if item["kind"] == "argv" else shell or {}, deadline)
        if item["kind"] in ("listen", "tcp"):
            test = network.listen if item["kind"] == "listen" else network.connect_all
            return test(item, deadline)
        # A call into a dead network file system may hang indefinitely.
        (raw,) = work_off([partial(_guarded, partial(file_probes.probe, item, deadline))], at_once=1, end=deadline)
        return raw or {"error": message("file-system-hangs"), "late": True}

    def _run(self, item: Item, shell: dict[str, Any] | None, deadline: float) -> Raw:
        argv = [to_bytes(part) for part in item["argv"]]
        if shell is None:
            return self._run_argv(argv, self._login, item, cwd=None, deadline=deadline)
        env = rank_environ(
            self._login,
            shell.get("env") or {},
            master_port=None,
            tag="",
            root=self._root,
            secret=shell.get("secret_env") or {},
        )
        del env[to_bytes(layout.TAG_VARIABLE)]
        wanted = shell.get("cwd") or ""
        cwd = wanted if os.path.isdir(to_bytes(wanted)) else self._scratch()
        if not shell.get("setup"):
            return self._run_argv(argv, env, item, cwd=cwd, deadline=deadline)
        ours, theirs = os.pipe()
        try:
            outer = with_setup(shell["setup"], theirs, argv)
            raw = self._run_argv(outer, env, item, cwd=cwd, keep=(theirs,), deadline=deadline)
            os.set_blocking(ours, False)
            try:
                report = os.read(ours, 1)
            except BlockingIOError:  # the set-up ended the shell, or never ended
                report = b""
            raw["setup"] = {b"o": "fine", b"m": "no-command"}.get(report, "failed")
            return raw
        finally:
            os.close(ours)
            os.close(theirs)

    def _run_argv(
        self,
        argv: list[bytes],
        env: Mapping[bytes, bytes],
        item: Item,
        *,
        cwd: str | None,
        deadline: float,
        keep: tuple[int, ...] = (),
    ) -> Raw:
        try:
            done = self._commands.carry_out(
                argv,
                env,
                to_bytes(item.get("stdin") or ""),
                timeout_s=deadline - time.monotonic(),
                cwd=cwd,
                limit=int(item.get("max_bytes") or OUT_BYTES),
                keep=keep,
            )
        except OperationError as refusal:
            is_missing = isinstance(refusal.__cause__, FileNotFoundError)
            return {"error": refusal.message, "late": False, "missing": is_missing}
        return dict(done._asdict(), out=_text(done.out), err=_text(done.err), setup=None)

    def _scratch(self) -> str:
        """Return the working directory while the run has none: it is empty, so that nothing is imported from it."""
        path = os.path.join(self._root, "empty")
        try:
            make_private_dir(path)
        except (OSError, OperationError):
            return "/"  # for example a full disk, which has a finding of its own
        return path


def _text(data: bytes) -> str:
    """Decode UTF-8; other bytes become \\xNN."""
    return data.decode("utf-8", "backslashreplace")


def _guarded(call: Callable[[], Raw]) -> Raw:
    """One failing query must not affect the other results; the head shows it."""
    try:
        return call()
    except Exception as error:  # the head shows it
        return {"error": f"{type(error).__name__}: {error}", "late": False}
