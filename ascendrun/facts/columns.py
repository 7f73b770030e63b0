"""Columns of AIS tables by their names, and by their values where names are foreign; times of a single value.

No numpy: the head node proposes the same columns from the first rows as the program does on a rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

ALIASES = {
    "ship": ("vessel_id", "ship", "mmsi"),
    "track": ("track_id", "track"),
    "time": ("time", "date", "timestamp", "# timestamp", "basedatetime", "base_date_time"),
    "lat": ("lat", "latitude"),
    "lon": ("lon", "longitude", "lng", "long"),
    "sog": ("sog", "speed"),
    "cog": ("cog", "course"),
    "heading": ("heading", "true_heading"),
    "length": ("length",),
    "width": ("width",),
    "class": ("vessel_class", "class", "label", "ship type"),
    "type_code": ("vesseltype", "vessel_type", "ais_type"),
    "sender": ("type of mobile",),
    "split": ("split",),
}
"""Column names by internal name, in lower case: those of MarineCadastre (US), of the Danish Maritime Authority, and
common names."""
NEEDED = ("time", "lat", "lon")
_UNITS = {"kn": "knots", "kt": "knots", "kts": "knots", "knot": "knots", "knots": "knots", "kmh": "km/h", "kph": "km/h"}
_UNITS.update({"km/h": "km/h", "m/s": "m/s", "mps": "m/s", "ms": "m/s", "deg": "", "degrees": "", "m": "", "utc": ""})
_WITH_UNIT = re.compile(r"(?P<name>.*?)[\s_]*[(\[]?(?P<unit>%s)[)\]]?" % "|".join(map(re.escape, _UNITS)))
_IS_NUMBER = re.compile(r"-?[0-9]+([.,][0-9]+)?").fullmatch
LOOKED_AT = 300
"""Rows of a file from which the meaning of a column is guessed."""


@dataclass(frozen=True)
class Columns:
    """The file's column of each internal name. `speed_unit`: as the header gives it, None: it does not."""

    of: Mapping[str, str]
    speed_unit: str | None = None


def find_columns(names: Sequence[str]) -> Columns:
    """Return the columns that ALIASES has. A unit behind the name, as in "SOG (km/h)", is not part of it."""
    known: dict[str, tuple[str, str]] = {}
    for name in reversed(names):
        split = _WITH_UNIT.fullmatch(name.strip().lower())
        if split:
            known[split["name"]] = name, _UNITS[split["unit"]]
    known.update({name.strip().lower(): (name, "") for name in reversed(names)})
    found = {key: next((known[each] for each in aliases if each in known), None) for key, aliases in ALIASES.items()}
    given = {key: column for key, column in found.items() if column is not None}
    unit = given["sog"][1] if "sog" in given else ""
    return Columns({key: name for key, (name, _) in given.items()}, unit or None)


def unknown_names(table: Mapping[str, Sequence[Any]], wanted: Mapping[str, str]) -> list[str]:
    """Return internal names that there are not, and columns that the table does not have."""
    unknown = [key for key in wanted if key not in ALIASES]
    return unknown + [name for name in wanted.values() if name and name not in table]


def missing_columns(
    table: Mapping[str, Sequence[Any]], wanted: Mapping[str, str]
) -> tuple[dict[str, str], list[str], str]:
    """Return (columns by internal name, internal names that lack one, the text for --column_map).

    A ship column is missing where none is known, and a column of ship numbers has several: without it, each file is
    one ship.
    """
    found = {key: name for key, name in {**find_columns(list(table)).of, **wanted}.items() if name}
    missing = [key for key in NEEDED if key not in found]
    proposed = {key: name for key, name in propose(table, found).items() if key not in wanted}
    names_ships = {"ship", "track"} & {*found, *wanted}
    if "ship" in proposed and not names_ships and len(set(table[proposed["ship"]])) > 1:
        missing.append("ship")
    if not missing:
        return found, [], ""
    lacking = dict.fromkeys([*missing, *proposed])
    return found, missing, ",".join(f"{key}={proposed.get(key, 'NAME')}" for key in lacking)


# --- proposals: what a column could be, by its values ---


