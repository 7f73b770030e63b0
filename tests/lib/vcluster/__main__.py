"""The virtual cluster on the command line: `bin/vcluster up 2`, `bin/vcluster exec head -- ssh node1 hostname`, …"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import Callable

from ascendrun.core.errors import AscendrunError, ConflictError, NotFoundError
from ascendrun.sim.ascend.__main__ import add_scenario, scenario_of
from tests.lib.vcluster import state as states
from tests.lib.vcluster.cluster import DISK, VirtualCluster, clusters, sweep
from tests.lib.vcluster.containers import require_containers
from tests.lib.vcluster.folders import NODE_FOLDER
from tests.lib.vcluster.fuse_server import ERRORS
from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.npus import install_on
from tests.lib.vcluster.requirements import NotSupportedError, require_all
from tests.lib.vcluster.slurm import require_slurm

Verb = Callable[[argparse.Namespace], int]

ON_HOSTS = ("cut", "heal", "kill", "crash", "reboot", "freeze", "thaw", "fill", "unfill", "unblock", "recreate", "wipe")
ON_HOST_WITH_NUMBER = {
    "loss": "percent of frames lost, each way",
    "delay": "milliseconds, each way",
    "rate": "kilobits a second, 0: unlimited",
    "clock": "seconds that its wall clock is ahead",
}
ON_TWO = {"isolate": "two hosts that do not reach each other", "block": "packets to the second are dropped"}


def main(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    try:
        verb: Verb = arguments.verb
        return verb(arguments)
    except (AscendrunError, OSError, KeyError, ValueError) as error:
        print(f"vcluster: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        if isinstance(error, AscendrunError) and error.hint:
            print(f"  {error.hint}", file=sys.stderr)
        return error.exit_code if isinstance(error, AscendrunError) else 2


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vcluster", description=__doc__)
    parser.add_argument("--id", help="which cluster, where several are up")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _add_life(verbs)
    for name in ON_HOSTS:
        verb = _add(verbs, name, _on_hosts, f"{name} these hosts")
        verb.add_argument("hosts", nargs="+")
    for name, meaning in ON_HOST_WITH_NUMBER.items():
        verb = _add(verbs, name, _on_hosts, meaning)
        verb.add_argument("number", type=float)
        verb.add_argument("hosts", nargs="+")
    for name, meaning in ON_TWO.items():
        _add(verbs, name, _on_all, meaning).add_argument("hosts", nargs=2)
    sshd = _add(verbs, "sshd", _on_hosts, "stop, start or restart the sshd of hosts")
    sshd.add_argument("action", choices=("stop", "start", "restart"))
    sshd.add_argument("hosts", nargs="+")
    fs = _add(verbs, "fs", _fs, "make calls on a directory of hosts fail or wait")
    fs.add_argument("action", choices=("mount", *ERRORS, "hang", "stick", "heal", "status"))
    fs.add_argument("hosts", nargs="+")
    fs.add_argument("--directory", default=NODE_FOLDER, help="default: %(default)s")
    fs.add_argument("--seconds", type=float, help="how long; default: until heal or clean")
    npus = _add(verbs, "npus", _npus, "make hosts simulated Ascend nodes")
    npus.add_argument("hosts", nargs="+")
    add_scenario(npus)
    path = _add(verbs, "path", _path, "print the path of a host's root directory on this machine")
    path.add_argument("host")
    clean = _add(verbs, "clean", _on_all, "undo every fault (of these hosts)")
    clean.add_argument("hosts", nargs="*")
    return parser


def _add_life(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = _add(verbs, "up", _up, "boot a cluster")
    up.add_argument("count", type=int, metavar="HOSTS")
    up.add_argument("--disk", default=DISK, help="size of each host's disk")
    up.add_argument("--sshd-option", action="append", default=[], help="a line of sshd_config")
    up.add_argument("--share", action="append", default=[], metavar="FOLDER[:WHERE]", help="all hosts see it")
    up.add_argument("--shared-home", action="store_true", help="all hosts have one ~/.ascendrun and one /home")
    up.add_argument("--slurm", action="store_true", help="a Slurm of all hosts, with 8 NPUs each")
    up.add_argument("--containers", action="store_true", help="a dockerd and podman in every host, with one image")
    up.add_argument("--user", action="append", default=[], metavar="NAME[:SHELL]", help="an account on every host")
    run = _add(verbs, "exec", _exec, "run a command as the head, or on a host's console")
    run.add_argument("host")
    run.add_argument("command", nargs=argparse.REMAINDER)
    _add(verbs, "list", _list, "clusters, their hosts and what runs there")
    _add(verbs, "hostfile", _hostfile, "print a hostfile of the cluster")
    _add(verbs, "requirements", _requirements, "list what is missing on this machine")
    down = _add(verbs, "down", _down, "take the cluster down")
    down.add_argument("--all", action="store_true", help="every cluster of this user, also those of killed runs")


def _add(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, verb: Verb, meaning: str
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=meaning, description=meaning)
    parser.set_defaults(verb=verb, name=name)
    return parser


def _chosen(arguments: argparse.Namespace) -> VirtualCluster:
    found = clusters(states.base_folder(os.environ))
    if arguments.id:
        found = [cluster for cluster in found if cluster.cluster_id == arguments.id]
    if not found:
        raise NotFoundError("no virtual cluster is up", hint="vcluster up 2")
    if len(found) > 1:
        ids = ", ".join(cluster.cluster_id for cluster in found)
        raise ConflictError(f"several virtual clusters are up: {ids}", hint="vcluster --id ID …")
    return found[0]


def _up(arguments: argparse.Namespace) -> int:
    started_s = time.monotonic()
    cluster = VirtualCluster.up(
        arguments.count,
        disk=arguments.disk,
        sshd_options=arguments.sshd_option,
        shares=_pairs(arguments.share, lambda source: source),
        users=_pairs(arguments.user, lambda _: "bash"),
        shared_home=arguments.shared_home,
        has_slurm=arguments.slurm,
        has_containers=arguments.containers,
        is_kept=True,
    )
    print(f"{cluster.cluster_id}: {arguments.count} hosts up in {time.monotonic() - started_s:.2f} s", file=sys.stderr)
    print(cluster.cluster_id)
    return 0


def _pairs(texts: Sequence[str], default: Callable[[str], str]) -> dict[str, str]:
    split = [text.partition(":") for text in texts]
    return {left: right or default(left) for left, _, right in split}


def _exec(arguments: argparse.Namespace) -> int:
    cluster = _chosen(arguments)
    command: list[str] = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ValueError("exec requires a command: vcluster exec head -- ssh node1 hostname")
    if arguments.host == HEAD:
        argv = cluster.head_argv(command)
        os.execv(argv[0], argv)
    argv = cluster.host_argv(arguments.host, command)
    os.execve(argv[0], argv, dict(cluster.host_environ()))


def _on_hosts(arguments: argparse.Namespace) -> int:
    cluster = _chosen(arguments)
    name = f"sshd_{arguments.action}" if "action" in arguments else arguments.name
    numbers = [arguments.number] if "number" in arguments else []
    for host in arguments.hosts:
        getattr(cluster, name)(host, *numbers)
    return 0


def _fs(arguments: argparse.Namespace) -> int:
    cluster = _chosen(arguments)
    for host in arguments.hosts:
        faulty = cluster.file_system(host, arguments.directory)
        if arguments.action in ERRORS:
            faulty.fail(arguments.action, arguments.seconds)
        elif arguments.action in ("hang", "stick"):
            getattr(faulty, arguments.action)(arguments.seconds)
        elif arguments.action == "heal":
            faulty.heal()
        status = faulty.status()
        print(f"{host} {arguments.directory}  {status['fault'] or 'sound'}  {status['stuck']} calls stuck")
    return 0


def _npus(arguments: argparse.Namespace) -> int:
    cluster, scenario = _chosen(arguments), scenario_of(arguments)
    for host in arguments.hosts:  # addresses of ports are those of one node: each host is a separate node
        number = scenario.number or sorted(cluster.hosts).index(host) + 1
        install_on(cluster, host, dataclasses.replace(scenario, number=number))
    return 0


def _path(arguments: argparse.Namespace) -> int:
    print(_chosen(arguments).path(arguments.host, "/"))
    return 0


def _on_all(arguments: argparse.Namespace) -> int:
    getattr(_chosen(arguments), arguments.name)(*arguments.hosts)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    for cluster in clusters(states.base_folder(os.environ)):
        counts = {name: len(found) for name, found in cluster.all_processes().items()}
        for name in (HEAD, *cluster.hosts):
            word = "up" if cluster.is_up(name) else "off"
            print(f"{cluster.cluster_id}  {name:10} {word:4} {cluster.address(name):15} {counts[name]} processes")
    return 0


def _hostfile(arguments: argparse.Namespace) -> int:
    print(_chosen(arguments).hostfile(), end="")
    return 0


def _requirements(arguments: argparse.Namespace) -> int:
    require_all()
    print("a virtual cluster can start here", file=sys.stderr)
    for option, require in (("--slurm", require_slurm), ("--containers", require_containers)):
        try:
            require()
        except NotSupportedError as refused:
            print(f"without {option}: {refused.message}; {refused.hint}", file=sys.stderr)
    return 0


def _down(arguments: argparse.Namespace) -> int:
    if arguments.all:
        gone = sweep(states.base_folder(os.environ), everything=True)
    else:
        cluster = _chosen(arguments)
        cluster.down()
        gone = [cluster.cluster_id]
    print(f"down: {', '.join(gone) or 'none was up'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
