"""Probes of files, directories, limits, ports and open devices of this node; the basic kinds of a survey."""

from __future__ import annotations

import errno
import glob
import os
import stat
import time

from ascendrun.node import layout, procs
from ascendrun.node.agent import checks, leases, training_files
from ascendrun.node.files import free_bytes
from ascendrun.node.op_errors import OperationError, message
from ascendrun.node.ranks import to_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict

    Item = Dict[str, Any]
    Raw = Dict[str, Any]

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
        "training": training_files.examine,
    }
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


def _standing(path: str) -> str:
    """Return the path itself, or the nearest existing directory above it."""
    path = os.path.abspath(path)
    while not os.path.exists(to_bytes(path)) and path != "/":
        path = os.path.dirname(path)
    return path


def _disk(item: Item, deadline: float) -> Raw:
    def one(path: str) -> Raw:
        at = _standing(path)
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
        at = _standing(path)
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
