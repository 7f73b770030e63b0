"""The catalogue of known errors in logs (signatures.toml), and the search for them.

for hit in scan(enumerate(lines, 1)): print(hit.line, hit.signature.code, hit.words("en").message)

A pattern is the text that a program writes, with names in place of values:

    "device {device:int} is not available, return[{code:507899|507033}]"

{name} matches a word, {name:KIND} for one of KINDS, {name:one|other} for one of these texts, {name:=one} for this
text, {*} for anything up to 200 characters; without a name the value is not kept. Two spaces match any number of
blanks. A pattern does not match inside a word or number of the line. Gaps are bounded, so matching is always fast.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from importlib import resources
from re import Pattern
from typing import Any

from ascendrun.ascend.line_shapes import SHAPES_KEPT, shape_of
from ascendrun.ascend.vocabularies import alike, following, usual, value_of_row
from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.text import template_of

ROLES = ("cause", "symptom", "consequence", "teardown")
RETRIES = ("same", "exclude", "never", "unknown")
LINE_LIMIT = 16 * 1024
"""Number of characters of a line that are searched."""
CHUNK_CHARACTERS = 256 * 1024
_NAME = re.compile(r"\{([a-z_]+)\}")
_CLAUSE = re.compile(r" ?[(（][^()（）]*[)）]|(?<=.)(?:: |：)[^:：]*$")
"""What may be omitted of a sentence: brackets, and what follows a colon."""
_ERROR_CODE = re.compile(r"E(?:RR)?[0-9A-Z][0-9]{4}")
_STEMS = (
    "rror", "fail", "Fail", "nvalid", "not ", "n't ", "Signal", "denied", "imed out", "support", "nable",
    "unavailable", "oom", "(pid: ", "onnect", "ersion", "emory",
)  # fmt: skip
"""Parts of many needles, the most common first: if a part is not in a chunk, its needles are not searched."""

# Forms in which the layers write an error code of CANN, and a return code of ACL.
_CODE_FORMS = ("{code:=%s}:", "({code:=%s})")
_RETURN_FORMS = (
    "error code is {code:%s}", "error code={code:%s}", "Error code={code:%s}", "error code:{code:%s}",
    "error code: {code:%s}", "errCode={code:%s}", "ErrCode={code:%s}", "errorCode={code:%s}", "retCode={code:%s}",
    "rtCode={code:%s}", "return[{code:%s}]", "runtime result = {code:%s}",
)  # fmt: skip

# Forms in which the runtime writes the return code of a driver call; codes may be synonyms.
_DRIVER_FORMS = ("drvRetCode={code:%s}", "drvRet={code:%s}", "drv_ret_code={code:%s}")


@dataclass(frozen=True)
class Description:
    """Meaning of a signature in one language. `cause`: its usual cause."""

    message: str
    cause: str
    hint: str


@dataclass(frozen=True)
class Signature:
    """One known error.

    `strength` 0-100: certainty that such a line is the reason why a job ended; the strongest counts first.
    `retry`: whether another attempt helps: on the same nodes, without this node, never, or not known.
    `also`: codes of weaker signatures that correctly match the examples of this one too.
    `is_general`: reported only for a line that no other signature matches.
    `is_verified`: False if the text is in no real log, vendor document or source code.
    """

    code: str
    family: str
    domain: str
    role: str
    strength: int
    retry: str
    english: Description
    patterns: tuple[str, ...]
    examples: tuple[str, ...]
    counters: tuple[str, ...]
    source: str
    is_general: bool
    is_verified: bool
    unless: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def is_of_others(self) -> bool:
        """Return whether the reason is outside of the rank that wrote it: at another rank, or between hosts."""
        return (self.code if self.role == "cause" else f"{self.role} {self.family}") in alike("of-others")

    @property
    def is_of_node(self) -> bool:
        """Return whether the reason is a fault of the rank's own node."""
        return self.role == "cause" and not self.is_of_others and bool(following(self.domain).get("of_nodes"))

    def words(self, lang: str = "en", values: Mapping[str, str] | None = None) -> Description:
        """Return the texts in `lang`, with each {name} replaced by its value: a clause without one is omitted, a whole
        sentence has "…". `values` None: of any line, so with all clauses."""
        known = values or {}

        def text(part: str, english: str) -> str:
            template = template_of(f"signature.{self.code}.{part}", english, lang)
            if values is not None:
                template = _CLAUSE.sub(lambda one: one[0] if {*_NAME.findall(one[0])} <= {*known} else "", template)
            return _NAME.sub(lambda place: known.get(place[1], "…"), template)

        english = self.english
        return Description(text("message", english.message), text("cause", english.cause), text("hint", english.hint))


