"""How a piece of a user's input is shown in a message, and what the user may have meant by it."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence

from ascendrun.core.errors import Problem

MAX_PROBLEMS = 500
"""More than this many problems of one input help nobody; the rest is counted."""

_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def is_hidden(character: str) -> bool:
    """True for what cannot be seen or turns its neighbours around: controls, bidi marks, line separators."""
    return unicodedata.category(character) in _HIDDEN


def shown(text: str, *, limit: int = 60) -> str:
    """`text` in quotes, one line, at most `limit` characters, hidden characters as escapes."""
    cut = text if len(text) <= limit else text[:limit]
    safe = "".join(_escape(character) if is_hidden(character) else character for character in cut)
    return f"'{safe}'" + ("…" if len(text) > limit else "")


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` is probably a slip of; None when none is near."""
    if len(word) > 80:
        return None
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def suggestion(word: str, choices: Sequence[str]) -> str | None:
    """The hint for an unknown word: the nearest choice, else all of them when they are few; None without choices."""
    near = closest(word, choices)
    if near is not None:
        return f"did you mean {near}?"
    if not choices:
        return None
    if len(choices) <= 30:
        return "known: " + ", ".join(sorted(choices))
    return None


def in_order(problems: Sequence[Problem]) -> list[Problem]:
    """Sorted by place, each once, at most MAX_PROBLEMS; problems without a line come last, in the order given."""
    unique = list(dict.fromkeys(problems))
    unique.sort(key=lambda problem: (problem.line is None, problem.line or 0, problem.column or 0))
    if len(unique) <= MAX_PROBLEMS:
        return unique
    rest = len(unique) - MAX_PROBLEMS
    return unique[:MAX_PROBLEMS] + [Problem(unique[0].file, None, None, f"and {rest} more problems")]


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
