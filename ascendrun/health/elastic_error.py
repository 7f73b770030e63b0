"""The error file that torch elastic lets a rank write ($TORCHELASTIC_ERROR_FILE)."""

from __future__ import annotations

import json

from ascendrun.health.diagnosis.evidence import Line


def error_lines(text: str, file: str) -> tuple[Line, ...]:
    """Return an error file as a traceback's lines, the exception last.

    () if the file is truncated or empty.
    """
    try:
        whole = json.loads(text, strict=False)
        content = whole["message"]
    except (ValueError, TypeError, KeyError):
        return ()
    content = content if isinstance(content, dict) else {**whole, "message": content}
    extra, message = content.get("extraInfo"), str(content.get("message", ""))
    extra = extra if isinstance(extra, dict) else {}
    stack, stamp = str(extra.get("py_callstack", "")), str(extra.get("timestamp"))
    at_s = float(stamp) if stamp.replace(".", "", 1).isdecimal() else None
    lines = [line for line in stack.split("\n") if line.strip()]
    if message and not any(line.strip().startswith(message.split("\n")[0][:80]) for line in lines[-20:]):
        lines = [*(lines or ["Traceback (most recent call last):"]), *message.split("\n")]
    return tuple(Line(line, file, 0, at_s, "error") for line in lines)
