"""What the hosts had left of memory and disk around a failure, from the samples."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

AROUND_END_S = 120.0


@dataclass(frozen=True)
class Left:
    """The least of `free_bytes` of memory and of `disk_free_bytes` that was measured; None: was not."""

    free_bytes: int
    total_bytes: int
    disk_free_bytes: int | None


def read_left(state_dir: Path, hosts: Collection[str], *, end_s: float) -> dict[str, Left]:
    """By host; {} when nothing was measured."""
    from ascendrun.head.state.sample_store import SampleStore

    store = SampleStore.open_for_reading(state_dir)
    if store is None:
        return {}
    try:
        found: dict[str, Left] = {}
        for one in store.host_series(since_s=end_s - AROUND_END_S, until_s=end_s + AROUND_END_S):
            if one.host in hosts and one.memory_used_bytes is not None and one.memory_total_bytes is not None:
                new = Left(one.memory_total_bytes - one.memory_used_bytes, one.memory_total_bytes, one.disk_free_bytes)
                found[one.host] = _least(found.get(one.host), new)
        return found
    finally:
        store.close()


def _least(known: Left | None, new: Left) -> Left:
    if known is None:
        return new
    disks = [disk for disk in (known.disk_free_bytes, new.disk_free_bytes) if disk is not None]
    return Left(min(known.free_bytes, new.free_bytes), new.total_bytes, min(disks, default=None))
