"""Lines of many ranks as one readable stream: split, merge by time, fold what ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class LogLine:
    """One line of one rank, without its newline. `at_s`: arrival on the node in UTC seconds, None: not recorded."""

    at_s: Optional[float]
    host: str
    rank: int
    stream: str
    text: str
    attempt: int = 1
