"""A training as the rules see it: options with their defaults, ranks, devices, and the files that the nodes have. The
programs that a job file may name: a package each, with a table of options, and with rules if it is planned.

The bundled ones are the packages of ascendrun/programs with an `options.json`. An installed package of a user's is one
by an entry point of the group `ascendrun.programs`, NAME = PACKAGE. Nothing is imported before a training is planned.
"""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable

from ascendrun.facts.chips import Chip
from ascendrun.options import ProgramOptions
from ascendrun.text import Text, listed, translations

Raw = Mapping[str, Any]
ANYWHERE = ""


@dataclass(frozen=True)
class PlanProblem:
    """One problem. `option`: its name without `args.`, None: of the whole job. `hosts`: where it was found, () if it
    does not depend on a host. `is_fatal`: the training would fail; otherwise it is a warning."""

    code: str
    message: Text
    hint: Text | None = None
    option: str | None = None
    hosts: tuple[str, ...] = ()
    is_fatal: bool = True

    @classmethod
    def of(
        cls,
        code: str,
        option: str | None = None,
        hosts: tuple[str, ...] = (),
        /,
        *,
        hint: Text | None = None,
        is_fatal: bool = True,
        **values: object,
    ) -> PlanProblem:
        """Make the problem with this code: `plan.CODE` and `plan.CODE.hint` of en.json (of the program, or of text/)
        have the English of its message and its hint. `option` is a value of both. `hint`: in place of that one."""
        values = {"option": option, **values}
        if hint is None and f"plan.{code}.hint" in translations("en"):
            hint = listed(f"plan.{code}.hint", **values)
        return cls(code, listed(f"plan.{code}", **values), hint, option, hosts, is_fatal)

    @property
    def text(self) -> Text:
        """The message with its hint, for the log of a rank."""
        if self.hint is None:
            return self.message
        return listed("program.problem", message=self.message, hint=self.hint)


@dataclass(frozen=True)
class Training:
    """One stage of a job. `options`: all, by name. `given`: names that the job file sets.

    `ranks_per_host`: of the fullest host. `family`: npu, cuda or cpu. `chip`: None for a CPU or an unknown device;
    `memory_bytes`: of one device, `host_bytes`: of a host for each of its ranks; None: unknown. `files`: by host and
    path, as node/agent/training_files.py reads them; hosts that did not respond are missing. `written`: directories
    that earlier stages write; ANYWHERE: a stage whose program is not known. `earlier`: the options of earlier stages of
    the same program by their output_dir. `has_deepspeed`: of the ranks; assumed unless it is known. `scales`: whether
    the loss is scaled; None: as the dtype and the chip require, False for a model that only generates. `checkpoints`:
    their directory if the job names it, "" for one of its own.
    """

    program: str
    options: Mapping[str, Any]
    given: frozenset[str]
    ranks: int
    ranks_per_host: int
    hosts: tuple[str, ...]
    family: str
    chip: Chip | None = None
    memory_bytes: int | None = None
    host_bytes: int | None = None
    files: Mapping[str, Mapping[str, Raw]] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    has_workdir: bool = False
    earlier: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    has_deepspeed: bool = True
    scales: bool | None = None
    checkpoints: str = ""

    @property
    def mode(self) -> str:
        return str(self.options.get("mode", "train"))

    def found(self, path: str) -> dict[str, Raw]:
        """Return what each host has at this path; hosts whose facts are unknown are missing."""
        return {host: files[path] for host, files in self.files.items() if path in files}

    def first(self, path: str) -> Raw | None:
        """Return what the first host with this path has there; None: unknown or missing everywhere."""
        return next((raw for raw in self.found(path).values() if "kind" in raw), None)

    def is_from_stage(self, path: str) -> bool:
        """Return whether an earlier stage writes this path, or may write it."""
        whole = posixpath.normpath(path)
        written = [posixpath.normpath(one) for one in self.written if one != ANYWHERE]
        return ANYWHERE in self.written or any(whole == one or whole.startswith(f"{one}/") for one in written)

    def stage_at(self, path: str) -> Mapping[str, Any] | None:
        """Return the options of the earlier stage that writes this directory; None: none is known to."""
        return self.earlier.get(posixpath.normpath(path)) if path else None


Rule = Callable[[Training], Iterator[PlanProblem]]
AUTO = -1
"""The micro_batch_size `auto`, until the plan has chosen one."""


def batch_of_ranks(table: ProgramOptions, given: Mapping[str, Any], ranks: int) -> int | None:
    """Return the global_batch_size where only micro_batch_size is given: the batch of one device, on all of them.

    None: global_batch_size has its given or default value. A packed sequence has a number of samples that only the data
    knows, so packing changes nothing.
    """
    packing = table.find("packing")
    if given.get("packing", packing is not None and packing.default) or "global_batch_size" in given:
        return None
    micro = int(given.get("micro_batch_size") or 0)
    return micro * ranks if micro > 0 and "global_batch_size" in table.options else None


def judge(training: Training, rules: Sequence[Rule]) -> tuple[PlanProblem, ...]:
    """Return all problems of these rules, fatal problems first; equal ones of several hosts once."""
    folded: dict[tuple[Any, ...], PlanProblem] = {}
    for rule in rules:
        for problem in rule(training):
            key = (problem.code, problem.option, problem.message)
            known = folded.get(key)
            hosts = (*(known.hosts if known else ()), *problem.hosts)
            folded[key] = replace(problem, hosts=tuple(dict.fromkeys(hosts)))
    return tuple(sorted(folded.values(), key=lambda problem: not problem.is_fatal))


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


class _Tables(Mapping[str, ProgramOptions]):
    """Option tables by program; one is read when it is first used. `known`: those that are read."""

    def __init__(self, parse: Callable[[str, str, str], ProgramOptions], known: Mapping[str, ProgramOptions]) -> None:
        self._parse, self._known = parse, dict(known)

    def __getitem__(self, name: str) -> ProgramOptions:
        if name not in self._known:
            file = find_programs()[name].options_file
            self._known[name] = self._parse(name, file.read_text(encoding="utf-8"), str(file))
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**find_programs(), **self._known})

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in find_programs()


def load_programs(
    parse: Callable[[str, str, str], ProgramOptions], own: Mapping[str, ProgramOptions] = MappingProxyType({})
) -> Mapping[str, ProgramOptions]:
    """Return the option tables of all programs and `own` by name. `parse` makes one of name, text and file when it is
    needed, and may raise."""
    return _Tables(parse, own)


def package_of(program: str | None) -> str | None:
    """Return the package of a program, as Python names it; None: there is no such program."""
    found = find_programs().get(program or "")
    return None if found is None else found.package


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
    from importlib.metadata import entry_points  # imports `email` and `zipfile`

    found: Any = entry_points()  # a dictionary by group before Python 3.10
    for each in found.select(group=GROUP) if hasattr(found, "select") else found.get(GROUP, ()):
        spec = find_spec(each.value)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            yield Program(each.name, each.value, Path(folder))
