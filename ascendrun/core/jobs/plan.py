"""Launch plan: the exact processes of every node, from a job, its hosts and their reports."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import PreflightError
from ascendrun.core.hosts import Host
from ascendrun.core.jobfile import launchers
from ascendrun.core.jobs.checkpoints import ResumePoint
from ascendrun.core.network import Network, candidate_bases, candidate_ports, choose_network
from ascendrun.core.node_messages import Failure
from ascendrun.core.rank_env import PATH_TOKEN, JobShare, NodeShare, launcher_environment, own_files, rank_environment
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
    """One rank; for the launcher none the one process of its node, and `rank` is the node rank. Below a LauncherPlan
    `argv` is (), and `env` has what the launcher does not set."""

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class LauncherPlan:
    """The process that starts the ranks of a node. `argv`, `command`, `plain`: as in launchers.LauncherCommand."""

    argv: tuple[str, ...]
    command: tuple[str, ...]
    env: Mapping[str, str]
    plain: tuple[str, ...]


@dataclass(frozen=True)
class NodePlan:
    """Start data of one node. `launcher` None: the agent starts the ranks. `setup`: bash text run before each process
    that the agent starts, None: none. `devices`: by local rank, None: no devices. `pointer`: {format, path, step} of
    the checkpoint that a pointer file shall name, None: as it is."""

    host: str
    node_rank: int
    ranks: tuple[RankPlan, ...]
    cwd: str
    setup: str | None
    folders: Folders
    devices: tuple[int, ...] | None = None
    pointer: Mapping[str, Any] | None = None
    launcher: LauncherPlan | None = None


@dataclass(frozen=True)
class LaunchPlan:
    """Start data of all nodes. `master_ports`: tried in order by bind on the rank-0 node; the first free port becomes
    MASTER_PORT in every rank's environment (and replaces PORT_TOKEN in arguments). `hccl_bases`: candidates for
    HCCL_IF_BASE_PORT; the first that is free on all nodes is set, (): it is not set here. `device_type`: npu, cuda or
    cpu. `leases_devices`: nodes lease the devices of the job. `max_s`: None means no limit.
    `fence_s`: lease of a node without the head, None: it may run without. `stop_signal` is a name without SIG, such as
    "TERM". `home`: the run whose working directory the ranks use, None: that of run_id."""

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
) -> LaunchPlan:
    """Return the processes of each node. `hosts`: the hostfile's, in its order; `reports`, `folders`: by host name;
    `home`: as in LaunchPlan. `resume`: the checkpoint to continue from, None: unknown.

    Raises PreflightError with every reason why the hosts cannot run the job.
    """
    chosen = choose_hosts(spec, hosts)
    faults = [Failure(PreflightError.code, message, hint) for _, message, hint in placement_faults(spec, chosen)]
    missing = [host.name for host in chosen if host.name not in reports]
    if missing:
        message = Text("plan.no-report", "{hosts:hosts}: no report received", hosts=missing)
        faults.insert(0, Failure(PreflightError.code, message, Text("plan.no-report.hint", "run `ascendrun nodes`")))
    devices = {host.name: _choose_devices(spec, host) for host in chosen}
    unreachable: dict[str, Text] = {}
    network = Network("", {}) if faults else choose_network(chosen, reports, unreachable)
    faults += [Failure(PreflightError.code, fault) for fault in unreachable.values()]
    if faults:
        raise _preflight_error(spec.name, faults, hosts=tuple(unreachable) or tuple(missing))
    counts = {name: 1 if spec.launcher == "none" else len(ids) for name, ids in devices.items()}
    shape = _Shape(spec, chosen, reports, folders, trees, devices, network, counts, resume or ResumePoint())
    shared = JobShare(
        job=job, attempt=attempt, run_id=run_id, signal=spec.checkpoint.signal, env=spec.env, python=spec.python
    )
    return LaunchPlan(
        job=job,
        attempt=attempt,
        run_id=run_id,
        nodes=_make_nodes(shape, shared),
        trees=tuple(trees),
        world_size=shape.world_size,
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
    )


def choose_hosts(spec: JobSpec, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts that the job uses: the first `nodes` of the file, all without `nodes`.

    Raises PreflightError when the file has fewer.
    """
    required = spec.nodes or max(1, len(hosts))
    if len(hosts) < required:
        message, hint = _too_few_hosts(spec.name, required, len(hosts))
        raise PreflightError(message, hint=hint)
    return tuple(hosts[:required])


