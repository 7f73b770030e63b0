"""Times of several hosts on one clock, and their order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from ascendrun.core.dataclass import dataclass
from ascendrun.health.diagnosis.evidence import Evidence, HostEvidence, Line

UNKNOWN_CLOCK_S = 180.0
"""Maximum assumed error of a clock that was never measured; doctor rejects larger errors."""
_STAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[-T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d{3})(?:\.?(\d{3}))?)?")
_QUARTER_S = 900.0


@dataclass(frozen=True)
class Moment:
    """A time. `at_s`: by the head node's clock, +-`error_s`; times of one host are compared without error."""

    at_s: float
    error_s: float
    host: str

    def is_before(self, other: Moment, *, by_s: float = 0.0) -> bool:
        """Return whether it is certainly earlier, by more than `by_s`."""
        error_s = 0.0 if self.host == other.host else self.error_s + other.error_s
        return self.at_s + error_s + by_s < other.at_s


def moment(evidence: Evidence, host: str, node_s: float | None) -> Moment | None:
    """Return the node's time without the host's clock offset; None for None."""
    if node_s is None:
        return None
    clock = evidence.host(host).clock
    error_s = UNKNOWN_CLOCK_S if clock.error_s is None else clock.error_s
    return Moment(clock.to_head_s(node_s), error_s, host)


def earliest(moments: Iterable[Moment | None]) -> Moment | None:
    known = [one for one in moments if one is not None]
    return min(known, key=lambda one: one.at_s, default=None)


def is_after_stop(host: HostEvidence, node_s: float | None, *, slack_s: float = 0.02) -> bool:
    """Return whether an event came after the host's ranks were stopped (same clock, so exact)."""
    return node_s is not None and host.stopped_at_s is not None and node_s > host.stopped_at_s + slack_s


def stamp_of(text: str) -> float | None:
    """Return the time in a log line, interpreted as UTC; None: not found."""
    found = _STAMP.search(text[:200])
    if found is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    try:
        whole = datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None
    return whole + int(found.group(7) or 0) / 1e3 + int(found.group(8) or 0) / 1e6


def with_stamps(lines: Sequence[Line], *, until_s: float | None) -> list[Line]:
    """Return lines of a log in its node's local time, with that time as `at_s`.

    The zone is not logged. The last line is shortly before the end of the process, which determines the zone as a
    multiple of 15 minutes. Without `until_s` the zone is assumed to be UTC.
    """
    stamps = [stamp_of(line.text) for line in lines]
    last = max((stamp for stamp in stamps if stamp is not None), default=None)
    shift_s = 0.0
    if last is not None and until_s is not None:
        shift_s = round((until_s - last) / _QUARTER_S) * _QUARTER_S
    return [line if stamp is None else line._replace(at_s=stamp + shift_s) for line, stamp in zip(lines, stamps)]
