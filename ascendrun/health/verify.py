"""What ascendrun reads of the tools of a cluster, and which of its claims about NPUs were measured there.

Most of ascendrun's knowledge of NPUs comes from documents and pasted output. `verify` compares it with a real cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, fields
from enum import Enum
from typing import Any

from ascendrun.ascend.kinds import FILES, PARSERS, kind_of
from ascendrun.ascend.reading import Answer
from ascendrun.core.dataclass import dataclass
from ascendrun.core.node_messages import Failure, with_texts
from ascendrun.health.checks.npu import is_on
from ascendrun.health.survey.facts import NodeFacts
from ascendrun.health.survey.probes import PROBES, read_results
from ascendrun.health.survey.scripts import read_sections
from ascendrun.text import Text

MOST_LINES = 3
RELEASED_MB = 512
"""Above the memory in use before: an idle device's own use varies."""


class Outcome(str, Enum):
    """READ: all lines understood. PARTLY: some were not. UNREAD: nothing was. REFUSED: the tool printed an error that
    ascendrun knows, or did not return. UNKNOWN: the probe has no value."""

    READ = "read"
    PARTLY = "partly"
    UNREAD = "unread"
    REFUSED = "refused"
    UNKNOWN = "unknown"


class ClaimOutcome(str, Enum):
    MEASURED = "measured"
    FAILED = "failed"
    UNVERIFIED = "unverified"


@dataclass(frozen=True)
class Reading:
    """One output of a host, or with `kind` "probe" the value of a whole probe. `label`: what was asked.

    `lines`: those that were not understood, at most MOST_LINES.
    """

    host: str
    kind: str
    label: str
    outcome: Outcome
    lines: tuple[str, ...] = ()


Output = tuple[Reading, str]
"""A reading, and the output that was read; "" of a probe."""


@dataclass(frozen=True)
class Claim:
    """A claim of ascendrun's documents about NPUs. `values`: as measured, by host where they differ by host."""

    name: str
    outcome: ClaimOutcome
    why: Text | str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class VerifyReport:
    """`is_passed`: everything was read, and no claim failed. `archive`: the file that was written, None: none."""

    is_passed: bool
    hosts: tuple[str, ...]
    unreached: Mapping[str, Failure]
    readings: tuple[Reading, ...]
    claims: tuple[Claim, ...]
    archive: str | None = None


def read_output(kind: str, text: str) -> tuple[Outcome, tuple[str, ...]]:
    """Return how far a parser understands an output, and the lines that it does not."""
    if kind in FILES and not text.strip():
        return Outcome.READ, ()
    answer = PARSERS[kind](text)
    if answer.unparsed:
        return Outcome.PARTLY if _has_value(answer) else Outcome.UNREAD, answer.unparsed[:MOST_LINES]
    if answer.errors:
        return Outcome.REFUSED, tuple(error.text for error in answer.errors[:MOST_LINES])
    return (Outcome.READ if _has_value(answer) else Outcome.UNREAD), ()


def _has_value(answer: Answer) -> bool:
    names = [one.name for one in fields(answer) if one.name not in ("errors", "unparsed")]  # type: ignore[arg-type, unused-ignore]
    return any(getattr(answer, name) not in (None, (), {}) for name in names)


def read_host(host: str, results: Mapping[str, Any]) -> Iterator[Output]:
    """Yield the readings of one host's raw survey results. Never raises."""
    values = read_results(results)
    for probe in PROBES:
        raw = results.get(probe.name)
        if not isinstance(raw, Mapping):
            continue
        is_known = values.get(probe.name) is not None
        yield Reading(host, "probe", probe.name, Outcome.READ if is_known else Outcome.UNKNOWN), ""
        yield from read_text(host, str(with_texts(dict(raw)).get("out") or ""))


def read_text(host: str, output: str) -> Iterator[Output]:
    """Yield the readings of the sections in the output of a device script; () if it has none."""
    for section in read_sections(output):
        kind = kind_of(section.labels[0])
        if kind is None:
            continue
        label = " ".join(section.labels)
        outcome, lines = (Outcome.REFUSED, ()) if section.hung else read_output(kind, section.text)
        yield Reading(host, kind, label, outcome, lines), section.text


