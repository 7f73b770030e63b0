"""The messages between controllers, commands and the shared queue of a machine, and those of visible jobs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.core.jobs.reasons import Reason
from ascendrun.head.protocol.messages import Done, Message, Request, converted
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
class StopOrder:
    """The request of an administrator to stop a job of the controller's user. `by`: who requested it."""

    job: str
    by: str
    now: bool = False


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


class Decided(Message):
    """Reply to Contend. `answers`: by job, of those that wait or lack hosts. `stops`: each is given out once."""

    answers: dict[str, Answer] = converted(_load_answers, write=to_json, default_factory=dict)
    stops: tuple[StopOrder, ...] = _listed(StopOrder)


class Contend(Request[Decided], op="queue-contend"):
    """Report the jobs of a controller. `head`: the id of its store; `entries` None: as in the report before."""

    head: str = converted(_load_head)
    entries: tuple[Entry, ...] | None = converted(load_entries, write=dump_entries, default=None)


class QueueRows(Message):
    """Reply to ListQueue."""

    rows: tuple[QueueRow, ...] = _listed(QueueRow)


class ListQueue(Request[QueueRows], op="queue-list"):
    """Query the jobs of all users."""


class StopOther(Request[Done], op="queue-stop"):
    """Stop a job of another user: for administrators. The reply comes when the controller of the user has it."""

    user: str
    job: str
    now: bool = False


class Printed(Message):
    """Reply to PrintVisible. `code`: exit code of the command."""

    code: int


class PrintVisible(Request[Printed], op="queue-print-visible"):
    """Print a job of the controller's user for another one. `command`: show, explain or logs; `options`: its values by
    flag, True: a flag without a value; `lang`: the language of the text."""

    job: str
    command: str
    options: Mapping[str, Any]
    lang: str
