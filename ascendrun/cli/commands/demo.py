"""demo: the main features on this machine on two simulated nodes. sim: a command on simulated NPUs, real torch_npu."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import ascendrun
from ascendrun.cli import PIPE_CLOSED
from ascendrun.cli.context import CliContext
from ascendrun.cli.options import cli_command
from ascendrun.cluster import Cluster
from ascendrun.core.errors import AscendrunError, PreflightError
from ascendrun.core.settings import LOGIN_FILE, SETTINGS, STATE_VARIABLE, Settings, local_root
from ascendrun.sim.demo.nodes import Actor, DemoInterruptedError, end_marked, remove_tree
from ascendrun.sim.npu import build
from ascendrun.sim.npu.build import Target, find_target
from ascendrun.text import Text, language

MARK = "ASCENDRUN_DEMO"
EXTERNAL_PREFIXES = ("ASCEND_", "HCCL_", "NCCL_", "ASCENDRUN_SIM_")
"""Prefixes of variables about the real devices of this machine."""
COMMAND_S = 120.0
TRAINING_S = 120.0
STEPS_BEFORE_KILL = 30
VICTIM = 3
BAD_NODE, BAD_CARD, FAULT = "npu2", "3", "health_alarm"
GRACE_S = 10.0
KEEP_HINT = Text("demo.keep-hint", "run `ascendrun demo --keep` and read the files of the demo")


@cli_command("demo")
@click.option("--no-pause", is_flag=True, help="Do not wait for Enter after each step.")
@click.option("--keep", is_flag=True, help="Keep the directory of the demo.")
def command(ctx: CliContext, no_pause: bool, keep: bool) -> int:
    """Show the main features on two simulated Ascend nodes on this machine.

    `doctor` finds a fault, a job starts, one of its ranks is killed, `explain` finds the cause, the job resumes.
    No NPU, SSH, torch, network or root access is required. All files are in one directory. It is removed at the
    end, also after ^C.

    Examples:
    ascendrun demo                # wait for Enter after each step
    ascendrun demo --no-pause     # run without pauses, about 30 s
    ascendrun demo --keep         # keep the directory of the demo
    """
    check_machine()
    actor = Actor()
    with actor.listening():
        directory = Path(tempfile.mkdtemp(prefix="ascendrun-demo-"))
        code = 0
        with environment(demo_environ(os.environ, directory)):
            try:
                pauses = not no_pause and sys.stdin.isatty() and sys.stdout.isatty()
                Demo(directory, actor, pauses=pauses, color=ctx.has_color(sys.stdout)).run()
            except DemoInterruptedError as interrupted:
                code = 128 + interrupted.number
                ctx.say("demo.interrupted", "interrupted: stopping the demo")
            finally:
                clean_up(directory, keep=keep)
                print_end(ctx, directory)
    return code


def check_machine() -> None:
    """Raise PreflightError without /proc, in which the demo finds its processes."""
    if not sys.platform.startswith("linux"):
        raise PreflightError.of(
            "demo.linux-only",
            "the demo requires Linux, got {platform}",
            "start it in a Linux container or virtual machine",
            platform=sys.platform,
        )


def demo_environ(environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return the environment of the demo: its own state directory, no user settings, this ascendrun, its mark."""
    settings = {setting.variable for setting in SETTINGS}
    kept = {
        name: value
        for name, value in environ.items()
        if name not in settings and not name.startswith(EXTERNAL_PREFIXES)
    }
    package_parent = str(Path(ascendrun.__file__).resolve().parent.parent)
    tools = os.path.dirname(os.path.abspath(sys.executable))
    return {
        **kept,
        STATE_VARIABLE: str(directory / "state"),
        MARK: str(directory),
        "ASCENDRUN_LANG": language(),
        "XDG_CONFIG_HOME": str(directory / "config"),
        "PYTHONPATH": os.pathsep.join(part for part in (package_parent, environ.get("PYTHONPATH", "")) if part),
        "PATH": os.pathsep.join([tools, environ.get("PATH") or os.defpath]),
    }


@contextmanager
def environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Give this process and its children the environment."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def cluster_of(directory: Path) -> Cluster:
    return Cluster(Settings(state_dir=directory / "state"))


