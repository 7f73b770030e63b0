"""What is known of a node's NPUs; None: could not look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping


@dataclass(frozen=True)
class NpuFacts:
    """One node's devices, driver and CANN."""


def read_npu(said: Mapping[str, Any]) -> NpuFacts:
    """From the read answers by probe name (missing or None: could not look)."""
    return NpuFacts()
