"""User-visible messages: a key, an English template next to the code that uses it, typed values; Chinese by key.

    raise UnreachableError(Text("ssh.timeout", "{host}: no reply within {limit_s} s", host=host, limit_s=10))

A `Text` is transmitted and stored as data. `str()` renders it for output, in the language of the process
(`use_language`). The English template is the source. zh.json has the Chinese templates by key; a key that is
missing there is rendered in English. tests/docs checks that no key is missing.

Findings, diagnoses, events, reasons of jobs, problems of plans and messages of nodes are known by a code, and programs
print many: en.json has their English by key, and `listed` makes their texts. Tables of other files (signatures) keep
their English in the row.
A program of ascendrun has the texts that only it uses in en.json and zh.json of its own directory.
Standard library only: programs on nodes use this package too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Callable, TypeVar

from ascendrun.text.format import SEPARATOR, SPECIAL, UNKNOWN, excerpt

LANGUAGES = ("en", "zh")
PSEUDO = "pseudo"
"""A test language: English templates with shuffled words, to prove that no code parses a message."""
_TEXT = "$text"
_CHINESE_JOINT = r"(?<=[\u3000-\u9fff\uff00-\uffef]) ?\0 ?(?=[\u3000-\u9fff\uff00-\uffef])"
_MIXED_JOINT = r"(?<=[\u4e00-\u9fff])\0(?=[A-Za-z0-9])|(?<=[A-Za-z0-9])\0(?=[\u4e00-\u9fff])"
_PLACE = re.compile(r"\{\{|\}\}|\{(\w+)(!r)?(?::([^{}]*))?\}")
_language = "en"
_of_reader: ContextVar[str | None] = ContextVar("language", default=None)


Kind = TypeVar("Kind", bound=type)
_carried: dict[str, Any] = {}


class Rendered:
    """What a person reads, kept as data; `str()` renders it in the language of the process."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.render(language())

    def render(self, lang: str) -> str:
        raise NotImplementedError


def carried(tag: str) -> Callable[[Kind], Kind]:
    """Register a class of messages that `to_json` and `from_json` carry under `tag`, by its methods of these names."""

    def register(kind: Kind) -> Kind:
        _carried[tag] = kind
        return kind

    return register


class Text(Rendered):
    """A message and its values; `str()` renders it in the language of the process.

    `key` is unique in the product: `AREA.NAME` in kebab-case. Values are strings, numbers, None (rendered as unknown),
    sequences of these, or other texts. Two texts are equal if their keys and values are equal.
    """

    __slots__ = ("english", "key", "values")

    def __init__(self, key: str, english: str, /, **values: Any) -> None:
        self.key, self.english, self.values = key, english, values

    def __repr__(self) -> str:
        return f"Text({self.key!r}, {self.values!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and (self.key, self.values) == (other.key, other.values)

    def __hash__(self) -> int:
        import json

        return hash((self.key, json.dumps(to_json(self.values), sort_keys=True, default=repr)))

    def render(self, lang: str) -> str:
        return fill(self.key, self.english, self.values, lang=lang)


def fill(key: str, english: str, values: Mapping[str, Any], *, lang: str | None = None) -> str:
    """Fill the template of `key` with its values. `lang` None: the language of the process.

    A missing value is rendered as "?". A format that is invalid for its value is ignored: rendering never fails.
    In addition to Python's format specifications:
    `{n:plural rank ranks}` "1 rank", "4 ranks" · `{hosts:hosts}` npu[01-04] · `{ranks:ranks}` 0-3,7
    `{texts:lines}` one per line
    `{n:bytes}` 1.5 GiB · `{s:duration}` 2 min 5 s · `{at_s:clock}` 02:14:07
    `{x:percent}` 0.31 as 31% · `{x:quote}` 'x'
    """
    lang = lang or language()

    def put(place: re.Match[str]) -> str:
        name, as_repr, spec = place.groups()
        if name is None:
            return place.group()[0]
        value = values.get(name, "?")
        shown = _show(repr(value) if as_repr else value, spec or "", lang)
        return f"\0{shown}\0" if lang == "zh" and isinstance(value, Rendered) else shown

    filled = _PLACE.sub(put, template_of(key, english, lang))
    return _space(filled) if lang == "zh" else filled


def quoted(values: Mapping[str, str | Rendered], lang: str) -> dict[str, str]:
    """Return values as they are shown in a sentence: messages in a language, and parts of a program's output."""
    return {name: excerpt(one if isinstance(one, str) else one.render(lang)) for name, one in values.items()}


def _space(text: str) -> str:
    """Put one space between Chinese and Latin text at the NUL marks around a nested text, none between Chinese."""
    if "\0" not in text:
        return text
    return re.sub(_MIXED_JOINT, " ", re.sub(_CHINESE_JOINT, "", text)).replace("\0", "")


def enumerate_texts(texts: Iterable[object], lang: str | None = None) -> str:
    """Return texts as one enumeration: "slow, 2 min old", with the comma of the language."""
    return SEPARATOR.get(lang or language(), ", ").join(map(str, texts))


def _show(value: Any, spec: str, lang: str) -> str:
    if value is None:
        return UNKNOWN.get(lang, "unknown")
    name, _, rest = spec.partition(" ")
    try:
        if name in SPECIAL:
            return SPECIAL[name](value, rest)
        if name == "lines":
            return "".join(f"\n  {_show(item, '', lang)}" for item in value)
        if isinstance(value, Rendered):
            return value.render(lang)
        if isinstance(value, (list, tuple)):
            return enumerate_texts((_show(item, spec, lang) for item in value), lang)
        shown = f"{value:{spec}}"  # the name format is the submodule here
    except (TypeError, ValueError):
        shown = str(value)
    return _system_errors(lang).get(shown.lower(), shown) if lang == "zh" else shown


