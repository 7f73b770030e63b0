"""A job file before it is a JobSpec: its tree and its data, for the rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import Problem
from ascendrun.core.reader.yaml_source import MappingNode, Place, Source, find, key_place, place_of
from ascendrun.options import ProgramOptions
from ascendrun.text import Text


@dataclass(frozen=True)
class LocalFiles:
    """Access of the job file to the disk of this machine; paths are relative to the job file."""

    is_directory: Callable[[str], bool]
    is_readable: Callable[[str], bool]


@dataclass(frozen=True)
class Draft:
    """A job file before validation as a JobSpec. `data`: unchecked input of the model; `args` go through `typed_args`.
    `check_names` returns the names of the checks; `files`: the disk. None: not checked."""

    root: MappingNode
    data: dict[str, Any]
    source: Source
    programs: Mapping[str, ProgramOptions]
    check_names: Callable[[], Collection[str]] | None = None
    files: LocalFiles | None = None

    def has(self, name: str) -> bool:
        return name in self.data

    def section(self, name: str) -> Mapping[str, Any]:
        value = self.data.get(name)
        return value if isinstance(value, dict) else {}

    def key(self, *path: Any) -> Place:
        return key_place(self.root, path)

    def value(self, *path: Any) -> Place:
        return place_of(self.root, path)

    def is_invalid(self, *path: Any) -> bool:
        return self.source.is_invalid(find(self.root, path))

    def at(self, path: Sequence[Any]) -> Any:
        """Return the value at `path`; None: not set."""
        value: Any = self.data
        for step in path:
            inside = isinstance(value, dict) and step in value or isinstance(value, tuple) and isinstance(step, int)
            value = value[step] if inside else None
        return value

    @property
    def table(self) -> ProgramOptions | None:
        """Options of the job's program; None: no such program."""
        name = self.data.get("program")
        return self.programs.get(name) if isinstance(name, str) else None


def home_problem(draft: Draft, *path: Any) -> Problem:
    return draft.value(*path).problem(
        Text("jobfile.home", "{key}: ~ is not supported", key=".".join(map(str, path))),
        Text("jobfile.home-hint", "write the absolute path"),
    )
