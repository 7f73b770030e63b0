"""Phrases of the tables and parsers of ascend/, which speak English, in other languages: whole, or by their pattern."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources

PLACES = ("says", "hint")
"""The values of a finding that are phrases; the others are names and numbers."""


def translated(values: Mapping[str, str], lang: str) -> Mapping[str, str]:
    """The values with their phrases in the language; one that is not known stays English."""
    return {name: translate(value, lang) if name in PLACES else value for name, value in values.items()}


def translate(phrase: str, lang: str) -> str:
    """The phrase, or a known pattern of it with {} for what varies, in the language; else the phrase itself."""
    if lang == "en":
        return phrase
    whole, patterns = _phrases(lang)
    if phrase in whole:
        return whole[phrase]
    for pattern, told in patterns:
        found = pattern.fullmatch(phrase)
        if found is not None:
            return told.format(*found.groups())
    return phrase


@cache
def _phrases(lang: str) -> tuple[Mapping[str, str], tuple[tuple[re.Pattern[str], str], ...]]:
    rows: dict[str, str] = json.loads(
        resources.files(__package__ or "").joinpath(f"phrases_{lang}.json").read_text(encoding="utf-8")
    )
    patterns: list[tuple[re.Pattern[str], str]] = [
        (re.compile("(.+)".join(re.escape(part) for part in english.split("{}"))), told)
        for english, told in rows.items()
        if "{}" in english
    ]
    return rows, tuple(patterns)
