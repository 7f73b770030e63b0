"""A look at running ranks: what each waits for, without harm to a healthy one; last words of a hung one; a shell.

`take`: by py-spy if the rank has it on its PATH and may be traced, else by the rank's own handler of signal SIGNAL.
That signal is sent only to a process that announced the handler in its metrics and that handles it by /proc.
`abort`: SIGABRT, at which a Python process with PYTHONFAULTHANDLER prints its stacks and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

from ascendrun.node import layout, procs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable, Mapping

    from ascendrun.node.reap import Who


SIGNAL = 40
"""A real-time signal, which no program uses by accident. Equal to programs/trainer/runtime.STACK_SIGNAL."""
ANNOUNCED_BYTES = 1 << 16
"""The first bytes of a rank's metrics, which have the announcement."""
TRACER_S = 10.0
PRINTED_S = 8.0
"""Seconds in which a rank's handler prints: a blocked rank never does."""
SETTLED_S = 0.5
"""Seconds without a new byte after which a rank has printed everything: it may wait for a processor meanwhile."""
LOOK_S = 0.05
TEXT_BYTES = 1 << 18
THREADS = 64


def catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal."""
    try:
        with open("/proc/%d/status" % pid, "rb") as file:
            masks = [line.split()[1] for line in file if line.startswith(b"SigCgt:")]
        return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)
    except (OSError, ValueError, IndexError):
        return False


def abort(found: Iterable[Who]) -> None:
    """Send SIGABRT to the processes of ranks that handle it; no core is dumped. Stopped processes continue for it."""
    for pid, start in found:
        environ = procs.read_environ(pid)
        if b"\0RANK=" in b"\0" + environ and not _launches(environ) and catches(pid, signal.SIGABRT):
            _forbid_core(pid)
            procs.send_signal(pid, start, signal.SIGABRT)
            procs.send_signal(pid, start, signal.SIGCONT)


def _forbid_core(pid: int) -> None:
    import resource

    with contextlib.suppress(OSError, ValueError, AttributeError):
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


def take(found: Iterable[Who], leaders: dict[int, int], streams: str, *, login: dict[bytes, bytes]) -> dict[str, Any]:
    """Return {ranks: [...], at_ns}: one item per living rank on this node, in order of rank.

    `found`: all processes of the attempt; `leaders`: ranks of processes whose environment cannot be read.
    {rank, pid, state, wait_channel, machine: as `uname -m`, below: names of its other processes, threads: [{name,
    state, wait_channel, system_call: number, "running", or "" where it may not be read}], source: py-spy, signal or
    proc, text: as the source wrote it, kernel: only root may read it}
    """
    members = members_of_ranks(found, leaders)
    rows = [_describe(rank, members[rank]) for rank in sorted(members)]
    _ask_tracer(rows, login)
    _ask_ranks([row for row in rows if row["source"] == "proc"], streams)
    return {"ranks": rows, "at_ns": time.time_ns()}


def members_of_ranks(found: Iterable[Who], leaders: Mapping[int, int]) -> dict[int, list[Who]]:
    """Return the processes of each rank, its own first. `found`, `leaders`: as for `take`."""
    members: dict[int, list[Who]] = {}
    for who in found:
        rank = _rank_of(who[0])
        rank = leaders.get(who[0]) if rank is None else rank
        if rank is not None:
            members.setdefault(rank, []).append(who)
    return {rank: _own_first(members[rank]) for rank in members}


def has_own_rank(found: Iterable[Who]) -> bool:
    """Return whether a process is a rank by its environment."""
    return any(_rank_of(pid) is not None for pid, _ in found)


def _rank_of(pid: int) -> int | None:
    environ = procs.read_environ(pid)
    return None if _launches(environ) else layout.rank_in(environ)[0]


def _launches(environ: bytes) -> bool:
    """Return whether it is of a launcher, or of a process in place of a rank."""
    return b"\0%s=" % layout.JOIN_VARIABLE.encode("ascii") in b"\0" + environ


def _own_first(members: list[Who]) -> list[Who]:
    """Return a rank's processes with its own, of which the others descend, first."""
    pids = {pid for pid, _ in members}
    stats = {pid: procs.read_stat(pid) for pid in pids}

    def is_below(who: Who) -> bool:
        stat = stats[who[0]]
        return stat is None or stat.ppid in pids

    return sorted(members, key=is_below)


def _describe(rank: int, members: list[Who]) -> dict[str, Any]:
    """Return what /proc shows of a rank. The first member is its own process."""
    pid, start = members[0]
    stat = procs.read_stat(pid)
    return {
        "rank": rank,
        "pid": pid,
        "start": start,
        "state": stat.state if stat is not None else "",
        "wait_channel": procs.wait_channel("/proc/%d" % pid),
        "machine": os.uname().machine,
        "below": sorted({procs.read_line("/proc/%d/comm" % other) for other, _ in members[1:]}),
        "threads": _threads(pid),
        "kernel": procs.read_text("/proc/%d/stack" % pid, TEXT_BYTES),
        "source": "proc",
        "text": "",
    }


def _threads(pid: int) -> list[dict[str, Any]]:
    try:
        names = sorted(os.listdir("/proc/%d/task" % pid), key=int)[:THREADS]
    except (OSError, ValueError):
        return []
    found = []
    for name in names:
        place = "/proc/%d/task/%s" % (pid, name)
        state = procs.read_line(place + "/stat").rpartition(")")[2].split()[:1]
        row = {"name": procs.read_line(place + "/comm"), "wait_channel": procs.wait_channel(place)}
        call = procs.read_line(place + "/syscall").partition(" ")[0]
        found.append(dict(row, state=state[0] if state else "", system_call=call))
    return found


# py-spy