def pool_of(spec: JobSpec, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts on which the job may be placed: those that give it as many ranks as the first `nodes` of the
    file do. Raises PreflightError when the file has fewer than `nodes`."""
    chosen = choose_hosts(spec, hosts)
    sizes = {len(_choose_devices(spec, host)) for host in chosen}
    if len(sizes) > 1:
        return chosen

    def is_like_them(host: Host) -> bool:
        faults = (*_slot_faults(spec, [host]), *(() if spec.devices.type == "cpu" else _device_faults(spec, [host])))
        return not faults and len(_choose_devices(spec, host)) in sizes

    return tuple(host for host in hosts if host in chosen or is_like_them(host))


def placement_faults(spec: JobSpec, hosts: Sequence[Host]) -> Iterator[tuple[tuple[str, ...], Text, Text]]:
    """Yield unmet requirements of the job: (key of the job file, message, hint). `hosts`: all of the hostfile."""
    required = spec.nodes or max(1, len(hosts))
    if len(hosts) < required:
        yield (("nodes",), *_too_few_hosts(spec.name, required, len(hosts)))
    chosen = hosts[:required]
    yield from _slot_faults(spec, chosen)
    yield from _starter_faults(spec, chosen)
    if spec.devices.type != "cpu":
        yield from _device_faults(spec, chosen)
        yield from _shared_devices(spec, chosen)
    if spec.launcher in ("deepspeed", "accelerate") and len({len(_choose_devices(spec, host)) for host in chosen}) > 1:
        yield (
            ("launcher",),
            Text(
                "plan.uneven-ranks",
                "launcher {launcher} requires the same number of ranks on each node",
                launcher=spec.launcher,
            ),
            Text("plan.uneven-ranks.hint", "set devices.per_node"),
        )


_STARTERS = ("llamafactory-cli", "lmf")
"""Commands that start torchrun where they see several devices, even in a rank. ms-swift does so only if it is told."""


def _starter_faults(spec: JobSpec, hosts: Sequence[Host]) -> Iterator[tuple[tuple[str, ...], Text, Text]]:
    words = spec.command or ("",)
    name = words[0].rpartition("/")[2]
    if spec.launcher == "none" or name not in _STARTERS or "train" not in words[1:2]:
        return
    if any(len(_choose_devices(spec, host)) > 1 for host in hosts):
        yield (
            ("command",),
            Text("plan.starts-torchrun", "{name} starts torchrun itself, here in every rank", name=name),
            Text("plan.starts-torchrun.hint", "write launcher: none: one process on each node, which starts the ranks"),
        )


def _slot_faults(spec: JobSpec, hosts: Sequence[Host]) -> Iterator[tuple[tuple[str, ...], Text, Text]]:
    key = "per_node" if spec.devices.per_node else "ids"
    count = spec.devices.per_node or len(spec.devices.ids or ())
    small: dict[int, list[str]] = {}
    for host in hosts:
        if host.slots is not None and count > host.slots:
            small.setdefault(host.slots, []).append(host.name)
    for slots, names in small.items():
        message = Text(
            "plan.too-few-slots",
            "devices.{key} requires {count:plural rank ranks} on each node; {hosts:hosts} has slots={slots}",
            key=key,
            count=count,
            hosts=names,
            slots=slots,
        )
        hint = Text("plan.too-few-slots-hint", "use at most {slots}, or raise slots=", slots=slots)
        yield ("devices", key), message, hint


def _device_faults(spec: JobSpec, hosts: Sequence[Host]) -> Iterator[tuple[tuple[str, ...], Text, Text]]:
    """Yield the hosts whose devices= lacks devices of the job."""
    lacking: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for host in hosts:
        ids, offered = spec.devices.ids, host.devices
        if offered is None:
            continue
        count = spec.devices.per_node or host.slots or 0 if ids is None else len(ids)
        if count > len(offered) or not set(ids or ()) <= set(offered):
            lacking.setdefault((count, offered), []).append(host.name)
    for (count, offered), names in lacking.items():
        if spec.devices.ids is None:
            message = Text(
                "plan.too-few-devices",
                "{hosts:hosts}: the job requires {count:plural device devices}; devices={offered:ranks}",
                count=count,
                hosts=names,
                offered=list(offered),
            )
            hint = Text("plan.lower-count", "use at most {count}, or change devices=", count=len(offered))
            yield ("devices", "per_node"), message, hint
        else:
            message = Text(
                "plan.missing-devices",
                "devices.ids requires {missing:ranks}; {hosts:hosts} has devices={offered:ranks}",
                missing=[each for each in spec.devices.ids if each not in offered],
                hosts=names,
                offered=list(offered),
            )
            yield ("devices", "ids"), message, Text("plan.missing-devices.hint", "change ids, or devices= of the host")


def _shared_devices(spec: JobSpec, hosts: Sequence[Host]) -> Iterator[tuple[tuple[str, ...], Text, Text]]:
    """Yield devices of several local hosts: these are one machine, and a device may belong to one host only."""
    owner: dict[int, str] = {}
    for host in hosts:
        for device in _choose_devices(spec, host) if host.is_local else ():
            first = owner.setdefault(device, host.name)
            if first != host.name:
                message = Text(
                    "plan.shared-device",
                    "{first} and {second} are both this machine and would use the same device {device}",
                    first=first,
                    second=host.name,
                    device=device,
                )
                hint = Text("plan.shared-device.hint", "give each of them its own devices= in the hostfile")
                yield ("devices",), message, hint
                break


def _too_few_hosts(name: str, required: int, listed: int) -> tuple[Text, Text]:
    message = Text(
        "plan.too-few-hosts",
        "job {name} requires {count:plural node nodes}; the hostfile lists {listed}",
        name=name,
        count=required,
        listed=listed,
    )
    if not listed:
        return message, Text("plan.add-hosts", "add hosts to the hostfile")
    return message, Text("plan.too-few-hosts-hint", "--set nodes={listed}, or add hosts to the hostfile", listed=listed)


def prepare_request(node: NodePlan, plan: LaunchPlan) -> dict[str, Any]:
    """Return the fields of the agent's `prepare` operation for this node."""
    code, library = ([tree.sha256 for tree in plan.trees if tree.name == name] for name in (CODE_TREE, LIBRARY_TREE))
    leased = node.devices if plan.leases_devices else None
    return {
        "tag": plan.run_id,
        "node_rank": node.node_rank,
        "ranks": [
            {"rank": rank.rank, "local_rank": rank.local_rank, "argv": list(rank.argv), "env": dict(rank.env)}
            for rank in node.ranks
        ],
        **({} if node.launcher is None else {"launcher": _launcher_request(node.launcher)}),
        "cwd": node.cwd,
        "setup": node.setup,
        "trees": [tree.sha256 for tree in plan.trees],
        "link_tree": code[0] if code else None,
        **({"library": library[0]} if library else {}),
        "ports": list(plan.master_ports) if node.node_rank == 0 else [],
        **({"hccl": list(plan.hccl_bases)} if plan.hccl_bases else {}),
        **({"devices": {"type": plan.device_type, "ids": list(leased)}} if leased else {}),
        "stop": {"signal": plan.stop_signal, "grace_s": plan.grace_s},
        "start_s": plan.start_s,
        "max_s": plan.max_s,
        **({} if plan.fence_s is None else {"fence_s": plan.fence_s}),
        **({} if plan.sampling is None else {"sampling": {**plan.sampling, "devices": node.devices}}),
        **({} if plan.home is None else {"home": plan.home}),
        **({} if node.pointer is None else {"pointer": node.pointer}),
    }


def _launcher_request(launcher: LauncherPlan) -> dict[str, Any]:
    return {"argv": list(launcher.argv), "command": list(launcher.command), "env": dict(launcher.env)}


def render_plan(plan: LaunchPlan) -> dict[str, Any]:
    """Return the plan as data. Each node's `prepare` is the exact request to its agent; PORT_TOKEN in an argument is
    the placeholder of the port that is free at the start. `command`: of a launcher, as a shell would run it."""
    return {
        "job": plan.job,
        "attempt": plan.attempt,
        "tag": plan.run_id,
        "world_size": plan.world_size,
        "master_address": plan.master_address,
        "master_ports": list(plan.master_ports),
        "hccl_bases": list(plan.hccl_bases),
        "trees": [
            {"name": tree.name, "sha256": tree.sha256, "size_bytes": tree.size_bytes, "files": tree.files}
            for tree in plan.trees
        ],
        "nodes": [
            {
                "host": node.host,
                "prepare": prepare_request(node, plan),
                **({} if node.launcher is None else {"command": list(node.launcher.plain)}),
            }
            for node in plan.nodes
        ],
    }


@dataclass(frozen=True)
class _Shape:
    """Decisions for the entire job, by host name. `devices`: ids; `counts`: ranks."""

    spec: JobSpec
    hosts: tuple[Host, ...]
    reports: Mapping[str, NodeReport]
    folders: Mapping[str, Folders]
    trees: Sequence[Tree]
    devices: Mapping[str, tuple[int, ...]]
    network: Network
    counts: Mapping[str, int]
    resume: ResumePoint

    @property
    def world_size(self) -> int:
        return sum(self.counts.values())


def _choose_devices(spec: JobSpec, host: Host) -> tuple[int, ...]:
    """Return one device id for each rank of the host; for the device type cpu they are only counted."""
    if spec.devices.ids is not None:
        return spec.devices.ids
    offered = host.devices if spec.devices.type != "cpu" else None
    count = spec.devices.per_node or host.slots or len(offered or ()) or 1
    return offered[:count] if offered is not None else tuple(range(count))


def _make_nodes(shape: _Shape, job: JobShare) -> tuple[NodePlan, ...]:
    spec, world_size = shape.spec, shape.world_size
    local_ranks = sum(shape.counts[host.name] for host in shape.hosts if host.is_local)
    nodes: list[NodePlan] = []
    ranks_before = 0
    for node_rank, host in enumerate(shape.hosts):
        folders, count = shape.folders[host.name], shape.counts[host.name]
        share = NodeShare(
            node_rank=node_rank,
            nodes=len(shape.hosts),
            world_size=world_size,
            local_world_size=count,
            ranks_before=ranks_before,
            interface=shape.network.interfaces[host.name],
            master_address=shape.network.master_address,
            device_type=spec.devices.type,
            device_ids=shape.devices[host.name],
            # Several local hosts share the CPUs of this machine.
            threads=max(1, shape.reports[host.name].cpus // (local_ranks if host.is_local else count)),
            attempt_folder=folders.attempt,
            checkpoint_folder=spec.checkpoint.dir or folders.checkpoints,
            resume=shape.resume.environment(host.name),
        )
        nodes.append(
            NodePlan(
                host=host.name,
                node_rank=node_rank,
                ranks=_make_ranks(shape, job, share),
                launcher=_make_launcher(shape, job, share),
                cwd=folders.work,
                setup=spec.setup,
                folders=folders,
                devices=None if spec.devices.type == "cpu" else shape.devices[host.name],
                pointer=_pointer(shape, host.name),
            )
        )
        ranks_before += count
    return tuple(nodes)


def _pointer(shape: _Shape, host: str) -> Mapping[str, Any] | None:
    resume = shape.resume
    if shape.spec.checkpoint.pointer is None or not resume.step:
        return None
    return {"format": resume.format, "path": resume.paths[host], "step": resume.step}


def _make_ranks(shape: _Shape, job: JobShare, share: NodeShare) -> tuple[RankPlan, ...]:
    if shape.spec.launcher in launchers.LAUNCHERS:
        return tuple(
            RankPlan(share.ranks_before + local, local, (), own_files(share, share.ranks_before + local))
            for local in range(share.local_world_size)
        )
    argv = _words(shape, share)
    python_path = _programs_folder(shape, shape.folders[shape.hosts[share.node_rank].name])
    return tuple(
        RankPlan(share.ranks_before + local, local, argv, rank_environment(job, share, local, python_path=python_path))
        for local in range(share.local_world_size)
    )


def _make_launcher(shape: _Shape, job: JobShare, share: NodeShare) -> LauncherPlan | None:
    spec = shape.spec
    if spec.launcher not in launchers.LAUNCHERS:
        return None
    words, python = _words(shape, share), _python(shape, share)
    meeting = launchers.Meeting(
        nodes=share.nodes, node_rank=share.node_rank, address=share.master_address, port=PORT_TOKEN
    )
    if spec.launcher == "torchrun":
        command = launchers.torchrun_command(words, meeting, python=python, ranks=share.local_world_size)
    elif spec.launcher == "accelerate":
        command = launchers.accelerate_command(words, meeting, python=python, world_size=share.world_size)
    else:
        command = launchers.deepspeed_command(
            words, meeting, python=python, devices=shape.devices, gives_local_rank=spec.program is None
        )
    python_path = _programs_folder(shape, shape.folders[shape.hosts[share.node_rank].name])
    env = launcher_environment(job, share, python_path=python_path)
    return LauncherPlan(command.argv, command.command, env, command.plain)


def _python(shape: _Shape, share: NodeShare) -> str:
    """Return the job's interpreter. A local agent's has the job's packages; of other nodes only its name is known."""
    host = shape.hosts[share.node_rank]
    return shape.spec.python or (shape.reports[host.name].python if host.is_local else "python3")


def _words(shape: _Shape, share: NodeShare) -> tuple[str, ...]:
    """Return the command of one rank, without a launcher."""
    spec = shape.spec
    if spec.program is None:
        return launchers.user_command(spec.command or (), python=spec.python)
    return launchers.program_command(spec.program, make_arguments(spec.args), python=_python(shape, share))


def _programs_folder(shape: _Shape, folders: Folders) -> str | None:
    if shape.spec.program is None:
        return None
    staged = [tree.sha256 for tree in shape.trees if tree.name == PROGRAMS_TREE]
    assert staged, "a job with a program needs the tree of the programs"
    return f"{folders.trees}/{staged[0]}"


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


def render_text(rendered: Mapping[str, Any]) -> str:
    """Return the result of `render_plan` as commands to paste on each node. MASTER_PORT is the first candidate; a plan
    has no secrets."""
    port = str(rendered["master_ports"][0])
    lines = [
        _comment(
            Text(
                "plan.job",
                "{job}, attempt {attempt}: {ranks:plural rank ranks} on {nodes:plural node nodes}, "
                "rendezvous at {address}",
                job=rendered["job"],
                attempt=rendered["attempt"],
                ranks=rendered["world_size"],
                nodes=len(rendered["nodes"]),
                address=rendered["master_address"],
            )
        ),
        _comment(
            Text(
                "plan.port",
                "MASTER_PORT: the first free port of {count} from {port}",
                count=len(rendered["master_ports"]),
                port=port,
            )
        ),
    ]
    lines += [
        _comment(
            Text(
                "plan.staged",
                "staged {name}: {files:plural file files}, {size:bytes}, {sha256}",
                name=tree["name"],
                files=tree["files"],
                size=tree["size_bytes"],
                sha256=tree["sha256"][:16],
            )
        )
        for tree in rendered["trees"]
    ]
    bases = rendered["hccl_bases"]
    if bases:
        lines.append(
            _comment(
                Text(
                    "plan.hccl-base",
                    "HCCL_IF_BASE_PORT: the first of {bases:ranks} whose 32 ports are free on all nodes",
                    bases=bases,
                )
            )
        )
    for node in rendered["nodes"]:
        lines += ["", *_node_lines(node, port)]
    return "\n".join(lines) + "\n"


def _node_lines(node: Mapping[str, Any], port: str) -> list[str]:
    host, prepare = node["host"], node["prepare"]
    launcher = prepare.get("launcher")
    ranks = [{"argv": node["command"], "env": launcher["env"]}] if launcher else prepare["ranks"]
    shared = _shared_env(ranks)
    lines = [
        _comment(
            Text(
                "plan.node",
                "{host}: node {number}, {count:plural process processes}",
                host=host,
                number=prepare["node_rank"],
                count=len(ranks),
            )
        ),
        f"cd -- {shlex.quote(prepare['cwd'])}",
    ]
    lines += [f"export {name}={_quoted(value)}" for name, value in shared.items()]
    lines.append(f"export MASTER_PORT={port}")
    if prepare.get("hccl"):
        lines.append(f"export HCCL_IF_BASE_PORT={prepare['hccl'][0]}")
    if prepare["setup"]:
        lines += [_comment(Text("plan.setup", "setup, run by bash before each process")), prepare["setup"]]
    for rank in ranks:
        own = [f"{name}={value}" for name, value in rank["env"].items() if name not in shared]
        words = [word.replace(PORT_TOKEN, port) for word in rank["argv"]]
        lines.append(shlex.join(["env", *own, *words] if own else words) + (" &" if len(ranks) > 1 else ""))
    return lines


def _comment(text: Text) -> str:
    return f"# {text}"


def _quoted(value: str) -> str:
    """Quote a value for zsh, which expands an unquoted leading "=" to the path of a command."""
    if value.endswith(PATH_TOKEN):
        return shlex.quote(value[: -len(PATH_TOKEN)]) + '"$PATH"'
    return f"'{value}'" if value.startswith("=") and "'" not in value else shlex.quote(value)


def _shared_env(ranks: list[Mapping[str, Any]]) -> Mapping[str, str]:
    """Return the variables that have the same value in all ranks of the node."""
    first = ranks[0]["env"]
    return {name: value for name, value in first.items() if all(rank["env"].get(name) == value for rank in ranks)}
