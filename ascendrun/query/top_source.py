"""What `top` refreshes from: stored samples, and the hosts themselves where nothing recent is stored."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable, Protocol

from ascendrun.core.samples import Newest
from ascendrun.query.top_reader import TopReader, newest_samples
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.hosts import Host
    from ascendrun.core.logs.folding import FoldedLine
    from ascendrun.core.settings import Settings
    from ascendrun.health.top.view import TopView

STATUS_S = 1.0
"""How long the controller may take to report what it knows of hosts."""


class SampledCluster(Protocol):
    """What a `TopSource` needs of `ascendrun.Cluster`."""

    settings: Settings

    def jobs(self) -> Any: ...

    def job(self, ref: str) -> Any: ...

    def liveness(self, *, timeout_s: float) -> Mapping[str, Mapping[str, str]]: ...

    def sample_now(self, hosts: Sequence[Host], *, timeout_s: float) -> tuple[Newest, Mapping[str, Text | str]]: ...

    def request_samples(self, hosts: Sequence[Host]) -> None: ...

    @property
    def series(self) -> Callable[..., tuple[Any, Any, Any]]: ...

    @property
    def logs(self) -> Callable[..., Iterable[FoldedLine]]: ...


ASK_EVERY_S = 10.0
"""How often hosts that nobody samples are asked while somebody looks."""
KEPT_S = 30.0
"""Who looks once need not wait for hosts of which figures no older than this are kept: npu-smi alone takes a second
and more. They are shown with their age, and asked for the next look."""
ANSWER_S = 20.0
LATE_S = 12.0
"""So much later than ANSWER_S comes the last word of a head that is short of CPU: by then every host has its answer."""


class TopSource:
    """Looks again and again for `top`: at what is stored, and, for the hosts named of which nothing recent is stored,
    at the hosts themselves. `ask`: (hosts, timeout_s) -> (newest, {host: why it gave no figures})."""

    def __init__(
        self,
        cluster: SampledCluster,
        hosts: Sequence[Host] = (),
        *,
        ask: Callable[[Sequence[Host], float], tuple[Newest, Mapping[str, Text | str]]] | None = None,
        wish: Callable[[Sequence[Host]], None] | None = None,
        is_patient: bool = False,
    ) -> None:
        self.cluster = cluster
        self.hosts = tuple(hosts)
        self._ask = ask or (lambda hosts, timeout_s: cluster.sample_now(hosts, timeout_s=timeout_s))
        self._wish = wish or cluster.request_samples
        self._reader = TopReader(cluster.settings.state_dir, is_patient=is_patient)
        self._asking: threading.Thread | None = None
        self._asked_at_s = float("-inf")
        self._asked: tuple[Host, ...] = ()
        self._answer: tuple[Newest, Mapping[str, Text | str]] = (Newest(), {})

    def must_ask(self, *, now_s: float) -> bool:
        """Whether a look that waits for answers would ask hosts, which takes a moment."""
        from ascendrun.head.state.state_dir import StoreUnusableError

        try:
            newest = newest_samples(self.cluster.settings.state_dir, since_s=now_s - KEPT_S)
        except StoreUnusableError:
            newest = Newest()
        return bool(self._unsampled(newest, now_s, KEPT_S))

    def look(self, *, now_s: float, answer_s: float = 0.0) -> TopView:
        """`answer_s`: so long it waits for the hosts that are asked; 0: what they say is in a later look. It does not
        wait when of all of them younger figures than KEPT_S are there.

        Raises StoreUnusableError, UnreachableError (no controller comes up for the live jobs).
        """
        from ascendrun.health.top.join import make_view

        seen = self._reader.read(now_s=now_s, liveness=self._liveness())
        unsampled, asked = self._unsampled(seen.newest, now_s, ASK_EVERY_S), False
        if answer_s > 0 and unsampled and not self._unsampled(seen.newest, now_s, KEPT_S):
            self._wish(unsampled)
        else:
            asked = self._ask_hosts(unsampled, now_s, answer_s)
        fresh, refused = self._answer
        if answer_s > 0 and self._asking is not None and self._asking.is_alive():
            late = {
                host.name: Text("top.no-response", "no response within {limit_s:duration}", limit_s=answer_s)
                for host in self._asked
            }
            refused = {**refused, **late}
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
            was_queried=asked,
        )
        return replace(view, samples_error=seen.samples_error)

    def look_once(self, *, now_s: float) -> TopView:
        """As `look`; wait for the hosts that are queried."""
        return self.look(now_s=now_s, answer_s=ANSWER_S + LATE_S)

    def _liveness(self) -> Mapping[str, Mapping[str, str]]:
        """What the controller knows of hosts; a live job without a controller gets a new one by the asking."""
        self.cluster.jobs()
        return self.cluster.liveness(timeout_s=STATUS_S)

    def _unsampled(self, newest: Newest, now_s: float, young_s: float) -> tuple[Host, ...]:
        """The hosts of which there is nothing so young."""
        recent = {one.host for one in newest.devices if now_s - one.at_s < young_s}
        recent.update(one.host for one in newest.hosts if now_s - one.at_s < young_s)
        return tuple(host for host in self.hosts if host.name not in recent)

    def _ask_hosts(self, hosts: Sequence[Host], now_s: float, answer_s: float) -> bool:
        if not hosts:
            return self._answer[1] != {}
        is_asking = self._asking is not None and self._asking.is_alive()
        if not is_asking and now_s - self._asked_at_s >= ASK_EVERY_S:
            self._asked_at_s, self._asked = now_s, tuple(hosts)
            self._asking = threading.Thread(target=self._hear, args=(hosts,), daemon=True, name="ask hosts")
            self._asking.start()
        if answer_s > 0 and self._asking is not None:
            self._asking.join(answer_s)
        return True

    def _hear(self, hosts: Sequence[Host]) -> None:
        from ascendrun.core.errors import AscendrunError

        try:
            newest, refused = self._ask(hosts, ANSWER_S)
        except AscendrunError as error:
            newest, refused = Newest(), {host.name: error.message for host in hosts}
        self._answer = _newer(self._answer[0], newest), refused


def _newer(one: Newest, other: Newest) -> Newest:
    """The newer sample of each thing."""
    devices = {(it.host, it.device): it for it in sorted((*one.devices, *other.devices), key=lambda it: it.at_s)}
    hosts = {it.host: it for it in sorted((*one.hosts, *other.hosts), key=lambda it: it.at_s)}
    ranks = {(it.job, it.attempt, it.rank): it for it in sorted((*one.ranks, *other.ranks), key=lambda it: it.at_s)}
    return Newest(tuple(devices.values()), tuple(hosts.values()), tuple(ranks.values()))
