"""Checks of what a job writes to and reads from: space, inodes, shared memory, folders, model and data."""

from __future__ import annotations

from collections.abc import Iterator

from ascendrun.core.findings import Finding, Severity
from ascendrun.health.survey.check_context import Check, World, compare
from ascendrun.health.survey.facts import Disk, PathSize

ROOM_BYTES = 32 << 20
"""Less, and the node refuses the start: the records of a run are not safe (node/agent/checks.py)."""
LOW_BYTES = 1 << 30
LOW_INODES = 0.01
SHM, SHM_BYTES, SHM_FREE_BYTES = "/dev/shm", 1 << 30, 64 << 20
"""DataLoader workers hand tensors over through it; Docker's default of 64 MB ends them with a bus error."""
SLOW_WRITE_S = 1.0


def check_space(world: World) -> Iterator[Finding]:
    for host, facts in world.facts.items():
        told = set()
        for path, disk in (facts.disks or {}).items():
            same = (disk.total_bytes, disk.free_bytes, disk.total_inodes, disk.free_inodes)
            if path != SHM and same not in told:  # several paths on one disk are one fault
                told.add(same)
                yield from _space(host, path, disk)


def _space(host: str, path: str, disk: Disk) -> Iterator[Finding]:
    values = {"path": path}
    if disk.free_bytes is not None and disk.free_bytes < LOW_BYTES:
        values["free"] = f"{disk.free_bytes >> 20} MiB"
        is_small = disk.total_bytes is not None and disk.total_bytes <= LOW_BYTES
        if disk.free_bytes < ROOM_BYTES:
            yield Finding("disk-full", Severity.FAIL, (host,), values)
        elif not is_small or disk.free_bytes * 4 < (disk.total_bytes or 0):
            yield Finding("disk-low", Severity.WARN, (host,), values)
    if disk.total_inodes and disk.free_inodes is not None and disk.free_inodes < disk.total_inodes * LOW_INODES:
        severity = Severity.FAIL if disk.free_inodes == 0 else Severity.WARN
        yield Finding("inodes-low", severity, (host,), {"path": path, "free": str(disk.free_inodes)})


def check_shared_memory(world: World) -> Iterator[Finding]:
    for host, facts in world.facts.items():
        disk = (facts.disks or {}).get(SHM)
        if disk is None:
            continue
        if disk.at != SHM:
            yield Finding("shm-missing", Severity.WARN, (host,), {})
        elif disk.total_bytes is not None and disk.total_bytes < SHM_BYTES:
            yield Finding("shm-small", Severity.WARN, (host,), {"size": f"{disk.total_bytes >> 20} MiB"})
        elif disk.free_bytes is not None and disk.free_bytes < SHM_FREE_BYTES:
            yield Finding("shm-full", Severity.WARN, (host,), {"free": f"{disk.free_bytes >> 20} MiB"})


def check_folders(world: World) -> Iterator[Finding]:
    """Write, rename, fsync: what a checkpoint does."""
    for host, facts in world.facts.items():
        for path, result in (facts.writes or {}).items():
            values = {"path": path}
            if result.is_late:
                yield Finding("directory-hangs", Severity.FAIL, (host,), values)
            elif result.error is not None and not _is_told_already(result.code):
                yield Finding("directory-not-writable", Severity.FAIL, (host,), {**values, "why": result.error})
            elif result.wall_s is not None and result.wall_s > SLOW_WRITE_S:
                yield Finding("directory-slow", Severity.WARN, (host,), {**values, "seconds": f"{result.wall_s:.1f}"})


def _is_told_already(code: str | None) -> bool:
    """A full disk has its own finding, with the space that is left."""
    return code == "disk-full"


def check_paths(world: World) -> Iterator[Finding]:
    """Model and data: there, and the same on every node."""
    asked = dict.fromkeys(path for facts in world.facts.values() for path in facts.paths or {})
    for path in asked:
        found = {host: (facts.paths or {}).get(path) for host, facts in world.facts.items()}
        for host, size in found.items():
            if size is not None and size.missing:
                yield Finding("path-not-found", Severity.FAIL, (host,), {"path": path})
            elif size is not None and size.error is not None:
                yield Finding("path-unreadable", Severity.FAIL, (host,), {"path": path, "why": size.error})
        same = compare({host: _size_text(size) for host, size in found.items()})
        for value, hosts in same.others if same else ():
            yield Finding(
                "path-differs",
                Severity.WARN,
                hosts,
                {"path": path, "value": value, "majority": same.majority if same else ""},
                same.evidence() if same else (),
            )


def _size_text(size: PathSize | None) -> str | None:
    if size is None or size.size_bytes is None or size.truncated:
        return None
    what = f"{size.files} files, " if size.kind == "folder" else ""
    return f"{what}{size.size_bytes} bytes"


CHECKS: tuple[Check, ...] = (
    Check(
        "disk-space",
        check_space,
        "there is room and there are inodes where a job writes",
        ("disk-full", "disk-low", "inodes-low"),
    ),
    Check(
        "shared-memory",
        check_shared_memory,
        "/dev/shm is there and large enough",
        ("shm-missing", "shm-small", "shm-full"),
    ),
    Check(
        "directories",
        check_folders,
        "stage, checkpoint and log folders take a write, a rename and an fsync",
        ("directory-hangs", "directory-not-writable", "directory-slow"),
    ),
    Check(
        "paths",
        check_paths,
        "model and data are there, the same size on all nodes",
        ("path-not-found", "path-unreadable", "path-differs"),
    ),
)
