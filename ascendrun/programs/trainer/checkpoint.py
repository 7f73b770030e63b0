"""Files and checkpoints that are complete or absent: parts are written, synced, listed in a manifest, renamed.

Epochs of a checkpoint directory: a replaced attempt changes nothing that its successor saves (docs/epochs.md). Each
start of a training claims the next number in `.epochs/` of the directory; all names that it writes carry it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import torch

from ascendrun.programs.errors import ProgramError
from ascendrun.text import Text, listed

DIRECTORY = ".epochs"
FILE = re.compile(r"^(\d{6,})\.json$")

Starts = Mapping[int, "int | None"]
"""By epoch: the step that it resumed from, 0: from the beginning; None: it has saved nothing."""


class SupersededError(ProgramError):
    """A later attempt of this training writes to the checkpoint directory: this one must save and remove nothing."""

    exit_code = 75

    def __init__(self, parent: Path) -> None:
        super().__init__(listed("program.superseded", directory=parent))


@dataclass(frozen=True)
class Claim:
    """An epoch of one directory. `token`: drawn by this start; `tag`: of the attempt, NAME.NUMBER, "" without one."""

    parent: Path
    number: int
    token: str
    tag: str = ""

    def take(self) -> bool:
        """Claim the number; False: it is taken. Raises OSError."""
        directory = self.parent / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            with open(file_of(self.parent, self.number), "x", encoding="utf-8") as file:
                self._write(file, from_step=None, from_save="")
            sync(directory)
            return True
        return False

    def begin(self, from_step: int, from_save: str) -> None:
        """Declare what this epoch resumed from, before its first checkpoint gets its name. Raises OSError."""
        path = file_of(self.parent, self.number)
        with replacing(path) as fresh, open(fresh, "w", encoding="utf-8") as file:
            self._write(file, from_step=from_step, from_save=from_save)
        sync(path.parent)

    def check(self) -> None:
        """Raise SupersededError if another start claimed this number, or a higher one."""
        own = read_file(file_of(self.parent, self.number)).get("token", self.token)
        if max(starts(self.parent), default=0) > self.number or own != self.token:
            raise SupersededError(self.parent)

    def is_late(self) -> bool:
        """Return whether a later attempt of the same run claimed an epoch here."""
        run, _, attempt = self.tag.rpartition(".")
        for number in starts(self.parent) if run and attempt.isdigit() else ():
            theirs, _, later = str(read_file(file_of(self.parent, number)).get("tag", "")).rpartition(".")
            if theirs == run and later.isdigit() and int(later) > int(attempt):
                return True
        return False

    def _write(self, file: Any, **values: Any) -> None:
        json.dump({"tag": self.tag, "token": self.token, **values}, file)
        file.flush()
        os.fsync(file.fileno())


def file_of(parent: Path, number: int) -> Path:
    return parent / DIRECTORY / f"{number:06d}.json"


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of an epoch's file; {}: it cannot be read, or its writer was interrupted."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def starts(parent: Path) -> dict[int, int | None]:
    """Return all epochs of a directory, and where each started."""
    try:
        names = os.listdir(parent / DIRECTORY)
    except OSError:
        return {}
    numbers = [int(match[1]) for match in map(FILE.match, names) if match]
    found = {number: read_file(file_of(parent, number)).get("from_step") for number in numbers}
    return {number: step if isinstance(step, int) else None for number, step in found.items()}


def is_on_line(epoch: int, step: int, starts: Starts) -> bool:
    """Return whether what an epoch saved at a step led to what later epochs saved."""
    return all(start is None or step <= start for number, start in starts.items() if number > epoch)


def sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MANIFEST = "manifest.json"
COMMON = "common.pt"
NAME = re.compile(r"^(?P<kind>step|best)-(?P<step>\d{8})(?:-e(?P<epoch>\d{4,}))?$")
UNFINISHED = re.compile(r"^\.(?P<name>(?:step|best)-[0-9e-]+)\.")
CHUNK_BYTES = 1 << 20

Fingerprint = dict[str, Any]
"""{bytes, sha256} of one part."""


@dataclass(frozen=True)
class Piece:
    """Contiguous elements of a named tensor: `data` in one dimension, from element `offset` of all of `shape`."""

    data: torch.Tensor
    offset: int
    shape: tuple[int, ...]


Pieces = dict[str, Piece]
"""By key, which has the name of a weight and what it is of it: "model/…", "exp_avg/…", "momentum/…"."""
Read = Callable[[str, int, int], "torch.Tensor | None"]
"""read(key, offset, length): these elements of a saved tensor; None: the checkpoint does not have it."""


def folder_name(kind: str, step: int, epoch: int = 0) -> str:
    return f"{kind}-{step:08d}" + (f"-e{epoch:04d}" if epoch else "")


def epoch_of(name: str) -> int:
    """Return the epoch in the name of a checkpoint. Names of releases without epochs are those of epoch 0."""
    match = NAME.match(name)
    return int(match["epoch"] or 0) if match else 0


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to `path`; it replaces `path` at the end, and is removed if the write fails.
    All writers have different names, on one node or on several that share a disk. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield fresh
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def replace_text(path: Path, text: str) -> None:
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def replace_json(path: Path, value: Any) -> None:
    replace_text(path, json.dumps(value, indent=1) + "\n")


def replace_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write a file of safetensors as transformers and peft read it."""
    from safetensors.torch import save_file

    with replacing(path) as fresh:
        save_file(weights, str(fresh), metadata={"format": "pt"})


