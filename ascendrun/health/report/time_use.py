"""Time use of a job in milliseconds: every moment between its submission and its end has one of USES.

    running       an attempt that reported no steps and did not fail
    lost          to failures: steps that were repeated or never kept, the end of the failed attempt, the back-off, and
                  the time until the first step of the next attempt

A step is kept if a later attempt resumed after it; of a job that failed finally, if its last checkpoint has it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobs.job import TERMINAL, State
from ascendrun.text import Text


class Use(NamedTuple):
    """A use of time."""

    name: Text
    meaning: Text


USES: Mapping[str, Use] = {
    "queue": Use(Text("report.use-queue", "queue"), Text("report.meaning-queue", "waiting for nodes")),
    "checks": Use(Text("report.use-checks", "checks"), Text("report.meaning-checks", "preflight checks of the nodes")),
    "staging": Use(Text("report.use-staging", "staging"), Text("report.meaning-staging", "sending code to the nodes")),
    "start-up": Use(
        Text("report.use-start-up", "start-up"),
        Text("report.meaning-start-up", "processes, libraries and model, until the first step"),
    ),
    "training": Use(
        Text("report.use-training", "training"), Text("report.meaning-training", "steps whose results were kept")
    ),
    "running": Use(
        Text("report.use-running", "running, no steps known"),
        Text("report.meaning-running", "an attempt without steps, in metrics or in output"),
    ),
    "checkpoint": Use(
        Text("report.use-checkpoint", "checkpoint"),
        Text("report.meaning-checkpoint", "saving, as reported by the program"),
    ),
    "ending": Use(
        Text("report.use-ending", "ending"),
        Text("report.meaning-ending", "after the last step, until all processes exited"),
    ),
    "lost": Use(
        Text("report.use-lost", "lost to failures"),
        Text("report.meaning-lost", "steps that were repeated or never kept, and the time until training continued"),
    ),
}

_BEFORE_RUNNING = {
    State.QUEUED: "queue",
    State.CHECKING: "checks",
    State.STAGING: "staging",
    State.STARTING: "start-up",
}


@dataclass(frozen=True)
class AttemptSteps:
    """Reports of rank 0 in one attempt, with times of the head node. `steps`: (at_s or None, step) in order.

    `started_s`: start of its first step. `resumed`: the step that it resumed from. `saves`: (start, end, step or
    None) of its checkpoints.
    """

    steps: Sequence[tuple[float | None, int]] = ()
    started_s: float | None = None
    resumed: int | None = None
    saves: Sequence[tuple[float, float, int | None]] = ()

    @property
    def first_kept(self) -> int | None:
        """Return the last step of earlier attempts that this attempt continues, None: unknown."""
        if self.resumed is not None:
            return self.resumed
        return self.steps[0][1] - 1 if self.steps else None


@dataclass(frozen=True)
class Piece:
    """One span of time with one use; times are UTC milliseconds."""

    start_ms: int
    end_ms: int
    use: str
    attempt: int


@dataclass(frozen=True)
class Accounting:
    """Time by use. `spent_ms`: all of USES; they sum to `wall_ms`. `caveats`: codes of assumptions."""

    pieces: tuple[Piece, ...]
    spent_ms: Mapping[str, int]
    wall_ms: int
    caveats: tuple[str, ...]

    @property
    def effective(self) -> float | None:
        """Return the effective training time ratio, None: no time has passed, or an attempt reported no steps."""
        return self.spent_ms["training"] / self.wall_ms if self.wall_ms and "no-steps" not in self.caveats else None


@dataclass(frozen=True)
class Stay:
    """The time of an attempt in one state. `after`: the next state, None: it still is in this state."""

    start_ms: int
    end_ms: int
    state: State
    attempt: int
    after: State | None

    @property
    def seconds(self) -> float:
        return (self.end_ms - self.start_ms) / 1000


def account(stays: Sequence[Stay], attempts: Mapping[int, AttemptSteps]) -> Accounting:
    """Compute the time use. `stays`: of `find_stays`. `attempts`: without those that have no metrics."""
    pieces: list[Piece] = []
    caveats: list[str] = []
    failed = {stay.attempt for stay in stays if stay.after in (State.BACKOFF, State.FAILED)}
    for stay in stays:
        if stay.state is State.RUNNING:
            pieces += _running(stay, attempts, failed, caveats)
        else:
            pieces.append(Piece(stay.start_ms, stay.end_ms, _use_of(stay, failed), stay.attempt))
    saves = {
        number: _merged((_ms(start_s), _ms(end_s)) for start_s, end_s, _ in steps.saves)
        for number, steps in attempts.items()
    }
    pieces = _joined(part for piece in pieces for part in _with_saves(piece, saves.get(piece.attempt, ())))
    spent = dict.fromkeys(USES, 0)
    for piece in pieces:
        spent[piece.use] += piece.end_ms - piece.start_ms
    wall_ms = stays[-1].end_ms - stays[0].start_ms if stays else 0
    return Accounting(tuple(pieces), spent, wall_ms, tuple(dict.fromkeys(caveats)))


def find_stays(moves: Sequence[tuple[float, State]], *, created_s: float, until_s: float) -> tuple[Stay, ...]:
    """Return stays without gaps from the submission to `until_s` (the end, or now).

    `moves`: (time, new state) in order. If the clock of the head node was set back, time does not advance until it
    has caught up.
    """
    now_ms, last_ms = _ms(created_s), max(_ms(created_s), _ms(until_s))
    state, attempt = State.QUEUED, 1
    stays: list[Stay] = []
    for at_s, target in moves:
        at_ms = min(last_ms, max(now_ms, _ms(at_s)))
        stays.append(Stay(now_ms, at_ms, state, attempt, target))
        if target is State.QUEUED:
            attempt += 1
        now_ms, state = at_ms, target
    if state not in TERMINAL:
        stays.append(Stay(now_ms, last_ms, state, attempt, None))
    elif now_ms < last_ms and stays:
        stays[-1] = Stay(stays[-1].start_ms, last_ms, stays[-1].state, stays[-1].attempt, stays[-1].after)
    return tuple(stays)


def _use_of(stay: Stay, failed: set[int]) -> str:
    if stay.attempt > 1 and stay.state in _BEFORE_RUNNING or stay.state is State.BACKOFF:
        return "lost"
    if stay.state in _BEFORE_RUNNING:
        return _BEFORE_RUNNING[stay.state]
    return "lost" if stay.attempt in failed else "ending"


def _running(stay: Stay, attempts: Mapping[int, AttemptSteps], failed: set[int], caveats: list[str]) -> list[Piece]:
    """Split RUNNING by its use: until the first step, the kept steps, the rest."""
    reported = attempts.get(stay.attempt)
    has_failed = stay.attempt in failed
    before = "start-up" if stay.attempt == 1 else "lost"
    if reported is None or not reported.steps or reported.steps[-1][0] is None:
        has_steps = reported is not None and bool(reported.steps)
        caveats.append("no-times" if has_steps else "no-steps")
        use = "lost" if has_failed else "training" if has_steps else "running"
        return [Piece(stay.start_ms, stay.end_ms, use, stay.attempt)]
    first_s = next(at_s for at_s, _ in reported.steps if at_s is not None)
    started_ms = _within(stay, reported.started_s if reported.started_s is not None else first_s)
    last_ms = max(started_ms, _within(stay, reported.steps[-1][0]))
    if stay.after is None:
        last_ms = stay.end_ms
    kept_ms, after = last_ms, "ending"
    if has_failed:
        kept_ms, after = min(last_ms, max(started_ms, _kept_ms(stay, attempts, caveats))), "lost"
    bounds = ((stay.start_ms, started_ms, before), (started_ms, kept_ms, "training"), (kept_ms, stay.end_ms, after))
    return [Piece(start, end, use, stay.attempt) for start, end, use in bounds]


def _kept_ms(stay: Stay, attempts: Mapping[int, AttemptSteps], caveats: list[str]) -> int:
    """Return the time until which the steps of a failed attempt were kept."""
    reported = attempts[stay.attempt]
    later = [found.first_kept for number, found in attempts.items() if number > stay.attempt]
    known = [step for step in later if step is not None]
    if known:
        kept = min(known)
        times = [at_s for at_s, step in reported.steps if step <= kept and at_s is not None]
        times += [end_s for _, end_s, step in reported.saves if step is not None and step <= kept]
    else:
        times = [end_s for _, end_s, _ in reported.saves]
        if not times:
            caveats.append("no-checkpoint")
    return _within(stay, max(times)) if times else stay.start_ms


def _within(stay: Stay, at_s: float | None) -> int:
    assert at_s is not None
    return min(stay.end_ms, max(stay.start_ms, _ms(at_s)))


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping spans: saves may overlap when a program writes in the background."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _with_saves(piece: Piece, saves: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    """Split the saves off a piece of training or ending."""
    start_ms = piece.start_ms
    if piece.use in ("training", "running", "ending"):
        first = max(0, bisect_left(saves, (start_ms, 0)) - 1)
        for start, end in saves[first:]:
            if start >= piece.end_ms:
                break
            start, end = max(start, start_ms), min(end, piece.end_ms)
            if start < end:
                yield Piece(start_ms, start, piece.use, piece.attempt)
                yield Piece(start, end, "checkpoint", piece.attempt)
                start_ms = end
    yield Piece(start_ms, piece.end_ms, piece.use, piece.attempt)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        if piece.start_ms == piece.end_ms:
            continue
        last = joined[-1] if joined else None
        if last is not None and (last.use, last.attempt) == (piece.use, piece.attempt):
            joined[-1] = Piece(last.start_ms, piece.end_ms, piece.use, piece.attempt)
        else:
            joined.append(piece)
    return joined


def _ms(at_s: float) -> int:
    return round(at_s * 1000)
