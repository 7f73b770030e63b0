"""The stage `serve` of a program whose ranks serve apart, each at a port with its own device, until the stop signal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

from ascendrun.programs.generation.requests import Reply
from ascendrun.programs.generation.server import Server, ending, not_listening
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import Text


def serve_rank(
    options: Mapping[str, Any],
    here: Runtime,
    make_server: Callable[[str, int], Server],
    answer: Callable[[list[Any]], list[Reply]],
) -> None:
    """Serve at `host` and `port` of the options plus the local rank. `answer`: as of Server.serve_batches."""
    host, port = options["host"], options["port"] + here.local_rank if options["port"] else 0
    try:
        server = make_server(host, port)
    except OSError as error:
        raise not_listening(host, port, error.strerror) from error
    host, port = server.address
    print(
        Text("program.serving", "serving on http://{host}:{port}: {paths}", host=host, port=port, paths=server.paths),
        flush=True,
    )
    here.record(event="serving", host=host, port=port)
    has_answered = server.serve_batches(lambda: here.stop_requested, answer)
    here.record(done=True)
    here.log(ending(server, has_answered))
