"""The programs that a job file may name: a package each, with a table of options, and with rules if it is planned.

The bundled ones are the packages of ascendrun/programs with an `options.json`. An installed package of a user's is one
by an entry point of the group `ascendrun.programs`, NAME = PACKAGE. Nothing is imported before a training is planned.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GROUP = BUNDLED = "ascendrun.programs"


@dataclass(frozen=True)
class Program:
    """A package with `options.json` and `__main__.py`, and perhaps `rules.py`. `package`: its name in Python."""

    name: str
    package: str
    folder: Path

    @property
    def is_bundled(self) -> bool:
        return self.package.startswith(f"{BUNDLED}.")

    @property
    def options_file(self) -> Path:
        return self.folder / "options.json"

    @property
    def has_rules(self) -> bool:
        return (self.folder / "rules.py").is_file()

    @property
    def rules(self) -> Any:
        """The module of its rules: RULES, TRAINS, inputs() and workload(). Imported now; it needs no torch."""
        return import_module(f"{self.package}.rules")


def find_programs() -> Mapping[str, Program]:
    """Return all programs by name. A bundled one wins over an installed one of the same name."""
    return _find(tuple(sys.path))


def rules_of(program: str | None) -> Any:
    """Return the module of a program's rules; None: it has none, or there is no such program."""
    found = find_programs().get(program or "")
    return found.rules if found is not None and found.has_rules else None


@lru_cache(maxsize=1)
def _find(path: tuple[str, ...]) -> Mapping[str, Program]:
    """`path`: of modules, which decides what is installed."""
    return {each.name: each for each in [*_installed(), *_bundled()]}


def _bundled() -> Iterator[Program]:
    folder = Path(__file__).resolve().parent.with_name("programs")
    for table in sorted(folder.glob("*/options.json")):
        yield Program(table.parent.name, f"{BUNDLED}.{table.parent.name}", table.parent)


def _installed() -> Iterator[Program]:
    found: Any = entry_points()  # a dictionary by group before Python 3.10
    for each in found.select(group=GROUP) if hasattr(found, "select") else found.get(GROUP, ()):
        spec = find_spec(each.value)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            yield Program(each.name, each.value, Path(folder))
