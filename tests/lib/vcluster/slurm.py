"""A real Slurm on the virtual cluster: slurmctld and munged on the head, slurmd with control groups on every host.

Each host has NPUS typed devices (plain files). All hosts and the head read one folder of the cluster as /etc/slurm.
Every slurmd has a freezer group of its own, of version 1, in a namespace: proctrack/cgroup needs no more.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ascendrun.core.errors import AscendrunError
from tests.lib.vcluster.groups import ROOT, _remove_tree
from tests.lib.vcluster.machines import HEAD, Machines
from tests.lib.vcluster.processes import Process, await_true
from tests.lib.vcluster.requirements import NotSupportedError, require_programs

NPUS = 8
CPUS = 32
PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "squeue": "slurm-client", "munged": "munge"}
READY_S = 60.0
DAEMONS = ("slurmctld", "slurmd", "munged", "slurmscriptd")

SLURM_CONF = """\
ClusterName=npu
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={run}/munge.socket
StateSaveLocation={run}/ctld
SlurmctldPidFile={run}/slurmctld.pid
SlurmctldLogFile={run}/slurmctld.log
SlurmdLogFile={run}/slurmd-%n.log
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/var/spool/slurmd
SlurmdParameters=config_overrides
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
SlurmdTimeout=15
KillWait=5
MinJobAge=3600
MailProg=/bin/true
Epilog={run}/epilog
GresTypes=npu
NodeName=node[1-{count}] CPUs={cpus} RealMemory=4000 Gres=npu:910b:{npus} State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=train Nodes=node[1-{count}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=node[1-{count}] MaxTime=INFINITE State=UP PriorityTier=2
PartitionName=short Nodes=node[1-{count}] MaxTime=60 State=UP PriorityTier=1
"""
GRES_CONF = "NodeName=node[1-{count}] Name=npu Type=910b File={run}/davinci[0-{last}]\n"
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/tmp/cg\n"

EPILOG = """#!/bin/sh
left=3000
while [ -e {run}/completing ] && [ $left -gt 0 ]; do sleep 0.2; left=$((left - 1)); done
"""
"""At the end of each job on a node: it is COMPLETING as long as the file `completing` exists, at most 10 minutes."""

HIERARCHIES = ("freezer", "memory")
"""Of control groups of version 1: proctrack/cgroup needs the first, limits of memory the other."""
_SLURMD = (
    "for one in {hierarchies}; do mkdir -p /tmp/cg/$one && mount -t cgroup -o $one none /tmp/cg/$one || exit; done;"
    "mkdir -p /var/spool/slurmd && exec slurmd -D -N {name} >/dev/null 2>&1"
)


def require_slurm() -> None:
    """Raises NotSupportedError with what is missing for Slurm on this machine."""
    require_programs("Slurm", PROGRAMS, "slurm-wlm-basic-plugins")
    if not (ROOT / "freezer").is_dir():
        raise NotSupportedError("Slurm cannot start here: the kernel has no freezer group of version 1")


def run_folder(folder: Path) -> Path:
    """The folder of a cluster with the files that all its machines see under this path."""
    return folder / "slurm"


def shares(folder: Path) -> dict[str, str]:
    run = run_folder(folder)
    (run / "etc").mkdir(parents=True)
    return {str(run): str(run), f"{run}/etc": "/etc/slurm"}


def start(cluster: Machines) -> None:
    """Start all daemons and wait until every host is idle. Raises AscendrunError with the last lines of their logs."""
    run = run_folder(cluster.folder)
    (run / "ctld").mkdir()
    values = {"run": run, "count": len(cluster.hosts), "cpus": CPUS, "npus": NPUS, "last": NPUS - 1}
    for name, text in (("slurm", SLURM_CONF), ("gres", GRES_CONF), ("cgroup", CGROUP_CONF)):
        (run / "etc" / f"{name}.conf").write_text(text.format(**values) if name != "cgroup" else text)
    for number in range(NPUS):
        (run / f"davinci{number}").touch()
    (run / "epilog").write_text(EPILOG.format(run=run))
    (run / "epilog").chmod(0o755)
    (run / "munge.key").write_bytes(b"vcluster" * 128)
    (run / "munge.key").chmod(0o400)
    files = [f"--{name}={run}/munge.{end}" for name, end in (("socket", "socket"), ("key-file", "key"))]
    files += [f"--{name}-file={run}/munge.{name}" for name in ("pid", "log", "seed")]
    cluster.head_run(["munged", "--force", *files], check=True, capture_output=True)
    cluster.head_run(["mount", "--bind", f"{run}/etc", "/etc/slurm"], check=True, cwd="/")
    start_controller(cluster)
    for name in cluster.hosts:
        start_node(cluster, name)
    if not await_true(lambda: _idle(cluster) == list(cluster.hosts), deadline_s=READY_S):
        logs = [f"{path.name}: {line}" for path in run.glob("*.log") for line in path.read_text().splitlines()[-3:]]
        raise AscendrunError("Slurm has not started\n" + "\n".join(logs))


def start_controller(cluster: Machines) -> None:
    cluster.head_run(["slurmctld"], check=True, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def stop_controller(cluster: Machines) -> None:
    """slurmctld ends, and stores its jobs: one that is killed forgets those of the last seconds."""
    for process in cluster.processes(HEAD):
        if _is_daemon(process, ("slurmctld",)):
            cluster.head_run(["kill", str(process.inner_pid)], cwd="/", check=True)
    if not await_true(
        lambda: not any(_is_daemon(one, ("slurmctld",)) for one in cluster.processes(HEAD)), deadline_s=10.0
    ):
        raise OSError("slurmctld has not ended 10 s after its SIGTERM")


def allocations(cluster: Machines) -> list[str]:
    """Ids of the jobs that Slurm has not ended."""
    done = cluster.head_run(
        ["squeue", "--noheader", "--format=%i"], cwd="/", capture_output=True, text=True, check=True
    )
    return str(done.stdout).split()


def start_node(cluster: Machines, name: str) -> None:
    """Start the slurmd of a host, also after a reboot."""
    found = [ROOT / one for one in HIERARCHIES if (ROOT / one).is_dir()]
    groups = [root / f"vcluster-{cluster.cluster_id}" / name for root in found]
    for group in groups:
        group.mkdir(parents=True, exist_ok=True)
    text = _SLURMD.format(name=name, hierarchies=" ".join(root.name for root in found))
    argv, files = (
        ["setsid", "-f", "unshare", "--cgroup", "sh", "-c", text],
        [str(one / "cgroup.procs") for one in groups],
    )
    cluster.host_run(name, argv, groups=files, check=True, capture_output=True)


def remove_groups(cluster: Machines) -> None:
    """After the last process has gone."""
    for one in HIERARCHIES:
        tree = ROOT / one / f"vcluster-{cluster.cluster_id}"
        if tree.is_dir() and not await_true(partial(_remove_tree, tree), deadline_s=10.0):
            raise OSError(f"{tree} is still in use; see its cgroup.procs")


def is_daemon(process: Process) -> bool:
    """Whether a process belongs to a Slurm that rests; slurmstepd is one of a job."""
    return _is_daemon(process, DAEMONS)


def _is_daemon(process: Process, names: Sequence[str]) -> bool:
    words = " ".join(process.argv).replace(":", " ").split()  # slurmctld's helper writes ": slurmscriptd"
    return bool(words) and Path(words[0]).name in names


def _idle(cluster: Machines) -> list[str]:
    argv = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    return sorted({*cluster.head_run(argv, cwd="/", text=True, capture_output=True).stdout.split()})
