"""A training whose ranks hang or only wait, as the look of a head at it: for tests of hangs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ascendrun.health.hang import DeviceLook, HangWatch, Look, RankLook, Verdict, Windows
from ascendrun.health.stacks import Frame, RankStack, Take

WAITS = (Frame("/x/torch/distributed/distributed_c10d.py", "all_reduce", 1), Frame("/w/train.py", "step", 9))
BARRIER = (Frame("/x/torch/distributed/distributed_c10d.py", "barrier", 1), Frame("/w/train.py", "check", 9))
READS = (Frame("/w/data.py", "read_shard", 7), Frame("/w/train.py", "step", 3))
SAVES = (Frame("/x/torch/serialization.py", "save", 7), Frame("/w/train.py", "save", 3))
COMPILES = (Frame("/x/torch/_inductor/compile_fx.py", "compile", 7), Frame("/w/train.py", "step", 3))
STEP_S = 4.0


@dataclass
class Rank:
    """What a rank truly does from now on. `cpu` with noise; `moves`: its stack changes all the time."""

    host: str
    step: int = 0
    reported: int = 0
    cpu: float = 300.0
    state: str = "S"
    writes: float = 0.0
    phases: frozenset[str] = frozenset()
    frames: tuple[Frame, ...] = WAITS
    moves: bool = True
    below: tuple[str, ...] = ()
    output: int = 0
    flushes: bool = False


@dataclass
class World:
    """A training of `count` ranks on two hosts that is looked at every 15 s, with the takes that the watch wants."""

    count: int = 8
    device_type: str = "npu"
    windows: Windows = Windows()
    stacks: bool = True
    metrics: bool = True
    tells_phases: bool = True
    may_restart: bool = False
    at_s: float = 1000.0
    age_s: float = 2000.0
    busy: bool = True
    unreachable: frozenset[str] = frozenset()
    seed: int = 1
    hung: list[tuple[float, Verdict]] = field(default_factory=list)
    acted: list[tuple[float, Verdict]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.ranks = {rank: Rank("npu01" if 2 * rank < self.count else "npu02") for rank in range(self.count)}
        self.watch = HangWatch(self.windows)

    def look(self) -> Look:
        ranks = {
            rank: RankLook(
                one.host,
                one.step if self.metrics and one.step else None,
                one.reported if self.metrics else 0,
                one.output,
                one.phases,
                cpu=max(0.0, one.cpu + self.random.uniform(-0.5, 0.5)),
                state=one.state,
                writes_bytes_s=one.writes,
            )
            for rank, one in self.ranks.items()
        }
        usual = self.random.uniform(85, 99) if self.busy else 0.0
        devices = {(one.host, rank): DeviceLook(usual, 3e10, 90.0) for rank, one in self.ranks.items()}
        return Look(
            self.at_s,
            self.age_s,
            ranks,
            self.device_type,
            self.unreachable,
            STEP_S if self.metrics else None,
            self.tells_phases and self.metrics,
            devices if self.device_type != "cpu" else {},
            2e9 if self.busy else 1e5,
            may_restart=self.may_restart,
        )

    def take(self) -> Take:
        def seen(one: Rank) -> tuple[Frame, ...]:
            if not self.stacks or one.state == "T":
                return ()
            line = self.random.randrange(10**6) if one.moves else 5
            return (replace(one.frames[0], line=line), *one.frames[1:])

        return Take(
            self.at_s,
            {
                rank: RankStack(rank, one.host, rank, one.state, frames=seen(one), below=one.below, flushes=one.flushes)
                for rank, one in self.ranks.items()
                if one.host not in self.unreachable
            },
        )

    def run(self, seconds: float, *, steps: bool = False, logs: bool = False) -> None:
        """Let time pass. `steps`: all ranks train."""
        end_s = self.at_s + seconds
        while self.at_s < end_s:
            self.at_s, self.age_s = self.at_s + 15.0, self.age_s + 15.0
            for one in self.ranks.values():
                if steps:
                    one.step, one.reported = one.step + int(15.0 / STEP_S), one.reported + 300
                one.output += 100 if logs else 0
            verdict = self.watch.observe(self.look())
            if verdict is not None and verdict.wants_stacks:
                self.watch.take(self.take())
                verdict = self.watch.observe(self.look()) or verdict
            if verdict is not None and verdict.is_hung:
                self.hung.append((self.at_s, verdict))
            if verdict is not None and verdict.acts:
                self.acted.append((self.at_s, verdict))

    def train(self, seconds: float = 600.0) -> None:
        self.busy = True
        self.set(self.ranks, cpu=300.0, state="S", writes=0.0, phases=frozenset(), moves=True, below=(), frames=WAITS)
        self.run(seconds, steps=True)

    def set(self, ranks: Iterable[int], **changes: object) -> None:
        for rank in ranks:
            self.ranks[rank] = replace(self.ranks[rank], **changes)  # type: ignore[arg-type]

    def others_wait(self, *odd: int) -> None:
        """The other ranks wait for `odd`: they spin on an NPU, and sleep with gloo."""
        self.busy = False
        cpu = 100.0 if self.device_type == "npu" else 0.5
        self.set(set(self.ranks) - set(odd), cpu=cpu, moves=False, frames=WAITS)


HANGS: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
    "stopped": ((5,), {"state": "T", "cpu": 0.0}),
    "a deadlock": ((5,), {"cpu": 0.5, "frames": READS}),
    "an endless loop in C below one Python line": ((5,), {"cpu": 100.0, "frames": READS}),
    "another collective": ((5,), {"frames": BARRIER}),
    "blocked": ((5,), {"cpu": 0.0, "state": "D", "frames": READS}),
    "a whole node": ((4, 5, 6, 7), {"state": "T", "cpu": 0.0}),
}
"""The ranks that hang, and how they look."""


def hang(world: World, kind: str = "stopped") -> tuple[int, ...]:
    odd, looks = HANGS[kind]
    world.others_wait()
    world.set(odd, **{"moves": False, **looks})
    return odd
