"""What to ask of Ascend devices, their driver and CANN."""

from __future__ import annotations

from typing import Tuple

from ascendrun.health.wish import Probe

NPU_PROBES: Tuple[Probe, ...] = ()
