"""Tracks: cut at gaps and jumps, summarized by a fixed set of numbers, and compared with the distances travelled.

The numbers are the same for the model and the baselines. Distances show units, exchanged coordinates, and two ships
under one name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Callable

import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.trajectory.points.tables import KNOTS
from ascendrun.text import Text

Floats = NDArray[np.float64]

FASTEST_KNOTS = 102.2
"""AIS sends 102.3 for "no speed"; a value above 102.2 is not a measurement."""
GPS_SLACK_M = 200.0
"""Metres by which two positions may exceed the distance at the maximum speed without a jump."""
METRES_PER_DEGREE = 111_320.0
METRES_PER_KNOT_SECOND = 0.514444
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Track:
    """Consecutive points of one ship, oldest first. `time`: UTC seconds; `sog`: knots; `cog`, `heading`: degrees; NaN:
    unknown. `label` None: unknown class; `split` None: not given in the data. `length`, `width`: metres."""

    id: str
    ship: str
    time: NDArray[np.int64]
    lat: Floats
    lon: Floats
    sog: Floats
    cog: Floats
    label: str | None
    split: str | None
    heading: Floats = field(default_factory=lambda: np.empty(0))
    """Empty becomes NaN for every point."""
    length: float = float("nan")
    width: float = float("nan")

    def __post_init__(self) -> None:
        if len(self.heading) != len(self.time):
            object.__setattr__(self, "heading", np.full(len(self.time), np.nan))

    def __len__(self) -> int:
        return len(self.time)

    def of_points(self, points: Any) -> Track:
        """Return the track of some of its points: a slice, numbers or a mask."""
        return replace(self, **{name: getattr(self, name)[points] for name in PER_POINT})

    def part(self, start: int, stop: int) -> Track:
        return replace(self.of_points(slice(start, stop)), id=f"{self.id}/{start}")


PER_POINT = ("time", "lat", "lon", "sog", "cog", "heading")


@dataclass(frozen=True)
class Limits:
    """Tracks are cut at gaps over `gap_s`, where the path between two points requires more than `max_knots`
    (0: no such limit), into pieces of `segment_points`; under `min_points`: dropped."""

    gap_s: int = 3600
    segment_points: int = 30
    min_points: int = 10
    max_knots: float = 100.0


@dataclass(frozen=True)
class Cleaning:
    """Counts of points read and removed: `bad_points` have no time or position, `repeated_points` repeat a time,
    `outliers` have an unreachable position between two normal points. `jumps`: cuts at an unreachable position
    without a return. `why_bad`: the reasons for bad points, with an example of each. `notes`: columns that were derived
    or not used."""

    points: int
    bad_points: int
    repeated_points: int
    outliers: int
    jumps: int
    short_pieces: int
    tracks: int
    why_bad: tuple[Text, ...] = ()
    dropped: Mapping[str, Text] = field(default_factory=dict)
    """Ships without any track, and the reason."""
    notes: tuple[Text, ...] = ()


def cut_tracks(raw: Sequence[Track], limits: Limits) -> tuple[list[Track], dict[str, int]]:
    """Clean and cut tracks. Return the pieces, and the counts for Cleaning."""
    counts = {"repeated_points": 0, "outliers": 0, "jumps": 0, "short_pieces": 0}
    tracks: list[Track] = []
    for track in raw:
        ordered, again = in_order(track)
        steady, out = without_outliers(ordered, limits.max_knots)
        cuts = jumps(steady, limits.max_knots)
        counts["repeated_points"] += again
        counts["outliers"] += out
        counts["jumps"] += len(cuts)
        for piece in pieces(steady, limits, cuts):
            if len(piece) < limits.min_points:
                counts["short_pieces"] += 1
            else:
                tracks.append(piece)
    return tracks, counts


def in_order(track: Track) -> tuple[Track, int]:
    """Return the track by time, each time once; and the number of removed points."""
    _, first = np.unique(track.time, return_index=True)
    return track.of_points(first), len(track) - len(first)


def metres_between(lat: Floats, lon: Floats, to_lat: Floats, to_lon: Floats) -> Floats:
    """Return distances over a flat earth: accurate enough within a track."""
    north = (to_lat - lat) * METRES_PER_DEGREE
    east = ((to_lon - lon + 180) % 360 - 180) * METRES_PER_DEGREE * np.cos(np.radians(lat))
    return np.hypot(north, east)


def is_too_far(track: Track, one: NDArray[np.int64], other: NDArray[np.int64], max_knots: float) -> NDArray[np.bool_]:
    """Return whether the speed from each point of `one` to that of `other` would exceed `max_knots`."""
    metres = metres_between(track.lat[one], track.lon[one], track.lat[other], track.lon[other])
    reach = (track.time[other] - track.time[one]) * max_knots * METRES_PER_KNOT_SECOND + GPS_SLACK_M
    return np.asarray(metres > reach)


def without_outliers(track: Track, max_knots: float) -> tuple[Track, int]:
    """Remove points that are too far from both neighbours, which are near each other. Return also their number."""
    if not max_knots or len(track) < 3:
        return track, 0
    middle = np.arange(1, len(track) - 1)
    lonely = is_too_far(track, middle - 1, middle, max_knots) & is_too_far(track, middle, middle + 1, max_knots)
    lonely &= ~is_too_far(track, middle - 1, middle + 1, max_knots)
    keep = np.ones(len(track), dtype=bool)
    keep[middle[lonely]] = False
    return (track.of_points(keep) if lonely.any() else track), int(lonely.sum())


def jumps(track: Track, max_knots: float) -> list[int]:
    """Return the indices of the points that are unreachable from their predecessor."""
    if not max_knots or len(track) < 2:
        return []
    later = np.arange(1, len(track))
    return [int(i) for i in later[is_too_far(track, later - 1, later, max_knots)]]


def pieces(track: Track, limits: Limits, cuts: Sequence[int] = ()) -> Iterator[Track]:
    silences = np.flatnonzero(np.diff(track.time) > limits.gap_s) + 1
    bounds = sorted({0, *silences.tolist(), *cuts, len(track)})
    for start, stop in zip(bounds, bounds[1:]):
        for cut in range(start, stop, limits.segment_points):
            yield track.part(cut, min(cut + limits.segment_points, stop))


STILL_KNOTS = 0.5
MOTION = (
    "speed_mean", "speed_max", "speed_min", "speed_median", "speed_spread", "way_speed_mean", "way_speed_max",
    "way_speed_spread", "acceleration_mean", "acceleration_max", "net_m", "path_m", "straightness", "spread_m",
    "interval_median", "interval_max", "interval_min", "interval_spread", "duration_s", "turn_mean", "turn_max",
    "turn_median", "no_course", "still", "longest_still_s", "no_heading", "swing_mean", "swing_max", "drift_median",
    "drift_max",
)  # fmt: skip
SIZE = ("length", "width", "slimness")
PLACE = ("lat", "lon")
FEATURES = (*MOTION, *SIZE, *PLACE)
"""Names in the order of `summary`. Speeds are in knots; `way_speed` is that between positions. Turns and swings
(changes of course and heading) are in degrees a minute, accelerations in knots a minute; drift is the angle between
course and heading."""


def summary(track: Track) -> dict[str, float]:
    """Return a number for each name of FEATURES; NaN: unknown. It is computed once: bins and tokens need it."""
    kept = vars(track)
    if "summary" not in kept:
        kept["summary"] = computed(track)
    found: dict[str, float] = kept["summary"]
    return found


def computed(track: Track) -> dict[str, float]:
    seconds = (track.time[1:] - track.time[:-1]).astype(np.float64)
    minutes = seconds / 60
    metres = steps_m(track)
    path = float(metres.sum())
    net = float(metres_between(track.lat[:1], track.lon[:1], track.lat[-1:], track.lon[-1:])[0])
    still = np.nan_to_num(track.sog, nan=0.0) < STILL_KNOTS
    turn, swing = (np.abs(between(each[:-1], each[1:])) / minutes for each in (track.cog, track.heading))
    values = (
        *rules(track.sog, mean, np.maximum.reduce, np.minimum.reduce, median, spread),
        *rules(metres / seconds / METRES_PER_KNOT_SECOND, mean, np.maximum.reduce, spread),
        *rules(np.abs(track.sog[1:] - track.sog[:-1]) / minutes, mean, np.maximum.reduce),
        net, path, net / (path + 1), spread_m(track),
        *rules(seconds, median, np.maximum.reduce, np.minimum.reduce, spread), float(seconds.sum()),
        *rules(turn, mean, np.maximum.reduce, median), float(np.isnan(track.cog).mean()),
        float(still.mean()), longest_stay_s(track, still), float(np.isnan(track.heading).mean()),
        *rules(swing, mean, np.maximum.reduce),
        *rules(np.abs(between(track.cog, track.heading)), median, np.maximum.reduce),
        track.length or math.nan, track.width or math.nan, track.length / track.width if track.width else math.nan,
        float(median(track.lat)), (float(track.lon[0] + median(from_first(track))) + 180) % 360 - 180,
    )  # fmt: skip
    return dict(zip(FEATURES, values))


def rules(values: Floats, *each: Callable[[Floats], np.float64]) -> list[float]:
    """Return what each rule gives for the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return [float(rule(known)) if len(known) else math.nan for rule in each]


