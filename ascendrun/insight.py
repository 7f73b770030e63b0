"""The Python API for looking: what was measured, what happened and why. Beside cluster.py, for the same faces."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from ascendrun.core.samples import Newest

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster
    from ascendrun.core.event_lines import StoryLine
    from ascendrun.core.hosts import Host
    from ascendrun.head.state.settings import Settings
    from ascendrun.head.state.store import Store
    from ascendrun.health.report.data import Report
    from ascendrun.health.top.view import TopView
    from ascendrun.query.bundle_job import Bundle
    from ascendrun.query.explain import Explanation
    from ascendrun.query.notice_view import NoticeTargetView, NoticeTestResult

GATHER_S = 180.0
"""More than all deadlines of a gathering together."""
STATUS_S, LOOK_STATUS_S = 3.0, 1.0
"""How long the controller may take to say what it knows of hosts; of one look among many, which is not worth a wait."""
FRESH_S = 60.0
"""A sample that is older says nothing of now."""


def samples(state_dir: Path, *, hosts: Collection[str] | None = None, since_s: float | None = None) -> Newest:
    """The newest sample of every device, host and rank; an empty one when nothing was measured.

    `since_s`: not older than that, None: than a minute. Raises StoreUnusableError.
    """
    from ascendrun.head.state.sample_store import SampleStore

    store = SampleStore.open_for_reading(state_dir)
    if store is None:
        return Newest()
    try:
        return store.newest(since_s=time.time() - FRESH_S if since_s is None else since_s, hosts=hosts)
    finally:
        store.close()


def fresh_samples(
    cluster: Cluster, hosts: Sequence[Host], timeout_s: float = 20.0, *, family: str | None = None
) -> tuple[Newest, Mapping[str, str]]:
    """How these hosts and their devices are at this moment: asks each one's agent, and keeps what they say.

    Also {host: why it gave no figures}; every host is in one of the two within `timeout_s`. `family`: npu or cuda,
    None: whatever is there. Raises UnreachableError (no controller comes up), DeadlineExceededError.
    """
    from dataclasses import asdict

    from ascendrun.core.samples import DeviceSample, HostSample
    from ascendrun.head.protocol.control_socket import ControlClient

    devices, figures, refused = [], [], {}
    if not hosts:
        return Newest(), {}
    fields = {"hosts": [asdict(host) for host in hosts], "timeout_s": timeout_s, "family": family}
    cluster.ensure_controller()
    with ControlClient(cluster.settings.state_dir) as client:
        answers = [header for header, _ in client.stream("sample", fields, timeout_s=timeout_s + 10.0)]
    for header in answers:
        if header.get("refused"):
            refused[str(header["host"])] = str(header["refused"])
            continue
        pids = [None if one["pids"] is None else tuple(one["pids"]) for one in header["devices"]]
        devices += [DeviceSample(**{**one, "pids": of_it}) for one, of_it in zip(header["devices"], pids)]
        figures += [HostSample(**one) for one in header["hosts"]]
    return Newest(devices=tuple(devices), hosts=tuple(figures)), refused


def wish_samples(cluster: Cluster, hosts: Sequence[Host], timeout_s: float = 20.0) -> None:
    """Has these hosts asked as `fresh_samples` does, and does not wait: what they say is kept. A host that is being
    asked is not asked twice. Raises UnreachableError (no controller comes up)."""
    from dataclasses import asdict

    from ascendrun.head.protocol.control_socket import ControlClient

    cluster.ensure_controller()
    with ControlClient(cluster.settings.state_dir) as client:
        client.post(
            "sample",
            {"hosts": [asdict(host) for host in hosts], "timeout_s": timeout_s, "family": None, "unless_asked": True},
        )


# ---------------------------------------------------------------- top

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
        cluster: Cluster,
        hosts: Sequence[Host] = (),
        *,
        ask: Callable[[Sequence[Host], float], tuple[Newest, Mapping[str, str]]] | None = None,
        wish: Callable[[Sequence[Host]], None] | None = None,
        is_patient: bool = False,
    ) -> None:
        from ascendrun.query.top_reader import TopReader

        self.cluster = cluster
        self.hosts = tuple(hosts)
        self._ask, self._wish = ask or partial(fresh_samples, cluster), wish or partial(wish_samples, cluster)
        self._reader = TopReader(cluster.settings.state_dir, is_patient=is_patient)
        self._asking: threading.Thread | None = None
        self._asked_at_s = float("-inf")
        self._asked: tuple[Host, ...] = ()
        self._answer: tuple[Newest, Mapping[str, str]] = (Newest(), {})

    def must_ask(self, *, now_s: float) -> bool:
        """Whether a look that waits for answers would ask hosts, which takes a moment."""
        from ascendrun.head.state.state_dir import StoreUnusableError

        try:
            newest = samples(self.cluster.settings.state_dir, since_s=now_s - KEPT_S)
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
            late = {host.name: f"no answer within {answer_s:g} s" for host in self._asked}
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

    def _liveness(self) -> Mapping[str, Mapping[str, str]]:
        """What the controller knows of hosts; a live job without a controller gets a new one by the asking."""
        self.cluster.jobs()
        return _liveness(self.cluster, timeout_s=LOOK_STATUS_S)

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
            newest, refused = Newest(), {host.name: str(error) for host in hosts}
        self._answer = _newer(self._answer[0], newest), refused


def _newer(one: Newest, other: Newest) -> Newest:
    """The newer sample of each thing."""
    devices = {(it.host, it.device): it for it in sorted((*one.devices, *other.devices), key=lambda it: it.at_s)}
    hosts = {it.host: it for it in sorted((*one.hosts, *other.hosts), key=lambda it: it.at_s)}
    ranks = {(it.job, it.attempt, it.rank): it for it in sorted((*one.ranks, *other.ranks), key=lambda it: it.at_s)}
    return Newest(tuple(devices.values()), tuple(hosts.values()), tuple(ranks.values()))


# ---------------------------------------------------------------- events and notices


def event_kinds(state_dir: Path) -> tuple[str, ...]:
    """The kinds of lines that the stories of this state folder hold."""
    from ascendrun.head.state.store import Store

    store = Store.open_for_reading(state_dir)
    if store is None:
        return ()
    try:
        return store.event_kinds()
    finally:
        store.close()


class EventStream:
    """The lines of one job's story, of a pipeline's, or of all, as they are written; whether a controller runs does not
    matter.

    `pipeline`: its id; the jobs of all its stages, later ones too. `since_s`: no older lines; `kinds`: only these. Its
    calls raise StoreUnusableError.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        job: str | None = None,
        pipeline: str | None = None,
        since_s: float | None = None,
        kinds: Collection[str] | None = None,
    ) -> None:
        self._state_dir, self._job, self._pipeline = state_dir, job, pipeline
        self._since_s, self._kinds = since_s, kinds
        self._after = 0
        self._store: Store | None = None

    def new_lines(self) -> tuple[StoryLine, ...]:
        """What was written since the last call; at first, what is there."""
        from ascendrun.core.event_lines import StoryLine

        store = self._open()
        if store is None:
            return ()
        lines = []
        while True:
            batch = store.stream(
                after=self._after, job=self._job, pipeline=self._pipeline, since_s=self._since_s, kinds=self._kinds
            )
            lines += [StoryLine(line.number, line.at_s, line.job, line.kind, line.text) for line in batch]
            if not batch:
                return tuple(lines)
            self._after = batch[-1].number

    def job_hosts(self) -> Mapping[str, tuple[str, ...]]:
        """The names of every job's hosts, by its id."""
        store = self._open()
        return store.job_hosts() if store is not None else {}

    def job_names(self) -> Mapping[str, str]:
        """The name of every job, by its id."""
        store = self._open()
        return store.job_names() if store is not None else {}

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _open(self) -> Store | None:
        from ascendrun.head.state.store import Store

        if self._store is None:
            self._store = Store.open_for_reading(self._state_dir)
        return self._store


