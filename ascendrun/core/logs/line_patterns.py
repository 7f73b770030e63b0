"""Parts of a line that may differ between ranks: measured numbers, not counters.

A line's template is its text without its variable parts. Lines with the same template are folded:

    measured    decimals (2.31, 1e-05, nan), integers with a unit or after the name of a measure (35 ms, mem 30211)
    clock       times of day and dates: ranks write the same line at almost the same time
    address     0x7f3a10: never the same
    own rank    "rank 3" in a line of rank 3

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

MEASURED, CLOCK, ADDRESS, OWN_RANK = "measured", "clock", "address", "own rank"
GAPS = {MEASURED: "\ud800", CLOCK: "\ud801", ADDRESS: "\ud802", OWN_RANK: "\ud803"}
"""The character of a variable part in a template: a high surrogate, which no decoded text contains."""

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
    r"|(?P<decimal>(?<![\w.])(?<!\w-)[-+]?(?:0+\.0+(?:[eE][-+]?0+)?|0+[eE][-+]?0+)(?![.]?0)(?!\w*\.0)"
    r"(?!\w{9})|(?<![\w.])[-+]?(?i:nan|inf(?:inity)?)(?!\w))"
    r"|(?P<whole>(?<![\w.:/-])[-+]?0+(?![\w.:/-]|\.0)|(?<![\w.:/-])[-+]?0+(?=" + _UNIT + r"))"
)
_UNIT_AHEAD = re.compile(_UNIT)
_MEASURE_BEFORE = re.compile(_MEASURE + "$", re.IGNORECASE)
_EPOCH_BEFORE = re.compile(r"(?:epoch|version|ver)[\"'\])]*\s{0,2}[:=]?\s{0,2}$", re.IGNORECASE)
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
    has_rank: bool


PLAIN = Shape((), "", (), False)
Template = Hashable


class Templates:
    """Templates of texts, with a cache of shapes."""

    def __init__(self) -> None:
        self._shapes: dict[bytes, Shape] = {}

    def find_all(self, texts: Sequence[str], ranks: Sequence[int]) -> list[tuple[Template, Shape]]:
        """Return each line without its variable parts (equal for lines that may be folded), and their positions."""
        found: list[tuple[Template, Shape]] = []
        has_rank = False
        known = self._shapes.get
        for text, zeros in zip(texts, _with_zeros(texts)):
            _fields, literal, counted, names_rank = shape = known(zeros) or self._learn(zeros)
            if not literal:
                found.append((text, shape))
            elif len(counted) == 1:
                found.append(((literal, text[counted[0]]), shape))
            else:
                found.append(((literal, *[text[piece] for piece in counted]), shape))
            if names_rank:
                has_rank = True
        if has_rank:  # depends on the rank of the line
            return list(map(_own, texts, found, ranks))
        return found

    def _learn(self, zeros: bytes) -> Shape:
        shape = find_shape(zeros.decode("utf-8", "surrogatepass"))
        if len(self._shapes) >= CACHED:
            self._shapes.clear()
        self._shapes[zeros] = shape
        return shape


def _with_zeros(texts: Sequence[str]) -> list[bytes]:
    """Return each text with every digit as 0; empty for a text longer than LONGEST."""
    short = texts
    if max(map(len, texts), default=0) > LONGEST:
        short = [text if len(text) <= LONGEST else "" for text in texts]
    zeros = "\n".join(short).encode("utf-8", "surrogatepass").translate(_ZEROS).split(b"\n")
    if len(zeros) == len(texts):
        return zeros
    return [text.encode("utf-8", "surrogatepass").translate(_ZEROS) for text in short]


def _own(text: str, found: tuple[Template, Shape], rank: int) -> tuple[Template, Shape]:
    """Return the template and shape in which only the line's own rank is variable."""
    shape = found[1]
    if not shape.has_rank:
        return found
    fields = tuple(
        field for field in shape.fields if field.kind != OWN_RANK or int(text[field.start : field.end]) == rank
    )
    zeros = _with_zeros([text])[0]
    shape = _make_shape(zeros.decode("utf-8", "surrogatepass"), fields)._replace(has_rank=False)
    return (shape.literal, *[text[piece] for piece in shape.counted]) if shape.fields else text, shape


def _make_shape(zeros: str, fields: tuple[Field, ...]) -> Shape:
    if not fields:
        return PLAIN
    literal, counted, at = "", [], 0
    for start, end, kind in [*fields, (len(zeros), len(zeros), None)]:
        literal += zeros[at:start] + (GAPS[kind] if kind else "")
        counted += [slice(*match.span()) for match in _DIGITS.finditer(zeros, at, start)]
        at = end
    return Shape(fields, literal, tuple(counted), any(field.kind == OWN_RANK for field in fields))


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
        elif kind == "decimal" and not _EPOCH_BEFORE.search(zeros, max(0, start - 20), start):
            fields.append(Field(start, end, MEASURED))
        elif kind == "whole" and _is_measured(zeros, start, end):
            fields.append(Field(start, end, MEASURED))
    return _make_shape(zeros, tuple(fields))


def _is_measured(zeros: str, start: int, end: int) -> bool:
    """Return whether an integer is a measurement, by the text after or before it."""
    return bool(_UNIT_AHEAD.match(zeros, end) or _MEASURE_BEFORE.search(zeros, max(0, start - 30), start))
