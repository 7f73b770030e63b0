"""When hosts of a running job fall silent, and when they answer again, as lines for the job's story."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ascendrun.core.names import InvalidNamesError, expand_names, fold_names, split_list

GATHER_S = 10.0
"""A connection that is made anew within moments is not worth a word; hosts behind one dead switch get one line."""


class ReachabilityWatch:
    """One job's. `silent`: the hosts that its story calls unreachable already."""

    def __init__(self, silent: Iterable[str] = ()) -> None:
        self._silent: set[str] = set(silent)
        self._lost_s: dict[str, float] = {}
        self._back_s: dict[str, float] = {}

    def look(self, liveness: Mapping[str, str], *, now_s: float) -> tuple[tuple[str, str], ...]:
        """New (kind, text) lines. `liveness` by host: ALIVE, UNREACHABLE or another word; `now_s`: monotonic."""
        for host, word in liveness.items():
            _note(self._lost_s, host, word == "UNREACHABLE" and host not in self._silent, now_s)
            _note(self._back_s, host, word == "ALIVE" and host in self._silent, now_s)
        lines: list[tuple[str, str]] = []
        lost = _ripe(self._lost_s, now_s)
        if lost:
            self._silent.update(lost)
            lines.append(("unreachable", f"{fold_names(lost)}: no answer; what runs there goes on as far as is known"))
        back = _ripe(self._back_s, now_s)
        if back:
            self._silent.difference_update(back)
            lines.append(("answers", f"{fold_names(back)}: answers again"))
        return tuple(lines)


def unreachable_hosts(story: Iterable[tuple[str, str]]) -> set[str]:
    """The hosts that a story, (kind, text) lines in order, leaves silent at its end."""
    silent: set[str] = set()
    for kind, text in story:
        if kind == "unreachable":
            silent.update(_hosts_of(text))
        elif kind == "answers":
            silent.difference_update(_hosts_of(text))
    return silent


def _hosts_of(text: str) -> Sequence[str]:
    try:
        return [name for piece in split_list(text.partition(": ")[0]) for name in expand_names(piece)]
    except InvalidNamesError:
        return ()


def _note(since_s: dict[str, float], host: str, is_so: bool, now_s: float) -> None:
    if is_so:
        since_s.setdefault(host, now_s)
    else:
        since_s.pop(host, None)


def _ripe(since_s: dict[str, float], now_s: float) -> list[str]:
    """All hosts of the table, and an empty table, once the first of them has waited long enough."""
    if not since_s or now_s - min(since_s.values()) < GATHER_S:
        return []
    hosts = sorted(since_s)
    since_s.clear()
    return hosts
