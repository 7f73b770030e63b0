"""Tracks as text: two grammars, their vocabulary, and the check that the answer is not in the text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Dict, List, Mapping, Sequence, Set, Tuple

import h3
import numpy as np
from numpy.typing import NDArray

from ascendrun.programs.trajectory.tracks import BadData, Floats, Track

Ids = NDArray[np.int64]

PAD, UNKNOWN = "[PAD]", "[UNK]"
END = "POINT_END"
COMPASS = ("N", "NE", "E", "SE", "S", "SW", "W", "NW")
SPEED_WORDS = ((2.0, "STOP"), (5.0, "SLOW"), (10.0, "MID"), (15.0, "FAST"))
SPEED_EDGES = (0.05, 0.15, 0.25, 0.4, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0,
               9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 16.0, 18.0, 20.0, 24.0, 30.0)
TURN_EDGES = (-120.0, -60.0, -30.0, -15.0, -8.0, -4.0, -1.5, -0.5, 0.5, 1.5, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
STEP_EDGES = (15.0, 30.0, 50.0, 58.0, 62.0, 66.0, 69.0, 71.0, 74.0, 80.0, 100.0, 130.0, 170.0, 185.0, 240.0, 400.0)
SPREAD_EDGES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 5.0)
NET_EDGES = (3.0, 6.0, 10.0, 20.0, 50.0, 100.0, 300.0, 1000.0, 2000.0, 4000.0, 8000.0)
SHARE_EDGES = (0.001, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99)
JITTER_EDGES = (2.0, 4.0, 8.0, 12.0, 20.0, 40.0, 60.0, 90.0)
MEAN_TURN_EDGES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 80.0, 100.0)
METRES_PER_DEGREE = 111_320.0
REGION_LEVELS = (1, 2, 3, 4, 5, 6, 7, 8)
"""H3 resolutions that the compact grammar names, from 600 km down to 500 m."""


@dataclass(frozen=True)
class Words:
    """The text of one track: some words about the whole, then as many words for each point."""

    head: Tuple[str, ...]
    points: Tuple[Tuple[str, ...], ...]

    def text(self) -> str:
        return " ".join([*self.head, *(word for point in self.points for word in point)])


# --- the guide grammar: absolute time, H3 cell digit by digit, coarse speed and course ---

def guide_words(track: Track, *, resolution: int) -> Words:
    """Nineteen words a point (at resolution 10): the published grammar without its class word."""
    points = tuple(
        (*time_words(int(track.time[i])), *cell_words(track.lat[i], track.lon[i], resolution),
         f"SPD_{speed_word(track.sog[i])}", f"COG_{compass(track.cog[i])}", END)
        for i in range(len(track))
    )
    return Words((), points)


def time_words(seconds: int) -> Tuple[str, ...]:
    at = datetime.fromtimestamp(seconds, timezone.utc)
    return (f"YEAR_{at.year}", f"MONTH_{at.month}", f"DAY_{at.day}", f"HOUR_{at.hour}", f"MINUTE_{at.minute}",
            f"SECOND_{at.second}")


def cell_words(lat: float, lon: float, resolution: int) -> Tuple[str, ...]:
    return digits_of(h3.latlng_to_cell(lat, lon, resolution))


def digits_of(cell: str) -> Tuple[str, ...]:
    """An H3 cell as its resolution, base cell (0-121) and one digit (0-6) for each resolution below it.

    The index keeps the digit of resolution r in the three bits from 3 * (15 - r) up; the seven children of a cell
    differ in it.
    """
    resolution, index = h3.get_resolution(cell), h3.str_to_int(cell)
    digits = (index >> 3 * (15 - level) & 7 for level in range(1, resolution + 1))
    return (f"H3_res_{resolution}", f"H3_base_{h3.get_base_cell_number(cell)}",
            *(f"H3_cell_{level}_{digit}" for level, digit in enumerate(digits, start=1)))


def speed_word(knots: float) -> str:
    if np.isnan(knots):
        return "UNKNOWN"
    return next((word for limit, word in SPEED_WORDS if knots < limit), "HIGH")


def compass(degrees: float) -> str:
    if np.isnan(degrees):
        return "UNKNOWN"
    return COMPASS[int(((degrees + 22.5) % 360) // 45)]


# --- the compact grammar: the region once, the whole motion in a few words, then speed and turn of each point ---

def compact_words(track: Track, *, resolution: int) -> Words:
    """The track's region from coarse to fine and its motion as a whole; then, a point: its speed and its turn.

    A short text leaves little to learn by heart when only a few thousand tracks are at hand.
    """
    region = h3.latlng_to_cell(float(np.median(track.lat)), float(np.median(track.lon)), resolution)
    cells = tuple(f"R{level}_{h3.cell_to_parent(region, level)}" for level in REGION_LEVELS if level <= resolution)
    points = tuple((binned("S", speed, SPEED_EDGES), binned("T", degrees, TURN_EDGES))
                   for speed, degrees in zip(track.sog, turns(track)))
    return Words((*cells, *summary_words(track)), points)


def summary_words(track: Track) -> Tuple[str, ...]:
    """Nine words: mean, greatest and spread of the speed, metres from first to last point, their share of the way,
    the usual interval and its spread, mean turn, share of points without a course."""
    speed, turn = given(track.sog), np.abs(given(turns(track)[1:]))
    interval = np.diff(track.time).astype(np.float64)
    way = float(np.sum(metres_between(track.lat[:-1], track.lon[:-1], track.lat[1:], track.lon[1:])))
    net = float(metres_between(track.lat[:1], track.lon[:1], track.lat[-1:], track.lon[-1:])[0])
    return (binned("VM", float(speed.mean()), SPEED_EDGES), binned("VX", float(speed.max()), SPEED_EDGES),
            binned("VS", float(speed.std()), SPREAD_EDGES), binned("L", net, NET_EDGES),
            binned("E", net / (way + 1), SHARE_EDGES), binned("I", float(np.median(interval)), STEP_EDGES),
            binned("J", float(interval.std()), JITTER_EDGES), binned("K", float(turn.mean()), MEAN_TURN_EDGES),
            binned("U", float(np.isnan(track.cog).mean()), SHARE_EDGES))


def given(values: Floats) -> Floats:
    """The values that are numbers; one NaN when there are none, so that their mean is not known either."""
    present = values[~np.isnan(values)]
    return present if len(present) else np.array([np.nan])


def turns(track: Track) -> Floats:
    """Degrees turned since the point before, -180 to 180, starboard positive; NaN where a course is not known."""
    degrees: Floats = (np.diff(track.cog, prepend=np.nan) + 180) % 360 - 180
    return degrees


def metres_between(lat: Floats, lon: Floats, to_lat: Floats, to_lon: Floats) -> Floats:
    """Over a flat earth: good enough within a track."""
    north = (to_lat - lat) * METRES_PER_DEGREE
    east = ((to_lon - lon + 180) % 360 - 180) * METRES_PER_DEGREE * np.cos(np.radians(lat))
    return np.hypot(north, east)


def binned(letter: str, value: float, edges: Sequence[float]) -> str:
    """The word of a number: the index of its bin, `x` when it is not known."""
    return f"{letter}_x" if np.isnan(value) else f"{letter}_{int(np.searchsorted(edges, value, side='right'))}"


GRAMMARS = {"guide": guide_words, "compact": compact_words}


# --- vocabulary ---

def make_vocabulary(texts: Sequence[Words], *, min_count: int) -> Dict[str, int]:
    """Ids by word, of the words that at least `min_count` tracks have; [PAD] is 0, [UNK] is 1. Same texts, same ids."""
    counts: Dict[str, int] = {}
    for words in texts:
        for word in set(words.text().split()):
            counts[word] = counts.get(word, 0) + 1
    known = sorted(word for word, count in counts.items() if count >= min_count)
    return {word: i for i, word in enumerate([PAD, UNKNOWN, *known])}


@dataclass(frozen=True)
class Encoded:
    """One track as ids. `points` has one row a point; `label` -1: not known."""

    head: Ids
    points: Ids
    label: int

    def __len__(self) -> int:
        return len(self.head) + self.points.size

    def ids(self) -> Ids:
        return np.concatenate([self.head, self.points.ravel()])


def encode(words: Words, vocabulary: Mapping[str, int], label: int) -> Encoded:
    unknown = vocabulary[UNKNOWN]
    head = np.array([vocabulary.get(word, unknown) for word in words.head], dtype=np.int64)
    points = np.array([[vocabulary.get(word, unknown) for word in point] for point in words.points], dtype=np.int64)
    return Encoded(head, points, label)


# --- the leak check ---

class LabelLeak(BadData):
    """The text holds the answer; any score on it would be worth nothing."""


def check_leak(texts: Sequence[Words], labels: Sequence[str]) -> None:
    """Raises LabelLeak when a word of the texts names a class, or when every class has a word of its own.

    The second means: each class has a word that stands in all of its texts and in no other's, so the
    label is there under another name.
    """
    classes = sorted(set(labels))
    vocabulary = {word for words in texts for word in words.text().split()}
    class_words = [plain(name) for name in classes if len(plain(name)) > 2]
    named = sorted(word for word in vocabulary if any(name in plain(word) for name in class_words))
    if named:
        raise LabelLeak(f"the text names the class: {', '.join(named[:5])}; class words must not be in the text")
    own = {name: own_words(texts, labels, name) for name in classes}
    if len(classes) > 1 and min(labels.count(name) for name in classes) > 1 and all(own.values()):
        shown = ", ".join(f"{sorted(words)[0]} = {name}" for name, words in own.items())
        raise LabelLeak(f"one word tells the class each time: {shown}; a column derived from the class is in the text")


def plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def own_words(texts: Sequence[Words], labels: Sequence[str], name: str) -> Set[str]:
    """Words in every text of this class and in no text of another."""
    inside = [set(words.text().split()) for words, label in zip(texts, labels) if label == name]
    common: Set[str] = set.intersection(*inside)
    for words, label in zip(texts, labels):
        if not common:
            break
        if label != name:
            common -= set(words.text().split())
    return common


def label_ids(labels: Sequence[str]) -> Dict[str, int]:
    """Class ids by name, sorted by name."""
    return {name: i for i, name in enumerate(sorted(set(labels)))}


def as_texts(tracks: Sequence[Track], *, grammar: str, resolution: int) -> List[Words]:
    return [GRAMMARS[grammar](track, resolution=resolution) for track in tracks]
