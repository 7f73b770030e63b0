"""Hangs: a job whose processes live and that makes no progress, by independent signs, and the rank it waits for.

A job is suspected when no rank makes progress over a window. It is hung when a second sign holds over that window, and
the stacks of its ranks do not move wherever they can be read. Silence alone is no hang: ranks on a host that does not
respond, or whose samples are old, give no sign. Whatever moves at any time begins every window again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from statistics import median

from ascendrun.core.dataclass import dataclass
from ascendrun.health.stacks import Take, find_outliers, most_common_wait
from ascendrun.text import Text

QUIET_STEPS, ACT_STEPS = 10.0, 20.0
"""Windows in usual times between two reports of a rank: a slow step is no hang."""
PHASE_FACTOR = 4.0
"""A phase may last this many times hang_s after the last byte that was written."""
DEFAULT_HANG_S = 900.0
"""For windows of jobs with hang_s: null."""
IDLE_CPU, BUSY_CPU = 2.0, 50.0
"""Percent of a core."""
IDLE_DEVICE = 5.0
"""Percent of utilisation."""
NEAR_LOW_POWER = 1.1
WRITES_BYTES_S = float(64 << 10)
"""A rank that writes more may save a checkpoint, also over a slow link; logs and metrics are far below."""
USUAL_NETWORK_BYTES_S, IDLE_NETWORK = 1e6, 0.01
"""The network is judged only if the training uses this much; idle is this fraction of it."""
INTERVALS = 64

NO_STEP, NO_OUTPUT, DIFFERS = "no-step", "no-output", "rank-differs"
DEVICES, NETWORK, STACKS, UNREACHABLE = "devices-idle", "network-idle", "stacks", "host-unreachable"


@dataclass(frozen=True)
class Windows:
    """Seconds. `hang_s` None: a hang is only reported. `divisor`: for tests, of every window but the age of samples."""

    hang_s: float | None = DEFAULT_HANG_S
    first_step_s: float = 1800.0
    divisor: float = 1.0

    @property
    def look_s(self) -> float:
        return 15.0 / self.divisor

    @property
    def quiet_s(self) -> float:
        """Without progress until the job is suspected. With two looks more, a hang is known within 120 s."""
        return 90.0 / self.divisor

    @property
    def stacks_apart_s(self) -> float:
        return 45.0 / self.divisor

    @property
    def unreachable_s(self) -> float:
        """Without progress until a job with an unreachable host is stopped."""
        return 180.0 / self.divisor

    @property
    def act_s(self) -> float:
        return (DEFAULT_HANG_S if self.hang_s is None else self.hang_s) / self.divisor

    @property
    def start_s(self) -> float:
        return self.first_step_s / self.divisor


@dataclass(frozen=True)
class DeviceLook:
    utilisation: float | None = None
    memory_bytes: float | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class RankLook:
    """One rank. `reported`: grows with each line of its metrics; `output`: with each byte of its logs. `interval_s`:
    between two of its reports, None: unknown. `phases`: those that it has begun and not ended. `cpu` (percent of a
    core), `state` (a letter of /proc) and `writes_bytes_s`: of a recent sample, None: there is none."""

    host: str
    step: int | None = None
    reported: int = 0
    output: int = 0
    phases: frozenset[str] = frozenset()
    has_ended: bool = False
    cpu: float | None = None
    state: str | None = None
    writes_bytes_s: float | None = None


@dataclass(frozen=True)
class Look:
    """A job at one time. `at_s`: monotonic; `age_s`: since its start. `unreachable`: hosts. `interval_s`: the usual
    time between two reports of a rank, None: unknown. `tells_phases`: the program reports phases. `network_bytes_s`:
    of all hosts together. `is_blind`: data of the ranks does not arrive, whatever the ranks do. `may_restart`: the job
    can start again without the unreachable hosts."""

    at_s: float
    age_s: float
    ranks: Mapping[int, RankLook]
    device_type: str = "cpu"
    unreachable: frozenset[str] = frozenset()
    interval_s: float | None = None
    tells_phases: bool = False
    devices: Mapping[tuple[str, int], DeviceLook] = field(default_factory=dict)
    network_bytes_s: float | None = None
    is_blind: bool = False
    may_restart: bool = False


@dataclass(frozen=True)
class Verdict:
    """A job without progress. `is_hung`: reported as such; else suspected. `acts`: it is time to stop the job, if it
    may be restarted. `wants_stacks`: take the stacks of all ranks. `ranks`, `hosts`: those that the others wait for,
    (): unknown. `where`, `others`: functions, None: unknown."""

    quiet_s: float
    signs: tuple[str, ...]
    step: int | None = None
    is_hung: bool = False
    acts: bool = False
    wants_stacks: bool = False
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    where: str | None = None
    others: str | None = None
    what: str = ""

    @property
    def is_unreachable(self) -> bool:
        return UNREACHABLE in self.signs

    def finding(self) -> Text:
        """Return what was observed."""
        quiet_s = float(round(self.quiet_s)) if self.quiet_s >= 1 else round(self.quiet_s, 2)
        since = (
            Text("hang.no-step", "no step after step {step} for {quiet_s:duration}", step=self.step, quiet_s=quiet_s)
            if self.step is not None
            else Text("hang.no-output", "no output for {quiet_s:duration}", quiet_s=quiet_s)
        )
        if not self.ranks:
            waits = Text("hang.all-wait", "all ranks wait in {others}", others=self.others)
            return since if self.others is None else Text("hang.finding", "{since}; {what}", since=since, what=waits)
        who = {"ranks": list(self.ranks), "hosts": list(self.hosts)}
        row = _WHAT.get(self.what) or _WHAT["is-in" if self.where else "differs"]
        values = {"since": since, "what": Text(row.key, row.english, where=self.where, **who)}
        if self.others is None:
            return Text("hang.finding", "{since}; {what}", **values)
        english = "{since}; {what}; the others wait in {others}"
        return Text("hang.finding-others", english, **values, others=self.others)


_WHO = {"ranks": [0], "hosts": ["x"]}
_WHAT: Mapping[str, Text] = {
    "stopped": Text("hang.stopped", "ranks {ranks:ranks} on {hosts:hosts} are stopped (state T)", **_WHO),
    "blocked": Text("hang.blocked", "ranks {ranks:ranks} on {hosts:hosts} are blocked in the kernel", **_WHO),
    "unreachable": Text("hang.unreachable", "{hosts:hosts} with ranks {ranks:ranks} does not respond", **_WHO),
    "behind": Text("hang.behind", "ranks {ranks:ranks} on {hosts:hosts} are behind the others", **_WHO),
    "is-in": Text("hang.is-in", "ranks {ranks:ranks} on {hosts:hosts} are in {where}", where="x", **_WHO),
    "idle": Text("hang.idle", "ranks {ranks:ranks} on {hosts:hosts} use no CPU", **_WHO),
    "busy": Text("hang.busy", "ranks {ranks:ranks} on {hosts:hosts} compute", **_WHO),
    "differs": Text("hang.differs", "ranks {ranks:ranks} on {hosts:hosts} differ from the others", **_WHO),
}
"""By what an outlier does; the values are examples."""


class HangWatch:
    """The watch of one attempt. Reads no clock and no file."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._looked_s: float | None = None
        self._moved_s = 0.0
        self.silent_since_s = 0.0
        """Since when hosts do not respond and no rank on the others makes progress."""
        self._wrote_s = self._flushed_s = float("-inf")
        self._phase_s = float("-inf")
        self._steps: dict[int, int] = {}
        self._reported: dict[int, int] = {}
        self._output: dict[int, int] = {}
        self._phases: dict[int, frozenset[str]] = {}
        self._classes: dict[int, tuple[str, float]] = {}
        self._memory: dict[tuple[str, int], float | None] = {}
        self._low_power: dict[tuple[str, int], float] = {}
        self._network: deque[float] = deque(maxlen=INTERVALS)
        self._since: dict[str, float] = {}
        self._takes: list[Take] = []

    def observe(self, look: Look) -> Verdict | None:
        """Return what a look shows; None: the job makes progress, or nothing can be known."""
        windows = self._windows
        before, self._looked_s = self._looked_s, look.at_s
        seen = {rank: one for rank, one in look.ranks.items() if one.host not in look.unreachable}
        living = {rank: one for rank, one in seen.items() if not one.has_ended}
        was_away = before is None or look.at_s - before > 4 * windows.look_s + 5.0
        moves = self._moves(seen) or was_away or look.is_blind
        if moves or not look.unreachable:
            self.silent_since_s = look.at_s
        if moves or not living or len(living) < len(seen):
            self._begin(look.at_s)
        self._note_classes(living, look.at_s)
        self._note_signs(look, living)
        quiet_s = look.at_s - self._moved_s
        if quiet_s == 0.0 and look.network_bytes_s is not None:
            self._network.append(look.network_bytes_s)
        is_in_phase = any(one.phases for one in living.values())
        if is_in_phase:
            self._phase_s = look.at_s
        elif not self._steps and look.at_s - self._phase_s < windows.start_s:
            return None
        if not self._steps and look.age_s < windows.start_s:
            return None
        usual_s = look.interval_s or 0.0
        quiet_limit_s = max(windows.quiet_s, QUIET_STEPS * usual_s)
        act_limit_s = max(windows.act_s, ACT_STEPS * usual_s)
        if is_in_phase:
            quiet_limit_s = act_limit_s = PHASE_FACTOR * windows.act_s
            quiet_s = look.at_s - max(self._moved_s, self._wrote_s)
        else:
            saved_s = self._flushed_s if look.tells_phases else max(self._wrote_s, self._flushed_s)
            if saved_s > self._moved_s:  # perhaps a checkpoint
                act_limit_s = max(act_limit_s, PHASE_FACTOR * windows.act_s)
                quiet_s = look.at_s - saved_s
        if quiet_s < quiet_limit_s / 2:
            return None
        return self._judge(look, living, quiet_s, quiet_limit_s, act_limit_s)

    def take(self, take: Take) -> None:
        """Add the stacks of all ranks; the first since the last progress and the newest are kept. A rank that waits
        for its disk is writing, for as long as a phase may last."""
        if take.at_s < self._moved_s:
            return
        flushes = any(stack.flushes for stack in take.ranks.values())
        if flushes and take.at_s - self._moved_s < PHASE_FACTOR * self._windows.act_s:
            self._flushed_s = take.at_s
        if self._takes and not take.same_as(self._takes[0]):
            self._takes = []
        self._takes = [*self._takes[:1], take]

    @property
    def newest(self) -> Take | None:
        return self._takes[-1] if self._takes else None

    # --- progress

    def _begin(self, now_s: float) -> None:
        self._moved_s = now_s
        self._classes, self._since, self._takes = {}, {}, []

    def _moves(self, ranks: Mapping[int, RankLook]) -> bool:
        """Return whether a rank made progress since the last look: a report, or without any reports, output."""
        moves = False
        reports = any(one.reported for one in ranks.values()) or bool(self._reported)
        for rank, one in ranks.items():
            if one.step is not None and one.step > self._steps.get(rank, -1):
                self._steps[rank], moves = one.step, True
            if one.reported > self._reported.get(rank, 0):
                self._reported[rank], moves = one.reported, True
            if not reports and one.output > self._output.get(rank, 0):
                moves = True
            self._output[rank] = one.output
            if one.phases != self._phases.get(rank, frozenset()):
                self._phases[rank], moves = one.phases, True
        return moves

    def _note_classes(self, ranks: Mapping[int, RankLook], now_s: float) -> None:
        for rank, one in ranks.items():
            name = _class_of(one)
            if self._classes.get(rank, ("",))[0] != name:
                self._classes[rank] = name, now_s
        if any((one.writes_bytes_s or 0.0) > WRITES_BYTES_S for one in ranks.values()):
            self._wrote_s = now_s

    def _note_signs(self, look: Look, living: Mapping[int, RankLook]) -> None:
        holds = {
            DEVICES: self._devices_idle(look, living),
            NETWORK: self._network_idle(look),
            **{f"{UNREACHABLE}/{host}": True for host in look.unreachable},
        }
        self._since = {name: self._since.get(name, look.at_s) for name, is_so in holds.items() if is_so}

    def _devices_idle(self, look: Look, living: Mapping[int, RankLook]) -> bool:
        """Return whether no device computes; of a job on CPUs, whether no rank does."""
        if look.device_type == "cpu":
            return bool(living) and all(_class_of(one) == "idle" for one in living.values())
        idle = bool(look.devices)
        for key, device in look.devices.items():
            if look.device_type == "cuda":
                if device.power_w is None:
                    return False
                self._low_power[key] = min(device.power_w, self._low_power.get(key, device.power_w))
                idle = idle and device.power_w <= NEAR_LOW_POWER * self._low_power[key]
                continue
            is_same = self._memory.get(key) == device.memory_bytes
            self._memory[key] = device.memory_bytes
            idle = idle and is_same and device.utilisation is not None and device.utilisation <= IDLE_DEVICE
        return idle

    def _network_idle(self, look: Look) -> bool:
        usual = median(self._network) if self._network else 0.0
        now = look.network_bytes_s
        return now is not None and usual > USUAL_NETWORK_BYTES_S and now < IDLE_NETWORK * usual

    # --- judgement

    def _judge(
        self, look: Look, living: Mapping[int, RankLook], quiet_s: float, quiet_limit_s: float, act_limit_s: float
    ) -> Verdict:
        windows, has_steps = self._windows, bool(self._steps or self._reported)
        held_s = look.at_s - quiet_limit_s / 3
        odd, what = self._odd_ranks(living, held_s)
        signs = [NO_STEP if has_steps else NO_OUTPUT]
        signs += [DIFFERS] if odd is not None else []
        signs += [name for name in (DEVICES, NETWORK) if self._since.get(name, look.at_s) <= held_s]
        gone = [host for host in look.unreachable if self._since.get(f"{UNREACHABLE}/{host}", look.at_s) <= held_s]
        signs += [UNREACHABLE] if gone and (look.tells_phases or look.may_restart) else []
        stand, newest = self._stacks_stand(living), self.newest
        since_progress_s = look.at_s - self._moved_s
        verdict = Verdict(since_progress_s, tuple(signs), max(self._steps.values(), default=None))
        if len(signs) < 2:
            return verdict
        due_s = [quiet_limit_s / 2, quiet_limit_s / 2 + windows.stacks_apart_s, act_limit_s - windows.look_s]
        taken_s = newest.at_s - (look.at_s - quiet_s) if newest is not None else float("-inf")
        wants = any(taken_s < due <= quiet_s for due in due_s)
        is_unclear = newest is not None and (stand is False or newest.compiles)
        if is_unclear and newest is not None and look.at_s - newest.at_s >= windows.stacks_apart_s:
            wants = True
        if quiet_s < quiet_limit_s or newest is None or stand is False or newest.compiles:
            return replace(verdict, wants_stacks=wants)
        signs += [STACKS] if stand else []
        limit_s = windows.unreachable_s if UNREACHABLE in signs else act_limit_s
        limit_s = max(limit_s, ACT_STEPS * (look.interval_s or 0.0))
        all_busy = all(_class_of(one) == "busy" for one in living.values())
        may_act = not (stand is None and all_busy) and (has_steps or (DEVICES in signs and stand is True))
        outlier, kind = self._outlier(living, look, odd, what, gone if UNREACHABLE in signs else [])
        stack = newest.ranks.get(outlier[0]) if outlier else None
        return replace(
            verdict,
            signs=tuple(signs),
            is_hung=True,
            acts=may_act and quiet_s >= limit_s and windows.hang_s is not None,
            wants_stacks=wants,
            ranks=outlier,
            hosts=tuple(sorted({look.ranks[rank].host for rank in outlier})),
            where=stack.where if stack is not None else None,
            others=most_common_wait(newest, without=outlier),
            what=kind,
        )

    def _odd_ranks(self, living: Mapping[int, RankLook], held_s: float) -> tuple[tuple[int, ...] | None, str]:
        """Return the ranks that differ from the others for long enough, (): they cannot be told apart, None: none."""
        held = {rank: name for rank, (name, since_s) in self._classes.items() if rank in living and since_s <= held_s}
        for name in ("stopped", "blocked"):
            ranks = tuple(sorted(rank for rank, each in held.items() if each == name))
            if ranks and (len(ranks) < len(living) or len(living) == 1):
                return ranks, name
        if len(held) < len(living) or set(held.values()) != {"idle", "busy"}:
            return None, ""
        counts = {name: [rank for rank, each in held.items() if each == name] for name in ("idle", "busy")}
        fewer = min(counts, key=lambda name: len(counts[name]))
        if 2 * len(counts[fewer]) == len(held):
            return (), ""
        return tuple(sorted(counts[fewer])), fewer

    def _stacks_stand(self, living: Mapping[int, RankLook]) -> bool | None:
        """Return whether no stack moves and all but a minority wait; None: no stacks can be read."""
        if not self._takes:
            return None
        first, last = self._takes[0], self._takes[-1]
        if not last.has_frames:
            return None
        if last.at_s - first.at_s < self._windows.stacks_apart_s * 0.9:
            return False
        known = [stack for stack in last.ranks.values() if stack.frames or stack.is_stopped]
        idle = {rank for rank, one in living.items() if _class_of(one) == "idle"}
        sizes = Counter(stack.group for stack in known)
        moving = [
            stack
            for stack in known
            if not stack.waits_for_peers and not (stack.rank in idle and 2 * sizes[stack.group] > len(known))
        ]
        if len(known) == 1:
            return bool(idle) or known[0].is_stopped or known[0].waits_for_peers
        return 2 * len(moving) <= len(known)

    def _outlier(
        self, living: Mapping[int, RankLook], look: Look, odd: tuple[int, ...] | None, what: str, gone: Iterable[str]
    ) -> tuple[tuple[int, ...], str]:
        """Return the ranks that the others wait for, and what they do."""
        lost = tuple(sorted(rank for rank, one in look.ranks.items() if one.host in set(gone)))
        if lost:
            return lost, "unreachable"
        if odd and what in ("stopped", "blocked"):
            return odd, what
        by_stack = find_outliers(self.newest) if self.newest is not None else ()
        if by_stack:
            return by_stack, "is-in"
        steps = {rank: self._steps[rank] for rank in living if rank in self._steps}
        behind = tuple(sorted(rank for rank, step in steps.items() if step < max(steps.values())))
        if behind and 2 * len(behind) < len(steps):
            return behind, "behind"
        return (odd, what) if odd else ((), "")


def _class_of(rank: RankLook) -> str:
    """Return what a rank does by its newest sample: stopped, blocked, idle, busy, between, or unknown."""
    if rank.state in ("T", "t"):
        return "stopped"
    if rank.cpu is None:
        return "unknown"
    if rank.state == "D":
        return "blocked"
    return "idle" if rank.cpu < IDLE_CPU else "busy" if rank.cpu >= BUSY_CPU else "between"
