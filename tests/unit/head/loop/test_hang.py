"""What a look for hangs reads of the files and samples of an attempt, and which stacks it keeps."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import JobSpec, Timeouts
from ascendrun.core.jobs.draft import can_restart_without
from ascendrun.core.jobs.job import Job, NodeProgress, Phase, State
from ascendrun.core.jobs.restart import RestartPolicy
from ascendrun.core.samples import RankSample
from ascendrun.head.loop import hang
from ascendrun.head.loop.hang import HangMonitor, JobReader, _Watched, read_newest
from ascendrun.head.protocol.agent_messages import StacksReply
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.state_dir import SPOOL_STACKS, spool_dir
from ascendrun.health.hang import HangWatch, Look, RankLook, Verdict, Windows
from tests.lib.demo_jobs import demo_job
from tests.lib.small_world import N1, N2, World

HOSTS = ("n1", "n2")


class Attempt:
    """Two nodes with two ranks each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now_s = folder, time.time()
        nodes = tuple(
            NodeProgress(host, number, Phase.STARTED, (2 * number, 2 * number + 1)) for number, host in enumerate(HOSTS)
        )
        self.job = demo_job(hosts=HOSTS, pool=HOSTS, run="h-j-0001", state=State.RUNNING, nodes=nodes, world_size=4)
        self.reader = JobReader(folder, self.job)

    def report(self, rank: int, step: int) -> None:
        path = spool_dir(self.folder, "j-0001", 1) / HOSTS[rank // 2] / f"rank-{rank}.metrics.0"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time": self.now_s, "loss": 1.0}) + "\n")

    def sample(self, states: str, *, age_s: float = 1.0) -> None:
        """The states of ranks 0 to 3; a blank: the rank is gone."""
        store = SampleStore.open(self.folder)
        store.add(
            [
                RankSample(self.now_s - age_s, HOSTS[rank // 2], "j-0001", 1, rank, cpu=99.0, state=state)
                for rank, state in enumerate(states)
                if state != " "
            ]
        )
        store.close()

    def look(self) -> Look:
        since_s = self.now_s - 30.0
        newest = read_newest(self.folder, since_s=since_s)
        return self.reader.look(self.job, Look(0.0, 3600.0, {}), newest, since_s=since_s)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("rank-0.out.0", "Process rank: 0, world size: 2, device: cpu\n", (HOSTS[0], 2)),
        ("node-0.err.0", "Process rank: 0, world size: 2, device: cpu\n", (HOSTS[0], 2)),
        ("rank-0.out.0", "started\n", None),
    ],
)
def test_the_world_size_that_the_first_rank_prints_is_read(
    attempt: Attempt, name: str, text: str, expected: tuple[str, int] | None
) -> None:
    path = spool_dir(attempt.folder, "j-0001", 1) / HOSTS[0] / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    attempt.look()
    assert attempt.reader.world == expected


def test_each_rank_has_its_own_steps_and_processes(attempt: Attempt) -> None:
    for rank in range(4):
        attempt.report(rank, 7 - rank)
    attempt.sample("SSTS")
    found = {rank: (one.host, one.step, one.state) for rank, one in attempt.look().ranks.items()}
    assert found == {0: ("n1", 7, "S"), 1: ("n1", 6, "S"), 2: ("n2", 5, "T"), 3: ("n2", 4, "S")}


def test_without_recent_samples_the_ranks_are_those_of_the_plan(attempt: Attempt) -> None:
    attempt.report(0, 7)
    attempt.sample("SSTS", age_s=600.0)
    assert {rank: (one.step, one.cpu) for rank, one in attempt.look().ranks.items()} == {
        0: (7, None),
        1: (None, None),
        2: (None, None),
        3: (None, None),
    }


def test_the_output_of_a_process_that_starts_ranks_is_no_ranks(attempt: Attempt) -> None:
    folder = spool_dir(attempt.folder, "j-0001", 1) / "n1"
    folder.mkdir(parents=True)
    for name in ("node-0.err.0", "rank-0.out.0", "rank-0.out.times.0"):
        (folder / name).write_bytes(b"12345")
    assert {rank: one.output for rank, one in attempt.look().ranks.items()} == {0: 5, 1: 0, 2: 0, 3: 0}


def test_a_stopped_rank_is_the_one_that_differs(attempt: Attempt) -> None:
    for rank in range(4):
        attempt.report(rank, 7)
    attempt.sample("SSTS")
    watch, look = HangWatch(Windows()), attempt.look()
    found: list[Verdict] = []
    for turn in range(20):
        verdict = watch.observe(
            Look(look.at_s + 15.0 * turn, look.age_s, look.ranks, "cpu", interval_s=0.1, tells_phases=True)
        )
        found += [] if verdict is None else [verdict]
    assert found and "rank-differs" in found[-1].signs


@pytest.mark.parametrize(("state", "is_kept"), [(State.RUNNING, True), (State.STOPPING, False)])
def test_stacks_are_kept_while_the_job_runs(
    world: World, monkeypatch: pytest.MonkeyPatch, state: State, is_kept: bool
) -> None:
    """Later ones are not: its ranks were told to abort."""
    job = world.running(N1)
    [runner] = world.jobs
    replies: list[Any] = []
    link: Any = world.get(N1)
    link.is_up = True
    monkeypatch.setattr(link, "call", lambda request, *, deadline_s, done: replies.append(done))
    monitor = HangMonitor(world.context)
    monitor._ask(runner, _Watched(world.folder, job, Windows(), is_reported=False))
    runner.job = replace(runner.job, state=state)
    replies[0](Reply(StacksReply((), at_ns=1)))
    assert (spool_dir(world.folder, job.id, job.attempt) / "n1" / SPOOL_STACKS).exists() == is_kept


@pytest.mark.parametrize(
    ("output", "alone", "is_told"),
    [("step 5 loss 2.0\n", [True], True), ("loading\n", [True], False), ("step 5 loss 2.0\n", [True, False], False)],
)
def test_steps_of_a_rank_that_is_connected_to_no_other_are_those_of_separate_trainings(
    world: World, monkeypatch: pytest.MonkeyPatch, output: str, alone: list[bool], is_told: bool
) -> None:
    monkeypatch.setattr(hang, "ALONE_S", 0.0)
    job = world.running(N1)
    path = spool_dir(world.folder, job.id, job.attempt) / "n1" / "rank-0.out.0"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(output)
    monitor = HangMonitor(world.context)
    monitor._runners = dict(world.context.steps.runners)
    monitor._watched[job.id] = _Watched(world.folder, job, Windows(), is_reported=False)
    for is_alone in alone:
        world.context.steps.note_alone(job.id, job.attempt, "n1", is_alone)
    look_once(monitor, job)
    told = [event for event in world.context.steps.events_of(job.id) if event.code == "separate-trainings"]
    assert [(event.hosts, dict(event.values)) for event in told] == [(("n1",), {"world_size": 1})] * is_told


def test_the_loop_reads_no_output_of_a_rank_that_is_connected_to_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "ALONE_S", 0.0)
    job = world.running(N1)
    path = spool_dir(world.folder, job.id, job.attempt) / "n1" / "rank-0.out.0"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("step 5 loss 2.0\n")
    monitor = HangMonitor(world.context)
    monitor._runners = dict(world.context.steps.runners)
    monitor._watched[job.id] = _Watched(world.folder, job, Windows(), is_reported=False)
    world.context.steps.note_alone(job.id, job.attempt, "n1", True)
    look_once(monitor, job, before_posted=path.unlink)
    assert any(event.code == "separate-trainings" for event in world.context.steps.events_of(job.id))


