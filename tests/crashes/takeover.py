"""Takeovers: the power of the head's machine is cut, again and again, while jobs start, wait, are stopped and end.

    python -m tests.crashes.takeover --seed 1 --cuts 30 --history takeover.jsonl

Two machines are the head in turn. On each of them commands submit and stop jobs all the time; the jobs run on node3 and
node4, and a long one writes the time five times a second on node5, next to a loop that ascendrun does not know. Each
cut is at a moment of MOMENTS, drawn from the seed. Afterwards the other machine replies to `ps`; each job whose
`submit` was answered is there and ends; each of its ranks started once; the long job wrote as regularly as the loop;
and the old head, back with its disk, leaves its store as it was and becomes the standby. Where most voters have not
recorded that the copy is complete, the standby does not take over, and the old head continues when it has power again.
One JSON line for each cut goes to stdout, or into --history. What broke a promise is kept in a directory that the last
line names. A takeover after more than TAKEOVER_S is counted: the machine may have other work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Callable

from ascendrun.core.errors import ConflictError
from ascendrun.core.records import format_rfc3339
from tests.crashes.hosts import CampaignError, keep_line
from tests.lib.two_heads import HEADS, HOME, STATE, TwoHeads
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.machines import HostDownError
from tests.lib.vcluster.processes import await_true

MOMENTS: Mapping[str, float] = {"any": 15.0, "start": 0.6, "stop": 2.0, "reply": 0.3, "catching up": 3.0}
"""When power is cut: most seconds after a node has prepared a start, after a rank got the signal to stop, after the
reply to a submit, after the start of the standby."""
TAKEOVER_S, REFUSES_S, NEVER_S = 60.0, 35.0, 900.0
GAP_S = 1.0
"""Of the long job's lines, which a busy machine may cause."""
WAITING = 6
"""Most jobs of one machine that have not started."""
BEAT = "while [ ! -e /tmp/enough ]; do echo $$ $(date +%s.%N) | tee -a {file}; sleep 0.2; done"
RANK = """[ "$(cat part)" = {name} ] || exit 9; echo {name} $RANK $ASCENDRUN_RUN_ID >>/tmp/starts
{then}"""
HELD = """trap 'echo {name} >>/tmp/stops; sleep 1.5; exit 0' TERM; while :; do sleep 0.3; done"""
VOTERS = ("node3", "node4", "node5")
JOB_NODES = VOTERS[:2]
ENDED = ("SUCCEEDED", "STOPPED", "FAILED")
NODES = f"{HOME}/.ascendrun/nodes"


@dataclass(frozen=True)
class Cut:
    moment: str
    delay_s: float


def draw(seed: int, cuts: int) -> list[Cut]:
    """All moments in a random order, then all in another one, and so on."""
    lot = random.Random(seed)
    moments: list[str] = []
    while len(moments) < cuts:
        moments += lot.sample(sorted(MOMENTS), len(MOMENTS))
    return [Cut(moment, round(lot.uniform(0, MOMENTS[moment]), 2)) for moment in moments[:cuts]]


@dataclass
class Job:
    """`id`: from the reply to its submit, None: there was none. `is_stopped`: the reply to `stop` came."""

    name: str
    nodes: int
    is_held: bool
    id: str | None = None
    is_stopped: bool = False


class Load:
    """The commands of one machine: they end with its power, and begin again when it has power."""

    def __init__(self, heads: TwoHeads, name: str, seed: int) -> None:
        self._heads, self._name, self._lot = heads, name, random.Random(f"{seed} {name}")
        self.jobs: list[Job] = []
        self.replies, self.failed = 0, ""
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        for number in count():
            if self.is_over.wait(self._lot.uniform(0.5, 3.0)):
                return
            try:
                self._act(number)
            except (HostDownError, OSError):  # the power was cut
                continue
            except subprocess.TimeoutExpired as error:
                self.failed = str(error)
                return

    def close(self) -> None:
        self.is_over.set()
        self._thread.join()

    def _act(self, number: int) -> None:
        held = [job for job in self.jobs if job.is_held and job.id is not None and not job.is_stopped]
        begun = started(self._heads)
        if held and (len(held) > 1 or self._lot.random() < 0.4):
            job = self._lot.choice(held)
            job.is_stopped = stop(self._heads, self._name, job)
        elif sum(job.id is not None and not begun[job.name] for job in self.jobs) < WAITING:
            job = Job(f"{self._name}-{number}", self._lot.choice((1, 1, 2)), self._lot.random() < 0.3)
            then = HELD.format(name=job.name) if job.is_held else f"sleep {self._lot.uniform(0, 4):.1f}"
            command = RANK.format(name=job.name, then=then)
            self._heads.write_job(self._name, job.name, command, hostfile="load.hosts", nodes=job.nodes)
            self.jobs.append(job)
            done = self._heads.on(self._name, "submit", f"{job.name}.yaml", "--detach", "-o", "json")
            if done.returncode == 0:
                job.id = str(json.loads(done.stdout)["id"])
                self.replies += 1


