"""A wish that came over the socket, done and answered whatever becomes of it."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.head.protocol.control_socket import Answer, error_answer
from ascendrun.head.state.store import LostLeaseError

Serve = Callable[[Mapping[str, Any], Answer], None]


def serve_wish(table: Mapping[str, Serve], op: str, header: Mapping[str, Any], answer: Answer, *, log: Path) -> None:
    """Answers with what went wrong where something did; one bad wish must not end the keeper of all jobs.

    Raises LostLeaseError alone. `log`: where a trace of our own fault can be found.
    """
    serve = table.get(op)
    if serve is None:
        _refuse(
            answer,
            "unknown-op",
            f"the controller knows no {op!r}",
            "it may be of another version: `ascendrun controller stop`",
        )
        return
    try:
        serve(header, answer)
    except LostLeaseError:
        raise
    except AscendrunError as error:
        answer(error_answer(error), b"", True)
    except Exception as error:  # a fault of ours: the log keeps the trace, who asked is told
        traceback.print_exc()
        _refuse(answer, "internal", f"{type(error).__name__}: {error}", f"the trace is in {log}")


def _refuse(answer: Answer, code: str, message: str, hint: str) -> None:
    answer({"ok": False, "error": {"code": code, "message": message, "hint": hint}}, b"", True)
