"""From a command to the first line of every rank on a real Slurm: srun, submitit and ascendrun, taking turns.

python -m benchmarks.slurm [--repeat 10] [--results FOLDER]
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.bed import Bed
from benchmarks.launchers import HOSTS, JOB, RANK, RANKS_PER_HOST
from benchmarks.ours import Ours
from benchmarks.results import Row, Sheet, median, repeated, shown, table
from benchmarks.trial import Trial
from tests.lib.vcluster import slurm
from tests.lib.vcluster.processes import await_true

COLUMNS = ("what", "repeat", "seen_s", "after_grant_s", "load", "note")
STEP, SRUN, SUBMITIT, OURS = "srun, in an allocation", "srun", "submitit", "ascendrun submit --engine"
SUBMIT_BY_SUBMITIT = Path(__file__).with_name("peers") / "submitit_start.py"
TASKS = (f"--nodes={HOSTS}", f"--ntasks-per-node={RANKS_PER_HOST}")
IMPORTS = "import runpy, sys, torch; runpy.run_path(sys.argv[1], run_name='__main__')"
SCRIPTS = {"": (sys.executable, str(RANK)), ", torch": (sys.executable, "-c", IMPORTS, str(RANK))}
"""Suffix of a way, and the command of its ranks: a line at once, or after the import of torch as in a training."""
_LINE = "'[FIRST %s %f]' % (os.environ['SLURM_PROCID'], time.time())"
_PRINT = f"import os, time; print({_LINE}, flush=True); time.sleep(600)"
_SUPERVISOR = (sys.executable, str(Path(__file__).with_name("peers") / "supervisor.py"))
FLOORS = {
    ", a shell": (RANKS_PER_HOST, ("sh", "-c", 'echo "[FIRST $SLURM_PROCID $(date +%s.%N)]"; exec sleep 600')),
    ", python -c print": (RANKS_PER_HOST, (sys.executable, "-c", _PRINT)),
    ", ranks of a Python": (1, (*_SUPERVISOR, "1", str(RANKS_PER_HOST), *SCRIPTS[""])),
    ", ranks of the third Python": (1, (*_SUPERVISOR, "3", str(RANKS_PER_HOST), *SCRIPTS[""])),
}
"""Suffix of STEP, tasks of each node and their command: what Slurm takes, and Pythons that start one another."""
PATIENCE_S = 90.0


@dataclass(frozen=True)
class Way:
    """One way to start the ranks. ALLOCATION in `argv` is the id of a running one."""

    name: str
    argv: Sequence[str]


class SlurmBed(Bed):
    """A bed with a Slurm of HOSTS nodes."""

    def __init__(self) -> None:
        super().__init__(HOSTS, has_slurm=True)
        self.ours = Ours(self)
        (self.folder / "config").mkdir()
        (self.folder / "config/ascendrun").mkdir()
        (self.folder / "config/ascendrun/config.yaml").write_text("engines: {hpc: {type: slurm}}\n")
        devices = {"type": "cpu", "per_node": RANKS_PER_HOST}
        for suffix, argv in SCRIPTS.items():
            job = {"name": JOB, "command": list(argv), "nodes": HOSTS, "devices": devices}
            self.job_file(suffix).write_text(yaml.safe_dump(job))

    def job_file(self, suffix: str) -> Path:
        return self.folder / f"job{suffix.replace(', ', '-')}.yaml"

    @property
    def env(self) -> dict[str, str]:
        return {**self.ours.environ(), "XDG_CONFIG_HOME": str(self.folder / "config")}

    def slurm(self, *argv: str) -> str:
        done = self.cluster.head_run(argv, cwd="/", capture_output=True, text=True, check=True)
        return str(done.stdout).strip()

    def allocate(self) -> str:
        """Return the id of an allocation that runs."""
        allocation = self.slurm("sbatch", "--parsable", *TASKS, "--output=/dev/null", "--wrap=sleep 600")
        running = ["squeue", "--noheader", "--states=running", f"--jobs={allocation}", "--format=%i"]
        assert await_true(lambda: self.slurm(*running) != "", deadline_s=PATIENCE_S)
        return allocation

    def free(self) -> None:
        """Cancel whatever is queued or runs, and wait until Slurm has its nodes back."""
        self.ours.run("stop", "--now", JOB)
        left = slurm.allocations(self.cluster)
        if left:
            self.slurm("scancel", *left)
        assert await_true(lambda: not slurm.allocations(self.cluster), deadline_s=PATIENCE_S), self.slurm("squeue")

    def granted_s(self) -> float:
        """When the newest job of ascendrun got its allocation, UTC seconds: of its own event."""
        argv = self.ours.argv("events", JOB, "--kind", "allocation-granted", "-o", "json")
        done = self.cluster.head_run(argv, env=self.environ(self.env), capture_output=True, text=True, check=True)
        at = json.loads(done.stdout)["events"][-1]["at"]
        return datetime.datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()


def ways(bed: SlurmBed) -> Iterator[Way]:
    for suffix, argv in SCRIPTS.items():
        yield Way(STEP + suffix, ["srun", "--overlap", "--jobid=ALLOCATION", *TASKS, *argv])
        yield Way(SRUN + suffix, ["srun", *TASKS, *argv])
        if importlib.util.find_spec("submitit"):
            count = str(HOSTS), str(RANKS_PER_HOST)
            yield Way(SUBMITIT + suffix, [sys.executable, str(SUBMIT_BY_SUBMITIT), str(bed.shared), *count, *argv])
        yield Way(OURS + suffix, bed.ours.argv("submit", str(bed.job_file(suffix)), "--engine", "hpc"))
    for suffix, (tasks, argv) in FLOORS.items():
        shape = (f"--nodes={HOSTS}", f"--ntasks-per-node={tasks}")
        yield Way(STEP + suffix, ["srun", "--overlap", "--jobid=ALLOCATION", *shape, *argv])


def run(repeats: int, sheet: Sheet) -> None:
    bed = SlurmBed()
    with bed:
        run_on(bed, repeats, sheet)


def run_on(bed: SlurmBed, repeats: int, sheet: Sheet) -> None:
    """The first repetition puts files and agents in their places, and does not count."""
    for repeat in range(-1, repeats):
        for way in ways(bed):
            bed.free()
            argv = list(way.argv)
            if way.name.startswith(STEP):
                allocation = bed.allocate()
                argv = [word.replace("ALLOCATION", allocation) for word in argv]
            bed.settle()
            with Trial(bed, argv, bed.env) as trial:
                began = trial.await_ranks(HOSTS * RANKS_PER_HOST, patience_s=PATIENCE_S)
                after = None
                if began is not None and way.name.startswith(OURS):
                    after = began.at_s + began.seen_s - bed.granted_s()
                elif began is not None and way.name.startswith(STEP):
                    after = began.seen_s
            if repeat >= 0:
                sheet.add(
                    what=way.name,
                    repeat=repeat,
                    seen_s=None if began is None else began.seen_s,
                    after_grant_s=after,
                    load=f"{os.getloadavg()[0]:.1f}",
                    note=trial.tail() if began is None else "",
                )
    bed.free()


def render(rows: Sequence[Row]) -> str:
    def of(what: str, column: str) -> float | None:
        return median((row for row in rows if row["what"] == what), column)

    lines = []
    for suffix in SCRIPTS:
        step_s, srun_s = of(STEP + suffix, "after_grant_s"), of(SRUN + suffix, "seen_s")
        for what in (STEP, SRUN, SUBMITIT, OURS):
            seen_s, after_s = of(what + suffix, "seen_s"), of(what + suffix, "after_grant_s")
            ratios = (
                None if seen_s is None or not srun_s or what == STEP else seen_s / srun_s,
                None if after_s is None or not step_s else after_s / step_s,
            )
            lines.append((what + suffix, shown(seen_s), shown(ratios[0]), shown(after_s), shown(ratios[1])))
    step_s = of(STEP, "after_grant_s")
    for suffix in FLOORS:
        after_s = of(STEP + suffix, "after_grant_s")
        ratio = None if after_s is None or not step_s else after_s / step_s
        lines.append((STEP + suffix, shown(after_s), shown(None), shown(after_s), shown(ratio)))
    return table(["", "first lines, s", "÷ srun", "after the grant, s", "÷ srun in an allocation"], lines)


SAYS = (
    f"From the command to the first line of each of {HOSTS * RANKS_PER_HOST} ranks on {HOSTS} nodes at the terminal of "
    "the head, medians. After the grant: from the moment in which ascendrun knew of its allocation; Slurm decides "
    "how long a job is queued. submitit writes the output of tasks to files, which its script reads every 0.1 s. "
    "torch: each rank imports it before its line. The last rows are floors. What a shell takes is Slurm's part. The "
    "rest of the others is the start of Python: of one; of a supervisor's and then a rank's; of four, one after the "
    "other. So many ascendrun starts after the grant: those of holder, connection, supervisor and rank."
)


def main() -> None:
    repeated(
        __doc__, "slurm", COLUMNS, run, render, title="slurm: from a command to the first lines", says=SAYS, repeat=10
    )


if __name__ == "__main__":
    main()
