"""Launch plan: the exact processes of every node, from a job, its hosts and their reports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import PreflightError
from ascendrun.core.hosts import Host
from ascendrun.core.jobfile import launchers
from ascendrun.core.jobfile.launchers import LauncherCommand
from ascendrun.core.jobs.checkpoints import ResumePoint
from ascendrun.core.jobs.placement import choose_devices, choose_hosts, placement_faults
from ascendrun.core.jobs.roles import Part, place_parts
from ascendrun.core.network import Network, candidate_bases, candidate_ports, choose_network, host_addresses
from ascendrun.core.node_messages import Failure
from ascendrun.core.rank_env import NodeShare, own_files, rank_environments
from ascendrun.core.reports import NodeReport
from ascendrun.options import make_arguments
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec

PORT_TOKEN = "\0MASTER_PORT\0"
"""Placeholder in an argument for the free port of the rank-0 node; NUL cannot occur in a user's argument."""


@dataclass(frozen=True)
class Folders:
    """Absolute paths on one node for this run and attempt, as `node/layout.py` defines them."""

    work: str
    checkpoints: str
    attempt: str
    trees: str


@dataclass(frozen=True)
class Tree:
    """A staged directory: `name` is "code" (of the user), "programs" (bundled) or "library" (for scripts of the user);
    `sha256` is of its contents."""

    name: str
    sha256: str
    size_bytes: int
    files: int


@dataclass(frozen=True)
class RankPlan:
    """One rank; for the launcher none the one process of its node, and `rank` is the node rank. Below a launcher
    `argv` is (), and `env` has what the launcher does not set."""

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class NodePlan:
    """Start data of one node. `launcher` None: the agent starts the ranks. `setup`: bash text run before each process
    that the agent starts, None: none. `devices`: by local rank, None: no devices. `pointer`: {format, path, step} of
    the checkpoint that a pointer file shall name, None: as it is. `ends_job`: the job has succeeded when the ranks of
    all such nodes have exited with 0; those of the others serve them, and are stopped then; with roles those of the
    first role. `role`: None: the job has none. `container`: of container_request, None: none."""

    host: str
    node_rank: int
    ranks: tuple[RankPlan, ...]
    cwd: str
    setup: str | None
    folders: Folders
    devices: tuple[int, ...] | None = None
    pointer: Mapping[str, Any] | None = None
    launcher: LauncherCommand | None = None
    ends_job: bool = True
    container: Mapping[str, Any] | None = None
    role: str | None = None


@dataclass(frozen=True)
class LaunchPlan:
    """Start data of all nodes. `master_ports`: tried in order by bind on the rank-0 node of each role; the first
    free port becomes MASTER_PORT in the environment of its ranks (and replaces PORT_TOKEN in arguments).
    `hccl_bases`: candidates for HCCL_IF_BASE_PORT; the first that is free on all nodes is set, (): it is not set
    here. `device_type`: npu, cuda or cpu. `leases_devices`: nodes lease the devices of the job. `max_s`: None means
    no limit. `fence_s`: lease of a node without the head, None: it may run without. `stop_signal` is a name without
    SIG, such as "TERM". `home`: the run whose working directory the ranks use, None: that of run_id.
    `peers`: addresses by node rank, (): one host ends without the others."""

    job: str
    attempt: int
    run_id: str
    nodes: tuple[NodePlan, ...]
    trees: tuple[Tree, ...]
    world_size: int
    master_address: str
    master_ports: tuple[int, ...]
    hccl_bases: tuple[int, ...]
    device_type: str
    leases_devices: bool
    stop_signal: str
    grace_s: float
    start_s: float
    max_s: float | None
    home: str | None = None
    sampling: Mapping[str, Any] | None = None
    fence_s: float | None = None
    peers: tuple[str, ...] = ()


CODE_TREE, PROGRAMS_TREE, LIBRARY_TREE = "code", "programs", "library"
DEVICE_LEASE = "device-lease"
"""Check of a job file without which devices are not leased."""


