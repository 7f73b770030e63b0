"""Services outside of the job, and addresses that every host takes for its own."""

from __future__ import annotations

import re

from ascendrun.ascend.peer_messages.addresses import NAME

_SERVICE = re.compile(
    r"\b(?:https?|s3a?|rediss?|postgres(?:ql)?|mysql|mongodb|amqps?|ftp|hdfs)://(?:[^@/\s]*@)?(" + NAME + r")|"
    r"\bhost=['\"]?(" + NAME + ")"
)
_BARE = re.compile(r"[\d.]+|localhost")


def services_in(text: str) -> tuple[str, ...]:
    """Hosts of services, such as a web server, that a line names; an address does not tell whose it is."""
    return tuple(name for name in _of_services(text) if not _BARE.fullmatch(name))


def has_bare_service(text: str) -> bool:
    """A service is named by an address: it may be outside of the job, or one of its own ranks."""
    return any(_BARE.fullmatch(name) for name in _of_services(text))


def _of_services(text: str) -> tuple[str, ...]:
    return tuple(one for found in _SERVICE.findall(text) for one in found if one)


def is_loopback(address: str) -> bool:
    """Every host takes it for itself."""
    return address in ("localhost", "::1") or address.startswith("127.")
