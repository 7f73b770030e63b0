"""Damage of a head node's store, as a bad disk or a bad person does it."""

import os
import random
import shutil
from pathlib import Path


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def damage(state_dir: Path, rng: random.Random) -> str:
    """Damage the store in one of the ways of a bad disk or a bad person; return how. `backup`: an old copy of it."""
    files = [path for path in state_dir.glob("state.db*") if path.name in ("state.db", "state.db-wal")]
    path = rng.choice([path for path in files if path.stat().st_size])
    how = rng.choice(["flip", "flip", "flips", "zero", "cut", "delete", "rename", "restore"])
    size = path.stat().st_size
    at = rng.randrange(size)
    if how == "cut":
        os.truncate(path, at)
    elif how == "zero":
        overwrite(path, at, bytes(min(8192, size - at)))
    elif how == "delete":
        path.unlink()
    elif how == "rename":
        path.rename(state_dir / "renamed")
    elif how == "restore":
        shutil.copy(state_dir / "backup", state_dir / "copied")
        if rng.random() < 0.5:
            (state_dir / "copied").rename(state_dir / "state.db")
        else:  # into the old file
            shutil.copy(state_dir / "copied", state_dir / "state.db")
    else:
        for _ in range(1 if how == "flip" else 20):
            at = rng.randrange(size)
            overwrite(path, at, bytes([path.read_bytes()[at] ^ 1 << rng.randrange(8)]))
    return f"{how} {path.name}"
