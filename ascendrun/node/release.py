"""Frees disk on the node: closed generations of logs that the head holds whole, when there is too much of them."""

from __future__ import annotations

import os
import re

from ascendrun.node import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Tuple

_LOG = re.compile(r"^(rank-\d+\.(?:out|err))(\.times)?\.(\d+)$")


def release(root: str, request: Dict[str, Any]) -> Dict[str, Any]:
    """{tag, below: {"rank-3.out": generation}, keep_bytes} -> {freed_bytes, kept_bytes}.

    Generations under `below` may go, the oldest first, until the attempt's logs take no more than `keep_bytes`. The
    newest generation of a file stays, whatever is asked.
    """
    folder = layout.attempt_dir(root, str(request["tag"]))
    below = {str(name): int(generation) for name, generation in request["below"].items()}
    total, found = _logs(folder)
    newest: Dict[str, int] = {}
    for _mtime_ns, name, generation, _size in found:
        newest[name] = max(newest.get(name, 0), generation)
    freed = 0
    for _mtime_ns, name, generation, size in sorted(found):
        if total - freed <= int(request["keep_bytes"]):
            break
        if generation < min(below.get(name, 0), newest[name]):
            for part in ("", ".times"):
                try:
                    os.unlink(os.path.join(folder, "%s%s.%d" % (name, part, generation)))
                except FileNotFoundError:
                    continue
            freed += size
    return {"freed_bytes": freed, "kept_bytes": total - freed}


def _logs(folder: str) -> Tuple[int, List[Tuple[int, str, int, int]]]:
    """All bytes of the ranks' output, and (mtime, name, generation, bytes) of each generation with its times."""
    sizes: Dict[Tuple[str, int], List[int]] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                match = _LOG.match(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    facts = entry.stat(follow_symlinks=False)
                    kept = sizes.setdefault((match.group(1), int(match.group(3))), [0, 0])
                    kept[0] += facts.st_size
                    kept[1] = max(kept[1], facts.st_mtime_ns)
    except FileNotFoundError:
        return 0, []
    found = [(mtime_ns, name, generation, size) for (name, generation), (size, mtime_ns) in sizes.items()]
    return sum(one[3] for one in found), found
