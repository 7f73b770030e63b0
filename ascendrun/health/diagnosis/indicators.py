"""Indicators of a reason: one observation about one rank or host, with its strength and its proof."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field

from ascendrun.core.dataclass import dataclass
from ascendrun.health.diagnosis.evidence import Evidence, HostEvidence, Line, RankEvidence
from ascendrun.health.diagnosis.result import Proof
from ascendrun.health.diagnosis.times import Moment, moment
from ascendrun.text import Rendered

CAUSE, SYMPTOM, CONSEQUENCE, TEARDOWN = "cause", "symptom", "consequence", "teardown"
TEXT_LIMIT = 600

# How certainly each of ascendrun's observations gives the reason, on the scale of the signatures' strength.
STRENGTH: Mapping[str, int] = {
    "node-rebooted": 98,
    "node-directory-gone": 98,
    "host-oom": 96,
    "start-failed": 95,
    "supervisor-lost": 90,
    "exception": 70,
    "crash": 60,
    "abort": 45,
    "killed": 55,
    "device-alarm": 50,
    "host-oom-likely": 58,
    "interrupted": 52,
    "exit-code": 48,
    "terminated": 51,
    "finished-early": 20,
    "suffered": 52,
    "printed": 47,
    "kernel": 58,
    "outlived": 40,
    "child-oom": 75,
}
SIGN_FROM = 30
"""Weaker symptoms occur in every failure of their kind."""
CREDIBLE = 50
"""From this strength on, an observation is a reason and not only a symptom."""


@dataclass(frozen=True)
class Indicator:
    """One observation. `role`: cause, symptom (of an external fault), consequence (of another rank's end), teardown.
    `sure`: the observation is a fact and comes from the end of the rank. `key`: equal for the same
    reason on several ranks. `is_vague`: it fits many reasons."""

    code: str
    role: str
    strength: int
    rank: int
    host: str
    at: Moment | None = None
    proofs: tuple[Proof, ...] = ()
    values: Mapping[str, str | Rendered] = field(default_factory=dict)
    sure: bool = True
    key: str = ""
    is_vague: bool = False

    @property
    def sameness(self) -> str:
        return f"{self.code}|{self.key}"


def proof_of(evidence: Evidence, line: Line, of: RankEvidence | HostEvidence) -> Proof:
    """Return a line of a rank's output, or of a host's log, as a proof."""
    when = moment(evidence, of.host, line.at_s)
    rank = of.rank if isinstance(of, RankEvidence) else None
    at_s = None if when is None else when.at_s
    return Proof(line.text.strip()[:TEXT_LIMIT], rank, of.host, line.file, line.offset, at_s)


_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\S*/\S+")


def normalised(text: str) -> str:
    """Remove the differences between ranks that print the same: numbers, quoted names, paths."""
    return _NUMBERS.sub("#", without_quotes(text))[:160]


def without_quotes(text: str) -> str:
    """Remove quoted names and paths."""
    return _QUOTED.sub("'…'", text)


def same_line(code: str, text: str) -> str:
    """Return a key that is equal for one known line of several ranks."""
    return f"{code}|{normalised(text.strip()[:TEXT_LIMIT])}"
