"""Random bad luck, seeded: two jobs at a time run and stop while nodes, cables, files, agents and the controller fail.

A minute of seed 1 runs always, three seeds of 20 minutes with --thorough. `--soak SEED,SECONDS` runs another one.
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
from invariants import check_ended
from scenes import Scene, await_that

from ascendrun.sim.vcluster.cluster import VirtualCluster
from ascendrun.sim.vcluster.fuse_server import ERRORS
from ascendrun.sim.vcluster.machines import HEAD
from ascendrun.sim.vcluster.processes import await_true

Ascendrun = Any
END_S = 180.0
MORE = "checkpoint: {grace_period_s: 1}\ntimeouts: {start_s: 30}\n"
SLOTS = 4
"""Of each host, so that both jobs of two ranks fit on it."""


@dataclass(frozen=True)
class Fault:
    """`is_harmless`: a job that runs when it comes, and that nobody stops, ends SUCCEEDED all the same. `wherever`:
    also one that does not run yet. `spares_disk`: the files of the host are what they were."""

    begin: Callable[[Scene, str], object]
    is_harmless: bool = True
    wherever: bool = False
    spares_disk: bool = True


def kill_some(scene: Scene, machine: str, word: str) -> None:
    leftovers.kill([one for one in scene.cluster.processes(machine) if word in one.argv])


def kill_controller(scene: Scene, _host: str) -> None:
    """And its guard: the next command starts both."""
    leftovers.kill(leftovers.controllers(scene.cluster, scene.ascendrun.state_dir))


def kill_guarded_controller(scene: Scene, _host: str) -> None:
    """The controller only: its guard starts another one."""
    both = leftovers.controllers(scene.cluster, scene.ascendrun.state_dir)
    guards = {one.pid for one in both}
    leftovers.kill([one for one in both if one.ppid in guards])


def _files(name: str) -> Callable[[Scene, str], object]:
    return lambda scene, host: scene.cluster.node_fs(host).fail(name)


FAULTS: Mapping[str, Fault] = {
    "cut": Fault(lambda scene, host: scene.cluster.cut(host)),
    "freeze": Fault(lambda scene, host: scene.cluster.freeze(host)),
    "block-in": Fault(lambda scene, host: scene.cluster.block(HEAD, host)),
    "block-out": Fault(lambda scene, host: scene.cluster.block(host, HEAD)),
    "loss": Fault(lambda scene, host: scene.cluster.loss(host, 30)),
    "fill": Fault(lambda scene, host: scene.cluster.fill(host)),
    "agent": Fault(lambda scene, host: kill_some(scene, host, "serve")),
    "controller": Fault(kill_guarded_controller, wherever=True),
    "guard": Fault(kill_controller, wherever=True),
    "sshd": Fault(lambda scene, host: scene.cluster.sshd_restart(host), wherever=True),
    **{f"files-{name}": Fault(_files(name)) for name in ERRORS},
    "files-hang": Fault(lambda scene, host: scene.cluster.node_fs(host).hang()),
    "supervisor": Fault(lambda scene, host: kill_some(scene, host, "supervise"), is_harmless=False),
    "reboot": Fault(lambda scene, host: scene.cluster.reboot(host, keep_disk=True), is_harmless=False),
    "recreate": Fault(lambda scene, host: scene.cluster.recreate(host), is_harmless=False, spares_disk=False),
    "wipe": Fault(lambda scene, host: scene.cluster.wipe(host), is_harmless=False, spares_disk=False),
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
    ends: dict[str, str] = field(default_factory=dict)
    violation: str = ""

    def line(self) -> str:
        return json.dumps({**vars(self), "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}) + "\n"


def make_round(seed: int, number: int, hosts: Sequence[str]) -> Round:
    lot = random.Random(f"{seed}-{number}")
    harmless = sorted(name for name, fault in FAULTS.items() if fault.is_harmless)
    names = harmless if lot.random() < 0.6 else sorted(FAULTS)
    return Round(
        seed,
        number,
        [
            (lot.choice(names), lot.choice(hosts), lot.uniform(0, 3), lot.uniform(0.5, 12))
            for _ in range(lot.choice((1, 1, 2)))
        ],
        (lot.uniform(3, 10), lot.uniform(3, 10)),
        lot.random() < 0.8,
        lot.choice((0, 1)) if lot.random() < 0.3 else None,
    )


class Soak:
    """Rounds on one cluster, until the time is over."""

    def __init__(self, scene: Scene, history: Path) -> None:
        self.scene, self.history = scene, history

    def next_round(self, seed: int) -> int:
        lines = self.history.read_text().splitlines() if self.history.exists() else []
        return max([json.loads(line)["number"] + 1 for line in lines if json.loads(line)["seed"] == seed], default=0)

    def run(self, seed: int, seconds: float, first: int | None) -> int:
        """Returns how many rounds there were; raises AssertionError at the first violation."""
        number = start = self.next_round(seed) if first is None else first
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
        jobs = [self._start(f"{name}-{one.number}", beat_s) for name, beat_s in zip("ab", one.beat_s)]
        if one.waits:
            await_true(lambda: all(self._runs(job) for job in jobs), deadline_s=30)
        early = [job for job in jobs if not self._runs(job)]
        for name, host, before_s, during_s in one.faults:
            self._idle(jobs, before_s)
            FAULTS[name].begin(scene, host)
            self._idle(jobs, during_s)
        if one.stops is not None:
            scene.ascendrun("stop", "--no-wait", jobs[one.stops])
        scene.cluster.clean()
        for job in jobs:
            scene.ascendrun("wait", job, timeout=END_S)
            one.ends[job] = scene.state(job)
        for number, job in enumerate(jobs):
            await_that(lambda job=job: not scene.show(job)["unconfirmed_hosts"], f"{job} is confirmed")
            self._check(one, job, is_stopped=one.stops == number, is_early=job in early)

    def _start(self, name: str, beat_s: float) -> str:
        words = ("family", "print", "ready", "beat", round(beat_s, 1), "print", "done")
        return self.scene.start(self.scene.job(name, *words, slots=SLOTS, more=MORE))

    def _runs(self, job: str) -> bool:
        files = self.scene.spooled(job, "rank-*.out.0")
        return len(files) == 4 and all(path.read_bytes().startswith(b"ready") for path in files)

    def _idle(self, jobs: Sequence[str], seconds: float) -> None:
        """Let time pass, but not after both have ended."""
        folder = self.scene.ascendrun.state_dir / "jobs"
        await_true(lambda: all(any((folder / job).glob("attempt-*/complete")) for job in jobs), deadline_s=seconds)

    def _check(self, one: Round, job: str, *, is_stopped: bool, is_early: bool) -> None:
        scene, faults = self.scene, [FAULTS[name] for name, *_ in one.faults]
        changed = [host for name, host, *_ in one.faults if not FAULTS[name].spares_disk]
        state = one.ends[job]
        if all(fault.is_harmless and (fault.wherever or not is_early) for fault in faults):
            reason = f"{job}: {state} after harmless {one.faults}: {scene.show(job)['events']}"
            assert state in (("SUCCEEDED", "STOPPED") if is_stopped else ("SUCCEEDED",)), reason
        check_ended(scene, job, state=state, but=changed)
        if state == "SUCCEEDED" and not any(name.startswith("fi") for name, *_ in one.faults):
            found = sorted(scene.on_head(job, "rank-*.out.[0-9]*").items())
            newest = {name.rpartition(".")[0]: data[-40:] for name, data in found}  # wiped: a new generation
            assert len(newest) == 4 and all(data.endswith(b"done\n") for data in newest.values()), f"{job}: {newest}"


@pytest.fixture
def history(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(request.config.getoption("--history", default=None) or tmp_path / "history.jsonl")


@pytest.fixture
def soak(ascendrun: Ascendrun, cluster: VirtualCluster, history: Path) -> Soak:
    return Soak(Scene(ascendrun, cluster), history)


def test_a_history_is_gone_on_with(tmp_path: Path, soak: Soak) -> None:
    soak.history = tmp_path / "history.jsonl"
    assert soak.next_round(1) == 0
    soak.history.write_text(make_round(1, 0, ["a"]).line() + make_round(1, 1, ["a"]).line())
    assert (soak.next_round(1), soak.next_round(2)) == (2, 0)
    assert make_round(1, 7, ["a", "b"]) == make_round(1, 7, ["a", "b"]), "a round follows from its seed"


@pytest.mark.timeout(0)
def test_a_minute_of_bad_luck_breaks_no_promise(soak: Soak, request: pytest.FixtureRequest) -> None:
    seed, seconds, *first = (int(part) for part in request.config.getoption("--soak", default="1,40").split(","))
    soak.run(seed, seconds, first[0] if first else None)


@pytest.mark.thorough
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twenty_minutes_of_bad_luck_break_no_promise(
    ascendrun: Ascendrun, cluster_of: Callable[..., VirtualCluster], history: Path, seed: int
) -> None:
    """The hosts of seed 3 have one home."""
    cluster = cluster_of(2, shared_home=seed == 3)
    Soak(Scene(ascendrun.on(cluster), cluster), history).run(seed, 1200, None)
