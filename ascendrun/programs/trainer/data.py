"""Selection of the samples of a step and of a rank: functions of the step alone, so a checkpoint needs no sampler. Or
what the model itself makes (rollouts)."""

from __future__ import annotations

import contextlib
import ctypes
import math
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any, Callable, Protocol, Union

import numpy as np
import torch

from ascendrun.planner.models import RowsOfRanks
from ascendrun.programs.devices.attention import Segments
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime, stop_signals
from ascendrun.text import listed

IGNORED = -100
"""Label of a token that is not trained on."""
PR_SET_PDEATHSIG = 1
ODD, FACTOR = 0x9E3779B1, 0x45D9F3B
"""Multipliers of a hash: of Fibonacci hashing, and one whose rounds change half of the bits."""

Unit = tuple[int, ...]
"""The indices of the samples in one row: one sample, or several packed samples."""


@dataclass(frozen=True)
class Keys:
    """Random numbers (int32) of the places of a batch, rows x length, and of its samples, in the order of the rows."""

    places: torch.Tensor
    samples: torch.Tensor

    def to(self, device: torch.device) -> Keys:
        return Keys(self.places.to(device, non_blocking=True), self.samples.to(device, non_blocking=True))


@dataclass
class Batch:
    """The input of one forward pass, on the CPU: tensors and `attention.Segments`. `weight`: divisor of the summed
    loss, summed over all pieces of all ranks (labelled tokens, or samples by their class weight). `tokens`: without
    padding. `groups`: number of samples of each named group, for metrics. `keys`: for dropout, None: by rank."""

    tensors: dict[str, Any]
    weight: float
    tokens: int
    samples: int
    groups: dict[str, float] = field(default_factory=dict)
    keys: Keys | None = None


class Plan(Protocol):
    """The order of a training. `units(step)` is the same on every rank and for any number of ranks and workers."""

    @property
    def steps_per_epoch(self) -> int: ...

    def units(self, step: int) -> Sequence[Unit]: ...


class Buckets:
    """Batches of rows of similar length. Every epoch contains each sample once, in a new order.

    `window` batches at a time are sorted by length and then divided: rows of similar length need little padding
    (4.5 times the tokens per second of padding to the longest), and the order stays random enough.
    """

    def __init__(self, lengths: Sequence[int], *, batch_size: int, seed: int, window: int = 8) -> None:
        self.lengths = np.asarray(lengths)
        self.batch_size, self.seed, self.window = batch_size, seed, window
        self.steps_per_epoch = math.ceil(len(lengths) / batch_size)
        self._epoch = -1
        self._batches: list[list[Unit]] = []

    @classmethod
    def of(cls, options: Mapping[str, Any], lengths: Sequence[int]) -> Buckets:
        """Make the batches of a program with these options."""
        size, window = options["global_batch_size"], options["length_bucket_batches"]
        return cls(lengths, batch_size=size, seed=options["seed"], window=window)

    def rows_of(self, ranks: int, family: str, steps: int) -> RowsOfRanks:
        """Return the rows for the planner."""
        return RowsOfRanks(ranks, family, steps, float(self.lengths.mean()), int(self.lengths.max()))

    def units(self, step: int) -> Sequence[Unit]:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self.batches(epoch)
        return self._batches[place]

    def length_of(self, unit: Unit) -> int:
        return int(self.lengths[list(unit)].sum())

    def batches(self, epoch: int) -> list[list[Unit]]:
        rng = np.random.default_rng([self.seed, 1, epoch])
        order, size = rng.permutation(len(self.lengths)), self.batch_size
        batches: list[list[Unit]] = []
        for start in range(0, len(order), size * self.window):
            part = order[start : start + size * self.window]
            part = part[np.argsort(self.lengths[part], kind="stable")]
            batches += [[(int(number),) for number in part[i : i + size]] for i in range(0, len(part), size)]
        return [batches[i] for i in rng.permutation(len(batches))]


