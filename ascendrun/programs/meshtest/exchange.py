"""All-reduces over a subset of the ranks: bandwidth by size, and latency."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ascendrun.programs.trainer.runtime import Runtime

LATENCY_BYTES = 8


def measure_all_reduce(
    runtime: Runtime, ranks: Sequence[int], *, sizes: Sequence[int], repeats: int, budget_s: float
) -> dict[str, Any]:
    """Return {latency_s, bandwidth_bytes_per_s: {"<bytes>": …}} over `ranks`, which include this rank.

    All ranks call it. Bandwidth is that of the slowest link of a ring: 2 (n - 1) / n of the message, divided by the
    median time of the slowest rank. Sizes expected to exceed twice the budget are skipped, except the smallest.
    """
    group = open_group(runtime, ranks)
    latency_s = runtime.gather(timed(runtime, group, LATENCY_BYTES, repeats=repeats, budget_s=budget_s))
    share = 2 * (len(ranks) - 1) / len(ranks)
    bandwidth: dict[str, float] = {}
    expected_s_per_byte = 0.0
    for size in sizes:
        if expected_s_per_byte * size > 2 * budget_s:
            break
        took_s = runtime.gather(timed(runtime, group, size, repeats=repeats, budget_s=budget_s))
        bandwidth[str(size)] = share * size / max(took_s[rank] for rank in ranks)
        expected_s_per_byte = max(took_s) / size
    return {"latency_s": max(latency_s[rank] for rank in ranks), "bandwidth_bytes_per_s": bandwidth}


def open_group(runtime: Runtime, ranks: Sequence[int]) -> Any:
    """Return the group of this rank. torch requires every rank to create every group."""
    if len(ranks) == runtime.world_size:
        return dist.group.WORLD
    mine = None
    for wanted in sorted(set(runtime.gather(tuple(ranks)))):
        group = dist.new_group(list(wanted))
        if wanted == tuple(ranks):
            mine = group
    return mine


def timed(runtime: Runtime, group: Any, size: int, *, repeats: int, budget_s: float) -> float:
    """Return the median seconds of one all-reduce. The first, which opens connections, does not count; the second
    determines how many fit into the budget: the same number on every rank."""
    tensor = torch.ones(max(1, size // 4), dtype=torch.float32, device=runtime.device)
    once(runtime, group, tensor)
    trial_s = max(runtime.gather(once(runtime, group, tensor)))
    count = max(1, min(repeats, math.floor(budget_s / max(trial_s, 1e-9))))
    times: list[float] = [once(runtime, group, tensor) for _ in range(count)]
    return statistics.median(times)


def once(runtime: Runtime, group: Any, tensor: torch.Tensor) -> float:
    """Return the seconds until the sum is in the device's memory."""
    tensor.fill_(1.0)  # repeated sums would overflow
    runtime.accelerator.synchronize()
    started_s = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    runtime.accelerator.synchronize()
    return time.perf_counter() - started_s