@dataclass(frozen=True)
class Hit:
    """A known line. `text`: as searched, at most LINE_LIMIT characters. `values`: of the pattern's gaps."""

    signature: Signature
    line: int
    text: str
    values: Mapping[str, str] = field(default_factory=dict)

    def words(self, lang: str = "en") -> Description:
        return self.signature.words(lang, self.values)


def signatures() -> tuple[Signature, ...]:
    """Return all rows, in the order of the file."""
    return tuple(_catalogue().rows)


def signature_of(code: str) -> Signature | None:
    """Return the row of a code, in any letter case; None if unknown."""
    return _catalogue().by_code.get(code.strip().lower())


def scan(lines: Iterable[tuple[int, str]]) -> Iterator[Hit]:
    """Yield the known lines among numbered lines, in order; per line the strongest first, each signature once.

    Reads ahead up to CHUNK_CHARACTERS.
    """
    catalogue = _catalogue()
    numbers: list[int] = []
    texts: list[str] = []
    size = 0
    for number, text in lines:
        if len(text) > LINE_LIMIT:
            text = text[:LINE_LIMIT]
        numbers.append(number)
        texts.append(text)
        size += len(text)
        if size >= CHUNK_CHARACTERS:
            yield from catalogue.search(numbers, texts)
            numbers, texts, size = [], [], 0
    yield from catalogue.search(numbers, texts)


def strongest(hits: Iterable[Hit]) -> Hit | None:
    """Return the hit that is most certainly the reason, the earliest of equals; None without hits."""
    return max(hits, key=lambda hit: (hit.signature.strength, -hit.line), default=None)


# ---------------------------------------------------------------- the catalogue


class _Matcher:
    """One pattern of one row; its regular expression is compiled at its first use. `place`: in the order of search."""

    __slots__ = ("row", "pattern", "place", "_shapes", "_regex")

    def __init__(self, row: Signature, pattern: LinePattern) -> None:
        self.row = row
        self.pattern = pattern
        self.place = 0
        self._shapes = tuple(map(shape_of, pattern.literals))
        self._regex: Pattern[str] | None = None

    def fits(self, shape: str) -> bool:
        """Return whether lines of this shape may match."""
        return all(part in shape for part in self._shapes)

    def values(self, text: str) -> Mapping[str, str] | None:
        """Return the values of the gaps; None if the line does not match."""
        for literal in self.pattern.literals:  # cheaper than the expression if many patterns share a needle
            if literal not in text:
                return None
        if self._regex is None:
            self._regex = self.pattern.compiled()
        found = self._regex.search(text)
        if found is None or any(word in text for word in self.row.unless):
            return None
        return {name: value for name, value in found.groupdict().items() if value}


