"""A night: trainings on five virtual hosts, faults at random moments, and nobody who helps.

    python -m tests.crashes.night --seed 1 --seconds 7200 --faults 20 --history night.jsonl

Two jobs run at a time, one of trajectory and one of qwen_lora (ddp, fsdp2 and zero3 take turns), two ranks on each of
two hosts, with checkpoints in a folder that all hosts see. One that has succeeded is followed by the next. The network
is slow, so that a training takes long and little of the processor. Each fault waits until the attempt that it hits
has saved a checkpoint of its own, and until the fault before it is over. The only commands are `submit`: job states
are read from the store. In the end every job has succeeded, and every number that rank 0 of any attempt told, at every
step, is that of an undisturbed run of the same job on the same hosts, which comes first. Kinds, victims and durations
follow from the seed. One JSON line for each run, fault and job goes to stdout, or into --history.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle
from pathlib import Path
from statistics import median
from typing import Any, Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.core.jobs.job import TERMINAL, Job, State
from ascendrun.core.records import format_rfc3339
from ascendrun.head.state.store import Store
from tests.cluster.leftovers import controllers
from tests.crashes.hosts import CampaignError, Hosts, keep_line
from tests.crashes.remains import difference, lines_of, read_story
from tests.crashes.trainings import ALL, Training
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.processes import Process

HOSTS, RANKS = 5, 4
SHARED = "/shared"
DELAY_MS = 15.0
"""Of every frame, each way: 60 ms between a host's question and its peer's answer."""
HANG_S = 60
POLL_S = 1.0
END_S = 3600.0
"""After the last fault a job needs minutes; this is for a machine with other work."""
NICE = 4
IN_FLIGHT = 3
"""Steps that the other ranks may still tell of when one is gone."""
TRACK_EPOCHS, ROW_STEPS = 130, {"ddp": 450, "fsdp2": 150, "zero3": 120}
TRACKS: Mapping[str, Any] = {"num_train_epochs": TRACK_EPOCHS, "eval_steps": 100, "save_steps": 20}
ROWS: Mapping[str, Any] = {"learning_rate": 0.001, "eval_steps": 50, "save_steps": 10}


def longer(training: Training, steps: int, more: Mapping[str, Any]) -> Training:
    return replace(training, arguments={**training.arguments, **more}, steps=steps)


LANES: Sequence[Sequence[Training]] = (
    (longer(ALL["pretrain-masked"], 6 * TRACK_EPOCHS, TRACKS),),
    [longer(ALL[f"qwen_lora-{how}"], steps, {**ROWS, "max_steps": steps}) for how, steps in ROW_STEPS.items()],
)


@dataclass(frozen=True)
class Fault:
    """`lane`: of the job that it hits; `rank` of that job, `node`: which of its hosts; `lasts_s`: until a host has
    power or its cable again."""

    kind: str
    lane: int
    rank: int
    node: int
    lasts_s: float


def draw(seed: int, faults: int) -> list[Fault]:
    """All kinds in a random order, then all kinds in another one, and so on."""
    lot = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < faults:
        kinds += lot.sample(sorted(KINDS), len(KINDS))
    return [
        Fault(kind, number % len(LANES), lot.randrange(RANKS), lot.randrange(2), round(lot.uniform(20, 240), 1))
        for number, kind in enumerate(kinds[:faults])
    ]


class Run:
    """A job, from its submission to its end."""

    def __init__(self, hosts: Hosts, training: Training, number: int, **other: Any) -> None:
        """`other`: keys of its job file that replace those of a night."""
        self.hosts, self.training = hosts, training
        self.home = f"{SHARED}/{training.name}-{number}"
        self.checkpoints = hosts.folder / "shared" / Path(self.home).name / "checkpoints"
        more = {
            "hostfile": "five.hosts",
            "setup": f"renice -n {NICE} -p $$ >/dev/null",
            "restart": {"max_restarts": 50},
            "timeouts": {"hang_s": HANG_S},
            "checkpoint": {"dir": f"{self.home}/checkpoints", "grace_period_s": 30},
            **other,
        }
        self.id = hosts.start(training, f"{training.name}-{number}", **more)
        self.seen = self.look()
        self.began_s = time.time()

    def look(self) -> Job:
        """As the store has it."""
        while True:
            try:
                with Store.open_for_reading(self.hosts.state_dir) as store:
                    self.seen = store.jobs.find(self.id).job
                    return self.seen
            except AscendrunError:  # the controller that writes it has just been killed
                time.sleep(POLL_S)

    def has_saved(self) -> bool:
        """Whether the present attempt has a checkpoint of its own."""
        folder, tag = self.checkpoints, f"{self.seen.run}.{self.seen.attempt}"
        for claim in folder.glob(".epochs/0*.json"):
            if _tag_of(claim) == tag:
                epoch = f"-e{int(claim.stem):04d}" if int(claim.stem) else ""
                return any(folder.glob(f"step-{'[0-9]' * 8}{epoch}/manifest.json"))
        return False

    def files(self) -> dict[int, list[Path]]:
        """By attempt: rank 0's metrics, on the head and on the nodes."""
        places = [self.hosts.state_dir / "jobs" / self.id]
        places += [
            run
            for host in filter(self.hosts.cluster.is_up, self.hosts.cluster.hosts)
            for run in self.hosts.on(host, "/root/.ascendrun/nodes").glob(f"*/runs/{self.seen.run}")
        ]
        found: dict[int, list[Path]] = {}
        for place in places:
            for path in sorted(place.glob("attempt-*/**/rank-0.metrics.[0-9]*")):
                part = next(part for part in path.parts if part.startswith("attempt-"))
                found.setdefault(int(part.removeprefix("attempt-")), []).append(path)
        return found

    def told(self) -> list[tuple[int, int, float]]:
        """(attempt, step, when) of every step that the head has heard of."""
        spool = self.hosts.state_dir / "jobs" / self.id
        return [
            (int(path.parts[-3].removeprefix("attempt-")), line["step"], line["timestamp"])
            for path in sorted(spool.glob("attempt-*/*/rank-0.metrics.[0-9]*"))
            for line in lines_of([path])
            if "loss" in line and "event" not in line
        ]

    def process(self, rank: int) -> Process | None:
        for host in filter(self.hosts.cluster.is_up, self.seen.hosts):
            for one in self.hosts.cluster.processes(host):
                is_ours = one.environ.get("ASCENDRUN_RUN_ID") == f"{self.seen.run}.{self.seen.attempt}"
                if is_ours and one.environ.get("RANK") == str(rank) and any("programs" in word for word in one.argv):
                    return one
        return None

    def check(
        self, straight: Mapping[Any, Mapping[str, Any]] | None, *, is_whole: bool = True
    ) -> dict[Any, Mapping[str, Any]]:
        """Raises CampaignError unless it succeeded, told the numbers of `straight` if there are any, and every step;
        not `is_whole`: metrics may lie on a host that has no power now."""
        if self.seen.state is not State.SUCCEEDED:
            explained = self.hosts.ascendrun("explain", self.id).stdout[-3000:]
            raise CampaignError(f"{self.training.name} {self.id} is {self.seen.state.value}: {explained}")
        numbers: dict[Any, Mapping[str, Any]] = {}
        for attempt, files in sorted(self.files().items()):
            for path in files:
                story = read_story([path])
                if straight is not None:
                    found = difference(story, replace(story, numbers=straight))
                    if found is not None:
                        raise CampaignError(f"{self.training.name} {self.id}, attempt {attempt}: {found}")
                numbers.update(story.numbers)
        missing = {(0, step) for step in range(1, self.training.steps + 1)} - numbers.keys()
        if missing and is_whole:
            raise CampaignError(f"{self.training.name} {self.id}: no record of {sorted(missing)[:20]}")
        return numbers


