"""Random bad luck, seeded: two jobs at a time on two of three hosts run, restart and stop while ranks, nodes, cables,
files, agents and the controller fail, and an operator drains hosts.

A minute of seed 1 runs always, three seeds of 20 minutes with --thorough. `--soak SEED,SECONDS` runs another one.
The second job of a round uses simulated NPUs; with seeds 2, 5, 8… it runs in containers of the engine `docker`.
`--history FILE` keeps a line for each round, and a later run of the seed goes on after the last one; `--soak
SEED,SECONDS,ROUND` begins with that round, to see a violation again.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import leftovers
import pytest
from invariants import check_ended, states_of
from scenes import Scene, await_that, run_text

from ascendrun.core.jobs.job import State
from ascendrun.core.jobs.restart import WITHOUT_PROGRESS, Kind
from ascendrun.sim.ascend.scenario import Scenario
from tests.lib.vcluster import containers
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.fuse_server import ERRORS
from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.npus import install_on
from tests.lib.vcluster.processes import await_true

Ascendrun = Any
END_S = 300.0
MORE = "nodes: 2\ncheckpoint: {grace_period_s: 1}\ntimeouts: {start_s: 30}\n"
MAX_RESTARTS = 20
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
HOSTS = 3
SLOTS = 4
"""Of each host, so that both jobs of two ranks fit on it."""
SIM, SET_ENV = "ASCENDRUN_SIM_NPU=auto", "/usr/local/Ascend/ascend-toolkit/set_env.sh"


@dataclass(frozen=True)
class Fault:
    """`is_harmless`: a job that runs when it comes, and that nobody stops, ends SUCCEEDED all the same, without a
    restart. `wherever`: also one that does not run yet. `spares_disk`: the files of the host are what they were.
    `is_counted`: a restart that follows uses one of the job's. Jobs without restarts stay where they are (`moves`)."""

    begin: Callable[[Scene, str], object]
    is_harmless: bool = True
    wherever: bool = False
    spares_disk: bool = True
    is_counted: bool = True
    moves: bool = False


def kill_controller(scene: Scene, _host: str) -> None:
    """And its guard: the next command starts both."""
    leftovers.kill(leftovers.controllers(scene.cluster, scene.ascendrun.state_dir))


def kill_guarded_controller(scene: Scene, _host: str) -> None:
    """The controller only: its guard starts another one."""
    leftovers.kill([one for one in [scene.controller()] if one is not None])


def kill_rank(scene: Scene, host: str) -> None:
    """The first rank on the host, without its children."""
    ranks = [one for one in scene.cluster.processes(host) if "rank.py" in one.argv and one.environ.get("RANK")]
    key = lambda one: (one.environ["ASCENDRUN_RUN_ID"], one.environ["RANK"], one.pid)  # noqa: E731
    leftovers.kill(sorted(ranks, key=key)[:1])


def command(*words: str) -> Callable[[Scene, str], object]:
    def ask(scene: Scene, host: str) -> None:
        scene.ascendrun(words[0], host, *words[1:], code=0)

    return ask


def _files(name: str) -> Callable[[Scene, str], object]:
    return lambda scene, host: scene.cluster.node_fs(host).fail(name)


FAULTS: Mapping[str, Fault] = {
    "cut": Fault(lambda scene, host: scene.cluster.cut(host)),
    "freeze": Fault(lambda scene, host: scene.cluster.freeze(host)),
    "block-in": Fault(lambda scene, host: scene.cluster.block(HEAD, host)),
    "block-out": Fault(lambda scene, host: scene.cluster.block(host, HEAD)),
    "loss": Fault(lambda scene, host: scene.cluster.loss(host, 30)),
    "fill": Fault(lambda scene, host: scene.cluster.fill(host)),
    "agent": Fault(lambda scene, host: leftovers.kill_some(scene.cluster, host, "serve")),
    "controller": Fault(kill_guarded_controller, wherever=True),
    "guard": Fault(kill_controller, wherever=True),
    "sshd": Fault(lambda scene, host: scene.cluster.sshd_restart(host), wherever=True),
    **{f"files-{name}": Fault(_files(name)) for name in ERRORS},
    "files-hang": Fault(lambda scene, host: scene.cluster.node_fs(host).hang()),
    "supervisor": Fault(lambda scene, host: leftovers.kill_some(scene.cluster, host, "supervise"), is_harmless=False),
    "reboot": Fault(lambda scene, host: scene.cluster.reboot(host, keep_disk=True), is_harmless=False),
    "recreate": Fault(lambda scene, host: scene.cluster.recreate(host), is_harmless=False, spares_disk=False),
    "wipe": Fault(lambda scene, host: scene.cluster.wipe(host), is_harmless=False, spares_disk=False),
    "crash": Fault(lambda scene, host: scene.cluster.crash(host), is_harmless=False),
    "rank": Fault(kill_rank, is_harmless=False),
    "drain": Fault(command("drain"), wherever=True),
    "drain-now": Fault(command("drain", "--now"), is_harmless=False, is_counted=False, moves=True),
    "undrain": Fault(command("undrain", "--no-check"), wherever=True),
}


