"""Variations of a case: other names, more ranks and hosts, noise, and what misleads."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace

from corpus import Case

from ascendrun.health.diagnosis import FixedClock, Line, RankEvidence


def mutate(case: Case, seed: int) -> Case:
    """The same failure in another dress: hosts renamed, lines lost, tails cut, noise added."""
    chance = random.Random(f"{case.name}-{seed}")
    names = {
        host.host: f"{chance.choice(('gpu', 'node', 'ascend-', 'w'))}{number + 11}"
        for number, host in enumerate(case.evidence.hosts)
    }
    kinds = chance.sample((*KINDS, *DRESSES), 2)
    innocent = [rank.rank for rank in case.evidence.ranks if rank.rank not in (case.expected.first or ())]
    misled = chance.choice(innocent) if innocent and case.expected.first is not None else None
    began = [_began(rank, chance.choice(STARTS)) if "start" in kinds else rank for rank in case.evidence.ranks]
    began = [rank if rank.rank in innocent else _dressed(rank, kinds) for rank in began]
    ranks = tuple(
        _mutate_rank(_mislead(rank, kinds, chance) if rank.rank == misled else rank, names, kinds, chance)
        for rank in began
    )
    hosts = tuple(
        replace(
            host,
            host=names[host.host],
            clock=FixedClock(chance.uniform(-90, 90), None) if "blind" in kinds else host.clock,
        )
        for host in case.evidence.hosts
    )
    evidence = replace(case.evidence, ranks=ranks, hosts=hosts)
    codes = case.expected.codes
    expected = replace(
        case.expected,
        codes=(*codes, "exception") if {"wrapper", "message-on-next-line"} & {*kinds} else codes,
        hosts=tuple(names.get(host, host) for host in case.expected.hosts) if case.expected.hosts is not None else None,
    )
    return Case(f"{case.name}~{seed}-{'+'.join(kinds)}", evidence, expected)


def _mutate_rank(rank: RankEvidence, names: Mapping[str, str], kinds: list[str], chance: random.Random) -> RankEvidence:
    lines = [line._replace(text=_renamed(line.text, names)) for line in rank.lines]
    if "drop" in kinds:
        lines = [line for line in lines if chance.random() > 0.15]
    if "cut" in kinds and lines and chance.random() < 0.3:
        lines = lines[: max(0, len(lines) - chance.randint(1, 8))]
    if "noise" in kinds:
        lines = [one for line in lines for one in ((line, _noise(line, chance)) if chance.random() < 0.1 else (line,))]
    if "untimed" in kinds:
        lines = [line._replace(at_s=None) for line in lines]
    if "logless" in kinds and chance.random() < 0.15:
        lines = []
    return replace(rank, host=names[rank.host], lines=tuple(lines), last_output_s=None)


KINDS = ("drop", "cut", "noise", "untimed", "blind", "logless", "decoy", "warned", "start")
_ENDS = r"^((?:\w+\.)*\w+(?:Error|Exception)): (.+)$"
_WRAPPER = (
    r"\g<0>\n\nThe above exception was the direct cause of the following exception:\n\n"
    'Traceback (most recent call last):\n  File "/opt/run.py", line 9, in <module>\nRuntimeError: failed'
)
DRESSES = {
    "torn-head": (r"^Traceback \(most recent call last\):$", ""),
    "second-code": (r"^.*\b50701\d\b.*$", r"\g<0>\nEL0004: [PID: 7] Failed to allocate memory"),
    "message-on-next-line": (_ENDS, r"\1:\n\2"),
    "wrapper": (_ENDS, _WRAPPER),
}
"""What the last line of a pattern becomes in the ranks that failed first."""


def _dressed(rank: RankEvidence, kinds: list[str]) -> RankEvidence:
    lines = list(rank.lines)
    for pattern, instead in (DRESSES[kind] for kind in kinds if kind in DRESSES):
        for place in [place for place, line in enumerate(lines) if re.match(pattern, line.text)][-1:]:
            texts = re.sub(pattern, instead, lines[place].text).split("\n")
            lines[place : place + 1] = [lines[place]._replace(text=text) for text in texts]
    return replace(rank, lines=tuple(lines))


DECOY = (
    "Traceback (most recent call last):",
    '  File "/job/metrics.py", line 5, in push',
    '    raise ValueError("dashboard says no")',
    "ValueError: dashboard says no",
)


WARNINGS = (
    "WARNING: [Errno 28] No space left on device while writing events",
    "CUDA error: out of memory (retrying)",
    "Warning: [Errno 98] Address already in use, trying the next port",
    "loss: nan",
)


STARTS = (
    "Warning : ASCEND_HOME_PATH environment variable is not set.",
    "[W1120 18:20:01.402 socket.cpp:697] [c10d] The client socket has failed to connect to [train-head]:29500 "
    "(errno: 111 - Connection refused).",
    "/opt/env/lib/python3.10/site-packages/lib/io.py:15: UserWarning: CUDA error: out of memory is likely",
    "2026-11-20 18:00:02,114 | WARNING | checkpoint: No space left on device soon: 3 GiB free",
)


def _began(rank: RankEvidence, text: str) -> RankEvidence:
    """A warning of the start, as its first line."""
    if not rank.lines:
        return rank
    times = [line.at_s for line in rank.lines if line.at_s is not None]
    return replace(
        rank, lines=(Line(text, rank.lines[0].file, 0, min(times) - 1.0 if times else None, "err"), *rank.lines)
    )


def _mislead(rank: RankEvidence, kinds: list[str], chance: random.Random) -> RankEvidence:
    """Something that was caught, or only warned of, in a rank that did not fail first."""
    texts = DECOY if "decoy" in kinds else (chance.choice(WARNINGS),) if "warned" in kinds else ()
    lines = list(rank.lines)
    if not texts or not lines:
        return rank
    at_s = lines[chance.randrange(len(lines))].at_s
    place = next((index for index, line in enumerate(lines) if line.stream == "err"), len(lines))
    new = [Line(text, lines[0].file, 0, at_s, "err") for text in texts]
    return replace(rank, lines=(*lines[:place], *new, *lines[place:]))


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        text = text.replace(old, new)
    return text


def _noise(line: Line, chance: random.Random) -> Line:
    return line._replace(
        text=chance.choice(
            (
                "WARNING: tokenizers parallelism was disabled",
                "Saving is slow today, 12.1 s",
                "",
                "数据加载完成,共 1024 条",
                "[W1120 10:00:00.1 init.cpp:90] Warning: no error here",
                "retrying download after ConnectionError (1/5)",
                "0 errors, 3 warnings",
                "loss scale 65536 -> 32768",
                "checkpoint written: step_1200.pt",
            )
        )
    )