def notice_targets(settings: Settings) -> tuple[NoticeTargetView, ...]:
    """Where notices go, and how the last one fared there; credentials never."""
    from ascendrun.head.state.notice_settings import NoticeSettings
    from ascendrun.query.notice_view import view_targets

    return view_targets(settings.notices or NoticeSettings(), settings.state_dir)


def try_notices(settings: Settings, *, name: str | None = None) -> tuple[NoticeTestResult, ...]:
    """Sends a test notice to one target, or all. Raises NotFoundError, ConflictError."""
    from ascendrun.head.state.notice_settings import NoticeSettings
    from ascendrun.query.notice_view import send_tests

    return send_tests(settings.notices or NoticeSettings(), name=name)


def count_states(state_dir: Path) -> Mapping[str, int]:
    """How many jobs stand in each state, ended ones too. Raises StoreUnusableError."""
    from collections import Counter

    from ascendrun.head.state.store import Store

    store = Store.open_for_reading(state_dir)
    if store is None:
        return {}
    try:
        return Counter(state.value for state in store.states().values())
    finally:
        store.close()


# ---------------------------------------------------------------- report


def report(state_dir: Path, ref: str, *, now_s: float) -> Report:
    """What one job did, where its time went and what it cost, as of now. Raises NotFoundError, ConflictError,
    StoreUnusableError."""
    from ascendrun.query.report_reader import find_report

    return find_report(state_dir, ref, now_s=now_s)


