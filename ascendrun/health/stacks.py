"""Stacks of a job's ranks: read from what the nodes send, grouped by what they wait in, compared over time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from ascendrun.core.dataclass import dataclass

INNERMOST = 5
"""Frames by which stacks are grouped."""
NEAR = 4
"""Innermost frames in which a collective is looked for: libraries wrap it."""

_FRAME = re.compile(r'^ +File "(.*)", line (\d+|\?\?\?) in (.*)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-fA-F]+")

PEER_FILES = ("torch/distributed/", "ascendrun/programs/trainer/distributed.py", "deepspeed/comm/")
PEER_CALLS = re.compile(
    r"^_?(all_?reduce|all_gather|all_to_all|reduce_scatter|broadcast|barrier|monitored_barrier|synchronize|wait_stream)"
)
"""Calls that wait for other ranks, or for the device, which may wait for other ranks."""
COMPILER_FILES = (
    *("torch/_dynamo/convert_frame", "torch/_inductor/compile_fx", "torch/_inductor/async_compile"),
    *("/triton/compiler/", "/te_fusion/", "/tbe/", "/tvm/"),
)
"""Files that run only while something is compiled. Others of these packages wrap calls: torch/_dynamo/eval_frame is on
the stack of every layer of FSDP2."""
COMPILERS = frozenset("ccec bisheng te_fusion ninja nvcc cicc ptxas cc1 cc1plus clang clang++ g++ ld".split())
"""Names of processes below a rank that compile."""
FLUSHES: Mapping[str, frozenset[str]] = {
    "x86_64": frozenset(("26", "74", "75", "162", "277", "306")),
    "aarch64": frozenset(("81", "82", "83", "84", "227", "267")),
}
"""Numbers of fsync, fdatasync, msync, sync, syncfs and sync_file_range (asm/unistd_64.h, asm-generic/unistd.h)."""


@dataclass(frozen=True)
class Frame:
    """`line` None: unknown."""

    file: str
    function: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{'/'.join(self.file.split('/')[-2:])}:{self.function}"

    @property
    def waits_for_peers(self) -> bool:
        return any(part in self.file for part in PEER_FILES) or PEER_CALLS.match(self.function) is not None

    @property
    def compiles(self) -> bool:
        return any(part in self.file for part in COMPILER_FILES)


@dataclass(frozen=True)
class RankStack:
    """What one rank does. `frames`: of its main thread, innermost first; (): no Python stack is known. `threads`: all
    threads with their names. `state`: a letter of /proc. `source`: py-spy, signal, proc, or abort: as it ended.
    `flushes`: a thread waits until what was written before is on the disk, and writes nothing meanwhile."""

    rank: int
    host: str
    pid: int
    state: str = ""
    wait_channel: str = ""
    source: str = "proc"
    frames: tuple[Frame, ...] = ()
    threads: tuple[tuple[str, tuple[Frame, ...]], ...] = ()
    below: tuple[str, ...] = ()
    flushes: bool = False

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def waits_for_peers(self) -> bool:
        return any(frame.waits_for_peers for frame in self.frames[:NEAR])

    @property
    def compiles(self) -> bool:
        in_process = not self.waits_for_peers and any(frame.compiles for frame in self.frames)
        return in_process or bool(COMPILERS.intersection(self.below))

    @property
    def group(self) -> tuple[str, ...]:
        """By which equal stacks are found: functions of the innermost frames, or what the kernel shows."""
        return tuple(map(str, self.frames[:INNERMOST])) or (self.state, self.wait_channel)

    @property
    def where(self) -> str | None:
        """The innermost function outside the libraries of collectives and of Python's own waiting."""
        if not self.frames:
            return None
        if self.waits_for_peers:
            calls = [frame.function for frame in self.frames[:NEAR] if PEER_CALLS.match(frame.function)]
            return calls[-1] if calls else str(self.frames[0])
        own = [frame for frame in self.frames if not _OF_PYTHON.search(frame.file)]
        return str((own or list(self.frames))[0])


_OF_PYTHON = re.compile(r"/lib/python\d[^/]*/(?!site-packages/)[^/]+\.py$|/multiprocessing/|^<frozen")


