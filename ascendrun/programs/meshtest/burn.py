"""Repeated matrix products on one device: their speed, and whether their results are equal."""

from __future__ import annotations

import hashlib
import statistics
import time
from typing import Any

import torch

from ascendrun.programs.devices.accelerator import Accelerator

SLICES = 8
"""Number of intervals of the speed measurement: a device that throttles is fast only in the first intervals."""


def burn(accelerator: Accelerator, *, seconds: float, size: int, seed: int) -> dict[str, Any]:
    """Measure matrix products and return {tflops, tflops_slowest, digest, wrong, products}.

    The matrices hold only -1 and 1: every sum is exact in float16 with float32 accumulation, in any order. Healthy
    devices of every kind therefore agree to the bit, and a single difference is a fault.
    """
    device = accelerator.device
    size = size or (512 if device.type == "cpu" else 4096)
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    chance = torch.Generator().manual_seed(seed)
    left, right = (make_signs(size, chance).to(device=device, dtype=dtype) for _ in range(2))
    first = left @ right
    accelerator.synchronize()
    wrong = products = 0
    tflops: list[float] = []
    for _ in range(SLICES):
        started_s, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - started_s < seconds / SLICES:
            product = left @ right
            accelerator.synchronize()
            count += 1
        tflops.append(2.0 * size**3 * count / (time.perf_counter() - started_s) / 1e12)
        wrong += int(not torch.equal(product, first))
        products += count
    digest = hashlib.sha256(first.to("cpu").float().numpy().tobytes()).hexdigest()[:16]
    return {
        "tflops": statistics.median(tflops),
        "tflops_slowest": min(tflops),
        "digest": digest,
        "wrong": wrong,
        "products": products,
    }


def make_signs(size: int, chance: torch.Generator) -> torch.Tensor:
    """Make a matrix of -1 and 1 on the CPU, so that every device gets the same values."""
    return torch.randint(0, 2, (size, size), generator=chance, dtype=torch.int8) * 2 - 1
