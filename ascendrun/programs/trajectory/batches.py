"""What training sees of a track: a random stretch of it, with some words hidden; decided by a key alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ascendrun.programs.trajectory.tokens import Encoded, Ids


def augment(sample: Encoded, *, min_points: int, crop: float, hide: float, unknown: int, key: Sequence[int]) -> Ids:
    """The sample's ids as this epoch sees them: with chance `crop` a random stretch of it, each word hidden with
    chance `hide`. `key` (seed, epoch, sample) decides everything, so it does not matter which rank asks."""
    if crop == 0 and hide == 0:
        return sample.ids()
    rng = np.random.default_rng([2, *key])
    points = sample.points
    if rng.uniform() < crop and len(points) > min_points:
        size = int(rng.integers(min_points, len(points)))
        start = int(rng.integers(0, len(points) - size + 1))
        points = points[start : start + size]
    ids = np.concatenate([sample.head, *points])
    ids[rng.uniform(size=len(ids)) < hide] = unknown
    return ids
