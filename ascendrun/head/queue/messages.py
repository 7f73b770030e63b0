"""The messages between controllers, commands and the shared queue of a machine, and commands for jobs of others."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.core.jobs.reasons import Reason
from ascendrun.core.machines import QueueDrain
from ascendrun.head.protocol.messages import Message, Request, converted
from ascendrun.head.queue.entries import Entry, dump_entries, load_entries
from ascendrun.text import to_json

QUEUE_NAME = "queue.sock"


@dataclass(frozen=True)
class Answer:
    """What the queue decided about a job in its state since `since_s`. `hosts`: where it starts; `spares`: claimed with
    them, or all those of a job that lacks hosts; `reason`: why it waits, or is preempted, None: neither; `start_s`:
    when it is expected to start, None: not known."""

    since_s: float
    hosts: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    reason: Reason | None = None
    start_s: float | None = None


@dataclass(frozen=True)
class QueueRow:
    """A job in the shared queue, as every user sees it. `state`: UNKNOWN if its controller is silent, `last_state`: as
    it reported. `nodes`: hosts that it requests; `hosts`: those that it uses, as its user names them; `reason`: why it
    waits, None: it does not; `start_s`: see Answer. `age_s`: since its controller reported it."""

    user: str
    project: str | None
    job: str
    name: str
    state: str
    last_state: str
    nodes: int
    hosts: tuple[str, ...]
    reason: Reason | None
    created_at_s: float
    start_s: float | None
    age_s: float

    @property
    def id(self) -> str:
        return f"{self.user}/{self.job}"


def _load_answers(rows: Any) -> dict[str, Answer]:
    return {job: load_dataclass(Answer, row) for job, row in rows.items()}


def _listed(kind: type) -> Any:
    return converted(lambda rows: tuple(load_dataclass(kind, row) for row in rows), write=to_json, default=())


def _load_head(text: Any) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise ValueError("no id of a store")
    return str(text)


def _load_used(row: Mapping[str, float]) -> Mapping[str, float]:
    used = {str(project): float(seconds) for project, seconds in row.items()}
    if not all(len(project) <= 255 and 0.0 <= seconds < math.inf for project, seconds in used.items()):
        raise ValueError("no use of projects")
    return used


class Decided(Message):
    """Reply to Contend. `answers`: by job, of those that wait or lack hosts; `drains`: see Contend; `half_life_s`: of
    what accounts have used."""

    answers: dict[str, Answer] = converted(_load_answers, write=to_json, default_factory=dict)
    drains: tuple[QueueDrain, ...] = _listed(QueueDrain)
    half_life_s: float = 0.0


class Contend(Request[Decided], op="queue-contend"):
    """Report the jobs of a controller. `head`: the id of its store; `entries` None: as in the report before. The reply
    has drains of administrators since `drains_s` (UTC seconds). `used`: device-seconds of all jobs by project, "":
    none, as they count now; `drains`: that this machine knows, of an administrator's controller. Both once for each
    connection, to a server that may not know them."""

    head: str = converted(_load_head)
    entries: tuple[Entry, ...] | None = converted(load_entries, write=dump_entries, default=None)
    drains_s: float = 0.0
    used: Mapping[str, float] | None = converted(_load_used, default=None)
    drains: tuple[QueueDrain, ...] = _listed(QueueDrain)


class QueueRows(Message):
    """Reply to ListQueue."""

    rows: tuple[QueueRow, ...] = _listed(QueueRow)


class ListQueue(Request[QueueRows], op="queue-list"):
    """Query the jobs of all users."""


class QueueDrains(Message):
    """Reply to DrainHosts: all drains, also those that have ended."""

    drains: tuple[QueueDrain, ...] = _listed(QueueDrain)


class DrainHosts(Request[QueueDrains], op="queue-drain"):
    """Drain machines for all users, or end that: for administrators. Of each closure only what an administrator decides
    counts: reason, times and `moves`. Without `drains`: query them, for all users."""

    drains: tuple[QueueDrain, ...] = _listed(QueueDrain)


class Admins(Message):
    """Reply to QueryAdmin. `names`: all administrators, groups as @GROUP."""

    is_admin: bool
    names: tuple[str, ...] = converted(tuple)


class QueryAdmin(Request[Admins], op="queue-admin"):
    """Query whether the user `uid` is an administrator of the queue."""

    uid: int


class Ran(Message):
    """Reply to RunForOther. `code`: exit code of the command."""

    code: int


class RunForOther(Request[Ran], op="queue-run"):
    """Run a command for jobs of the controller's user, for another user. `options`: its values by flag, True: a flag
    without a value; `words`: arguments after the jobs; `into`: the directory of the other user for files; `lang`: the
    language of the text."""

    command: str
    jobs: tuple[str, ...] = converted(tuple)
    options: Mapping[str, Any]
    words: tuple[str, ...] = converted(tuple, default=())
    into: str = ""
    lang: str = "en"
