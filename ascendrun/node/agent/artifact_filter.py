"""Selection of files, parts of files and lines to collect; knows no attempt and sends nothing."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, Mapping

HEAD_BYTES = 256 << 10
"""Bytes kept from the start of a file over the limit: settings are there; the rest is its end."""
MOST_LOOKED_AT = 20000
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_KERNEL_STAMP = re.compile(rb"^(?:<\d+>)?\[\s*(\d+\.\d+)\]")


def expand_first(bases: list[str], environ: Mapping[str, str]) -> str | None:
    """Return the first base whose variables are all set and not empty, absolute; None: not found."""
    for base in bases:
        names = [name.strip("{}") for name in _VARIABLE.findall(base)] + (["HOME"] if base.startswith("~") else [])
        if not all(environ.get(name) for name in names):
            continue
        if base.startswith("~/"):
            base = environ["HOME"] + base[1:]
        path = _VARIABLE.sub(lambda match: environ[match.group(1).strip("{}")], base)
        if os.path.isabs(path):
            return path
    return None


def walk(base: str, patterns: list[str], deadline: float) -> Iterator[tuple[str, os.stat_result]]:
    """Yield regular files that match one of `patterns` ("debug/plog/plog-*.log") and are below `base`: links below it
    are not followed, `base` itself may be a link."""
    looked_at = 0
    seen: set[str] = set()
    for pattern in patterns:
        folders = [os.path.realpath(base)]
        *parents, last = pattern.split("/")
        for part in parents:
            folders = [
                entry.path
                for folder in folders
                for entry in _entries(folder)
                if fnmatch.fnmatchcase(entry.name, part) and entry.is_dir(follow_symlinks=False)
            ]
        for folder in folders:
            for entry in _entries(folder):
                looked_at += 1
                if looked_at > MOST_LOOKED_AT or time.monotonic() > deadline:
                    return
                if not fnmatch.fnmatchcase(entry.name, last) or entry.path in seen:
                    continue
                try:
                    facts = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(facts.st_mode):
                    seen.add(entry.path)
                    yield entry.path, facts


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def choose_parts(size: int, room: int) -> tuple[list[tuple[int, int]], int]:
    """Return the (start, count) of the parts of a file to send within `room` bytes, and the number of omitted bytes.

    The complete file if it fits, else its start and, mostly, its end.
    """
    if size <= room:
        return [(0, size)], 0
    head = min(HEAD_BYTES, room // 4)
    return [(0, head), (size - (room - head), room - head)], size - room


def excerpt(text: bytes, patterns: list[str], *, around: int) -> bytes:
    """Return the lines that match one of the patterns, with `around` lines about each; `...` for omitted lines."""
    search = re.compile("|".join(f"(?:{pattern})" for pattern in patterns).encode("utf-8"), re.IGNORECASE).search
    lines = text.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    wanted = sorted(
        {
            near
            for at, line in enumerate(lines)
            if search(line)
            for near in range(max(0, at - around), min(len(lines), at + around + 1))
        }
    )
    out: list[bytes] = []
    for before, at in zip([-1] + wanted, wanted):
        if at != before + 1 and out:
            out.append(b"...")
        out.append(lines[at])
    return b"".join(line + b"\n" for line in out)


def since_kernel_time(text: bytes, since_s: float) -> bytes:
    """Remove lines from before `since_s`, by the kernel's clock; a line without a stamp is treated as its neighbour."""
    kept = []
    passes = False
    for line in text.split(b"\n"):
        match = _KERNEL_STAMP.match(line)
        if match:
            passes = float(match.group(1)) >= since_s
        if passes:
            kept.append(line)
    return b"\n".join(kept)
