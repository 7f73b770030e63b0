"""Deletion of closed log generations that the head has completely, when their total size is over the limit."""

from __future__ import annotations

import os
import re

from ascendrun.node import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

_LOG = re.compile(r"^((?:rank|node)-\d+\.(?:out|err))(\.times)?\.(\d+)$")


def release(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """{tag, have: {"rank-3.out": {"0": bytes}, "rank-3.out.times": {...}}, keep_bytes} -> {freed_bytes, kept_bytes}.

    `have`: bytes at the head. Generations of which it has every byte, and every arrival time, are deleted, the oldest
    first, until the attempt's logs use no more than `keep_bytes`. The newest generation of a file always stays.
    """
    folder = layout.streams_dir(layout.attempt_dir(root, str(request["tag"])))
    have = request["have"]
    found = _logs(folder)
    total = sum(one.size for one in found)
    newest: dict[str, int] = {}
    for one in found:
        newest[one.name] = max(newest.get(one.name, 0), one.generation)
    freed = 0
    for one in sorted(found, key=lambda one: (one.mtime_ns, one.name, one.generation)):
        if total - freed <= int(request["keep_bytes"]):
            break
        if one.generation < newest[one.name] and one.is_held(have):
            for part in one.parts:
                try:
                    os.unlink(os.path.join(folder, "%s%s.%d" % (one.name, part, one.generation)))
                except FileNotFoundError:
                    continue
            freed += one.size
    return {"freed_bytes": freed, "kept_bytes": total - freed}


class _Log:
    """One generation of a rank's output. `parts`: bytes of the log itself ("") and of its times (".times")."""

    def __init__(self, name: str, generation: int) -> None:
        self.name = name
        self.generation = generation
        self.parts: dict[str, int] = {}
        self.mtime_ns = 0

    @property
    def size(self) -> int:
        return sum(self.parts.values())

    def is_held(self, have: Mapping[str, Mapping[str, int]]) -> bool:
        return all(
            int(have.get(self.name + part, {}).get(str(self.generation), 0)) >= size
            for part, size in self.parts.items()
        )


def _logs(folder: str) -> list[_Log]:
    found: dict[tuple[str, int], _Log] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                match = _LOG.match(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    facts = entry.stat(follow_symlinks=False)
                    key = match.group(1), int(match.group(3))
                    log = found.setdefault(key, _Log(*key))
                    log.parts[match.group(2) or ""] = facts.st_size
                    log.mtime_ns = max(log.mtime_ns, facts.st_mtime_ns)
    except FileNotFoundError:
        return []
    return list(found.values())
