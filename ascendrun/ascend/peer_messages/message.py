"""Messages about other ranks in log lines, and the table of their patterns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from re import Match, Pattern
from typing import Callable, Optional

from ascendrun.core.dataclass import dataclass

LOST, CONNECT, EXEC = "lost", "connect", "exec"
"""Of `PeerMessage.wait`: a connection broke; a connection was never established; a collective did not complete."""

Addresses = tuple[tuple[str, Optional[int]], ...]


@dataclass(frozen=True)
class PeerMessage:
    """The message of one line. `wait`: how other ranks affected its rank, None: it only reports about them.

    `ranks`: named by number; `addresses`: named by (address, device or None); `kind`: the kind of message.
    """

    kind: str
    wait: str | None = None
    ranks: tuple[int, ...] = ()
    addresses: Addresses = ()
    values: Mapping[str, str] = field(default_factory=dict)


Maker = Callable[[Match[str]], PeerMessage]


class MessageTable:
    """Rows of search texts, a pattern, and the message of a match."""

    def __init__(self) -> None:
        self._rows: list[tuple[tuple[str, ...], Pattern[str], Maker]] = []

    def add(self, kind: str, needles: Sequence[str], pattern: str, wait: str | None = None, **values: str) -> None:
        """Add a row. Named groups `rank`, `ranks`, `ip` and `dev` of the pattern set ranks and addresses; all other
        groups are values, "" where they did not match. `values`: more values."""

        def make(found: Match[str]) -> PeerMessage:
            groups = {name: text or "" for name, text in found.groupdict().items()}
            ranks = numbers_in(groups.pop("ranks", "") or groups.pop("rank", ""))
            address, device = groups.pop("ip", ""), groups.pop("dev", None)
            address = address if device is None else server_of(address)
            addresses = ((address, device_of(device)),) if address else ()
            return PeerMessage(kind, wait, ranks, addresses, {**groups, **values})

        self.row(needles, pattern)(make)

    def row(self, needles: Sequence[str], pattern: str) -> Callable[[Maker], Maker]:
        """Register a maker for lines that contain one of `needles` and match `pattern`."""

        def register(maker: Maker) -> Maker:
            self._rows.append((tuple(needles), re.compile(pattern), maker))
            return maker

        return register

    def read(self, text: str) -> Iterator[PeerMessage]:
        """Yield the messages of one line."""
        if self._any_needle.search(text) is None:
            return
        for needles, pattern, maker in self._rows:
            if any(needle in text for needle in needles):
                found = pattern.search(text)
                if found is not None:
                    yield maker(found)

    @cached_property
    def _any_needle(self) -> Pattern[str]:
        """Return one pattern for all rows: one search is enough, since few lines of a log match."""
        return re.compile("|".join(sorted({re.escape(needle) for needles, _, _ in self._rows for needle in needles})))


def server_of(text: str) -> str:
    """Return an address without its scope."""
    return text.partition("%")[0]


def device_of(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def numbers_in(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"\d+", text))


IP = r"(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]*:[0-9a-fA-F:]+)"
NAME = r"[A-Za-z0-9_.-]*[A-Za-z0-9]"
_PLACE = re.compile(
    r"(?<!addr=)[\[('](?P<place>[\w.:-]+?)(?:%\w+)?(?:\]:|', |, | : |\]: ?)\d+|\[(?P<ip>" + IP + r")\]|"
    r"\b(?:host|to|server) '?(?P<named>" + NAME + r")'?(?: port |:)\d+|\b(?P<bare>\d{1,3}(?:\.\d{1,3}){3})\b"
)


def addresses_in(text: str) -> Addresses:
    """Return hosts and addresses, none with a device."""
    return tuple((str(place[place.lastgroup or 0]), None) for place in _PLACE.finditer(text))