def propose(table: Mapping[str, Sequence[Any]], found: Mapping[str, str]) -> dict[str, str]:
    """Return a column for internal names that have none, guessed from the values: only to be shown to the user."""
    free = {name: list(values[:LOOKED_AT]) for name, values in table.items() if name not in found.values()}
    proposed: dict[str, str] = {}

    def take(key: str, fits: list[str]) -> None:
        if key not in found and fits:
            proposed[key] = fits[0]
            del free[fits[0]]

    take("ship", [name for name, values in free.items() if _share(values, r"[0-9]{9}(\.0)?") > 0.9])
    take("time", [name for name, values in free.items() if is_time(values)])
    places = [name for name, values in free.items() if _share(values, r"-?[0-9]{1,3}[.,][0-9]{3,}") > 0.7]
    east = [name for name in places if max(map(abs, _floats(free[name])), default=0.0) > 90]
    if len(places) > 1 or {"lat", "lon"} & set(found):
        take("lat", [name for name in places if name not in east[:1]])
        take("lon", [name for name in places if name in free])
    if not {"lat", "lon"} - {*found, *proposed}:
        numeric = {name: (len(values), _floats(values)) for name, values in free.items()}
        ranges = {
            name: (min(each), max(each))
            for name, (count, each) in numeric.items()
            if count >= 20 and len(each) > count / 2
        }
        take("cog", [name for name, (low, high) in ranges.items() if low >= 0 and 180 < high <= 360])
        take("sog", [name for name, (low, high) in ranges.items() if name in free and low >= 0 and high < 60])
    words = {name: {str(value).strip() for value in values} - {""} for name, values in free.items()}
    words = {name: each for name, each in words.items() if not is_state(name, each)}
    if "type_code" not in found:
        take("class", [name for name, each in words.items() if 1 < len(each) < 30 and not any(map(_IS_NUMBER, each))])
    return proposed


_STATES = re.compile("under ?way|at anchor|moored|aground|engaged in|not under command|restricted man", re.I)


def is_state(name: str, words: Iterable[str]) -> bool:
    """Return whether a column has what a ship does, its navigational status, and not what it is."""
    return re.search("stat(us|e)", name, re.I) is not None or any(map(_STATES.match, words))


def _share(values: Sequence[Any], pattern: str) -> float:
    form = re.compile(pattern)
    return sum(form.fullmatch(str(value).strip()) is not None for value in values) / max(1, len(values))


def _floats(values: Sequence[Any]) -> list[float]:
    """Return the finite numbers among these values; of a column of decimal commas too."""
    texts = [str(value).strip() for value in values if value is not None]
    if any("," in text for text in texts) and all(
        re.fullmatch(r"[-+]?[0-9]+(,[0-9]+)?", text) for text in texts if text
    ):
        texts = [text.replace(",", ".") for text in texts]
    found = []
    for text in texts:
        try:
            found.append(float(text))
        except ValueError:
            continue
    return [value for value in found if math.isfinite(value)]


# --- times ---


LATEST_S = 7_258_118_400
"""The year 2200 in seconds since 1970; a larger number is in milliseconds or finer."""
DAY_FIRST, MONTH_FIRST = "day/month/year", "month/day/year"
_ZONE = r"(Z|UTC|GMT|[+-]\d{2}(?::?\d{2})?)"
_CLOCK = r"(?:[T ,]\s*(\d{1,2}):(\d{2})(?::(\d{2})(?:[.,](\d+))?)?\s*([AaPp][Mm])?\s*" + _ZONE + "?)?"
_ISO = re.compile(r"(\d{4})[-/.]?(\d{1,2})[-/.]?(\d{1,2})" + _CLOCK)
YEAR_LAST = re.compile(r"(\d{1,2})([-/.])(\d{1,2})[-/.](\d{4})" + _CLOCK)


def is_time(values: Sequence[Any]) -> bool:
    """Return whether nearly all values are times, in any order of day and month."""
    found = [read_time(value, order) for order in (DAY_FIRST, MONTH_FIRST) for value in values[:100]]
    fits = sum(1e8 < abs(seconds) < LATEST_S for seconds in found if seconds == seconds)
    return fits > 0.45 * len(found) > 0


def read_time(value: Any, order: str | None = None) -> float:
    """Return UTC seconds of a text, a datetime or a number; NaN for other values."""
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    text = str(value).strip()
    try:
        return float(value if isinstance(value, (int, float)) else text)
    except (ValueError, OverflowError):
        pass
    found = _ISO.fullmatch(text)
    if found:
        return _seconds(found[1], found[2], found[3], found.groups()[3:])
    found = YEAR_LAST.fullmatch(text) if order else None
    if not found:
        return float("nan")
    month, day = (found[3], found[1]) if order == DAY_FIRST else (found[1], found[3])
    return _seconds(found[4], month, day, found.groups()[4:])


def _seconds(year: str, month: str, day: str, clock: Sequence[str | None]) -> float:
    hour, minute, second, fraction, half, zone = clock
    hours = int(hour or 0)
    if half:
        hours = hours % 12 + (12 if half.lower() == "pm" else 0)
    try:
        moment = datetime(int(year), int(month), int(day), tzinfo=timezone.utc)
        moment += timedelta(hours=hours, minutes=int(minute or 0), seconds=int(second or 0))
    except (ValueError, OverflowError):
        return float("nan")
    if hours > 24 or int(minute or 0) > 59 or int(second or 0) > 60:
        return float("nan")
    return moment.timestamp() + float(f"0.{fraction or 0}") - _zone_s(zone)


def _zone_s(zone: str | None) -> int:
    if not zone or zone in ("Z", "UTC", "GMT"):
        return 0
    digits = zone[1:].replace(":", "").ljust(4, "0")
    return (int(digits[:2]) * 3600 + int(digits[2:]) * 60) * (-1 if zone[0] == "-" else 1)
