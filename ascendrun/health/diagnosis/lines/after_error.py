"""Activity of a rank after a line: the amount of output, and whether it survived the reported error."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from ascendrun.health.diagnosis.evidence import Line
from ascendrun.health.diagnosis.lines.line_kinds import QUIET, is_warning
from ascendrun.health.diagnosis.lines.tracebacks import Chain

AFTERWARDS_LIMIT = 200
AT_ONCE_S = 0.5
"""Lines of two streams within this time have no known order."""
WORK_LINES, SURVIVED_S = 3, 60.0
"""A rank that then wrote this number of lines, or ran for this time, survived the reported error."""


def count_after(lines: Sequence[Line], chains: Sequence[Chain], known: Iterable[int]) -> list[int]:
    """Return for every line the number of ordinary lines after it: by order in its stream, by time in others."""
    quiet = _report_lines(chains, known)
    counts = [0] * len(lines)
    seen: dict[str, int] = {}
    times: dict[str, list[float]] = {}
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        counts[index] = seen.get(line.stream, 0)
        if counts[index] > AFTERWARDS_LIMIT or (
            index not in quiet and line.text.strip() and not QUIET.search(line.text)
        ):
            seen[line.stream] = counts[index] + 1
            if line.at_s is not None:
                times.setdefault(line.stream, []).append(line.at_s)
    for of_stream in times.values():
        of_stream.sort()
    for index, line in enumerate(lines):
        if line.at_s is not None:
            counts[index] += sum(
                len(of_stream) - bisect_right(of_stream, line.at_s + AT_ONCE_S)
                for stream, of_stream in times.items()
                if stream != line.stream
            )
    return counts


def worked_until(lines: Sequence[Line], chains: Sequence[Chain], known: Iterable[int]) -> float | None:
    """Return the time of its last ordinary line; None: no such line, or unknown times."""
    quiet = _report_lines(chains, known)
    return max(
        (
            line.at_s
            for index, line in enumerate(lines)
            if line.at_s is not None and index not in quiet and line.text.strip() and not QUIET.search(line.text)
        ),
        default=None,
    )


def _report_lines(chains: Sequence[Chain], known: Iterable[int]) -> set[int]:
    """Return the lines that are known messages or part of an exception."""
    return {*known, *(index for chain in chains for one in chain.raised for index in range(one.first, one.last + 1))}


def wrote_after(lines: Sequence[Line], index: int) -> bool:
    """Return whether non-warnings follow: by order in the line's stream, by time in others. Without times a line of
    another stream counts as later, since this line is from the start."""
    line = lines[index]
    for place, other in enumerate(lines):
        if other.stream == line.stream:
            is_later = place > index
        else:
            is_later = line.at_s is None or other.at_s is None or other.at_s > line.at_s + AT_ONCE_S
        if is_later and other.text.strip() and not is_warning(other.text):
            return True
    return False


def wrote_until(lines: Sequence[Line]) -> float | None:
    """Return the time of its last line that is not a warning; None: no such line, or unknown times."""
    return max(
        (line.at_s for line in lines if line.at_s is not None and line.text.strip() and not is_warning(line.text)),
        default=None,
    )


def survived_lines(
    lines: Sequence[Line], reported: Iterable[tuple[str, int]], after: Sequence[int], *, end_s: float | None
) -> Mapping[str, bool]:
    """Return the errors (name, line) after which the rank worked or much time passed; False: times unknown."""
    found: dict[str, bool] = {}
    for name, index in reported:
        at_s = lines[index].at_s
        lived_s = 0.0 if at_s is None or end_s is None else end_s - at_s
        surely = after[index] >= WORK_LINES or lived_s >= SURVIVED_S
        if surely or at_s is None:
            found[name] = found.get(name, False) or surely
    return found
