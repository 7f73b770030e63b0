"""A made synchronous training run: what every rank would write and every tool would say, with a fault or without."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable

from ascendrun.core.metrics import MetricsLine
from ascendrun.core.samples import DeviceSample, HostSample, Newest, RankSample
from ascendrun.health.samples.step_times import StepTimes, make_step_times

BEGAN_S = 1_700_000_000.0
SAMPLED_S = 5.0

Own = Callable[[int, int], float]
"""(rank, step) -> what this rank's part is multiplied by."""


@dataclass
class Played:
    """One step: when it began, and by rank when its device began and ended to compute."""

    began_s: float
    computes: Mapping[int, tuple[float, float]]


@dataclass
class World:
    """`compute_s`: what a healthy rank computes in a step; `shared_s`: the collective itself, after the last came."""

    nodes: int = 2
    per_node: int = 8
    steps: int = 80
    compute_s: float = 1.0
    shared_s: float = 0.2
    data_s: float = 0.02
    noise: float = 0.03
    device_noise: float = 0.015
    seed: int = 0
    slower: Own = lambda rank, step: 1.0
    data_more_s: Callable[[int, int], float] = lambda rank, step: 0.0
    pauses: bool = True
    tells: tuple[str, ...] = ("step_s", "data_s", "comm_s", "at_s")
    log_every: int = 1
    skew_s: Mapping[str, float] = field(default_factory=dict)
    lines: dict[int, list[MetricsLine]] = field(default_factory=dict)
    played: list[Played] = field(default_factory=list)
    ended_s: float = 0.0

    @property
    def ranks(self) -> range:
        return range(self.nodes * self.per_node)

    def host(self, rank: int) -> str:
        return f"npu{rank // self.per_node:02d}"

    @property
    def hosts_of_ranks(self) -> dict[int, str]:
        return {rank: self.host(rank) for rank in self.ranks}

    def run(self) -> World:
        """Plays all steps: the collective waits for the last rank, so every rank's step takes equally long."""
        dice = random.Random(self.seed)
        devices = {rank: 1.0 + dice.gauss(0, self.device_noise) for rank in self.ranks}
        self.lines = {rank: [] for rank in self.ranks}
        now_s = BEGAN_S
        for step in range(1, self.steps + 1):
            data = {
                rank: abs(dice.gauss(self.data_s, self.data_s / 3)) + self.data_more_s(rank, step)
                for rank in self.ranks
            }
            own, computes = {}, {}
            for rank in self.ranks:
                busy_s = self.compute_s * devices[rank] * self.slower(rank, step) * max(0.5, dice.gauss(1, self.noise))
                computes[rank] = now_s + data[rank], now_s + data[rank] + busy_s
                own[rank] = data[rank] + busy_s + self._pause(dice, rank, step)
            self.played.append(Played(now_s, computes))
            step_s = max(own.values()) + self.shared_s
            now_s += step_s
            if step % self.log_every == 0:
                self._write(step, step_s, now_s, data, own, dice)
        self.ended_s = now_s
        return self

    def _pause(self, dice: random.Random, rank: int, step: int) -> float:
        if not self.pauses:
            return 0.0
        compiling = 30.0 * dice.random() if step <= 3 else 0.0
        garbage = 2.0 if dice.random() < 0.01 else 0.0
        evaluation = 5.0 if step % 20 == 0 else 0.0
        saving = 8.0 if step % 10 == 0 and rank == 0 else 0.0
        return compiling + garbage + evaluation + saving

    def _write(
        self,
        step: int,
        step_s: float,
        now_s: float,
        data: Mapping[int, float],
        own: Mapping[int, float],
        dice: random.Random,
    ) -> None:
        for rank in self.ranks:
            late_s = max(0.0, dice.gauss(0.002, 0.001))
            values = {
                "step_s": step_s,
                "data_s": data[rank],
                "comm_s": step_s - own[rank],
                "at_s": now_s + late_s + self.skew_s.get(self.host(rank), 0.0),
            }
            self.lines[rank].append(MetricsLine(step=step, loss=1.0, **{name: values[name] for name in self.tells}))

    def step_times(self, *, error_s: float | None = 0.001) -> dict[int, tuple[StepTimes, ...]]:
        """With the hosts' clocks taken off, known to `error_s`; None: nobody measured them."""

        def clock(host: str) -> Callable[[float], float]:
            return lambda at_s: at_s - self.skew_s.get(host, 0.0) if error_s is not None else at_s

        return {
            rank: make_step_times(self.lines[rank], to_head_s=clock(self.host(rank)), error_s=error_s)
            for rank in self.ranks
        }

    def samples(self, **changes: Callable[[int, float], object]) -> Newest:
        """Five minutes of healthy figures; `changes`: NAME_OF_A_FIGURE(rank or node's first rank, 0…1 of the time)."""
        dice = random.Random(self.seed + 1)
        devices: list[DeviceSample] = []
        hosts: list[HostSample] = []
        ranks: list[RankSample] = []
        count = int(280 / SAMPLED_S)
        for turn in range(count):
            at_s, part = self.ended_s - 280 + turn * SAMPLED_S, turn / count
            for rank in self.ranks:
                figures = {
                    "utilisation": 90.0 + dice.gauss(0, 4),
                    "power_w": 300.0 + dice.gauss(0, 10),
                    "temperature_c": 58.0 + dice.gauss(0, 3),
                    "frequency_mhz": 1800.0,
                    "health": "OK",
                    "link_up": True,
                    "link_downs": 2,
                    "link_tx_bytes_s": 5e9 * (1 + dice.gauss(0, 0.1)),
                    "pids": (1000 + rank,),
                }
                given = {name: make(rank, part) for name, make in changes.items() if name in figures}
                figures.update({name: value for name, value in given.items() if value is not None})
                devices.append(DeviceSample(at_s, self.host(rank), rank % self.per_node, "npu", **figures))
                cpu = changes.get("rank_cpu", lambda rank, part: None)(rank, part)
                ranks.append(
                    RankSample(
                        at_s,
                        self.host(rank),
                        "j-0001",
                        1,
                        rank,
                        pid=1000 + rank,
                        device=rank % self.per_node,
                        cpu=105.0 if cpu is None else float(str(cpu)),
                    )
                )
            for node in range(self.nodes):
                busy: dict[str, Any] = {"cpu": 30.0 + dice.gauss(0, 5), "memory_used_bytes": 400 * 2**30}
                given = {
                    name: make(node * self.per_node, part)
                    for name, make in changes.items()
                    if name in ("cpu", "memory_used_bytes")
                }
                busy.update({name: value for name, value in given.items() if value is not None})
                hosts.append(HostSample(at_s, self.host(node * self.per_node), memory_total_bytes=1024 * 2**30, **busy))
        return Newest(tuple(devices), tuple(hosts), tuple(ranks))

    def used(self, kind: str = "npu", *, for_s: float = 600.0, average_s: float = 1.0) -> Newest:
        """What the tools say of `for_s` seconds of such a training: a device that waits for others in a collective is
        idle (npu), busy with waiting (cuda), or there is none, and the rank's own CPU waits (cpu). The tool's number is
        the mean over the last `average_s`; devices draw other power for the same work."""
        dice = random.Random(self.seed + 2)
        draws = {rank: dice.gauss(1, 0.05) for rank in self.ranks}
        begins = [one.began_s for one in self.played]
        devices: list[DeviceSample] = []
        ranks: list[RankSample] = []
        for turn in range(int(for_s / SAMPLED_S)):
            at_s = self.ended_s - for_s + turn * SAMPLED_S
            for rank in self.ranks:
                busy = self._busy(begins, rank, at_s - average_s, at_s) / average_s
                place = (at_s, self.host(rank), rank % self.per_node)
                cpu = 100.0 * busy if kind == "cpu" else 105.0
                ranks.append(RankSample(at_s, self.host(rank), "j-0001", 1, rank, pid=1000 + rank, cpu=cpu))
                if kind == "cpu":
                    continue
                shown = 100.0 if kind == "cuda" else 100.0 * busy
                power_w = (90.0 + (210.0 if kind == "npu" else 150.0) * busy) * draws[rank]
                figures = {"frequency_mhz": 1800.0, "temperature_c": 58.0 + dice.gauss(0, 3), "power_w": power_w}
                devices.append(DeviceSample(*place, kind, utilisation=round(shown), **figures))
        return Newest(tuple(devices), (), tuple(ranks))

    def _busy(self, begins: list[float], rank: int, since_s: float, until_s: float) -> float:
        first = max(0, bisect_right(begins, since_s) - 1)
        last = bisect_right(begins, until_s)
        spans = [one.computes[rank] for one in self.played[first:last]]
        return sum(max(0.0, min(end, until_s) - max(begin, since_s)) for begin, end in spans)
