"""What campaigns share: trainings on five virtual hosts, faults from a seed, and no command that helps the jobs.

A campaign submits jobs, one after another in each lane, hits them with the faults of its plan, and reads their states
from the store. Every job must succeed. One JSON line for each undisturbed run, fault and job goes to stdout, or into
--history; the last one has the totals, or why the campaign failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.core.jobs.job import TERMINAL, Job, State
from ascendrun.core.records import format_rfc3339
from ascendrun.head.state.store import Store
from tests.cluster.leftovers import controllers
from tests.crashes.hosts import CampaignError, Hosts, keep_line
from tests.crashes.remains import difference, lines_of, read_story
from tests.crashes.trainings import Training
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.processes import Process

HOSTS = 5
SHARED = "/shared"
HANG_S = 60
POLL_S = 0.2
END_S = 3600.0
"""Without a fault or the end of a job. Both take minutes; this is for a machine with other work."""
NICE = 4
IN_FLIGHT = 3
"""Steps that the other ranks may still record when one is gone."""
Tell = Callable[[Mapping[str, Any]], None]
Back = Callable[[str], object]


def longer(training: Training, steps: int, more: Mapping[str, Any]) -> Training:
    return replace(training, arguments={**training.arguments, **more}, steps=steps)


@dataclass(frozen=True)
class Fault:
    """`places`: of the hosts that it hits, among those of `Campaign.targets`. `lasts_s`: until they are back.
    `lane`: of the job that it hits; `rank`: of that job. `moment`: what the job does then; `wait_s`: after that began.
    `gap_s`: since the fault before."""

    kind: str
    places: tuple[int, ...]
    lasts_s: float
    lane: int = 0
    rank: int = 0
    moment: str = "training"
    wait_s: float = 0.0
    gap_s: float = 0.0


class Run:
    """A job, from its submission to its end."""

    def __init__(self, hosts: Hosts, training: Training, number: int, **other: Any) -> None:
        """`other`: keys of its job file that replace these."""
        self.hosts, self.training = hosts, training
        self.home = f"{SHARED}/{training.name}-{number}"
        self.checkpoints = hosts.folder / "shared" / Path(self.home).name / "checkpoints"
        fenced = {} if training.program else {"fenced": True}
        more = {
            "hostfile": "five.hosts",
            "setup": f"renice -n {NICE} -p $$ >/dev/null",
            "restart": {"max_restarts": 50},
            "timeouts": {"hang_s": HANG_S},
            "checkpoint": {"dir": f"{self.home}/checkpoints", "grace_period_s": 30, **fenced},
            **other,
        }
        self.id = hosts.start(training, f"{training.name}-{number}", **more)
        self.seen = self.look()

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

    def told(self, first: int = 1) -> list[tuple[int, int, float]]:
        """(attempt, step, when) of every step that the head has records of, since attempt `first`."""
        spool = self.hosts.state_dir / "jobs" / self.id
        return [
            (number, line["step"], line["timestamp"])
            for number in range(first, self.seen.attempt + 1)
            for path in sorted(spool.glob(f"attempt-{number}/*/rank-0.metrics.[0-9]*"))
            for line in lines_of([path])
            if "loss" in line and "event" not in line
        ]

    def step(self) -> int:
        """The newest one of this attempt; 0: it has none."""
        return max((step for _, step, _ in self.told(self.seen.attempt)), default=0)

    @property
    def seconds(self) -> float:
        """From its submission to its end."""
        return round((self.seen.ended_at_s or 0) - self.seen.created_at_s, 1)

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


class Campaign:
    """`tell` gets a line for each undisturbed run, fault and job."""

    delay_ms = 15.0
    """Of every frame, each way, while faults come: a slow network makes trainings long, not the processor busy."""

    def __init__(self, hosts: Hosts, tell: Tell, plan: Sequence[Fault]) -> None:
        self.hosts, self.tell, self.cluster, self.plan = hosts, tell, hosts.cluster, list(plan)
        self.numbers = count(1)
        self.runs: list[Run | None] = []
        self.ended: list[Run] = []
        self.away: dict[str, tuple[float, Back]] = {}
        """Hosts that a fault took: when they are back, and by what."""
        self.watched: list[Callable[[], bool]] = []
        """Of faults whose outcome is open: whether it is known now."""
        self.outcomes: list[Mapping[str, Any]] = []
        self.last_mono = time.monotonic()
        """Of the last fault, or end of a job."""
        (hosts.folder / "five.hosts").write_text(self.cluster.hostfile(slots=2))

    # --- what a campaign decides

    def run(self) -> Mapping[str, Any]:
        """Return its totals. Raises CampaignError at the first promise that is broken."""
        raise NotImplementedError

    def start(self, training: Training, **more: Any) -> Run:
        """`more`: keys of the job file."""
        return Run(self.hosts, training, next(self.numbers), **more)

    def is_time(self, run: Run, fault: Fault) -> bool:
        """Whether the next fault comes now. `run`: the job of its lane."""
        raise NotImplementedError

    def targets(self, run: Run) -> Sequence[str]:
        """The hosts that a fault may hit."""
        return run.seen.hosts

    def check(self, run: Run) -> None:
        """Raises CampaignError for a job that ended otherwise than it had to. Hosts may be away, with files."""
        raise NotImplementedError

    # --- what a fault does: the method's result is what it hit

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
        return self._take(run, fault, self.cluster.crash, self._boot)

    def cut(self, run: Run, fault: Fault) -> str:
        return self._take(run, fault, self.cluster.cut, self.cluster.heal)

    def drain(self, run: Run, fault: Fault) -> str:
        return self._take(
            run,
            fault,
            lambda host: self.hosts.do("drain", host, "--now"),
            lambda host: self.hosts.do("undrain", host, "--no-check"),
        )

    def reboot(self, run: Run, fault: Fault) -> str:
        return self._take(run, fault, self._boot, lambda host: None)

    def _take(self, run: Run, fault: Fault, take: Callable[[str], object], back: Back) -> str:
        there = [host for host in self.targets(run) if host not in self.away]
        victims = sorted({there[place % len(there)] for place in fault.places})
        for host in victims:
            take(host)
            self.away[host] = (time.monotonic() + fault.lasts_s, back)
        return ", ".join(victims)

    def _boot(self, host: str) -> None:
        self.cluster.reboot(host, keep_disk=True)
        self.cluster.delay(host, self.delay_ms)

    def kill_agent(self, run: Run, fault: Fault) -> str:
        return self._kill(run.seen.hosts[fault.places[0]], "serve")

    def kill_supervisor(self, run: Run, fault: Fault) -> str:
        return self._kill(run.seen.hosts[fault.places[0]], "supervise")

    def _kill(self, machine: str, word: str) -> str:
        found = [one for one in self.cluster.processes(machine) if word in one.argv]
        if not found:
            raise CampaignError(f"no {word} on {machine}")
        for one in found:
            os.kill(one.pid, signal.SIGKILL)
        return machine

    def kill_controller(self, run: Run, fault: Fault) -> str:
        """Not its guard."""
        both = controllers(self.cluster, self.hosts.state_dir)
        guards = {one.pid for one in both}
        for one in both:
            if one.ppid in guards:
                os.kill(one.pid, signal.SIGKILL)
        return "head"

    # --- the loop

    def undisturbed(self, runs: Sequence[Run]) -> None:
        """Until all of them have succeeded."""
        deadline_s = time.monotonic() + END_S
        while any(run.look().state not in TERMINAL for run in runs):
            if time.monotonic() > deadline_s:
                raise CampaignError(f"undisturbed: {[run.seen for run in runs]}")
            time.sleep(POLL_S)

    def play(self, *lanes: Iterator[Training]) -> None:
        """Until all trainings of all lanes are over, and all hosts are back."""
        self.delay(self.delay_ms)
        self.last_mono = time.monotonic()
        self.runs = [None for _ in lanes]
        while True:
            self.runs = [self._next(run, lane) for run, lane in zip(self.runs, lanes)]
            self.watched = [is_over for is_over in self.watched if not is_over()]
            self._bring_back(time.monotonic())
            if not any(self.runs):
                break
            if time.monotonic() > self.last_mono + END_S:
                raise CampaignError(f"left: {self.plan}; jobs: {[run and run.seen for run in self.runs]}")
            run = self.runs[self.plan[0].lane] if self.plan else None
            if run is not None and self.is_time(run, self.plan[0]):
                self._strike(run, self.plan.pop(0))
            time.sleep(POLL_S)
        self._bring_back(float("inf"))
        self.delay(0)

    def delay(self, delay_ms: float) -> None:
        for host in self.cluster.hosts:
            self.cluster.delay(host, delay_ms)

    def _next(self, run: Run | None, lane: Iterator[Training]) -> Run | None:
        if run is not None and run.look().state not in TERMINAL:
            return run
        if run is not None:
            self.check(run)
            self.ended.append(run)
            self.last_mono = time.monotonic()
        training = next(lane, None)
        return self.start(training) if training is not None else None

    def _bring_back(self, until_mono: float) -> None:
        for host, (due_mono, back) in list(self.away.items()):
            if due_mono <= until_mono:
                back(host)
                del self.away[host]

    def _strike(self, run: Run, fault: Fault) -> None:
        job, step = run.seen, run.step()
        where = self.kinds[fault.kind](self, run, fault)
        attempt, at_s = job.attempt, time.time()
        self.last_mono = time.monotonic()
        outcome: dict[str, Any] = {"what": "fault", **asdict(fault), "where": where, "job": run.id}
        outcome |= {"training": run.training.name, "state": job.state.value, "attempt": attempt, "step": step}
        outcome |= {"nodes": len(job.hosts), "struck_at": format_rfc3339(at_s)}

        def is_over() -> bool:
            later = sorted((when - at_s, number) for number, _, when in run.told(attempt) if when > at_s)
            again = [one for one in later if one[1] > attempt] or later[IN_FLIGHT:]
            if not again and run.seen.state not in TERMINAL:
                return False
            after_s, number = min(again) if again else (None, run.seen.attempt)
            found = [one.failure.code for one in run.seen.past if one.number >= attempt and one.failure]
            outcome.update(attempt_after=number, nodes_after=len(run.seen.hosts_of(number)), found=found)
            outcome["again_s"] = after_s and round(after_s, 1)
            self.outcomes.append(outcome)
            self.tell(outcome)
            return True

        self.watched.append(is_over)

    kinds: Mapping[str, Callable[[Campaign, Run, Fault], str]] = {
        "rank killed": kill_rank,
        "rank stopped": stop_rank,
        "power lost": power_off,
        "rebooted": reboot,
        "cut": cut,
        "drained": drain,
        "agent killed": kill_agent,
        "supervisor killed": kill_supervisor,
        "controller killed": kill_controller,
    }


def command(
    parser: argparse.ArgumentParser, argv: Sequence[str], make: Callable[[Hosts, Tell, argparse.Namespace], Campaign]
) -> int:
    """Run a campaign as a command; the exit code. `parser`: with the options that others do not have."""
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--history", type=Path, help="a file that gets a line for each run, fault and job")
    options = parser.parse_args(argv)

    def tell(what: Mapping[str, Any]) -> None:
        keep_line(json.dumps({"at": format_rfc3339(time.time()), "seed": options.seed, **what}), options.history)

    with tempfile.TemporaryDirectory(prefix="ascendrun-campaign-") as folder:
        try:
            campaign(Path(folder), lambda hosts: make(hosts, tell, options))
        except CampaignError as failed:
            tell({"what": "failed", "why": str(failed)})
            return 1
    return 0


def campaign(folder: Path, make: Callable[[Hosts], Campaign]) -> None:
    """Raises CampaignError at the first promise that is broken."""
    shared = folder / "shared"
    shared.mkdir()
    with VirtualCluster.up(HOSTS, disk="512M", shares={str(shared): SHARED}) as cluster:
        hosts = Hosts(cluster, folder)
        try:
            hosts.await_controller()
            began_s, one = time.monotonic(), make(hosts)
            totals = one.run()
            one.tell({"what": "night", **totals, "seconds": round(time.monotonic() - began_s), "jobs": len(one.ended)})
        finally:
            hosts.close()
