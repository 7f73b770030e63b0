"""Checks of the machine itself: clock, kernel, identity, limits."""

from __future__ import annotations

from typing import Iterator

from ascendrun.core.findings import Finding, Severity
from ascendrun.health.world import Check, World, compare

CLOCK_NOTE_S, CLOCK_WARN_S = 1.0, 10.0
"""Offsets are removed from our own records; TLS, Kerberos and make on shared disks begin to fail at some seconds."""


def check_clock(world: World) -> Iterator[Finding]:
    """Against the nodes' own majority: a head (a laptop) with a wrong clock is no fault of theirs."""
    known = sorted(facts.clock_offset_s for facts in world.facts.values() if facts.clock_offset_s is not None)
    if not known:
        return
    middle = known[(len(known) - 1) // 2]
    for host, facts in world.facts.items():
        if facts.clock_offset_s is None:
            continue
        off_s = facts.clock_offset_s - middle
        if abs(off_s) >= CLOCK_NOTE_S:
            severity = Severity.WARN if abs(off_s) >= CLOCK_WARN_S else Severity.NOTE
            yield Finding("clock-off", severity, (host,), {"seconds": f"{off_s:+.1f}"})


def check_architecture(world: World) -> Iterator[Finding]:
    same = compare({host: facts.arch for host, facts in world.facts.items()})
    for value, hosts in same.others if same else ():
        yield Finding("arch-differs", Severity.WARN, hosts, {"value": value, "majority": same.majority if same else ""},
                      same.evidence() if same else ())


CHECKS = (
    Check("clock", check_clock, "the nodes' clocks agree", ("clock-off",)),
    Check("architecture", check_architecture, "all nodes have one architecture", ("arch-differs",)),
)
