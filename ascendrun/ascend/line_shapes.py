"""Shapes of log lines: a line with 0 for each digit. The lines of a thousand ranks have few.

What depends only on the shape is found once for each, and kept.
"""

from __future__ import annotations

from functools import lru_cache

from ascendrun.ascend.vocabularies import wording

SHAPES_KEPT = 1 << 13
_ZEROS = str.maketrans("123456789", "0" * 9)


def shape_of(text: str) -> str:
    """Return a text with 0 for each digit. A text that contains another has its shape, too."""
    return text.translate(_ZEROS)


def is_work(text: str) -> bool:
    """Return whether a line is ordinary output, not of those that are printed around an end."""
    return _is_work(text.translate(_ZEROS))


@lru_cache(SHAPES_KEPT)
def _is_work(shape: str) -> bool:
    return wording("quiet").search(shape) is None
