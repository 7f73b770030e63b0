"""Several samples in one row without cross-sample attention: the loss equals that of separate samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Union

import numpy as np
import torch

from ascendrun.programs.devices.attention import Segments
from ascendrun.programs.trainer.data import Unit

IGNORED = -100
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
