"""Jobs as controllers report them to the shared queue: what `schedule` reads, and nothing else of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Callable, Dict, Optional, Tuple

from pydantic import ConfigDict, Field, ValidationError

from ascendrun.core.errors import ConflictError
from ascendrun.core.jobs import job as jobs
from ascendrun.core.jobs.fair_share import Account
from ascendrun.core.jobs.reasons import because
from ascendrun.core.jobs.restart import PastAttempt
from ascendrun.core.jobs.schedule import Claim, Contender
from ascendrun.core.jobs.stage_hosts import bound_hosts
from ascendrun.core.reader.strict import Strict

if TYPE_CHECKING:
    from ascendrun.core.jobs.job import Job

JOBS = 1000
"""Jobs that one user may have in the queue at a time; a controller reports those that come first."""
PLACES = 100_000
"""Hosts that the jobs of one report may name, each for itself: they bound the work of a decision."""

OF_JOB = ("name", "state", "since_s", "created_at_s", "priority", "hosts", "spares")
OF_CONTENDER = ("limit_s", "started_s", "preemptible_after_s")
"""Fields of Job and Contender that are those of an Entry."""

Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Host = Annotated[str, Field(min_length=1, max_length=255)]
Hosts = Tuple[Host, ...]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]


class Entry(Strict):
    """A job that uses hosts or waits for them. The names of hosts are those of its user; `places`: the machine of each,
    equal for all users. `examines`: see Request. `before`: hosts of the attempt before; `has_run`: whether any attempt
    has started; `bound`: hosts that have files of it. The others are those of Job and Contender. The user is not
    in it: that is who sent it."""

    model_config = ConfigDict(strict=False)
    id: Id
    name: Annotated[str, Field(max_length=255)]
    state: jobs.State
    since_s: Seconds
    created_at_s: Seconds
    nodes: Count
    wanted_spares: Count = 0
    min_nodes: Count = 0
    examines: bool = False
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = 0
    project: Optional[Annotated[str, Field(max_length=255)]] = None
    limit_s: Optional[Seconds] = None
    started_s: Optional[Seconds] = None
    preemptible_after_s: Optional[Seconds] = None
    hosts: Hosts = ()
    spares: Hosts = ()
    before: Hosts = ()
    has_run: bool = False
    bound: Hosts = ()
    claims: Dict[Host, Tuple[Count, Optional[Count], Optional[Tuple[Count, ...]]]]
    unusable: Hosts = ()
    away: Hosts = ()
    avoided: Hosts = ()
    lost: Hosts = ()
    places: Dict[Host, Host] = {}

    @property
    def is_queued(self) -> bool:
        return self.state is jobs.State.QUEUED

    def contender(self, user: str, job_id: str) -> tuple[Contender, Job | None]:
        """Return what `schedule` takes of a user's job, under an id that is unique for all users, and the job that has
        its files."""
        closed = because("queue-closed")
        source = None
        if self.bound:
            source = _job(f"{job_id}#", self.name, self.created_at_s, hosts=self.bound)
        request = jobs.Request(
            self.nodes,
            self.wanted_spares,
            None if source is None else source.id,
            min_nodes=self.min_nodes,
            examines=self.examines,
        )
        past = (PastAttempt(0, self.before, self.created_at_s if self.has_run else None, self.since_s),)
        job = replace(
            _job(job_id, self.name, self.created_at_s, hosts=self.hosts),
            **{name: getattr(self, name) for name in OF_JOB},
            pool=tuple(self.claims),
            request=request,
            past=past if self.before or self.has_run else (),
        )
        one = Contender(
            job,
            {host: Claim(host, *values) for host, values in self.claims.items()},
            unusable=dict.fromkeys(self.unusable, closed),
            away=dict.fromkeys(self.away, closed),
            avoided=frozenset(self.avoided),
            places=self.places,
            lost=frozenset(self.lost),
            account=Account(user, self.project),
            **{name: getattr(self, name) for name in OF_CONTENDER},
        )
        return one, source


def _job(job_id: str, name: str, created_at_s: float, *, hosts: tuple[str, ...]) -> Job:
    return jobs.Job(job_id, name, "", hosts, grace_s=0.0, start_s=0.0, created_at_s=created_at_s)


def entry_of(one: Contender, find: Callable[[str], Job | None]) -> Entry:
    """Return what is reported of a job."""
    job = one.job
    used = {*job.hosts, *job.spares}
    is_open = job.state is jobs.State.QUEUED or job.lacks_hosts
    claims = {host: claim for host, claim in one.claims.items() if is_open or host in used}
    return Entry.model_construct(
        **{name: getattr(job, name) for name in ("id", *OF_JOB)},
        **{name: getattr(one, name) for name in OF_CONTENDER},
        nodes=job.request.nodes,
        wanted_spares=job.request.spares,
        min_nodes=job.request.min_nodes,
        examines=job.request.examines,
        project=one.account.project,
        before=job.past[-1].hosts if job.past else (),
        has_run=job.has_run,
        bound=tuple(bound_hosts(job, find)),
        claims={host: (claim.count, claim.capacity, claim.ids) for host, claim in claims.items()},
        unusable=tuple(one.unusable),
        away=tuple(one.away),
        avoided=tuple(sorted(one.avoided)),
        lost=tuple(sorted(one.lost)),
        places={host: place for host, place in one.places.items() if host in claims},
    )


def check_count(jobs: int) -> None:
    """Raise ConflictError for more jobs than one user may have."""
    if jobs > JOBS:
        raise ConflictError.of(
            "queue.too-many-jobs",
            "{count} jobs are more than the {limit} that a user may have in the shared queue",
            count=jobs,
            limit=JOBS,
        )


def dump_entries(entries: Sequence[Entry] | None) -> list[dict[str, Any]] | None:
    """Return a report as JSON values; None: as the one before."""
    return None if entries is None else [one.model_dump(mode="json", exclude_defaults=True) for one in entries]


def load_entries(rows: Sequence[Mapping[str, Any]]) -> tuple[Entry, ...]:
    """Read a report. Raises ValueError for what is unreadable, ConflictError for more than one user may have."""
    if not isinstance(rows, list):
        raise ValueError("not a list")
    check_count(len(rows))
    try:
        entries = tuple(Entry.model_validate(row) for row in rows)
    except ValidationError as error:
        raise ValueError(str(error.errors(include_url=False)[0])[:300]) from None
    if sum(len(one.claims) + len(one.places) for one in entries) > 2 * PLACES:
        raise ValueError("too many hosts")
    return entries
