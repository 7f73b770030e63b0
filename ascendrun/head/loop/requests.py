"""Serve one request of the control socket; a failure is its reply."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.errors import AscendrunError, ConflictError
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.messages import Request
from ascendrun.head.state.store import LostLeaseError
from ascendrun.text import Text

Handlers = Mapping[type[Request[Any]], Callable[[Any, Answer], None]]
"""What serves each kind of request."""


def handle_request(handlers: Handlers, op: str, header: Mapping[str, Any], answer: Answer, *, log: Path) -> None:
    """Call the handler of a request, and reply with its error if it fails: the controller must go on.

    Raises LostLeaseError only. `log`: the file with the traceback of an internal error.
    """
    kind = next((kind for kind in handlers if kind.OP == op), None)
    if kind is None:
        error = ConflictError(
            Text("control.unknown-request", "the controller does not support {op}", op=op),
            hint=Text("control.unknown-request.hint", "run `ascendrun controller stop`"),
        )
        answer(error, b"", True)
        return
    try:
        handlers[kind](kind.from_header(header), answer)
    except LostLeaseError:
        raise
    except AscendrunError as error:
        answer(error, b"", True)
    except Exception as error:  # a fault of ours: the log keeps the trace, who asked is told
        traceback.print_exc()
        failure = AscendrunError(
            Text(
                "control.internal",
                "internal error of the controller: {error}",
                error=f"{type(error).__name__}: {error}",
            ),
            hint=Text("control.internal.hint", "report this with the traceback in {log}", log=str(log)),
        )
        answer(failure, b"", True)
