"""Checks of a job's storage: space, inodes, shared memory, directories, model and data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ascendrun.core.findings import Finding, Severity
from ascendrun.health.survey.check_context import CheckContext, check, finding, is_many, node_check, outliers
from ascendrun.health.survey.facts import Disk, NodeFacts, PathSize
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec

ROOM_BYTES = 32 << 20
"""Below that the node rejects the start: records of a run may be lost (node/agent/checks.py)."""
LOW_BYTES = 1 << 30
LOW_INODES = 0.01
SHM, SHM_BYTES, SHM_FREE_BYTES = "/dev/shm", 1 << 30, 64 << 20
"""DataLoader workers pass tensors through it; with Docker's default of 64 MB they die of a bus error."""
SLOW_WRITE_S = 1.0
NULL_DEVICE = "character special file 1,3 666"
"""As `stat` shows it: null(4) has the device numbers 1 and 3 and the mode 0666."""


@node_check("disk-space", "disk space and inodes are available where a job writes", "disk-full disk-low inodes-low")
def check_disk_space(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    seen: set[object] = set()
    for path, disk in (facts.disks or {}).items():
        write = (facts.writes or {}).get(path)
        if write is not None and write.error is not None and write.code != "disk-full":
            continue  # it takes no file, whatever it has free: a directory of /proc, a read-only image
        same = disk.device or (disk.total_bytes, disk.free_bytes, disk.total_inodes, disk.free_inodes)
        if path != SHM and same not in seen:  # several paths on one disk are one fault
            seen.add(same)
            yield from _space(host, path, disk)


def _space(host: str, path: str, disk: Disk) -> Iterator[Finding]:
    values: dict[str, Any] = {"path": path, "free": disk.free_bytes}
    if disk.free_bytes is not None and disk.free_bytes < LOW_BYTES:
        is_small = disk.total_bytes is not None and disk.total_bytes <= LOW_BYTES
        if disk.free_bytes < ROOM_BYTES:
            yield finding("disk-full", Severity.FAIL, host, **values)
        elif not is_small or disk.free_bytes * 4 < (disk.total_bytes or 0):
            yield finding("disk-low", Severity.WARN, host, **values)
    if disk.total_inodes and disk.free_inodes is not None and disk.free_inodes < disk.total_inodes * LOW_INODES:
        severity = Severity.FAIL if disk.free_inodes == 0 else Severity.WARN
        yield finding("inodes-low", severity, host, path=path, free=disk.free_inodes)


@check("checkpoint-disk", "checkpoints of a job that restarts survive the loss of a node", "checkpoints-local")
def check_checkpoint_disk(context: CheckContext) -> Iterator[Finding]:
    """Find checkpoint directories on the disks of the nodes themselves. Local hosts may share this machine."""
    job = context.job
    if job is None or not job.checkpoint.dir or not job.restart.max_restarts or not is_many(context):
        return
    kinds = {
        host: disk.kind
        for host, facts in context.facts.items()
        for path, disk in (facts.disks or {}).items()
        if path == job.checkpoint.dir and disk.kind and disk.is_remote is False and not facts.is_local
    }
    if kinds:
        disks = tuple(sorted(set(kinds.values())))
        yield finding("checkpoints-local", Severity.WARN, tuple(kinds), path=job.checkpoint.dir, kind=disks)


_SAVES = re.compile(r"(?:.*_)?(?:out|outputs?|saves?|ckpts?|checkpoints?)(?:_(?:dir|directory|folder|path))?|outdir")
"""Names of options, with _ instead of -, that say where a program saves."""
CONFIG_BYTES = 1 << 16
"""A longer file is data, not a configuration."""


@check("relative-output", "the command saves where a later job finds it", "output-relative")
def check_relative_output(context: CheckContext) -> Iterator[Finding]:
    """Find options of the command with a relative directory that `outputs` does not fetch.

    It is in the working directory of the run: a program that resumes from its own output finds nothing there.
    """
    job = context.job
    if job is None or not job.command:
        return
    fetched = {PurePosixPath(pattern).parts[0] for pattern in job.outputs or () if pattern.strip("/")}
    for option, name, path in [*_options(job.command), *_config_values(job)]:
        if not _SAVES.fullmatch(name.lower().replace("-", "_")):
            continue
        is_relative = bool(re.match(r"[\w.][^$:]*$", path)) and not re.fullmatch(
            r"(?i)true|false|yes|no|none|[\d.]+", path
        )
        if is_relative and PurePosixPath(path).parts[:1] and PurePosixPath(path).parts[0] not in fetched:
            yield finding("output-relative", Severity.WARN, tuple(context.facts), option=option, path=path)


def _options(command: Sequence[object]) -> Iterator[tuple[str, str, str]]:
    """Yield (option, its name, value) of a command's options."""
    words = [str(word) for word in command]
    for word, after in zip(words, (*words[1:], "")):
        option, has_value, value = word.partition("=")
        if option.startswith("-"):
            yield option, option.lstrip("-"), value if has_value else after


def _config_values(job: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Yield (file and key, key, value) of the configurations that a command names, with the keys of the first level.

    Of files in workdir.path, which are here. An unreadable file is for the program to report.
    """
    import yaml

    if job.workdir is None:
        return
    for word in dict.fromkeys(map(str, job.command or ())):
        path = Path(job.workdir.path, word)
        if word.startswith("/") or not word.endswith((".yaml", ".yml", ".json")):
            continue
        try:
            if not path.is_file() or path.stat().st_size > CONFIG_BYTES:
                continue
            values = yaml.safe_load(path.read_bytes())
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            continue
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, str):
                yield f"{word}: {key}", str(key), value


@node_check("shared-memory", "/dev/shm exists and is large enough", "shm-missing shm-small shm-full")
def check_shared_memory(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    disk = (facts.disks or {}).get(SHM)
    if disk is None:
        return
    if disk.at != SHM:
        yield finding("shm-missing", Severity.WARN, host)
    elif disk.total_bytes is not None and disk.total_bytes < SHM_BYTES:
        yield finding("shm-small", Severity.WARN, host, size=disk.total_bytes)
    elif disk.free_bytes is not None and disk.free_bytes < SHM_FREE_BYTES:
        yield finding("shm-full", Severity.WARN, host, free=disk.free_bytes)


@node_check("null-device", "/dev/null is the null device, and everybody may write to it", "null-device-broken")
def check_null_device(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Programs, sshd among them, redirect into /dev/null: a regular file there fills the disk or refuses the login."""
    if facts.null_device is not None and facts.null_device != NULL_DEVICE:
        yield finding("null-device-broken", Severity.FAIL, host, found=facts.null_device or "-")


@node_check(
    "directories",
    "work, checkpoint and log directories accept a write, a rename and an fsync",
    "directory-hangs directory-not-writable directory-slow",
)
def check_directories(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Test write, rename and fsync, as for a checkpoint."""
    for path, result in (facts.writes or {}).items():
        values = {"path": path}
        if result.is_late:
            yield finding("directory-hangs", Severity.FAIL, host, **values)
        elif result.error is not None and result.code != "disk-full":
            yield finding("directory-not-writable", Severity.FAIL, host, **values, why=result.error)
        elif result.wall_s is not None and result.wall_s > SLOW_WRITE_S:
            yield finding("directory-slow", Severity.WARN, host, **values, seconds=round(result.wall_s, 1))


@check(
    "paths",
    "model, data and script exist, with the same size on all nodes",
    "path-not-found path-unreadable path-differs",
)
def check_paths(context: CheckContext) -> Iterator[Finding]:
    """Check that model, data and the script of the command exist and are equal on all nodes."""
    asked = dict.fromkeys(path for facts in context.facts.values() for path in facts.paths or {})
    for path in asked:
        found = {host: (facts.paths or {}).get(path) for host, facts in context.facts.items()}
        for host, size in found.items():
            if size is not None and size.missing:
                yield finding("path-not-found", Severity.FAIL, host, path=path)
            elif size is not None and size.error is not None:
                yield finding("path-unreadable", Severity.FAIL, host, path=path, why=size.error)
        contents = {host: _contents(size) for host, size in found.items()}
        yield from outliers("path-differs", Severity.WARN, contents, path=path)


def _contents(size: PathSize | None) -> Text | None:
    if size is None or size.size_bytes is None or size.truncated:
        return None
    if size.kind == "folder":
        return Text(
            "doctor.directory-contents", "{files:plural file files}, {bytes} B", files=size.files, bytes=size.size_bytes
        )
    return Text("doctor.file-contents", "a file of {bytes} B", bytes=size.size_bytes)