def look_once(monitor: HangMonitor, job: Job, *, before_posted: Callable[[], None] = lambda: None) -> None:
    """One look as in its thread, and what it posted in the loop."""
    posted: list[Callable[[], None]] = []
    monitor._post = posted.append
    monitor._look([(job, Look(0.0, 3600.0, {}), monitor._runners[job.id].spec)])
    before_posted()
    for call in posted:
        call()


@pytest.mark.parametrize(
    ("losses", "alone", "is_told"),
    [
        (((2.0, 1.5, 1.0),) * 2, [True], True),
        (((2.0, 1.5, 1.0),) * 2, [True, False], False),  # connected: they add up their losses
        (((2.0, 1.5, 1.0),) * 2, [], False),
        (((2.0, 1.5, 1.0), (2.0, 1.6, 1.0)), [True], False),
        (((0.0,) * 3,) * 2, [True], False),
        (((2.0, 1.5),) * 2, [True], False),
    ],
)
@pytest.mark.parametrize("is_printed", [True, False])
def test_equal_losses_of_ranks_without_a_connection_are_those_of_separate_trainings(
    world: World, losses: tuple[tuple[float, ...], ...], alone: list[bool], is_told: bool, is_printed: bool
) -> None:
    """Long before a minute has passed, but not at the first look: the connections are looked for less often."""
    job = world.running(N1)
    folder = spool_dir(world.folder, job.id, job.attempt) / "n1"
    folder.mkdir(parents=True, exist_ok=True)
    for rank, each in enumerate(losses):
        rows = [{"step": step, "loss": loss} for step, loss in enumerate(each, start=1)]
        lines = [f"step {row['step']} loss {row['loss']}" if is_printed else json.dumps(row) for row in rows]
        (folder / f"rank-{rank}.{'out' if is_printed else 'metrics'}.0").write_text("\n".join(lines) + "\n")
    monitor = HangMonitor(world.context)
    monitor._runners = dict(world.context.steps.runners)
    monitor._watched[job.id] = _Watched(world.folder, job, Windows(), is_reported=False)
    for is_alone in alone:
        world.context.steps.note_alone(job.id, job.attempt, "n1", is_alone)
    found = []
    for _ in range(3):
        look_once(monitor, job)
        found.append(any(event.code == "separate-trainings" for event in world.context.steps.events_of(job.id)))
    assert found == [False, is_told, is_told] and not found[0]