# ---------------------------------------------------------------- explain


def explain(cluster: Cluster, ref: str, *, attempt: int | None = None, lang: str = "en") -> Explanation:
    """Why a job's attempt ended, in words; of a job that runs, what is odd about it. Raises NotFoundError,
    ConflictError."""
    from ascendrun.query.explain import explain_job

    return explain_job(
        cluster.settings.state_dir,
        ref,
        attempt=attempt,
        lang=lang,
        now_s=time.time(),
        liveness=_liveness(cluster, timeout_s=STATUS_S),
    )


def verdict(state_dir: Path, ref: str, *, lang: str = "en") -> str | None:
    """One sentence: who failed first and why. None where there is none: it did not fail, or nobody knows."""
    from ascendrun.core.errors import NotFoundError
    from ascendrun.query.explain import verdict_line

    try:
        return verdict_line(state_dir, ref, lang=lang, now_s=time.time())
    except NotFoundError:
        return None


def gather(cluster: Cluster, ref: str, *, attempt: int | None = None) -> Iterator[tuple[str, str | None]]:
    """Brings what the job's hosts have of the attempt (None: the newest): (host, None) when it is here, (host, why not)
    else, each host as it comes. Raises NotFoundError, ConflictError, UnreachableError (no controller comes up),
    DeadlineExceededError."""
    from ascendrun.head.protocol.control_socket import ControlClient

    fields = {"job": cluster.job(ref).job.id, "attempt": attempt}
    cluster.ensure_controller()
    with ControlClient(cluster.settings.state_dir) as client:
        for header, _ in client.stream("gather", fields, timeout_s=GATHER_S):
            yield str(header["host"]), header.get("problem")


def _liveness(cluster: Cluster, *, timeout_s: float) -> Mapping[str, Mapping[str, str]]:
    """By job and host, as the running controller sees it; {} where none runs, or it is too busy to tell."""
    from ascendrun.core.errors import DeadlineExceededError

    try:
        status = cluster.controller_status(timeout_s=timeout_s)
    except DeadlineExceededError:
        return {}
    found: Mapping[str, Mapping[str, str]] = (status or {}).get("liveness", {})
    return found


# ---------------------------------------------------------------- bundle


def bundle(
    cluster: Cluster,
    ref: str,
    *,
    path: Path | None = None,
    layout: str = "ascendrun",
    with_logs: bool = True,
    max_bytes: int,
    is_dry: bool = False,
    environ: Mapping[str, str],
) -> Bundle:
    """Packs what is known of a job, credentials taken out. `path` None: <layout>-<job>.tar.gz in this folder;
    `layout`: ascendrun or ascend-fd; `is_dry`: only tells what would be in it. `environ`: variables whose values are
    hidden when their names say "secret". Raises NotFoundError, ConflictError, StoreUnusableError, CannotWriteError."""
    from ascendrun.query.bundle_job import Wish, bundle_job

    wish = Wish(path=path, layout=layout, with_logs=with_logs, max_bytes=max_bytes, is_dry=is_dry)
    return bundle_job(cluster.settings.state_dir, ref, wish, notices=cluster.settings.notices, environ=environ)