def save(
    parent: Path,
    kind: str,
    step: int,
    state: Mapping[str, Any],
    *,
    facts: Mapping[str, Any] | None = None,
    claim: Claim | None = None,
) -> Path:
    """Write `state` as a checkpoint of one part and return its directory. On return it survives a power failure.

    A complete checkpoint of that name is replaced. Raises OSError (disk full, read-only) and leaves the
    older checkpoints as they were. `facts`: small JSON values kept readable in the manifest. `claim`: of the
    writer, None: epoch 0, which is not checked; SupersededError: another one has the directory.
    """
    fresh = open_fresh(parent, kind, step, str(os.getpid()), claim=claim)
    try:
        return commit(fresh, kind, step, {COMMON: write_part(fresh, COMMON, state)}, facts=facts or {}, claim=claim)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def open_fresh(parent: Path, kind: str, step: int, token: str, *, claim: Claim | None = None) -> Path:
    """Create the hidden directory of an unfinished checkpoint. Every rank that writes to it passes the same token."""
    fresh = parent / f".{folder_name(kind, step, claim.number if claim else 0)}.{token}.tmp"
    fresh.mkdir(parents=True, exist_ok=True)
    return fresh


def as_plain(pieces: Mapping[str, Piece]) -> dict[str, dict[str, Any]]:
    """Return pieces of tensors in plain values, which torch.load reads without running code."""
    return {
        key: {"data": piece.data, "offset": piece.offset, "shape": list(piece.shape)} for key, piece in pieces.items()
    }


def reader(parts: Sequence[Mapping[str, Mapping[str, Any]]]) -> Read:
    """Return what reads elements of tensors, wherever in these parts they are."""
    places: dict[str, list[Mapping[str, Any]]] = {}
    for part in parts:
        for key, piece in part.items():
            places.setdefault(key, []).append(piece)

    def read(key: str, offset: int, length: int) -> torch.Tensor | None:
        if key not in places:
            return None
        found: list[torch.Tensor] = []
        at, end = offset, offset + length
        for piece in sorted(places[key], key=lambda each: int(each["offset"])):
            first = at - piece["offset"]
            if at < end and 0 <= first < len(piece["data"]):
                found.append(piece["data"][first : first + end - at])
                at += len(found[-1])
        assert at == end, f"{key}: elements {at} to {end} are in no part"
        return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0)

    return read


