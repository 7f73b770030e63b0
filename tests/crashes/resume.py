"""Kills trainings at random moments and compares what becomes of them with one that nothing happened to.

    python -m tests.crashes.resume                                     every training, three moments of each death
    python -m tests.crashes.resume --only finetune,qwen_lora-zero3 --moments 10 --seed 7 --deaths node

Each training runs over two virtual hosts, two ranks on each, without a common disk. A death is SIGKILL of a rank, a
stop (SIGTERM to all), or a host without power. It comes while ranks start, after some step, or while a checkpoint is
written; now and then the newest checkpoint is damaged as well. Then the same job is submitted again, and dies again,
until all deaths were died; the last one runs to its end. Every number that rank 0 ever told, and the files that come
out, must be those of the undisturbed run to the last bit; every resume must take the newest checkpoint that is whole
wherever it has to be. Moments follow from the seed. One JSON line for each life goes to stdout, or into --journal.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable

from tests.crashes.hosts import RANKS, CampaignError, Hosts, Job, keep_line
from tests.crashes.remains import Story, difference, half_written, newest_common, wound
from tests.crashes.trainings import ALL, Training
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.processes import await_true

DEATHS = ("kill", "stop", "node")
MOMENTS = ("step", "step", "write", "write", "start")
WOUNDS = ("unnamed", "cut", "flip")
PART_OF_START = 0.8
MOST_IN_A_WRITE_S, MOST_IN_A_STEP_S = 0.02, 0.1
DISK = "512M"
TOO_LATE = "too late"


@dataclass(frozen=True)
class Undisturbed:
    """The run that nothing happened to. `start_s`: from its submission to the first step."""

    story: Story
    results: dict[str, str]
    start_s: float


@dataclass
class Life:
    """One start of a training, and how it ended. `resumed`: the steps that it went on from. `half_written`,
    `apart`: checkpoints that were growing at its death; whether the nodes' newest ones differed."""

    training: str
    seed: str
    death: str
    moment: str
    blow: str = ""
    state: str = ""
    resumed: Sequence[int] = ()
    first_step: int | None = None
    last_step: int | None = None
    half_written: int = 0
    apart: bool = False
    wound: str = ""
    seconds: float = 0.0


def undisturbed(hosts: Hosts, training: Training) -> Undisturbed:
    began_s, home = time.monotonic(), f"/root/{training.name}-straight"
    job = hosts.submit(training, home)
    job.wait_for(lambda: bool(job.told().first), "took a step")
    start_s = time.monotonic() - began_s
    if job.end() != "SUCCEEDED":
        raise CampaignError(job.story())
    story, results = job.spooled(), hosts.results(training, home)
    if story.last.get(len(training.folders) - 1) != training.steps or not results:
        raise CampaignError(f"{training.name} ended after {dict(story.last)}, with {sorted(results)}")
    return Undisturbed(story, results, start_s)