def test_the_losses_of_many_steps_take_little_memory_and_the_newest_are_compared(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    folder = spool_dir(tmp_path, "j-0001", 1) / "n1"
    folder.mkdir(parents=True, exist_ok=True)
    attempt.look()  # imports what it needs
    for rank in range(100):
        lines = (json.dumps({"step": step, "loss": 1000.0 / (step + rank * (step < 500))}) for step in range(1, 601))
        (folder / f"rank-{rank}.metrics.0").write_text("\n".join(lines) + "\n")
    tracemalloc.start()
    try:
        attempt.look()
        _, peak = tracemalloc.get_traced_memory()
        traces = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    assert attempt.reader.has_equal_losses(None), "only the first steps differ"
    own = traces.filter_traces(  # threads of other tests of this process may allocate meanwhile
        [tracemalloc.Filter(True, f"*/{name}.py") for name in ("hang", "metrics", "metrics_reader", "decoder")]
    )
    assert peak < 20e6, "the lines of one rank at a time"
    assert 100 * 64 * 16 < sum(one.size for one in own.statistics("filename")) < 100 * 4000


def test_a_framework_that_trains_with_fewer_ranks_than_the_job_says_so_at_the_first_look(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    path = spool_dir(tmp_path, "j-0001", 1) / "n2" / "rank-2.metrics.0"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"event": "start", "world_size": 1}) + "\n")
    attempt.look()
    assert attempt.reader.world == ("n2", 1)


