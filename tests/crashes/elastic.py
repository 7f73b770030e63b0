"""An elastic night: one training at a time on five virtual hosts that come and go, and no command that helps it.

    python -m tests.crashes.elastic --seed 1 --faults 20 --history elastic.jsonl

A job requests five hosts and runs on two or more, one rank on each, with checkpoints in a directory that all hosts
see: trajectory, then qwen_lora with ddp, fsdp2 and zero3, then a script without libraries. Hosts lose power or
network, or are drained, one or two at once, during training, a start, a checkpoint or a growth, and are back some time
later, once the job trains without them. Each job gets its part of the faults. In the end each has succeeded. All of
its checkpoints have the same options, and so the same global batch, and each step was trained: as many samples as in
undisturbed runs on two, three and four hosts, which come before. Its losses differ from theirs by no more than SLACK
times what theirs differ among each other. Hosts, kinds, moments and durations follow from the seed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from statistics import mean
from typing import Any

from ascendrun.core.jobs.job import Cause, State
from ascendrun.head.loop.hang import DIVISOR_VARIABLE
from tests.crashes.campaign import HOSTS, Campaign, Fault, Run, Tell, command, longer
from tests.crashes.hosts import CampaignError, Hosts
from tests.crashes.remains import lines_of
from tests.crashes.trainings import ALL, Training

LEAST, SIZES = 2, (4, 3, 2)
"""In this order they have room side by side, two ranks to a host."""
SLACK, ROUNDING = 3.0, 1e-6
"""How many times their own differences, and at least which relative one."""
KINDS, MOMENTS = ("power lost", "cut", "drained"), ("training", "checkpoint", "growth", "start")
LATE_S = 60.0
"""A moment that has not come by then may not come any more: then the training is hit."""
HANG_DIVISOR = "6"
"""A lost host shows as a hang of the others: they are stopped after 30 s without a step, not 180 s (docs/hangs.md)."""
STARTING = (State.CHECKING, State.STAGING, State.STARTING)
KEYS: Mapping[str, Any] = {
    "devices": {"type": "cpu", "per_node": 1},
    "restart": {"max_restarts": 50, "backoff_s": [0, 1]},
    "setup": "true",
}
"""The ranks run at the priority of the command: most of a recovery is the start of all of them at once."""
STEPS = {"pretrain-masked": 240, "qwen_lora-ddp": 240, "qwen_lora-fsdp2": 160, "qwen_lora-zero3": 120}
MORE: Mapping[str, Mapping[str, Any]] = {
    name: {"num_train_epochs": steps // 6, "eval_steps": 60, "save_steps": 5}
    if name == "pretrain-masked"
    else {"max_steps": steps, "learning_rate": 0.001, "eval_steps": 40, "save_steps": 5}
    for name, steps in STEPS.items()
}
SCRIPT = Training("script", "", {}, 600, ())
"""Its start needs no processor to speak of: for a machine with other work."""
TRAININGS = [*(longer(ALL[name], steps, MORE[name]) for name, steps in STEPS.items()), SCRIPT]
NUMBERS, LAST = ("loss", "eval_loss", "final"), 30
"""`final`: the mean loss of the LAST steps."""
Numbers = Mapping[str, Mapping[int, float]]
"""By name and step."""


def draw(seed: int, faults: int) -> list[Fault]:
    """All pairs of a kind and a moment in a random order, then all in another one; a third of them hits two hosts."""
    lot = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    while len(pairs) < faults:
        every = [(kind, moment) for kind in KINDS for moment in MOMENTS]
        pairs += lot.sample(every, len(every))
    return [
        Fault(
            kind,
            tuple(lot.sample(range(HOSTS), 2 if lot.random() < 1 / 3 else 1)),
            round(lot.uniform(20, 60), 1),
            moment=moment,
            wait_s=0.0 if moment == "checkpoint" else round(lot.uniform(0, 3), 1),
            gap_s=round(lot.uniform(0, 5), 1),
        )
        for kind, moment in pairs[:faults]
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


class Elastic(Campaign):
    """Each job ends before the next one starts; there is one more as long as the plan has faults."""

    delay_ms = 5.0

    def __init__(
        self, hosts: Hosts, tell: Tell, plan: Sequence[Fault], trainings: Sequence[Training] = TRAININGS
    ) -> None:
        super().__init__(hosts, tell, plan)
        hosts.environ[DIVISOR_VARIABLE] = HANG_DIVISOR
        self.trainings = trainings
        self.straight: dict[str, list[Numbers]] = {}
        self.share = -(-len(plan) // len(trainings))
        self.due = 0
        """Faults that the present job gets at most, and that it still gets."""
        self.began_mono: float | None = None
        """Since when the moment of the next fault is there; None: it is not."""

    def run(self) -> Mapping[str, Any]:
        for training in cycle(self.trainings):
            if training.name not in self.straight:
                self._reference(training)
            self.began_mono, self.due = None, self.share
            self.play(iter([training]))
            self._compare(self.ended[-1])
            if not self.plan:
                break
        return {"faults": len(self.outcomes)}

    def start(self, training: Training, **more: Any) -> Run:
        return super().start(training, **{**KEYS, "nodes": HOSTS, "min_nodes": LEAST, **more})

    def _reference(self, training: Training) -> None:
        runs = [self.start(training, nodes=size, min_nodes=size) for size in SIZES]
        self.undisturbed(runs)
        for run in runs:
            run.check(None)
        found = self.straight[training.name] = [numbers_of(run) for run in runs]
        self.tell(
            {
                "what": "undisturbed",
                "training": training.name,
                "nodes": SIZES,
                "seconds": [run.seconds for run in runs],
                "apart": {name: apart(found, name) for name in NUMBERS},
                "final": [run["final"][training.steps] for run in found],
            }
        )

    # --- when hosts go

    def targets(self, run: Run) -> Sequence[str]:
        """All of them: one that is about to join may go, too."""
        return self.cluster.hosts

    def is_time(self, run: Run, fault: Fault) -> bool:
        now = time.monotonic()
        waited_s = now - self.last_mono - fault.gap_s
        if not self.due or waited_s < 0 or HOSTS - len(self.away) - len(fault.places) < LEAST:
            return False
        moment = fault.moment if waited_s < LATE_S else "training"
        if self.watched and moment != "training":
            return False  # three restarts in a row without progress would end the job
        if self.began_mono is None and self._is_there(run, moment):
            self.began_mono = now
        if self.began_mono is None or now < self.began_mono + fault.wait_s:
            return False
        self.began_mono, self.due = None, self.due - 1
        return True

    def _is_there(self, run: Run, moment: str) -> bool:
        job = run.seen
        if moment == "start":
            return job.state in STARTING
        if moment == "growth":
            return job.cause is Cause.RESIZED
        if moment == "checkpoint" and not any(run.checkpoints.glob(".step-*.tmp")):
            return False
        return job.state is State.RUNNING and run.has_saved() and run.step() < 0.8 * run.training.steps

    def _bring_back(self, until_mono: float) -> None:
        """A fast host would be back before the job needs it: the job has to train without it first."""
        if not self.watched or until_mono == float("inf"):
            super()._bring_back(until_mono)

    # --- what came of it

    def check(self, run: Run) -> None:
        run.check(None, is_whole=False)

    def _compare(self, run: Run) -> None:
        """Raises CampaignError."""
        run.check(None)
        found, straight = numbers_of(run), self.straight[run.training.name]
        theirs = {name: apart(straight, name) for name in NUMBERS}
        ours = {name: max(apart([found, each], name) for each in straight) for name in NUMBERS}
        manifests = [json.loads(path.read_text()) for path in run.checkpoints.glob("**/manifest.json")]
        options = {json.dumps(manifest["facts"]["identity"], sort_keys=True) for manifest in manifests}
        self.tell(
            {
                "what": "job",
                "job": run.id,
                "training": run.training.name,
                "state": run.seen.state.value,
                "seconds": run.seconds,
                "nodes_of_attempts": [len(run.seen.hosts_of(number)) for number in range(1, run.seen.attempt + 1)],
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


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crashes.elastic", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(one.name for one in TRAININGS), help="trainings, of: %(default)s")

    def make(hosts: Hosts, tell: Tell, of: argparse.Namespace) -> Elastic:
        trainings = [training for training in TRAININGS if training.name in of.only.split(",")]
        return Elastic(hosts, tell, draw(of.seed, of.faults), trainings)

    return command(parser, argv, make)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
