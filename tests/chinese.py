"""Which lines of a Chinese screen are English: what the tours of all commands look for."""

import re
from collections.abc import Iterator
from typing import Any

ALLOWED = (
    "rank",  # the term stays (docs/style.md)
    "ranks",
    "ascendrun",  # names
    "torchrun",
    "Ascend",
    "Python",
    "Prometheus",
)
COMMAND = re.compile(
    r"^\s*(?:\$ |# )?(?:处理建议：)?(?:\w+=\S+ |id=\$\(|source <\()*ascendrun\b(?:(?!\s#\s).)*(?:\s#\s)?|写为? \w+: .*"
)
"""A command up to its comment, and a piece of a job file in a hint: what a person types is not translated."""
CODE = re.compile(r"`[^`]*`|“[^”]*”|\"[^\"]*\"|(?<!\w)'[^']*'")
NAME = re.compile(
    r"[^\s，。：；（）、]*[/\\=@$<>|{}\[\]_#*~^%+][^\s，。：；（）、]*"
    r"|[^\s，。：；（）、]*\d[^\s，。：；（）、]*"
    r"|(?<![^\s，。：；（）、])-{1,2}\w[^\s，。：；（）、]*"
    r"|\b[A-Z]{2,}[A-Za-z]*\b|\b\w*[a-z][A-Z]\w*\b|\b[a-z]\w*(?:[.-]\w+)+\b"
)
"""Paths, flags, settings, numbers with units, upper-case states, identifiers, codes."""
WORDS = re.compile(r"[A-Za-z]+(?:'[a-z]+)?(?:[,.:;()]* (?:_[,.:;()]* )*[A-Za-z]+(?:'[a-z]+)?){2,}")
"""Two spaces are between two cells of a table."""
TRACEBACK = re.compile(r"Traceback \(most recent call last\):|File \".*\", line \d+, in \S+")
HALF_WIDTH = re.compile(r"[\u4e00-\u9fff][,:;()!?]|(?<!\s)[,:;!?)] ?[\u4e00-\u9fff]|[(][\u4e00-\u9fff]")


TITLES = re.compile(r"[A-Z]+(?: [A-Z]+)*(?:  +[A-Z]+(?: [A-Z]+)*){2,}")
"""A table head."""
EXCERPT = re.compile(r"\s*\d+ \| ")
"""A line of the user's file."""


def english(line: str, foreign: str = "") -> str:
    """The first three or more English words in a row; "" for none. `foreign`: what programs of others printed."""
    if EXCERPT.match(line):
        return ""
    if TITLES.fullmatch(line.strip()):
        return line
    rest = COMMAND.sub("_", line)
    for other in foreign.splitlines():
        if len(other.split()) > 2 or len(other) > 20:
            rest = rest.replace(other.strip(), "_")
    rest = NAME.sub("_", CODE.sub("_", TRACEBACK.sub("_", rest)))
    rest = re.sub(rf"\b(?:{'|'.join(ALLOWED)})\b", "_", rest)
    for found in WORDS.finditer(re.sub(r"[-–—…·•|]+", "_", rest)):
        words = re.findall(r"[A-Za-z']+", found.group())
        if " ".join(words) not in " ".join(re.findall(r"[A-Za-z']+", foreign)):
            return " ".join(words)
    return ""


def english_lines(screen: str, foreign: str = "") -> list[str]:
    """Every line of a screen that is English, or has half-width punctuation next to a Chinese character."""
    return [
        line
        for line in screen.splitlines()
        if english(line, foreign) or HALF_WIDTH.search(NAME.sub(" ", CODE.sub("", COMMAND.sub("", line))))
    ]


def sentences(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Each text of a JSON document with its key."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from sentences(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from sentences(item, key)
    elif isinstance(value, str):
        yield key, value
