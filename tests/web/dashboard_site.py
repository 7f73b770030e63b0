"""A dashboard over a state directory, served on this machine from a thread, and requests to it over HTTP."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import uvicorn

from ascendrun.cli.dashboard.app import make_app
from ascendrun.cli.dashboard.gate import Access, Gate
from ascendrun.cli.listening import listen
from ascendrun.cluster import Cluster
from ascendrun.core.settings import Settings

TOKEN = "token-of-the-test"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: str


@dataclass(frozen=True)
class Site:
    """`url`: with the token, as it is printed."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/?token={TOKEN}"

    def get(
        self,
        path: str = "/",
        headers: Mapping[str, str] = {},
        *,
        method: str = "GET",
        form: Mapping[str, str] = {},
        is_known: bool = True,
    ) -> Reply:
        """The reply to one request. `is_known`: with the cookie."""
        cookie = {"Cookie": f"ascendrun-{self.port}={TOKEN}"} if is_known else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body=urlencode(form) or None, headers={**cookie, **headers})
            reply = connection.getresponse()
            return Reply(reply.status, dict(reply.headers.items()), reply.read().decode())
        finally:
            connection.close()


@contextmanager
def serve(state_dir: Path, *, lang: str | None = None, actions: bool = False) -> Iterator[Site]:
    listening = listen("127.0.0.1", 0, instead="--port 0")
    port = listening.getsockname()[1]
    cluster, token = Cluster(Settings(state_dir=state_dir)), TOKEN if actions else None
    app = Gate(
        make_app(cluster, is_ending=lambda: server.should_exit, actions_token=token),
        Access(TOKEN, port, lang=lang, allows_actions=actions),
    )
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    others = set(threading.enumerate())
    thread.start()
    try:
        yield Site(port)
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
        for worker in set(threading.enumerate()) - others:  # one may ask a controller, and start it after the test
            worker.join(60)
            assert not worker.is_alive(), worker
