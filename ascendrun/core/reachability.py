"""Detection of hosts of a running job that become unreachable or reachable again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ascendrun.core.events import Event

UNKNOWN = "UNKNOWN"
"""State of a live job, and liveness of a host, that nothing recent confirms."""
GATHER_S = 10.0
"""Seconds; a shorter interruption is not reported. Hosts behind one failed switch give one event."""

Change = tuple[str, tuple[str, ...]]
"""(code of the event, hosts)."""


class ReachabilityWatch:
    """Reachability of the hosts of one job. `unreachable`: hosts that its events report as unreachable."""

    def __init__(self, unreachable: Iterable[str] = ()) -> None:
        self._unreachable: set[str] = set(unreachable)
        self._lost_s: dict[str, float] = {}
        self._back_s: dict[str, float] = {}

    def update(self, liveness: Mapping[str, str], *, now_s: float) -> tuple[Change, ...]:
        """Return the changes. `liveness` by host: ALIVE, UNREACHABLE or another state; `now_s`: monotonic."""
        for host, word in liveness.items():
            is_known = host in self._unreachable
            lost, back = word == "UNREACHABLE" and not is_known, word == "ALIVE" and is_known
            for since_s, is_so in ((self._lost_s, lost), (self._back_s, back)):
                if is_so:
                    since_s.setdefault(host, now_s)
                else:
                    since_s.pop(host, None)
        changes = ("unreachable", _ripe(self._lost_s, now_s)), ("reachable", _ripe(self._back_s, now_s))
        self._unreachable = self._unreachable.union(changes[0][1]).difference(changes[1][1])
        return tuple(change for change in changes if change[1])


def unreachable_hosts(events: Iterable[Event]) -> set[str]:
    """Return the hosts that are unreachable after these events, oldest first."""
    hosts: set[str] = set()
    for event in events:
        if event.code == "unreachable":
            hosts.update(event.hosts)
        elif event.code == "reachable":
            hosts.difference_update(event.hosts)
    return hosts


def _ripe(since_s: dict[str, float], now_s: float) -> tuple[str, ...]:
    """Return and remove all hosts of the table once the first has waited long enough, else ()."""
    if not since_s or now_s - min(since_s.values()) < GATHER_S:
        return ()
    hosts = tuple(sorted(since_s))
    since_s.clear()
    return hosts
