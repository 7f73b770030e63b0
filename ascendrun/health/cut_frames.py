"""Which call failed, by the frames of a traceback whose exception is not in the log.

calls_in('  File "/x/site-packages/a/b.py", line 3, in read\\n    with open(path) as file:')    storage, of calls.toml
cut_in({3}, ranks)    {"CUT": "fit.py:8 in fit: model.step()", "OF": "3"}
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from ascendrun.ascend.vocabularies import (
    Value,
    alike,
    class_of,
    is_warning,
    says,
    value_of_package,
    values_in,
    vocabulary,
    wording,
)

MOST_CHARACTERS = 120
_CALLED = re.compile(r"([A-Za-z_][\w.]*)\(")
_IMPORTS = re.compile(r"(?:import|from \S+ import) ")
PREFIXED = re.compile(r'^(?!\s*File )(?P<prefix>\S.{2,120}?)\s\sFile "[^"]+", line \d+')
"""A frame behind the prefix that a logger writes on each line."""
_CLASS = re.compile(r"\b(?:[a-z_]\w*\.)*[A-Z]\w*[a-z]\w*\b")


class _Frame(NamedTuple):
    file: str
    line: str
    name: str
    code: str


def calls_in(text: str) -> Iterator[Value]:
    """Yield the classes that the last code of the frames raises, else the call that it makes: that of a library's
    functions, the deepest first, up to the line of the program that called them, or the import of a library."""
    frames = _frames_of(text)[::-1]
    for at, frame in enumerate(frames):
        is_of_library = says(frame.file, "library")
        names = _CALLED.findall(frame.code) + [frame.name] * is_of_library
        if not at and frame.code.startswith("raise "):
            classes = (
                name for name in _CLASS.findall(frame.code) if name.rpartition(".")[2] in vocabulary("exceptions")
            )
            yield from (class_of(name).as_hint for name in classes)
        every = (part for name in names for part in (name, name.rpartition(".")[2]))
        found = next((vocabulary("calls")[name] for name in every if name in vocabulary("calls")), None)
        if found is not None:
            yield found
        package = value_of_package(module_of(frame.file)) if is_of_library and not at else None
        if found is None and package is not None and package.domain in alike("by-what-they-do"):
            yield package
        is_imported = frame.name == "<module>" and any(
            map(_IMPORTS.match, (one.code for one in frames[at + 1 : at + 2]))
        )
        if found is None and is_of_library and is_imported:
            yield Value("packages", "import", "environment", depth=2)
        if found is not None or not is_of_library:
            return


def module_of(file: str) -> str:
    """Return the dotted name of a library's module by its file, such as "h5py._hl.files"."""
    name = file.rpartition("-packages/")[2].rpartition("<frozen ")[2].strip("<>")
    _, is_standard, rest = name.rpartition("lib/python3")
    name = rest.partition("/")[2] if is_standard else name
    return name.rpartition(".")[0].replace("/", ".") if "." in name else name


def without_logger(texts: Sequence[str]) -> list[str]:
    """Return lines without the prefix of a logger that wrote frames among them."""
    length = next((len(hit["prefix"]) for hit in map(PREFIXED.match, texts) if hit), 0)
    return [text[length:] if length and not text[:1].isspace() else text for text in texts]


class _Line(Protocol):
    @property
    def text(self) -> str: ...
    @property
    def stream(self) -> str: ...


L = TypeVar("L", bound=_Line)


def told_in(lines: Sequence[L]) -> list[L]:
    """Return the lines that are no part of a traceback, behind a logger's prefix or without."""
    bare = without_logger([line.text for line in lines])
    return [line for line, text in zip(lines, bare) if not _is_of_traceback(text, is_bare=len(text) == len(line.text))]


def last_of(lines: Sequence[L], stream: str, most: int) -> list[L]:
    """Return the last lines of a stream without warnings, their source lines and, if there is anything else, parts of
    tracebacks; if there is nothing else, the last warning with an error of a device's runtime."""
    own = [line for line in lines if line.stream == stream and line.text.strip()]
    kept = (line for line, before in zip(reversed(own), [*own[-2::-1], None]) if not _is_of_warning(line, before))
    plain = [*islice(kept, most)][::-1]
    coded = (line for line in reversed(own) if any(map(_is_of_a_runtime, values_in(line.text))))
    return told_in(plain) or plain or [*islice(coded, 1)]


def _is_of_a_runtime(value: Value) -> bool:
    return value.is_exact and value.vocabulary in alike("asynchronous")


def _is_of_warning(line: _Line, before: _Line | None) -> bool:
    is_source = before is not None and line.text[:1].isspace() and is_warning(before.text)
    return is_source or is_warning(line.text)


def _is_of_traceback(text: str, *, is_bare: bool) -> bool:
    return says(text, "traceback", "part-of-traceback") or (text[:1].isspace() and not is_bare)


class _Numbered(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def stopped(self) -> bool: ...


class Cut(Protocol):
    """A rank with the frames of its output. `chain`: the exception that they led to; None: it is not in the log."""

    @property
    def rank(self) -> _Numbered: ...
    @property
    def chain(self) -> object | None: ...
    @property
    def frames(self) -> str: ...


def cut_in(first: Container[int], ranks: Iterable[Cut]) -> Mapping[str, str]:
    """Return where the traceback of a rank ends whose exception is not in the log (CUT), and this rank (OF): one of the
    first, else another that was not stopped; {}: none."""
    for one in sorted(ranks, key=lambda one: one.rank.rank not in first):
        for frame in _frames_of("" if one.chain is not None or one.rank.stopped else one.frames)[-1:]:
            place = f"{frame.file.rpartition('/')[2]}:{frame.line}" + (f" in {frame.name}" if frame.name else "")
            text = f"{place}{': ' if frame.code else ''}{frame.code}"
            return {"CUT": text[:MOST_CHARACTERS], "OF": str(one.rank.rank)}
    return {}


def _frames_of(text: str) -> Sequence[_Frame]:
    found: list[_Frame] = []
    for line in text.splitlines():
        frame = wording("frame").match(line)
        if frame is not None:
            found.append(_Frame(frame["file"], frame["line"], frame["name"] or "", ""))
        elif found and not found[-1].code:
            found[-1] = found[-1]._replace(code=line.strip())
    return found
