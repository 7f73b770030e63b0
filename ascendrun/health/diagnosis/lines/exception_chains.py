"""Exceptions raised while another was handled: whether the first one is the reason of the failure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ascendrun.ascend.signatures import Hit
from ascendrun.health.diagnosis.evidence import Line
from ascendrun.health.diagnosis.indicators import CAUSE
from ascendrun.health.diagnosis.lines.line_kinds import points_elsewhere
from ascendrun.health.diagnosis.lines.tracebacks import Chain, Raised
from ascendrun.health.diagnosis.peers import find_peer_lines, suffered_wait

_ASKS = frozenset({
    "FileNotFoundError", "ModuleNotFoundError", "ImportError", "KeyError", "IndexError", "LookupError",
    "AttributeError", "StopIteration", "ValueError", "TypeError", "Empty", "FileExistsError",
})  # fmt: skip
"""Exceptions with which a program tests whether something exists; it has an alternative."""
_CLEARS = re.compile(r"__a?exit__|__del__|_*(?:close|cleanup|clean_up|shutdown|finalize|destroy|teardown|tear_down)\w*")
_ENDS = frozenset({"KeyboardInterrupt", "SystemExit", "SignalException", "GracefulExit"})
_DEVICE = frozenset({"acl", "cann", "cuda", "driver", "torch_npu", "hccl"})
"""Families of failures that no handler can repair."""
_ERRNO = re.compile(r"^\[Errno -?\d+\]\s*")
_NAMED = re.compile(r"'([^']+)'|\"([^\"]+)\"")
_RAISES = re.compile(r"raise\b")
LONG_ENOUGH = 5
"""Characters. Shorter texts occur in many messages."""


def without_handled(chain: Chain, hits: Sequence[Hit], lines: Sequence[Line]) -> Chain:
    """Remove leading exceptions that were handled: they are not the reason of a later, unrelated failure."""
    begins, is_argued = 0, False
    ends = None
    for place, later in enumerate(chain.raised):
        before = chain.raised[begins:place]
        if not later.during or not before or any(retells(later, one) for one in before):
            continue
        if clears_away(later):
            ends = place
            break
        if _follows(later):
            continue
        known = [hit for hit in hits if before[0].last <= hit.line < later.first and hit.signature.strength >= 20]
        if (
            any(hit.signature.role != CAUSE or hit.signature.family in _DEVICE for hit in known)
            or any(one.collective for one in before)
            or any(find_peer_lines(lines[before[0].last : later.first]))
        ):
            continue
        if any(hit.signature.family == "memory" for hit in known):  # of a batch that may be retried, or of all
            ends, is_argued = place, True
            break
        if translates(later, before[0]):
            is_argued = is_argued or bool(known)
            continue
        begins, is_argued = place, not all(map(only_asked, before))
    return replace(chain, begins=begins, ends=ends, is_argued=is_argued)


def _follows(later: Raised) -> bool:
    """Return whether it is of a kind that any failure causes."""
    return later.short_type in _ENDS or later.collective or suffered_wait(later.text) is not None


def retells(later: Raised, earlier: Raised) -> bool:
    """Return whether the later message contains the earlier type, message, or a name in that message."""
    message = _ERRNO.sub("", earlier.message)
    words = [
        earlier.short_type,
        message.partition(": '")[0],
        message,
        *(one for found in _NAMED.findall(message) for one in found),
    ]
    return points_elsewhere(later.text) or any(len(word) >= LONG_ENOUGH and word in later.message for word in words)


def translates(later: Raised, earlier: Raised) -> bool:
    """Return whether a handler replaced the earlier exception, caught in the same function, by the later one."""
    return _RAISES.match(later.statement) is not None and later.raised_in == earlier.caught_in


def clears_away(later: Raised) -> bool:
    """Return whether it failed while closing a resource, as a consequence of an earlier failure."""
    return _CLEARS.fullmatch(later.raised_in[1]) is not None


def only_asked(earlier: Raised) -> bool:
    """Return whether programs expect its type, so that it cannot be the reason."""
    return earlier.short_type in _ASKS
