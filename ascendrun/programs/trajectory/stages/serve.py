"""HTTP service of the classifier: POST /predict and GET /health, on loopback by default."""

from __future__ import annotations

import json
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable

from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory.api import FAULTS_OF_INPUT, Classifier
from ascendrun.programs.trajectory.data import Options
from ascendrun.programs.trajectory.store import load_vote
from ascendrun.text import Text

MOST_BYTES = 4 * 2**20
MOST_TRACKS = 256
INPUT_KEYS = ("text", "texts", "points", "tracks")
SILENCE_S = 30.0
ANSWER_S = 30.0
"""Seconds after the stop signal within which pending requests must complete."""
POLL_S = 0.2


class RequestRefusedError(Exception):
    """A request is invalid; `status`: the HTTP status code."""

    def __init__(self, status: int, message: str | Text) -> None:
        super().__init__(message)
        self.status = status


def answer_request(classifier: Classifier, body: bytes) -> dict[str, Any]:
    """Reply to {"text"}, {"texts": […]}, {"points": […]} or {"tracks": [[…], …]}; optional: "probabilities": true."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(
            400, Text("program.body-not-json", "the body is not JSON: {error}", error=str(error))
        ) from None
    if not isinstance(asked, dict):
        raise RequestRefusedError(400, Text("program.body-not-object", "the body must be a JSON object"))
    keys = [key for key in INPUT_KEYS if key in asked]
    if len(keys) != 1:
        raise RequestRefusedError(
            400, Text("program.body-keys", "expected exactly one of {keys}", keys=list(INPUT_KEYS))
        )
    given, with_all = asked[keys[0]], bool(asked.get("probabilities", False))
    many: list[Any] = given if keys[0] in ("texts", "tracks") else [given]
    if not isinstance(many, list) or not 0 < len(many) <= MOST_TRACKS:
        raise RequestRefusedError(
            413 if isinstance(many, list) and many else 400,
            Text("program.body-tracks", "expected 1 to {most} tracks per request", most=MOST_TRACKS),
        )
    try:
        if keys[0].startswith("text"):
            reply = classifier.predict_batch([str(text) for text in many], return_probs=with_all)
        else:
            reply = [classifier.predict_track(points, return_probs=with_all) for points in many]
    except FAULTS_OF_INPUT as error:
        raise RequestRefusedError(422, str(error)) from None
    return reply[0] if keys[0] in ("text", "points") else {"predictions": reply}


def unknown_path() -> Text:
    return Text("program.unknown-path", "unknown path; expected GET /health or POST /predict")


class Service(ThreadingHTTPServer):
    """HTTP server that counts the requests in progress. An idle connection ends with the process."""

    daemon_threads = True
    request_queue_size = 128
    """Clients in a burst are queued, instead of retrying after a second."""

    def __init__(self, address: tuple[str, int], handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.waiting = 0
        self._changed = threading.Condition()

    @contextmanager
    def answering(self) -> Iterator[None]:
        with self._changed:
            self.waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self.waiting -= 1
                self._changed.notify_all()

    def wait_for_answers(self, limit_s: float) -> bool:
        """Wait until no request is in progress; false: some are after `limit_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.waiting == 0, limit_s)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnected; its traceback would fill the job's log."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def make_server(classifier: Classifier, host: str, port: int) -> Service:
    """Create a bound server that is not serving yet. Predictions run one at a time; /health does not wait for them."""
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENCE_S
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path != "/health":
                self.reply(404, {"error": str(unknown_path())})
                return
            self.reply(
                200,
                {
                    "status": "ok",
                    "classes": classifier.class_names,
                    "device": str(classifier.device),
                    "models": len(classifier.vote.members),
                    "waiting": server.waiting,
                },
            )

        def do_POST(self) -> None:
            if self.path != "/predict":
                self.close_connection = True
                self.reply(404, {"error": str(unknown_path())})
                return
            with server.answering():
                try:
                    body = self.body()
                    with turn:
                        reply = answer_request(classifier, body)
                    self.reply(200, reply)
                except RequestRefusedError as refused:
                    self.reply(refused.status, {"error": str(refused)})

        def body(self) -> bytes:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal():
                self.close_connection = True
                raise RequestRefusedError(411, Text("program.body-length", "Content-Length is missing"))
            if int(length) > MOST_BYTES:
                self.close_connection = True
                raise RequestRefusedError(
                    413,
                    Text(
                        "program.body-size",
                        "body of {length} bytes; the limit is {most} bytes",
                        length=length,
                        most=MOST_BYTES,
                    ),
                )
            return self.rfile.read(int(length))

        def reply(self, status: int, content: dict[str, Any]) -> None:
            raw = json.dumps(content).encode() + b"\n"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            self.close_connection = True
            self.reply(code, {"error": message or str(unknown_path())})

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: a busy endpoint would fill the job's log."""

    server = Service((host, port), Handler)
    return server


def serve_stage(options: Options, here: Runtime) -> None:
    """Serve until the stop signal. Every rank serves at --port plus its local rank, each with its own device."""
    classifier = Classifier.of(load_vote([Path(name) for name in options["model_path"]], here.accelerator), here.device)
    for _ in range(options["inference_warmup_steps"]):
        classifier.predict_batch(["POINT_END"])
    port = options["port"] + here.local_rank if options["port"] else 0
    try:
        server = make_server(classifier, options["host"], port)
    except OSError as error:
        raise InvalidDataError(
            "program.cannot-listen",
            "--host={host} --port={port}: {error}\n"
            "hint: choose another port (0: any free port), or an address of this machine",
            host=options["host"],
            port=port,
            error=error.strerror,
        ) from error
    address: tuple[str, int] = (str(server.server_address[0]), int(server.server_address[1]))
    print(
        Text(
            "program.serving",
            "serving on http://{host}:{port}: POST /predict, GET /health",
            host=address[0],
            port=address[1],
        ),
        flush=True,
    )
    here.record(event="serving", host=address[0], port=address[1])
    has_answered = serve_until(server, lambda: here.stop_requested)
    here.record(done=True)
    here.log(
        Text("program.served", "stop requested; no request is left")
        if has_answered
        else Text(
            "program.unanswered", "stop requested; requests without a reply after {s:.0f} s are dropped", s=ANSWER_S
        )
    )


def serve_until(server: Service, is_over: Callable[[], bool]) -> bool:
    """Serve until `is_over`, then complete pending requests; false: some were dropped."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": POLL_S}, daemon=True)
    thread.start()
    over = threading.Event()
    while not is_over():
        over.wait(POLL_S)
    server.shutdown()
    while select.select([server], [], [], 0)[0]:  # connected, and not accepted yet
        server.handle_request()
    over.wait(POLL_S)
    has_answered = server.wait_for_answers(ANSWER_S)
    server.server_close()
    thread.join()
    return has_answered
