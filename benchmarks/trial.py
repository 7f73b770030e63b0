"""One job of one launcher, watched from outside: at a terminal of the head, and by the processes on the hosts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Callable

import pexpect  # type: ignore[import-untyped]

from benchmarks.bed import Bed
from tests.lib.vcluster.processes import Process, is_of_the_system

LAUNCH = re.compile(r"LAUNCH (\d+\.\d+)")
FIRST = re.compile(r"\[FIRST (\d+) (\d+\.\d+)\]")
_SAYS_LAUNCH = 'echo "LAUNCH $(date +%s.%N)"; exec "$@"'
"""Names the moment of the start from inside the head: entering its namespaces is no launcher's cost."""
_LOOK_S = 0.02
TAIL_CHARS = 300


@dataclass(frozen=True)
class Began:
    """Seconds from the start of the command (`at_s`, UTC) until the last rank lived (`alive_s`) and its line was at the
    head."""

    at_s: float
    alive_s: float
    seen_s: float


@dataclass(frozen=True)
class Ended:
    """Seconds from the event: `back_s` until the command was back, with `status`; `gone_s` until the last process of
    the job on any host had gone. None: not while we watched. `left`: processes of the job at the end of the watch."""

    back_s: float | None
    status: int | None
    gone_s: float | None
    left: int


class Trial:
    """The command runs from `with` on; at the end of the block it and all that it left on the hosts is killed."""

    def __init__(self, bed: Bed, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._bed = bed
        self._env = bed.environ(env)
        self._before = {process.pid for process in self._on_hosts()}
        self._text = ""
        self._firsts: dict[str, tuple[float, float]] = {}
        command = self._timed(argv)
        self._child = pexpect.spawn(
            command[0], command[1:], env=self._env, encoding="utf-8", codec_errors="replace", dimensions=(40, 200)
        )
        self._child.delaybeforesend = None
        self._stopping: subprocess.Popen[str] | None = None

    def __enter__(self) -> Trial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stopping is not None:
            self._stopping.kill()
            self._stopping.communicate()
        self._child.close(force=True)
        deadline = time.monotonic() + 10.0
        while self.left() and time.monotonic() < deadline:  # a supervisor that lost its ranks may act once more
            for process in self.left():
                _kill(process.pid)
            time.sleep(_LOOK_S)

    # -- the start

    def await_ranks(self, count: int, *, patience_s: float) -> Began | None:
        """None when not all of them said so in time, or the command ended before."""
        deadline = time.monotonic() + patience_s
        while len(self._firsts) < count:
            if time.monotonic() > deadline or not self._read():
                return None
        match = LAUNCH.search(self._text)
        assert match is not None, "the shell told the moment of the start before the ranks could speak"
        launched_s = float(match.group(1))
        alive_s, seen_s = (max(moments) for moments in zip(*self._firsts.values()))
        return Began(launched_s, alive_s - launched_s, seen_s - launched_s)

    def _read(self) -> bool:
        """Takes what the terminal shows, waiting a moment for it; False when the command has closed it."""
        try:
            self._text += self._child.read_nonblocking(65536, timeout=_LOOK_S)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        now_s = time.time()
        for rank, alive_s in FIRST.findall(self._text):
            self._firsts.setdefault(rank, (float(alive_s), now_s))
        return True

    # -- events: each returns the moment of its cause

    def interrupt(self, times: int) -> float:
        """^C at the terminal, `times` within a second."""
        began_s = time.time()
        for number in range(times):
            if number:
                self.watch(0.3, lambda: False)
            self._child.sendintr()
        return began_s

    def kill_launcher(self) -> float:
        began_s = time.time()
        self._child.kill(signal.SIGKILL)
        return began_s

    def kill_rank(self, rank: int) -> float:
        """SIGKILL, as the kernel out of memory would."""
        return self._signal_rank(rank, signal.SIGKILL)

    def suspend_rank(self, rank: int) -> float:
        return self._signal_rank(rank, signal.SIGSTOP)

    def _signal_rank(self, rank: int, number: int) -> float:
        for process in self.left():
            if str(rank) in (process.environ.get("RANK"), process.environ.get("OMPI_COMM_WORLD_RANK")):
                os.kill(process.pid, number)
                return time.time()
        raise LookupError(f"no process of rank {rank} among: {self.describe_left()}")

    def stop_by(self, argv: Sequence[str]) -> float:
        """The launcher's own stop command, at another terminal."""
        command = self._timed(argv)
        self._stopping = subprocess.Popen(
            command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._stopping.stdout is not None
        match = LAUNCH.search(self._stopping.stdout.readline())
        assert match is not None
        return float(match.group(1))

    # -- the end

    def await_end(self, since_s: float, *, patience_s: float) -> Ended:
        back: list[tuple[float, int | None]] = []
        gone_s: list[float] = []

        def look() -> bool:
            status = self.status()
            if not back and status is not None:
                back.append((time.time() - since_s, status))
            if not gone_s and not self.left():
                gone_s.append(time.time() - since_s)
            return bool(back and gone_s)

        self.watch(patience_s, look)
        back_s, status = back[0] if back else (None, None)
        return Ended(back_s=back_s, status=status, gone_s=gone_s[0] if gone_s else None, left=len(self.left()))

    def watch(self, seconds: float, fact: Callable[[], bool]) -> None:
        """Take what the terminal shows until `fact()`, at most so many seconds."""
        deadline = time.monotonic() + seconds
        while not fact() and time.monotonic() < deadline:
            if not self._read():
                time.sleep(_LOOK_S)

    def status(self) -> int | None:
        """Of the stop command where there is one, else of the launcher; None while it runs."""
        if self._stopping is not None:
            return self._stopping.poll()
        if self._child.isalive():
            return None
        status: int = self._child.exitstatus if self._child.exitstatus is not None else -self._child.signalstatus
        return status

    @property
    def text(self) -> str:
        """What the terminal has shown so far."""
        return self._text

    def left(self) -> list[Process]:
        """What the job has on the hosts: ranks, launchers, supervisors, shells; not the connections themselves."""
        return [process for process in self._on_hosts() if process.pid not in self._before]

    def _on_hosts(self) -> list[Process]:
        by_host = self._bed.cluster.all_processes(self._bed.cluster.hosts)
        return [process for processes in by_host.values() for process in processes if _is_of_a_job(process)]

    def describe_left(self) -> str:
        return "; ".join(" ".join(process.argv)[:120] for process in self.left())

    def tail(self) -> str:
        return " ".join(self._text.split())[-TAIL_CHARS:]

    def _timed(self, argv: Sequence[str]) -> list[str]:
        return self._bed.cluster.head_argv(["sh", "-c", _SAYS_LAUNCH, "sh", *argv], cwd="/")


def _is_of_a_job(process: Process) -> bool:
    """Not a host's own, not sshd's session, not ascendrun's agent, which lives as long as the connection."""
    if process.state == "Z" or is_of_the_system(process) or not process.argv:
        return False
    is_agent = any("agent-" in word for word in process.argv) and "supervise" not in process.argv
    return not process.argv[0].startswith("sshd:") and not is_agent


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it was faster
