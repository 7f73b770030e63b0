"""What a diagnosis says: who failed first, why, how sure that is, and what followed from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Confidence(str, Enum):
    """CERTAIN: the evidence allows nothing else. LIKELY: the best explanation of several. UNKNOWN: none that is worth
    its name."""

    CERTAIN = "certain"
    LIKELY = "likely"
    UNKNOWN = "not known"


class Role(str, Enum):
    """What a rank's end was: where it began, what followed from that, or the clearing away after it."""

    INITIATING = "initiating"
    CONSEQUENCE = "consequence"
    TEARDOWN = "teardown"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Proof:
    """A line that shows it. `file`, `offset`: where it stands in the attempt's spool, None: it is no file's line.
    `at_s`: on the head's clock."""

    text: str
    rank: int | None = None
    host: str | None = None
    file: str | None = None
    offset: int | None = None
    at_s: float | None = None


@dataclass(frozen=True)
class ChainLink:
    """Ranks whose ends have one role and one kind. `lag_s`: how long after the first failure the first of them ended,
    None: their clocks do not tell. `code`: as of the diagnosis, `values` fill its words."""

    role: Role
    code: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    values: Mapping[str, str] = field(default_factory=dict)
    at_s: float | None = None
    lag_s: float | None = None
    says: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The answer. `code`: a name of texts/ or of the signature catalogue; `ranks` and `hosts`: the first to fail,
    () for none. `doubts`: names of reasons why it is not certain; `rivals`: what else may have been first. `says`,
    `why`, `advice`: filled by `tell`.
    `lag_s`: seconds from the first failure to the next one that followed from it. `retry`: same, exclude, never,
    unknown. `decided`: what ascendrun did next. `missing`: what could not be looked at."""

    code: str
    confidence: Confidence
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    at_s: float | None = None
    time_error_s: float | None = None
    lag_s: float | None = None
    proofs: tuple[Proof, ...] = ()
    chain: tuple[ChainLink, ...] = ()
    doubts: tuple[str, ...] = ()
    rivals: tuple[ChainLink, ...] = ()
    retry: str = "unknown"
    decided: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    says: str = ""
    why: str = ""
    advice: str = ""