@pytest.mark.parametrize(
    ("hosts_up", "moves", "max_restarts", "limit_s", "ends_after_s"),
    [
        ("n2", False, 0, 3600.0, 3600.0),
        ("n2", False, 0, 900.0, 900.0),
        ("n2", False, 0, None, None),
        ("n2", True, 0, 900.0, None),
        ("", False, 0, 900.0, 24 * 900.0),
        ("n2", False, 3, 900.0, None),
    ],
    ids=["default", "limit", "no-limit", "steps-rise", "head-alone", "restarts"],
)
def test_a_host_that_crashed_ends_a_job_without_restarts_after_a_limit(
    world: World, hosts_up: str, moves: bool, max_restarts: int, limit_s: float | None, ends_after_s: float | None
) -> None:
    spec = JobSpec(name="demo", command=("true",), timeouts=Timeouts(unreachable_s=limit_s))
    job = world.running(N1, N2, spec=spec, policy=RestartPolicy(max_restarts=max_restarts))
    world.up(*(host for host in (N1, N2) if host.name in hosts_up))
    [runner] = world.jobs
    monitor = HangMonitor(world.context)
    watched = _Watched(world.folder, job, Windows(first_step_s=1e6), is_reported=False)
    away = frozenset({"n1", "n2"} - set(hosts_up.split()))
    for at_s in range(0, 30 * 3600, 15):
        ranks = {1: RankLook("n2", at_s if moves else 7)}
        monitor._judge(runner, watched, Look(float(at_s), 60.0, ranks, unreachable=away))
        world.jobs.steps.work_off()
        if runner.job.state is not State.RUNNING:
            break
    reason, ended_s = runner.job.reason, at_s if runner.job.state is State.STOPPING else None
    assert ended_s == (None if ends_after_s is None else ends_after_s + 15)
    assert ended_s is None or (reason.code, reason.hosts) == ("hung-without-host", tuple(sorted(away)))


@pytest.mark.parametrize(
    ("hosts_up", "policy", "hang_s", "ends"),
    [
        (("n3", "n4"), {"has_epochs": True}, 900.0, True),
        (("n3", "n4"), {"on_unreachable_node": "fence"}, 900.0, True),
        (("n3",), {"has_epochs": True}, 900.0, False),
        ((), {"has_epochs": True}, 900.0, False),
        (("n3", "n4"), {"has_epochs": True}, None, False),
        (("n3", "n4"), {"on_unreachable_node": "wait"}, 900.0, False),
        (("n2", "n3", "n4"), {"has_epochs": True}, 900.0, False),
    ],
    ids=["epochs", "fence", "one-host-is-too-few", "head-alone", "no-limit", "wait", "a-rank-would-show-it"],
)
def test_a_job_all_of_whose_hosts_are_gone_starts_again_on_others(
    world: World, hosts_up: tuple[str, ...], policy: dict[str, Any], hang_s: float | None, ends: bool
) -> None:
    spec, others = JobSpec(name="demo", command=("true",), timeouts=Timeouts(hang_s=hang_s)), (Host("n3"), Host("n4"))
    job = world.running(N1, N2, others=others, spec=spec, policy=RestartPolicy(max_restarts=3, **policy))
    world.up(*(host for host in (N1, N2, *others) if host.name in hosts_up))
    [runner] = world.jobs
    monitor = HangMonitor(world.context)
    watched = _Watched(world.folder, job, Windows(hang_s, first_step_s=1e6), is_reported=False)
    for at_s in range(0, 5 * 3600, 15):
        ranks = {0: RankLook("n1", 7), 1: RankLook("n2", 7)}
        away = frozenset({"n1", "n2"} - set(hosts_up))
        look = Look(float(at_s), 60.0, ranks, unreachable=away, may_restart=may_restart(job, away))
        monitor._judge(runner, watched, look)
        world.jobs.steps.work_off()
        if runner.job.state is not State.RUNNING:
            break
    assert (runner.job.state is State.STOPPING) is ends
    if ends:
        assert at_s == 915 and (runner.job.reason.code, runner.job.reason.hosts) == ("hung-without-host", ("n1", "n2"))


def may_restart(job: Job, silent: frozenset[str]) -> bool:
    return can_restart_without(replace(job, unconfirmed=tuple(silent)), tuple(silent), silent)