def mean(values: Floats) -> np.float64:
    """As np.mean, which takes five times as long for a few values; `median` and `spread` likewise."""
    return np.add.reduce(values) / len(values)  # type: ignore[no-any-return]


def median(values: Floats) -> np.float64:
    ordered, middle = np.sort(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2  # type: ignore[no-any-return]


def spread(values: Floats) -> np.float64:
    away = values - mean(values)
    return np.sqrt(mean(away * away))  # type: ignore[no-any-return]


def between(degrees: Floats, others: Floats) -> Floats:
    """Return the angle from each direction to the other, -180 to 180, starboard positive; NaN if either is unknown."""
    difference: Floats = (others - degrees + 180) % 360 - 180
    return difference


def steps_m(track: Track) -> Floats:
    """Return the metres from each point to the next."""
    return metres_between(track.lat[:-1], track.lon[:-1], track.lat[1:], track.lon[1:])


def spread_m(track: Track) -> float:
    """Return the standard deviation of the position."""
    east = METRES_PER_DEGREE * math.cos(math.radians(float(track.lat[0])))
    return math.hypot(float(track.lat.std()) * METRES_PER_DEGREE, float(from_first(track).std()) * east)


def from_first(track: Track) -> Floats:
    """Return the longitudes relative to the first, also across 180 degrees."""
    return between(np.full(len(track), track.lon[0]), track.lon)


def longest_stay_s(track: Track, still: NDArray[np.bool_]) -> float:
    longest, since = 0, None
    for i, is_still in enumerate(still):
        since = (since if since is not None else int(track.time[i])) if is_still else None
        if since is not None:
            longest = max(longest, int(track.time[i]) - since)
    return float(longest)


LONGEST_STEP_S = 300.0
"""Over a longer time a ship changes its speed too much for the comparison."""
LONGEST_AT_ALL_S = 6 * 3600.0
"""Over so long a time, a speed that is wrong by a factor of GROSSLY still shows."""
GROSSLY = 4.0
LEAST_STEP_S = 60
"""Closer points are compared over about this time: in 10 s a ship travels little more than a position is off."""
LEAST_KNOTS, LEAST_METRES = 2.0, 100.0
LEAST_STEPS = 30
USUAL_KNOTS = 100.0
SHARED_NAME = 0.2
"""Share of unreachable steps from which a name belongs to two ships or more."""


@dataclass(frozen=True)
class Agreement:
    """`factor`: knots travelled for each unit of the speed column, median. `spread`: its interquartile range, as a
    difference of logarithms. `turned`, `mirrored`: median degrees between course and path, as read and with latitude
    and longitude exchanged; NaN: no course. None of them: fewer than LEAST_STEPS steps of moving ships."""

    factor: float
    spread: float
    turned: float
    mirrored: float

    @property
    def is_exchanged(self) -> bool:
        """Whether the courses fit the path only with latitude and longitude exchanged."""
        return self.mirrored < 20 and self.turned > 2 * self.mirrored + 15

    def unit(self, read_as: float = 1.0) -> str | None:
        """Return the unit of the speed column, None: none that is known. `read_as`: the knots that one unit of it was
        taken for."""
        distance = {name: abs(np.log(self.factor * read_as / knots)) for name, knots in KNOTS.items()}
        nearest = min(distance, key=lambda name: distance[name])
        return nearest if distance[nearest] < 0.3 else None


def agreement(tracks: Sequence[Track], longest_s: float = LONGEST_STEP_S) -> Agreement | None:
    """Compare speed and course of all tracks (by time) with their paths; None: too few steps of moving ships."""
    ratios, turned, mirrored = [], [], []
    for track in map(spaced, tracks):
        seconds, metres, north, east = steps(track)
        knots = metres / np.maximum(seconds, 1) / METRES_PER_KNOT_SECOND
        told = (track.sog[1:] + track.sog[:-1]) / 2
        with np.errstate(invalid="ignore"):
            moving = (seconds > 0) & (seconds <= longest_s) & (metres > LEAST_METRES) & (knots > LEAST_KNOTS)
            moving &= (knots < USUAL_KNOTS) & (told > 0)
        ratios.append(knots[moving] / told[moving])
        course = track.cog[1:][moving]
        turned.append(apart(np.degrees(np.arctan2(east, north))[moving], course))
        _, _, north, east = steps(replace(track, lat=track.lon, lon=track.lat))
        mirrored.append(apart(np.degrees(np.arctan2(east, north))[moving], course))
    found = np.concatenate(ratios) if ratios else np.empty(0)
    if len(found) < LEAST_STEPS:
        return None
    low, middle, high = np.percentile(np.log(found), [25, 50, 75])
    return Agreement(float(np.exp(middle)), float(high - low), _median(turned), _median(mirrored))


def spaced(track: Track) -> Track:
    """Return a track of dense points with one, the first, of each LEAST_STEP_S."""
    if len(track) < 2 or np.median(np.diff(track.time)) >= LEAST_STEP_S / 2:
        return track
    _, first = np.unique(track.time // LEAST_STEP_S, return_index=True)
    return track.of_points(first)


def steps(track: Track) -> tuple[Floats, Floats, Floats, Floats]:
    """Return seconds and metres from each point to the next, and metres to the north and to the east."""
    seconds = np.diff(track.time).astype(np.float64)
    lat, lon, to_lat, to_lon = track.lat[:-1], track.lon[:-1], track.lat[1:], track.lon[1:]
    north = metres_between(lat, lon, to_lat, lon) * np.sign(to_lat - lat)
    east = metres_between(lat, lon, lat, to_lon) * np.sign((to_lon - lon + 180) % 360 - 180)
    return seconds, metres_between(lat, lon, to_lat, to_lon), north, east


def apart(degrees: Floats, others: Floats) -> Floats:
    """Return the angle between directions, 0 to 180; NaN where one is unknown."""
    return np.abs((others - degrees + 180) % 360 - 180)


def _median(parts: Sequence[NDArray[np.float64]]) -> float:
    together = np.concatenate(parts)
    given = together[~np.isnan(together)]
    return float(np.median(given)) if len(given) >= LEAST_STEPS else float("nan")


def with_derived(track: Track, *, speed: bool, course: bool) -> Track:
    """Return the track (by time) with speed or course from its positions: of the step to each point, the first point
    has those of the second. A step of no distance has no course."""
    if len(track) < 2 or not (speed or course):
        return track
    seconds, metres, north, east = steps(track)
    knots = np.minimum(metres / np.maximum(seconds, 1) / METRES_PER_KNOT_SECOND, FASTEST_KNOTS)
    degrees = np.where(metres > 0, np.degrees(np.arctan2(east, north)) % 360, np.nan)
    return replace(
        track,
        sog=np.concatenate([knots[:1], knots]) if speed else track.sog,
        cog=np.concatenate([degrees[:1], degrees]) if course else track.cog,
    )


def is_in_radians(courses: Floats) -> bool:
    """Return whether many different courses (0 to 360) lie within a turn of 2 pi, from 0 or from -pi, and go around
    it."""
    given = np.unique(between(np.zeros(1), courses[~np.isnan(courses)]))
    if len(given) < LEAST_STEPS or given[0] < -math.pi - 0.01 or given[-1] > 2 * math.pi + 0.01:
        return False
    return bool(np.ptp(given) > 4)


def is_shared_name(track: Track) -> bool:
    """Return whether the track (by time) jumps between places as two ships under one name do."""
    if len(track) < 10:
        return False
    later = np.arange(1, len(track))
    return float(is_too_far(track, later - 1, later, USUAL_KNOTS).mean()) >= SHARED_NAME