@cache
def _system_errors(lang: str) -> Mapping[str, str]:
    """Return translations of `os.strerror` messages (lower case), from the keys `os.ENOENT` and so on."""
    import errno

    rows = translations(lang)
    return {
        os.strerror(code).lower(): rows[f"os.{name}"] for code, name in errno.errorcode.items() if f"os.{name}" in rows
    }


def listed(key: str, /, **values: Any) -> Text:
    """Return the text whose English is in en.json. Raises KeyError for a key that is not."""
    return Text(key, translations("en")[key], **values)


def template_of(key: str, english: str, lang: str) -> str:
    """Return the template of `key` in a language; the English template if there is no translation."""
    if lang == "en":
        return english
    return _reworded(english) if lang == PSEUDO else translations(lang).get(key, english)


@cache
def translations(lang: str) -> Mapping[str, str]:
    """Return the templates of a language by key, with those of each program's directory; of English those known by a
    code (the Python code has the rest)."""
    import json

    here = os.path.dirname(__file__)
    programs = os.path.join(os.path.dirname(here), "programs")
    own = sorted(os.listdir(programs)) if os.path.isdir(programs) else []
    rows: dict[str, str] = {}
    for folder in (here, *(os.path.join(programs, name) for name in own)):
        path = os.path.join(folder, f"{lang}.json")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                rows.update(json.load(file))
    return rows


def language() -> str:
    """Return the language of this process, or of the reader that a thread or task of it serves."""
    return _of_reader.get() or _language


@contextmanager
def language_for_reader(lang: str) -> Iterator[None]:
    """Use another language in this task, and in threads that it starts with its context."""
    mark = _of_reader.set(lang)
    try:
        yield
    finally:
        _of_reader.reset(mark)


def use_language(lang: str) -> None:
    """Set the language of this process: one of LANGUAGES or PSEUDO; any other value selects English."""
    global _language
    _language = lang if lang in (*LANGUAGES, PSEUDO) else "en"


def language_of(environ: Mapping[str, str] = os.environ) -> str:
    """Return the language that the environment selects: ASCENDRUN_LANG, else zh for any Chinese locale, else en."""
    for name in ("ASCENDRUN_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        value = environ.get(name, "").lower()
        if value:
            return PSEUDO if value == PSEUDO else "zh" if value.startswith("zh") else "en"
    return "en"


def language_of_reader(accepted: str) -> str:
    """Return the language of an Accept-Language header: its first of ours; without any, that of the process."""
    tags = [piece.split(";")[0].strip().lower()[:2] for piece in accepted.split(",")]
    return next((tag for tag in tags if tag in LANGUAGES), language())


def to_json(value: Any) -> Any:
    """Convert a value, or a structure of values, to JSON types; `from_json` restores it (tuples become lists, and
    dataclasses mappings of their fields)."""
    if isinstance(value, Text):
        return {_TEXT: value.key, "en": value.english, "values": to_json(value.values)}
    if isinstance(value, Rendered):
        tag = next(tag for tag, kind in _carried.items() if isinstance(value, kind))
        return {tag: value.to_json()}  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: to_json(getattr(value, name)) for name in value.__dataclass_fields__}
    return [to_json(item) for item in value] if isinstance(value, (list, tuple, set, frozenset)) else value


def from_json(value: Any) -> Any:
    """Restore the argument of `to_json`."""
    if isinstance(value, Mapping):
        if isinstance(value.get(_TEXT), str) and isinstance(value.get("values"), Mapping):
            return Text(value[_TEXT], str(value.get("en", "")), **from_json(value["values"]))
        tag = next((tag for tag in _carried if tag in value), None)
        if tag is not None:
            return _carried[tag].from_json(value[tag])
        return {name: from_json(item) for name, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value


def _reworded(english: str) -> str:
    import random

    pieces = re.findall(r"\{[^{}]*\}|[^{}]+", english)
    words = [word for piece in pieces for word in ([piece] if piece.startswith("{") else piece.split())]
    random.Random(english).shuffle(words)
    return " ".join(words)


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that `word` is probably a misspelling of; None if no choice is similar."""
    if len(word) > 80:
        return None
    import difflib

    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str) -> Text:
    return Text("suggest.did-you-mean", "did you mean {name}?", name=name)


class TextError(ValueError):
    """A value that cannot be used, with the reason as a text."""

    def __init__(self, message: Text) -> None:
        super().__init__(message)
        self.message = message


def fault(key: str, english: str, hint: str, /, **values: Any) -> tuple[Text, Text]:
    """Return a message and its hint, whose key is `KEY.hint`; they share their values."""
    return Text(key, english, **values), Text(f"{key}.hint", hint, **values)


def write(piece: str) -> Text:
    """Return the hint to write a piece of a file or a command line literally."""
    return Text("suggest.write", "write {piece}", piece=piece)


def suggestion(word: str, choices: Sequence[str]) -> Text | None:
    """Return the hint for an unknown name: the nearest choice, else all choices if 1 to 40, else None."""
    near = closest(word, choices)
    if near is not None:
        return did_you_mean(near)
    if 0 < len(choices) <= 40:
        return Text("suggest.known", "expected one of: {names}", names=sorted(choices))
    return None
