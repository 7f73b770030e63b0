"""What is known of a node's NPUs; None: could not look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional, Tuple

from ascendrun.ascend.chips import Chip

if TYPE_CHECKING:
    from ascendrun.health.facts import NodeFacts


@dataclass(frozen=True)
class NpuFacts:
    """One node's devices, driver and CANN."""


def chip_of_node(facts: NpuFacts) -> Optional[Chip]:
    """The chip that the node's devices are; None: none, not known, or not all the same."""
    return None


def read_npu(said: Mapping[str, Any]) -> NpuFacts:
    """From the read answers by probe name (missing or None: could not look)."""
    return NpuFacts()


NPU_ROWS: Tuple[Tuple[str, Callable[["NodeFacts"], Optional[str]]], ...] = ()
"""Further lines of doctor's table of facts: name, and what a node says."""