def make_plan(
    spec: JobSpec,
    hosts: Sequence[Host],
    reports: Mapping[str, NodeReport],
    *,
    job: str,
    attempt: int,
    run_id: str,
    folders: Mapping[str, Folders],
    trees: Sequence[Tree],
    home: str | None = None,
    resume: ResumePoint | None = None,
    package: str | None = None,
    ray_names: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Return the processes of each node. `hosts`: the hostfile's, in its order; `reports`, `folders`: by host name;
    `home`: as in LaunchPlan. `resume`: the checkpoint to continue from, None: unknown. `package`: of the job's program,
    None: it is a bundled one, a file, or none. `ray_names`: as in launchers.ray_command.

    Raises PreflightError with every reason why the hosts cannot run the job.
    """
    chosen = choose_hosts(spec, hosts)
    network = _checked_network(spec, chosen, reports)
    parts = list(place_parts(spec, chosen))
    devices = {host.name: choose_devices(part.spec, host) for part, hosts in parts for host in hosts}
    resume = resume or ResumePoint()
    addresses = {**host_addresses(chosen, reports), chosen[0].name: network.master_address}
    roles = {part.role: {host.name: addresses[host.name] for host in hosts} for part, hosts in parts}
    nodes: list[NodePlan] = []
    for part, hosts in parts:
        own = replace(network, master_address=addresses[hosts[0].name])
        shares = _node_shares(
            part, hosts, reports, folders, trees, devices, own, job=job, attempt=attempt, run_id=run_id,
            resume=resume, roles=roles, ranks=sum(len(node.ranks) for node in nodes),
        )  # fmt: skip
        for host, share in zip(hosts, shares):
            python = reports[host.name].python if host.is_local else "python3"
            own_folders, name = folders[host.name], host.name
            made = _make_node(part.spec, share, own_folders, devices, name, python, resume, package, ray_names)
            nodes.append(replace(made, node_rank=len(nodes), ends_job=made.ends_job and part.ends_job))
    return LaunchPlan(
        job=job,
        attempt=attempt,
        run_id=run_id,
        nodes=tuple(nodes),
        trees=tuple(trees),
        world_size=sum(len(node.ranks) for node in nodes),
        master_address=network.master_address,
        master_ports=candidate_ports(run_id, spec.env.get("MASTER_PORT")),
        hccl_bases=candidate_bases(run_id, spec.env) if spec.devices.type == "npu" else (),
        device_type=spec.devices.type,
        leases_devices=DEVICE_LEASE not in (name.replace("_", "-").lower() for name in spec.checks.skip),
        stop_signal=spec.checkpoint.signal,
        grace_s=spec.checkpoint.grace_period_s,
        start_s=spec.timeouts.start_s,
        max_s=spec.timeouts.run_s,
        home=home,
        fence_s=spec.restart.fence_after_s if spec.restart.on_unreachable_node == "fence" else None,
        peers=tuple(addresses[host.name] for host in chosen) if all(node.ends_job for node in nodes) else (),
    )


def _checked_network(spec: JobSpec, chosen: Sequence[Host], reports: Mapping[str, NodeReport]) -> Network:
    """Return the network of hosts that can run the job. Raises PreflightError with every reason why they cannot."""
    faults = [Failure(PreflightError.code, message, hint) for _, message, hint in placement_faults(spec, chosen)]
    missing = [host.name for host in chosen if host.name not in reports]
    if missing:
        message = Text("plan.no-report", "{hosts:hosts}: no report received", hosts=missing)
        faults.insert(0, Failure(PreflightError.code, message, Text("plan.no-report.hint", "run `ascendrun nodes`")))
    unreachable: dict[str, Text] = {}
    network = Network("", {}) if faults else choose_network(chosen, reports, unreachable)
    faults += [Failure(PreflightError.code, fault) for fault in unreachable.values()]
    if faults:
        raise _preflight_error(spec.name, faults, hosts=tuple(unreachable) or tuple(missing))
    return network


def _node_shares(
    part: Part,
    hosts: Sequence[Host],
    reports: Mapping[str, NodeReport],
    folders: Mapping[str, Folders],
    trees: Sequence[Tree],
    devices: Mapping[str, tuple[int, ...]],
    network: Network,
    *,
    job: str,
    attempt: int,
    run_id: str,
    resume: ResumePoint,
    ranks: int,
    roles: Mapping[str | None, Mapping[str, str]],
) -> Iterator[NodeShare]:
    spec = part.spec
    counts = {host.name: 1 if spec.launcher == "none" else len(devices[host.name]) for host in hosts}
    visible = _visible_devices(spec, devices)
    if spec.launcher == launchers.RAY:
        counts = {host.name: int(host is hosts[0]) for host in hosts}
    staged = next((tree.sha256 for tree in trees if tree.name == PROGRAMS_TREE), None)
    assert staged or spec.program is None, "a job with a program needs the tree of the programs"
    local_ranks = sum(counts[host.name] for host in hosts if host.is_local)
    for node_rank, host in enumerate(hosts):
        own, count = folders[host.name], counts[host.name]
        yield NodeShare(
            job=job,
            attempt=attempt,
            run_id=run_id,
            signal=spec.checkpoint.signal,
            env=spec.env,
            python=spec.python,
            python_path=None if spec.program is None else f"{own.trees}/{staged}",
            node_rank=node_rank,
            nodes=len(hosts),
            world_size=sum(counts.values()),
            local_world_size=count,
            ranks_before=sum(counts[before.name] for before in hosts[:node_rank]),
            interface=network.interfaces[host.name],
            master_address=network.master_address,
            device_type=spec.devices.type,
            device_ids=visible[host.name],
            # Several local hosts share the CPUs of this machine.
            threads=max(1, reports[host.name].cpus // ((local_ranks if host.is_local else count) or len(devices))),
            attempt_folder=own.attempt,
            checkpoint_folder=spec.checkpoint.dir or own.checkpoints,
            resume=resume.environment(host.name),
            role=part.role,
            roles=roles,
            ranks_of_others=ranks,
        )


def _make_node(
    spec: JobSpec,
    share: NodeShare,
    folders: Folders,
    devices: Mapping[str, tuple[int, ...]],
    host: str,
    python: str,
    resume: ResumePoint,
    package: str | None,
    ray_names: Mapping[str, str] | None,
) -> NodePlan:
    # A local agent's interpreter has the job's packages; of other nodes only its name is known.
    python = spec.python or (python if spec.container is None else "python3")
    if spec.program is None:
        words = launchers.user_command(spec.command or (), python=spec.python)
    else:
        arguments = make_arguments(spec.args)
        words = launchers.program_command(spec.program, arguments, python=python, package=package)
    launcher = None
    if spec.launcher in launchers.LAUNCHERS:
        launcher = launchers.launcher_command(
            spec.launcher, words, share, python=python, port=PORT_TOKEN, devices=_visible_devices(spec, devices)
        )
    elif spec.launcher == launchers.RAY:
        start_s = spec.timeouts.start_s
        launcher = launchers.ray_command(words, share, ray_names or {}, python=python, port=PORT_TOKEN, start_s=start_s)
    first = share.ranks_of_others + share.ranks_before
    if launcher is None:
        ranks = [RankPlan(first + local, local, words, env) for local, env in enumerate(rank_environments(share))]
    else:
        numbers = range(first, first + share.local_world_size)
        ranks = [RankPlan(rank, local, (), own_files(share, rank)) for local, rank in enumerate(numbers)]
    pointer = None
    if spec.checkpoint.pointer is not None and resume.step:
        pointer = {"format": resume.format, "path": resume.paths[host], "step": resume.step}
    return NodePlan(
        host=host,
        node_rank=share.node_rank,
        ranks=tuple(ranks),
        launcher=launcher,
        cwd=folders.work,
        setup=spec.setup,
        folders=folders,
        devices=None if spec.devices.type == "cpu" else devices[host],
        pointer=pointer,
        container=container_request(spec, devices[host]),
        ends_job=spec.launcher != launchers.RAY or share.node_rank == 0,
        role=share.role,
    )


def _visible_devices(spec: JobSpec, devices: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
    """Return the numbers of the devices as the ranks have them: a container has those of the job only, from 0."""
    return devices if spec.container is None else {host: tuple(range(len(ids))) for host, ids in devices.items()}


def container_request(spec: JobSpec, device_ids: Sequence[int]) -> dict[str, Any] | None:
    """Return the container of a job on a node with these devices, as node/agent/containers.py starts it; None: the job
    runs on the node itself."""
    if spec.container is None:
        return None
    outputs = [re.split(r"[*?[]", path)[0].rpartition("/")[0] for path in spec.outputs if path.startswith("/")]
    paths = [path for path in (spec.checkpoint.dir, *outputs) if path]
    devices = None if spec.devices.type == "cpu" else {"type": spec.devices.type, "ids": list(device_ids)}
    return {**spec.container.model_dump(), "python": spec.python or "python3", "devices": devices, "paths": paths}


def _preflight_error(name: str, faults: Sequence[Failure], hosts: tuple[str, ...]) -> PreflightError:
    if len(faults) == 1:
        return PreflightError(faults[0].message, hint=faults[0].hint, hosts=hosts)
    message = Text(
        "plan.faults",
        "job {name} cannot start on its hosts for {count} reasons:{reasons:lines}",
        name=name,
        count=len(faults),
        reasons=[fault.line() for fault in faults],
    )
    return PreflightError(message, hosts=hosts)
