"""Several samples in one row without cross-sample attention: the loss equals that of separate samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

import numpy as np
import torch

from ascendrun.programs.trainer.data import Unit

IGNORED = -100
ByNumber = Union[Sequence[Sequence[int]], Mapping[int, Sequence[int]]]


def pack_rows(
    units: Sequence[Unit], ids: ByNumber, labels: ByNumber, *, pad_id: int, multiple: int = 1
) -> dict[str, torch.Tensor]:
    """Return {ids, labels, positions, segments}: rows x length, padded to the longest row rounded up to `multiple`.

    `ids`, `labels`: of every sample by number, of equal length. `positions` restart with every sample. `segments`:
    1, 2, … by sample, 0 for padding. The first label of each sample becomes IGNORED: the last token of the
    previous sample must not predict it.
    """
    widest = max(sum(len(ids[number]) for number in unit) for unit in units)
    shape = len(units), -(-widest // multiple) * multiple
    found = {
        "ids": np.full(shape, pad_id, dtype=np.int64),
        "labels": np.full(shape, IGNORED, dtype=np.int64),
        "positions": np.zeros(shape, dtype=np.int64),
        "segments": np.zeros(shape, dtype=np.int64),
    }
    for row, unit in enumerate(units):
        start = 0
        for segment, number in enumerate(unit, start=1):
            end = start + len(ids[number])
            found["ids"][row, start:end] = ids[number]
            found["labels"][row, start:end] = labels[number]
            found["labels"][row, start] = IGNORED
            found["positions"][row, start:end] = np.arange(end - start)
            found["segments"][row, start:end] = segment
            start = end
    return {name: torch.from_numpy(array) for name, array in found.items()}


def attention_mask(segments: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows x 1 x length x length, added to the scores: 0 where a token may attend, the lowest number elsewhere.

    A token attends to its own sample up to itself. Padding attends to itself, so that no row has only lowest scores.
    Computed on the device from the small `segments`. transformers uses a mask of four dimensions unchanged.
    """
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=segments.device)
    sees = (same & causal & (segments > 0)[:, :, None]) | itself
    mask = torch.zeros(sees.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~sees, torch.finfo(dtype).min)[:, None]
