"""Likely causes of a slow rank: metrics of its device and host, compared with the same metrics elsewhere."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from statistics import median
from typing import Any, NamedTuple

from ascendrun.core.dataclass import dataclass
from ascendrun.core.measurement import Sign, metrics_of
from ascendrun.core.samples import DeviceSample, HostSample, Newest, RankSample
from ascendrun.text import Text

BUSY = 30.0
"""Percent. An idle device lowers its clock, which is normal."""
DROPPED = 0.92
"""Fraction of its earlier clock: a lower value is not rounding."""
FULL_MEMORY = 0.97
ENOUGH = 3
"""Required samples of a device without other evidence."""


class StragglerCause(str, Enum):
    """Likely cause of a slow rank, the most likely first: a hot device with a low clock is slow because of its
    temperature. SHARED: another process uses its device. HEALTH: the device is unhealthy.

    CPU: the cores or the memory of the host are exhausted, or the rank gets a small fraction.
    WORK: its device is busier than the others, with more work or because it is slower.
    """

    TEMPERATURE = "temperature"
    FREQUENCY = "frequency"
    SHARED = "shared"
    CPU = "cpu"
    DATA = "data"
    LINK = "link"
    HEALTH = "health"
    WORK = "work"


COMPARED_AS_IS = {*StragglerCause} - {StragglerCause.TEMPERATURE, StragglerCause.FREQUENCY, StragglerCause.LINK}
"""Causes whose metrics are compared without the clock and the state of a link."""


class Mark(NamedTuple):
    """One metric that differs, with its value here and elsewhere."""

    cause: StragglerCause
    text: Text


@dataclass(frozen=True)
class Places:
    """The device of each rank, as far as known from samples or their number."""

    rank_of: Mapping[tuple[str, int], int]
    hosts: Collection[str]

    @classmethod
    def of(cls, samples: Newest, hosts_of_ranks: Mapping[int, str]) -> Places:
        """Create it. If no sample of a host names a device, its n-th rank has its n-th device (equal numbers)."""
        found = {
            (one.host, one.device): one.rank
            for one in samples.ranks
            if one.device is not None and hosts_of_ranks.get(one.rank) == one.host
        }
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, host in sorted(hosts_of_ranks.items()):
            ranks[host].append(rank)
        devices: dict[str, list[int]] = defaultdict(list)
        for host, device in sorted({(one.host, one.device) for one in samples.devices}):
            devices[host].append(device)
        named = {host for host, _ in found}
        for host, here in ranks.items():
            if host not in named and len(devices[host]) == len(here):
                found.update({(host, device): rank for device, rank in zip(devices[host], here)})
        return cls(found, frozenset(ranks))


def likely_cause(marks: Iterable[Mark]) -> StragglerCause | None:
    found = {mark.cause for mark in marks}
    if StragglerCause.DATA in found:  # devices do not delay data; a host without free cores does
        return StragglerCause.CPU if StragglerCause.CPU in found else StragglerCause.DATA
    if StragglerCause.TEMPERATURE in found and StragglerCause.FREQUENCY not in found and len(found) > 1:
        found.discard(StragglerCause.TEMPERATURE)  # hot, but at full clock: not slow for that reason
    return next((sign for sign in StragglerCause if sign in found), None)


def find_marks(
    host: str, ranks: Sequence[int], samples: Newest, places: Places, *, lame: Collection[int], since_s: float
) -> tuple[Mark, ...]:
    """Return every outlying metric of these ranks of one host, compared with ranks that are not `lame`."""
    devices = [one for one in samples.devices if one.at_s >= since_s]
    mine = [one for one in devices if one.host == host and places.rank_of.get((host, one.device)) in ranks]
    slow = {-1, *lame}
    fine = [one for one in devices if places.rank_of.get((one.host, one.device), -1) not in slow]
    of_ranks = [one for one in samples.ranks if one.at_s >= since_s]
    own = [one for one in of_ranks if one.rank in ranks]
    states = [one.state for one in own if one.state][-ENOUGH:]
    if states and all(state.upper().startswith("T") for state in states):
        of_processes = [Mark(StragglerCause.CPU, Text("straggler.stopped", "process stopped (state T)"))]
    else:
        of_processes = _compared(RankSample, own, Others([one for one in of_ranks if one.rank not in lame]))
    others = Others(fine)
    return (
        *_clock(mine, Others(list(filter(_has_clock, fine)))),
        *_compared(DeviceSample, mine, others, StragglerCause.TEMPERATURE),
        *_others_pids(mine, fine, samples.ranks),
        *(_link_down(mine, fine) or _link_flaps(mine) or _compared(DeviceSample, mine, others, StragglerCause.LINK)),
        *_complaints(mine),
        *host_marks(host, samples, places.hosts, since_s=since_s),
        *of_processes,
        *_compared(DeviceSample, mine, others, *COMPARED_AS_IS),
    )


def host_marks(host: str, samples: Newest, hosts: Collection[str], *, since_s: float) -> list[Mark]:
    """Return the outlying metrics of a host, compared with the others of `hosts`."""
    known = [one for one in samples.hosts if one.at_s >= since_s]
    here = [one for one in known if one.host == host]
    return [
        *_compared(HostSample, here, Others([one for one in known if one.host != host and one.host in hosts])),
        *_memory(here),
    ]


def slow_by_metrics(
    samples: Newest, places: Places, *, without: Collection[int], compared: Collection[int], since_s: float
) -> list[tuple[str, int, Mark]]:
    """Return devices that are slow by their metrics alone, unless step times contradict (`compared`).

    A link that is down while other hosts' links are up slows all ranks equally, so step times cannot show it.
    """
    by_rank: dict[tuple[str, int], list[DeviceSample]] = defaultdict(list)
    for one in samples.devices:
        rank = places.rank_of.get((one.host, one.device))
        if one.at_s >= since_s and rank is not None and rank not in without:
            by_rank[one.host, rank].append(one)
    found: list[tuple[str, int, Mark]] = []
    all_samples = [one for several in by_rank.values() for one in several]
    clocks = Others(list(filter(_has_clock, all_samples)))
    for (host, rank), mine in by_rank.items():
        others = (one for (_, other), several in by_rank.items() if other != rank for one in several)
        marks = _link_down(mine, others) if len(places.hosts) > 1 else []
        if rank not in compared and len(mine) >= ENOUGH:
            marks += _clock(mine, clocks.without(list(filter(_has_clock, mine))))
        found += [(host, rank, mark) for mark in marks[:1]]
    return found


class Others:
    """Samples to compare with. Their values are sorted once, however many ranks are compared with all but their own."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples, self._own = samples, list[Any]()
        self._sorted: dict[str, list[float]] = {}

    def without(self, own: list[Any]) -> Others:
        """Return the same samples without some of them."""
        found = Others(self._samples)
        found._own, found._sorted = own, self._sorted
        return found

    def middle(self, name: str) -> float | None:
        """Return the median of a metric; None: no sample has it."""
        if name not in self._sorted:
            self._sorted[name] = sorted(_known(self._samples, name))
        values, own = self._sorted[name], sorted(_known(self._own, name))
        count = len(values) - len(own)
        return (_remaining(values, own, (count - 1) // 2) + _remaining(values, own, count // 2)) / 2 if count else None


def _remaining(values: Sequence[float], own: Sequence[float], index: int) -> float:
    """Return the value at `index` of `values` without `own`, which are among them; both are sorted."""
    place = -1
    for value in own:
        place = max(place + 1, bisect_left(values, value))
        if place > index:
            break
        index += 1
    return values[index]


def _known(samples: Iterable[Any], name: str) -> list[float]:
    return [value for value in (getattr(one, name) for one in samples) if value is not None]


def _compared(kind: type[Any], mine: Sequence[Any], others: Others, *causes: StragglerCause) -> list[Mark]:
    """Return the marks of the metrics of a sample (with a sign of these `causes`, if any) by the table of metrics."""
    marks = []
    for name, row in metrics_of(kind).items():
        if row.sign is None or (causes and row.sign.cause not in causes):
            continue
        here, elsewhere = _middle(_known(mine, name)), others.middle(name)
        if here is not None and row.sign.is_odd(here, elsewhere):
            marks.append(_mark(StragglerCause(row.sign.cause), row.sign, here, elsewhere))
    return marks


def _mark(cause: StragglerCause, sign: Sign, here: float, others: float | None) -> Mark:
    if others is None and sign.alone is not None:
        return Mark(cause, Text(sign.alone.key, sign.alone.english, here=here / sign.size))
    return Mark(cause, Text(sign.text.key, sign.text.english, here=here / sign.size, others=(others or 0) / sign.size))


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _clock(mine: Sequence[DeviceSample], others: Others) -> list[Mark]:
    """Return a clock below that of the others while busy, else below its own earlier clock."""
    busy = list(filter(_has_clock, mine))
    marks = _compared(DeviceSample, busy, others, StragglerCause.FREQUENCY)
    third = len(busy) // 3
    if not marks and third >= ENOUGH:
        before, now = (_middle(one.frequency_mhz for one in part) for part in (busy[:third], busy[-third:]))
        if before is not None and now is not None and now < DROPPED * before:
            fell = Text("straggler.clock-drop", "fell from {others:.0f} to {here:.0f} MHz", here=now, others=before)
            marks.append(Mark(StragglerCause.FREQUENCY, fell))
    return marks


def _has_clock(sample: DeviceSample) -> bool:
    """Whether its clock counts: that of a busy device."""
    return bool(sample.frequency_mhz) and (sample.utilisation is None or sample.utilisation >= BUSY)


def _link_down(mine: Sequence[DeviceSample], fine: Iterable[DeviceSample]) -> list[Mark]:
    newest = [one.link_up for one in mine[-ENOUGH:] if one.link_up is not None]
    if not newest or any(newest):
        return []
    elsewhere = [one.link_up for one in fine if one.link_up is not None]
    if elsewhere and sum(elsewhere) > 0.9 * len(elsewhere):
        return [Mark(StragglerCause.LINK, Text("straggler.link-down", "link down, up on the other hosts"))]
    return []


def _link_flaps(mine: Sequence[DeviceSample]) -> list[Mark]:
    for device in sorted({one.device for one in mine}):
        downs = [one.link_downs for one in mine if one.device == device and one.link_downs is not None]
        if downs and downs[-1] > downs[0]:
            count = downs[-1] - downs[0]
            text = Text("straggler.link-flaps", "link down {count:.0f} times meanwhile", count=count)
            return [Mark(StragglerCause.LINK, text)]
    return []


_PIDS = Sign(
    "shared",
    lambda here, others: here > (others or 1.0),
    Text("straggler.processes", "{here:.0f} processes (others {others:.0f})", here=0, others=0),
    Text("straggler.processes-alone", "{here:.0f} processes", here=0),
)


def _others_pids(mine: Sequence[DeviceSample], fine: Sequence[DeviceSample], ranks: Sequence[RankSample]) -> list[Mark]:
    """Return a mark if the device has more processes than others, at least one from outside the job."""
    ours = {(one.host, one.pid) for one in ranks}
    usual = _middle(float(len(one.pids)) for one in fine if one.pids is not None)
    for one in [one for one in mine if one.pids is not None][-1:]:
        pids = one.pids or ()
        if any((one.host, pid) not in ours for pid in pids) and _PIDS.is_odd(len(pids), usual):
            return [_mark(StragglerCause.SHARED, _PIDS, len(pids), usual)]
    return []


def _complaints(mine: Sequence[DeviceSample]) -> list[Mark]:
    words = {one.device: one.health for one in mine if one.health is not None}
    sick = sum(word.upper() != "OK" for word in words.values())
    text = Text("straggler.devices", "{here:.0f} of its devices not OK", here=sick)
    return [Mark(StragglerCause.HEALTH, text)] if sick else []


def _memory(samples: Sequence[HostSample]) -> list[Mark]:
    full = _middle(
        one.memory_used_bytes / one.memory_total_bytes
        for one in samples
        if one.memory_used_bytes is not None and one.memory_total_bytes
    )
    text = Text("straggler.host-memory", "host memory {here:percent} full", here=full)
    return [Mark(StragglerCause.CPU, text)] if full is not None and full >= FULL_MEMORY else []
