"""The result of a diagnosis: first failure, reason, confidence, and consequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import Enum

from ascendrun.core.dataclass import dataclass
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
    unknown. `outcome`: later actions of ascendrun. `anomalies`: of a job that did not fail. `missing`: unreadable
    evidence. `message`, `cause`, `hint`: set by `render`. Texts are rendered at output."""

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
    outcome: tuple[Text, ...] = ()
    anomalies: tuple[Text, ...] = ()
    missing: tuple[Text, ...] = ()
    message: str = ""
    cause: str = ""
    hint: str = ""
