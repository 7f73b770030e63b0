"""What a survey of one host is for, and what a probe is: a question and the reading of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable

Raw = Mapping[str, Any]
Item = Mapping[str, Any]


@dataclass(frozen=True)
class Wish:
    """One host as doctor, the gate or `env` want it looked at.

    `family`: npu, cuda or cpu; None: not known, any device is of interest. `root`: the agent's folder there.
    `python`: what the job's shell finds as its interpreter, None: the job runs no Python. `has_job`: questions in the
    job's own shell make sense. `ports`: to be tried by bind. `folders`: will be written to. `paths`: must be there.
    `is_full`: the slow questions too. `names`: these probes only, None: all that fit.
    """

    host: str
    family: str | None = None
    root: str = ""
    python: str | None = "python3"
    has_job: bool = False
    ports: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    container: str | None = None
    is_full: bool = True
    names: tuple[str, ...] | None = None

    @property
    def may_have_npus(self) -> bool:
        return self.family in (None, "npu")


@dataclass(frozen=True)
class Probe:
    """`ask` makes the survey item (without its name), None: not for this wish.

    `read` turns the raw answer into a value, None: could not look. It is never given an answer with "error" in it,
    unless `reads_errors`; what it raises counts as None.
    """

    name: str
    ask: Callable[[Wish], Item | None]
    read: Callable[[Raw], Any]
    is_full: bool = False
    reads_errors: bool = False