def make_verify_report(
    readings: Iterable[Reading], claims: Iterable[Claim], hosts: Iterable[str], unreached: Mapping[str, Failure]
) -> VerifyReport:
    found, claims = tuple(readings), tuple(claims)
    is_read = all(one.outcome in (Outcome.READ, Outcome.REFUSED, Outcome.UNKNOWN) for one in found)
    has_failed = any(one.outcome is ClaimOutcome.FAILED for one in claims)
    return VerifyReport(is_read and not has_failed, tuple(hosts), unreached, found, claims)


# ---------------------------------------------------------------- claims

CLAIMS: Mapping[str, Text] = {
    "hccl-start": Text("verify.hccl-start", "ranks on all hosts start and exchange data"),
    "device-speed": Text("verify.device-speed", "plan: matrix products reach the assumed fraction of the chip's peak"),
    "device-lease": Text("verify.device-lease", "every device of a running job is leased, and used by this job only"),
    "plan-memory": Text("verify.plan-memory", "plan: memory of a device that a small rank takes, with its matrices"),
    "memory-release": Text("verify.memory-release", "memory of a device is free again after its rank was killed"),
}
"""What is measured, in this order."""


def unmeasured(why: Text | str, *names: str) -> tuple[Claim, ...]:
    """Return these claims (all, if none is named) as not verified."""
    return tuple(Claim(name, ClaimOutcome.UNVERIFIED, why) for name in names or CLAIMS)


def claim_speed(speeds: Mapping[str, float], facts: Mapping[str, NodeFacts], assumed: tuple[float, float]) -> Claim:
    """Compare TFLOP/s by host with the fractions of the chip's peak that `plan` assumes."""
    chips = {host: facts[host].npu.chip for host in speeds if host in facts}
    peaks = {host: chip.peak_tflops for host, chip in chips.items() if chip is not None and chip.peak_tflops}
    shares = {host: round(speeds[host] / peak, 3) for host, peak in peaks.items()}
    if not shares:
        return unmeasured(Text("verify.no-peak", "the peak of these devices is not known"), "device-speed")[0]
    is_met = min(shares.values()) >= assumed[0]
    outcome = ClaimOutcome.MEASURED if is_met else ClaimOutcome.FAILED
    return Claim("device-speed", outcome, None, {"share_of_peak": shares, "tflops": dict(speeds), "assumed": assumed})


def claim_lease(during: Mapping[str, NodeFacts], planned: Mapping[str, int]) -> Claim:
    """Compare leases with processes while a job runs. `planned`: its number of devices by host."""
    leased = {host: _leased(facts) for host, facts in during.items()}
    used = {host: _used(facts) for host, facts in during.items()}
    is_met = all(len(leased[host]) == count and used[host] <= leased[host] for host, count in planned.items())
    values = {
        name: {host: sorted(ids) for host, ids in of.items()} for name, of in (("leased", leased), ("used", used))
    }
    return Claim("device-lease", ClaimOutcome.MEASURED if is_met else ClaimOutcome.FAILED, None, values)


def _leased(facts: NodeFacts) -> set[int]:
    return {one.device for one in facts.leases or () if one.type == "npu" and one.device is not None}


def _used(facts: NodeFacts) -> set[int]:
    """Return the devices with a process of an attempt."""
    table, chips = facts.npu.table, facts.npu.chips
    owned = {pid for pid, owner in (table.owners if table is not None else {}).items() if owner.tag is not None}
    rows = (facts.npu.info.processes if facts.npu.info is not None else None) or ()
    return {device for device, chip in chips.items() if any(row.pid in owned and is_on(row, chip) for row in rows)}


def memory_of(facts: Mapping[str, NodeFacts]) -> dict[str, dict[int, int]]:
    """Return the MB in use of each device of each host, as far as known."""
    return {
        host: {device: chip.hbm_used_mb for device, chip in one.npu.chips.items() if chip.hbm_used_mb is not None}
        for host, one in facts.items()
    }


def taken_mb(before: Mapping[str, Mapping[int, int]], now: Mapping[str, Mapping[int, int]]) -> int | None:
    """Return the most that a device has in use beyond `before`; None: unknown."""
    more = [
        used - before[host][device] for host, of in now.items() for device, used in of.items() if device in before[host]
    ]
    return max(more, default=None)
