"""Slow ranks by the use of their devices, for programs that report no time of their collectives.

In synchronous training all ranks wait for the slowest one. The AI cores of an NPU are idle in that wait, and so is a
rank on CPUs: the slow rank is busy for the largest part of the time. GPUs count the wait as use, so nothing follows
there. A rank that waits for data or for its host cannot be told either: its device is not busier than the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import sqrt
from statistics import fmean, median, stdev
from typing import NamedTuple

from ascendrun.core.samples import Newest
from ascendrun.health.stragglers.causes import Mark, Places, StragglerCause
from ascendrun.text import Text

MEAN_S = 60.0
"""A tool reads the use of a moment: only means of many readings are comparable."""
MEANS, RECENT = 5, 3
"""Required number of them, and how many of the newest must agree."""
IDLE = 5.0
"""Percent. Minutes in which most ranks are idle belong to a pause: one rank saves, evaluates or compiles for all."""
BUSIER, STANDARD_ERRORS = 0.10, 4.0
"""Relative to the less busy ranks. Devices of one type differ by 2 to 3%."""


class Busy(NamedTuple):
    """A rank that is busier than the others. `slower_by`: above 1; `idle`: fraction of the time that others wait."""

    since_s: float
    slower_by: float
    idle: float
    mark: Mark


def busier_ranks(samples: Newest, places: Places, *, since_s: float) -> dict[int, Busy]:
    """Return the ranks that wait least; {}: none, or too few samples. Not more than half of the ranks."""
    uses = [
        (place, one.at_s, one.utilisation)
        for one in samples.devices
        if (place := places.rank_of.get((one.host, one.device))) is not None
    ]
    kind = "npu" if uses else "cpu"
    means = _means(uses or [(one.rank, one.at_s, one.cpu) for one in samples.ranks], since_s=since_s)
    middles = {at_s: median(minute.values()) for at_s, minute in means.items()}
    ranks = {rank for minute in means.values() for rank in minute}
    rows = {rank: {at_s: minute[rank] for at_s, minute in means.items() if rank in minute} for rank in ranks}
    known = {rank: row for rank, row in rows.items() if len(row) >= MEANS}
    whole = {rank: fmean(row.values()) for rank, row in known.items()}
    if len(whole) < 2:
        return {}
    usual = sorted(whole.values())[(len(whole) - 1) // 4]  # of two nodes, one may be slow
    found = {}
    for rank, row in known.items():
        beyond = {at_s: use - middles[at_s] for at_s, use in row.items()}
        more, error = whole[rank] - usual, stdev(beyond.values()) / sqrt(len(beyond))
        is_steady = min(list(beyond.values())[-RECENT:]) > 0
        if more >= BUSIER * usual and more > STANDARD_ERRORS * error and is_steady:
            begins = [at_s for at_s, above in beyond.items() if above <= 0]
            text = _TEXTS[kind]
            mark = Mark(StragglerCause.WORK, Text(text.key, text.english, here=whole[rank], others=usual))
            since = max(begins) + MEAN_S if begins else min(row)
            found[rank] = Busy(since, whole[rank] / usual, more / whole[rank], mark)
    return found if 2 * len(found) <= len(whole) else {}


_TEXTS: Mapping[str, Text] = {
    "npu": Text("straggler.busy-npu", "busy {here:.0f}% of the time (others {others:.0f}%)", here=0, others=0),
    "cpu": Text("straggler.busy-cpu", "CPU {here:.0f}% (others {others:.0f}%)", here=0, others=0),
}


def _means(uses: Iterable[tuple[int, float, float | None]], *, since_s: float) -> dict[float, dict[int, float]]:
    """Return the mean use of each rank by minute, oldest first, without pauses and minutes that were hardly seen."""
    minutes: dict[float, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rank, at_s, use in uses:
        if use is not None and at_s >= since_s:
            minutes[at_s // MEAN_S * MEAN_S][rank].append(use)
    counts = {at_s: sum(map(len, of_ranks.values())) for at_s, of_ranks in minutes.items()}
    seen = [at_s for at_s in sorted(counts) if 2 * counts[at_s] >= median(counts.values())]
    means = {at_s: {rank: fmean(some) for rank, some in minutes[at_s].items()} for at_s in seen}
    return {at_s: of_ranks for at_s, of_ranks in means.items() if median(of_ranks.values()) >= IDLE}