def _tag_of(claim: Path) -> str:
    try:
        return str(json.loads(claim.read_text())["tag"])
    except (OSError, ValueError):
        return ""


class Night:
    """`tell` gets a line for each run, fault and job."""

    def __init__(self, hosts: Hosts, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self.hosts, self.tell = hosts, tell
        self.numbers = count(1)
        self.straight: dict[str, Mapping[Any, Mapping[str, Any]]] = {}
        self.ended: list[Run] = []
        self.outcomes: list[dict[str, Any]] = []
        self.undo: list[tuple[float, Callable[[], None]]] = []
        (hosts.folder / "five.hosts").write_text(hosts.cluster.hostfile(slots=2))

    # --- what a fault does

    def kill_rank(self, run: Run, fault: Fault) -> str:
        return self._signal(run, fault.rank, signal.SIGKILL)

    def stop_rank(self, run: Run, fault: Fault) -> str:
        return self._signal(run, fault.rank, signal.SIGSTOP)

    def _signal(self, run: Run, rank: int, number: signal.Signals) -> str:
        process = run.process(rank)
        if process is None:
            raise CampaignError(f"{run.id}: rank {rank} of {run.seen} is nowhere")
        os.kill(process.pid, number)
        return f"rank {rank}"

    def power_off(self, run: Run, fault: Fault) -> str:
        host = run.seen.hosts[fault.node]
        self.hosts.cluster.crash(host)
        self._later(fault, lambda: self._boot(host))
        return host

    def reboot(self, run: Run, fault: Fault) -> str:
        host = run.seen.hosts[fault.node]
        self._boot(host)
        return host

    def _boot(self, host: str) -> None:
        self.hosts.cluster.reboot(host, keep_disk=True)
        self.hosts.cluster.delay(host, DELAY_MS)

    def cut(self, run: Run, fault: Fault) -> str:
        host = run.seen.hosts[fault.node]
        self.hosts.cluster.cut(host)
        self._later(fault, lambda: self.hosts.cluster.heal(host))
        return host

    def _later(self, fault: Fault, undo: Callable[[], None]) -> None:
        self.undo.append((time.monotonic() + fault.lasts_s, undo))

    def kill_agent(self, run: Run, fault: Fault) -> str:
        return self._kill(run.seen.hosts[fault.node], "serve")

    def kill_supervisor(self, run: Run, fault: Fault) -> str:
        return self._kill(run.seen.hosts[fault.node], "supervise")

    def _kill(self, machine: str, word: str) -> str:
        found = [one for one in self.hosts.cluster.processes(machine) if word in one.argv]
        if not found:
            raise CampaignError(f"no {word} on {machine}")
        for one in found:
            os.kill(one.pid, signal.SIGKILL)
        return machine

    def kill_controller(self, run: Run, fault: Fault) -> str:
        """Not its guard."""
        both = controllers(self.hosts.cluster, self.hosts.state_dir)
        guards = {one.pid for one in both}
        for one in both:
            if one.ppid in guards:
                os.kill(one.pid, signal.SIGKILL)
        return "head"

    # --- the night

    def run(self, seed: int, seconds: float, faults: int) -> None:
        """Raises CampaignError at the first promise that is broken."""
        began_s, plan = time.monotonic(), draw(seed, faults)
        self._undisturbed()
        self._delay(DELAY_MS)
        from_s, until_s = time.monotonic(), began_s + seconds
        coming = [(from_s + (until_s - from_s) * number / (faults + 1), fault) for number, fault in enumerate(plan)]
        lanes = [cycle(lane) for lane in LANES]
        runs: list[Run | None] = [None for _ in lanes]
        struck: list[Callable[[], bool]] = []
        is_fast = False
        while time.monotonic() < until_s or coming or struck or any(runs):
            if time.monotonic() > until_s + END_S:
                raise CampaignError(f"faults left: {coming}; jobs: {[run and run.look() for run in runs]}")
            goes_on = time.monotonic() < until_s or bool(coming)
            runs = [self._next(run, lane, goes_on=goes_on) for run, lane in zip(runs, lanes)]
            self._undo_due()
            struck = [is_over for is_over in struck if not is_over()]
            if coming and not self.undo and not struck and time.monotonic() > coming[0][0]:
                struck += self._strike(coming[0][1], runs, coming)
            if not goes_on and not struck and not self.undo and not is_fast:
                self._delay(0)
                is_fast = True
            time.sleep(POLL_S)
        for run in self.ended:
            run.check(self.straight[run.training.name])
        self._summary(seed, time.monotonic() - began_s)

    def _undisturbed(self) -> None:
        runs = [Run(self.hosts, training, 0) for lane in LANES for training in lane]
        for run in runs:
            deadline_s = time.monotonic() + END_S
            while run.look().state not in TERMINAL:
                if time.monotonic() > deadline_s:
                    raise CampaignError(f"undisturbed: {run.seen}")
                time.sleep(POLL_S)
            self.straight[run.training.name] = run.check(None)
            self.tell({"what": "undisturbed", **self._of(run)})

    def _next(self, run: Run | None, lane: Iterator[Training], *, goes_on: bool) -> Run | None:
        if run is not None and run.look().state not in TERMINAL:
            return run
        if run is not None:
            run.check(self.straight[run.training.name], is_whole=False)
            self.ended.append(run)
            self.tell({"what": "job", **self._of(run)})
        return Run(self.hosts, next(lane), next(self.numbers)) if goes_on else None

    def _of(self, run: Run) -> dict[str, Any]:
        return {
            "job": run.id,
            "training": run.training.name,
            "state": run.seen.state.value,
            "attempts": run.seen.attempt,
            "steps_told": len(run.told()),
            "steps": run.training.steps,
            "seconds": round((run.seen.ended_at_s or 0) - run.seen.created_at_s, 1),
            "kinds": [one.failure.kind.value for one in run.seen.past if one.failure],
        }

    def _strike(
        self, fault: Fault, runs: Sequence[Run | None], coming: list[tuple[float, Fault]]
    ) -> list[Callable[[], bool]]:
        """The check that says, later, whether the job trains again; none: it is not the time yet."""
        run = runs[fault.lane]
        if run is None or run.look().state is not State.RUNNING or not run.has_saved():
            return []
        told = run.told()
        step = max((step for attempt, step, _ in told if attempt == run.seen.attempt), default=0)
        if step > 0.9 * run.training.steps:
            return []  # it would end before anything shows
        coming.pop(0)
        attempt, at_s = run.seen.attempt, time.time()
        where = KINDS[fault.kind](self, run, fault)
        outcome = {"what": "fault", "kind": fault.kind, "where": where, "lasts_s": fault.lasts_s, "job": run.id}
        outcome |= {"training": run.training.name, "attempt": attempt, "step": step, "struck_at": format_rfc3339(at_s)}

        def is_over() -> bool:
            later = sorted((when - at_s, number) for number, _, when in run.told() if when > at_s)
            again = [one for one in later if one[1] > attempt] or later[IN_FLIGHT:]
            state = run.seen.state
            if not again and state not in TERMINAL:
                return False
            after_s, number = min(again) if again else (None, run.seen.attempt)
            outcome.update(attempt_after=number, again_s=after_s and round(after_s, 1))
            outcome["found"] = [one.failure.code for one in run.seen.past if one.number >= attempt and one.failure]
            self.outcomes.append(outcome)
            self.tell(outcome)
            return True

        return [is_over]

    def _undo_due(self) -> None:
        for one in [one for one in self.undo if one[0] < time.monotonic()]:
            self.undo.remove(one)
            one[1]()

    def _delay(self, delay_ms: float) -> None:
        for host in self.hosts.cluster.hosts:
            self.hosts.cluster.delay(host, delay_ms)

    def _summary(self, seed: int, seconds: float) -> None:
        by_kind: dict[str, list[float]] = {}
        for one in self.outcomes:
            by_kind.setdefault(one["kind"], []).append(one["again_s"])
        self.tell(
            {
                "what": "night",
                "seed": seed,
                "seconds": round(seconds),
                "faults": len(self.outcomes),
                "jobs": len(self.ended),
                "attempts": sum(run.seen.attempt for run in self.ended),
                "again_s": {
                    kind: {"count": len(times), "median": median([time for time in times if time] or [0])}
                    for kind, times in sorted(by_kind.items())
                },
            }
        )


KINDS: Mapping[str, Callable[[Night, Run, Fault], str]] = {
    "rank killed": Night.kill_rank,
    "rank stopped": Night.stop_rank,
    "power lost": Night.power_off,
    "rebooted": Night.reboot,
    "cut": Night.cut,
    "agent killed": Night.kill_agent,
    "supervisor killed": Night.kill_supervisor,
    "controller killed": Night.kill_controller,
}


def night(folder: Path, seed: int, seconds: float, faults: int, tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Raises CampaignError at the first promise that is broken."""
    shared = folder / "shared"
    shared.mkdir()
    with VirtualCluster.up(HOSTS, disk="512M", shares={str(shared): SHARED}) as cluster:
        hosts = Hosts(cluster, folder)
        try:
            Night(hosts, tell).run(seed, seconds, faults)
        finally:
            hosts.close()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crashes.night", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=7200, help="how long jobs are submitted")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--history", type=Path, help="a file that gets a line for each run, fault and job")
    options = parser.parse_args(argv)

    def tell(what: Mapping[str, Any]) -> None:
        keep_line(json.dumps({"at": format_rfc3339(time.time()), **what}), options.history)

    for number, fault in enumerate(draw(options.seed, options.faults)):
        print(f"seed {options.seed}, fault {number + 1}: {fault}", flush=True)
    with tempfile.TemporaryDirectory(prefix="ascendrun-night-") as folder:
        try:
            night(Path(folder), options.seed, options.seconds, options.faults, tell)
        except CampaignError as failed:
            tell({"what": "failed", "seed": options.seed, "why": str(failed)})
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
