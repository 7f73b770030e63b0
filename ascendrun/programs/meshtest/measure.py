"""The measurements of one rank and their metrics lines: its device, its node, its rail to other nodes, the mesh."""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ascendrun.programs.devices.accelerator import Accelerator
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import listed

Options = Mapping[str, Any]


def measure(options: Options, runtime: Runtime) -> None:
    """Write one line per measurement to the metrics file; its key `measured` is one of:

    device   matrix products: tflops (median), tflops_slowest, digest (equal on all healthy devices), wrong (intervals
             whose last product differs from the first product)
    node     all-reduce over the ranks of one node      mesh   all-reduce over all ranks of several nodes
    rail     all-reduce between the devices of one local rank on all nodes, all rails in parallel
    """
    sizes = read_sizes(options["message_sizes"])
    label = f"{runtime.family}:{runtime.local_rank}"
    if options["matmul_s"] > 0:
        burnt = burn(
            runtime.accelerator, seconds=options["matmul_s"], size=options["matmul_size"], seed=options["seed"]
        )
        runtime.record(measured="device", device=label, rank=runtime.rank, **burnt)
        runtime.log(listed("program.device-speed", device=label, tflops=burnt["tflops"]))
    if runtime.world_size == 1:
        return
    for name, ranks in exchanges(runtime):
        found = measure_all_reduce(
            runtime, ranks, sizes=sizes, repeats=options["max_iterations"], budget_s=options["time_per_size_s"]
        )
        runtime.record(measured=name, device=label, rank=runtime.rank, ranks=list(ranks), **found)
        widest = max(found["bandwidth_bytes_per_s"].values())
        runtime.log(listed("program.exchange-speed", name=name, gb=widest / 1e9, micro=found["latency_s"] * 1e6))


def exchanges(runtime: Runtime) -> list[tuple[str, tuple[int, ...]]]:
    """Return (name, ranks) of each all-reduce of this rank. Every rank has the same names in the same order."""
    places = runtime.gather((int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))), runtime.local_rank))
    everyone = tuple(range(runtime.world_size))
    if len({node for node, _ in places}) == 1:
        return [("node", everyone)]
    rails: dict[int, list[int]] = {}
    for rank, (_, local) in enumerate(places):
        rails.setdefault(local, []).append(rank)
    has_rails = len(rails) > 1 and all(len(ranks) > 1 for ranks in rails.values())
    mine = tuple(rails[runtime.local_rank])
    return [*([("rail", mine)] if has_rails else []), ("mesh", everyone)]


def read_sizes(texts: Sequence[str]) -> tuple[int, ...]:
    """Parse message sizes in bytes. Raises InvalidDataError."""
    try:
        sizes = tuple(int(text) for text in texts)
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 8 or list(sizes) != sorted(set(sizes)):
        raise InvalidDataError(listed("program.sizes", sizes=",".join(texts)))
    return sizes


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
