"""Rows of one length from documents of any: best fit, each row begins with a document; an index made once on disk."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.checkpoint import replacing
from ascendrun.programs.trainer.data import Unit
from ascendrun.programs.trainer.packing import IGNORED
from ascendrun.programs.trainer.shards import Array, Tokens, once

WAITING = 1000
"""Documents that are looked at for the one that fits best."""


class Rows:
    """Plan of rows of `seq_len` + 1 tokens: inputs are all but the last token, targets all but the first.

    The largest waiting document that fits into the rest of a row comes next. If none fits, `crop` fills the rest with
    the beginning of the shortest, whose end is not used; without it the rest is padding. The rows follow from the
    documents alone, their order from the seed and the epoch: `units(step)` needs no saved state.
    """

    def __init__(self, tokens: Tokens, *, seq_len: int, batch_size: int, seed: int, crop: bool = True) -> None:
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self.pieces = index_of(tokens, seq_len + 1, crop=crop)
        self.count = int(self.pieces[-1, 0]) + 1 if len(self.pieces) else 0
        if self.count < batch_size:
            raise InvalidDataError(
                "program.few-rows",
                "{rows} sequences of {length} tokens; expected at least {batch}, those of a step",
                rows=self.count,
                length=seq_len,
                batch=batch_size,
            )
        self.steps_per_epoch = self.count // batch_size
        self._order: tuple[int, Array] = (-1, None)

    def units(self, step: int) -> Sequence[Unit]:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._order[0]:
            order = np.random.default_rng([self.seed, 3, epoch]).permutation(self.count)
            self._order = epoch, order
        start = place * self.batch_size
        return [(int(row),) for row in self._order[1][start : start + self.batch_size]]

    def read(self, units: Sequence[Unit]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (ids, labels): int64, rows x (seq_len + 1). The label of padding, and of what is not trained on, is
        IGNORED."""
        numbers = [number for unit in units for number in unit]
        ids = np.zeros((len(numbers), self.seq_len + 1), dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        for row, number in enumerate(numbers):
            start = 0
            for document, take in self.documents(number):
                sample, part = self.tokens[document], slice(start, start + take)
                ids[row, part], labels[row, part] = sample.ids[:take], sample.labels[:take]
                start += take
        return torch.from_numpy(ids), torch.from_numpy(labels)

    def documents(self, row: int) -> list[tuple[int, int]]:
        """Return (document, tokens taken from its beginning) of a row, in order."""
        start, end = np.searchsorted(self.pieces[:, 0], [row, row + 1])
        return [(int(document), int(take)) for _, document, take in self.pieces[start:end]]


def index_of(tokens: Tokens, size: int, *, crop: bool) -> Array:
    """Return (row, document, tokens taken) of every piece, mapped from the file that the first process here made."""
    mark = hashlib.sha256(tokens.numbers.tobytes()).hexdigest()[:16]
    path = tokens.folder / f"rows-{size}-{'crop' if crop else 'pad'}-{mark}.npy"
    once(path, path.is_file, lambda: write_index(path, tokens.lengths, size, crop=crop))
    return np.load(path, mmap_mode="r")


def write_index(path: Path, lengths: Array, size: int, *, crop: bool) -> None:
    pieces = np.array(list(best_fit(lengths, size, crop=crop)), dtype=np.int32).reshape(-1, 3)
    with replacing(path) as fresh, open(fresh, "wb") as file:
        np.save(file, pieces)


def best_fit(lengths: Any, size: int, *, crop: bool) -> Iterator[tuple[int, int, int]]:
    """Yield the pieces of full rows, and of rows with padding if not `crop`; a longer document is cut to a row."""
    coming = iter([(min(int(length), size), number) for number, length in enumerate(lengths) if length])
    waiting = sorted(islice(coming, WAITING))
    row: list[tuple[int, int]] = []
    number, room = 0, size
    while waiting:
        at = bisect.bisect_right(waiting, (room, len(lengths))) - 1
        if at < 0 and not crop or room == 0:
            yield from ((number, document, take) for document, take in row)
            number, room, row = number + 1, size, []
            continue
        length, document = waiting.pop(max(0, at))
        take = min(length, room)
        row.append((document, take))
        room -= take
        following = next(coming, None)
        if following is not None:
            bisect.insort(waiting, following)
    if room == 0 or row and not crop:
        yield from ((number, document, take) for document, take in row)
