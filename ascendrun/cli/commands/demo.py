"""demo: the whole of ascendrun on this machine, with nothing but Python: two simulated Ascend nodes and one bad day."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli import PIPE_CLOSED
from ascendrun.cli.options import cli_command

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.cluster import Cluster
    from ascendrun.sim.demo.actor import Actor

MARK = "ASCENDRUN_DEMO"
FOREIGN = ("ASCEND_", "HCCL_", "NCCL_", "ASCENDRUN_SIM_")
"""Variables of this machine's own devices: nothing of the simulated ones."""
COMMAND_S = 120.0
TRAINING_S = 120.0
STEPS_BEFORE_KILL = 30
VICTIM = 3
BAD_NODE, BAD_CARD, FAULT = "npu2", "3", "health_alarm"
LEAVE_S = 10.0


@cli_command(
    "demo",
    examples="""
    ascendrun demo                # step by step; Enter goes on
    ascendrun demo --no-pause     # in one go, half a minute
    ascendrun demo --keep         # leaves its folder, to look around in
""",
)
@click.option("--no-pause", is_flag=True, help="Do not wait for Enter after each step.")
@click.option("--keep", is_flag=True, help="Leave the folder of the demo where it is.")
@click.pass_obj
def command(ctx: CliContext, no_pause: bool, keep: bool) -> int:
    """Show it all on two simulated Ascend nodes on this machine: a fault that doctor finds, a job, a rank that is
    killed, its cause, and the job that resumes. Needs no NPU, no SSH, no torch, no network and no root.

    Everything is in a folder of its own, and goes when the demo ends or ^C ends it.
    """
    from ascendrun.sim.demo.actor import Actor, DemoInterruptedError

    check_machine()
    actor = Actor()
    with actor.listening():
        folder = Path(tempfile.mkdtemp(prefix="ascendrun-demo-"))
        code = 0
        with environment(demo_environ(os.environ, folder)):
            try:
                pauses = not no_pause and sys.stdin.isatty() and sys.stdout.isatty()
                Story(folder, actor, pauses=pauses, color=ctx.has_color(sys.stdout)).tell()
            except DemoInterruptedError as interrupted:
                code = 128 + interrupted.number
                ctx.echo("interrupted: ending what runs")
            finally:
                leave(folder, keep=keep)
                tell_end(ctx, folder)
    return code


def check_machine() -> None:
    """Raises PreflightError where processes cannot be looked at as Linux shows them."""
    from ascendrun.core.errors import PreflightError

    if not sys.platform.startswith("linux"):
        raise PreflightError(
            f"the demo runs its nodes on this machine, and needs Linux; this is {sys.platform}",
            hint="start it in a container or a virtual machine",
        )


