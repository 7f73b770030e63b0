"""How a piece of a user's input is shown in a message, and what the user may have meant by it."""

from __future__ import annotations

from collections.abc import Sequence

from ascendrun.core.errors import Problem
from ascendrun.text.format import is_hidden
from ascendrun.text.format import quote as shown
from ascendrun.text.suggest import closest

__all__ = ["MAX_PROBLEMS", "closest", "in_order", "is_hidden", "shown", "suggestion"]

MAX_PROBLEMS = 500
"""More than this many problems of one input help nobody; the rest is counted."""


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
