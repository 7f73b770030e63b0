"""Checkpoints that are whole or not there: written beside, synced, renamed, listed in a manifest with their hashes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Collection, Dict, List, Optional, Tuple

import torch

MANIFEST = "manifest.json"
STATE = "state.pt"
NAME = re.compile(r"^(?P<kind>step|best)-(?P<step>\d{8})$")
CHUNK_BYTES = 1 << 20


def folder_name(kind: str, step: int) -> str:
    return f"{kind}-{step:08d}"


def save(parent: Path, kind: str, step: int, state: Dict[str, Any], *, facts: Optional[Dict[str, Any]] = None) -> Path:
    """Writes `state` as one checkpoint and returns its folder. When this returns it survives a power cut.

    A complete checkpoint of that name is replaced. Raises OSError (disk full, read-only) and leaves the
    older checkpoints as they were. `facts`: small JSON values kept readable in the manifest.
    """
    parent.mkdir(parents=True, exist_ok=True)
    final = parent / folder_name(kind, step)
    fresh = parent / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        with open(fresh / STATE, "wb") as file:
            torch.save(state, file)
            sync(file.fileno())
        manifest = {"step": step, "kind": kind, "facts": facts or {}, "files": {STATE: fingerprint(fresh / STATE)}}
        with open(fresh / MANIFEST, "w", encoding="utf-8") as text:
            json.dump(manifest, text, indent=1)
            text.flush()
            sync(text.fileno())
        sync_folder(fresh)
        old = parent / f".{final.name}.{os.getpid()}.old.tmp"
        if final.exists():
            os.rename(final, old)
        os.rename(fresh, final)
        shutil.rmtree(old, ignore_errors=True)
        sync_folder(parent)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return final


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(path: Path) -> Dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while True:
            chunk = file.read(CHUNK_BYTES)
            if not chunk:
                return {"bytes": size, "sha256": digest.hexdigest()}
            digest.update(chunk)
            size += len(chunk)


def fault(folder: Path) -> Optional[str]:
    """Why this checkpoint cannot be trusted, or None when it is whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        expected = dict(manifest["files"])
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, wanted in expected.items():
        try:
            found = fingerprint(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found["bytes"] != wanted["bytes"]:
            return f"{name} has {found['bytes']} bytes instead of {wanted['bytes']}"
        if found["sha256"] != wanted["sha256"]:
            return f"{name} differs from its hash"
    return None


def listed(parent: Path, kind: str) -> List[Tuple[int, Path]]:
    """(step, folder) of this kind, newest first, whole or not."""
    if not parent.is_dir():
        return []
    matches = [(NAME.match(path.name), path) for path in parent.iterdir()]
    ours = [(int(match["step"]), path) for match, path in matches if match and match["kind"] == kind]
    return sorted(ours, reverse=True)


def newest_complete(parent: Path) -> Optional[Path]:
    """The newest whole checkpoint, None: there is none. Torn ones are skipped, and stderr says why."""
    for _, folder in listed(parent, "step"):
        problem = fault(folder)
        if problem is None:
            return folder
        print(f"checkpoint {folder} is skipped: {problem}", file=sys.stderr, flush=True)
    return None


def facts_of(folder: Path) -> Dict[str, Any]:
    return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["facts"])


def load(folder: Path) -> Dict[str, Any]:
    """The state of one checkpoint, on the CPU. Only tensors and plain values are read, never code."""
    return dict(torch.load(folder / STATE, map_location="cpu", weights_only=True))


def prune(parent: Path, *, keep: int, best_steps: Collection[int]) -> None:
    """Removes all but the `keep` newest checkpoints, and best ones that neither `best_steps` nor a kept one names."""
    steps = listed(parent, "step")
    for _, folder in steps[keep:]:
        shutil.rmtree(folder, ignore_errors=True)
    wanted = set(best_steps)
    for _, folder in steps[:keep]:
        if fault_free_facts(folder).get("best_step") is not None:
            wanted.add(int(fault_free_facts(folder)["best_step"]))
    for step, folder in listed(parent, "best"):
        if step not in wanted:
            shutil.rmtree(folder, ignore_errors=True)


def fault_free_facts(folder: Path) -> Dict[str, Any]:
    try:
        return facts_of(folder)
    except (OSError, ValueError, KeyError):
        return {}  # a torn checkpoint names nothing; newest_complete reports it when it matters


def clear_leftovers(parent: Path) -> None:
    """Removes what a killed writer left half done. Only for the one process that writes here."""
    for path in parent.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
