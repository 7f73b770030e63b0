"""Cases as short YAML, and the evidence of a whole job made from them: clocks askew, noise, many lines a rank."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from phrases import PHRASES, fill

from ascendrun.core.events import Event
from ascendrun.core.jobs.reasons import Reason, because
from ascendrun.core.logs.log_lines import parse_ranks
from ascendrun.health.diagnosis import (
    DeviceFact,
    Diagnosis,
    Evidence,
    FixedClock,
    HostEvidence,
    Line,
    RankEvidence,
    diagnose,
)
from ascendrun.health.elastic_error import error_lines

FOLDER = Path(__file__).parent / "cases"
BEGAN_S = 1_790_000_000.0
STOP_DELAY_S = {"same": 0.02, "other": 0.15}


@dataclass(frozen=True)
class Expected:
    """`first`: the ranks, None: any; `codes`: each of these is right. `sure`: what the confidence may be.
    `domain`, `scope`: of the failure, "": it has none, or nobody can know it."""

    first: tuple[int, ...] | None
    hosts: tuple[str, ...] | None
    codes: tuple[str, ...]
    sure: tuple[str, ...]
    where: str | None = None
    text: str | None = None
    roles: tuple[tuple[str, str], ...] = ()
    domain: str = ""
    scope: str = ""


@dataclass(frozen=True)
class Case:
    name: str
    evidence: Evidence
    expected: Expected


def case_files() -> list[Path]:
    return sorted(FOLDER.glob("*.yaml"))


def one_of(count: int, paths: Iterable[Path]) -> list[Path]:
    """About one of so many cases, chosen by its own name: another case changes nothing."""
    return [path for path in paths if zlib.crc32(path.stem.encode()) % count == 0]


@cache
def load(path: Path) -> Case:
    row = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return Case(path.stem, Builder(row, seed=path.stem).evidence(), _expected(row["expect"]))


@cache
def case_of(path: Path) -> tuple[Case, Diagnosis]:
    """The case and its diagnosis, which many tests ask for."""
    case = load(path)
    return case, diagnose(case.evidence)


def _expected(row: Mapping[str, Any]) -> Expected:
    first = row.get("first")
    codes = row["code"]
    return Expected(
        first=None if first is None else tuple(sorted(parse_ranks(str(first)))) if str(first) else (),
        hosts=None if "hosts" not in row else tuple(row["hosts"]),
        codes=tuple(codes) if isinstance(codes, list) else (codes,),
        sure=tuple(row.get("sure", ("certain", "likely"))),
        where=row.get("where"),
        text=row.get("text"),
        roles=tuple((str(ranks), role) for ranks, role in row.get("roles", {}).items()),
        domain=row.get("domain", ""),
        scope=row.get("scope", ""),
    )


class Builder:
    """One case's evidence. Every host has an address 10.0.0.k and device addresses 192.168.k.d."""

    def __init__(self, row: Mapping[str, Any], *, seed: str) -> None:
        self.row = row
        self.random = random.Random(seed)
        self.count = int(row["ranks"])
        self.per_host = int(row.get("per_host", self.count))
        self.hosts = [f"npu{k + 1:02d}" for k in range((self.count + self.per_host - 1) // self.per_host)]
        self.clocks = self._make_clocks()
        self.lines: dict[int, list[Line]] = {}
        self.plog: dict[int, list[Line]] = {}
        self.offsets: dict[tuple[int, str], int] = {}
        self.error: dict[int, list[Line]] = {}
        self.ends: dict[int, dict[str, Any]] = {rank: {} for rank in range(self.count)}

    def _make_clocks(self) -> dict[str, FixedClock]:
        """`clocks`: known (offset and error), unknown (an offset that nobody measured), or by host."""
        row = self.row.get("clocks", "known")
        made = {}
        for host in self.hosts:
            offset_s = self.random.uniform(-90, 90)
            if isinstance(row, Mapping):
                one = row.get(host, {})
                made[host] = FixedClock(float(one.get("offset", 0.0)), one.get("error", 0.005))
            elif row == "known":
                made[host] = FixedClock(offset_s, 0.005)
            elif row == "unknown":
                made[host] = FixedClock(offset_s, None)
            else:
                made[host] = FixedClock(0.0, 0.002)
        return made

    # --- who is who

    def host_of(self, rank: int) -> str:
        return self.hosts[rank // self.per_host]

    def ranks_of(self, text: Any) -> list[int]:
        if text == "rest":
            named = {
                rank
                for group in self.row["groups"]
                if group["ranks"] != "rest"
                for rank in self.ranks_of(group["ranks"])
            }
            return [rank for rank in range(self.count) if rank not in named]
        if text == "all":
            return list(range(self.count))
        if str(text).startswith("npu"):
            return [rank for rank in range(self.count) if self.host_of(rank) == text]
        return sorted(parse_ranks(str(text)))

    def pid_of(self, rank: int) -> int:
        return 40000 + 10 * rank

    def values(self, rank: int, peer: int, at_s: float) -> dict[str, str]:
        def place(one: int, before: str) -> dict[str, str]:
            host = one // self.per_host
            return {
                f"{before}ip": f"10.0.0.{host + 1}",
                f"{before}dip": f"192.168.{host}.{one % self.per_host + 10}",
                f"{before}dev": str(one % self.per_host),
                f"{before}host": self.hosts[host],
                f"{before}pid": str(self.pid_of(one)),
            }

        node_s = self.node_s(rank, at_s) + 3600 * float(self.row.get("tz", 8))
        stamp = time.strftime("%Y-%m-%d-%H:%M:%S", time.gmtime(node_s)) + f".{int(node_s % 1 * 1000):03d}.117"
        return {
            "rank": str(rank),
            "local": str(rank % self.per_host),
            "world": str(self.count),
            "peer": str(peer),
            "plog": stamp,
            "at": f"{node_s:.3f}",
            **place(rank, ""),
            **place(peer, "peer_"),
        }

    def node_s(self, rank: int, at_s: float) -> float:
        return BEGAN_S + at_s + self.clocks[self.host_of(rank)].offset_s

    # --- what they write

    def write(self, rank: int, stream: str, text: str, at_s: float) -> None:
        """Lines as the spool would have them: a carriage return leaves a bar's last state."""
        kept = (self.plog if stream == "plog" else self.lines).setdefault(rank, [])
        name = f"gathered/plog/plog-{self.pid_of(rank)}_1.log" if stream == "plog" else f"rank-{rank}.{stream}.0"
        offset = self.offsets.get((rank, stream), 0)
        for piece in text.split("\n"):
            shown = piece.rsplit("\r", 1)[-1]
            at_line = None if stream == "plog" or not self.row.get("times", True) else self.node_s(rank, at_s)
            kept.append(Line(shown, f"{self.host_of(rank)}/{name}", offset, at_line, stream))
            offset += len(shown) + 1
        self.offsets[rank, stream] = offset

    def progress(self, rank: int, until_s: float, count: int) -> None:
        for number in range(count):
            at_s = until_s - (count - number) * 0.7
            self.write(rank, "out", f"step {number} loss {3 - number / (count + 9):.3f} lr 1.0e-04", at_s)
        if self.row.get("bars"):
            self.write(rank, "err", fill(PHRASES["bars"], {}) + f" r{rank}", until_s - 0.4)

    def group(self, group: Mapping[str, Any]) -> None:
        ranks = self.ranks_of(group["ranks"])
        spread_s = float(group.get("spread", 0.0))
        for place, rank in enumerate(ranks):
            at_s = float(group.get("at", 100.0)) + spread_s * place / max(1, len(ranks) - 1)
            if rank not in self.lines:
                self.progress(rank, min(at_s, float(group.get("until", at_s))), int(self.row.get("steps", 20)))
            peer = group.get("peer", 0)
            if peer == "next":
                peer = (rank + 1) % self.count
            elif peer == "ring":
                peer = ranks[(place + 1) % len(ranks)]
            values = self.values(rank, int(peer), at_s)
            for stream in ("out", "err", "plog"):
                for text in _as_list(group.get(stream)):
                    whole = fill(PHRASES.get(text, text), values)
                    self.write(rank, stream, whole.rstrip("\n"), at_s)
            if group.get("error_file"):
                name = f"{self.host_of(rank)}/rank-{rank}.error.0"
                self.error[rank] = list(error_lines(fill(group["error_file"], values), name))
            for number in range(int(group.get("goes_on", 0))):
                self.write(rank, "out", f"step {1000 + number} loss 1.5", at_s + 0.5 * (number + 1))
            self._end(rank, group, at_s)

    def _end(self, rank: int, group: Mapping[str, Any], at_s: float) -> None:
        end = self.ends[rank]
        code = group.get("exit")
        if code is not None:
            end.update(
                code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                at_s=at_s + float(group.get("exits_after", 0.1)),
                stopped=bool(group.get("stopped")),
            )
        for name in ("start_failed", "lingers", "last_step"):
            if name in group:
                end[name] = group[name]

    # --- all of it

    def evidence(self) -> Evidence:
        row = self.row
        for group in row["groups"]:
            self.group(group)
        stop_s = self._stop_times()
        ranks = tuple(self._rank(rank, stop_s) for rank in range(self.count) if rank not in row.get("absent", ()))
        hosts = tuple(self._host(host, stop_s) for host in self.hosts)
        return Evidence(
            job="j-0007",
            name="case",
            state=row.get("state", "FAILED"),
            cause=row.get("cause", "failure"),
            reason=_reason(row.get("reason", {"code": "rejected", "why": "a rank failed"})),
            device_type=row.get("family", "cpu"),
            launcher=row.get("launcher", "spawn"),
            world_size=int(row.get("world", self.count)),
            now_s=BEGAN_S + 4000,
            started_at_s=BEGAN_S,
            ended_at_s=BEGAN_S + 400,
            ranks=ranks,
            hosts=hosts,
            connect_timeout_s=float(row.get("connect_timeout", 120)),
            exec_timeout_s=float(row.get("exec_timeout", 1836)),
            events=(*(_changed(*change) for change in row.get("story", ())), *self._trouble()),
        )

    def _trouble(self) -> list[Event]:
        """What the supervisors told of their own input and output."""
        return [
            Event(
                "io-error",
                {"step": one["step"], "errno": one["errno"], "count": 1},
                (host,),
                (),
                1,
                BEGAN_S + one["at"],
            )
            for host, row in self.row.get("hosts", {}).items()
            for one in row.get("trouble", ())
        ]

    def _stop_times(self) -> dict[str, float]:
        """When each host was told to stop, by the head's clock: right after the first bad end, unless `stop` says."""
        given = self.row.get("stop", "auto")
        if given is None:
            return {}
        if given != "auto":
            return {host: float(given) for host in self.hosts}
        bad = [
            (end["at_s"], rank)
            for rank, end in self.ends.items()
            if "at_s" in end and not end["stopped"] and (end["signal"] or end["code"])
        ]
        if not bad:
            return {}
        first_s, rank = min(bad)
        return {host: first_s + STOP_DELAY_S["same" if host == self.host_of(rank) else "other"] for host in self.hosts}

    def _rank(self, rank: int, stop_s: Mapping[str, float]) -> RankEvidence:
        end = self.ends[rank]
        host = self.host_of(rank)
        lines = tuple(sorted(self.lines.get(rank, ()), key=lambda line: line.stream == "err"))
        exited_s = self.node_s(rank, end["at_s"]) if "at_s" in end else None
        is_npu = self.row.get("family") == "npu"
        times = [line.at_s for line in lines if line.at_s is not None]
        return RankEvidence(
            rank=rank,
            host=host,
            pid=self.pid_of(rank),
            device=rank % self.per_host if is_npu else None,
            code=end.get("code"),
            signal=end.get("signal"),
            exited_at_s=exited_s,
            stopped=end.get("stopped", False),
            start_failed=end.get("start_failed"),
            lingers=end.get("lingers"),
            last_step=end.get("last_step"),
            lines=lines,
            error=tuple(self.error.get(rank, ())),
            plog=tuple(self.plog.get(rank, ())) if is_npu else None,
            last_output_s=max(times, default=None),
        )

    def _kernel_line(self, host: str, number: int, row: Any) -> Line:
        """A text, or {at, text}: at a second of the job."""
        text, at_s = (
            (row["text"], BEGAN_S + row["at"] + self.clocks[host].offset_s) if isinstance(row, Mapping) else (row, None)
        )
        return Line(text, f"{host}/gathered/dmesg/dmesg.txt", 80 * number, at_s, "dmesg")

    def _host(self, host: str, stop_s: Mapping[str, float]) -> HostEvidence:
        row = self.row.get("hosts", {}).get(host, {})
        number = self.hosts.index(host)
        clock = self.clocks[host]
        dmesg = row.get("dmesg", [] if row.get("dmesg_readable", True) else None)
        return HostEvidence(
            host=host,
            clock=clock,
            addresses=(f"10.0.0.{number + 1}",),
            device_addresses={f"192.168.{number}.{k + 10}": k for k in range(self.per_host)}
            if self.row.get("device_addresses", True)
            else {},
            dmesg=None if dmesg is None else tuple(self._kernel_line(host, k, one) for k, one in enumerate(dmesg)),
            devices=tuple(DeviceFact(int(device), problem) for device, problem in row.get("devices", {}).items()),
            stopped_at_s=BEGAN_S + stop_s[host] + clock.offset_s if host in stop_s else None,
            stopped_by="failure" if host in stop_s else None,
            lost=row.get("lost"),
            supervisor_lost=row.get("supervisor_lost", False),
            reachable=row.get("reachable"),
            has_ended=row.get("reachable") is not False,
            facts=row.get("facts", {}),
            groups=tuple(row.get("groups", ())),
            memory_free_bytes=row.get("memory_free"),
            disk_free_bytes=row.get("disk_free"),
            memory_total_bytes=row.get("memory_total"),
        )


def _as_list(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


# ---------------------------------------------------------------- variations


def _changed(state: str, row: Mapping[str, Any]) -> Event:
    reason = _reason(row)
    return Event("state-changed", {"state": state, "reason": reason}, reason.hosts, (), 1, BEGAN_S + 300)


def _reason(row: Mapping[str, Any]) -> Reason:
    """{code, hosts, why, and its values}."""
    values = dict(row)
    return because(values.pop("code"), **values)
