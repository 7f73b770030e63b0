"""The jobs of benchmarks.fair_share on a real Slurm of this machine, with a fast clock.

    python -m benchmarks.slurm_trace TRACE [--runs 2000x1000 500x250] [--users 10] [--load 1.2] [--results FOLDER]

Needs root, and Debian's slurmctld, slurmd, faketime, slurmdbd and mariadb-server. A run has a number of jobs and a
speed. All runs are at the same time, each in namespaces of this machine: one slurmctld, and 64 slurmd with 8 CPUs.
Their clock is as many times as fast (libfaketime), so limits, intervals of the scheduler and half-lives are those of
the trace. Each job is a `sleep` of its recorded time divided by the speed, which `sbatch --begin` submits for its
user.

fifo         first in, first out, with sched/backfill
fair share   priority/multifactor by fair share, with a half-life of 7 days, and sched/backfill

The work of Slurm itself does not get faster: to start and to end a job takes as many times as long in the time of the
trace. So `schedule()` also gets the jobs with the durations that they had in Slurm, from the allocation to the end.
What Slurm needs from there until its hosts are free again is not in them, and costs more at a higher speed.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from benchmarks.fair_share import EACH, HOSTS, Ours, Work, cells, outcome, read_trace, simulate
from benchmarks.results import RESULTS, Row, Sheet, read_rows, table, write_page

COLUMNS: tuple[str, ...] = (
    "order",
    "jobs",
    "speed",
    "durations",
    "scheduler",
    "utilisation",
    "median_wait_s",
    "longest_wait_s",
)
COLUMNS += ("share_error", "added_s", "load")
EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)
SUBMITTING_S = 100.0
"""Real seconds until the first job may start, in which all must be submitted."""
NICE = "-5"

SLURM_CONF = """\
ClusterName=trace
SlurmctldHost=head
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=1000000
CommunicationParameters=NoInAddrAny
StateSaveLocation={run}/state
SlurmctldPidFile={run}/slurmctld.pid
SlurmctldLogFile={run}/slurmctld.log
SlurmdPidFile={run}/%n.pid
SlurmdLogFile={run}/%n.log
SlurmdSpoolDir={run}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={run}/ended
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters={scheduler}
SlurmdTimeout=0
MessageTimeout=60000
BatchStartTimeout=60000
UnkillableStepTimeout=60000
InactiveLimit=0
OverTimeLimit=UNLIMITED
MinJobAge=60000
MaxJobCount=20000
MailProg=/bin/true
NodeName=h[00-{last:02d}] CPUs={each} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SCHEDULER = (
    "bf_window=2880,bf_max_job_test=1000,bf_continue,sched_interval=30,"
    "bf_max_time=3600,bf_yield_interval=1000000000,build_queue_timeout=1000000000,max_sched_time=3600"
)
"""The last four are limits of computing time, which the fast clock would exhaust at once."""
ORDERS = {
    "fifo": "PriorityType=priority/basic\n",
    "fair share": """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=head
AccountingStorageEnforce=associations
PriorityType=priority/multifactor
PriorityDecayHalfLife=7-0
PriorityWeightFairshare=1000000
PriorityWeightAge=1000
PriorityMaxAge=30-0
""",
}
SLURMDBD_CONF = """\
DbdHost=head
SlurmUser=root
AuthType=auth/none
MessageTimeout=60000
PidFile={run}/slurmdbd.pid
LogFile={run}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
StorageLoc=slurm
"""
SETUP = """\
set -e
real() {{ env -u LD_PRELOAD "$@"; }}
hostname head
ip link set lo up
ip addr add 192.0.2.1/32 dev lo
mount -t tmpfs tmpfs {run}
cp {files}/* {run}
mkdir {run}/state {run}/etc
mount --bind {run}/etc /etc/slurm
mv {run}/*.conf /etc/slurm
chmod 600 /etc/slurm/slurmdbd.conf
cat /etc/passwd {run}/users > {run}/passwd
mount --bind {run}/passwd /etc/passwd
mount --bind {run}/hosts /etc/hosts
if [ '{order}' = 'fair share' ]; then
    mkdir {run}/mariadb
    real mariadb-install-db --no-defaults --user=root --datadir={run}/mariadb > {run}/mariadb.log
    real mariadbd --no-defaults --user=root --datadir={run}/mariadb --bind-address=127.0.0.1 \\
        --init-file={run}/init.sql --socket={run}/mariadb.socket --pid-file={run}/mariadb.pid \\
        >> {run}/mariadb.log 2>&1 &
    until [ -S {run}/mariadb.socket ]; do real sleep 0.2; done
    slurmdbd
    until real sacctmgr -i add cluster trace > /dev/null 2>&1; do real sleep 0.5; done
    real sacctmgr -i -Q add account all Cluster=trace
    real sacctmgr -i -Q add user {users} Account=all Cluster=trace
fi
slurmctld 2> /dev/null
for host in {hosts}; do
    mkdir {run}/spool-$host
    unshare --uts sh -c "hostname $host; exec slurmd" 2> /dev/null
done
until [ "$(real sinfo --noheader --Node --states=idle | wc -l)" = {count} ]; do real sleep 0.5; done
real xargs -P 4 -L 1 sbatch -Q < {run}/submit
ends=0
until [ $ends -ge {jobs} ]; do
    real sleep 2
    [ ! -f {run}/ended ] || ends=$(wc -l < {run}/ended)
    cp {run}/ended {run}/slurmctld.log {files} 2> /dev/null || true
done
"""


