"""Files and checkpoints that are complete or absent: parts are written, synced, listed in a manifest, renamed."""

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
from pathlib import Path
from typing import Any

import torch

from ascendrun.text import Text

MANIFEST = "manifest.json"
COMMON = "common.pt"
NAME = re.compile(r"^(?P<kind>step|best)-(?P<step>\d{8})$")
CHUNK_BYTES = 1 << 20

Fingerprint = dict[str, Any]
"""{bytes, sha256} of one part."""


def folder_name(kind: str, step: int) -> str:
    return f"{kind}-{step:08d}"


def own_part(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


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


def save(
    parent: Path, kind: str, step: int, state: Mapping[str, Any], *, facts: Mapping[str, Any] | None = None
) -> Path:
    """Write `state` as a checkpoint of one part and return its directory. On return it survives a power failure.

    A complete checkpoint of that name is replaced. Raises OSError (disk full, read-only) and leaves the
    older checkpoints as they were. `facts`: small JSON values kept readable in the manifest.
    """
    fresh = open_fresh(parent, kind, step, str(os.getpid()))
    try:
        return commit(fresh, kind, step, {COMMON: write_part(fresh, COMMON, state)}, facts=facts or {})
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def open_fresh(parent: Path, kind: str, step: int, token: str) -> Path:
    """Create the hidden directory of an unfinished checkpoint. Every rank that writes to it passes the same token."""
    fresh = parent / f".{folder_name(kind, step)}.{token}.tmp"
    fresh.mkdir(parents=True, exist_ok=True)
    return fresh


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
) -> Path:
    """Turn the hidden directory into a checkpoint. `parts`: all of them; `here`: those in this directory, None: all."""
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
    sync_folder(fresh)
    final = fresh.parent / folder_name(kind, step)
    old = fresh.with_name(fresh.name.replace(".tmp", ".old.tmp"))
    if final.exists():
        os.rename(final, old)
    os.rename(fresh, final)
    shutil.rmtree(old, ignore_errors=True)
    sync_folder(fresh.parent)
    return final


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(path: Path) -> Fingerprint:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while True:
            chunk = file.read(CHUNK_BYTES)
            if not chunk:
                return {"bytes": size, "sha256": digest.hexdigest()}
            digest.update(chunk)
            size += len(chunk)


def hash_of(manifest: Mapping[str, Any]) -> str:
    """Hash the manifest: a bad disk may change it too, and parts and the best model are checked against it."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest. Raises OSError and ValueError."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or not {"step", "facts", "parts", "here"} <= set(manifest):
        raise ValueError(Text("program.manifest-keys", "required keys are missing"))
    if manifest.pop("sha256", None) != hash_of(manifest):
        raise ValueError(Text("program.manifest-hash", "its hash does not match"))
    return manifest


def fault(folder: Path, *, hashed: Collection[str] | None = None) -> Text | None:
    """Return why this checkpoint is unusable; None: it is complete. `hashed`: the parts whose content is read;
    None: all. The size of every part is checked."""
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return Text("program.file-missing", "{name} is missing", name=MANIFEST)
    except (OSError, ValueError) as error:
        return Text("program.file-unreadable", "{name} cannot be read ({error})", name=MANIFEST, error=error)
    for name in manifest["here"]:
        problem = part_fault(folder / name, manifest["parts"].get(name), is_read=hashed is None or name in hashed)
        if problem is not None:
            return problem
    return None


def part_fault(path: Path, wanted: Any, *, is_read: bool) -> Text | None:
    try:
        found = fingerprint(path) if is_read else {"bytes": path.stat().st_size}
    except OSError as error:
        return Text("program.part-unreadable", "{name} cannot be read ({error})", name=path.name, error=error.strerror)
    if not isinstance(wanted, dict) or "bytes" not in wanted or "sha256" not in wanted:
        return Text(
            "program.no-fingerprint", "{name} has no fingerprint in {manifest}", name=path.name, manifest=MANIFEST
        )
    if found["bytes"] != wanted["bytes"]:
        return Text(
            "program.part-size",
            "{name} has {found} bytes, expected {expected}",
            name=path.name,
            found=found["bytes"],
            expected=wanted["bytes"],
        )
    if is_read and found["sha256"] != wanted["sha256"]:
        return Text("program.part-hash", "{name} does not match its hash", name=path.name)
    return None


def listed(parent: Path, kind: str) -> list[tuple[int, Path]]:
    """Return (step, directory) of this kind, newest first, complete or not."""
    if not parent.is_dir():
        return []
    matches = [(NAME.match(path.name), path) for path in parent.iterdir()]
    ours = [(int(match["step"]), path) for match, path in matches if match and match["kind"] == kind]
    return sorted(ours, reverse=True)


def log_skipped(folder: Path, problem: Text) -> None:
    print(
        Text(
            "program.checkpoint-skipped",
            "checkpoint {directory} is skipped: {problem}",
            directory=folder,
            problem=problem,
        ),
        file=sys.stderr,
        flush=True,
    )


def facts_of(folder: Path) -> dict[str, Any]:
    return dict(read_manifest(folder)["facts"])


def load(folder: Path, name: str = COMMON) -> dict[str, Any]:
    """Return the state of one part, on the CPU. Only tensors and plain values are read, never code."""
    return dict(torch.load(folder / name, map_location="cpu", weights_only=True))


def prune(parent: Path, *, newest: int, keep: int, best_steps: Collection[int]) -> None:
    """Keep the last `keep` checkpoints up to step `newest`, which was just saved, and the best models that `best_steps`
    or a kept checkpoint names. Later steps belong to an abandoned run: incomplete, or not on every node."""
    steps = listed(parent, "step")
    kept = [folder for step, folder in steps if step <= newest][:keep]
    for _, folder in steps:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)
    wanted = set(best_steps)
    for folder in kept:
        if fault_free_facts(folder).get("best_step") is not None:
            wanted.add(int(fault_free_facts(folder)["best_step"]))
    for step, folder in listed(parent, "best"):
        if step not in wanted:
            shutil.rmtree(folder, ignore_errors=True)


def fault_free_facts(folder: Path) -> dict[str, Any]:
    try:
        return facts_of(folder)
    except (OSError, ValueError, TypeError):
        return {}  # an incomplete checkpoint has no best step; a resume reports the reason


def clear_leftovers(parent: Path) -> None:
    """Remove the incomplete files of a killed writer. Call it only from the one process that writes here."""
    for path in parent.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):  # its owner was faster
                path.unlink()
