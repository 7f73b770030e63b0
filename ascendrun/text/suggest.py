"""What a mistyped name was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from ascendrun.text import Text


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` is probably a slip of; None when none is near."""
    if len(word) > 80:
        return None
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str) -> Text:
    return Text("suggest.did-you-mean", "did you mean {name}?", name=name)


def write(piece: str) -> Text:
    """The hint to write a piece of a file or a command line as it stands."""
    return Text("suggest.write", "write {piece}", piece=piece)


def renamed(old: str, new: str) -> Text:
    return Text("jobfile.renamed", "{old} was renamed to {new}", old=old, new=new)


def suggestion(word: str, choices: Sequence[str]) -> Text | None:
    """The hint for an unknown name: the nearest choice, else all of them when they are few; None without choices."""
    near = closest(word, choices)
    if near is not None:
        return did_you_mean(near)
    if 0 < len(choices) <= 30:
        return Text("suggest.known", "expected one of: {names}", names=sorted(choices))
    return None