def stop(heads: TwoHeads, name: str, job: Job) -> bool:
    """Whether the job is stopped now, or was. A machine that is no longer the head refuses with the same exit code."""
    code = heads.on(name, "stop", str(job.id), "--no-wait").returncode
    if code != ConflictError.exit_code:
        return code == 0
    shown = heads.on(name, "show", str(job.id), "-o", "json")
    return shown.returncode == 0 and json.loads(shown.stdout)["job"]["state"] in ENDED


def lines_of(heads: TwoHeads, file: str, nodes: Sequence[str] = JOB_NODES) -> list[list[str]]:
    paths = [heads.cluster.path(node, file) for node in nodes]
    return [line.split() for path in paths if path.exists() for line in path.read_text().split("\n")[:-1]]


def started(heads: TwoHeads) -> Counter[str]:
    """How many ranks have started, by name of their job."""
    return Counter(words[0] for words in lines_of(heads, "/tmp/starts"))


def runs(heads: TwoHeads) -> set[str]:
    return {path.name for node in JOB_NODES for path in heads.cluster.path(node, NODES).glob("*/runs/*")}


class Campaign:
    """`tell` gets what a line of the history has."""

    def __init__(self, cluster: VirtualCluster, seed: int, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self.heads, self.cluster, self.seed, self.tell = TwoHeads(cluster), cluster, seed, tell
        self.head, self.other = HEADS
        self.checked: set[str] = set()
        self.told: list[dict[str, Any]] = []
        for name in HEADS:
            self.heads.write(name, f"{HOME}/load.hosts", "node3 slots=2\nnode4 slots=2\n")
            self.heads.write(name, f"{HOME}/beats.hosts", "node5 slots=1\n")
        self.heads.write_job("node1", "beats", BEAT.format(file="/tmp/beats"), hostfile="beats.hosts")
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        cluster.host_popen("node5", ["sh", "-c", BEAT.format(file="/tmp/loop")], **quiet)
        self.loads: list[Load] = []

    def run(self, cuts: Sequence[Cut]) -> None:
        """Raises CampaignError at the first promise that is broken."""
        try:
            submit = lambda: not self.heads.on(self.head, "submit", "beats.yaml", "--detach").returncode  # noqa: E731
            self._await(submit, "the first submit was answered")
            self._await(lambda: lines_of(self.heads, "/tmp/beats", ["node5"]), "the long job runs")
            self.heads.start_standby(self.other)
            self._await_sync()
            self.loads += [Load(self.heads, name, self.seed) for name in HEADS]
            for number, cut in enumerate(cuts):
                self.told.append({"what": "cut", "number": number + 1, "moment": cut.moment, "head": self.head})
                self._cut(cut, self.told[-1])
                self.tell(self.told[-1])
            self._end()
        finally:
            for load in self.loads:
                load.close()

    def _await(self, fact: Callable[[], object], what: str) -> None:
        if not await_true(fact, deadline_s=NEVER_S):
            raise CampaignError(f"within {NEVER_S:g} s never: {what}")

    def _await_sync(self) -> None:
        self._await(lambda: self.heads.status(self.head).get("in_sync"), f"{self.other} in sync")

    def _await_moment(self, cut: Cut) -> None:
        if cut.moment == "catching up":
            standby = self.heads.standbys.pop()
            standby.kill()
            standby.wait()
            self._await(lambda: self.heads.status(self.head).get("in_sync") is False, "the copy is incomplete")
            self.heads.start_standby(self.other)
        elif cut.moment != "any":
            marks: Mapping[str, Callable[[], object]] = {
                "start": lambda: runs(self.heads),
                "stop": lambda: len(lines_of(self.heads, "/tmp/stops")),
                "reply": lambda: sum(load.replies for load in self.loads),
            }
            mark, before = marks[cut.moment], marks[cut.moment]()
            self._await(lambda: mark() != before, cut.moment)
        time.sleep(cut.delay_s)

    def _cut(self, cut: Cut, told: dict[str, Any]) -> None:
        self._await_moment(cut)
        told.update(cut_at=format_rfc3339(time.time()), load=round(os.getloadavg()[0], 1))
        cut_s, cut_mono = time.time(), time.monotonic()
        self.cluster.crash(self.head)
        jobs = [job for load in self.loads for job in load.jobs if job.name not in self.checked]
        told["unended"] = sum(job.id is not None for job in jobs)
        told["in_sync"] = self._is_in_sync()
        if told["in_sync"]:
            self._await(self._is_head, f"{self.other} is the head")
            told["takeover_s"] = round(time.monotonic() - cut_mono, 1)
        elif await_true(self._is_head, deadline_s=REFUSES_S):
            raise CampaignError(f"{self.other} has taken over with an incomplete copy")
        self.cluster.reboot(self.head, keep_disk=True)
        if not told["in_sync"]:
            self.heads.popen(self.head, "controller", "run")  # as the entry of `controller install` does
            self._await(lambda: not self.heads.on(self.head, "ps").returncode, f"{self.head} continues")
            told["continued_s"] = round(time.monotonic() - cut_mono, 1)
        else:
            self._return_old()
            self.heads.start_standby(self.head)
            self.head, self.other = self.other, self.head
        self._await_sync()
        told["in_sync_s"] = round(time.monotonic() - cut_mono, 1)
        told["term"] = self.heads.status(self.head)["term"]
        told["jobs"] = self._check_jobs(jobs)
        told.update(self._check_beats(cut_s))

    def _is_in_sync(self) -> bool:
        """Whether most voters have recorded that the standby may take over."""
        files = [file for voter in VOTERS for file in self.cluster.path(voter, NODES).glob("*/heads/*.json")]
        return sum(bool(json.loads(file.read_text())["in_sync"]) for file in files) > len(VOTERS) // 2

    def _is_head(self) -> bool:
        is_copy = self.cluster.path(self.other, f"{STATE}.standby").is_dir()
        return not is_copy and not self.heads.on(self.other, "ps").returncode

    def _return_old(self) -> None:
        """The old head begins as after any reboot: it learns that it is not the head, and writes nothing."""
        store = self.cluster.path(self.head, STATE)
        before = self.heads.rows(self.head)
        self.heads.on(self.head, "controller", "run")
        changed = [line for line in self.heads.rows(self.head) if line not in before]
        if changed:
            raise CampaignError(f"the old head {self.head} has written: {changed}")
        paths = [store / "head.json", *store.glob("state.db*"), *store.glob("jobs/**/*")]
        files = {path: path.read_bytes() for path in paths if path.is_file()}
        self.heads.on(self.head, "ps")
        if not self.heads.on(self.head, "controller", "run").returncode:
            raise CampaignError(f"the old head {self.head} began once more")
        written = [str(path) for path, content in files.items() if path.read_bytes() != content]
        if written:
            raise CampaignError(f"the old head {self.head} has written {written}")

    def _listed(self) -> dict[str, tuple[str, str]]:
        """Id and state of all jobs by name; {}: the head did not reply."""
        listed = self.heads.on(self.head, "ps", "-a", "-o", "json")
        found = [] if listed.returncode else json.loads(listed.stdout)["jobs"]
        return {job["name"]: (job["id"], job["state"]) for job in found}

    def _check_jobs(self, jobs: Sequence[Job]) -> Mapping[str, int]:
        """Wait for the ends of jobs; how many ended in each state. One without a reply may be missing."""
        states: dict[str, str] = {}

        def has_ended() -> bool:
            listed = self._listed()
            for job in jobs if listed else ():
                job.id = listed.get(job.name, (job.id,))[0]
                if job.id is not None and job.name not in listed:
                    raise CampaignError(f"lost: {job}")
            states.update({name: state for name, (_, state) in listed.items()})
            due = [job for job in jobs if job.id is not None and (job.is_stopped or not job.is_held)]
            return bool(listed) and all(states.get(job.name) in ENDED for job in due)

        if not await_true(has_ended, deadline_s=NEVER_S):
            raise CampaignError(f"not ended: {[job for job in jobs if states.get(job.name) not in ENDED]}")
        begun = Counter((words[0], words[1]) for words in lines_of(self.heads, "/tmp/starts"))
        over, ranks = [job for job in jobs if states.get(job.name) in ENDED], started(self.heads)
        bad: list[object] = [one for one, times in begun.items() if times > 1]  # started twice
        bad += [job for job in over if states[job.name] == "FAILED"]
        bad += [job for job in over if states[job.name] == "STOPPED" and not job.is_held]
        bad += [job for job in over if states[job.name] == "SUCCEEDED" and ranks[job.name] != job.nodes]
        bad += [name for name, state in states.items() if state == "FOUND"]
        bad += [load.failed for load in self.loads if load.failed]
        if bad:
            raise CampaignError(f"started twice, ended otherwise, unknown, or a command without a reply: {bad}")
        self.checked |= {job.name for job in over}
        return Counter(states[job.name] for job in over)

    def _check_beats(self, since_s: float) -> Mapping[str, float]:
        """The longest pauses since the cut, of the long job and of the loop; one process writes each."""
        longest = {}
        for name in ("beats", "loop"):
            lines = lines_of(self.heads, f"/tmp/{name}", ["node5"])
            times = [since_s, *(float(at_s) for _, at_s in lines if float(at_s) > since_s), time.time()]
            longest[f"{name}_gap_s"] = round(max(after - before for before, after in zip(times, times[1:])), 2)
            if len({pid for pid, _ in lines}) != 1:
                raise CampaignError(f"{name}: written by { ({pid for pid, _ in lines}) }")
        # at load 50, one of two equal loops was held for 4.1 s and the other for 2.0
        if longest["beats_gap_s"] > max(GAP_S, 3 * longest["loop_gap_s"]):
            raise CampaignError(f"training was disturbed: {longest}")
        return longest

    def _end(self) -> None:
        for load in self.loads:
            load.close()
        jobs = [job for load in self.loads for job in load.jobs]
        for job in jobs:
            if job.id is not None and job.is_held and not job.is_stopped:
                job.is_stopped = stop(self.heads, self.head, job)
        self._check_jobs(jobs)
        self.cluster.path("node5", "/tmp/enough").touch()
        self._await(lambda: self._listed().get("beats", ("", ""))[1] == "SUCCEEDED", "the long job ended")
        took = [one["takeover_s"] for one in self.told if "takeover_s" in one]
        self.tell(
            {
                "what": "takeover",
                "seed": self.seed,
                "cuts": len(self.told),
                "takeovers": len(took),
                "takeover_s": {"median": median(took or [0]), "most": max(took, default=0)},
                "late": len([one for one in took if one > TAKEOVER_S]),
                "refused": len(self.told) - len(took),
                "jobs": len([job for job in jobs if job.id is not None]),
                "unanswered": len([job for job in jobs if job.id is None]),
                "gap_s": {name: max(one[f"{name}_gap_s"] for one in self.told) for name in ("beats", "loop")},
                "load": [min(one["load"] for one in self.told), max(one["load"] for one in self.told)],
            }
        )

    def keep(self) -> Path:
        """Copy what may show why a promise was broken, and return the directory."""
        kept = Path(tempfile.mkdtemp(prefix="ascendrun-takeover-kept-"))
        for name in filter(self.cluster.is_up, self.cluster.hosts):
            argv = ["tar", "-C", str(self.cluster.path(name, "/")), "-czf", str(kept / f"{name}.tgz")]
            subprocess.run([*argv, "root/.local/state", "root/.ascendrun", "tmp"], stderr=subprocess.DEVNULL)
        return kept


def takeover(seed: int, cuts: Sequence[Cut], tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Raises CampaignError at the first promise that is broken."""
    with VirtualCluster.up(5, disk="256M") as cluster:
        campaign = Campaign(cluster, seed, tell)
        try:
            campaign.run(cuts)
        except CampaignError as error:
            raise CampaignError(f"{error}; kept: {campaign.keep()}") from error
        finally:
            campaign.heads.close()


def main(argv: Sequence[str]) -> int:
    name = "python -m tests.crashes.takeover"
    parser = argparse.ArgumentParser(prog=name, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cuts", type=int, default=30)
    parser.add_argument("--history", type=Path, help="a file that gets a line for each cut")
    options = parser.parse_args(argv)

    def tell(what: Mapping[str, Any]) -> None:
        keep_line(json.dumps({"at": format_rfc3339(time.time()), **what}), options.history)

    try:
        takeover(options.seed, draw(options.seed, options.cuts), tell)
    except CampaignError as failed:
        tell({"what": "failed", "seed": options.seed, "why": str(failed)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
