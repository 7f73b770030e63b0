"""Reading of a job file for `submit`: by the running controller, which has the models loaded, or in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError
from ascendrun.head.protocol.control_messages import JobRead, ReadJob
from ascendrun.head.protocol.control_socket import ControlClient
from ascendrun.query.packing import pack_all

if TYPE_CHECKING:
    from ascendrun.core.jobs.job import Job
    from ascendrun.core.settings import Settings
    from ascendrun.head.survey.submission import Submission

READ_S = 10.0
"""Seconds that the controller has to read a job file; then this process reads it."""


@dataclass(frozen=True)
class StageChoice:
    """Which stages of a file run: `only` these, (): all, from `first` to `last`. `pipeline`: one to resume, with its
    jobs `before`; None: a new one, or a file without stages."""

    only: Sequence[str] = ()
    first: str | None = None
    last: str | None = None
    pipeline: str | None = None
    before: Sequence[Job] = ()

    @property
    def is_whole(self) -> bool:
        return not (self.only or self.first or self.last or self.pipeline)

    def choose(self, found: Sequence[Submission]) -> Sequence[Submission]:
        """Raises NotFoundError for a stage that is not in the file, ConflictError if none is left to run."""
        from ascendrun.query.submit import choose_stages, stages_to_repeat

        first = self.first if self.pipeline is None else None
        chosen = choose_stages(found, only=self.only, first=first, last=self.last)
        if self.pipeline is None and chosen[0].stage is None:
            return chosen
        return stages_to_repeat(chosen, self.before, self.first, self.pipeline)


def check_blocks(settings: Settings) -> None:
    """Raise InvalidInputError for what is wrong with the settings of the controller: it would only log it."""
    if not settings.blocks:
        return
    from ascendrun.core.notices.settings import read_notices
    from ascendrun.core.power_settings import read_power
    from ascendrun.core.share_settings import read_share

    read_power(settings)
    read_share(settings)
    read_notices(settings)


def read_jobs(settings: Settings, request: ReadJob, stages: StageChoice, *, engine: str | None) -> JobRead:
    """Return the jobs of a file that `stages` selects. The paths of `request` are as the user wrote them.

    Raises InvalidInputError with every problem; NotFoundError and ConflictError of `stages`.
    """
    read = read_by_controller(settings.state_dir, request) if stages.is_whole and not engine else None
    if read is not None:
        return read
    from ascendrun.head.survey.job_reading import needs_stack, read_submissions

    found = stages.choose(read_submissions(settings, request, engine=engine))
    return JobRead(tuple(one.to_json() for one in found), needs_stack(found))


def read_by_controller(state_dir: Path, request: ReadJob) -> JobRead | None:
    """Return the jobs of a file as the controller reads it. None: none runs, or this process has to read it. A file
    with problems is such a one: they are named here, with the paths as the user wrote them."""
    hostfile = None if request.hostfile is None else os.path.abspath(request.hostfile)
    try:
        with ControlClient(state_dir) as client:
            absolute = replace(request, file=os.path.abspath(request.file), hostfile=hostfile)
            return client.call(absolute, timeout_s=READ_S)
    except AscendrunError:
        return None


def with_trees(read: JobRead, state_dir: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the submissions with their directories packed. Raises InvalidInputError, StoreUnusableError."""
    packed = pack_all([one["spec"] for one in read.submissions], state_dir)
    return tuple({**one, "trees": [vars(tree) for tree in trees]} for one, trees in zip(read.submissions, packed))
