"""Likely causes of a slow rank: metrics of its device and host, compared with the same metrics elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from statistics import median

from ascendrun.core.dataclass import dataclass
from ascendrun.core.samples import DeviceSample, HostSample, Newest, RankSample

FREQUENCY = 0.92
"""Fraction of the others' clock, or of its earlier clock: a lower value is not rounding."""
HOTTER_C = 10.0
HOT_C = 75.0
TOO_HOT_C = 95.0
BUSY = 30.0
"""Percent. An idle device lowers its clock, which is normal."""
LINK = 0.5
STARVED_CPU = 92.0
APART = 20.0
FULL_MEMORY = 0.97
ENOUGH = 3
"""Required samples of a device without other evidence."""


class StragglerCause(str, Enum):
    """Likely cause of a slow rank. SHARED: another process uses its device. HEALTH: the device is unhealthy.

    CPU: the cores or the memory of the host are exhausted, or the rank gets a small fraction.
    """

    FREQUENCY = "frequency"
    TEMPERATURE = "temperature"
    LINK = "link"
    DATA = "data"
    CPU = "cpu"
    SHARED = "shared"
    HEALTH = "health"


ORDER = (
    StragglerCause.TEMPERATURE,
    StragglerCause.FREQUENCY,
    StragglerCause.SHARED,
    StragglerCause.CPU,
    StragglerCause.DATA,
    StragglerCause.LINK,
    StragglerCause.HEALTH,
)
"""The most likely first: a hot device with a low clock is slow because of its temperature."""


@dataclass(frozen=True)
class Mark:
    """One metric that differs. `metric`: the name of a field of a sample or of StepTimes; `here` and `others`: its
    value here and its usual value elsewhere (None: not compared; for "frequency_drop" and "link_downs" the earlier
    value)."""

    cause: StragglerCause
    metric: str
    here: float
    others: float | None


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
    return next((sign for sign in ORDER if sign in found), None)


def find_marks(
    host: str, ranks: Sequence[int], samples: Newest, places: Places, *, lame: Collection[int], since_s: float
) -> tuple[Mark, ...]:
    """Return every outlying metric of these ranks of one host, compared with ranks that are not `lame`."""
    recent = [one for one in samples.devices if one.at_s >= since_s]
    mine = [one for one in recent if one.host == host and places.rank_of.get((host, one.device)) in ranks]
    slow = {-1, *lame}
    fine = [one for one in recent if places.rank_of.get((one.host, one.device), -1) not in slow]
    hosts = [one for one in samples.hosts if one.at_s >= since_s]
    marks = [
        *_clock(mine, fine),
        *_heat(mine, fine),
        *_others_pids(mine, fine, samples.ranks),
        *_link(mine, fine),
        *_complaints(mine),
        *_host(
            [one for one in hosts if one.host == host],
            [one for one in hosts if one.host != host and one.host in places.hosts],
        ),
        *_share(ranks, [one for one in samples.ranks if one.at_s >= since_s], lame),
    ]
    return tuple(marks)


def slow_by_metrics(
    samples: Newest, places: Places, *, without: Collection[int], compared: Collection[int], since_s: float
) -> list[tuple[str, int, Mark]]:
    """Return devices that are slow by their metrics alone, unless step times contradict (`compared`).

    A link that is down while other hosts' links are up slows all ranks equally, so step times cannot show it.
    """
    recent = [one for one in samples.devices if one.at_s >= since_s]
    by_rank: dict[tuple[str, int], list[DeviceSample]] = defaultdict(list)
    for one in recent:
        rank = places.rank_of.get((one.host, one.device))
        if rank is not None and rank not in without:
            by_rank[one.host, rank].append(one)
    found: list[tuple[str, int, Mark]] = []
    for (host, rank), mine in by_rank.items():
        others = [one for (_, other), several in by_rank.items() if other != rank for one in several]
        marks = [mark for mark in _link(mine, others) if mark.metric == "link_up"] if len(places.hosts) > 1 else []
        if rank not in compared and len(mine) >= ENOUGH:
            marks += [mark for mark in _clock(mine, others) if mark.others is not None]
        found += [(host, rank, mark) for mark in marks[:1]]
    return found


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _clock(mine: Sequence[DeviceSample], fine: Sequence[DeviceSample]) -> list[Mark]:
    busy = [one for one in mine if one.frequency_mhz and (one.utilisation is None or one.utilisation >= BUSY)]
    here = _middle(one.frequency_mhz for one in busy)
    others = _middle(one.frequency_mhz for one in fine if one.utilisation is None or one.utilisation >= BUSY)
    if here is None:
        return []
    if others is not None and here < FREQUENCY * others:
        return [Mark(StragglerCause.FREQUENCY, "frequency_mhz", here, others)]
    third = len(busy) // 3
    if third >= ENOUGH:
        before, now = (_middle(one.frequency_mhz for one in part) for part in (busy[:third], busy[-third:]))
        if before is not None and now is not None and now < FREQUENCY * before:
            return [Mark(StragglerCause.FREQUENCY, "frequency_drop", now, before)]
    return []


