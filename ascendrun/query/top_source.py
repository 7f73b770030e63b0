"""Data source of `top`: stored samples, and the hosts themselves if no recent sample is stored."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Callable

from ascendrun.core.samples import Newest
from ascendrun.query.top_reader import TopReader, newest_samples
from ascendrun.text import Text

if TYPE_CHECKING:
    from pathlib import Path

    from ascendrun.core.hosts import Host
    from ascendrun.core.pulse import Sight
    from ascendrun.health.top.view import TopView

QUERY_EVERY_S = 10.0
"""Interval at which hosts that are not sampled otherwise are queried."""
KEPT_S = 30.0
"""A single refresh does not wait for hosts with samples newer than this, since npu-smi alone takes over a second. They
are shown with their age, and queried for the next refresh."""
ANSWER_S = 20.0
LATE_S = 12.0
"""Seconds after ANSWER_S at which the last reply of a controller short of CPU may still arrive."""


class TopSource:
    """Refreshes the data of `top` from stored samples, and from the named hosts themselves if none is recent.

    `sight`: what the controller knows, None: no job is live.
    `query`: (hosts, timeout_s) -> (newest, {host: why it sent no samples}). `request`: the same, without waiting.
    """

    def __init__(
        self,
        state_dir: Path,
        hosts: Sequence[Host] = (),
        *,
        sight: Callable[[], Sight | None],
        query: Callable[[Sequence[Host], float], tuple[Newest, Mapping[str, Text | str]]],
        request: Callable[[Sequence[Host]], None],
        is_patient: bool = False,
    ) -> None:
        self._state_dir = state_dir
        self.hosts = tuple(hosts)
        self._sight, self._query, self._request = sight, query, request
        self._reader = TopReader(state_dir, is_patient=is_patient)
        self._querying: threading.Thread | None = None
        self._queried_at_s = float("-inf")
        self._queried: tuple[Host, ...] = ()
        self._answer: tuple[Newest, Mapping[str, Text | str]] = (Newest(), {})

    def needs_query(self, *, now_s: float) -> bool:
        """Return whether a refresh that waits would query hosts, which takes a moment."""
        from ascendrun.head.state.state_dir import StoreUnusableError

        try:
            newest = newest_samples(self._state_dir, since_s=now_s - KEPT_S)
        except StoreUnusableError:
            newest = Newest()
        return bool(self._unsampled(newest, now_s, KEPT_S))

    def refresh(self, *, now_s: float, wait_s: float = 0.0) -> TopView:
        """Refresh the view. `wait_s`: how long to wait for queried hosts; 0: their samples appear in a later refresh.
        It does not wait if all of them have samples newer than KEPT_S.

        Raises StoreUnusableError, UnreachableError (no controller starts for the live jobs).
        """
        from ascendrun.health.top.join import make_view

        seen = self._reader.read(now_s=now_s, sight=self._sight())
        unsampled, queried = self._unsampled(seen.newest, now_s, QUERY_EVERY_S), False
        if wait_s > 0 and unsampled and not self._unsampled(seen.newest, now_s, KEPT_S):
            self._request(unsampled)
        else:
            queried = self._query_hosts(unsampled, now_s, wait_s)
        fresh, refused = self._answer
        if wait_s > 0 and self._querying is not None and self._querying.is_alive():
            late = Text("top.no-response", "no response within {limit_s:duration}", limit_s=wait_s)
            refused = {**refused, **{host.name: late for host in self._queried}}
        both = _newer(seen.newest, fresh)
        view = make_view(
            now_s=now_s,
            devices=both.devices,
            hosts=both.hosts,
            ranks=both.ranks,
            jobs=seen.jobs,
            ended=seen.ended,
            names=[host.name for host in self.hosts],
            refused=refused,
            was_queried=queried,
        )
        return replace(view, samples_error=seen.samples_error)

    def refresh_once(self, *, now_s: float) -> TopView:
        """Refresh as `refresh`, and wait for the hosts that are queried."""
        return self.refresh(now_s=now_s, wait_s=ANSWER_S + LATE_S)

    def _unsampled(self, newest: Newest, now_s: float, young_s: float) -> tuple[Host, ...]:
        """Return the hosts without a sample newer than `young_s`."""
        recent = {sample.host for sample in newest.devices if now_s - sample.at_s < young_s}
        recent.update(sample.host for sample in newest.hosts if now_s - sample.at_s < young_s)
        return tuple(host for host in self.hosts if host.name not in recent)

    def _query_hosts(self, hosts: Sequence[Host], now_s: float, wait_s: float) -> bool:
        if not hosts:
            return self._answer[1] != {}
        is_querying = self._querying is not None and self._querying.is_alive()
        if not is_querying and now_s - self._queried_at_s >= QUERY_EVERY_S:
            self._queried_at_s, self._queried = now_s, tuple(hosts)
            self._querying = threading.Thread(target=self._receive, args=(hosts,), daemon=True, name="query hosts")
            self._querying.start()
        if wait_s > 0 and self._querying is not None:
            self._querying.join(wait_s)
        return True

    def _receive(self, hosts: Sequence[Host]) -> None:
        from ascendrun.core.errors import AscendrunError

        try:
            newest, refused = self._query(hosts, ANSWER_S)
        except AscendrunError as error:
            newest, refused = Newest(), {host.name: error.message for host in hosts}
        self._answer = _newer(self._answer[0], newest), refused


def _newer(one: Newest, other: Newest) -> Newest:
    """Return the newer sample of each device, host and rank."""
    devices = {(it.host, it.device): it for it in sorted((*one.devices, *other.devices), key=lambda it: it.at_s)}
    hosts = {it.host: it for it in sorted((*one.hosts, *other.hosts), key=lambda it: it.at_s)}
    ranks = {(it.job, it.attempt, it.rank): it for it in sorted((*one.ranks, *other.ranks), key=lambda it: it.at_s)}
    return Newest(tuple(devices.values()), tuple(hosts.values()), tuple(ranks.values()))
