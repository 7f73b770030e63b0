"""All-reduces over some of the ranks: bandwidth by size, and latency."""

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
    """{latency_s, bandwidth_bytes_per_s: {"<bytes>": …}} over `ranks`, which include this one; all ranks call it.

    Bandwidth is what the slowest link of a ring carries: 2 (n - 1) / n of the message, over the median time of the
    slowest rank. A size that would take much longer than the budget is left out, the smallest never.
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
    """The group of this rank. Each rank makes the groups of all: torch requires every rank to make every group."""
    if len(ranks) == runtime.world_size:
        return dist.group.WORLD
    mine = None
    for wanted in sorted(set(runtime.gather(tuple(ranks)))):
        group = dist.new_group(list(wanted))
        if wanted == tuple(ranks):
            mine = group
    return mine


def timed(runtime: Runtime, group: Any, size: int, *, repeats: int, budget_s: float) -> float:
    """Median seconds of one all-reduce. The first one, which opens connections, does not count; the second shows how
    many fit into the budget, the same number on every rank."""
    tensor = torch.ones(max(1, size // 4), dtype=torch.float32, device=runtime.device)
    once(runtime, group, tensor)
    trial_s = max(runtime.gather(once(runtime, group, tensor)))
    count = max(1, min(repeats, math.floor(budget_s / max(trial_s, 1e-9))))
    times: list[float] = [once(runtime, group, tensor) for _ in range(count)]
    return statistics.median(times)


def once(runtime: Runtime, group: Any, tensor: torch.Tensor) -> float:
    """Seconds from here until the sum is in the device's memory."""
    tensor.fill_(1.0)  # sums of sums would overflow
    runtime.accelerator.synchronize()
    started_s = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    runtime.accelerator.synchronize()
    return time.perf_counter() - started_s
