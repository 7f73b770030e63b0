"""One rank among its peers: how it joins them, and the small exchanges of plain values that training needs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from ascendrun.programs.errors import InvalidDataError
from ascendrun.text import Text, listed

T = TypeVar("T")

HCCL_CONNECT_RANGE_S = (120, 7200)
"""Range of HCCL_CONNECT_TIMEOUT in seconds; HCCL rejects another value (EI0001)."""
HCCL_EXEC_DEFAULT_S = 1836
HCCL_MARGIN_S = 60
"""HCCL waits 20 s beyond the limit to spread the reason of a failure, and 30 s more to find the failing rank."""


LATE_S = 10.0
"""Seconds in which the values of all ranks are there, unless one is slow or stuck."""


def has_ended(work: dist.Work, timeout_s: float) -> bool:
    """Wait for an operation; return whether it has ended, also by an error, which its own `wait` raises."""
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError:
        return bool(work.is_completed())
    return True


@dataclass
class Ranks:
    """This rank among its peers. `control`: a group for CPU tensors and Python objects, None: a single rank."""

    rank: int
    local_rank: int
    world_size: int
    control: dist.ProcessGroup | None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def log(self, message: Text | str) -> None:
        """Print from rank 0 only."""
        if self.is_first:
            print(message, flush=True)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum over ranks; the same to the last bit on every rank. The order of additions depends on a number's index
        among the others, so that a repeated sum must have the same length."""
        return self.start_sum(values)()

    def start_sum(
        self, values: Sequence[float], *, late: Callable[[], None] | None = None
    ) -> Callable[[], list[float]]:
        """Start a sum over ranks, and return the function that waits for it. `late` is called once if that takes
        LATE_S: a device that waits for the same rank has the better message."""
        if self.control is None:
            return lambda: list(values)
        total = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(total, group=self.control, async_op=True)

        def finish() -> list[float]:
            if late is not None and not has_ended(work, LATE_S):
                late()
            work.wait()
            return total.tolist()

        return finish

    def barrier(self) -> None:
        if self.control is not None:
            dist.barrier(group=self.control)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def outliers(self, value: Hashable) -> list[int]:
        """Return the ranks whose value is not that of most; empty: all are equal."""
        values = self.gather(value)
        most = Counter(values).most_common(1)[0][0]
        return [rank for rank, other in enumerate(values) if other != most]

    def check_same(self, digest: str) -> None:
        """Raise InvalidDataError when ranks read different data; training would not show it."""
        ranks = self.outliers(digest)
        if ranks:
            raise InvalidDataError(listed("program.data-differs", ranks=ranks))

    def share(self, value: T, *, source: int = 0) -> T:
        """Return the source rank's value on every rank; tensors in dicts and lists are sent as tensors, not pickled."""
        if self.control is None:
            return value
        tensors: list[torch.Tensor] = []

        def take(tensor: torch.Tensor) -> TensorPlace:
            tensors.append(tensor.detach().cpu().contiguous())
            return TensorPlace(len(tensors) - 1, tensor.shape, tensor.dtype)

        def put(like: TensorPlace) -> torch.Tensor:
            tensor = tensors[like.index] if tensors else torch.empty(like.shape, dtype=like.dtype)
            dist.broadcast(tensor, src=source, group=self.control)
            return tensor

        outline = [tree_map_only(torch.Tensor, take, value) if self.rank == source else None]
        dist.broadcast_object_list(outline, src=source, group=self.control)
        return tree_map_only(TensorPlace, put, outline[0])  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TensorPlace:
    """Placeholder for a tensor in a value that is sent."""

    index: int
    shape: torch.Size
    dtype: torch.dtype


def ranks_of_host(world_size: int) -> int:
    """Return the number of ranks on each host; all of them if the launcher does not tell."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def fit_hccl_timeouts(environ: MutableMapping[str, str], timeout_s: float) -> float:
    """Return a timeout in seconds above HCCL's own limits; set HCCL_CONNECT_TIMEOUT where unset.

    HCCL names the rank that did not connect; torch reports only the timeout. So HCCL must time out first.
    """
    low, high = HCCL_CONNECT_RANGE_S
    environ.setdefault("HCCL_CONNECT_TIMEOUT", str(int(min(max(timeout_s, low), high))))
    waits = [environ["HCCL_CONNECT_TIMEOUT"], environ.get("HCCL_EXEC_TIMEOUT", str(HCCL_EXEC_DEFAULT_S))]
    seconds = [float(text) for text in waits if text.replace(".", "", 1).isdigit()]
    return max([timeout_s, *(wait + HCCL_MARGIN_S for wait in seconds)])


def join(rank: int, world: int, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Initialise torch.distributed; return the group for CPU tensors.

    The keys carry the restart count: torchrun keeps one store over restarts, and new ranks would
    read the addresses of ended ranks.
    """
    environ = os.environ
    if backend == "hccl":
        timeout_s = fit_hccl_timeouts(environ, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    agent_has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), world, rank == 0 and not agent_has_store, timeout=timeout
    )
    prefix = f"ascendrun-{environ.get('ASCENDRUN_ATTEMPT', '')}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    own = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=timeout)
    group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    # Rank 0 owns the store: if it failed before all ranks joined, its peers would report only a lost store.
    dist.barrier(group=group)
    return group
