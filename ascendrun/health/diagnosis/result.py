"""Observations about ranks with their strength and proof, and the result: first failure, confidence, consequences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from enum import Enum

from ascendrun.ascend.vocabularies import Value
from ascendrun.core.dataclass import dataclass
from ascendrun.health.diagnosis.evidence import Evidence, HostEvidence, Line, Moment, RankEvidence, moment
from ascendrun.text import Rendered, Text


class Confidence(str, Enum):
    """CERTAIN: the evidence allows one explanation. LIKELY: the best of several. UNKNOWN: there is none."""

    CERTAIN = "certain"
    LIKELY = "likely"
    UNKNOWN = "unknown"


class Role(str, Enum):
    """Role of a rank's end: the first failure, a consequence of it, or teardown after it."""

    INITIATING = "initiating"
    CONSEQUENCE = "consequence"
    TEARDOWN = "teardown"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Proof:
    """A line of evidence. `file`, `offset`: its place in the attempt's spool; None: an observation of ascendrun.
    `at_s`: on the clock of the head node."""

    text: str | Text
    rank: int | None = None
    host: str | None = None
    file: str | None = None
    offset: int | None = None
    at_s: float | None = None

    @property
    def line(self) -> str:
        """Return the text for comparison: a line as written, an observation by its key."""
        return self.text.key if isinstance(self.text, Text) else self.text


@dataclass(frozen=True)
class ChainLink:
    """Ranks whose ends have the same role and code. `lag_s`: seconds from the first failure to the first of these ends,
    None: their clocks are too uncertain. `message`: set by `render` from code and values."""

    role: Role
    code: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    values: Mapping[str, str | Rendered] = field(default_factory=dict)
    at_s: float | None = None
    lag_s: float | None = None
    message: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Reason for an attempt's end. `code`: of text/en.json or the signature catalogue; `ranks` and `hosts`: the
    first to fail, () for none. `caveats`: why it is not certain. `alternatives`: other possible first failures.
    `lag_s`: seconds from the first failure to its first consequence. `retry`: same, exclude, never,
    unknown. `domain`, `scope`, `phase`: of its class (classes), `group`: the name of that scope, `reason_grade`: how
    certain the domain is; "" and UNKNOWN: not known, or of an attempt that did not fail. `why`: what the domain follows
    from, the deciding value first. `rules`: if all ranks only waited, those tried, the applied one last. `outcome`:
    later actions of ascendrun. `anomalies`: of a job that did not fail. `missing`: unreadable evidence. `labels`: names
    of the ranks of roles. `given`: what its hint may name (health.hints). `message`, `cause`, `hint`: set by `render`,
    as texts are."""

    code: str
    confidence: Confidence
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    values: Mapping[str, str | Rendered] = field(default_factory=dict)
    at_s: float | None = None
    time_error_s: float | None = None
    lag_s: float | None = None
    evidence: tuple[Proof, ...] = ()
    chain: tuple[ChainLink, ...] = ()
    caveats: tuple[Text, ...] = ()
    alternatives: tuple[ChainLink, ...] = ()
    retry: str = "unknown"
    domain: str = ""
    scope: str = ""
    group: str = ""
    phase: str = ""
    reason_grade: Confidence = Confidence.UNKNOWN
    why: tuple[Value, ...] = ()
    rules: tuple[str, ...] = ()
    outcome: tuple[Text, ...] = ()
    anomalies: tuple[Text, ...] = ()
    missing: tuple[Text, ...] = ()
    labels: Mapping[int, str] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    cause: str = ""
    hint: str = ""


CAUSE, SYMPTOM, CONSEQUENCE, TEARDOWN = "cause", "symptom", "consequence", "teardown"
TEXT_LIMIT = 1000

SIGN_FROM = 30
"""Weaker symptoms occur in every failure of their kind."""
CREDIBLE = 50
"""From this strength on, an observation is a reason and not only a symptom."""


@dataclass(frozen=True)
class Suspect:
    """A possible reason of the failure, of one rank or of several with the same. `strength`: how certainly it gives the
    reason, on the scale of the signatures. `at`: the earliest time. `sure`: it is a fact, and of the ranks' ends.
    `role`: cause, symptom (of an external fault), consequence (of another rank's end), teardown. `key`: equal for the
    same reason on several ranks. `is_vague`: the kind of end is known, its reason is not. `caveats`: why it may be
    wrong. `rules`: as Diagnosis.rules."""

    code: str
    strength: int
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    at: Moment | None = None
    proofs: tuple[Proof, ...] = ()
    values: Mapping[str, str | Rendered] = field(default_factory=dict)
    sure: bool = True
    role: str = CAUSE
    key: str = ""
    is_vague: bool = False
    caveats: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()

    @property
    def at_s(self) -> float:
        """Return its time; of an unknown one infinity."""
        return self.at.at_s if self.at else float("inf")

    @property
    def is_credible(self) -> bool:
        return self.strength >= CREDIBLE


def proof_of(evidence: Evidence, line: Line, of: RankEvidence | HostEvidence) -> Proof:
    """Return a line of a rank's output, or of a host's log, as a proof."""
    when = moment(evidence, of.host, line.at_s)
    rank = of.rank if isinstance(of, RankEvidence) else None
    at_s = None if when is None else when.at_s
    return Proof(line.text.strip()[:TEXT_LIMIT], rank, of.host, line.file, line.offset, at_s)


_NUMBERS = re.compile(r"\w*\d\w*")
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\S*/\S+")


def normalised(text: str) -> str:
    """Remove the differences between ranks that print the same: numbers, names with numbers, quoted names, paths."""
    return _NUMBERS.sub("#", without_quotes(text))[:160]


def without_quotes(text: str) -> str:
    """Remove quoted names and paths."""
    return QUOTED.sub("'…'", text)


def same_line(code: str, text: str) -> str:
    """Return a key that is equal for one known line of several ranks."""
    return f"{code}|{normalised(text.strip()[:TEXT_LIMIT])}"
