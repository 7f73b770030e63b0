"""How each launcher is told to run the same two ranks on each of two hosts, and to end them."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import yaml

from benchmarks.bed import Bed
from benchmarks.ours import Ours
from tests.lib.vcluster.network import HEAD_ADDRESS

RANK = Path(__file__).with_name("peers") / "rank.py"
RANKS_PER_HOST = 2
HOSTS = 2
JOB = "bench"
CURVE = "-o KexAlgorithms=curve25519-sha256"
NETWORK = f"{HEAD_ADDRESS.rsplit('.', 2)[0]}.0.0/16"
WARM, COLD, MPIRUN = "ascendrun", "ascendrun, cold", "mpirun"


@dataclass(frozen=True)
class Launcher:
    """`argv`: what a user types on the head. `interrupts`: how many ^C that launcher wants (pdsh: two in a second).

    `stop`: the command that ends the job; None: ^C does. `prepare`: runs before each start, not timed.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    interrupts: int = 1
    stop: Sequence[str] | None = None
    prepare: Callable[[], object] = lambda: None


def launchers(bed: Bed, ours: Ours) -> list[Launcher]:
    """Those that are installed, the peers first."""
    hosts = bed.cluster.hosts[:HOSTS]
    found: list[Launcher] = []
    if shutil.which("mpirun"):
        found.append(Launcher(MPIRUN, mpirun_argv(hosts), {}))
    if shutil.which("pdsh") and importlib.util.find_spec("torch"):
        env = {"PDSH_SSH_ARGS_APPEND": CURVE}
        found.append(Launcher("torchrun over pdsh", torchrun_argv(hosts), env, interrupts=2))
    if shutil.which("pdsh") and importlib.util.find_spec("deepspeed"):
        found.append(Launcher("deepspeed", deepspeed_argv(bed, hosts), {"PDSH_SSH_ARGS_APPEND": CURVE}))
    return found + our_launchers(bed, ours, hosts)


def mpirun_argv(hosts: Sequence[str]) -> list[str]:
    where = ",".join(f"{host}:{RANKS_PER_HOST}" for host in hosts)
    network = ["--mca", "btl_tcp_if_include", NETWORK, "--mca", "oob_tcp_if_include", NETWORK]
    return [
        "mpirun",
        "--allow-run-as-root",
        "--host",
        where,
        "--mca",
        "plm_rsh_args",
        CURVE,
        *network,
        sys.executable,
        str(RANK),
    ]


def torchrun_argv(hosts: Sequence[str]) -> list[str]:
    """The static rendezvous: what people type on every node by hand, typed by pdsh."""
    remote = [
        "env",
        "OMP_NUM_THREADS=1",
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(len(hosts)),
        "--nproc-per-node",
        str(RANKS_PER_HOST),
        "--master-addr",
        hosts[0],
        "--master-port",
        "29500",
    ]
    words = f"{shlex.join(remote)} --node-rank %n {shlex.quote(str(RANK))}"
    return ["pdsh", "-S", "-R", "ssh", "-w", ",".join(hosts), words]


def deepspeed_argv(bed: Bed, hosts: Sequence[str]) -> list[str]:
    hostfile = bed.folder / "deepspeed.hosts"
    hostfile.write_text(bed.cluster.hostfile(slots=RANKS_PER_HOST, names=hosts))
    return [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--hostfile",
        str(hostfile),
        "--launcher",
        "pdsh",
        "--master_addr",
        hosts[0],
        str(RANK),
    ]


def our_launchers(bed: Bed, ours: Ours, hosts: Sequence[str]) -> list[Launcher]:
    job: dict[str, object] = {
        "name": JOB,
        "command": [sys.executable, str(RANK)],
        "nodes": len(hosts),
        "devices": {"type": "cpu", "per_node": RANKS_PER_HOST},
        "hostfile": str(ours.hostfile(hosts)),
    }
    file = bed.folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    argv, stop, env = ours.argv("submit", str(file)), ours.argv("stop", JOB), ours.environ()

    def warm_up() -> None:
        ours.run("stop", "--now", JOB)  # one that a trial before could not end would hold the hosts
        ours.run("nodes", "-H", str(ours.hostfile(hosts)))  # brings the agents

    def cool_down() -> None:
        warm_up()
        ours.stop_controller()

    return [
        Launcher(WARM, argv, env, stop=stop, prepare=warm_up),
        Launcher(COLD, argv, env, stop=stop, prepare=cool_down),
    ]