def prepare(files: Path, run: Path, work: Sequence[Work], order: str, speed: float) -> None:
    users = sorted({one.user for one in work})
    values = {
        "run": run,
        "files": files,
        "order": order,
        "users": ",".join(users),
        "hosts": " ".join(HOSTS),
        "count": len(HOSTS),
        "last": len(HOSTS) - 1,
        "each": EACH,
        "jobs": len(work),
        "scheduler": SCHEDULER,
    }
    places = [f"127.0.1.{number} {host}" for number, host in enumerate(HOSTS, start=1)]
    entries = [f"{user}:x:{60000 + number}:0::/:/bin/sh" for number, user in enumerate(users)]
    texts = {
        "slurm.conf": (SLURM_CONF + ORDERS[order]).format(**values),
        "slurmdbd.conf": SLURMDBD_CONF.format(**values),
        "init.sql": "CREATE USER slurm@localhost;\nGRANT ALL ON *.* TO slurm@localhost;\n",
        "hosts": "\n".join(["127.0.0.1 localhost head", *places, ""]),
        "users": "\n".join([*entries, ""]),
        "job": '#!/bin/sh\nexec sleep "$1"\n',
        "submit": "".join(_submission(number, one, run, order, speed) for number, one in enumerate(work)),
        "setup": SETUP.format(**values),
    }
    for name, text in texts.items():
        (files / name).write_text(text)


