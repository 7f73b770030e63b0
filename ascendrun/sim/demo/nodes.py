"""The demo's two nodes with a hostfile, a job file and its training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.errors import DeadlineExceededError
from ascendrun.node import procs, reap
from ascendrun.node.files import remove_tree as remove_tree
from ascendrun.sim.ascend.scenario import Scenario
from ascendrun.sim.ascend.tree import environ_of, install_tree
from ascendrun.sim.demo import train
from ascendrun.text import Text

NAMES = ("npu1", "npu2")
HOSTFILE, JOB_FILE, PROGRAM, CHECKPOINTS = "demo.hosts", "job.yaml", "train.py", "checkpoints"
CARDS = 4
FIRST_SAVED = train.SAVE_EVERY

HOSTS = """\
# Both are on this machine, so each has its own devices. Elsewhere: npu1 slots=8 addr=10.0.0.1
npu1 addr=local slots=2 devices=0,1
npu2 addr=local slots=2 devices=2,3
"""

JOB = """\
# Four ranks on two nodes train eight weights.
name: demo
command: [python3, train.py, --steps, 140]
nodes: 2
devices: {{type: npu, per_node: 2}}
hostfile: demo.hosts
workdir: {{path: code}}
setup: source "$ASCENDRUN_SIM_ROOT/usr/local/Ascend/ascend-toolkit/set_env.sh"
checkpoint: {{dir: {checkpoints}, grace_period_s: 10}}
# No torch is needed; no real device means no HCCL and no files in /dev; each node's CANN is in its own directory.
checks: {{skip: [{skipped}]}}
"""
SKIPPED = ("torch", "torch-npu", "hccl-ports", "device-files", "variables-consistency", "separate-trainings")


def tree_of(folder: Path, name: str) -> Path:
    """The directory that is the root of this simulated node."""
    return folder / "nodes" / name


def make_nodes(folder: Path) -> None:
    """Two nodes with four cards each below `folder`. Raises OSError."""
    for number, name in enumerate(NAMES):
        tree = tree_of(folder, name)
        install_tree(tree, Scenario(chip="910B3", cards=CARDS, number=number), seen_as=str(tree), has_devices=False)


def make_job(folder: Path) -> None:
    """The hostfile, the job file, the code to stage, and a directory for checkpoints that both nodes see."""
    (folder / "code").mkdir()
    (folder / CHECKPOINTS).mkdir()
    shutil.copyfile(train.__file__, folder / "code" / PROGRAM)
    (folder / HOSTFILE).write_text(HOSTS, encoding="utf-8")
    text = JOB.format(checkpoints=json.dumps(str(folder / CHECKPOINTS)), skipped=", ".join(SKIPPED))
    (folder / JOB_FILE).write_text(text, encoding="utf-8")


def login_of(folder: Path, name: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What a login on this node sets: its tools are found first, and they know which node they are."""
    seen = environ_of(tree_of(folder, name), dict(environ))
    return {variable: value for variable, value in seen.items() if environ.get(variable) != value}


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint; 0: there is none yet."""
    found = train.checkpoints(str(folder / CHECKPOINTS))
    return int(found[0][len("step-") : -len(".json")]) if found else 0


POLL_S = 0.05
END_S = 10.0
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DemoInterruptedError(Exception):
    """A signal requested the end; `number` is the first one that arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Actor:
    """`wait` and `run` raise DemoInterruptedError after a signal; a signal does nothing else, so that cleaning up
    is whole."""

    def __init__(self) -> None:
        self._signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals that end a program are noted for as long as this lasts; those that are ignored stay so.

        After one of them came, further ones are ignored for good: the program ends with the code of the first.
        """
        handled = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if self._signal is None else signal.SIG_IGN)

    def _note(self, number: int, frame: Any) -> None:
        self._signal = self._signal or number

    def check(self) -> None:
        if self._signal is not None:
            raise DemoInterruptedError(self._signal)

    def wait(self, has_happened: Callable[[], bool], *, deadline_s: float, event: Text | str) -> None:
        """Return when the event has happened. Raises DemoInterruptedError, DeadlineExceededError naming it."""
        until = time.monotonic() + deadline_s
        while not has_happened():
            self.check()
            if time.monotonic() > until:
                raise DeadlineExceededError(
                    Text("demo.timeout", "timed out after {limit_s:duration}: {event}", limit_s=deadline_s, event=event)
                )
            time.sleep(POLL_S)

    def run(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], deadline_s: float) -> int:
        """Its exit code, -n for signal n. Its output goes to that of this process. Raises DemoInterruptedError,
        DeadlineExceededError, OSError."""
        self.check()
        # A separate session: ^C at the terminal reaches only this process, which then ends the child.
        child = subprocess.Popen(argv, cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            self.wait(lambda: child.poll() is not None, deadline_s=deadline_s, event=f"`{' '.join(argv)}`")
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return child.returncode


def end_marked(mark: str, *, grace_s: float) -> int:
    """Return when no process has `mark` (NAME=value) in its environment; how many had to be killed after the grace."""
    killed: dict[int, None] = {}
    started_s = time.monotonic()
    while True:
        left = reap.find_marked(dict([mark.split("=", 1)]))
        if not left:
            return len(killed)
        if time.monotonic() > started_s + grace_s + END_S:
            pids = [pid for pid, _ in left]
            message = Text("demo.processes-left", "processes {pids} do not end", pids=pids)
            raise DeadlineExceededError(message, hint="kill -9 " + " ".join(map(str, pids)))
        if time.monotonic() > started_s + grace_s:
            for pid, start in left:
                killed[pid] = None
                procs.send_signal(pid, start, signal.SIGKILL)
        time.sleep(POLL_S)