@dataclass(frozen=True)
class Take:
    """The stacks of all ranks that could be asked at one time (monotonic seconds)."""

    at_s: float
    ranks: Mapping[int, RankStack] = field(default_factory=dict)

    @property
    def has_frames(self) -> bool:
        return any(stack.frames for stack in self.ranks.values())

    @property
    def compiles(self) -> bool:
        return any(stack.compiles for stack in self.ranks.values())

    def same_as(self, other: Take) -> bool:
        """Return whether no rank has moved: its frames with their lines, or its state where it has none."""
        return self.ranks.keys() == other.ranks.keys() and all(
            (stack.frames or stack.state) == (other.ranks[rank].frames or other.ranks[rank].state)
            for rank, stack in self.ranks.items()
        )


def read_stack(host: str, row: Mapping[str, Any]) -> RankStack:
    """Return the stack of a row of node/stacks.py. A text that cannot be read has no frames."""
    text, source = str(row.get("text") or ""), str(row.get("source") or "proc")
    pid = int(row.get("pid") or 0)
    threads: tuple[tuple[str, tuple[Frame, ...]], ...] = ()
    main: tuple[Frame, ...] = ()
    if source == "py-spy":
        threads, main = _from_tracer(text, pid)
    elif source in ("signal", "abort"):
        threads = _from_handler(text)
        main = threads[-1][1] if threads else ()  # Python prints its newest thread first
    return RankStack(
        int(row["rank"]),
        host,
        pid,
        str(row.get("state") or ""),
        str(row.get("wait_channel") or ""),
        source,
        main,
        threads,
        tuple(map(str, row.get("below") or ())),
        _flushes(row),
    )


def _flushes(row: Mapping[str, Any]) -> bool:
    calls = FLUSHES.get(str(row.get("machine")), frozenset())
    return any(str(thread.get("system_call")) in calls for thread in row.get("threads") or ())


def _from_handler(text: str) -> tuple[tuple[str, tuple[Frame, ...]], ...]:
    found: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        match = _FRAME.match(line)
        if match and found:
            number = None if match[2] == "???" else int(match[2])
            found[-1][1].append(Frame(match[1], match[3], number))
        elif _THREAD.match(line):
            found.append((line.partition(" (")[0], []))
    return tuple((name, tuple(frames)) for name, frames in found)


def _from_tracer(text: str, pid: int) -> tuple[tuple[tuple[str, tuple[Frame, ...]], ...], tuple[Frame, ...]]:
    try:
        rows = json.loads(text)
        threads = [
            (
                str(row.get("thread_name") or row.get("os_thread_id") or ""),
                tuple(Frame(str(one["filename"]), str(one["name"]), one.get("line")) for one in row["frames"]),
                row.get("os_thread_id") == pid or row.get("thread_name") == "MainThread",
            )
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return (), ()
    main = next((frames for _, frames, is_main in threads if is_main), ())
    return tuple((name, frames) for name, frames, _ in threads), main


def fold(stacks: Sequence[RankStack]) -> list[tuple[tuple[int, ...], RankStack]]:
    """Return (ranks, one of them) of each group of equal stacks, the largest group first."""
    groups: dict[tuple[str, ...], list[RankStack]] = {}
    for stack in sorted(stacks, key=lambda one: one.rank):
        groups.setdefault(stack.group, []).append(stack)
    ordered = sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))
    return [(tuple(one.rank for one in group), group[0]) for group in ordered]


def find_outliers(take: Take) -> tuple[int, ...]:
    """Return the ranks that the others wait for, by their stacks alone; (): no minority differs."""
    stacks = [stack for stack in take.ranks.values() if stack.frames or stack.is_stopped]
    waiting = [stack for stack in stacks if stack.waits_for_peers and not stack.is_stopped]
    others = tuple(sorted(stack.rank for stack in stacks if stack not in waiting))
    if others and waiting and 2 * len(others) <= len(stacks):
        return others
    groups = fold(stacks)
    if len(groups) > 1 and 2 * len(groups[0][0]) > len(stacks):
        return tuple(sorted(rank for ranks, _ in groups[1:] for rank in ranks))
    return ()


def most_common_wait(take: Take, *, without: Sequence[int]) -> str | None:
    """Return the call in which most of the other ranks wait; None: unknown."""
    rest = [stack for stack in take.ranks.values() if stack.rank not in without and stack.frames]
    groups = fold(rest)
    return groups[0][1].where if groups else None
