"""No code reads a message: with every English template replaced, the lives of jobs lead to the same facts."""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ascendrun.text as text_module
from ascendrun.cli.outcome import exit_code_of
from ascendrun.core.events import Event
from ascendrun.core.findings import Finding, Severity
from ascendrun.core.jobs import endings, inputs
from ascendrun.core.jobs.draft import Step
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import Exit, Leftover
from ascendrun.core.jobs.lifecycle import advance, resume
from ascendrun.core.jobs.reasons import because
from ascendrun.core.jobs.schedule import check_dependency
from ascendrun.core.notices import notice_of
from ascendrun.core.reachability import unreachable_hosts
from ascendrun.head.state.job_table import StoredJob
from ascendrun.head.state.store import Store
from ascendrun.health.diagnosis import diagnose
from ascendrun.query.evidence import read_evidence
from ascendrun.query.report_reader import read_report
from ascendrun.query.views import make_job_view
from tests.lib.demo_jobs import store_job

HOSTS = ("npu01", "npu02")


class Life:
    """One job, as the controller leads it."""

    def __init__(self, store: Store, name: str, **more: Any) -> None:
        self.store, self.now_s = store, 1000.0
        times = {"grace_s": 30.0, "start_s": 600.0, "created_at_s": 1000.0}
        self.job = store_job(store, name, now_s=1000.0, name=name, hosts=HOSTS, **times, **more)

    def take(self, step: Step) -> None:
        self.store.jobs.save(step.job, step.events, now_s=self.now_s)
        self.job = step.job

    def feed(self, *fed: JobInput) -> None:
        for given in fed:
            self.now_s += 1.0
            self.take(advance(self.job, given, now_s=self.now_s))

    def record(self, code: str, *hosts: str, **values: Any) -> None:
        self.store.jobs.save(self.job, [Event(code, values, hosts, (), self.job.attempt, self.now_s)], now_s=self.now_s)

    def check(self) -> None:
        self.feed(
            inputs.WaitingForNodes(because("nodes-in-use", ["npu01"], job="j-0099", name="other")),
            inputs.NodesFree(HOSTS),
            inputs.NodeReported("npu01", "boot1", 0.0),
            inputs.NodeReported("npu02", "boot2", 0.01),
            inputs.Checked(((Finding("disk-low", Severity.WARN, ("npu01",)), "disk is 93% full"),)),
            inputs.Planned({"npu01": (0, 1), "npu02": (2, 3)}, 4),
        )

    def start(self) -> None:
        self.check()
        self.feed(
            inputs.NodeStaged("npu01"),
            inputs.NodeStaged("npu02"),
            inputs.NodeReady("npu01", 29500),
            inputs.NodeReady("npu02", None),
        )

    def run(self) -> None:
        self.start()
        self.feed(*(inputs.RankStarted(HOSTS[rank // 2], rank, 100 + rank) for rank in range(4)))

    def end(self, code: int) -> None:
        exit = Exit(code, None, int(self.now_s * 1e9), code != 0)
        self.feed(*(endings.RankExited(HOSTS[rank // 2], rank, exit) for rank in range(4)))
        self.feed(endings.NodeEnded("npu01"), endings.NodeEnded("npu02"))


def success(store: Store) -> None:
    life = Life(store, "success")
    life.run()
    life.end(0)


def user_stop(store: Store) -> None:
    life = Life(store, "user-stop")
    life.run()
    life.record("stop-requested", grace_s=30.0)
    life.feed(inputs.StopRequested(False))
    life.end(-15)


def rank_failure(store: Store) -> None:
    life = Life(store, "rank-failure")
    life.run()
    life.feed(
        endings.RankHungAtExit("npu01", 0, "idle", 60.0), endings.RankExited("npu02", 3, Exit(7, None, 10**12, False))
    )
    life.feed(endings.NodeEnded("npu01", (Leftover(4711),)), endings.NodeEnded("npu02"))


def refused(store: Store) -> None:
    life = Life(store, "refused")
    life.check()
    life.feed(inputs.Refused("npu02", "port 29500 is in use"))


def rebooted(store: Store) -> None:
    life = Life(store, "rebooted")
    life.run()
    life.record("unreachable", "npu02")
    life.feed(endings.NodeLost("npu02", "rebooted"), endings.NodeEnded("npu01"))


def start_timeout(store: Store) -> None:
    life = Life(store, "start-timeout")
    life.start()
    life.now_s += 700.0
    life.feed(inputs.RankStarted("npu01", 0, 1), inputs.RankStarted("npu01", 1, 2), inputs.Tick(frozenset(HOSTS)))
    life.feed(endings.NodeEnded("npu01"), endings.NodeEnded("npu02"))


def head_restarted(store: Store) -> None:
    life = Life(store, "head-restarted")
    life.check()
    life.take(resume(life.job, now_s=life.now_s))
    life.run()
    life.feed(endings.SupervisorLost("npu01"), endings.NodeEnded("npu01"), endings.NodeEnded("npu02"))


def need_failed(store: Store) -> None:
    first = Life(store, "p.one", stage="one", pipeline="j-0009")
    first.check()
    first.feed(inputs.Refused(None, because("on-host", ["npu01"], why="no space")))
    second = Life(store, "p.two", stage="two", pipeline="j-0009", needs=first.job.id)
    decision = check_dependency(second.job, first.job)
    assert isinstance(decision, inputs.DependencyFailed)
    second.feed(decision)


def time_limit(store: Store) -> None:
    life = Life(store, "time-limit")
    life.run()
    life.feed(endings.StopStarted("npu01", "limit", "60 s", 1.0))
    life.end(-15)


LIVES: tuple[Callable[[Store], None], ...] = (
    *(success, user_stop, rank_failure, refused, rebooted, start_timeout, head_restarted, need_failed, time_limit),
)


def facts(state_dir: Path, stored: StoredJob, store: Store) -> dict[str, Any]:
    """What is decided and shown of a job, without messages."""
    job, events = stored.job, store.events.of(stored.job.id)
    found: dict[str, Any] = {
        "state": (job.state, job.cause, job.attempt, job.reason.code, job.unconfirmed, job.first_failure),
        "exit": exit_code_of(make_job_view(stored, None)),
        "events": [(event.code, event.hosts, event.ranks, event.attempt, event.severity) for event in events],
        "unreachable": unreachable_hosts(events),
    }
    for attempt in range(1, job.attempt + 1):
        evidence = read_evidence(state_dir, stored, events, attempt=attempt, now_s=9000.0)
        diagnosis = diagnose(evidence)
        found[f"attempt {attempt}"] = (
            evidence.cause,
            evidence.reason.code if evidence.reason is not None else None,
            [(host.host, host.lost, host.reachable) for host in evidence.hosts],
            [event.code for event in evidence.events],
            (diagnosis.code, diagnosis.confidence, diagnosis.hosts, diagnosis.ranks, diagnosis.retry),
        )
    report = read_report(state_dir, job.id, now_s=9000.0)
    found["report"] = (report.state, report.time, report.timeline, [row.attempt for row in report.attempts])
    items = store.events.stream(job=job.id)
    notices = [notice_of(job, item, head_id="h", head="login") for item in items]
    found["notices"] = [(notice.id, notice.kind, notice.state) for notice in notices if notice is not None]
    return found


def live(state_dir: Path) -> dict[str, dict[str, Any]]:
    store = Store.open(state_dir)
    for life in LIVES:
        life(store)
    found = {stored.job.name: facts(state_dir, stored, store) for stored in store.jobs.all()}
    store.close()
    return found


@contextmanager
def reworded(monkeypatch: pytest.MonkeyPatch, replaced: Callable[[str, str], str]) -> Iterator[None]:
    original = text_module.template_of
    with monkeypatch.context() as patch:
        patch.setattr(
            text_module, "template_of", lambda key, english, lang: replaced(key, original(key, english, lang))
        )
        yield


def nonsense(key: str, english: str) -> str:
    """Other words and, in another order, the values of the template."""
    dice = random.Random(key)
    pieces = [
        *re.findall(r"\{[^{}]*\}", english),
        *(dice.choice(("zzz", "failed", "npu01", "j-0001", ":")) for _ in "abc"),
    ]
    dice.shuffle(pieces)
    return " ".join(pieces)


def test_reworded_templates_change_no_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    normal = live(tmp_path / "normal")
    assert len({values["state"][:2] for values in normal.values()}) >= 7
    with reworded(monkeypatch, nonsense):
        assert str(because("running", count=4)) not in ("4 ranks running", "{count:plural rank ranks} running")
        assert live(tmp_path / "nonsense") == normal


@pytest.mark.parametrize("lang", ["pseudo", "zh"])
def test_another_language_changes_no_fact(tmp_path: Path, lang: str) -> None:
    normal = live(tmp_path / "normal")
    text_module.use_language(lang)
    try:
        assert live(tmp_path / lang) == normal
    finally:
        text_module.use_language("en")
