"""Sets of node names: conversion of `npu[01-06,09]` to names and back."""

from __future__ import annotations

import re
from typing import Union

from ascendrun.text import Text, TextError

MAX_NAMES = 4096
"""Maximum number of hosts of a job; a longer range is a mistake."""

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?")
_RANGE_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_PIECES = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


_Ranges = list[tuple[int, int, int]]
_Piece = Union[str, _Ranges]


class InvalidNamesError(TextError):
    """The text is not a set of names; `message` is the reason."""


def is_name(text: str) -> bool:
    """Return whether `text` may be a host name: letters, digits, `.`, `_`, `-`, at most 253 characters."""
    return NAME.fullmatch(text) is not None


def expand_names(text: str) -> tuple[str, ...]:
    """Return `npu[01-03,07]` as names, in the order written; a text without brackets is one name.

    Raises InvalidNamesError, before expansion, when the range is malformed or has more than MAX_NAMES.
    """
    pieces = _split_pieces(text)
    total = 1
    for piece in pieces:
        if isinstance(piece, list):
            total *= sum(high - low + 1 for low, high, _ in piece)
        if total > MAX_NAMES:
            raise InvalidNamesError(Text("names.too-many", "more than {limit} names", limit=MAX_NAMES))
    names = [""]
    for piece in pieces:
        ends = [piece] if isinstance(piece, str) else _numbers(piece)
        names = [start + end for start in names for end in ends]
    for name in names:
        if not is_name(name):
            raise InvalidNamesError(
                Text("names.characters", "use letters, digits, '.', '_' and '-'; start with a letter or digit")
            )
    if len(set(names)) != len(names):
        raise InvalidNamesError(Text("names.duplicate", "duplicate name in the range"))
    return tuple(names)


def split_list(text: str) -> list[str]:
    """Split `a[1,3],b` at the commas outside brackets: ["a[1,3]", "b"]; empty items stay."""
    pieces = [""]
    depth = 0
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def _split_pieces(text: str) -> list[_Piece]:
    """Return literal texts and, for each bracket, a list of (low, high, width)."""
    if "[" not in text and "]" not in text:
        return [text]
    pieces: list[_Piece] = []
    end = 0
    for match in _PIECES.finditer(text):
        if match.start() != end:
            break
        end = match.end()
        pieces.append(match.group(2) if match.group(1) is None else _parse_ranges(match.group(1)))
    if end != len(text):
        raise InvalidNamesError(Text("names.bracket", "unmatched bracket"))
    return pieces


def _numbers(ranges: _Ranges) -> list[str]:
    return [f"{number:0{width}d}" for low, high, width in ranges for number in range(low, high + 1)]


def _parse_ranges(inside: str) -> _Ranges:
    ranges: _Ranges = []
    for part in inside.split(","):
        match = _RANGE_PART.fullmatch(part)
        if not match:
            raise InvalidNamesError(Text("names.range", "expected a range such as [01-16] or [1,3,7-9]"))
        low, high = match.group(1), match.group(2) or match.group(1)
        padded = low.startswith("0") and len(low) > 1
        if len(high) < len(low) or (padded and len(high) != len(low)):
            raise InvalidNamesError(
                Text("names.digits", "{range}: both ends must have the same number of digits", range=f"{low}-{high}")
            )
        if int(high) < int(low):
            raise InvalidNamesError(Text("names.descending", "{range}: must be ascending", range=f"{low}-{high}"))
        ranges.append((int(low), int(high), len(low) if padded else 1))
    return ranges