def write_part(fresh: Path, name: str, state: Mapping[str, Any]) -> Fingerprint:
    with open(fresh / name, "wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    return fingerprint(fresh / name)


def commit(
    fresh: Path,
    kind: str,
    step: int,
    parts: Mapping[str, Fingerprint],
    *,
    facts: Mapping[str, Any],
    here: Sequence[str] | None = None,
    claim: Claim | None = None,
) -> Path:
    """Turn the hidden directory into a checkpoint. `parts`: all of them; `here`: those in this directory, None: all.
    Raises SupersededError, without a new checkpoint, if another start has the directory."""
    manifest = {
        "step": step,
        "kind": kind,
        "facts": dict(facts),
        "parts": dict(parts),
        "here": sorted(parts if here is None else here),
    }
    with open(fresh / MANIFEST, "w", encoding="utf-8") as text:
        json.dump({**manifest, "sha256": hash_of(manifest)}, text, indent=1)
        text.flush()
        os.fsync(text.fileno())
    sync(fresh)
    final = fresh.parent / folder_name(kind, step, claim.number if claim else 0)
    if claim is not None:
        claim.check()
    old = fresh.with_name(fresh.name.replace(".tmp", ".old.tmp"))
    if final.exists():
        os.rename(final, old)
    os.rename(fresh, final)
    shutil.rmtree(old, ignore_errors=True)
    sync(fresh.parent)
    return final


def fingerprint(path: Path) -> Fingerprint:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def hash_of(manifest: Mapping[str, Any]) -> str:
    """Hash the manifest: a bad disk may change it too, and parts and the best model are checked against it."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest. Raises OSError and ValueError."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or not {"step", "facts", "parts", "here"} <= set(manifest):
        raise ValueError(listed("program.manifest-keys"))
    if manifest.pop("sha256", None) != hash_of(manifest):
        raise ValueError(listed("program.manifest-hash"))
    return manifest


def fault(folder: Path, *, hashed: Collection[str] | None = None) -> Text | None:
    """Return why this checkpoint is unusable; None: it is complete. `hashed`: the parts whose content is read;
    None: all. The size of every part is checked."""
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return listed("program.file-missing", name=MANIFEST)
    except (OSError, ValueError) as error:
        return listed("program.file-unreadable", name=MANIFEST, error=error)
    for name in manifest["here"]:
        problem = part_fault(folder / name, manifest["parts"].get(name), is_read=hashed is None or name in hashed)
        if problem is not None:
            return problem
    return None


def part_fault(path: Path, wanted: Any, *, is_read: bool) -> Text | None:
    try:
        found = fingerprint(path) if is_read else {"bytes": path.stat().st_size}
    except OSError as error:
        return listed("program.part-unreadable", name=path.name, error=error.strerror)
    if not isinstance(wanted, dict) or "bytes" not in wanted or "sha256" not in wanted:
        return listed("program.no-fingerprint", name=path.name, manifest=MANIFEST)
    if found["bytes"] != wanted["bytes"]:
        return listed("program.part-size", name=path.name, found=found["bytes"], expected=wanted["bytes"])
    if is_read and found["sha256"] != wanted["sha256"]:
        return listed("program.part-hash", name=path.name)
    return None


def directories(parent: Path, kind: str) -> list[tuple[int, Path]]:
    """Return (step, directory) of this kind, newest first, complete or not; of one step the latest epoch first."""
    if not parent.is_dir():
        return []
    matches = [(NAME.match(path.name), path) for path in parent.iterdir()]
    ours = [(int(match["step"]), path) for match, path in matches if match and match["kind"] == kind]
    return sorted(ours, key=lambda each: (each[0], epoch_of(each[1].name)), reverse=True)


def newest_epoch(parent: Path) -> int:
    """Return the highest epoch that is claimed here, or that a checkpoint carries; -1: there is neither."""
    named = [epoch_of(path.name) for kind in ("step", "best") for _, path in directories(parent, kind)]
    return max([*starts(parent), *named], default=-1)


def best_folder(parent: Path, step: int) -> Path:
    """Return the directory of the best model of a step: the one that led to later checkpoints, if there are several."""
    line = starts(parent)
    found = [(epoch_of(path.name), path) for number, path in directories(parent, "best") if number == step]
    found.sort(key=lambda each: (is_on_line(each[0], step, line), each[0]))
    return found[-1][1] if found else parent / folder_name("best", step)


def log_skipped(folder: Path, problem: Text) -> None:
    print(listed("program.checkpoint-skipped", directory=folder, problem=problem), file=sys.stderr, flush=True)


def facts_of(folder: Path) -> dict[str, Any]:
    return dict(read_manifest(folder)["facts"])


def load(folder: Path, name: str = COMMON, *, is_mapped: bool = False) -> dict[str, Any]:
    """Return the state of one part, on the CPU. Only tensors and plain values are read, never code. `is_mapped`:
    tensors are read from the file when they are used."""
    return dict(torch.load(folder / name, map_location="cpu", weights_only=True, mmap=is_mapped))


def prune(parent: Path, *, newest: int, keep: int, best_steps: Collection[int], epoch: int = 0) -> None:
    """Keep the last `keep` checkpoints up to step `newest`, which was just saved, and the best models that `best_steps`
    or a kept checkpoint names. Others belong to an abandoned run: incomplete, not on every node, or saved by an attempt
    that had been replaced. What epochs later than `epoch` saved is left alone."""
    line = starts(parent)

    def is_kept(step: int, folder: Path) -> bool:
        return step <= newest and is_on_line(epoch_of(folder.name), step, line)

    steps = [(step, folder) for step, folder in directories(parent, "step") if epoch_of(folder.name) <= epoch]
    kept = [folder for step, folder in steps if is_kept(step, folder)][:keep]
    for _, folder in steps:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)
    wanted = set(best_steps)
    for folder in kept:
        if fault_free_facts(folder).get("best_step") is not None:
            wanted.add(int(fault_free_facts(folder)["best_step"]))
    for step, folder in directories(parent, "best"):
        is_wanted = step in wanted and folder == best_folder(parent, step)
        if epoch_of(folder.name) <= epoch and not is_wanted:
            shutil.rmtree(folder, ignore_errors=True)


def fault_free_facts(folder: Path) -> dict[str, Any]:
    try:
        return facts_of(folder)
    except (OSError, ValueError, TypeError):
        return {}  # an incomplete checkpoint has no best step; a resume reports the reason


def clear_leftovers(parent: Path, *, epoch: int = 0) -> None:
    """Remove the incomplete files of a killed writer of this epoch or an earlier one. Call it only from the one process
    that writes here."""
    for path in parent.glob(".*.tmp"):
        match = UNFINISHED.match(path.name)
        if match and epoch_of(match["name"]) > epoch:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):  # its owner was faster
                path.unlink()
