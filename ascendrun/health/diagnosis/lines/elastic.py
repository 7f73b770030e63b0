"""Torch elastic's error file ($TORCHELASTIC_ERROR_FILE) as the lines of a traceback."""

from __future__ import annotations

import json
from typing import Any

from ascendrun.health.diagnosis.evidence import Line


def error_lines(text: str, file: str) -> tuple[Line, ...]:
    """The traceback that the file holds, its last line the exception; () when the file is torn or empty."""
    try:
        whole = json.loads(text, strict=False)
        said = whole["message"]
    except (ValueError, TypeError, KeyError):
        return ()
    extra = said.get("extraInfo", {}) if isinstance(said, dict) else whole.get("extraInfo", {})
    message = str(said.get("message", "")) if isinstance(said, dict) else str(said)
    stack = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
    at_s = _seconds(extra.get("timestamp")) if isinstance(extra, dict) else None
    lines = [line for line in stack.split("\n") if line.strip()]
    if message and not any(line.strip().startswith(message.split("\n")[0][:80]) for line in lines[-20:]):
        lines = [*(lines or ["Traceback (most recent call last):"]), *message.split("\n")]
    return tuple(Line(line, file, 0, at_s, "error") for line in lines)


def _seconds(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
