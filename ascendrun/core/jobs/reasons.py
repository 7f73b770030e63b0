"""Why a job is in its state, as data: a code, the hosts and ranks concerned, values, and a nested cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Any, Callable, Union

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.text import Rendered, Text, carried, from_json, to_json, translations

Detail = Union[Rendered, str]
"""Report of a node or a tool; str: its output."""


@carried("$reason")
@dataclass(frozen=True)
class Reason(Rendered):
    """Why a job is in its state. `code`: of text/en.json, or of another release. `hosts`, `ranks`: those concerned, of
    its cause if it names none itself. `why`: its cause, None: it has none."""

    code: str
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict, metadata={"read": from_json})
    why: Detail | None = None

    def __hash__(self) -> int:
        return hash((self.code, self.hosts, self.ranks))

    def text(self) -> Text:
        """Return the sentence. Its values are those of the reason; {host} and {rank} are the first of theirs."""
        own = {"host": next(iter(self.hosts), None), "rank": next(iter(self.ranks), None), "count": len(self.hosts)}
        shown = {**own, "hosts": self.hosts, "ranks": self.ranks, "why": self.why, **self.values}
        key = f"reason.{self.code}"
        return Text(key, translations("en").get(key, self.code), **shown)

    def render(self, lang: str) -> str:
        return self.text().render(lang)

    def to_json(self) -> dict[str, Any]:
        return {name: to_json(value) for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Reason:
        return load_dataclass(cls, row)


def because(
    code: str, /, hosts: Iterable[str] = (), ranks: Iterable[int] = (), why: Detail | None = None, **values: Any
) -> Reason:
    """Return the reason `code` of text/en.json. Without hosts and ranks of its own it has those of its cause."""
    assert f"reason.{code}" in translations("en"), code
    hosts, ranks = tuple(hosts), tuple(ranks)
    if isinstance(why, Reason) and not hosts:
        hosts, ranks = why.hosts, ranks or why.ranks
    return Reason(code, hosts, ranks, values, why)


def rename_job(reason: Reason, rename: Callable[[str], str]) -> Reason:
    """Return a reason with another name of the job that it names, if it does."""
    job = reason.values.get("job")
    return replace(reason, values={**reason.values, "job": rename(job)}) if isinstance(job, str) else reason


def hung_at_exit(cause: str, after_s: float | None) -> Detail:
    """Return why a rank counts as hung at exit. A cause of another release is returned unchanged."""
    if cause not in ("finished", "idle"):
        return cause
    return because(f"hang-{cause}-unknown") if after_s is None else because(f"hang-{cause}", after_s=after_s)


def needed(job: str, stage: str | None) -> Reason:
    """Return how a required job is named."""
    return because("needed-job", job=job) if stage is None else because("needed-stage", stage=stage, job=job)


LOST = {
    "rebooted": "node-rebooted",
    "directory-gone": "node-directory-gone",
    "by-user": "node-released",
    "allocation": "allocation-gone",
    "powered-off": "node-powered-off",
    "no-power": "node-without-power",
}
"""Code of the reason for each reason why a node is lost."""


CONFIDENCE: Mapping[str, Text] = {
    "certain": Text("confidence.certain", "certain"),
    "likely": Text("confidence.likely", "likely"),
    "unknown": Text("confidence.unknown", "unknown"),
    "preliminary": Text("confidence.preliminary", "preliminary"),
}


@dataclass(frozen=True)
class FirstFailure:
    """What failed first in an attempt. `reason`: with its hosts, and its ranks, (): the whole host. `confidence`:
    certain, likely or unknown, of the diagnosis; preliminary: by the exits alone, before the diagnosis."""

    reason: Reason
    confidence: str = "preliminary"

    @property
    def is_preliminary(self) -> bool:
        return self.confidence == "preliminary"
