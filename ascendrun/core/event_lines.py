"""Lines of jobs' stories as people read them: host names folded, what many hosts say told once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ascendrun.core.names import fold_names

KINDS: Mapping[str, str] = {
    "submitted": "a job came",
    "asked": "somebody asked for something",
    "state": "a job moved to another state",
    "note": "something worth knowing",
    "unreachable": "hosts fell silent",
    "answers": "hosts answer again",
    "straggler": "a rank or host is slow",
    "straggler-over": "it keeps up again",
    "notice": "a notice could not be delivered",
}
"""What a line may be. Stories may hold kinds of later versions too."""

TOGETHER_S = 1.0
"""Hosts that say the same within this time say it together."""

_WORD = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_LIST = re.compile(rf"{_WORD.pattern}(?:, {_WORD.pattern})+")


@dataclass(frozen=True)
class StoryLine:
    """One line of the stream of all stories. `number`: its place in the order of writing."""

    number: int
    at_s: float
    job: str
    kind: str
    text: str


def fold_lines(lines: Sequence[StoryLine], hosts_of: Mapping[str, Collection[str]]) -> tuple[StoryLine, ...]:
    """The lines with hosts folded. Lines of one job that differ in the host only, and came together, become one, which
    stands where the first of them stood. `hosts_of`: the names of each job's hosts."""
    folded: list[StoryLine] = []
    hosts_at: dict[int, list[str]] = {}
    open_at: dict[tuple[str, str, str], int] = {}
    for line in lines:
        names = hosts_of.get(line.job, ())
        host, pattern = _split(line.text, names)
        key = (line.job, line.kind, pattern)
        at = open_at.get(key)
        if host is not None and at is not None and line.at_s - folded[at].at_s <= TOGETHER_S:
            hosts_at[at].append(host)
            continue
        if host is not None:
            open_at[key] = len(folded)
            hosts_at[len(folded)] = [host]
            folded.append(replace(line, text=pattern))
        else:
            folded.append(replace(line, text=fold_text(line.text, names)))
    return tuple(
        replace(line, text=line.text.replace("\0", fold_names(hosts_at[at]))) if at in hosts_at else line
        for at, line in enumerate(folded)
    )


def fold_text(text: str, hosts: Collection[str]) -> str:
    """`a1, a2, a3` becomes `a[1-3]` where all of them are hosts."""
    known = frozenset(hosts)

    def fold(found: re.Match[str]) -> str:
        names = found.group().split(", ")
        return fold_names(names) if known.issuperset(names) else found.group()

    return _LIST.sub(fold, text) if len(known) > 1 and ", " in text else text


def _split(text: str, hosts: Collection[str]) -> tuple[str | None, str]:
    """(the one host that the text names, the text with NUL in its place); (None, text) for none or several."""
    named = {word for word in _WORD.findall(text) if word in hosts}
    if len(named) != 1 or "\0" in text:
        return None, text
    host = named.pop()
    return host, re.sub(rf"(?<![A-Za-z0-9._-]){re.escape(host)}(?![A-Za-z0-9_-]|\.[A-Za-z0-9])", "\0", text)
