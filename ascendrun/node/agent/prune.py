"""Disk use of one head's ended jobs on this node, and its removal. What a rank wrote to its directory stays.

The bundled programs encode texts once into a directory of the user's cache, which holds a lock while a rank uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time

from ascendrun.node import layout
from ascendrun.node.agent.follow import stream_files
from ascendrun.node.files import names_in, read_claim, remove_tree
from ascendrun.node.layout import PREPARED
from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any, Callable

ENCODED = "data/"
"""Begins the name of a directory of encoded texts, where staged directories have their hash."""
_KEY = re.compile(r"[0-9a-f]{32}(\.building)?")


def usage(root: str, head_id: str | None) -> dict[str, Any]:
    """Return {"runs": {run: bytes of its attempts}, "trees": {hash: [bytes, unused seconds]}}.

    `head_id`: only its runs; None: only {"total_bytes"}, of all heads. Trees that an attempt in ROOT may use, of any
    head or machine, are not listed. Trees include directories of encoded texts that no process uses.
    """
    if head_id is None:
        return {"runs": {}, "trees": {}, "total_bytes": total_bytes(root)}
    prefix = layout.make_run(head_id, "")
    runs = {
        run: sum(_bytes(layout.attempt_dir(root, layout.make_tag(run, n))) for n in layout.attempts_of(root, run))
        for run in layout.runs_of(root)
        if run.startswith(prefix)
    }
    used, trees = _used_trees(root), {}
    for sha256 in _trees(root):
        path = layout.tree_dir(root, sha256)
        if sha256 not in used:
            trees[sha256] = [_bytes(path), _unused_s(path)]
    for name, path in _encoded().items():
        with _held(path) as is_free:
            if is_free:
                trees[name] = [_bytes(path), _unused_s(_lock_of(path))]
    return {"runs": {run: size for run, size in runs.items() if size}, "trees": trees}


def total_bytes(root: str) -> int:
    """Return the bytes of everything of ascendrun on this machine, of all heads, and of what machines of one home
    share."""
    keys = set(names_in(os.path.join(root, "nodes"))) - {layout.machine_key()}
    return _bytes(root, apart={layout.node_dir(root, key) for key in keys}) + _bytes(layout.local_root(root))


def prune(root: str, request: dict[str, Any], forget: Callable[[str], Any]) -> dict[str, Any]:
    """{runs, trees: {hash: unused seconds}, everything} -> {removed: {run or hash: bytes}}. A run with an attempt that
    has not ended stays, and so does a tree that was used since `usage` reported it. `everything`: of the runs also
    what ranks wrote to their directory, and checkpoints there. `forget(tag)` removes an ended attempt."""
    removed: dict[str, int] = {}
    for run in (request.get("runs") or []) if request.get("everything") else []:
        removed[str(run)] = _remove_run(root, str(run), forget)
    for run in [] if request.get("everything") else request.get("runs") or []:
        for number in layout.attempts_of(root, str(run)):
            tag = layout.make_tag(str(run), number)
            folder = layout.attempt_dir(root, tag)
            size = _bytes(folder)
            try:
                forget(tag)
            except OperationError:
                continue
            removed[str(run)] = removed.get(str(run), 0) + size
        _remove_links(layout.work_dir(root, str(run)))
    used, encoded = _used_trees(root), _encoded()
    for sha256, unused_s in (request.get("trees") or {}).items():
        if sha256 in encoded:
            path = encoded[sha256]
            with _held(path) as is_free:
                if is_free and _unused_s(_lock_of(path)) >= unused_s:
                    removed[sha256] = _bytes(path)
                    remove_tree(path)
            continue
        path = layout.tree_dir(root, sha256)
        if sha256 not in used and os.path.isdir(path) and _unused_s(path) >= unused_s:
            removed[sha256] = _bytes(path)
            remove_tree(path)
            remove_tree(path + ".listing")
    return {"removed": removed}


def _remove_run(root: str, run: str, forget: Callable[[str], Any]) -> int:
    """Remove all of a run; return its bytes. Raises OperationError if an attempt has not ended, OSError."""
    folders = [layout.run_dir(root, run), layout.shared_run_dir(root, run)]
    size = sum(_bytes(folder) for folder in folders)
    for number in layout.attempts_of(root, run):
        forget(layout.make_tag(run, number))
    for folder in folders:
        remove_tree(folder)
    return size


def _unused_s(tree: str) -> float:
    """Return the seconds since a start last asked for the tree (Trees.have)."""
    return max(0.0, time.time() - os.lstat(tree).st_mtime)


def _encoded() -> dict[str, str]:
    """Return the directories of encoded texts in this user's cache, by name (programs/trainer/shards.default_cache)."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(cache, "ascendrun", "data")
    found = {ENCODED + name: os.path.join(folder, name) for name in names_in(folder) if _KEY.fullmatch(name)}
    return {name: path for name, path in found.items() if os.path.isfile(_lock_of(path))}


