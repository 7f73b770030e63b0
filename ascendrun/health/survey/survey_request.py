"""The request of a survey for one host, and a probe: a survey item and the parser of its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Callable

from ascendrun.core.dataclass import dataclass

Raw = Mapping[str, Any]
Item = Mapping[str, Any]


@dataclass(frozen=True)
class SurveyRequest:
    """Query of doctor, the preflight checks or `env` on one host.

    `device_type`: npu, cuda or cpu; None: unknown, query all devices. `root`: the agent's directory on the host.
    `python`: the interpreter in the shell of the job, None: the job does not use Python. `has_job`: run probes in the
    shell of the job, each for `shell_s` seconds at most. `ports`: to test by bind. `folders`: directories that will be
    written. `paths`: must exist. `training`: of the files that a training reads. `is_full`: include slow probes.
    `names`: run these probes only, None: all that apply.
    """

    host: str
    device_type: str | None = None
    root: str = ""
    python: str | None = "python3"
    has_job: bool = False
    shell_s: float = 8.0
    ports: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    is_full: bool = True
    names: tuple[str, ...] | None = None

    @property
    def may_have_npus(self) -> bool:
        return self.device_type in (None, "npu")


@dataclass(frozen=True)
class Probe:
    """A probe. `ask` returns the survey item (without its name); None: not for this request.

    `read` parses the raw result; None: unknown. It gets results with "error" only if `reads_errors`. An exception
    counts as None.
    """

    name: str
    ask: Callable[[SurveyRequest], Item | None]
    read: Callable[[Raw], Any]
    is_full: bool = False
    reads_errors: bool = False
