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
    pulls       {}                    -> {pulls: {image: [layers present, known]}}; see node/agent/containers.py
    training    {paths}               -> {paths: {path: …}}, see node/agent/training_files.py
    listen, tcp                       see node/agent/network.py
"""

from __future__ import annotations

import errno
import glob
import os
import stat
import time
from functools import partial

from ascendrun.node import layout, procs
from ascendrun.node.agent import checks, leases, network
from ascendrun.node.agent.execute import Commands, work_off
from ascendrun.node.files import free_bytes, make_private_dir, read_some, to_bytes
from ascendrun.node.op_errors import OperationError, message
from ascendrun.node.ranks import rank_environ, with_setup

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

    def __init__(
        self, root: str, *, login: Mapping[bytes, bytes], commands: Commands, agent: list[str] | None = None
    ) -> None:
        self._root = root
        self._agent = agent or []
        self._login = login
        self._commands = commands

    def run(self, request: dict[str, Any]) -> Raw:
        """Return {"results": {item's name: raw result}}: every item has one, even if this node partly hangs."""
        shell = request.get("shell")
        items = list(request["items"])
        end = time.monotonic() + float(request.get("timeout_s") or SURVEY_S)
        if shell and shell.get("container"):
            return self._run_with_container(request, end)
        # Items that wait for peers get their own threads, so that they do not block the others.
        waiting = sum(1 for item in items if item["kind"] in ("listen", "tcp"))
        jobs = [partial(_guarded, partial(self._examine, item, shell, end)) for item in items]
        found = work_off(jobs, at_once=AT_ONCE + waiting, end=end + MARGIN_S)
        late = {"error": message("timed-out"), "late": True}
        return {"results": {item["name"]: raw or late for item, raw in zip(items, found)}}

    def _run_with_container(self, request: dict[str, Any], end: float) -> Raw:
        """Run what the job's shell would in its image, and the other items on the node. Sizes of /dev/shm are those of
        the container."""
        from ascendrun.node.agent import containers

        inner = [item for item in request["items"] if item["kind"] == "shell_argv"]
        request_inside = {**request, "items": [*inner, {"name": "shm", "kind": "disk", "paths": ["/dev/shm"]}]}
        call = partial(containers.survey, request_inside, root=self._root, agent=self._agent, end=end)
        own = {"items": [item for item in request["items"] if item not in inner], "timeout_s": end - time.monotonic()}
        outside, inside = work_off([partial(self.run, own), partial(_guarded, call)], at_once=2, end=end + 2 * MARGIN_S)
        results = (outside or {"results": {}})["results"]
        if inside is None or "error" in inside:
            why = {"problem": "container-failed", "detail": str((inside or {}).get("error", ""))}
            inside = {"image": why, "results": {}}
        image = {key: request["shell"]["container"][key] for key in ("runtime", "image")}
        disks = inside["results"].pop("shm", {}).get("disks")
        if disks and "disks" in results.get("disk", {}):
            results["disk"]["disks"].update(disks)
        return {"results": {**results, **inside["results"], "container": {**image, **inside["image"]}}}

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
        (raw,) = work_off([partial(_guarded, partial(probe, item, deadline))], at_once=1, end=deadline)
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
            report = read_some(ours, 1) or b""  # b"": the set-up ended the shell, or never ended
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


FILE_BYTES = 1 << 16
MAX_FILES = 20000
LIMITS = ("NOFILE", "NPROC", "MEMLOCK", "STACK", "CORE", "AS")
_NO_OWNER: Raw = {"uid": None, "pid": None, "command": None, "tag": None}
_KINDS = ((stat.S_ISDIR, "folder"), (stat.S_ISREG, "file"), (stat.S_ISCHR, "device"))


def probe(item: Item, deadline: float) -> Raw:
    """Return the raw result of one item. Raises OSError, ValueError or KeyError when the entire item fails."""
    kinds: dict[str, Callable[[Item, float], Raw]] = {
        "file": lambda item, deadline: _one(item["path"], lambda path: {"text": _read(path, _limit(item))}),
        "files": _files,
        "listdir": lambda item, deadline: _one(item["path"], lambda path: {"names": sorted(os.listdir(path))}),
        "glob": lambda item, deadline: {"paths": sorted(path for each in item["patterns"] for path in glob.glob(each))},
        "stat": _stat,
        "size": lambda item, deadline: {
            "sizes": _each(item["paths"], deadline, lambda path: _measure(path, item.get("max_files"), deadline))
        },
        "disk": _disk,
        "write_probe": _write_probe,
        "limits": _limits,
        "bind": _bind,
        "openers": _openers,
        "leases": lambda item, deadline: {"leases": leases.listing()},
    }
    if item["kind"] in ("pulls", "training"):  # rare, and longer to import than all others together
        from ascendrun.node.agent import containers, training_files

        return containers.pulls() if item["kind"] == "pulls" else training_files.examine(item, deadline)
    kind = kinds.get(item["kind"])
    if kind is None:
        raise ValueError("this agent knows no survey item of kind {!r}".format(item["kind"]))
    return kind(item, deadline)


def _read(path: str, limit: int) -> str:
    with open(to_bytes(path), "rb") as file:
        return file.read(limit).decode("utf-8", "replace")


def _limit(item: Item) -> int:
    return int(item.get("max_bytes") or FILE_BYTES)


def _one(path: str, call: Callable[[str], Raw]) -> Raw:
    try:
        return call(path)
    except OSError as error:
        raw: Raw = {"error": error.strerror or str(error), "late": False}
        return dict(raw, missing=True) if error.errno in (errno.ENOENT, errno.ENOTDIR) else raw


def _files(item: Item, deadline: float) -> Raw:
    """Return the readable files; for patterns, those that match."""
    texts = {}
    for pattern in item["paths"]:
        for path in sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]:
            try:
                texts[path] = _read(path, _limit(item))
            except OSError:
                continue
    return {"texts": texts}


def _each(paths: list[str], deadline: float, call: Callable[[str], Raw]) -> dict[str, Raw]:
    late: Raw = {"error": message("no-time-left-for-check"), "late": True}
    return {path: _one(path, call) if time.monotonic() < deadline else late for path in paths}


def _kind(mode: int) -> str:
    return next((word for test, word in _KINDS if test(mode)), "other")


def _stat(item: Item, deadline: float) -> Raw:
    below = os.environ.get(item.get("below") or "", "")

    def one(path: str) -> Raw:
        place = to_bytes(below + path)
        found = os.stat(place)
        return {
            "kind": _kind(found.st_mode),
            "bytes": found.st_size,
            "mode": found.st_mode & 0o7777,
            "uid": found.st_uid,
            "gid": found.st_gid,
            "mtime_s": found.st_mtime,
            "readable": os.access(place, os.R_OK),
            "writable": os.access(place, os.W_OK),
        }

    return {"stats": _each(item["paths"], deadline, one)}


def _measure(path: str, limit: int | None, deadline: float) -> Raw:
    found = os.stat(to_bytes(path))
    if not stat.S_ISDIR(found.st_mode):
        return {"kind": _kind(found.st_mode), "bytes": found.st_size, "files": 1, "truncated": False}
    total = files = 0
    for folder, _, names in os.walk(to_bytes(path)):
        for name in names:
            if files >= (limit or MAX_FILES) or time.monotonic() > deadline - 0.2:
                return {"kind": "folder", "bytes": total, "files": files, "truncated": True}
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except OSError:
                continue
            files += 1
    return {"kind": "folder", "bytes": total, "files": files, "truncated": False}


def _disk(item: Item, deadline: float) -> Raw:
    def one(path: str) -> Raw:
        at = checks.standing(path)
        found, kind = os.statvfs(to_bytes(at)), checks.file_system_of(at)
        return {
            "at": at,
            "device": os.stat(to_bytes(at)).st_dev,
            "kind": kind or None,
            "remote": checks.is_network(kind),
            "free_bytes": free_bytes(at),
            "total_bytes": found.f_blocks * found.f_frsize,
            "free_inodes": found.f_favail,
            "total_inodes": found.f_files,
        }

    return {"disks": _each(item["paths"], deadline, one)}


def _write_probe(item: Item, deadline: float) -> Raw:
    """Test writing. A missing directory is not made: the nearest directory above it is tested."""

    def one(path: str) -> Raw:
        at = checks.standing(path)
        started = time.monotonic()
        try:
            checks.check_directory(at, make=False)
        except OperationError as refusal:
            return {
                "at": at,
                "error": refusal.message,
                "code": refusal.code,
                "uid": os.stat(to_bytes(at)).st_uid,
                "late": False,
            }
        return {
            "at": at,
            "wall_s": round(time.monotonic() - started, 6),
            "free_bytes": free_bytes(at),
            "uid": os.stat(to_bytes(at)).st_uid,
        }

    return {"folders": _each(item["paths"], deadline, one)}


def _limits(item: Item, deadline: float) -> Raw:
    import resource

    found: dict[str, list[int | None]] = {}
    for name in LIMITS:
        number = getattr(resource, "RLIMIT_" + name, None)
        if number is not None:
            found[name] = [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number)]
    return {"limits": found}


