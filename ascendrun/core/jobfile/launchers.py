"""Command of each process: the user's arguments, inside the command of a launcher if one is set."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence

from ascendrun.core.dataclass import dataclass

_PYTHON = re.compile(r"python[0-9.]*")
LOCAL_RANK_TOKEN = "\1LOCAL_RANK\1"
"""Placeholder in a rank's command for its LOCAL_RANK; \\1 cannot occur in a user's argument by accident."""
LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
"""Launchers of a job file that run once on each node and start its ranks."""


@dataclass(frozen=True)
class Meeting:
    """The rendezvous of a launcher's nodes. `port`: a placeholder for the port."""

    nodes: int
    node_rank: int
    address: str
    port: str


@dataclass(frozen=True)
class _Target:
    """Target of a launcher: `kind` "script" or "module" run by `python`, or "program" run directly."""

    kind: str
    python: str | None
    words: tuple[str, ...]


def program_command(program: str, arguments: Sequence[str], *, python: str) -> tuple[str, ...]:
    """Return the command of a program that is a file, or a package that `find_programs` has."""
    from ascendrun.planner.programs import BUNDLED, find_programs

    found = find_programs().get(program)
    package = f"{BUNDLED}.{program}" if found is None else found.package
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


def torchrun_command(words: Sequence[str], meeting: Meeting, *, python: str, ranks: int) -> LauncherCommand:
    """Return the torchrun command of one node, with a static rendezvous."""
    target = _read_target(words)
    own = (
        target.python or python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={meeting.nodes}",
        f"--nproc-per-node={ranks}",
        f"--node-rank={meeting.node_rank}",
        f"--master-addr={meeting.address}",
        f"--master-port={meeting.port}",
    )
    return _launch(own, target, no_python="--no-python")


def accelerate_command(words: Sequence[str], meeting: Meeting, *, python: str, world_size: int) -> LauncherCommand:
    """Return the command of `accelerate launch` on one node, which runs torchrun with a static rendezvous.

    A default configuration of accelerate on the node still sets what is not set here, such as the precision.
    """
    target = _read_target(words)
    own = (
        target.python or python,
        "-m",
        "accelerate.commands.launch",
        *(("--multi_gpu",) if world_size > 1 else ()),  # also for NPU and CPU: several processes, by torchrun
        f"--num_machines={meeting.nodes}",
        f"--num_processes={world_size}",
        f"--machine_rank={meeting.node_rank}",
        f"--main_process_ip={meeting.address}",
        f"--main_process_port={meeting.port}",
        "--same_network",
        "--rdzv_backend=static",
    )
    return _launch(own, target, no_python="--no_python")


def deepspeed_command(
    words: Sequence[str], meeting: Meeting, *, python: str, devices: Mapping[str, Sequence[int]], gives_local_rank: bool
) -> LauncherCommand:
    """Return the command of DeepSpeed's launcher on one node, as `deepspeed` would start it through ssh.

    `devices`: ids by host name in node order. `gives_local_rank`: whether the script gets --local_rank=N.
    """
    target = _read_target(words)
    world = base64.urlsafe_b64encode(json.dumps({host: list(ids) for host, ids in devices.items()}).encode()).decode()
    own = (
        target.python or python,
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={world}",
        f"--node_rank={meeting.node_rank}",
        f"--master_addr={meeting.address}",
        f"--master_port={meeting.port}",
    )
    found = _launch(own, target, no_python="--no_python")
    without = ("--no_local_rank",)
    first, *rest = target.words
    given = (f"--local_rank={LOCAL_RANK_TOKEN}",) if gives_local_rank else ()
    return LauncherCommand(
        plain=(*own, *(() if gives_local_rank else without), *found.plain[len(own) :]),
        argv=(*own, *without, "--no_python"),
        command=(*found.command[: -len(target.words)], first, *given, *rest),
    )


def _launch(own: tuple[str, ...], target: _Target, *, no_python: str) -> LauncherCommand:
    flags = {"script": (), "module": ("--module",), "program": (no_python,)}[target.kind]
    runs = {"script": ("-u",), "module": ("-u", "-m"), "program": ()}[target.kind]  # as the launchers start Python
    python = () if target.kind == "program" else (own[0],)
    return LauncherCommand((*own, *flags, *target.words), (*own, no_python), (*python, *runs, *target.words))


def _read_target(words: Sequence[str]) -> _Target:
    """Split the command: both launchers start Python. Python with options other than -u is kept unchanged."""
    if words[0].endswith(".py"):
        return _Target("script", None, tuple(words))
    if not _PYTHON.fullmatch(words[0].rpartition("/")[2]):
        return _Target("program", None, tuple(words))
    rest = list(words[1:])
    while rest[:1] == ["-u"]:
        rest.pop(0)
    if len(rest) > 1 and rest[0] == "-m":
        return _Target("module", words[0], tuple(rest[1:]))
    if rest and not rest[0].startswith("-"):
        return _Target("script", words[0], tuple(rest))
    return _Target("program", words[0], tuple(words))