def _ask_tracer(rows: list[dict[str, Any]], login: dict[bytes, bytes]) -> None:
    """Fill the rows that py-spy can read; it neither stops a process nor injects anything."""
    started = []
    for row in rows:
        environ = procs.variables_of(procs.read_environ(row["pid"]))
        tracer = _which(b"py-spy", environ.get(b"PATH", b""))
        if tracer is None:
            continue
        argv = [tracer, b"dump", b"--nonblocking", b"--json", b"--pid", b"%d" % row["pid"]]
        try:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=login
            )
        except OSError:
            continue
        started.append((row, child))
    deadline = time.monotonic() + TRACER_S
    for row, child in started:
        try:
            text = child.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            continue
        if child.returncode == 0 and text:
            row.update(source="py-spy", text=text[:TEXT_BYTES].decode("utf-8", "replace"))


def _which(name: bytes, path: bytes) -> bytes | None:
    for folder in path.split(b":"):
        full = os.path.join(folder, name)
        if folder.startswith(b"/") and os.access(full, os.X_OK):
            return full
    return None


# The handler of a rank


def _ask_ranks(rows: list[dict[str, Any]], streams: str) -> None:
    """Let the ranks with a handler print, all at once, and take what they print."""
    announced = _announced(streams) if rows else set()
    asked: dict[int, tuple[str, int, int, float]] = {}  # by place in rows: path, size before, size now and since when
    for place, row in enumerate(rows):
        path = os.path.join(streams, "rank-%d.stack.0" % row["rank"])
        size = _size(path)
        if row["pid"] not in announced or not catches(row["pid"], SIGNAL) or size is None or row["state"] in "Tt":
            continue
        if procs.send_signal(row["pid"], row["start"], SIGNAL):
            asked[place] = path, size, size, time.monotonic()
    deadline = time.monotonic() + PRINTED_S
    while asked and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        for place, (path, begin, before, since) in list(asked.items()):
            now = _size(path) or begin
            if now != before:
                asked[place] = path, begin, now, time.monotonic()
            elif now > begin and time.monotonic() - since >= SETTLED_S:
                rows[place].update(source="signal", text=procs.read_text(path, TEXT_BYTES, offset=begin))
                del asked[place]


def _announced(streams: str) -> set[int]:
    """Return the processes that announced their handler in a metrics file; ranks that a script forks share one."""
    found = set()
    for name in os.listdir(streams):
        if not name.endswith(".metrics.0"):
            continue
        for line in procs.read_text(os.path.join(streams, name), ANNOUNCED_BYTES).split("\n"):
            if "stack_signal" not in line:
                continue
            try:
                values = json.loads(line)
            except ValueError:
                continue
            if isinstance(values, dict) and values.get("stack_signal") == SIGNAL and "pid" in values:
                found.add(int(values["pid"]))
    return found


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


# --- a shell, or one command, in the environment and the working directory of a running rank ---
#
# It does not belong to the attempt: it lacks the variables by which processes of an attempt are found and stopped, and
# those that name files of the rank.

NOT_SHARED = (*layout.OURS, "ASCENDRUN_METRICS_FILE", "TORCHELASTIC_ERROR_FILE")
"""Variables of a rank that a shell next to it does not get: it would write into the rank's files."""
OF_TERMINAL = ("TERM", "COLORTERM", "SSH_TTY", "LINES", "COLUMNS")
"""Variables of the login that describe the terminal."""
EXIT_GONE = 75


def find_rank(rank: int, found: Iterable[Who], leaders: Mapping[int, int], agent: list[str]) -> dict[str, Any] | None:
    """Return {"argv"}, the command that opens the shell; None: no process of the rank lives here.

    `found`, `leaders`: as for `take`.
    """
    members = members_of_ranks(found, leaders).get(rank)
    if not members:
        return None
    pid, start = members[0]
    return {"argv": [*agent, "shell", str(pid), str(start)]}


def main(arguments: list[str]) -> int:
    """Become the shell. `arguments`: pid and start time of the rank, and as JSON in hexadecimal digits a command, or a
    port: then become a connection to it."""
    pid, start = int(arguments[0]), int(arguments[1])
    command = json.loads(bytes.fromhex(arguments[2]).decode("utf-8")) if len(arguments) > 2 else None
    stat = procs.read_stat(pid)
    environ = make_environ(procs.read_environ(pid), os.environb)
    try:
        if stat is None or stat.start != start or not environ:
            raise FileNotFoundError
        os.chdir("/proc/%d/cwd" % pid)
    except OSError as error:
        sys.stderr.write("ascendrun: process %d of the rank: %s\n" % (pid, error.strerror or "ended"))
        return EXIT_GONE
    if isinstance(command, int):
        from ascendrun.node.relay import relay

        return relay(command)
    environ[b"PWD"] = os.fsencode(os.getcwd())
    shell = environ.get(b"SHELL") or os.environb.get(b"SHELL") or b"/bin/bash"
    shell = shell if os.access(shell, os.X_OK) else b"/bin/sh"
    argv = [text.encode("utf-8", "surrogateescape") for text in command] if command else [shell, b"-i"]
    try:
        os.execvpe(argv[0], argv, environ)
    except OSError as error:
        sys.stderr.write("ascendrun: %s: %s\n" % (os.fsdecode(argv[0]), error.strerror))
        return 127


def make_environ(of_rank: bytes, of_login: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the environment of the shell. `of_rank`: as /proc has it; b"" gives {}."""
    environ = {
        name: value for name, value in procs.variables_of(of_rank).items() if os.fsdecode(name) not in NOT_SHARED
    }
    if environ:
        for name in map(os.fsencode, OF_TERMINAL):
            environ.pop(name, None)
            if name in of_login:
                environ[name] = of_login[name]
    return environ