class _Catalogue:
    """The rows, and their patterns in search order: texts that most lines lack come first.

    `_codes`: by error code. `_stems`: by a text that several needles share, then by the needle's shape. `_known`: by
    the shape of a line, whether it has an error code, and the patterns to try.
    """

    def __init__(self, rows: Sequence[Signature]) -> None:
        self.rows = rows
        self.by_code = {row.code.lower(): row for row in rows}
        self._codes: dict[str, list[_Matcher]] = {}
        self._stems: dict[str, dict[str, list[_Matcher]]] = {}
        self._known: dict[str, tuple[bool, tuple[_Matcher, ...]]] = {}
        matchers = [_Matcher(row, parse_pattern(text)) for row in rows for text in row.patterns]
        by_needle = [one for one in matchers if not _ERROR_CODE.fullmatch(one.pattern.needle)]
        for matcher in matchers:
            if _ERROR_CODE.fullmatch(matcher.pattern.needle):
                self._codes.setdefault(matcher.pattern.needle, []).append(matcher)
        stems: dict[str, list[tuple[str, list[_Matcher]]]] = {}
        for needle, group in _group_by_needle(by_needle).items():
            stem = next((one for one in _STEMS if one in needle), needle)
            stems.setdefault(stem, []).append((needle, group))
        ordered = (matcher for groups in stems.values() for _, group in groups for matcher in group)
        for place, matcher in enumerate(ordered):
            matcher.place = place
        for stem, groups in stems.items():
            of_stem = self._stems.setdefault(shape_of(stem), {})
            for needle, group in groups:
                of_stem.setdefault(shape_of(needle), []).extend(group)

    def search(self, numbers: Sequence[int], texts: Sequence[str]) -> Iterator[Hit]:
        for number, text, (has_code, matchers) in zip(numbers, texts, self._by_shape(texts)):
            if has_code:
                codes = (self._codes.get(place[0], ()) for place in _ERROR_CODE.finditer(text))
                matchers = (*itertools.chain.from_iterable(codes), *matchers)
            best: dict[str, Hit] = {}
            for matcher in matchers:
                values = matcher.values(text)
                known = best.get(matcher.row.code)
                if values is not None and (known is None or len(values) > len(known.values)):
                    best[matcher.row.code] = Hit(matcher.row, number, text, values)
            exact = [hit for hit in best.values() if not hit.signature.is_general]
            yield from sorted(exact or best.values(), key=lambda hit: -hit.signature.strength)

    def _by_shape(self, texts: Sequence[str]) -> Iterator[tuple[bool, tuple[_Matcher, ...]]]:
        """Return for every line what `_known` has of its shape."""
        if len(self._known) > SHAPES_KEPT:
            self._known = {}
        known = self._known  # another thread may replace it
        shapes = list(map(shape_of, texts))
        unknown = [shape for shape in dict.fromkeys(shapes) if shape not in known]
        found = self._candidates(unknown)
        for index, shape in enumerate(unknown):
            fitting = [one for one in found.get(index, ()) if one.fits(shape)]
            ordered = tuple(sorted(fitting, key=lambda one: one.place))
            known[shape] = (_ERROR_CODE.search(shape) is not None, ordered)
        return map(known.__getitem__, shapes)

    def _candidates(self, shapes: Sequence[str]) -> dict[int, list[_Matcher]]:
        """Return the shapes with a needle, by index, with the patterns to try; one search per needle, not per line."""
        joined = "\n".join(shapes)
        starts = _starts(shapes)
        found: dict[int, list[_Matcher]] = {}
        for stem, needles in self._stems.items():
            if stem not in joined:
                continue
            for needle, matchers in needles.items():
                at = joined.find(needle)
                while at >= 0:
                    index = bisect_right(starts, at) - 1
                    found.setdefault(index, []).extend(matchers)
                    at = joined.find(needle, starts[index] + len(shapes[index]))
        return found


def _starts(texts: Sequence[str]) -> list[int]:
    starts, at = [], 0
    for text in texts:
        starts.append(at)
        at += len(text) + 1
    return starts


def _group_by_needle(matchers: Sequence[_Matcher]) -> dict[str, list[_Matcher]]:
    """Group patterns by required text: of all patterns' longest texts, the shortest that the pattern contains."""
    grouped: dict[str, list[_Matcher]] = {}
    for matcher in sorted(matchers, key=lambda one: len(one.pattern.needle)):
        shared = (needle for needle in grouped if any(needle in part for part in matcher.pattern.literals))
        grouped.setdefault(next(shared, matcher.pattern.needle), []).append(matcher)
    return grouped


@lru_cache(maxsize=1)
def _catalogue() -> _Catalogue:
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    text = resources.files(__package__ or "").joinpath("signatures.toml").read_text(encoding="utf-8")
    return _Catalogue([_read_row(row) for row in toml.loads(text)["signature"]])


def _read_row(row: Mapping[str, Any]) -> Signature:
    patterns = list(row.get("patterns", ()))
    patterns += [form % code for code in row.get("error_codes", ()) for form in _CODE_FORMS]
    patterns += _any_of(row.get("return_codes", ()), _RETURN_FORMS)
    patterns += _any_of(row.get("driver_codes", ()), _DRIVER_FORMS)
    family, value = row["family"], value_of_row(row["code"], row["family"])
    domain = "program" if value is None else value.domain
    role = row.get("role") or usual("role", family, domain)
    kind = "general" if row.get("general") and role == "cause" else role
    stated = {"strength": usual(f"strength.{kind}", family, domain), "retry": usual(f"retry.{role}", family, domain)}
    renamed = {"is_general": row.get("general", False), "is_verified": row.get("verified", True)}
    return load_dataclass(
        Signature, {"role": role, "domain": domain, **stated, **row, **renamed, "english": row, "patterns": patterns}
    )


