"""A night: trainings on five virtual hosts, faults at random moments, and no command that helps.

    python -m tests.crashes.night --seed 1 --seconds 7200 --faults 20 --history night.jsonl

Two jobs run at a time, one of trajectory and one of qwen_lora (ddp, fsdp2 and zero3 take turns), two ranks on each of
two hosts, with checkpoints in a directory that all hosts see. One that has succeeded is followed by the next. The
network is slow, so that a training takes long and little of the processor. Each fault waits until the attempt that it
hits has saved a checkpoint, and until the fault before it is over. In the end every job has succeeded, and every number
that rank 0 of any attempt recorded, at every step, is that of an undisturbed run of the same job on the same hosts,
which comes first. Kinds, victims and durations follow from the seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import cycle, takewhile
from statistics import median
from typing import Any

from ascendrun.core.jobs.job import State
from tests.crashes.campaign import Campaign, Fault, Run, Tell, command, longer
from tests.crashes.hosts import Hosts
from tests.crashes.trainings import ALL, Training

RANKS = 4
KINDS = sorted(set(Campaign.kinds) - {"drained"})
TRACK_EPOCHS, ROW_STEPS = 130, {"ddp": 450, "fsdp2": 150, "zero3": 120}
TRACKS: Mapping[str, Any] = {"num_train_epochs": TRACK_EPOCHS, "eval_steps": 100, "save_steps": 20}
ROWS: Mapping[str, Any] = {"learning_rate": 0.001, "eval_steps": 50, "save_steps": 10}
LANES: Sequence[Sequence[Training]] = (
    (longer(ALL["pretrain-masked"], 6 * TRACK_EPOCHS, TRACKS),),
    [longer(ALL[f"qwen_lora-{how}"], steps, {**ROWS, "max_steps": steps}) for how, steps in ROW_STEPS.items()],
)


def draw(seed: int, faults: int) -> list[Fault]:
    """All kinds in a random order, then all kinds in another one, and so on."""
    lot = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < faults:
        kinds += lot.sample(KINDS, len(KINDS))
    found = []
    for number, kind in enumerate(kinds[:faults]):
        rank, place, lasts_s = lot.randrange(RANKS), lot.randrange(2), round(lot.uniform(20, 240), 1)
        found.append(Fault(kind, (place,), lasts_s, lane=number % len(LANES), rank=rank))
    return found


class Night(Campaign):
    """`seconds`: how long jobs are submitted, and faults are spread over."""

    def __init__(self, hosts: Hosts, tell: Tell, plan: Sequence[Fault], seconds: float) -> None:
        super().__init__(hosts, tell, plan)
        self.until_mono, self.every_s = time.monotonic() + seconds, 0.0
        self.straight: dict[str, Mapping[Any, Mapping[str, Any]]] = {}

    def run(self) -> Mapping[str, Any]:
        for training in [training for lane in LANES for training in lane]:
            run = self.start(training)
            self.undisturbed([run])
            self.straight[training.name] = run.check(None)
            self.tell({"what": "undisturbed", **facts_of(run)})
        self.every_s = (self.until_mono - time.monotonic()) / (len(self.plan) + 1)
        self.play(*[takewhile(self._is_open, cycle(lane)) for lane in LANES])
        for run in self.ended:
            run.check(self.straight[run.training.name])
        by_kind: dict[str, list[float]] = {}
        for one in self.outcomes:
            by_kind.setdefault(one["kind"], []).append(one["again_s"])
        return {
            "faults": len(self.outcomes),
            "attempts": sum(run.seen.attempt for run in self.ended),
            "again_s": {
                kind: {"count": len(times), "median": median([time for time in times if time] or [0])}
                for kind, times in sorted(by_kind.items())
            },
        }

    def _is_open(self, training: Training) -> bool:
        return time.monotonic() < self.until_mono or bool(self.plan)

    def is_time(self, run: Run, fault: Fault) -> bool:
        if self.away or self.watched or time.monotonic() < self.until_mono - len(self.plan) * self.every_s:
            return False
        is_running = run.seen.state is State.RUNNING and run.has_saved()
        return is_running and run.step() <= 0.9 * run.training.steps  # later, it would end before anything shows

    def check(self, run: Run) -> None:
        run.check(self.straight[run.training.name], is_whole=False)
        self.tell({"what": "job", **facts_of(run)})


def facts_of(run: Run) -> dict[str, Any]:
    return {
        "job": run.id,
        "training": run.training.name,
        "state": run.seen.state.value,
        "attempts": run.seen.attempt,
        "steps_told": len(run.told()),
        "steps": run.training.steps,
        "seconds": run.seconds,
        "kinds": [one.failure.kind.value for one in run.seen.past if one.failure],
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crashes.night", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=7200, help="how long jobs are submitted")
    return command(parser, argv, lambda hosts, tell, of: Night(hosts, tell, draw(of.seed, of.faults), of.seconds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
