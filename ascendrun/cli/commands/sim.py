"""sim npu: run a command with the real torch_npu on a simulated CANN, on the CPU of this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command
from ascendrun.core.errors import PreflightError
from ascendrun.sim.npu.build import build, environment, find_target
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.sim.npu.build import Target

ENVIRONMENT = ".venv-npu"
LAUNCHERS = {
    "torchrun": "torch.distributed.run",
    "deepspeed": "deepspeed.launcher.runner",
    "accelerate": "accelerate.commands.accelerate_cli",
}
NOTE = Text(
    "sim.note", "simulated NPUs: torch_npu computes on the CPU of this machine; performance is not representative"
)


@cli_command(
    "sim",
    examples="""
    ascendrun sim npu -- python train.py                             # eight simulated 910B3
    ascendrun sim npu --devices 2 -- torchrun --nproc-per-node 2 train.py
    ascendrun sim npu --memory 8192 -- python train.py               # 8 GB a device: the real out-of-memory error
    ascendrun sim npu --fault hbm-ecc:1@20 -- torchrun ...           # rank 1 loses its HBM at its 20th collective
""",
)
@click.argument("what", type=click.Choice(["npu"]))
@click.option(
    "--python", metavar="PATH", help="Python with torch_npu 2.13.  [default: that of COMMAND, else of .venv-npu]"
)
@click.option("--devices", type=click.IntRange(0, 64), metavar="N", help="Number of devices.  [default: 8]")
@click.option("--chip", metavar="NAME", help="Chip model: Ascend910B3, Ascend910A, Ascend310P3.")
@click.option("--memory", type=click.IntRange(1), metavar="MB", help="Memory of one device.  [default: 65536]")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="NAME[:RANK][@COLLECTIVE]",
    help="Inject a fault: `device-lost`, `hbm-ecc`, `silent` or `absent`.",
)
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def command(
    ctx: CliContext,
    what: str,
    python: str | None,
    devices: int | None,
    chip: str | None,
    memory: int | None,
    faults: tuple[str, ...],
    argv: tuple[str, ...],
) -> int:
    """Run a COMMAND on simulated NPUs: device npu:0, backend hccl, the real torch_npu, no NPU and no CANN.

    The simulation shows control flow and API, not performance. It is compiled once in about 30 s (requires g++).
    """
    target = choose_target(python, argv[0])
    environ = environment(build(target), dict(os.environ))
    scripts = os.path.dirname(os.path.abspath(target.python))
    environ["PATH"] = os.pathsep.join((scripts, environ.get("PATH", os.defpath)))
    requested = {"DEVICES": devices, "CHIP": chip, "MEMORY_MB": memory, "FAULTS": " ".join(faults) or None}
    environ.update({f"ASCENDRUN_SIM_NPU_{name}": str(value) for name, value in requested.items() if value is not None})
    words = command_of(argv, target.python)
    program = shutil.which(words[0], path=environ["PATH"])
    if program is None:
        raise PreflightError(
            Text("sim.not-found", "{program}: program not found", program=argv[0]),
            hint="ascendrun sim npu -- python train.py",
        )
    print(f"ascendrun: {NOTE}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.execve(program, words, environ)


def choose_target(python: str | None, program: str) -> Target:
    """Return the environment with torch_npu: as given, else of the command, else .venv-npu next to ascendrun's own.

    Raises PreflightError with the reason.
    """
    if python is not None:
        return find_target(python)
    try:
        return find_target(python_of(program))
    except PreflightError:
        made = Path(sys.prefix).with_name(ENVIRONMENT) / "bin" / "python"
        if not made.exists():
            raise
        return find_target(str(made))


def command_of(argv: Sequence[str], python: str) -> list[str]:
    """Return the command to run. A launcher named without a path runs as a module of this Python: its script may
    belong to another environment, whose ranks would have no torch_npu."""
    if argv[0] not in LAUNCHERS:
        return list(argv)
    # By then torch_npu has imported torchrun's module, and runpy would warn.
    return [python, "-W", "ignore::RuntimeWarning:runpy", "-m", LAUNCHERS[argv[0]], *argv[1:]]


def python_of(program: str) -> str:
    """Return the Python that runs this program: itself, the one in its directory, or the one on PATH."""
    directory, name = os.path.split(program)
    if name.startswith("python"):
        return shutil.which(program) or program
    neighbour = os.path.join(directory, "python") if directory else ""
    return shutil.which(neighbour) or shutil.which("python") or shutil.which("python3") or sys.executable