class Demo:
    """Prints a sentence, shows a command, runs it. All commands are real."""

    def __init__(self, directory: Path, actor: Actor, *, pauses: bool, color: bool) -> None:
        self._directory, self._actor = directory, actor
        self._pauses, self._color = pauses, color
        self._is_first = True

    def run(self) -> None:
        """Run the demo. Raises DemoInterruptedError, PreflightError, AscendrunError (a step failed)."""
        self._set_up()
        self._doctor()
        self._train_until_killed()
        self._resume()

    def _set_up(self) -> None:
        from ascendrun.sim.demo import nodes

        self._explain(
            "demo.nodes",
            "This machine simulates 2 Ascend servers with 4 NPUs each. A hostfile lists them. A job file defines "
            "the training.",
        )
        nodes.make_nodes(self._directory)
        nodes.make_job(self._directory)
        for name in nodes.NAMES:
            root = local_root(cluster_of(self._directory).settings, name)
            root.mkdir(mode=0o700, parents=True)
            login = nodes.login_of(self._directory, name, os.environ)
            (root / LOGIN_FILE).write_text("".join(f"{one}={value}\n" for one, value in login.items()))
        (self._directory / "state").chmod(0o700)
        self._type(["cat", nodes.HOSTFILE, nodes.JOB_FILE])

    def _doctor(self) -> None:
        simulate = [sys.executable, "-m", "ascendrun.sim.ascend"]
        shown = "python -m ascendrun.sim.ascend"
        self._explain(
            "demo.fault", "A fault is injected: NPU {device} of {host} raises an alarm.", device=BAD_CARD, host=BAD_NODE
        )
        where = f"nodes/{BAD_NODE}"
        self._type([*simulate, "fault", where, BAD_CARD, FAULT], shown=f"{shown} fault {where} {BAD_CARD} {FAULT}")
        self._explain(
            "demo.doctor", "`doctor` checks both nodes in the environment of the job. It names the NPU and a fix."
        )
        self._ascendrun("doctor", "job.yaml", "--quick", expected=3)
        self._explain("demo.repair", "A real NPU with an alarm is repaired or replaced. Here, the fault is removed.")
        self._type([*simulate, "clear", where], shown=f"{shown} clear {where}")
        self._ascendrun("doctor", "job.yaml", "--quick")

    def _train_until_killed(self) -> None:
        from ascendrun.sim.demo import nodes

        self._explain(
            "demo.submit",
            "The job is submitted: checked, staged and started on both nodes. From now on it runs without this "
            "terminal.",
        )
        self._ascendrun("submit", "job.yaml", "--detach")
        self._await_checkpoint(nodes.FIRST_SAVED)
        # No pause from here to the kill: the training continues and would end.
        self._explain("demo.running", "The job runs. `npu-smi` on {host} lists its ranks.", host=BAD_NODE, pauses=False)
        self._ascendrun("exec", "-H", nodes.HOSTFILE, "--hosts", BAD_NODE, "--", "npu-smi", "info")
        self._ascendrun("ps")
        self._explain("demo.top", "`top` shows every NPU with its rank; without `--once` live.", pauses=False)
        self._ascendrun("top", "--once")
        self._await_checkpoint(STEPS_BEFORE_KILL)
        self._explain(
            "demo.kill",
            "Rank {rank} is killed with signal 9, as by the kernel when memory is exhausted.",
            rank=VICTIM,
            pauses=False,
        )
        ranks = cluster_of(self._directory).jobs.detail("demo").ranks
        pid = next(rank.pid for rank in ranks if rank.rank == VICTIM)
        self._type(["sh", "-c", f"kill -9 {pid}"], shown=f"kill -9 {pid}")
        self._explain(
            "demo.first-failure",
            "The other ranks lose the connection and fail. ascendrun stops all ranks and names the first failure.",
        )
        self._ascendrun("logs", "-f", "demo", expected=1)
        self._explain("demo.explain", "`explain` shows the evidence, the consequences and a fix.")
        self._ascendrun("explain", "demo")

    def _await_checkpoint(self, step: int) -> None:
        """Return when the job runs and has saved this step. Raises AscendrunError when it ends before."""
        from ascendrun.sim.demo import nodes

        cluster = cluster_of(self._directory)

        def has_saved() -> bool:
            job = cluster.jobs.detail("demo").job
            if job.ended_at_s is not None:
                raise AscendrunError(
                    Text(
                        "demo.ended-early",
                        "the training ended before step {step}: {reason}",
                        step=step,
                        reason=job.reason,
                    ),
                    hint=KEEP_HINT,
                )
            return job.state == "RUNNING" and nodes.newest_step(self._directory) >= step

        self._actor.wait(
            has_saved, deadline_s=TRAINING_S, event=Text("demo.checkpoint", "checkpoint of step {step}", step=step)
        )

    def _resume(self) -> None:
        self._explain(
            "demo.resume", "Submitted again, the job resumes from the newest complete checkpoint and succeeds."
        )
        self._ascendrun("submit", "job.yaml")
        self._ascendrun("ps", "--all")
        self._explain(
            "demo.report", "`report` summarises the training, the use of its time and its cost, also as a page."
        )
        self._ascendrun("report", "demo")

    def _explain(self, key: str, english: str, /, *, pauses: bool = True, **values: Any) -> None:
        """Print a sentence, after a pause in which the output of the previous step can be read."""
        sentence = Text(key, english, **values)
        if not self._is_first and self._pauses and pauses:
            self._await_enter()
        print("" if self._is_first else "\n", end="")
        self._is_first = False
        print(f"\x1b[1m{sentence}\x1b[0m" if self._color else f"# {sentence}", flush=True)

    def _await_enter(self) -> None:
        print(Text("demo.pause", "  Enter: next step, ^C: end "), end="", flush=True)
        self._actor.wait(lambda: bool(select.select([sys.stdin], [], [], 0)[0]), deadline_s=float("inf"), event="Enter")
        sys.stdin.readline()

    def _ascendrun(self, *words: str, expected: int = 0) -> None:
        self._type(
            [sys.executable, "-m", "ascendrun", *words], shown=shlex.join(["ascendrun", *words]), expected=expected
        )

    def _type(self, argv: Sequence[str], *, shown: str | None = None, expected: int = 0) -> None:
        shown = shown or shlex.join(argv)
        print(f"$ {shown}", flush=True)
        code = self._actor.run(argv, cwd=self._directory, env=os.environ, deadline_s=COMMAND_S)
        if code == expected:
            return
        if code in (PIPE_CLOSED, -signal.SIGPIPE):
            raise BrokenPipeError
        if " doctor " in f" {shown} " and code == 3:
            raise PreflightError.of(
                "demo.machine-not-ready",
                "doctor found a fault of this machine, see above",
                "correct it and run `ascendrun demo` again",
            )
        raise AscendrunError(
            Text(
                "demo.unexpected-exit",
                "`{command}` exited with code {code} (expected {expected})",
                command=shown,
                code=code,
                expected=expected,
            ),
            hint=KEEP_HINT,
        )