def _any_of(codes: Sequence[Any], forms: Sequence[str]) -> list[str]:
    """Return the forms; the gap of each matches any of the codes."""
    kind = "|".join(map(str, codes)) if len(codes) > 1 else f"={''.join(map(str, codes))}"
    return [form % kind for form in forms] if codes else []


# ---------------------------------------------------------------- patterns of lines

GAP_LIMIT = 200
KINDS: Mapping[str, str] = {
    "": r"[^\s\[\](){}<>,;'\"|]{0,199}[^\s\[\](){}<>,;'\"|.]",
    "int": r"-?[0-9]{1,20}",
    "number": r"-?[0-9][0-9.eE+-]{0,20}",
    "hex": r"(?:0[xX])?[0-9A-Fa-f]{1,32}",
    "size": r"[0-9][0-9.]{0,20} ?(?:bytes|[KMGT]?i?B)",
    "list": r"[0-9][0-9, -]{0,200}",
    "path": r"[^\s'\",;:\[\]]{0,199}[^\s'\",;:\[\].]",
    "name": r"[A-Za-z_][A-Za-z0-9_.]{0,120}",
    "hccl": r"HCCL_[A-Z_]{2,60}",
    "acl": r"[1-5][0-9]{5}",
    "bracketed": r"\[[0-9\[\], ;]{1,4000}",
    "rest": r"\S[^\n]{0,199}",
    "inside": r"[^\]\)'\"]{1,200}?",
}
"""Regular expressions by kind. A word or path does not end in a full stop; `inside` is whatever is between brackets
or quotes, `rest` the line's end, `bracketed` a list like [1],[2];"""

_PLACE = re.compile(r"\{(?:(\*)|([a-z_]*)(?::([^{}]+))?)\}")
_BLANKS = re.compile(r" {2,}")


@dataclass(frozen=True)
class LinePattern:
    """One pattern. `literals`: texts that a matching line must contain, in this order."""

    text: str
    regex: str
    literals: tuple[str, ...]
    names: tuple[str, ...]

    def compiled(self) -> Pattern[str]:
        return re.compile(self.regex)

    @property
    def needle(self) -> str:
        """Return the longest text that every matching line contains."""
        return max(self.literals, key=len)


def parse_pattern(text: str) -> LinePattern:
    """Parse a pattern. Raises ValueError if the text has no fixed part or names an unknown kind."""
    pieces: list[str] = []
    literals: list[str] = []
    names: list[str] = []
    at = 0
    for place in _PLACE.finditer(text):
        literals += _BLANKS.split(text[at : place.start()])
        pieces.append(_fixed(text[at : place.start()]))
        star, name, kind = place[1], place[2] or "", place[3] or ""
        pieces.append(f".{{0,{GAP_LIMIT}}}?" if star else _gap(name, kind))
        if kind.startswith("="):
            literals.append(kind[1:])
        if name:
            names.append(name)
        at = place.end()
    pieces.append(_fixed(text[at:]))
    literals = [one for one in [*literals, *_BLANKS.split(text[at:])] if one]
    if max(map(len, literals), default=0) < 3:
        raise ValueError(f"{text!r} has no fixed text of three characters or more")
    regex = _edge(text, r"^(?:\{[a-z_]*:=)?[0-9A-Za-z]", r"(?<![0-9A-Za-z])") + "".join(pieces)
    regex += _edge(text, r"(?:[0-9A-Za-z]|:(?:=|[^{}]*\|)[^{}]*[0-9A-Za-z]\})$", r"(?![0-9A-Za-z])")
    return LinePattern(text, regex, tuple(literals), tuple(names))


def _fixed(text: str) -> str:
    return r"\s{0,40}".join(map(re.escape, _BLANKS.split(text)))


def _gap(name: str, kind: str) -> str:
    if kind in KINDS:
        inner = KINDS[kind]
    elif kind.startswith("=") or "|" in kind:
        inner = "|".join(map(re.escape, kind.lstrip("=").split("|")))
    else:
        raise ValueError(f"{kind!r} unknown kind of value; expected one of {', '.join(sorted(filter(None, KINDS)))}")
    return f"(?P<{name}>{inner})" if name else f"(?:{inner})"


def _edge(text: str, where: str, assertion: str) -> str:
    return assertion if re.search(where, text) else ""
