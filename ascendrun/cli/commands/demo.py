"""demo: the main features on this machine with Python alone: two simulated Ascend nodes, a fault, a killed rank."""

from __future__ import annotations

import os
import select
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import ascendrun
from ascendrun.cli import PIPE_CLOSED
from ascendrun.cli.options import cli_command
from ascendrun.cluster import Cluster
from ascendrun.core.errors import AscendrunError, PreflightError
from ascendrun.core.settings import LOGIN_FILE, SETTINGS, STATE_VARIABLE, Settings, local_root
from ascendrun.sim.demo.nodes import Actor, DemoInterruptedError, end_marked, remove_tree
from ascendrun.text import Text, language

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext

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


@cli_command(
    "demo",
    examples="""
    ascendrun demo                # wait for Enter after each step
    ascendrun demo --no-pause     # run without pauses, about 30 s
    ascendrun demo --keep         # keep the directory of the demo
""",
)
@click.option("--no-pause", is_flag=True, help="Do not wait for Enter after each step.")
@click.option("--keep", is_flag=True, help="Keep the directory of the demo.")
@click.pass_obj
def command(ctx: CliContext, no_pause: bool, keep: bool) -> int:
    """Show the main features on two simulated Ascend nodes on this machine.

    `doctor` finds a fault, a job starts, one of its ranks is killed, `explain` finds the cause, the job resumes.
    No NPU, SSH, torch, network or root access is required. All files are in one directory. It is removed at the
    end, also after ^C.
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
