"""Hosts, addresses and services that a line names."""

from __future__ import annotations

import re
from typing import Tuple

IP = r"(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]*:[0-9a-fA-F:]+)"
_NAME = r"[A-Za-z0-9_.-]*[A-Za-z0-9]"
_PLACE = re.compile(
    r"(?<!addr=)[\[('](?P<place>[\w.:-]+?)(?:%\w+)?(?:\]:|', |, | : |\]: ?)\d+|\[(?P<ip>" + IP + r")\]|"
    r"\b(?:host|to|server) '?(?P<named>" + _NAME + r")'?(?: port |:)\d+|\b(?P<bare>\d{1,3}(?:\.\d{1,3}){3})\b")
_SERVICE = re.compile(
    r"\b(?:https?|s3a?|rediss?|postgres(?:ql)?|mysql|mongodb|amqps?|ftp|hdfs)://(?:[^@/\s]*@)?(" + _NAME + r")|"
    r"\bhost=['\"]?(" + _NAME + ")")
_BARE = re.compile(r"[\d.]+|localhost")


def places_of(text: str) -> Tuple[str, ...]:
    """Hosts and addresses with which a line says that it wanted to speak."""
    return tuple(str(place[place.lastgroup or 0]) for place in _PLACE.finditer(text))


def services_in(text: str) -> Tuple[str, ...]:
    """Hosts of services, such as a web server, that a line names; an address does not tell whose it is."""
    return tuple(name for name in _of_services(text) if not _BARE.fullmatch(name))


def has_bare_service(text: str) -> bool:
    """A service is named by an address: it may be outside of the job, or one of its own ranks."""
    return any(_BARE.fullmatch(name) for name in _of_services(text))


def _of_services(text: str) -> Tuple[str, ...]:
    return tuple(one for found in _SERVICE.findall(text) for one in found if one)


def is_loopback(address: str) -> bool:
    """Every host takes it for itself."""
    return address in ("localhost", "::1") or address.startswith("127.")
