"""Checks of devices, driver, CANN, HCCL and the device network."""

from __future__ import annotations

from typing import Tuple

from ascendrun.health.world import Check

CHECKS: Tuple[Check, ...] = ()