class Sweep:
    """All deaths of one training, in as many runs of it as they need. `tell` gets every life."""

    def __init__(self, hosts: Hosts, training: Training, seed: int, tell: Callable[[Life], None]) -> None:
        self.hosts, self.training, self.tell = hosts, training, tell
        self.seed, self.lot = f"{seed}-{training.name}", random.Random(f"{seed}-{training.name}")
        self.straight = undisturbed(hosts, training)

    def run(self, deaths: Sequence[str], moments: int) -> None:
        left = [death for death in deaths for _ in range(moments)]
        self.lot.shuffle(left)
        number = 0
        while left:
            number += 1
            self._until_its_end(f"/root/{self.training.name}-{number}", left)

    def _until_its_end(self, home: str, left: list[str]) -> None:
        """Lives of one run, each with a death of `left` while there are some and the run is not at its end."""
        while left and self._life(home, left[0], lives=len(left)):
            left.pop(0)
        if not left:
            self._life(home, "none", lives=1)
        self._check_results(home)

    def _check_results(self, home: str) -> None:
        found = self.hosts.results(self.training, home)
        if found != self.straight.results:
            wrong = sorted(
                name for name in {*found, *self.straight.results} if found.get(name) != self.straight.results.get(name)
            )
            raise CampaignError(f"{self.seed}: other bytes than the undisturbed run's in {', '.join(wrong)}")

    def _life(self, home: str, death: str, *, lives: int) -> bool:
        """Whether it died; False: it ran to its end."""
        began_s, wanted = time.monotonic(), self._expected(home)
        life = Life(self.training.name, self.seed, death, "" if death == "none" else self._moment(wanted))
        job = self.hosts.submit(self.training, home)
        if death != "none":
            self._strike(job, home, life, wanted, lives)
        life.state = job.end()
        story = job.spooled()
        life.resumed, life.seconds = tuple(story.resumed), round(time.monotonic() - began_s, 1)
        life.first_step = story.first.get(max(story.first)) if story.first else None
        life.last_step = story.last.get(max(story.last)) if story.last else None
        self._judge(job, life, story, wanted)
        if life.state != "SUCCEEDED":
            self._look_and_wound(home, life, story)
        self.tell(life)
        return life.state != "SUCCEEDED"

    def _expected(self, home: str) -> list[int | None]:
        """For each training of the run: the step that it must go on from, None: the beginning."""
        return [
            newest_common(self.hosts.checkpoints(home, folder), is_sharded=self.training.is_sharded)
            for folder in self.training.folders
        ]

    # --- the moment ---

    def _moment(self, wanted: Sequence[int | None]) -> str:
        """Of a run that is all but done only the start is left to die in."""
        return self.lot.choice(MOMENTS) if self._room(wanted) > 0 else "start"

    def _room(self, wanted: Sequence[int | None]) -> int:
        """Steps after which it can still be struck; a training begins when the one before it is complete."""
        return sum(self._lengths()) - 2 - sum(step or 0 for step in wanted)

    def _lengths(self) -> list[int]:
        return [self.straight.story.last[number] for number in range(len(self.training.folders))]

    def _strike(self, job: Job, home: str, life: Life, wanted: Sequence[int | None], lives: int) -> None:
        job.wait_for(lambda: len(job.ranks()) == RANKS, "had all ranks")
        rank = self.lot.randrange(RANKS)
        process = job.ranks().get(rank)
        host = self.lot.choice(self.hosts.cluster.hosts)
        place, delay_s = self._aim(life.moment, wanted, lives)
        if life.moment == "start":
            life.moment = f"{delay_s:.1f} s after the start"
        else:
            job.wait_for(lambda: self._has_come(job, place), f"came to {place}")
            if life.moment == "write":
                folders = self.hosts.checkpoints(home, self.training.folders[place[0]])
                job.wait_for(lambda: half_written(folders) > 0, "wrote a checkpoint")
            life.moment = f"{life.moment} {place[1]} of training {place[0] + 1}, {delay_s * 1000:.0f} ms later"
        await_true(job.is_over, deadline_s=delay_s)
        if job.is_over():
            life.blow = TOO_LATE
        elif life.death == "kill":
            life.blow = job.kill_rank(rank, process.pid if process else None)
        elif life.death == "stop":
            life.blow = job.stop()
        else:
            life.blow = job.crash(host)

    def _aim(self, moment: str, wanted: Sequence[int | None], lives: int) -> tuple[tuple[int, int], float]:
        """(which training and after which of its steps, seconds later)."""
        if moment == "start":
            return (0, 0), self.lot.uniform(0, self.straight.start_s * PART_OF_START)
        lengths, room = self._lengths(), self._room(wanted)
        target = sum(step or 0 for step in wanted) + 1 + self.lot.randrange(max(1, min(room, 2 * room // (lives + 1))))
        training = 0
        while target > lengths[training] and training + 1 < len(lengths):
            target -= lengths[training]
            training += 1
        return (training, target), self.lot.uniform(0, MOST_IN_A_WRITE_S if moment == "write" else MOST_IN_A_STEP_S)

    @staticmethod
    def _has_come(job: Job, place: tuple[int, int]) -> bool:
        last = job.told().last
        return bool(last) and (max(last), last[max(last)]) >= place

    # --- what must hold ---

    def _judge(self, job: Job, life: Life, story: Story, wanted: Sequence[int | None]) -> None:
        """Raises CampaignError."""
        if life.blow == TOO_LATE and life.state != "SUCCEEDED":
            raise CampaignError(f"{life}: it died by itself: {job.story()}")
        if life.state not in {"none": ("SUCCEEDED",), "stop": ("STOPPED", "SUCCEEDED")}.get(
            life.death, ("FAILED", "SUCCEEDED")
        ):
            raise CampaignError(f"{life}: {job.story()}")
        told = difference(story, self.straight.story)
        if told is not None:
            raise CampaignError(f"{life}: {told}")
        steps = [step for step in wanted if step is not None]
        if list(story.resumed) != steps[: len(story.resumed)]:
            raise CampaignError(f"{life}: went on from {list(story.resumed)}, not from {steps}: {job.story()}")
        for number, first in story.first.items():
            if first != (wanted[number] or 0) + 1:
                raise CampaignError(
                    f"{life}: training {number + 1} began with step {first}, not after {wanted[number]}: {job.story()}"
                )

    def _look_and_wound(self, home: str, life: Life, story: Story) -> None:
        """Counts what the death left; a stop must have lost no step. Damages the newest checkpoint now and then."""
        folder = self.training.folders[max(story.last, default=0)]
        parents = self.hosts.checkpoints(home, folder)
        life.half_written = half_written(parents)
        newest = [max((path.name for path in parent.glob("step-*")), default="") for parent in parents]
        life.apart = self.training.is_sharded and len(set(newest)) > 1
        saved = newest_common(parents, is_sharded=self.training.is_sharded)
        if life.blow == "stopped" and story.last and (saved or 0) < story.last[max(story.last)]:
            raise CampaignError(f"{life}: stopped after step {story.last[max(story.last)]}, but saved {saved}")
        if self.lot.random() < 1 / 3:
            parent = self.lot.choice([each for each, name in zip(parents, newest) if name] or parents)
            life.wound = wound(parent, self.lot.choice(WOUNDS), self.lot)


def sweep(
    hosts: Hosts, names: Sequence[str], deaths: Sequence[str], *, moments: int, seed: int, tell: Callable[[Life], None]
) -> None:
    """Raises CampaignError at the first promise that is broken."""
    for name in names:
        Sweep(hosts, ALL[name], seed, tell).run(deaths, moments)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crashes.resume", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(ALL), help="trainings, of: %(default)s")
    parser.add_argument("--deaths", default=",".join(DEATHS))
    parser.add_argument("--moments", type=int, default=3, help="of each death")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--journal", type=Path, help="a file that gets a line for each life")
    options = parser.parse_args(argv)
    broken = 0
    with tempfile.TemporaryDirectory(prefix="ascendrun-resume-") as folder, VirtualCluster.up(2, disk=DISK) as cluster:
        hosts = Hosts(cluster, Path(folder))

        def tell(life: Life) -> None:
            keep_line(json.dumps(asdict(life)), options.journal)

        try:
            for name in options.only.split(","):
                try:
                    sweep(
                        hosts, [name], options.deaths.split(","), moments=options.moments, seed=options.seed, tell=tell
                    )
                except CampaignError as failed:
                    broken += 1
                    print(f"FAILED {name}, seed {options.seed}: {failed}", file=sys.stderr, flush=True)
        finally:
            hosts.close()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
