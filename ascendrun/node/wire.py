"""Frames between head and agent: a length-framed JSON header and raw bytes behind it.

A frame is `!II` (header length, body length), the header as UTF-8 JSON (an object), the body. Three kinds:

    request   {"id": 7, "op": "ping", ...}            head to agent, one reply; any may have "beat_s"
    reply     {"re": 7, "ok": true, ...}              or {"re": 7, "ok": false, "error": {"code", "message", "hint"}}
    event     {"event": "beat", ...}                  agent to head, no request
"""

from __future__ import annotations

import json
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Union

    Bytes = Union[bytes, bytearray, memoryview]

PROTOCOL = 6
"""Version of the requests, replies and events between head and agent, sent in the agent's first event (`hello`).
Raise it when one of them changes: the head uses agents of its own version only."""
MAGIC = b"\nASCENDRUN-AGENT 1\n"
"""Printed once by the agent before its first frame: anything before it is output of a login shell."""

HEADER_LIMIT = 16 << 20
BODY_LIMIT = 4 << 20
BEAT_S = 2.0
"""The agent sends `beat` at least this often while it follows an attempt and has nothing else to send."""
MOST_BEAT_S, BEATS_PER_S = 5.0, 100
"""With more than BEATS_PER_S * BEAT_S hosts, beats are rarer, down to one in MOST_BEAT_S: so many arrive in a second.
Any request may have the interval from then on (`beat_s`). Three beats fit into the time after which silence counts."""
RESTING_BEAT_S = 25.0
"""The same without an attempt, when the agent rests: longer than HEAD_BEAT_S, so that replies to pings are enough. A
beat has whether the next one is that late (`rests`)."""
HEAD_BEAT_S = 20.0
"""The head sends `ping` when it has sent nothing else for so long."""
HEAD_SILENT_S = 75.0
"""Seconds without a byte from the head after which the agent ends: the network between them was cut, and neither sshd
nor the kernel of the node notices that for a quarter of an hour."""

READING = frozenset(
    """ping bye follow unfollow files checkpoints processes copy live stacks rank_process probe survey sample gather
    grep outputs read_output usage watch_head fence renew_head claim_head""".split()
)
"""Requests that start and change nothing of jobs: those of a head without its lease, or of one that was superseded."""

_LENGTHS = struct.Struct("!II")


def beat_interval_s(hosts: int) -> float:
    """Return the interval of beats of an agent that follows an attempt, with so many hosts."""
    return min(MOST_BEAT_S, max(BEAT_S, round(hosts / BEATS_PER_S, 1)))


class FrameError(ValueError):
    """The peer does not use this protocol: a length over the limit, or a header that is not a JSON object."""


def pack(header: dict[str, Any], body: Bytes = b"") -> bytes:
    """Return one frame as bytes. Raises FrameError when header or body is over its limit: split the body."""
    head = json.dumps(header, separators=(",", ":")).encode("utf-8")
    if len(head) > HEADER_LIMIT or len(body) > BODY_LIMIT:
        raise FrameError("frame too large: header %d, body %d bytes" % (len(head), len(body)))
    return _LENGTHS.pack(len(head), len(body)) + head + bytes(body)


class FrameReader:
    """Converts a byte stream, in chunks of any size, into (header, body) pairs."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: Bytes) -> list[tuple[dict[str, Any], bytes]]:
        """Return the frames completed by `data`, as a list of (dict, bytes). Raises FrameError on invalid data."""
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= _LENGTHS.size:
            head_len, body_len = _LENGTHS.unpack_from(self._buffer, start)
            if head_len > HEADER_LIMIT or body_len > BODY_LIMIT:
                raise FrameError("frame lengths %d and %d are over the limits" % (head_len, body_len))
            end = start + _LENGTHS.size + head_len + body_len
            if len(self._buffer) < end:
                break
            head_at = start + _LENGTHS.size
            frames.append((self._header(head_at, head_len), bytes(self._buffer[head_at + head_len : end])))
            start = end
        del self._buffer[:start]
        return frames

    def _header(self, at: int, length: int) -> dict[str, Any]:
        try:
            header = json.loads(self._buffer[at : at + length].decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise FrameError(f"frame header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise FrameError("frame header is not an object")
        return header
