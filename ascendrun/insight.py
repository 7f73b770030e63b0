"""The Python API for looking: what was measured, what happened and why. Beside cluster.py, for the same faces."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Collection, Mapping, Optional, Sequence, Tuple

from ascendrun.core.samples import Newest

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster
    from ascendrun.core.hosts import Host
    from ascendrun.head.topreader import Seen
    from ascendrun.health.topview import TopView

FRESH_S = 60.0
"""A sample that is older says nothing of now."""


def samples(state_dir: Path, *, hosts: Optional[Collection[str]] = None, since_s: Optional[float] = None) -> Newest:
    """The newest sample of every device, host and rank; an empty one when nothing was measured.

    `since_s`: not older than that, None: than a minute. Raises StoreUnusable.
    """
    from ascendrun.head.samplestore import SampleStore
    store = SampleStore.open_for_reading(state_dir)
    if store is None:
        return Newest()
    try:
        return store.newest(since_s=time.time() - FRESH_S if since_s is None else since_s, hosts=hosts)
    finally:
        store.close()


# ---------------------------------------------------------------- top

ASK_EVERY_S = 10.0
"""How often hosts that nobody samples are asked while somebody looks."""
ANSWER_S = 20.0


class TopSource:
    """Looks again and again for `top`: at what is stored, and, for the hosts named of which nothing recent is stored,
    at the hosts themselves. `ask`: (hosts, timeout_s) -> (newest, {host: why it gave no figures})."""

    def __init__(
        self, cluster: "Cluster", hosts: Sequence["Host"] = (), *,
        ask: Optional[Callable[[Sequence["Host"], float], Tuple[Newest, Mapping[str, str]]]] = None,
    ) -> None:
        from ascendrun.head.topreader import TopReader
        self.cluster = cluster
        self.hosts = tuple(hosts)
        self._ask = ask
        self._reader = TopReader(cluster.settings.state_dir)
        self._asking: Optional[threading.Thread] = None
        self._asked_at_s = float("-inf")
        self._answer: Tuple[Newest, Mapping[str, str]] = (Newest(), {})

    def must_ask(self, *, now_s: float) -> bool:
        """Whether a look that waits for answers would ask hosts, which takes a moment."""
        return bool(self._unsampled(self._reader.read(now_s=now_s), now_s))

    def look(self, *, now_s: float, answer_s: float = 0.0) -> "TopView":
        """`answer_s`: so long it waits for the hosts that are asked; 0: what they say is in a later look.

        Raises StoreUnusable, CannotConnect (no controller comes up for the live jobs).
        """
        from ascendrun.health.topjoin import make_view
        seen = self._reader.read(now_s=now_s, liveness=self._liveness())
        asked = self._ask_hosts(self._unsampled(seen, now_s), now_s, answer_s)
        fresh, refused = self._answer
        both = _newer(seen.newest, fresh)
        return make_view(now_s=now_s, devices=both.devices, hosts=both.hosts, ranks=both.ranks, jobs=seen.jobs,
                         names=[host.name for host in self.hosts], refused=refused, was_asked=asked)

    def _liveness(self) -> Mapping[str, Mapping[str, str]]:
        """What the controller knows of hosts; a live job without a controller gets a new one by the asking."""
        from ascendrun.core.errors import DeadlineExceeded
        self.cluster.jobs()
        try:
            status = self.cluster.controller_status(timeout_s=1.0)
        except DeadlineExceeded:
            return {}
        found: Mapping[str, Mapping[str, str]] = (status or {}).get("liveness", {})
        return found

    def _unsampled(self, seen: "Seen", now_s: float) -> Tuple["Host", ...]:
        recent = {one.host for one in seen.newest.devices if now_s - one.at_s < ASK_EVERY_S}
        recent.update(one.host for one in seen.newest.hosts if now_s - one.at_s < ASK_EVERY_S)
        return tuple(host for host in self.hosts if host.name not in recent)

    def _ask_hosts(self, hosts: Sequence["Host"], now_s: float, answer_s: float) -> bool:
        if not hosts:
            return self._answer[1] != {}
        is_asking = self._asking is not None and self._asking.is_alive()
        if not is_asking and now_s - self._asked_at_s >= ASK_EVERY_S:
            self._asked_at_s = now_s
            self._asking = threading.Thread(target=self._hear, args=(hosts,), daemon=True, name="ask hosts")
            self._asking.start()
        if answer_s > 0 and self._asking is not None:
            self._asking.join(answer_s)
        return True

    def _hear(self, hosts: Sequence["Host"]) -> None:
        from ascendrun.core.errors import AscendrunError
        if self._ask is None:
            return
        try:
            newest, refused = self._ask(hosts, ANSWER_S)
        except AscendrunError as error:
            newest, refused = Newest(), {host.name: str(error) for host in hosts}
        self._answer = _newer(self._answer[0], newest), refused


def _newer(one: Newest, other: Newest) -> Newest:
    """The newer sample of each thing."""
    devices = {(it.host, it.device): it for it in sorted((*one.devices, *other.devices), key=lambda it: it.at_s)}
    hosts = {it.host: it for it in sorted((*one.hosts, *other.hosts), key=lambda it: it.at_s)}
    ranks = {(it.job, it.attempt, it.rank): it for it in sorted((*one.ranks, *other.ranks), key=lambda it: it.at_s)}
    return Newest(tuple(devices.values()), tuple(hosts.values()), tuple(ranks.values()))
