"""Which samples make which step: shuffled, gathered by length, dealt to ranks; a function of seed and epoch only."""

from __future__ import annotations

from typing import List, Sequence, Tuple

import numpy as np

from ascendrun.programs.trajectory.tokens import Encoded, Ids


def epoch_batches(lengths: Sequence[int], *, batch_size: int, window: int, seed: int, epoch: int) -> List[List[int]]:
    """Global batches of sample numbers; each sample once.

    `window` batches at a time are sorted by length before they are cut: rows of like length need little padding
    (4.5 times the tokens a second of padding to the longest), and the order stays random enough.
    """
    rng = np.random.default_rng([seed, 1, epoch])
    order = rng.permutation(len(lengths))
    sizes = np.asarray(lengths)
    batches: List[List[int]] = []
    for start in range(0, len(order), batch_size * window):
        part = order[start:start + batch_size * window]
        part = part[np.argsort(sizes[part], kind="stable")]
        batches += [part[i:i + batch_size].tolist() for i in range(0, len(part), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def share_of(batch: Sequence[int], rank: int, world_size: int) -> List[int]:
    """This rank's samples of a global batch; empty when there are fewer samples than ranks."""
    return list(batch[rank::world_size])


def locate(step: int, batches_per_epoch: int) -> Tuple[int, int]:
    """(epoch, place in it) of the step with this number, both counted from 0."""
    return step // batches_per_epoch, step % batches_per_epoch


def augment(sample: Encoded, *, min_points: int, crop: float, hide: float, unknown: int,
            key: Sequence[int]) -> Ids:
    """The sample's ids as this epoch sees them: with chance `crop` a random stretch of it, each word hidden with
    chance `hide`. `key` (seed, epoch, sample) decides everything, so it does not matter which rank asks."""
    if crop == 0 and hide == 0:
        return sample.ids()
    rng = np.random.default_rng([2, *key])
    points = sample.points
    if rng.uniform() < crop and len(points) > min_points:
        size = int(rng.integers(min_points, len(points)))
        start = int(rng.integers(0, len(points) - size + 1))
        points = points[start:start + size]
    ids = np.concatenate([sample.head, points.ravel()])
    ids[rng.uniform(size=len(ids)) < hide] = unknown
    return ids
