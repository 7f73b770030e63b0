"""An elastic night: one training at a time on five virtual hosts that come and go, and no command that helps it.

    python -m tests.crashes.elastic --seed 1 --comings 20 --history elastic.jsonl

A job requests five hosts and runs on two or more, one rank on each, with checkpoints in a directory that all hosts see:
trajectory, then qwen_lora with ddp and with fsdp2. Hosts lose power or network, or are drained, one or two at once,
during training, a start, a checkpoint or a growth, and are back some time later. In the end each job has succeeded. All
of its checkpoints have the same options, and so the same global batch, and each step was trained: as many samples as in
undisturbed runs on two, three and four hosts, which come before. Its losses differ from theirs by no more than SLACK
times what theirs differ among each other. Hosts, kinds, moments and durations follow from the seed. One
JSON line for each run, coming and job goes to stdout, or into --history.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, cycle
from pathlib import Path
from statistics import mean
from typing import Any, Callable

from ascendrun.core.jobs.job import TERMINAL, Cause, State
from ascendrun.core.records import format_rfc3339
from tests.crashes.hosts import CampaignError, Hosts, keep_line
from tests.crashes.night import HOSTS, SHARED, Run, longer
from tests.crashes.remains import lines_of
from tests.crashes.trainings import ALL, Training
from tests.lib.vcluster.cluster import VirtualCluster

LEAST, SIZES = 2, (2, 3, 4)
SLACK, ROUNDING = 3.0, 1e-6
"""How many times their own differences, and at least which relative one."""
DELAY_MS = 5.0
POLL_S = 0.2
END_S = 7200.0
KINDS, MOMENTS = ("power lost", "cut", "drained"), ("training", "checkpoint", "growth", "start")
LATE_S = 120.0
"""A moment that has not come by then may not come any more: then the training is hit."""
STARTING = (State.CHECKING, State.STAGING, State.STARTING)
STEPS = {"pretrain-masked": 390, "qwen_lora-ddp": 220, "qwen_lora-fsdp2": 120}
MORE: Mapping[str, Mapping[str, Any]] = {
    name: {"num_train_epochs": steps // 6, "eval_steps": 30, "save_steps": 5}
    if name == "pretrain-masked"
    else {"max_steps": steps, "learning_rate": 0.001, "eval_steps": 20, "save_steps": 5}
    for name, steps in STEPS.items()
}
TRAININGS = [longer(ALL[name], steps, MORE[name]) for name, steps in STEPS.items()]
NUMBERS, LAST = ("loss", "eval_loss", "final"), 30
"""`final`: the mean loss of the LAST steps."""
Numbers = Mapping[str, Mapping[int, float]]
"""By name and step."""


@dataclass(frozen=True)
class Coming:
    """`hosts`: their places among those that are there. `moment`: see MOMENTS; `wait_s`: after it began. `lasts_s`:
    until they are back. `gap_s`: since the coming before."""

    kind: str
    moment: str
    hosts: tuple[int, ...]
    wait_s: float
    lasts_s: float
    gap_s: float


def draw(seed: int, comings: int) -> list[Coming]:
    """All pairs of a kind and a moment in a random order, then all in another one; a third of them hits two hosts."""
    lot = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    while len(pairs) < comings:
        every = [(kind, moment) for kind in KINDS for moment in MOMENTS]
        pairs += lot.sample(every, len(every))
    return [
        Coming(
            kind,
            moment,
            tuple(lot.sample(range(HOSTS), 2 if lot.random() < 1 / 3 else 1)),
            0.0 if moment == "checkpoint" else round(lot.uniform(0, 8), 1),
            round(lot.uniform(20, 60), 1),
            round(lot.uniform(5, 30), 1),
        )
        for kind, moment in pairs[:comings]
    ]


def numbers_of(run: Run) -> dict[str, dict[int, float]]:
    """What rank 0 of the last attempt that trained a step recorded of it."""
    found: dict[str, dict[int, float]] = {name: {} for name in NUMBERS}
    for _, files in sorted(run.files().items()):
        for line in lines_of(files):
            for name in NUMBERS:
                if "event" not in line and line.get(name) is not None:
                    found[name][line["step"]] = line[name]
    steps = run.training.steps
    found["final"][steps] = mean(found["loss"][step] for step in range(steps - LAST + 1, steps + 1))
    return found


def apart(runs: Sequence[Numbers], name: str) -> float:
    """The largest relative difference of a number among runs, of all steps that they have."""
    steps = set.intersection(*(set(run[name]) for run in runs))
    worst = 0.0
    for step in steps:
        values = [run[name][step] for run in runs]
        worst = max(worst, (max(values) - min(values)) / (abs(mean(values)) or 1.0))
    return worst


class Elastic:
    """`tell` gets a line for each run, coming and job."""

    def __init__(self, hosts: Hosts, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self.hosts, self.tell, self.cluster = hosts, tell, hosts.cluster
        self.numbers = count(1)
        self.straight: dict[str, list[Numbers]] = {}
        self.away: dict[str, tuple[float, str]] = {}
        self.watched: list[tuple[dict[str, Any], int, float]] = []
        self.began_mono: float | None = None
        """Since when the moment of the next coming is there; None: it is not."""
        self.last_mono = 0.0
        self.ended = 0
        (hosts.folder / "five.hosts").write_text(self.cluster.hostfile(slots=2))

    def start(self, training: Training, nodes: int, **more: Any) -> Run:
        devices = {"type": "cpu", "per_node": 1}
        restart = {"max_restarts": 50, "backoff_s": [1, 5]}
        again = {"nodes": nodes, "devices": devices, "restart": restart, **more}
        return Run(self.hosts, training, next(self.numbers), **again)

    def run(self, seed: int, comings: Sequence[Coming], trainings: Sequence[Training] = TRAININGS) -> None:
        """Raises CampaignError at the first promise that is broken."""
        from_s = time.monotonic()
        plan, line = list(comings), cycle(trainings)
        while plan:
            training = next(line)
            if training.name not in self.straight:
                self._undisturbed(training)
            self._delay(DELAY_MS)
            self.last_mono, self.began_mono = time.monotonic(), None
            self._train(self.start(training, HOSTS, min_nodes=LEAST), plan)
            self._delay(0)
        self.tell(
            {
                "what": "night",
                "seed": seed,
                "seconds": round(time.monotonic() - from_s),
                "comings": len(comings),
                "jobs": self.ended,
            }
        )

    def _delay(self, delay_ms: float) -> None:
        for host in self.cluster.hosts:
            self.cluster.delay(host, delay_ms)

    def _undisturbed(self, training: Training) -> None:
        runs = [self.start(training, size) for size in SIZES]
        deadline_s = time.monotonic() + END_S
        while any(run.look().state not in TERMINAL for run in runs):
            if time.monotonic() > deadline_s:
                raise CampaignError(f"undisturbed: {[run.seen for run in runs]}")
            time.sleep(1)
        for run in runs:
            run.check(None)
        found = self.straight[training.name] = [numbers_of(run) for run in runs]
        self.tell(
            {
                "what": "undisturbed",
                "training": training.name,
                "hosts": SIZES,
                "seconds": [round((run.seen.ended_at_s or 0) - run.seen.created_at_s, 1) for run in runs],
                "apart": {name: apart(found, name) for name in NUMBERS},
                "final": [run["final"][training.steps] for run in found],
            }
        )

    def _train(self, run: Run, plan: list[Coming]) -> None:
        deadline_s = time.monotonic() + END_S
        while run.look().state not in TERMINAL:
            if time.monotonic() > deadline_s:
                raise CampaignError(f"{run.seen}; away: {self.away}")
            self._bring_back(time.monotonic())
            self._watch(run)
            if plan and self._is_time(run, plan[0]):
                self._strike(run, plan.pop(0))
            time.sleep(POLL_S)
        self._watch(run)
        self._bring_back(float("inf"))
        self.ended += 1
        self._check(run)

    # --- comings

    def _is_time(self, run: Run, coming: Coming) -> bool:
        now, job = time.monotonic(), run.seen
        waited_s = now - self.last_mono - coming.gap_s
        if waited_s < 0 or HOSTS - len(self.away) - len(coming.hosts) < LEAST:
            return False
        moment = coming.moment if waited_s < LATE_S else "training"
        if self.watched and moment != "training":
            return False  # three restarts in a row without progress would end the job
        trains = job.state is State.RUNNING and run.has_saved() and _step(run) < 0.8 * run.training.steps
        is_there = {
            "training": trains,
            "checkpoint": trains and any(run.checkpoints.glob(".step-*.tmp")),
            "growth": job.cause is Cause.RESIZED or self.began_mono is not None,
            "start": job.state in STARTING,
        }[moment]
        if is_there and self.began_mono is None:
            self.began_mono = now
        return self.began_mono is not None and now >= self.began_mono + coming.wait_s

    def _strike(self, run: Run, coming: Coming) -> None:
        there = [host for host in self.cluster.hosts if host not in self.away]
        victims = sorted({there[place % len(there)] for place in coming.hosts})
        job, at_s = run.seen, time.time()
        self.last_mono, self.began_mono = time.monotonic(), None
        for host in victims:
            self.away[host] = (self.last_mono + coming.lasts_s, coming.kind)
            if coming.kind == "power lost":
                self.cluster.crash(host)
            elif coming.kind == "cut":
                self.cluster.cut(host)
            else:
                self._command("drain", host, "--now")
        told = {"what": "coming", **asdict(coming), "hosts": victims, "job": run.id, "training": run.training.name}
        told |= {"state": job.state.value, "attempt": job.attempt, "ranks": len(job.hosts), "step": _step(run)}
        self.watched.append((told, job.attempt, at_s))

    def _bring_back(self, until_mono: float) -> None:
        for host, (due_mono, kind) in list(self.away.items()):
            if due_mono > until_mono:
                continue
            if kind == "power lost":
                self.cluster.reboot(host, keep_disk=True)
                self.cluster.delay(host, DELAY_MS)
            elif kind == "cut":
                self.cluster.heal(host)
            else:
                self._command("undrain", host, "--no-check")
            del self.away[host]

    def _command(self, *words: str) -> None:
        done = self.hosts.ascendrun(*words)
        if done.returncode:
            raise CampaignError(f"{words}: {done.stdout}{done.stderr}")

    def _watch(self, run: Run) -> None:
        """Tell of comings after which a step was trained, or whose job is over."""
        told = run.told() if self.watched else []
        for line in list(self.watched):
            outcome, attempt, at_s = line
            ours = set(outcome["hosts"]) & set(run.seen.hosts_of(attempt))
            later = [(when, number) for number, _, when in told if when > at_s and (number > attempt or not ours)]
            if later or run.seen.state in TERMINAL:
                self.watched.remove(line)
                when, number = min(later) if later else (None, run.seen.attempt)
                outcome |= {"attempt_after": number, "again_s": when and round(when - at_s, 1)}
                self.tell({**outcome, "ranks_after": len(run.seen.hosts_of(number))})

    # --- what came of it

    def _check(self, run: Run) -> None:
        run.check(None)
        found, straight = numbers_of(run), self.straight[run.training.name]
        theirs = {name: apart(straight, name) for name in NUMBERS}
        ours = {name: max(apart([found, each], name) for each in straight) for name in NUMBERS}
        manifests = [json.loads(path.read_text()) for path in run.checkpoints.glob("**/manifest.json")]
        options = {json.dumps(manifest["facts"]["identity"], sort_keys=True) for manifest in manifests}
        sizes = [len(run.seen.hosts_of(number)) for number in range(1, run.seen.attempt + 1)]
        self.tell(
            {
                "what": "job",
                "job": run.id,
                "training": run.training.name,
                "state": run.seen.state.value,
                "seconds": round((run.seen.ended_at_s or 0) - run.seen.created_at_s, 1),
                "hosts_of_attempts": sizes,
                "restarts_counted": sum(one.counted for one in run.seen.past),
                "final": found["final"][run.training.steps],
                "apart": ours,
                "apart_undisturbed": theirs,
            }
        )
        if len(options) != 1:
            raise CampaignError(f"{run.id}: its checkpoints have other options: {options}")
        for name in NUMBERS:
            if ours[name] > SLACK * max(theirs[name], ROUNDING):
                raise CampaignError(f"{run.id}: {name} differs by {ours[name]}, undisturbed runs by {theirs[name]}")


def _step(run: Run) -> int:
    return max((step for _, step, _ in run.told()), default=0)


def elastic(
    folder: Path,
    seed: int,
    comings: Sequence[Coming],
    tell: Callable[[Mapping[str, Any]], None],
    trainings: Sequence[Training] = TRAININGS,
) -> None:
    """Raises CampaignError at the first promise that is broken."""
    shared = folder / "shared"
    shared.mkdir()
    with VirtualCluster.up(HOSTS, disk="512M", shares={str(shared): SHARED}) as cluster:
        hosts = Hosts(cluster, folder)
        try:
            Elastic(hosts, tell).run(seed, comings, trainings)
        finally:
            hosts.close()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crashes.elastic", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--comings", type=int, default=20)
    parser.add_argument("--only", help="names of trainings, with commas")
    parser.add_argument("--history", type=Path, help="a file that gets a line for each run, coming and job")
    options = parser.parse_args(argv)

    def tell(what: Mapping[str, Any]) -> None:
        keep_line(json.dumps({"at": format_rfc3339(time.time()), **what}), options.history)

    trainings = [one for one in TRAININGS if not options.only or one.name in options.only.split(",")]
    comings = draw(options.seed, options.comings)
    with tempfile.TemporaryDirectory(prefix="ascendrun-elastic-") as folder:
        try:
            elastic(Path(folder), options.seed, comings, tell, trainings)
        except CampaignError as failed:
            tell({"what": "failed", "seed": options.seed, "why": str(failed)})
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
