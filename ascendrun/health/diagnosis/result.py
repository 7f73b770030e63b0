"""The result of a diagnosis: who failed first, why, with which confidence, and what followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ascendrun.text import Text


class Confidence(str, Enum):
    """CERTAIN: the evidence allows one explanation. LIKELY: the best of several. UNKNOWN: there is none."""

    CERTAIN = "certain"
    LIKELY = "likely"
    UNKNOWN = "unknown"


class Role(str, Enum):
    """What the end of a rank was: the first failure, a consequence of it, or teardown after it."""

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
        """The text as what it is compared by: a line as written, an observation by its key."""
        return self.text.key if isinstance(self.text, Text) else self.text


@dataclass(frozen=True)
class ChainLink:
    """Ranks whose ends have one role and one code. `lag_s`: seconds from the first failure to the first of these ends,
    None: their clocks are not known well enough. `message`: filled by `render` from code and values."""

    role: Role
    code: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    values: Mapping[str, str | Text] = field(default_factory=dict)
    at_s: float | None = None
    lag_s: float | None = None
    message: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Why an attempt ended. `code`: of texts/messages.json or of the signature catalogue; `ranks` and `hosts`: the
    first to fail, () for none. `caveats`: why it is not certain. `alternatives`: what else may have been first.
    `lag_s`: seconds from the first failure to the next end that followed from it. `retry`: same, exclude, never,
    unknown. `outcome`: what ascendrun did next. `anomalies`: of a job that did not fail. `missing`: evidence that could
    not be read. `message`, `cause`, `hint`: filled by `render`. Texts are rendered where a person reads them."""

    code: str
    confidence: Confidence
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    values: Mapping[str, str | Text] = field(default_factory=dict)
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
