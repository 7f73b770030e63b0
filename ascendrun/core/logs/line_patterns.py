"""Parts of a line that may differ between ranks: measured numbers, not counters.

A line's template is its text without its variable parts. Lines with the same template are folded:

    measured    decimals (2.31, 1e-05, nan), integers with a unit or after the name of a measure (35 ms, mem 30211)
    clock       times of day and dates: ranks write the same line at almost the same time
    address     0x7f3a10: never the same
    own rank    "rank 3" in a line of rank 3
    process     "pid 4711"
    temporary   names that `mktemp` and Python's `tempfile` make, in a path
    place       the directory of a file in a traceback, up to `site-packages`; in later lines of that rank the directory
                of its own code, as in the message of the exception

Any other difference (step, epoch, index, version, port) gives another template, so a rank that is one
step behind is never shown at the step of the others.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

LONGEST = 2000
"""Characters; a longer line is compared unchanged."""
CACHED = 4096

KINDS = ("measured", "clock", "address", "own rank", "process", "temporary", "place")
MEASURED, CLOCK, ADDRESS, OWN_RANK, PROCESS, TEMPORARY, PLACE = KINDS
GAPS = {kind: chr(0xD800 + at) for at, kind in enumerate(KINDS)}
"""The character of a variable part in a template: a high surrogate, which no decoded text contains."""

SHOWN = {OWN_RANK: "*", ADDRESS: "0x…", PROCESS: "*", TEMPORARY: "…", PLACE: "…/"}
"""What stands for different texts of a kind."""

_UNIT = (
    r"[ ]?(?:%|(?:[mun\u00b5]?s|sec|secs|seconds|min|[KMGT]i?B|[kmg]b|[KMGT]i?B/s|it/s|s/it|tok(?:en)?s?/s(?:ec)?"
    r"|samples?/s(?:ec)?|W|MHz|GHz|T?FLOPS|TFLOP/s|\u00b0C)(?![\w/]))"
)
_MEASURE = (
    r"(?:(?:tok(?:en)?|sample)s?[/_](?:per_)?s(?:ec(?:ond)?)?|throughput|tps|speed|mem|memory|allocated|reserved|power|temp"
    r"|temperature|util|utili[sz]ation|elapsed|took|latency|duration|\(ms\)|_ms|_us|_mb|_gb|_bytes)"
    r"[\"'\])]*\s{0,2}[:=]?\s{0,2}"
)
_TOKEN = re.compile(
    r"(?P<clock>(?<![\w.])(?:0000[-/]00[-/]00[T ]+)?00:00:00(?:[.,]0{1,9})?(?:Z|[+-]00:?00)?(?![\w:])"
    r"|(?<![\w.-])0000[-/]00[-/]00(?![-\w]))"
    r"|(?P<address>\b0x[0-9a-fA-F]{4,16}\b)"
    r"|(?<![\w])(?i:(?:global[ _]?)?rank)[ :=#\[]{0,3}(?P<rank>0{1,6})(?![\w.])"
    r"|(?P<place>(?<=File \")/(?:[^\"/]+/)*?)(?=(?:lib/python0|site-packages/|dist-packages/)|[^\"/]+\", line 0)"
    r"|\b(?i:pid)[ :=#]{0,3}(?P<process>0{1,8})(?![\w.])"
    r"|(?P<temporary>(?<=/)tmp(?:[a-z0_]{8}|\.[A-Za-z0]{10})(?!\w)"
    r"|(?<=/tmp/)[\w.-]{1,40}?_(?![a-z]+0+\b)[a-z0_]{8}(?!\w))"
    r"|(?P<decimal>(?<![\w.])(?<!\w-)[-+]?(?:0+\.0+(?:[eE][-+]?0+)?|0+[eE][-+]?0+)(?![.]?0)(?!\w*\.0)"
    r"(?!\w{9})|(?<![\w.])[-+]?(?i:nan|inf(?:inity)?)(?!\w))"
    r"|(?P<whole>(?<![\w.:/-])[-+]?0+(?![\w.:/-]|\.0)|(?<![\w.:/-])[-+]?0+(?=" + _UNIT + r"))"
)
_UNIT_AHEAD = re.compile(_UNIT)
_MEASURE_BEFORE = re.compile(_MEASURE + "$", re.IGNORECASE)
_EPOCH_BEFORE = re.compile(r"(?:epoch|version|ver)[\"'\])]*\s{0,2}[:=]?\s{0,2}$", re.IGNORECASE)
_LIBRARY = re.compile("lib/python|site-packages/|dist-packages/")
_DIGITS = re.compile("0+")
_ZEROS = bytes.maketrans(b"123456789", b"000000000")


class Field(NamedTuple):
    """A variable part: text[start:end] of every line with the same shape."""

    start: int
    end: int
    kind: str


class Shape(NamedTuple):
    """The positions of the variable parts of a text. Texts that differ only in digits share it.

    `literal`: the text with every digit as 0 and a gap for each variable part; `counted`: the other digits,
    which must be equal.
    """

    fields: tuple[Field, ...]
    literal: str
    counted: tuple[slice, ...]
    is_own: bool


PLAIN = Shape((), "", (), False)
Template = Hashable


class Templates:
    """Templates of texts, with a cache of shapes."""

    def __init__(self) -> None:
        self._shapes: dict[bytes, Shape] = {}
        self._places: dict[int, str] = {}
        """The directory of the code of each rank that had a traceback."""

    def find_all(self, texts: Sequence[str], ranks: Sequence[int]) -> list[tuple[Template, Shape]]:
        """Return each line without its variable parts (equal for lines that may be folded), and their positions."""
        found: list[tuple[Template, Shape]] = []
        has_own = bool(self._places)
        known = self._shapes.get
        for text, zeros in zip(texts, _with_zeros(texts)):
            _fields, literal, counted, is_own = shape = known(zeros) or self._learn(zeros)
            if not literal:
                found.append((text, shape))
            elif len(counted) == 1:
                found.append(((literal, text[counted[0]]), shape))
            else:
                found.append(((literal, *[text[piece] for piece in counted]), shape))
            if is_own:
                has_own = True
        if has_own:
            return list(map(self._own, texts, found, ranks))
        return found

    def _learn(self, zeros: bytes) -> Shape:
        shape = find_shape(zeros.decode("utf-8", "surrogatepass"))
        if len(self._shapes) >= CACHED:
            self._shapes.clear()
        self._shapes[zeros] = shape
        return shape

    def _own(self, text: str, found: tuple[Template, Shape], rank: int) -> tuple[Template, Shape]:
        """Return the template and shape of a rank's line: only its own rank and the place of its own code vary."""
        shape, place = found[1], self._places.get(rank)
        at = -1 if place is None else text.find(place)
        if not shape.is_own and at < 0:
            return found
        fields = [one for one in shape.fields if one.kind != OWN_RANK or int(text[one.start : one.end]) == rank]
        places = [one for one in fields if one.kind == PLACE]
        for one in places:
            is_below = place is not None and text.startswith(place, one.start)
            if not is_below and not _LIBRARY.match(text, one.end):
                self._places[rank] = text[one.start : one.end]
        if place is not None and at >= 0 and not places:
            end = at + len(place)
            fields = sorted([Field(at, end, PLACE), *(one for one in fields if one.end <= at or one.start >= end)])
        zeros = _with_zeros([text])[0].decode("utf-8", "surrogatepass")
        shape = _make_shape(zeros, tuple(fields))._replace(is_own=False)
        return (shape.literal, *[text[piece] for piece in shape.counted]) if shape.fields else text, shape


