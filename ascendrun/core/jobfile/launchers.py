"""Command of each process: the user's arguments, inside the command of a launcher if one is set."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import field

from ascendrun.core.dataclass import dataclass
from ascendrun.core.rank_env import NodeShare, launcher_environment

_PYTHON = re.compile(r"python[0-9.]*")
LOCAL_RANK_TOKEN = "\1LOCAL_RANK\1"
"""Placeholder in a rank's command for its LOCAL_RANK; \\1 cannot occur in a user's argument by accident."""
AGENT_TOKEN = "\1AGENT\1"
"""Placeholder in a launcher's command for the path of the node's agent."""
RAY = "ray"
"""Launcher whose nodes form a Ray cluster, in which the command runs once: the only rank of the job."""
LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
"""Launchers of a job file that run once on each node and start its ranks."""


def program_command(
    program: str, arguments: Sequence[str], *, python: str, package: str | None = None
) -> tuple[str, ...]:
    """Return the command of a program: a file, or a package. `package`: its name in Python, None: a bundled one."""
    package = package or f"ascendrun.programs.{program}"
    return (python, *([program] if program.endswith(".py") else ["-m", package]), *arguments)


def user_command(words: Sequence[str], *, python: str | None) -> tuple[str, ...]:
    """The job's command; a first argument `python` or `python3` becomes the job's interpreter, if set."""
    if python is not None and words[0] in ("python", "python3"):
        return (python, *words[1:])
    return tuple(words)


@dataclass(frozen=True)
class LauncherCommand:
    """The process of a node that starts its ranks. `plain`: the whole command, for a shell. `argv` ends where each
    rank's `command` follows, which may contain LOCAL_RANK_TOKEN: the agent puts its own program between them."""

    plain: tuple[str, ...]
    argv: tuple[str, ...]
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def launcher_command(
    launcher: str,
    words: Sequence[str],
    node: NodeShare,
    *,
    python: str,
    port: str,
    devices: Mapping[str, Sequence[int]],
) -> LauncherCommand:
    """Return the command of one of LAUNCHERS on a node, with a static rendezvous. `words`: the command of a rank;
    `port`: a placeholder; `devices`: ids by host name, in node order."""
    kind, own_python, target = _read_target(words)
    python = own_python or python
    if launcher == "torchrun":
        own = [
            "torch.distributed.run",
            f"--nnodes={node.nodes}",
            f"--nproc-per-node={node.local_world_size}",
            f"--node-rank={node.node_rank}",
            f"--master-addr={node.master_address}",
            f"--master-port={port}",
        ]
    elif launcher == "accelerate":  # runs torchrun; its configuration on the node sets the rest, such as the precision
        own = [
            "accelerate.commands.launch",
            *(("--multi_gpu",) if node.world_size > 1 else ()),  # also for NPU and CPU: several processes, by torchrun
            f"--num_machines={node.nodes}",
            f"--num_processes={node.world_size}",
            f"--machine_rank={node.node_rank}",
            f"--main_process_ip={node.master_address}",
            f"--main_process_port={port}",
            "--same_network",
            "--rdzv_backend=static",
        ]
    else:  # DeepSpeed's launcher on one node, as `deepspeed` would start it through ssh
        world = json.dumps({host: list(ids) for host, ids in devices.items()})
        own = [
            "deepspeed.launcher.launch",
            f"--world_info={base64.urlsafe_b64encode(world.encode()).decode()}",
            f"--node_rank={node.node_rank}",
            f"--master_addr={node.master_address}",
            f"--master_port={port}",
        ]
    own, env = [python, "-m", *own], launcher_environment(node)
    no_python = "--no-python" if launcher == "torchrun" else "--no_python"
    flags = {"script": (), "module": ("--module",), "program": (no_python,)}[kind]
    runs = {"script": (python, "-u"), "module": (python, "-u", "-m"), "program": ()}[kind]  # as launchers start Python
    if launcher != "deepspeed":
        return LauncherCommand((*own, *flags, *target), (*own, no_python), (*runs, *target), env)
    without, given = ("--no_local_rank",), (f"--local_rank={LOCAL_RANK_TOKEN}",)
    if node.python_path is not None:  # a bundled program does not take --local_rank
        return LauncherCommand((*own, *without, *flags, *target), (*own, *without, no_python), (*runs, *target), env)
    command = (*runs, target[0], *given, *target[1:])
    return LauncherCommand((*own, *flags, *target), (*own, *without, no_python), command, env)


def ray_command(
    words: Sequence[str], node: NodeShare, names: Mapping[str, str], *, python: str, port: str, start_s: float
) -> LauncherCommand:
    """Return the command of a node of a job's Ray cluster (node/ray_node.py). `names`: what Ray calls the types of
    devices whose number it must be given; it finds others itself."""
    is_head, count = node.node_rank == 0, len(node.device_ids)
    host, address = list(node.roles[node.role].items())[node.node_rank]
    env = {"NNODES": str(node.nodes), "NPROC_PER_NODE": str(count), **launcher_environment(node)}
    env["RAY_ADDRESS"] = f"{node.master_address}:{port}"
    place = ("--head", f"--port={port}", "--include-dashboard=false")
    resources = {name: count for kind, name in names.items() if kind == node.device_type}
    start = (
        *(place if is_head else (f"--address={env['RAY_ADDRESS']}",)),
        *(f"--node-name={host}", f"--node-ip-address={address}"),
        f"--resources={json.dumps(resources)}",
        *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),  # chosen by the kernel
        "--disable-usage-stats",
    )
    first = f"{shlex.join(('ray', 'start', *start))} && {shlex.join(words)}"
    plain = ("sh", "-c", first) if is_head else ("ray", "start", "--block", *start)
    options = json.dumps({"nodes": node.nodes, "start_s": start_s, "words": len(start)})
    return LauncherCommand(plain, (python, AGENT_TOKEN, RAY, options, *start), tuple(words) if is_head else (), env)


def _read_target(words: Sequence[str]) -> tuple[str, str | None, tuple[str, ...]]:
    """Split a command: "script" or "module" run by a Python, or "program" run directly, that Python, and the rest. Both
    launchers start Python; Python with options other than -u is kept unchanged."""
    if words[0].endswith(".py"):
        return "script", None, tuple(words)
    if not _PYTHON.fullmatch(words[0].rpartition("/")[2]):
        return "program", None, tuple(words)
    rest = list(words[1:])
    while rest[:1] == ["-u"]:
        rest.pop(0)
    if len(rest) > 1 and rest[0] == "-m":
        return "module", words[0], tuple(rest[1:])
    if rest and not rest[0].startswith("-"):
        return "script", words[0], tuple(rest)
    return "program", words[0], tuple(words)
