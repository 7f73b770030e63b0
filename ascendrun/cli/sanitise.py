"""Sanitising of remote text: output of a rank, a node or a file must not control the terminal that shows it."""

from __future__ import annotations

import re

ESCAPE_SEQUENCE = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor moves
    "|\x1b[\\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)"  # OSC, DCS, SOS, PM, APC: titles, clipboard
    "|\x1b[ -/]*[0-NQ-WYZ\\\\`-~]"  # two characters and charset choices
)
HOSTILE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline; DEL; C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls
    "\u2028\u2029\ud800-\udfff]"  # invalid line ends; surrogates
)


def sanitise(text: str) -> str:
    """Remove complete escape sequences and show every other control as an escape such as \\x07 or \\u202e.

    Tab and newline stay.
    """
    if HOSTILE.search(text) is None:
        return text
    return HOSTILE.sub(_visible, ESCAPE_SEQUENCE.sub("", text))


def sanitise_line(text: str) -> str:
    """Sanitise for a table's cell: one line, no tab."""
    return sanitise(text).replace("\n", "\\n").replace("\t", " ")


def headline(text: str) -> str:
    """Return only the first line, as `sanitise_line`, and a mark if there are more."""
    first, _, rest = text.strip().partition("\n")
    return sanitise_line(first) + (" …" if rest else "")


def escape_json(text: str) -> str:
    """Escape JSON text: strings contain control characters only as \\u escapes."""
    return HOSTILE.sub(_json_escape, text)


def _json_escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return match.group() if code < 32 else f"\\u{code:04x}"  # below 32 occurs only between values


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
