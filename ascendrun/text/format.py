"""Formats of values in messages: hosts, ranks, sizes, durations, quotes, and the display width of texts."""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, Callable, TypeVar

K = TypeVar("K")
V = TypeVar("V")
UNKNOWN = {"zh": "未知"}
SEPARATOR = {"zh": "、"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


_BLANKS = re.compile(r"(?<=\S)[ \t]{2,}")
_GNU_QUOTES = re.compile(r"`([^`'\s](?:[^`'\n]*[^`'\s])?)'(?!\w)")

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NUMBER = re.compile(r"\d+")


def fold_hosts(hosts: Iterable[str]) -> str:
    """Fold host names, sorted: `npu[01-06,09]`. Names that cannot be folded are joined by commas in the given order."""
    given = [hosts] if isinstance(hosts, str) else list(dict.fromkeys(hosts))
    if len(given) <= 1 or not all(_HOST.fullmatch(name) for name in given):
        return ",".join(given)
    try:
        from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

        return str(NodeSet.fromlist(given, resolver=RESOLVER_NOGROUP))
    except ImportError:  # on a node
        return ",".join(given)


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, such as the hosts with one message, in their order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def fold_numbers(numbers: int | Iterable[int]) -> str:
    """Format numbers as sorted ranges: `0-3,7`."""
    given = [numbers] if isinstance(numbers, int) else sorted(set(numbers))
    ranges: list[list[int]] = []
    for number in given:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def numbers_in(text: str) -> list[int]:
    """Return the whole numbers of a text, in their order: of `[1, 2]` 1 and 2."""
    return [int(number) for number in _NUMBER.findall(text)]


def label_ranks(ranks: Iterable[int], labels: Mapping[int, str]) -> str:
    """Format ranks as `fold_numbers` does, those with a label (`decode/0`) by it: `decode/0-3,proxy/0`."""
    split = (labels.get(rank, str(rank)).rpartition("/") for rank in sorted(set(ranks)))
    named = grouped((role + slash, int(number)) for role, slash, number in split)
    return ",".join(f"{role}{fold_numbers(numbers)}" for role, numbers in named.items())


def excerpt(text: str, most: int | None = None, *, tail: int = 0) -> str:
    """Return a part of a program's output to be quoted: single blanks, `x' as 'x', no half of a pair of quotes. Of more
    than `most` characters the first, and with `tail` the last."""
    text = _GNU_QUOTES.sub(r"'\1'", _BLANKS.sub(" ", text))
    if most is not None and len(text) > most:
        text = f"{text[: most - tail].rstrip()} … {text[-tail:].lstrip()}" if tail else text[:most]
    for mark in '`"':
        head, _, rest = text.rpartition(mark)
        text = head + rest if text.count(mark) % 2 else text
    return text.strip()


def format_bytes(size: float) -> str:
    """Format a size: 1610612736 as `1.5 GiB`."""
    value, unit = float(size), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {_UNITS[unit]}"


def format_duration(seconds: float) -> str:
    """Format seconds: 125 as `2 min 5 s`, 0.25 as `0.25 s`, 90000 as `1 d 1 h`."""
    if abs(seconds) < 10:
        return f"{seconds:.2g} s"
    rest = round(seconds)
    parts = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


def format_clock(at_s: float) -> str:
    """Format a time in UTC seconds as local time: `02:14:07`, of another day `2026-11-21 02:14:07`."""
    at, now = time.localtime(at_s), time.localtime()
    return time.strftime("%H:%M:%S" if at[:3] == now[:3] else "%Y-%m-%d %H:%M:%S", at)


def is_hidden(character: str) -> bool:
    """Return whether a character is invisible or reorders its neighbours: controls, bidi marks, line separators."""
    return unicodedata.category(character) in _HIDDEN


def display_width(text: object) -> int:
    """Return the width of a text in terminal columns: two for each East Asian wide character."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in str(text))


def pad_left(text: object, width: int) -> str:
    """Right-align `text` in `width` columns."""
    return " " * (width - display_width(text)) + str(text)


def pad_right(text: object, width: int) -> str:
    """Left-align `text` in `width` columns."""
    return str(text) + " " * (width - display_width(text))


def quote(text: str, *, limit: int = 60) -> str:
    """Quote at most `limit` characters of `text` on one line, with hidden characters as escapes."""
    safe = "".join(_escape(character) if is_hidden(character) else character for character in text[:limit])
    return f"'{safe}'" + ("…" if len(text) > limit else "")


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _plural(count: float, words: str) -> str:
    one, _, many = words.partition(" ")
    return f"{count} {one if count == 1 else many}"


SPECIAL: Mapping[str, Callable[[Any, str], str]] = {
    "plural": _plural,
    "hosts": lambda value, _: fold_hosts(value),
    "ranks": lambda value, _: value if isinstance(value, str) else fold_numbers(value),
    "bytes": lambda value, _: format_bytes(value),
    "duration": lambda value, _: format_duration(value),
    "clock": lambda value, _: format_clock(value),
    "percent": lambda value, _: f"{100 * value:.0f}%",
    "quote": lambda value, _: quote(str(value)),
}
"""Format specifications in addition to Python's, listed in the docstring of `fill` (__init__.py)."""