def clean_up(directory: Path, *, keep: bool) -> None:
    """End the jobs, the controller and all other processes of the demo; remove its directory unless it is kept."""
    try:
        end_jobs(cluster_of(directory))
    finally:
        end_marked(f"{MARK}={directory}", grace_s=GRACE_S)
        if not keep:
            remove_tree(str(directory))


def end_jobs(cluster: Cluster) -> None:
    """Stop all jobs, then the controller. The second round: an interrupted command may have submitted a job late."""
    for _ in range(2):
        try:
            live = cluster.jobs.list()
            for job in live:
                cluster.jobs.stop(job.id, now=True)
                cluster.jobs.wait(job.id, timeout_s=GRACE_S)
            cluster.controller.stop(timeout_s=GRACE_S)
        except AscendrunError:
            return  # remaining processes are found and ended by their mark
        if not live:
            return


def print_end(ctx: CliContext, directory: Path) -> None:
    if directory.exists():
        where = shlex.quote(str(directory))
        ctx.say("demo.kept", "all processes have ended; the directory is kept: {directory}", directory=directory)
        ctx.hint(f"cd {where} && export ASCENDRUN_STATE_DIR={where}/state && ascendrun ps --all")
    else:
        ctx.say("demo.removed", "all processes have ended; {directory} was removed", directory=directory)


ENVIRONMENT = ".venv-npu"
LAUNCHERS = {
    "torchrun": "torch.distributed.run",
    "deepspeed": "deepspeed.launcher.runner",
    "accelerate": "accelerate.commands.accelerate_cli",
}
NOTE = Text(
    "sim.note", "simulated NPUs: torch_npu computes on the CPU of this machine; performance is not representative"
)


@cli_command("sim")
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
def sim_command(
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

    Examples:
    ascendrun sim npu -- python train.py                             # eight simulated 910B3
    ascendrun sim npu --devices 2 -- torchrun --nproc-per-node 2 train.py
    ascendrun sim npu --memory 8192 -- python train.py               # 8 GB a device: the real out-of-memory error
    ascendrun sim npu --fault hbm-ecc:1@20 -- torchrun ...           # rank 1 loses its HBM at its 20th collective
    """
    target = choose_target(python, argv[0])
    environ = build.environment(build.build(target), dict(os.environ))
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
