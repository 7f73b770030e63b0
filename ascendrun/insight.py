"""The Python API for looking: what was measured, what happened and why. Beside cluster.py, for the same faces."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Collection, Optional

from ascendrun.core.samples import Newest

FRESH_S = 60.0
"""A sample that is older says nothing of now."""


def samples(state_dir: Path, *, hosts: Optional[Collection[str]] = None, since_s: Optional[float] = None) -> Newest:
    """The newest sample of every device, host and rank; an empty one when nothing was measured.

    `since_s`: not older than that, None: than a minute. Raises StoreUnusable.
    """
    from ascendrun.head.samplestore import SampleStore
    store = SampleStore.open_for_reading(state_dir)
    if store is None:
        return Newest()
    try:
        return store.newest(since_s=time.time() - FRESH_S if since_s is None else since_s, hosts=hosts)
    finally:
        store.close()
