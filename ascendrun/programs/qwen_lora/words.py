"""Texts as tokens by a byte-level BPE that looks up each different word once.

A byte-level BPE first splits a text into words by a regular expression and then encodes each word alone. Within ASCII
the classes of that expression are known, so Python's `re` splits alike; the library encodes the words that are new,
and all other texts as a whole.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Callable

import numpy as np

Array = Any
Findall = Callable[[str], list[str]]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The expression of `tokenizers` where ByteLevel splits by itself."""
WAYS = {("Isolated", False), ("Removed", True)}
"""Behaviours of Split that make the words of the matches. What no match has is noticed by its length."""
PARTS = re.compile(
    r"(?P<class>\[\^?(?:\\p\{\w+\}|\\.|[^\[\]\\&])+\])|(?P<letters>\\p\{\w+\})|(?P<other>\\[rnstdSD]|\(\?!\\S\)|\(\?i?:|"
    r"[^\\\[\]($^.(])"
)
"""Parts of an expression that mean the same in Oniguruma and in `re`, within ASCII, whatever comes before them."""
MOST_TOKENS = 1 << 21
"""Tokens of the words that are kept."""


class Numbers(dict[str, int]):
    """Numbers in the order of the first request for them."""

    def __missing__(self, key: str) -> int:
        self[key] = number = len(self)
        return number


class Words:
    """Encodes texts with a tokenizer of `tokenizers`, without special tokens around them."""

    def __init__(self, fast: Any) -> None:
        fast.no_truncation()
        fast.no_padding()
        self.fast, facts = fast, json.loads(fast.to_str())
        self.findall, self.split = findall_of(facts), splitter([each["content"] for each in facts["added_tokens"]])
        self.clear()

    def clear(self) -> None:
        self.numbers, self.ids, self.starts = Numbers(), np.empty(0, np.int64), np.zeros(1, np.int64)

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Return the tokens of all texts in one array, and the number of tokens of each text."""
        if len(self.ids) > MOST_TOKENS:
            self.clear()
        words = list(map(self.words_of, texts))
        every = list(chain.from_iterable(words))
        numbers = np.fromiter(map(self.numbers.__getitem__, every), np.int64, len(every))
        self.learn()
        counts = np.diff(self.starts)[numbers]
        ends = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(ends[-1]) + np.repeat(self.starts[numbers] - ends[:-1], counts)
        return self.ids[places], np.diff(ends[np.cumsum([0, *map(len, words)])])

    def words_of(self, text: str) -> list[str]:
        """Return parts of a text that have the same tokens alone."""
        if self.findall is None or not text.isascii():
            return [text]
        words: list[str] = []
        for number, part in enumerate(self.split(text)):  # every other one is an added token
            words += [part] if number % 2 else self.findall(part)
        return words if sum(map(len, words)) == len(text) else [text]

    def learn(self) -> None:
        """Encode the words that are new."""
        fresh = list(self.numbers)[len(self.starts) - 1 :]
        ids, counts = joined([each.ids for each in self.fast.encode_batch_fast(fresh, add_special_tokens=False)])
        self.ids = np.concatenate([self.ids, ids])
        self.starts = np.concatenate([self.starts, self.starts[-1] + np.cumsum(counts)])


def joined(rows: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Return the numbers of all rows in one array, and how many each has."""
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    return np.fromiter(chain.from_iterable(rows), np.int64, counts.sum()), counts


def splitter(added: Sequence[str]) -> Callable[[str], list[str]]:
    """Return what splits a text around the added tokens, which the library looks for first, the longest first."""
    if not added:
        return lambda text: [text]
    return re.compile(f"({'|'.join(map(re.escape, sorted(added, key=len, reverse=True)))})").split


def findall_of(facts: Mapping[str, Any]) -> Findall | None:
    """Return what splits an ASCII text into words as this tokenizer does. None: a tokenizer of another kind."""
    is_plain = all(not (each["lstrip"] or each["rstrip"] or each["single_word"]) for each in facts["added_tokens"])
    normalizer, pattern = facts["normalizer"] or {"type": "NFC"}, pattern_of(facts["pre_tokenizer"])
    if facts["model"]["type"] != "BPE" or facts["model"].get("dropout") or normalizer["type"] not in ("NFC", "NFKC"):
        return None
    if pattern is None or not is_plain:
        return None
    pattern = in_ascii(pattern)
    with contextlib.suppress(re.error):  # of another class of characters, or of an older Python
        return None if pattern is None else re.compile(pattern, re.ASCII).findall
    return None


def pattern_of(steps: Any) -> str | None:
    """Return the expression whose matches are the words."""
    steps = (steps or {}).get("pretokenizers", [steps])
    last = steps[-1] or {}
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2 if last["use_regex"] else None
    first, way = steps[0], (steps[0].get("behavior"), steps[0].get("invert"))
    if len(steps) > 2 or last["use_regex"] or first["type"] != "Split" or way not in WAYS:
        return None
    return first["pattern"].get("Regex")  # type: ignore[no-any-return]


def in_ascii(pattern: str) -> str | None:
    """Write the classes of letters and digits for ASCII. None: parts of the expression may mean something else here."""
    found, end = "", 0
    while part := PARTS.match(pattern, end):
        text, end = part.group(), part.end()
        inside = text.replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9")
        found += f"[{inside}]" if part["letters"] else inside
    return found if end == len(pattern) else None
