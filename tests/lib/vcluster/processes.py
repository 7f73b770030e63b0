"""Processes of the cluster as the machine sees them, by the namespaces they live in."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

_POLL_S = (0.005, 0.3)


@dataclass(frozen=True)
class Process:
    """One process; `pid` and `ppid` are the machine's numbers, `inner_pid` the host's own.

    `state`: the kernel's letter, "Z" a zombie. `environ`: what it was started with; empty where the kernel hides it.
    """

    pid: int
    ppid: int
    inner_pid: int
    state: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.inner_pid} inside, parent {self.ppid}, {self.state}): {' '.join(self.argv)}"


def start_time(pid: int) -> int | None:
    """Clock ticks from the machine's boot to the start of `pid`: both name a process. None: gone, or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def is_alive(pid: int) -> bool:
    return start_time(pid) is not None


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None


def await_true(fact: Callable[[], object], *, deadline_s: float) -> bool:
    """Whether `fact` came true in time. After a look that took long the pause is long: others need the processor."""
    end = time.monotonic() + deadline_s
    while True:
        began = time.monotonic()
        if fact():
            return True
        now = time.monotonic()
        if now > end:
            return False
        time.sleep(min(max(now - began, _POLL_S[0]), _POLL_S[1]))


def await_that(fact: Callable[[], object], what: str | Callable[[], str] = "", *, deadline_s: float = 180.0) -> None:
    """Fail unless `fact` comes true in time. `what`: what is awaited, or a call that tells how things are then."""
    if not await_true(fact, deadline_s=deadline_s):
        raise AssertionError(f"within {deadline_s:g} s it never was true: {what if isinstance(what, str) else what()}")


def processes_in(inits: Mapping[str, int]) -> dict[str, list[Process]]:
    """Processes by host, in one look over /proc; `inits`: the live init of each host."""
    hosts = {_namespace(pid, "pid"): name for name, pid in inits.items()}
    hosts.pop(None, None)
    found: dict[str, list[Process]] = {name: [] for name in inits}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        name = hosts.get(_namespace(int(entry), "pid"))
        process = read_process(int(entry)) if name is not None else None
        if name is not None and process is not None:
            found[name].append(process)
    return found


def _namespace(pid: int, kind: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None


def read_process(pid: int) -> Process | None:
    fields = _stat(pid)
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        argv = _strings(Path(f"/proc/{pid}/cmdline").read_bytes())
        environ = _strings(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return None
    if fields is None:
        return None
    inner = [line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")]
    return Process(
        pid=pid,
        ppid=int(fields[1]),
        inner_pid=int(inner[0]),
        state=fields[0],
        argv=argv,
        environ=dict(pair.partition("=")[::2] for pair in environ if "=" in pair),
    )


def _strings(raw: bytes) -> tuple[str, ...]:
    return tuple(part.decode("utf-8", "replace") for part in raw.rstrip(b"\0").split(b"\0") if part)


def is_of_the_system(process: Process) -> bool:
    """Whether it belongs to a host that rests: its init, and the sshd that listens (not one that serves a
    connection)."""
    title = " ".join(process.argv)
    return process.inner_pid == 1 or title.startswith(("sshd: /usr/sbin/sshd", "/usr/sbin/sshd"))


def describe(processes: Sequence[Process]) -> str:
    return "\n".join(f"  {process}" for process in processes)
