"""Inputs of the model: codons that it must predict are masked, the same for any number of ranks; padded batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.genes import MASKS, Array
from ascendrun.programs.devices.attention import Segments
from ascendrun.programs.trainer.data import Batch, pad

AS_MASK, AS_OTHER = 0.8, 0.1
"""Fractions of the selected codons that become their residue's mask token or any codon; the rest stay."""


def masked(
    ids: Array, *, rate: float, key: Sequence[int], as_mask: float = AS_MASK, as_other: float = AS_OTHER
) -> tuple[Array, Array]:
    """Return (inputs, targets) of a sequence: each codon is selected with probability `rate`, and is its target.

    The target of all other tokens is -1. `key` (seed, step, row) determines the result.
    """
    rng = np.random.default_rng([6, *key])
    draw = np.where(ids >= v.FIRST_CODON, rng.uniform(size=len(ids)) / rate, 1.0)
    inputs = np.where(draw < as_mask, MASKS[ids].astype(np.int64), ids)
    other = np.flatnonzero((draw >= as_mask) & (draw < as_mask + as_other))
    inputs[other] = rng.integers(v.FIRST_CODON, len(v.TOKENS), size=len(other))
    return inputs, np.where(draw < 1.0, ids, -1)


def hidden(ids: Array) -> tuple[Array, Array]:
    """Return (inputs, targets) with all codons masked: the protein alone."""
    return MASKS[ids].astype(np.int64), np.where(ids >= v.FIRST_CODON, ids, -1)


def batch_of(
    rows: Sequence[Array], made: Sequence[tuple[Array, Array]], organisms: Array, *, multiple: int = 1
) -> Batch:
    """Return the tensors of CodonModel.forward and the targets of its places, on the CPU."""
    ids = pad([inputs for inputs, _ in made], value=v.PAD, multiple=multiple)
    width = ids.shape[1]
    places = [row * width + np.flatnonzero(targets >= 0) for row, (_, targets) in enumerate(made)]
    targets = np.concatenate([targets[targets >= 0] for _, targets in made]).astype(np.int64)
    tensors = {
        "ids": ids,
        "organisms": torch.from_numpy(np.asarray(organisms, dtype=np.int64)),
        "places": torch.from_numpy(np.concatenate(places)),
        "targets": torch.from_numpy(targets),
    }
    lengths = [len(row) for row in rows]
    if min(lengths) < width:
        tensors["segments"] = Segments.of_rows([[length] for length in lengths], width)  # type: ignore[assignment]
    return Batch(tensors, weight=float(len(targets)), tokens=sum(lengths), samples=len(rows))