def _lock_of(path: str) -> str:
    """Return the file that a process locks: the one that builds the directory, or those that read it."""
    whole, dot, _ = path.partition(".building")
    return whole + ".lock" if dot else os.path.join(path, "manifest.json")


@contextlib.contextmanager
def _held(path: str) -> Iterator[bool]:
    """Lock a directory of encoded texts; yield False if a process uses it, or that cannot be known."""
    with contextlib.ExitStack() as stack:
        is_free = True
        try:
            file = stack.enter_context(open(_lock_of(path), "r+b"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            is_free = False
        yield is_free


def _remove_links(work: str) -> None:
    """Remove a working directory in which nothing but links to staged directories is."""
    try:
        entries = list(os.scandir(work))
    except OSError:
        return
    if all(entry.is_symlink() for entry in entries):
        remove_tree(work)


def _trees(root: str) -> list[str]:
    try:
        names = os.listdir(os.path.join(root, "trees"))
    except FileNotFoundError:
        return []
    return [name for name in names if len(name) == 64 and not name.startswith(".")]


def _used_trees(root: str) -> set[str]:
    """Return the trees of all attempts in ROOT, and those that a working directory links to."""
    used: set[str] = set()
    try:
        keys: list[str | None] = list(os.listdir(os.path.join(root, "nodes")))
    except FileNotFoundError:
        keys = []
    prefix = os.path.join(root, "trees") + "/"
    for base in [layout.runs_dir(root, key) for key in keys]:
        for run in names_in(base):
            for name in names_in(os.path.join(base, run)):
                folder = os.path.join(base, run, name)
                if name == "work":
                    links = [os.path.join(folder, one) for one in names_in(folder)]
                    targets = [os.readlink(one) for one in links if os.path.islink(one)]
                    used.update(one[len(prefix) :][:64] for one in targets if one.startswith(prefix))
                elif name.startswith("attempt-"):
                    used.update((read_claim(os.path.join(folder, PREPARED)) or {}).get("trees") or ())
    return used


def _bytes(folder: str, *, apart: Iterable[str] = ()) -> int:
    """Return the bytes that an attempt or a tree occupies, with its growing files elsewhere. `apart`: directories that
    do not count."""
    total = 0
    for top in {folder, layout.streams_dir(folder)} if os.path.basename(folder).startswith("attempt-") else {folder}:
        for base, folders, names in os.walk(top):
            folders[:] = [name for name in folders if os.path.join(base, name) not in apart]
            for name in names + folders:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(base, name)).st_blocks * 512
    return total


_LOG = re.compile(r"^((?:rank|node)-\d+\.(?:out|err))(\.times)?$")


def release(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """{tag, have: {"rank-3.out": {"0": bytes}, "rank-3.out.times": {...}}, keep_bytes} -> {freed_bytes, kept_bytes}.

    `have`: bytes at the head. Generations of which it has every byte, and every arrival time, are deleted, the oldest
    first, until the attempt's logs use no more than `keep_bytes`. The newest generation of a file always stays.
    """
    folder = layout.streams_dir(layout.attempt_dir(root, str(request["tag"])))
    have = request["have"]
    logs: dict[tuple[str, int], dict[str, os.stat_result]] = {}  # a log itself ("") and its times (".times")
    for (file, generation), facts in stream_files(folder).items():
        match = _LOG.match(file)
        if match:
            logs.setdefault((match.group(1), generation), {})[match.group(2) or ""] = facts
    total = sum(facts.st_size for parts in logs.values() for facts in parts.values())
    newest = {name: max(generation for other, generation in logs if other == name) for name, _ in logs}
    freed = 0
    for (name, generation), parts in sorted(
        logs.items(), key=lambda item: (max(facts.st_mtime_ns for facts in item[1].values()), item[0])
    ):
        if total - freed <= int(request["keep_bytes"]):
            break
        held = {part: int(have.get(name + part, {}).get(str(generation), 0)) for part in parts}
        if generation < newest[name] and all(held[part] >= facts.st_size for part, facts in parts.items()):
            for part in parts:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, "%s%s.%d" % (name, part, generation)))
            freed += sum(facts.st_size for facts in parts.values())
    return {"freed_bytes": freed, "kept_bytes": total - freed}
