"""Command of each process: the user's arguments, inside the command of a launcher if one is set."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence

from ascendrun.core.dataclass import dataclass

_PYTHON = re.compile(r"python[0-9.]*")
PROGRAMS_PACKAGE = "ascendrun.programs"


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
    is_own = program.endswith(".py")
    return (python, *([program] if is_own else ["-m", f"{PROGRAMS_PACKAGE}.{program}"]), *arguments)


def user_command(words: Sequence[str], *, python: str | None) -> tuple[str, ...]:
    """The job's command; a first argument `python` or `python3` becomes the job's interpreter, if set."""
    if python is not None and words[0] in ("python", "python3"):
        return (python, *words[1:])
    return tuple(words)


def torchrun_command(words: Sequence[str], meeting: Meeting, *, python: str, ranks: int) -> tuple[str, ...]:
    """Return the torchrun command of one node, with a static rendezvous."""
    target = _read_target(words)
    return (
        target.python or python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={meeting.nodes}",
        f"--nproc-per-node={ranks}",
        f"--node-rank={meeting.node_rank}",
        f"--master-addr={meeting.address}",
        f"--master-port={meeting.port}",
        *_TORCHRUN_FLAG[target.kind],
        *target.words,
    )


def deepspeed_command(
    words: Sequence[str], meeting: Meeting, *, python: str, devices: Mapping[str, Sequence[int]], gives_local_rank: bool
) -> tuple[str, ...]:
    """Return the command of DeepSpeed's launcher on one node, as `deepspeed` would start it through ssh.

    `devices`: ids by host name in node order. `gives_local_rank`: whether it adds --local_rank=N to the script.
    """
    target = _read_target(words)
    world = base64.urlsafe_b64encode(json.dumps({host: list(ids) for host, ids in devices.items()}).encode()).decode()
    return (
        target.python or python,
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={world}",
        f"--node_rank={meeting.node_rank}",
        f"--master_addr={meeting.address}",
        f"--master_port={meeting.port}",
        *(() if gives_local_rank else ("--no_local_rank",)),
        *_DEEPSPEED_FLAG[target.kind],
        *target.words,
    )


_TORCHRUN_FLAG: Mapping[str, tuple[str, ...]] = {"script": (), "module": ("--module",), "program": ("--no-python",)}
_DEEPSPEED_FLAG: Mapping[str, tuple[str, ...]] = {"script": (), "module": ("--module",), "program": ("--no_python",)}


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