def demo_environ(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """A state dir of its own, none of the user's settings, this very ascendrun, and a mark on every process."""
    import ascendrun
    from ascendrun.head.state.settings import SETTINGS, STATE_VARIABLE

    settings = {setting.variable for setting in SETTINGS}
    kept = {name: value for name, value in environ.items() if name not in settings and not name.startswith(FOREIGN)}
    package_parent = str(Path(ascendrun.__file__).resolve().parent.parent)
    tools = os.path.dirname(os.path.abspath(sys.executable))
    return {
        **kept,
        STATE_VARIABLE: str(folder / "state"),
        MARK: str(folder),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "PYTHONPATH": os.pathsep.join(part for part in (package_parent, environ.get("PYTHONPATH", "")) if part),
        "PATH": os.pathsep.join([tools, environ.get("PATH") or os.defpath]),
    }


@contextmanager
def environment(environ: Mapping[str, str]) -> Iterator[None]:
    """This process itself has the environment, and with it all that it starts."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def cluster_of(folder: Path) -> Cluster:
    from ascendrun.cluster import Cluster
    from ascendrun.head.state.settings import Settings

    return Cluster(Settings(state_dir=folder / "state"))


class Story:
    """Says a sentence, shows the command, runs it; every command is a real one."""

    def __init__(self, folder: Path, actor: Actor, *, pauses: bool, color: bool) -> None:
        self._folder, self._actor = folder, actor
        self._pauses, self._color = pauses, color
        self._is_first = True

    def tell(self) -> None:
        """Raises DemoInterruptedError; PreflightError when this machine itself is not fit; InternalError when a
        step went astray."""
        self._set_up()
        self._doctor()
        self._train_until_killed()
        self._resume()

    def _set_up(self) -> None:
        from ascendrun.backends.local import LOGIN_FILE, local_root
        from ascendrun.sim.demo import nodes

        self._say(
            "Two Ascend servers of four NPUs each are simulated on this machine, in a folder of their own. A "
            "hostfile names them, a job file says what to run."
        )
        nodes.make_nodes(self._folder)
        nodes.make_job(self._folder)
        for name in nodes.NAMES:
            root = local_root(cluster_of(self._folder).settings, name)
            root.mkdir(mode=0o700, parents=True)
            login = nodes.login_of(self._folder, name, os.environ)
            (root / LOGIN_FILE).write_text("".join(f"{one}={value}\n" for one, value in login.items()))
        (self._folder / "state").chmod(0o700)
        self._type(["cat", nodes.HOSTFILE, nodes.JOB_FILE])

    def _doctor(self) -> None:
        simulate = [sys.executable, "-m", "ascendrun.sim.ascend"]
        shown = "python -m ascendrun.sim.ascend"
        self._say(f"A fault is planted: card {BAD_CARD} of {BAD_NODE} raises an alarm.")
        where = f"nodes/{BAD_NODE}"
        self._type([*simulate, "fault", where, BAD_CARD, FAULT], shown=f"{shown} fault {where} {BAD_CARD} {FAULT}")
        self._say("doctor asks both nodes at once, as the job would find them: it names the card and the way out.")
        self._ascendrun("doctor", "job.yaml", "--quick", expected=3)
        self._say("A card with an alarm is repaired or replaced; here, it is enough to take the fault back.")
        self._type([*simulate, "clear", where], shown=f"{shown} clear {where}")
        self._ascendrun("doctor", "job.yaml", "--quick")

    def _train_until_killed(self) -> None:
        from ascendrun.sim.demo import nodes

        self._say(
            "The job is submitted: checked, staged, and started on both nodes together. It does not need us any more."
        )
        self._ascendrun("submit", "job.yaml", "--detach")
        self._await_checkpoint(nodes.FIRST_SAVED)
        # From here to the kill without a pause: the training goes on, and would be over.
        self._say(f"It runs. Its ranks stand in the process table of {BAD_NODE}'s NPUs.", pauses=False)
        self._ascendrun("exec", "-H", nodes.HOSTFILE, "--hosts", BAD_NODE, "--", "npu-smi", "info")
        self._ascendrun("ps")
        self._await_checkpoint(STEPS_BEFORE_KILL)
        self._say(f"Rank {VICTIM} is killed, as the kernel does when memory runs out.", pauses=False)
        pid = next(rank.pid for rank in cluster_of(self._folder).job("demo").ranks if rank.rank == VICTIM)
        self._type(["sh", "-c", f"kill -9 {pid}"], shown=f"kill -9 {pid}")
        self._say("Its peers lose it and fail too. ascendrun ends them all, and names the one that was first.")
        self._ascendrun("logs", "-f", "demo", expected=1)
        self._say("explain has the evidence for it, what followed, and what to do.")
        self._ascendrun("explain", "demo")

    def _await_checkpoint(self, step: int) -> None:
        """Returns when the job is known to run and has saved so far. Raises AscendrunError when it ends before."""
        from ascendrun.core.errors import AscendrunError
        from ascendrun.sim.demo import nodes

        cluster = cluster_of(self._folder)

        def is_so_far() -> bool:
            job = cluster.job("demo").job
            if job.ended_at_s is not None:
                raise AscendrunError(
                    f"the training ended before step {step}: {job.reason}", hint="look around: ascendrun demo --keep"
                )
            return job.state == "RUNNING" and nodes.newest_step(self._folder) >= step

        self._actor.wait(is_so_far, deadline_s=TRAINING_S, says=f"the checkpoint of step {step}")

    def _resume(self) -> None:
        self._say("Submitted again, the job goes on from its newest complete checkpoint, to the end.")
        self._ascendrun("submit", "job.yaml")
        self._ascendrun("ps", "--all")

    def _say(self, sentence: str, *, pauses: bool = True) -> None:
        """With a pause before it: the reader has seen what came of the sentence before."""
        if not self._is_first and self._pauses and pauses:
            self._await_enter()
        print("" if self._is_first else "\n", end="")
        self._is_first = False
        print(f"\x1b[1m{sentence}\x1b[0m" if self._color else f"# {sentence}", flush=True)

    def _await_enter(self) -> None:
        import select

        print("  Enter goes on, ^C ends it ", end="", flush=True)
        self._actor.wait(lambda: bool(select.select([sys.stdin], [], [], 0)[0]), deadline_s=float("inf"), says="Enter")
        sys.stdin.readline()

    def _ascendrun(self, *words: str, expected: int = 0) -> None:
        self._type(
            [sys.executable, "-m", "ascendrun", *words], shown=shlex.join(["ascendrun", *words]), expected=expected
        )

    def _type(self, argv: Sequence[str], *, shown: str | None = None, expected: int = 0) -> None:
        from ascendrun.core.errors import AscendrunError, PreflightError

        shown = shown or shlex.join(argv)
        print(f"$ {shown}", flush=True)
        code = self._actor.run(argv, cwd=self._folder, env=os.environ, deadline_s=COMMAND_S)
        if code == expected:
            return
        if code in (PIPE_CLOSED, -signal.SIGPIPE):
            raise BrokenPipeError
        if " doctor " in f" {shown} " and code == 3:
            raise PreflightError("this machine itself is not fit, see above", hint="mend it, and start the demo again")
        raise AscendrunError(
            f"`{shown}` ended with {code}, the demo expected {expected}", hint="look around: ascendrun demo --keep"
        )


def leave(folder: Path, *, keep: bool) -> None:
    """Ends the jobs and the controller of the demo, and whatever else it started; then its folder goes, unless kept."""
    from ascendrun.sim.demo.actor import end_marked, remove_tree

    try:
        end_jobs(cluster_of(folder))
    finally:
        end_marked(f"{MARK}={folder}", grace_s=LEAVE_S)
        if not keep:
            remove_tree(folder)


def end_jobs(cluster: Cluster) -> None:
    """A command that was interrupted may have handed in a job after we looked: looked at again without a controller."""
    from ascendrun.core.errors import AscendrunError

    for _ in range(2):
        try:
            live = cluster.jobs()
            for job in live:
                cluster.stop(job.id, now=True)
                cluster.wait(job.id, timeout_s=LEAVE_S)
            cluster.stop_controller(timeout_s=LEAVE_S)
        except AscendrunError:
            return  # processes that are left are ended by their mark
        if not live:
            return


def tell_end(ctx: CliContext, folder: Path) -> None:
    if folder.exists():
        where = shlex.quote(str(folder))
        ctx.echo(
            f"nothing runs any more; the folder is kept: {folder}\n"
            f"hint: cd {where} && export ASCENDRUN_STATE_DIR={where}/state && ascendrun ps --all"
        )
    else:
        ctx.echo(f"cleaned up: nothing runs any more, {folder} is gone")