class Packed:
    """Rows of at most `row_tokens` tokens, each of several samples; about `batch_size` rows per step.

    In a shuffled window, samples are placed longest first into the first row with space. The number of rows differs
    slightly by epoch; the first epoch's sets the number of steps, among which each epoch's rows are divided.
    """

    def __init__(
        self, lengths: Sequence[int], *, row_tokens: int, batch_size: int, seed: int, window: int = 512
    ) -> None:
        longest = int(max(lengths, default=0))
        if longest > row_tokens:
            raise InvalidDataError(listed("program.sample-too-long", longest=longest, limit=row_tokens))
        self.lengths, self.row_tokens, self.batch_size = np.asarray(lengths), row_tokens, batch_size
        self.seed, self.window = seed, window
        self.steps_per_epoch = math.ceil(len(self.rows(0)) / batch_size)
        self._epoch = -1
        self._rows: list[Unit] = []

    def units(self, step: int) -> Sequence[Unit]:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self.rows(epoch)
        bounds = [len(self._rows) * i // self.steps_per_epoch for i in (place, place + 1)]
        return self._rows[bounds[0] : bounds[1]] or self._rows[-1:]

    def rows(self, epoch: int) -> list[Unit]:
        rng = np.random.default_rng([self.seed, 2, epoch])
        order, rows = rng.permutation(len(self.lengths)).tolist(), []
        for start in range(0, len(order), self.window):
            rows += pack(order[start : start + self.window], self.lengths, self.row_tokens)
        return [rows[i] for i in rng.permutation(len(rows))]


def pack(numbers: Sequence[int], lengths: Any, row_tokens: int) -> list[Unit]:
    """Pack samples first fit, longest first."""
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(numbers, key=lambda each: (-lengths[each], each)):
        at = next((i for i, left in enumerate(room) if left >= lengths[number]), None)
        if at is None:
            rows.append([])
            room.append(row_tokens)
            at = len(rows) - 1
        rows[at].append(number)
        room[at] -= lengths[number]
    return [tuple(row) for row in rows]


ByNumber = Union[Sequence[Sequence[int]], Mapping[int, Sequence[int]]]


def pack_rows(
    units: Sequence[Unit], ids: ByNumber, labels: ByNumber, *, pad_id: int, multiple: int = 1
) -> dict[str, Any]:
    """Return {ids, labels, positions, numbers}: rows x length, padded to the longest row rounded up to `multiple`; and
    {segments} for attention.

    `ids`, `labels`: of every sample by number, of equal length. `positions` restart with every sample. `numbers`:
    1, 2, … by sample, 0 for padding. The first label of each sample becomes IGNORED: the last token of the
    previous sample must not predict it.
    """
    widest = max(sum(len(ids[number]) for number in unit) for unit in units)
    shape = len(units), -(-widest // multiple) * multiple
    arrays = {
        "ids": np.full(shape, pad_id, dtype=np.int64),
        "labels": np.full(shape, IGNORED, dtype=np.int64),
        "positions": np.zeros(shape, dtype=np.int64),
        "numbers": np.zeros(shape, dtype=np.int64),
    }
    for row, unit in enumerate(units):
        start = 0
        for place, number in enumerate(unit, start=1):
            end = start + len(ids[number])
            arrays["ids"][row, start:end] = ids[number]
            arrays["labels"][row, start:end] = labels[number]
            arrays["labels"][row, start] = IGNORED
            arrays["positions"][row, start:end] = np.arange(end - start)
            arrays["numbers"][row, start:end] = place
            start = end
    segments = Segments.of_rows([[len(ids[number]) for number in unit] for unit in units], shape[1])
    return {**{name: torch.from_numpy(array) for name, array in arrays.items()}, "segments": segments}


def deal(
    units: Sequence[Unit],
    rank: int,
    world_size: int,
    *,
    micro_batch: int = 0,
    micro_tokens: int = 0,
    length_of: Callable[[Unit], int] | None = None,
) -> list[list[Unit]]:
    """Return this rank's pieces of a step, of at most `micro_batch` units each; 0: one piece.

    Every rank gets equally many pieces, the last of them possibly empty: sharded models communicate in every pass, so a
    rank with fewer passes would leave its peers waiting. With `micro_tokens` and `length_of` (the tokens of a row),
    a piece has rows of similar length: at most `micro_tokens` tokens, padding included, but at least one row. Longest
    first, so that a piece that does not fit in memory fails in the first pass.
    """
    if not micro_tokens or length_of is None:
        mine = list(units[rank::world_size])
        most = math.ceil(len(units) / world_size)
        size = micro_batch or max(1, most)
        return [mine[i : i + size] for i in range(0, max(1, most), size)]
    left, pieces = sorted(units, key=length_of, reverse=True), []
    while left:
        rows = max(1, micro_tokens // max(1, length_of(left[0])))
        rows = world_size * min(rows, micro_batch or rows)
        pieces.append(left[:rows][rank::world_size])
        left = left[rows:]
    return pieces


def seed_of(*key: int) -> int:
    """Return a seed for torch from a key such as (seed, step, rank): different keys give unrelated seeds."""
    return int(np.random.SeedSequence(list(key)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def keys_of(units: Sequence[Unit], tensors: Mapping[str, Any]) -> Keys | None:
    """Return the keys of a batch of these rows; None: it has no rows of tokens, or several samples in a row without
    `segments`."""
    rows = next((each for each in tensors.values() if isinstance(each, torch.Tensor) and each.ndim == 2), None)
    segments = tensors.get("segments")
    if rows is None or len(rows) != len(units) or (segments is None and any(len(unit) > 1 for unit in units)):
        return None
    length, sizes = rows.shape[1], iter(segments.lengths if segments is not None else ())
    places = np.zeros((len(units), length), dtype=np.uint64)
    for row, unit in enumerate(units):
        start = 0
        for number in unit:
            size = length if segments is None else next(sizes)
            places[row, start : start + size] = (number + 1) * ODD + np.arange(size, dtype=np.uint64) * FACTOR
            start += size
        if segments is not None and start < length:
            next(sizes)  # padding
    samples = np.array([(number + 1) * ODD for unit in units for number in unit], dtype=np.uint64)
    return Keys(*(torch.from_numpy(each.astype(np.uint32).view(np.int32)) for each in (places, samples)))


Collate = Callable[[Sequence[Unit], int], Batch]


@dataclass
class Share:
    """This rank's part of one step: its rows, batched in pieces, and their totals."""

    step: int
    units: list[Unit]
    pieces: list[Batch]
    weight: float
    tokens: int
    samples: int
    groups: dict[str, float]

    @classmethod
    def of(cls, step: int, units: list[Unit], batches: list[Batch]) -> Share:
        groups: dict[str, float] = {}
        for batch in batches:
            for name, count in batch.groups.items():
                groups[name] = groups.get(name, 0.0) + count
        return cls(
            step,
            units,
            batches,
            sum(batch.weight for batch in batches),
            sum(batch.tokens for batch in batches),
            sum(batch.samples for batch in batches),
            groups,
        )


def make_share(
    collate: Collate, pieces: Sequence[Sequence[Unit]], stand_in: Unit, step: int, has_keys: bool = True
) -> Share:
    """Make a batch of every piece, with keys if the model drops numbers. An empty piece becomes one row with weight 0:
    its rank must still take part."""
    batches = [collate(piece or [stand_in], step) for piece in pieces]
    for piece, batch in zip(pieces, batches):
        batch.keys = keys_of(piece or [stand_in], batch.tensors) if has_keys else None
        if not piece:
            batch.weight, batch.tokens, batch.samples, batch.groups = 0.0, 0, 0, {}
    return Share.of(step, [unit for piece in pieces for unit in piece], batches)


class Loader:
    """Source of the rows of a plan: it prepares the batches of the next steps while the device computes.

    `micro_tokens`: see `deal`, if the plan has `length_of`; 0: pieces of equally many rows.
    `workers`: number of processes; 0: one thread. `collate` must use its own random generator, seeded by the step and
    the samples, so that results do not depend on the order of work. Processes require it to be picklable.
    """

    on_policy, updates = False, 1

    def __init__(
        self,
        plan: Plan,
        collate: Collate,
        *,
        rank: int,
        world_size: int,
        micro_batch: int,
        steps: int,
        workers: int = 0,
        context: BaseContext | None = None,
        micro_tokens: int = 0,
        has_keys: bool = True,
    ) -> None:
        self.plan, self.collate, self.steps, self.steps_per_epoch = plan, collate, steps, plan.steps_per_epoch
        self.rank, self.world_size, self.micro_batch, self.micro_tokens = rank, world_size, micro_batch, micro_tokens
        self.length_of, self.has_keys = getattr(plan, "length_of", None), has_keys
        self.ahead = max(1, workers)
        self.pool: Executor = (
            ProcessPoolExecutor(workers, mp_context=context, initializer=become_worker)
            if workers
            else ThreadPoolExecutor(1, thread_name_prefix="loader")
        )
        self.coming: dict[int, Future[Share]] = {}

    def share(self, step: int) -> Share:
        """Wait for this rank's part of this step, after submitting the next steps."""
        for later in range(step, min(step + self.ahead + 1, self.steps)):
            if later not in self.coming:
                self.coming[later] = self._order(later)
        wanted = self.coming.pop(step) if step in self.coming else self._order(step)
        self.coming = {later: future for later, future in self.coming.items() if later > step}
        return wanted.result()

    def _order(self, step: int) -> Future[Share]:
        units, length_of = self.plan.units(step), self.length_of
        limits = {"micro_batch": self.micro_batch, "micro_tokens": self.micro_tokens}
        pieces = deal(units, self.rank, self.world_size, **limits, length_of=length_of)
        stand_in = units[0] if length_of is None else min(units, key=length_of)
        return self.pool.submit(make_share, self.collate, pieces, stand_in, step, self.has_keys)

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


def become_worker() -> None:
    """Set up a worker: it ignores the stop signal, because the last step needs it, but ends with its rank."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, AttributeError):  # Linux has it; elsewhere the end of the pipe ends the worker
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def pad(rows: Sequence[Sequence[int]], *, value: int, multiple: int = 1) -> torch.Tensor:
    """Return one int64 tensor, padded right to the longest row rounded up to `multiple`: NPUs need few shapes."""
    width = -(-max(len(row) for row in rows) // multiple) * multiple
    padded = np.full((len(rows), width), value, dtype=np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return torch.from_numpy(padded)


class Source(Protocol):
    """`share(step)`: this rank's part of a step, a function of the step (and, if `on_policy`, of the weights then).

    `updates`: steps for which it makes batches at once; checkpoints fall on multiples of it.
    """

    on_policy: bool
    updates: int
    steps_per_epoch: int

    def share(self, step: int) -> Share: ...
    def close(self) -> None: ...


Make = Callable[[int], Sequence[Sequence[Batch]]]
"""make(step): this rank's micro-batches of each of the next `updates` steps, from the present weights."""


class Rollouts:
    """Batches that the model makes, after the update of the step before; never in advance.

    `make` takes its random numbers from (seed, step, example, sample), so that neither the number of ranks nor a
    resume changes a sample: after a kill the same rollouts are made again.
    """

    on_policy = True

    def __init__(self, make: Make, here: Runtime, *, updates: int = 1, steps_per_epoch: int = 1) -> None:
        self.make, self.here, self.updates, self.steps_per_epoch = make, here, updates, steps_per_epoch
        self.made: Sequence[Sequence[Batch]] = ()

    def share(self, step: int) -> Share:
        if step % self.updates == 0:
            self.made = self.make(step)
        pieces = list(self.made[step % self.updates])
        passes = max(self.here.gather(len(pieces)))
        # Sharded models communicate in every pass, so every rank takes equally many.
        pieces += [Batch(pieces[0].tensors, 0.0, 0, 0)] * (passes - len(pieces))
        return Share.of(step, [], pieces)

    def close(self) -> None:
        pass
