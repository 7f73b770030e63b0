"""Whose code failed: the package in whose frames it was raised or a traceback ends, and the engine that printed it.

    packages_in(["AssertionError"], raised, "", {"commlib": "1.2"}, "train.py:3")
    {"PACKAGE": "commlib", "INSTALLED": "1.2", "CALLED": "train.py:3", …}

A package is installed, or in its source tree: a directory of the same name is around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ascendrun.ascend.vocabularies import read_table, says, wording

READ_CHARACTERS, MOST_CHARACTERS, WEIGHT, SHORT = 1000, 100, 30, 30
"""Of a message; of a line to search for; of a name in it; a shorter line has the class as well."""
_NAME = re.compile(r"[A-Za-z]+_\w+|[a-z]+[A-Z]\w*|[A-Z]\w*[a-z][A-Z]\w*")
_QUOTES = " '\""


class Raised(Protocol):
    """An exception with the files of its frames, the deepest first, and the code of the deepest."""

    @property
    def files(self) -> Sequence[str]: ...
    @property
    def message(self) -> str: ...
    @property
    def statement(self) -> str: ...
    @property
    def short_type(self) -> str: ...
    @property
    def raised_in(self) -> tuple[str, str]: ...


class Installed:
    """Names of packages with their versions on the host."""

    def __init__(self, packages: Mapping[str, str | None]) -> None:
        self._packages = packages

    def version(self, name: str) -> str:
        return self._packages.get(name.replace("_", "-").lower()) or ""

    def shown(self, name: str, version: str = "") -> str:
        return f"{name} {version or self.version(name)}".strip()


def packages_in(
    texts: Sequence[str], raised: Raised | None, frames: str, packages: Mapping[str, str | None], where: str
) -> Mapping[str, str]:
    """Return the package that raised an exception (PACKAGE, INSTALLED, TREE: it is in its source tree): that of an
    object which the message or the last code names, else of the deepest frame; what called it (CALLED: another package,
    or the line of the program, "": not known), both (PACKAGES), and where no exception has frames that of the last one
    of a cut traceback, else whose process printed the line (SUSPECT). LINE: what to search for in their issues."""
    cut = [] if raised else [one["file"] for one in map(wording("frame").match, frames.splitlines()) if one][::-1]
    files = raised.files if raised else ()
    owners = _owners(files)
    objects = [] if raised is None else _objects_of(raised)
    found = [*dict.fromkeys([*objects, *owners, *wording("package").findall("\n".join(texts))[::-1]])][:2]
    installed, own = Installed(packages), where.rpartition(":")[0]
    inside = {Path(file).name for file in files if says(file, "library") or file in owners.values()}
    is_own = bool(own) and not says(own, "library") and own not in inside
    suspect = next(iter([*_owners(cut), *_printers(texts)]), "")
    return {
        "PACKAGE": "".join(found[:1]),
        "INSTALLED": installed.version("".join(found[:1])),
        "TREE": "".join(one for one in found[:1] if one in owners and not says(owners[one], "library")),
        "CALLED": found[1] if len(found) > 1 else where if is_own else "",
        "PACKAGES": ", ".join(map(installed.shown, found)),
        "SUSPECT": "" if found or not suspect else installed.shown(suspect),
        "LINE": max(map(search_line, texts), key=_names, default="") if raised is None else _line_of(raised),
    }


def _line_of(raised: Raised) -> str:
    """Return what to search for about an exception: of its message, else of the code that raised it, or its class with
    the function."""
    line = search_line(raised.message or raised.statement) or ("" if raised.message else raised.raised_in[1])
    line = line or raised.message.split("\n")[0].strip(_QUOTES)[:MOST_CHARACTERS]
    return line if len(line) >= SHORT else f"{raised.short_type} {line}".strip()


def search_line(text: str) -> str:
    """Return the part of a message that names most, without data of one run (numbers, paths, addresses, prefixes of
    loggers), of whole words and at most MOST_CHARACTERS; "": it has no such part of two words."""
    parts = (
        " ".join(part.split()).strip(" ,;:([")
        for part in wording("of-one-run").sub("\n", text[:READ_CHARACTERS].replace("`", "'")).splitlines()
    )
    best = max((part for part in parts if " " in part), key=_names, default="")
    return best if len(best) <= MOST_CHARACTERS else best[:MOST_CHARACTERS].rpartition(" ")[0]


def _names(part: str) -> int:
    """Return how much a part of a message names: a name counts as much as WEIGHT characters."""
    return min(len(part), MOST_CHARACTERS) + WEIGHT * len(_NAME.findall(part))


def _owners(files: Iterable[str]) -> Mapping[str, str]:
    """Return the packages of frames, the deepest first, with the deepest file of each: up to the first that is of the
    program."""
    found: dict[str, str] = {}
    for file in files:
        is_library = says(file, "library")
        hits = [*wording("package" if is_library else "source-tree").finditer(file)]
        if hits:
            found.setdefault(hits[-1][hits[-1].lastindex or 0], file)
        elif not is_library:
            break
    return found


def _objects_of(raised: Raised) -> list[str]:
    """Return the package of the object that lacks something or rejects a call by the message, else of the one that the
    last code calls."""
    named = wording("object").search(raised.message)
    text = raised.statement if named is None else named["name"] or named["name2"]
    return [name for name, pattern in read_table("hints")["objects"].items() if re.search(pattern, text)][:1]


def _printers(texts: Iterable[str]) -> list[str]:
    """Return the engines whose processes print such prefixes."""
    table = read_table("hints")["printers"]
    return [name for text in texts for name, prefix in table.items() if re.match(prefix, text)][:1]
