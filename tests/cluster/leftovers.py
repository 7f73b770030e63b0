"""The oracle run after every scenario: nothing that it started is left on any host, on the head, or on the machine."""

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from ascendrun.core.settings import STATE_VARIABLE
from tests.lib.vcluster import containers, slurm
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.groups import groups_present
from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.processes import Process, await_true, describe, is_of_the_system, start_time

CODE = Path(__file__).resolve().parents[2]
SETTLE_S = 60.0
"""How long after a test its processes may take to end: an sshd session outlives its connection by a moment, which is
long where the machine is busy."""

OUR_INTERFACE = re.compile(r"^(vcbr|v[crs]\d+)$")


class LeftoversError(AssertionError):
    """Processes that a test left behind, named with host, parent and command line."""


def strangers(cluster: VirtualCluster) -> dict[str, list[Process]]:
    """Processes that a resting cluster does not have, by machine; machines without any are left out."""
    everything = cluster.all_processes()
    found = {name: [one for one in everything[name] if not is_of_the_system(one)] for name in cluster.hosts}
    found[HEAD] = [one for one in everything[HEAD] if one.inner_pid != 1]
    rests = (slurm.is_daemon, containers.is_daemon)
    left = {
        name: [one for one in processes if not any(is_daemon(one) for is_daemon in rests)]
        for name, processes in found.items()
    }
    return {name: processes for name, processes in left.items() if processes}


def require_none(cluster: VirtualCluster, *, deadline_s: float = SETTLE_S) -> None:
    """Raises LeftoversError when processes are still there after `deadline_s`, and kills them: the next test is
    safe."""
    if await_true(lambda: not strangers(cluster), deadline_s=deadline_s):
        return
    left = strangers(cluster)
    if not left:
        return
    for processes in left.values():
        kill(processes)
    text = "\n".join(f"{name}:\n{describe(processes)}" for name, processes in sorted(left.items()))
    raise LeftoversError(
        f"{sum(map(len, left.values()))} processes are left {deadline_s:.0f} s after the test:\n{text}"
    )


def kill(processes: Sequence[Process], number: signal.Signals = signal.SIGKILL) -> None:
    for process in processes:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue


def kill_some(cluster: VirtualCluster, host: str, word: str) -> None:
    kill([one for one in cluster.processes(host) if word in one.argv])


def controllers(cluster: VirtualCluster, state_dir: Path) -> list[Process]:
    """Guards and controllers on the head for this state dir: they may outlive a command; all else is left over."""
    ours = [one for one in cluster.processes(HEAD) if one.environ.get(STATE_VARIABLE) == str(state_dir)]
    return [one for one in ours if "controller" in one.argv]


def hold_namespaces(cluster: VirtualCluster) -> list[int]:
    """Descriptors of the pid namespaces of head and hosts: a number that is held so, the kernel gives to no other.

    Without that, what another cluster runs (of the worker beside us, say) would soon look like ours.
    """
    return [os.open(f"/proc/{cluster.init_pid(name)}/ns/pid", os.O_RDONLY) for name in (HEAD, *cluster.hosts)]


def traces(cluster_ids: Sequence[str], namespaces: Sequence[int]) -> list[str]:
    """What clusters that are down left on the machine itself: mounts, control groups, cables, processes.

    `namespaces`: as `hold_namespaces` gave them while the clusters were up.
    """
    mounts = [
        f"mount {line.split()[4]}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if any(cluster_id in line for cluster_id in cluster_ids)
    ]
    groups = [f"control group {path}" for cluster_id in cluster_ids for path in groups_present(cluster_id)]
    cables = [f"interface {name}" for name in os.listdir("/sys/class/net") if OUR_INTERFACE.match(name)]
    return mounts + groups + cables + file_systems(cluster_ids) + _inside(namespaces)


def file_systems(cluster_ids: Sequence[str]) -> list[str]:
    """Processes that serve a faulty file system of these clusters."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"fuse_server" in words and any(f"vcluster-{one}-".encode() in words for one in cluster_ids):
            found.append(f"process {folder.name}")
    return found


def _inside(namespaces: Sequence[int]) -> list[str]:
    numbers = {os.fstat(descriptor).st_ino for descriptor in namespaces}
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            own = os.stat(f"/proc/{pid}/ns/pid").st_ino
        except OSError:
            continue
        if own in numbers and start_time(int(pid)) is not None:
            found.append(f"process {pid}")
    return found
