"""The measurements of one rank and their metrics lines: its device, its node, its rail to other nodes, the mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.meshtest.burn import burn
from ascendrun.programs.meshtest.exchange import measure_all_reduce
from ascendrun.programs.trainer.runtime import Runtime

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
        runtime.log("program.device-speed", "{device}: {tflops:.3f} TFLOP/s", device=label, tflops=burnt["tflops"])
    if runtime.world_size == 1:
        return
    for name, ranks in exchanges(runtime):
        found = measure_all_reduce(
            runtime, ranks, sizes=sizes, repeats=options["max_iterations"], budget_s=options["time_per_size_s"]
        )
        runtime.record(measured=name, device=label, rank=runtime.rank, ranks=list(ranks), **found)
        widest = max(found["bandwidth_bytes_per_s"].values())
        runtime.log(
            "program.exchange-speed",
            "{name}: all-reduce bandwidth {gb:.3f} GB/s, latency {micro:.0f} µs",
            name=name,
            gb=widest / 1e9,
            micro=found["latency_s"] * 1e6,
        )


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
        raise InvalidDataError(
            "program.sizes",
            "--message_sizes={sizes}: expected ascending integers of at least 8 bytes",
            sizes=",".join(texts),
        )
    return sizes
