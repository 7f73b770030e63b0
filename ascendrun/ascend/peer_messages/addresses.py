"""Addresses in a line: with whom it says that it wanted to speak."""

from __future__ import annotations

import re

from ascendrun.ascend.peer_messages.message import Addresses

IP = r"(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]*:[0-9a-fA-F:]+)"
NAME = r"[A-Za-z0-9_.-]*[A-Za-z0-9]"
_PLACE = re.compile(
    r"(?<!addr=)[\[('](?P<place>[\w.:-]+?)(?:%\w+)?(?:\]:|', |, | : |\]: ?)\d+|\[(?P<ip>" + IP + r")\]|"
    r"\b(?:host|to|server) '?(?P<named>" + NAME + r")'?(?: port |:)\d+|\b(?P<bare>\d{1,3}(?:\.\d{1,3}){3})\b"
)


def addresses_in(text: str) -> Addresses:
    """Hosts and addresses, none with a device."""
    return tuple((str(place[place.lastgroup or 0]), None) for place in _PLACE.finditer(text))