def _heat(mine: Sequence[DeviceSample], fine: Sequence[DeviceSample]) -> list[Mark]:
    here, others = _middle(one.temperature_c for one in mine), _middle(one.temperature_c for one in fine)
    if here is None:
        return []
    is_hotter = others is not None and here >= others + HOTTER_C and here >= HOT_C
    return [Mark(StragglerCause.TEMPERATURE, "temperature_c", here, others)] if is_hotter or here >= TOO_HOT_C else []


def _link(mine: Sequence[DeviceSample], fine: Sequence[DeviceSample]) -> list[Mark]:
    newest = [one.link_up for one in mine[-ENOUGH:] if one.link_up is not None]
    elsewhere = [one.link_up for one in fine if one.link_up is not None]
    if newest and not any(newest) and elsewhere and sum(elsewhere) > 0.9 * len(elsewhere):
        return [Mark(StragglerCause.LINK, "link_up", 0.0, 1.0)]
    marks: list[Mark] = []
    for device in sorted({one.device for one in mine}):
        downs = [one.link_downs for one in mine if one.device == device and one.link_downs is not None]
        if downs and downs[-1] > downs[0]:
            marks.append(Mark(StragglerCause.LINK, "link_downs", downs[-1], downs[0]))
    here = _middle(one.link_tx_bytes_s for one in mine)
    others = _middle(one.link_tx_bytes_s for one in fine)
    if here is not None and others is not None and others > 1e6 and here < LINK * others:
        marks.append(Mark(StragglerCause.LINK, "link_tx_bytes_s", here, others))
    return marks[:1]


def _others_pids(mine: Sequence[DeviceSample], fine: Sequence[DeviceSample], ranks: Sequence[RankSample]) -> list[Mark]:
    """Return a mark if the device has more processes than others, at least one from outside the job."""
    ours = {(one.host, one.pid) for one in ranks}
    newest = [one for one in mine if one.pids is not None][-1:]
    usual = _middle(float(len(one.pids)) for one in fine if one.pids is not None)
    for one in newest:
        strangers = [pid for pid in one.pids or () if (one.host, pid) not in ours]
        if strangers and len(one.pids or ()) > (usual or 1.0):
            return [Mark(StragglerCause.SHARED, "pids", float(len(one.pids or ())), usual)]
    return []


def _complaints(mine: Sequence[DeviceSample]) -> list[Mark]:
    words = {one.device: one.health for one in mine if one.health is not None}
    sick = [word for word in words.values() if word.upper() != "OK"]
    return [Mark(StragglerCause.HEALTH, "health", float(len(sick)), 0.0)] if sick else []


def _host(mine: Sequence[HostSample], others: Sequence[HostSample]) -> list[Mark]:
    marks: list[Mark] = []
    here, elsewhere = _middle(one.cpu for one in mine), _middle(one.cpu for one in others)
    if here is not None and here >= STARVED_CPU and (elsewhere is None or here >= elsewhere + APART):
        marks.append(Mark(StragglerCause.CPU, "cpu", here, elsewhere))
    full = _middle(_fullness(one) for one in mine)
    if full is not None and full >= FULL_MEMORY:
        marks.append(Mark(StragglerCause.CPU, "memory", full, _middle(_fullness(one) for one in others)))
    return marks


def _fullness(sample: HostSample) -> float | None:
    if sample.memory_used_bytes is None or not sample.memory_total_bytes:
        return None
    return sample.memory_used_bytes / sample.memory_total_bytes


def _share(ranks: Sequence[int], samples: Sequence[RankSample], lame: Collection[int]) -> list[Mark]:
    """Return marks of ranks with less than half of the others' CPU time, or stopped (state T)."""
    here = _middle(one.cpu for one in samples if one.rank in ranks)
    others = _middle(one.cpu for one in samples if one.rank not in lame)
    states = [one.state for one in samples if one.rank in ranks and one.state][-ENOUGH:]
    if states and all(state.upper().startswith("T") for state in states):
        return [Mark(StragglerCause.CPU, "stopped", 1.0, 0.0)]
    if here is not None and others is not None and others >= 50.0 and here < others / 2:
        return [Mark(StragglerCause.CPU, "rank_cpu", here, others)]
    return []
