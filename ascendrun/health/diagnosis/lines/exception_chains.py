"""Exceptions that came while another was handled: whether the first one is the reason, or was only the occasion."""

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
"""With these a program tests whether something exists, and has an alternative if it does not."""
_CLEARS = re.compile(r"__a?exit__|__del__|_*(?:close|cleanup|clean_up|shutdown|finalize|destroy|teardown|tear_down)\w*")
_ENDS = frozenset({"KeyboardInterrupt", "SystemExit", "SignalException", "GracefulExit"})
_DEVICE = frozenset({"acl", "cann", "cuda", "driver", "torch_npu", "hccl"})
"""Families of failures that no handler can repair."""
_ERRNO = re.compile(r"^\[Errno -?\d+\]\s*")
_NAMED = re.compile(r"'([^']+)'|\"([^\"]+)\"")
_RAISES = re.compile(r"raise\b")
LONG_ENOUGH = 5
"""Shorter texts occur in many messages."""


def without_handled(chain: Chain, hits: Sequence[Hit], lines: Sequence[Line]) -> Chain:
    """From the first on that led to the end: what was handled is no reason of what failed later for another one."""
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
        if any(hit.signature.family == "memory" for hit in known):  # of a batch that may be tried again, or of all
            ends, is_argued = place, True
            break
        if translates(later, before[0]):
            is_argued = is_argued or bool(known)
            continue
        begins, is_argued = place, not all(map(only_asked, before))
    return replace(chain, begins=begins, ends=ends, is_argued=is_argued)


def _follows(later: Raised) -> bool:
    """It is of the kind that any failure brings about."""
    return later.short_type in _ENDS or later.collective or suffered_wait(later.text) is not None


def retells(later: Raised, earlier: Raised) -> bool:
    """The later message contains the earlier one: its type, its message, or what that names."""
    message = _ERRNO.sub("", earlier.message)
    words = [
        earlier.short_type,
        message.partition(": '")[0],
        message,
        *(one for found in _NAMED.findall(message) for one in found),
    ]
    return points_elsewhere(later.text) or any(len(word) >= LONG_ENOUGH and word in later.message for word in words)


def translates(later: Raised, earlier: Raised) -> bool:
    """A handler's own statement put it in the place of the earlier one, which was caught in the same function."""
    return _RAISES.match(later.statement) is not None and later.raised_in == earlier.caught_in


def clears_away(later: Raised) -> bool:
    """What fails while a thing is closed fails because of what happened before."""
    return _CLEARS.fullmatch(later.raised_in[1]) is not None


def only_asked(earlier: Raised) -> bool:
    """Its type is one that programs expect, so it cannot be the reason."""
    return earlier.short_type in _ASKS