@dataclass
class Round:
    """What one round does, all of it from its seed. `stops`: which of the two jobs is stopped, None: none."""

    seed: int
    number: int
    faults: Sequence[tuple[str, str, float, float]] = ()
    """(name, host, seconds after the one before, seconds that it lasts)"""
    beat_s: tuple[float, float] = (0.0, 0.0)
    waits: bool = True
    """Whether both jobs run before the first fault comes."""
    stops: int | None = None
    restarts: bool = False
    """Whether the jobs may restart."""
    ends: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, list[str]] = field(default_factory=dict)
    """By job, KIND/RULE of each failure."""
    violation: str = ""

    def line(self) -> str:
        return json.dumps({**vars(self), "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}) + "\n"


def make_round(seed: int, number: int, hosts: Sequence[str]) -> Round:
    lot = random.Random(f"{seed}-{number}")
    harmless = sorted(name for name, fault in FAULTS.items() if fault.is_harmless)
    restarts = lot.random() < 0.7
    names = harmless if lot.random() < 0.4 else sorted(FAULTS)
    return Round(
        seed,
        number,
        [
            (lot.choice(names), lot.choice(hosts), lot.uniform(0, 3), lot.uniform(0.5, 12))
            for _ in range(lot.choice((1, 1, 2)))
        ],
        (lot.uniform(3, 10), lot.uniform(3, 10)),
        lot.random() < 0.8,
        lot.choice((0, 1)) if lot.random() < 0.2 else None,
        restarts,
    )


def next_round(history: Path, seed: int) -> int:
    rows = [json.loads(line) for line in (history.read_text().splitlines() if history.exists() else [])]
    return max([row["number"] + 1 for row in rows if row["seed"] == seed], default=0)


class Npus:
    """The second job of each round uses simulated NPUs."""

    options: Sequence[str] = ()
    env: Mapping[str, str] = {}

    def __init__(self, scene: Scene) -> None:
        self._cluster = scene.cluster

    def fit(self, host: str) -> None:
        """Also a host that booted, or has a new disk."""
        if not self._cluster.path(host, "/dev/davinci0").exists():
            install_on(self._cluster, host, Scenario(cards=SLOTS, number=self._cluster.hosts.index(host) + 1))

    def alter(self, job_file: Path) -> None:
        text = job_file.read_text().replace("type: cpu", "type: npu").replace("[", f'["env", "{SIM}", ', 1)
        job_file.write_text(f"{text}setup: source {SET_ENV}\nchecks: {{skip: [hccn-tool]}}\n")


class Containers:
    """The second job of each round runs in containers."""

    options = ("--engine", "docker")

    def __init__(self, scene: Scene) -> None:
        self._cluster, first = scene.cluster, scene.cluster.hosts[0]
        self._image = containers.run(self._cluster, first, "docker", "save", containers.IMAGE, check=True).stdout
        site = {"type": "ssh", "hostfile": str(scene.folder / "all.hosts")}
        config = scene.folder / "ascendrun" / "config.yaml"
        config.parent.mkdir()
        config.write_text(json.dumps({"engines": {"docker": containers.engine(site, "docker")}}))
        self.env = {"XDG_CONFIG_HOME": str(scene.folder)}

    def fit(self, host: str) -> None:
        """Also a host that booted, or has a new disk."""
        if not any(map(containers.is_daemon, self._cluster.processes(host))):
            containers.start_daemon(self._cluster, host)
            containers.await_daemon(self._cluster, host)
            containers.run(self._cluster, host, "docker", "load", stdin=self._image, check=True)

    def alter(self, job_file: Path) -> None:
        """The file of a job is the same in a container."""


class Soak:
    """Rounds on one cluster, until the time is over."""

    def __init__(self, scene: Scene, history: Path, mix: type[Npus | Containers]) -> None:
        self.scene, self.history = scene, history
        self.hostfile = scene.folder / "all.hosts"
        self.hostfile.write_text(scene.cluster.hostfile(slots=SLOTS))
        self.mix = mix(scene)
        self._fit()

    def _fit(self) -> None:
        for host in filter(self.scene.cluster.is_up, self.scene.cluster.hosts):
            self.mix.fit(host)

    def run(self, seed: int, seconds: float, first: int | None) -> int:
        """Returns how many rounds there were; raises AssertionError at the first violation."""
        number = start = next_round(self.history, seed) if first is None else first
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s or number == start:
            one = make_round(seed, number, self.scene.cluster.hosts)
            try:
                self._play(one)
            except Exception as broken:
                one.violation = f"{type(broken).__name__}: {broken}"[:2000]
                raise
            finally:
                if one.violation or len(one.ends) == len(one.beat_s):  # else it was interrupted, and is to come again
                    with open(self.history, "a") as file:
                        file.write(one.line())
                    print(one.line(), end="", flush=True)
            number += 1
        return number - start

    def _play(self, one: Round) -> None:
        scene = self.scene
        for host in scene.cluster.hosts:
            scene.cluster.node_fs(host)
        jobs = [self._start(f"{name}-{one.number}", beat_s, one.restarts) for name, beat_s in zip("ab", one.beat_s)]
        if one.waits:
            await_true(lambda: all(self._runs(job) for job in jobs), deadline_s=30)
        early = [job for job in jobs if not self._runs(job)]
        for name, host, before_s, during_s in one.faults:
            self._idle(jobs, before_s)
            FAULTS[name].begin(scene, host)
            if not FAULTS[name].is_harmless:
                self._fit()
            self._idle(jobs, during_s)
        if one.stops is not None:
            scene.ascendrun("stop", "--no-wait", jobs[one.stops])
        off = [host for host in scene.cluster.hosts if not scene.cluster.is_up(host)]
        if off:
            scene.cluster.reboot(*off, keep_disk=True)
        scene.cluster.clean()
        self._fit()
        self._open_hosts(one)
        for job in jobs:
            scene.ascendrun("wait", job, timeout=END_S)
            events = scene.show(job)["events"]
            decisions = [event["values"] for event in events if event["code"] in ("restarting", "gave-up")]
            one.decisions[job] = [f"{values['kind']}/{values['rule']}" for values in decisions]
            one.ends[job] = scene.state(job)
        for number, job in enumerate(jobs):
            await_that(lambda job=job: not scene.show(job)["unconfirmed_hosts"], f"{job} is confirmed")
            self._check(one, job, is_stopped=one.stops == number, is_early=job in early)
        await_that(lambda: not self._rows("leases", "-H", self.hostfile), "nothing is leased")
        await_that(lambda: {row["state"] for row in self._machines()} == {"free"}, "all hosts are free")

    def _rows(self, name: str, *words: object) -> list[dict[str, Any]]:
        (rows,) = [value for value in self.scene.ascendrun.ask(name, *words).values() if isinstance(value, list)]
        return rows

    def _machines(self) -> list[dict[str, Any]]:
        return self._rows("nodes", "--all")

    def _open_hosts(self, one: Round) -> None:
        """As an operator does when all is well again."""
        drained = {host for name, host, *_ in one.faults if name.startswith("drain")}
        for row in self._machines():
            assert row["state"] != "quarantined", row
            if row["state"] in ("drained", "draining"):
                assert drained & set(row["names"]), row
                await_that(lambda name=row["names"][0]: self._opens(name), f"{row} is opened")

    def _opens(self, host: str) -> bool:
        done = self.scene.ascendrun("undrain", host)
        print(run_text(done) if done.returncode else "", end="")
        return done.returncode == 0

    def _start(self, name: str, beat_s: float, restarts: bool) -> str:
        words = ("family", "alone", "print", "ready", "beat", round(beat_s, 1), "print", "done")
        more = f"{MORE}restart: {{max_restarts: {MAX_RESTARTS if restarts else 0}, backoff_s: [1, 2]}}\n"
        file = self.scene.job(name, *words, slots=SLOTS, more=more)
        if name.startswith("a"):
            return self.scene.start(file)
        self.mix.alter(file)
        return self.scene.start(file, *self.mix.options, env=self.mix.env)

    def _runs(self, job: str) -> bool:
        files = self.scene.spooled(job, "rank-*.out.0")
        return len(files) >= 4 and all(path.read_bytes().startswith(b"ready") for path in files)

    def _idle(self, jobs: Sequence[str], seconds: float) -> None:
        """Let time pass, but not after both have ended."""
        await_true(lambda: all(self.scene.stored_state(job) in ENDED for job in jobs), deadline_s=seconds)

    def _check(self, one: Round, job: str, *, is_stopped: bool, is_early: bool) -> None:
        scene, faults = self.scene, [FAULTS[name] for name, *_ in one.faults]
        changed = [host for name, host, *_ in one.faults if not FAULTS[name].spares_disk]
        if changed and scene.cluster.has_shared_home:
            changed = list(scene.cluster.hosts)
        state, decisions = one.ends[job], one.decisions[job]
        harmful = [fault for fault in faults if not fault.is_harmless and (one.restarts or not fault.moves)]
        is_settled = all(fault.wherever or not is_early for fault in faults)
        is_alone = sum(not fault.wherever for fault in faults) <= 1
        told = f"{job}: {state} {decisions} after {one.faults}: {scene.show(job)['events']}"
        if is_settled and (not harmful or (one.restarts and is_alone)):
            assert state in (("SUCCEEDED", "STOPPED") if is_stopped else ("SUCCEEDED",)), told
            assert len(decisions) <= len(harmful), told
            assert all(fault.is_counted for fault in harmful) or decisions in ([], ["preempted/not-counted"]), told
        if state == "FAILED" and one.restarts and State.RUNNING in states_of(scene, job):
            assert decisions and may_give_up(decisions), told
        assert one.restarts or len(decisions) == 0, told
        check_ended(scene, job, state=state, but=changed)
        self._check_attempts(job)
        if state == "SUCCEEDED" and not any(name.startswith("fi") for name, *_ in one.faults):
            folder = scene.ascendrun.state_dir / "jobs" / job / f"attempt-{scene.show(job)['job']['attempt']}"
            found = sorted((path.name, path.read_bytes()) for path in folder.glob("*/rank-*.out.[0-9]*"))
            newest = {name.rpartition(".")[0]: data[-40:] for name, data in found}  # wiped: a new generation
            assert len(newest) == 4 and all(data.endswith(b"done\n") for data in newest.values()), f"{job}: {newest}"

    def _check_attempts(self, job: str) -> None:
        """No rank lived when one of the next attempt began."""
        scene = self.scene
        crowded = [path for path in scene.spooled(job, "rank-*.out.*") if b"not alone" in path.read_bytes()]
        assert not crowded, [path.read_text() for path in crowded]
        lives = [scene.lives(job, number + 1) for number in range(scene.show(job)["job"]["attempt"])]
        for earlier, later in zip(lives, lives[1:]):
            if earlier and later:
                assert max(last for _, last in earlier) < min(first for first, _ in later), (job, lives)


def may_give_up(decisions: Sequence[str]) -> bool:
    """Whether the last decision is one of the table in docs/recovery.md. The jobs make no progress that is known."""
    kind, _, rule = decisions[-1].partition("/")
    restarts = sum(one.endswith("/again") for one in decisions)
    limit = WITHOUT_PROGRESS[Kind(kind)]
    return {
        "no-progress": limit is not None and restarts >= limit,
        "repeated": kind in ("unknown", "oom", "user") and restarts >= 1,
        "cause": kind == "user",
    }.get(rule, False)


@pytest.fixture
def history(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(request.config.getoption("--history", default=None) or tmp_path / "history.jsonl")


@pytest.fixture
def soak_of(ascendrun: Ascendrun, cluster_of: Callable[..., VirtualCluster], history: Path) -> Callable[[int], Soak]:
    def start(seed: int) -> Soak:
        cluster = cluster_of(HOSTS, shared_home=seed % 3 == 0, has_containers=seed % 3 == 2)
        return Soak(Scene(ascendrun.on(cluster), cluster), history, Containers if seed % 3 == 2 else Npus)

    return start


def test_a_history_is_gone_on_with(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    assert next_round(history, 1) == 0
    history.write_text(make_round(1, 0, ["a"]).line() + make_round(1, 1, ["a"]).line())
    assert (next_round(history, 1), next_round(history, 2)) == (2, 0)
    assert make_round(1, 7, ["a", "b"]) == make_round(1, 7, ["a", "b"]), "a round follows from its seed"


def test_jobs_may_give_up_only_by_the_table() -> None:
    assert may_give_up(["unknown/again", "unknown/no-progress"]) and may_give_up(["user/cause"])
    assert may_give_up(["infra/again", "infra/again", "infra/again", "infra/no-progress"])
    for decisions in (["infra/again", "infra/no-progress"], ["preempted/no-progress"], ["infra/cause"]):
        assert not may_give_up(decisions), decisions


@pytest.mark.timeout(0)
def test_a_minute_of_bad_luck_breaks_no_promise(soak_of: Callable[[int], Soak], request: pytest.FixtureRequest) -> None:
    seed, seconds, *first = (int(part) for part in request.config.getoption("--soak", default="1,40").split(","))
    soak_of(seed).run(seed, seconds, first[0] if first else None)


@pytest.mark.thorough
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twenty_minutes_of_bad_luck_break_no_promise(soak_of: Callable[[int], Soak], seed: int) -> None:
    soak_of(seed).run(seed, 1200, None)
