"""Patterns for log lines: the text that a program writes, with names in place of values.

    "device {device:int} is not available, return[{code:507899|507033}]"

{name} matches a word, {name:KIND} for one of KINDS, {name:one|other} for one of these texts, {name:=one} for this
text, {*} for anything up to 200 characters; without a name the value is not kept. Two spaces match any number of
blanks. A pattern does not match inside a word or number of the line. Gaps are bounded, so matching is always fast.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from re import Pattern

from ascendrun.core.dataclass import dataclass

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