def _submission(number: int, one: Work, run: Path, order: str, speed: float) -> str:
    nodes = -(-one.devices // EACH)
    begin = EPOCH + timedelta(seconds=SUBMITTING_S * speed + one.at_s)
    first = f"--priority={1_000_000 - number}" if order == "fifo" else ""
    return (
        f"--uid={one.user} --job-name={one.name} --nodes={nodes} --ntasks-per-node={one.devices // nodes} {first} "
        f"--time={-(-one.limit_s // 60):.0f} --begin={begin:%Y-%m-%dT%H:%M:%S} --chdir=/ --output=/dev/null "
        f"{run}/job {one.real_s / speed:.3f}\n"
    )


def read_ended(text: str, work: Sequence[Work], speed: float) -> dict[str, tuple[float, float]]:
    """Return start and end of each job by its name, in seconds since the first submission.

    Raises ValueError for a job that did not complete, or that was submitted too late.
    """
    field = re.compile(r"(\w+)=(\S*)")
    zero = EPOCH + timedelta(seconds=SUBMITTING_S * speed)
    found = {}
    for line in text.splitlines():
        values = dict(field.findall(line))
        times = [datetime.fromisoformat(values[key] + "+00:00") - zero for key in ("StartTime", "EndTime")]
        found[values["Name"]] = times[0].total_seconds(), times[1].total_seconds()
        submitted = datetime.fromisoformat(values["SubmitTime"] + "+00:00")
        if values["JobState"] != "COMPLETED" or submitted > zero:
            raise ValueError(f"{line}; expected COMPLETED, and SubmitTime before {zero}")
    return {one.name: found[one.name] for one in work}


class Loads(threading.Thread):
    """Collects the load of the machine every 10 s."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self.seen = [os.getloadavg()[0]]

    def run(self) -> None:
        while not self.ended.wait(10):
            self.seen.append(os.getloadavg()[0])


@dataclass(frozen=True)
class Run:
    """Jobs for one Slurm. `speed`: seconds of the trace in a second."""

    order: str
    work: Sequence[Work]
    speed: float

    def times(self) -> dict[str, tuple[float, float]]:
        """Run all jobs. Return start and end of each, in seconds since the first submission."""
        clock = f"@{EPOCH:%Y-%m-%d %H:%M:%S} x{self.speed:g}"
        namespaces = ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with tempfile.TemporaryDirectory() as folder:
            files, run = Path(folder, "files"), Path(folder, "run")
            files.mkdir()
            run.mkdir()
            Path(folder).chmod(0o755)
            prepare(files, run, self.work, self.order, self.speed)
            argv = ["nice", "-n", NICE, "faketime", "-m", "-f", clock, *namespaces, "sh", str(files / "setup")]
            subprocess.run(argv, check=True, cwd="/", env={"PATH": os.environ["PATH"], "TZ": "UTC"})
            return read_ended((files / "ended").read_text(), self.work, self.speed)


def compare(run: Run, times: Mapping[str, tuple[float, float]]) -> Iterator[dict[str, object]]:
    """Yield the rows of one run: Slurm's, and those of schedule() with the same jobs."""
    held = [replace(one, real_s=times[one.name][1] - times[one.name][0]) for one in run.work]
    added_s = statistics.median(long.real_s - one.real_s for long, one in zip(held, run.work, strict=True))
    about = {"order": run.order, "jobs": len(run.work), "speed": run.speed, "added_s": added_s}
    for durations, work in (("in Slurm", held), ("of the trace", run.work)):
        starts = {
            "Slurm": [(one, times[one.name][0]) for one in work],
            "ascendrun": list(simulate(work, Ours(is_shared=run.order != "fifo"))),
        }
        for scheduler, started in starts.items():
            yield {**about, "durations": durations, "scheduler": scheduler, **outcome(work, started)}


def render(rows: Iterable[Row]) -> str:
    header = ["order", "jobs", "speed", "durations", "scheduler", "utilisation, %", "median wait, h", "longest wait, h"]
    lines = []
    for row in rows:
        numbers = {key: float(row[key]) for key in ("utilisation", "median_wait_s", "longest_wait_s", "share_error")}
        known = (row["order"], row["jobs"], f"{float(row['speed']):g}", row["durations"], row["scheduler"])
        lines.append([*known, *cells(numbers), f"{float(row['added_s']):.0f}"])
    return table([*header, "share error, %", "added to a job, s"], lines)


SAYS = (
    "The same jobs in a real Slurm 22.05 and in schedule(), on 64 hosts with 8 devices. Slurm's clock is as many times "
    "as fast as the speed. Durations of the trace: a job counts with its recorded time. Durations in Slurm: from the "
    "allocation to the end, with the real time of Slurm's work times the speed; schedule() gets the same. The last "
    "column is the median of what that adds to a job. A job is completing after its end, which is not in it, and its "
    "hosts are not free meanwhile. Utilisation and shares: up to the last submission, as in benchmarks.fair_share."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--runs", nargs="+", default=["2000x1000", "500x250"], metavar="JOBSxSPEED")
    parser.add_argument("--users", type=int, default=10)
    parser.add_argument("--load", type=float, default=1.2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    runs = []
    for jobs, speed in (text.split("x") for text in given.runs):
        work = read_trace(given.trace, jobs=int(jobs), users=given.users, load=given.load)
        runs += [Run(order, work, float(speed)) for order in ORDERS]
    with Sheet(given.results, "slurm_trace", COLUMNS) as sheet, ThreadPoolExecutor(len(runs)) as pool:
        loads = Loads()
        loads.start()
        every = list(pool.map(Run.times, runs))
        loads.ended.set()
        for run, times in zip(runs, every, strict=True):
            for row in compare(run, times):
                sheet.add(**row, load=statistics.median(loads.seen))
    write_page(
        sheet,
        title="A recorded trace in Slurm and in ascendrun",
        says=f"{SAYS} Trace: {given.trace.name}.",
        body=render(read_rows(sheet.path)),
        command=f"python -m benchmarks.slurm_trace {given.trace.name} --runs {' '.join(given.runs)}",
    )


if __name__ == "__main__":
    main()
