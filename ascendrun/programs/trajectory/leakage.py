"""Checks, before any training, that a good score can only result from learning how ships move."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.tokens import Words
from ascendrun.text import Text


class LabelLeakError(InvalidDataError):
    """The text contains the label, or the same text is in two splits; any score would be meaningless."""


def check_leak(texts: Sequence[Words], labels: Sequence[str]) -> None:
    """Raise LabelLeakError if a token of the texts names a class, or if every class has a separate token.

    In the second case, each class has a token that is in all of its texts and in no other's, so the
    token is the label under another name.
    """
    classes = sorted(set(labels))
    vocabulary = {word for words in texts for word in words.all()}
    class_words = [plain(name) for name in classes if len(plain(name)) > 2]
    in_plain = {word: plain(word) for word in vocabulary}
    named = sorted(word for word, letters in in_plain.items() if any(name in letters for name in class_words))
    if named:
        raise LabelLeakError(
            "program.leak-named",
            "the text names the class: {tokens}; class names must not be in the text",
            tokens=list(named[:5]),
        )
    own = {name: own_words(texts, labels, name) for name in classes}
    if len(classes) > 1 and min(labels.count(name) for name in classes) > 1 and all(own.values()):
        shown = ", ".join(f"{sorted(words)[0]} = {name}" for name, words in own.items())
        raise LabelLeakError(
            "program.leak-token",
            "one token identifies each class: {shown}; a column derived from the class is in the text",
            shown=shown,
        )


def plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def own_words(texts: Sequence[Words], labels: Sequence[str], name: str) -> set[str]:
    """Return the tokens in every text of this class and in no text of another."""
    inside = [set(words.all()) for words, label in zip(texts, labels) if label == name]
    common: set[str] = set.intersection(*inside)
    for words, label in zip(texts, labels):
        if not common:
            break
        if label != name:
            common -= set(words.all())
    return common


def check_same_segments(parts: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Raise LabelLeakError if two splits share a fingerprint, as for one track under two names in copied files.
    `parts`: (name, fingerprint) of every segment by split."""
    home: dict[str, tuple[str, str]] = {}
    shared: list[Text] = []
    for split, rows in parts.items():
        for name, mark in rows:
            first_split, first = home.setdefault(mark, (split, name))
            if first_split != split:
                shared.append(
                    Text(
                        "program.copied-segment",
                        "{first} in {first_split} = {second} in {second_split}",
                        first=first,
                        first_split=first_split,
                        second=name,
                        second_split=split,
                    )
                )
    if shared:
        raise LabelLeakError(
            "program.leak-copies",
            "{count:plural segment segments} in two splits under other names, such as {example}\n"
            "hint: remove the copies, or give both the same ship",
            count=len(shared),
            example=shared[0],
        )


def fingerprint(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()