def _bind(item: Item, deadline: float) -> Raw:
    taken = [int(number) for number in item["ports"] if not leases.are_free([int(number)], after_others=True)]
    owners = _owners(taken) if taken else {}
    return {"taken": {str(number): owners.get(number, dict(_NO_OWNER)) for number in taken}}


def _owners(wanted: list[int]) -> dict[int, Raw]:
    """Return the owner of each port, as far as visible to this user: the uid for all, the process for its own."""
    inodes: dict[str, int] = {}
    found: dict[int, Raw] = {}
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = _read(path, 8 << 20).splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            number, uid, inode = parse_socket_line(line)
            if number in wanted:
                inodes[inode] = number
                found.setdefault(number, dict(_NO_OWNER, uid=uid))
    for pid in procs.pids():
        for target in procs.open_files(pid):
            if target.startswith("socket:[") and target[8:-1] in inodes:
                found[inodes[target[8:-1]]].update(pid=pid, command=_command(pid), tag=_tag(pid))
    return found


def parse_socket_line(line: str) -> tuple[int, int, str]:
    """Return (local port, owner's uid, inode) of a line of /proc/net/tcp; (0, 0, "") if invalid."""
    fields = line.split()
    try:
        return int(fields[1].rpartition(":")[2], 16), int(fields[7]), fields[9]
    except (IndexError, ValueError):
        return 0, 0, ""


