"""The stage `serve` of a program whose ranks serve apart, each at a port with its own device, until the stop signal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable

from ascendrun.programs.generation.requests import Read, Reply
from ascendrun.programs.generation.server import Server, ending, not_listening
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import Text


@dataclass(frozen=True)
class RankService:
    """What each rank serves. `read`: of the bodies of POST `path`; `answer`: as of Server.serve_batches; `facts`: for
    GET /health."""

    path: str
    read: Read
    answer: Callable[[list[Any]], list[Reply]]
    facts: Mapping[str, Any]

    def listen(self, host: str, port: int) -> Server:
        """Create a server that listens and does not serve yet. Raises OSError."""

        def health() -> dict[str, Any]:
            return {"status": "ok", **self.facts, "waiting": server.queue.waiting - 1}  # without this one

        server = Server(host, port, pages={"/health": health}, routes={self.path: self.read})
        return server

    def serve(self, options: Mapping[str, Any], here: Runtime) -> None:
        """Serve at `host` and `port` of the options plus the local rank."""
        host, port = options["host"], options["port"] + here.local_rank if options["port"] else 0
        try:
            server = self.listen(host, port)
        except OSError as error:
            raise not_listening(host, port, error.strerror) from error
        host, port = server.address
        serving = "serving on http://{host}:{port}: {paths}"
        print(Text("program.serving", serving, host=host, port=port, paths=server.paths), flush=True)
        here.record(event="serving", host=host, port=port)
        has_answered = server.serve_batches(lambda: here.stop_requested, self.answer)
        here.record(done=True)
        here.log(ending(server, has_answered))
