"""Which parts of a line may differ between ranks that mean the same: the measured numbers, not the counted ones.

A line's template is its text without its variable parts. Lines of one template are the same sentence:

    measured    decimals (2.31, 1e-05, nan), whole numbers with a unit or after a word for a measure (35 ms, mem 30211)
    clock       times of day and dates: ranks write the same line at almost the same time
    address     0x7f3a10: never the same
    own rank    "rank 3" said by rank 3

Everything else is kept: a step, an epoch, an index, a version or a port that differs makes another sentence, so a rank
that lags by a step is never shown as being at the step of the others.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

LONGEST = 2000
"""A longer line is compared as it is: what is that long was not written to be compared by eye."""
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
    """Where the variable parts of a text stand. Texts that differ only in digits share it.

    `literal`: the text with every digit as 0 and a gap for each variable part; `counted`: the digits that are left, for
    they must agree as well.
    """

    fields: tuple[Field, ...]
    literal: str
    counted: tuple[slice, ...]
    has_rank: bool


PLAIN = Shape((), "", (), False)
Template = Hashable


class Templates:
    """Which template a text has; remembers the shapes that it has seen."""

    def __init__(self) -> None:
        self._shapes: dict[bytes, Shape] = {}

    def find(self, text: str, rank: int) -> tuple[Template, Shape]:
        """What is left of the line without its variable parts (equal for all lines that may be shown as one), and where
        those parts stand in it."""
        return self.find_all([text], [rank])[0]

    def find_all(self, texts: Sequence[str], ranks: Sequence[int]) -> list[tuple[Template, Shape]]:
        """The same for many lines at once, at a fraction of the cost of each."""
        found: list[tuple[Template, Shape]] = []
        has_rank = False
        known = self._shapes.get
        for text, zeros in zip(texts, _with_zeros(texts)):
            _fields, literal, counted, speaks_of_rank = shape = known(zeros) or self._learn(zeros)
            if not literal:
                found.append((text, shape))
            elif len(counted) == 1:
                found.append(((literal, text[counted[0]]), shape))
            else:
                found.append(((literal, *[text[piece] for piece in counted]), shape))
            if speaks_of_rank:
                has_rank = True
        if has_rank:  # then it depends on who says it
            return [_own(*one) for one in zip(texts, found, ranks)]
        return found

    def _learn(self, zeros: bytes) -> Shape:
        shape = find_shape(zeros.decode("utf-8", "surrogatepass"))
        if len(self._shapes) >= CACHED:
            self._shapes.clear()
        self._shapes[zeros] = shape
        return shape


def _with_zeros(texts: Sequence[str]) -> list[bytes]:
    """Each text with every digit as 0; of one that is too long nothing."""
    short = texts
    if max(map(len, texts), default=0) > LONGEST:
        short = [text if len(text) <= LONGEST else "" for text in texts]
    zeros = "\n".join(short).encode("utf-8", "surrogatepass").translate(_ZEROS).split(b"\n")
    if len(zeros) == len(texts):
        return zeros
    return [text.encode("utf-8", "surrogatepass").translate(_ZEROS) for text in short]


def _own(text: str, found: tuple[Template, Shape], rank: int) -> tuple[Template, Shape]:
    """The template and shape without ranks that are not the speaker's own."""
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
    """Of a text in which every digit is a 0."""
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
    """Whether a whole number is an amount, by what stands behind or before it."""
    return bool(_UNIT_AHEAD.match(zeros, end) or _MEASURE_BEFORE.search(zeros, max(0, start - 30), start))
