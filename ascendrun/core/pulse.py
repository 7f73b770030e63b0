"""Pulse of the controller: what it knew about live jobs, and when; what may be stated about a job at this moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.core.reachability import UNKNOWN
from ascendrun.text import Text

PULSE_S = 5.0
"""Seconds between two pulses while nothing changes."""
FRESH_S = 15.0
"""Seconds after which neither a pulse nor a message of a host describes the present."""


@dataclass(frozen=True)
class Clock:
    """One moment. `at_s`: UTC, may be set back. `boot_s`: seconds since the boot `boot_id`, never set back."""

    at_s: float
    boot_s: float
    boot_id: str


@dataclass(frozen=True)
class HostPulse:
    """A host of a live job. `liveness`: ALIVE, SUSPECT, UNREACHABLE or UNKNOWN. `heard_at_s`: UTC time of its last
    message, None: it has sent none. `ranks_alive`: its ranks without an end."""

    liveness: str = UNKNOWN
    heard_at_s: float | None = None
    ranks_alive: int = 0


@dataclass(frozen=True)
class JobPulse:
    """A live job. `staged`: while it is STAGING, by host (bytes sent, total)."""

    state: str
    hosts: Mapping[str, HostPulse] = field(default_factory=dict)
    staged: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stall:
    """The controller's loop was held for `seconds`, until `at_s`. `handler`: the function that it had called;
    `line`: where it was seen most often; "": it was not seen."""

    seconds: float
    at_s: float
    handler: str = ""
    line: str = ""

    def describe(self) -> Text:
        return Text(
            "controller.stall",
            "the controller's loop was held for {seconds:.1f} s in {handler}, mostly at {line}",
            seconds=self.seconds,
            handler=self.handler or "-",
            line=self.line or "-",
        )


@dataclass(frozen=True)
class Pulse:
    """What the controller `pid` of `release` knew at `at_s` (`boot_s` after the boot `boot_id`), by live job.

    `late_s`: by how much its loop was late at most in the last minute; `stall`: the last time that it was held."""

    at_s: float
    boot_s: float
    boot_id: str
    pid: int
    release: str = ""
    jobs: Mapping[str, JobPulse] = field(default_factory=dict)
    late_s: float = 0.0
    stall: Stall | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Pulse:
        """Return the pulse that `to_json` wrote. Raises AttributeError, TypeError, ValueError."""
        return load_dataclass(Pulse, row)

    def age_s(self, now: Clock) -> float | None:
        """Return its age, whatever happened to the clock; None: from before the last boot."""
        age_s = now.boot_s - self.boot_s
        return age_s if self.boot_id == now.boot_id and age_s >= -1.0 else None

    def is_fresh(self, now: Clock) -> bool:
        age_s = self.age_s(now)
        return age_s is not None and age_s <= FRESH_S


@dataclass(frozen=True)
class JobSight:
    """What may be stated about a live job. `is_known`: its controller wrote about it within FRESH_S.

    `seen_at_s`: when it last did, by the present clock; None: never. `problem`: why it does not now. By host:
    `liveness` (UNKNOWN if the host's last message is too old) and `heard_at_s`, by the present clock.
    """

    is_known: bool
    seen_at_s: float | None = None
    problem: Text | str | None = None
    liveness: Mapping[str, str] = field(default_factory=dict)
    heard_at_s: Mapping[str, float | None] = field(default_factory=dict)
    staged: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    now_s: float = 0.0


@dataclass(frozen=True)
class Sight:
    """The newest pulse, seen `now`. `problem`: why no newer one can be had. `is_new`: a controller was asked for it, so
    rows of the store that were read before may be older than what it repaired when it started."""

    pulse: Pulse | None
    now: Clock
    problem: Text | str | None = None
    is_new: bool = False

    @property
    def is_known(self) -> bool:
        return self.pulse is not None and self.pulse.is_fresh(self.now)

    def job(self, job_id: str) -> JobSight:
        """Return what may be stated about a live job: the only place that turns a pulse into the present."""
        pulse, now = self.pulse, self.now
        if pulse is None:
            return JobSight(False, problem=self.problem, now_s=now.at_s)
        age_s = pulse.age_s(now)
        shift_s = 0.0 if age_s is None else now.at_s - age_s - pulse.at_s
        job = pulse.jobs.get(job_id) or JobPulse("")
        heard = {host: None if one.heard_at_s is None else one.heard_at_s + shift_s for host, one in job.hosts.items()}
        liveness = {host: _liveness(one, heard[host], now.at_s) for host, one in job.hosts.items()}
        return JobSight(
            self.is_known,
            pulse.at_s + shift_s if job.state else None,
            None if self.is_known else self.problem,
            liveness if self.is_known else dict.fromkeys(liveness, UNKNOWN),
            heard,
            job.staged,
            now.at_s,
        )


def _liveness(host: HostPulse, heard_at_s: float | None, now_s: float) -> str:
    if host.liveness == "UNREACHABLE":
        return host.liveness
    return host.liveness if heard_at_s is not None and now_s - heard_at_s <= FRESH_S else UNKNOWN