def _openers(item: Item, deadline: float) -> Raw:
    """Return processes with open files of the patterns. `hidden`: number of processes that this user may not read."""
    wanted = {path for pattern in item["patterns"] for path in glob.glob(pattern)}
    found = {(pid, target) for pid in procs.pids() for target in procs.open_files(pid) if target in wanted}
    hidden = sum(not os.access("/proc/%d/fd" % pid, os.R_OK) for pid in procs.pids())
    return {"openers": [_describe(pid, path) for pid, path in sorted(found)], "hidden": hidden}


def _describe(pid: int, path: str) -> Raw:
    try:
        uid: int | None = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        uid = None
    return {
        "path": path,
        "pid": pid,
        "uid": uid,
        "user": procs.user_name(uid),
        "command": _command(pid),
        "tag": _tag(pid),
    }


def _tag(pid: int) -> str | None:
    """Return the attempt of the process; None: not of ascendrun, or not visible."""
    tag = procs.variables_of(procs.read_environ(pid)).get(to_bytes(layout.TAG_VARIABLE))
    return None if tag is None else tag.decode("utf-8", "replace")


def _command(pid: int) -> str | None:
    words = procs.read_cmdline(pid)[:2048].replace(b"\0", b" ").strip()
    return words.decode("utf-8", "replace") or procs.read_line("/proc/%d/comm" % pid) or None


def main() -> int:
    """Run a survey that comes as JSON on stdin, in this environment, and print its results."""
    import json
    import sys

    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    login = dict(os.environb)
    surveys = Surveys(layout.node_root(os.environ), login=login, commands=Commands(login, 0o077))
    print(json.dumps(surveys.run(request)))
    return 0