def _with_zeros(texts: Sequence[str]) -> list[bytes]:
    """Return each text with every digit as 0; empty for a text longer than LONGEST."""
    short = texts
    if max(map(len, texts), default=0) > LONGEST:
        short = [text if len(text) <= LONGEST else "" for text in texts]
    zeros = "\n".join(short).encode("utf-8", "surrogatepass").translate(_ZEROS).split(b"\n")
    if len(zeros) == len(texts):
        return zeros
    return [text.encode("utf-8", "surrogatepass").translate(_ZEROS) for text in short]


def _make_shape(zeros: str, fields: tuple[Field, ...]) -> Shape:
    if not fields:
        return PLAIN
    literal, counted, at = "", [], 0
    for start, end, kind in [*fields, (len(zeros), len(zeros), None)]:
        literal += zeros[at:start] + (GAPS[kind] if kind else "")
        counted += [slice(*match.span()) for match in _DIGITS.finditer(zeros, at, start)]
        at = end
    return Shape(fields, literal, tuple(counted), any(field.kind in (OWN_RANK, PLACE) for field in fields))


def find_shape(zeros: str) -> Shape:
    """Return the shape of a text in which every digit is 0."""
    fields = []
    for match in _TOKEN.finditer(zeros):
        kind = match.lastgroup
        start, end = match.span(kind or 0)
        if kind == "clock":
            fields.append(Field(start, end, CLOCK))
        elif kind == "address":
            fields.append(Field(start, end, ADDRESS))
        elif kind == "rank":
            fields.append(Field(start, end, OWN_RANK))
        elif kind in (PROCESS, TEMPORARY, PLACE):
            fields.append(Field(start, end, kind))
        elif kind == "decimal" and not _EPOCH_BEFORE.search(zeros, max(0, start - 20), start):
            fields.append(Field(start, end, MEASURED))
        elif kind == "whole" and _is_measured(zeros, start, end):
            fields.append(Field(start, end, MEASURED))
    return _make_shape(zeros, tuple(fields))


def _is_measured(zeros: str, start: int, end: int) -> bool:
    """Return whether an integer is a measurement, by the text after or before it."""
    return bool(_UNIT_AHEAD.match(zeros, end) or _MEASURE_BEFORE.search(zeros, max(0, start - 30), start))
