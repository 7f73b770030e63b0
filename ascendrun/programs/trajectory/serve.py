"""The classifier behind HTTP: POST /predict and GET /health, on loopback unless told otherwise."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

from ascendrun.programs.trainer.start import Runtime
from ascendrun.programs.trajectory.api import Classifier
from ascendrun.programs.trajectory.data import Options
from ascendrun.programs.trajectory.store import load_vote
from ascendrun.programs.trajectory.tracks import BadData

MOST_BYTES = 4 * 2**20
MOST_TRACKS = 256
SILENCE_S = 30.0
POLL_S = 0.2


class Refused(Exception):
    """What is wrong with a request; `status`: HTTP's number for it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def answer_request(classifier: Classifier, body: bytes) -> Dict[str, Any]:
    """{"text"}, {"texts": […]}, {"points": […]} or {"tracks": [[…], …]}, with "probabilities": true where wanted."""
    try:
        asked = json.loads(body)
    except ValueError as error:
        raise Refused(400, f"the body is no JSON: {error}") from None
    if not isinstance(asked, dict):
        raise Refused(400, "the body must be a JSON object")
    keys = [key for key in ("text", "texts", "points", "tracks") if key in asked]
    if len(keys) != 1:
        raise Refused(400, 'give one of "text", "texts", "points", "tracks"')
    given, with_all = asked[keys[0]], bool(asked.get("probabilities", False))
    many: List[Any] = given if keys[0] in ("texts", "tracks") else [given]
    if not isinstance(many, list) or not 0 < len(many) <= MOST_TRACKS:
        raise Refused(413 if isinstance(many, list) and many else 400, f"give 1 to {MOST_TRACKS} tracks at once")
    try:
        if keys[0].startswith("text"):
            said = classifier.predict_batch([str(text) for text in many], return_probs=with_all)
        else:
            said = [classifier.predict_track(points, return_probs=with_all) for points in many]
    except (BadData, ValueError, TypeError, AttributeError) as error:
        raise Refused(422, str(error)) from None
    return said[0] if keys[0] in ("text", "points") else {"predictions": said}


def make_server(classifier: Classifier, host: str, port: int) -> ThreadingHTTPServer:
    """Bound, not yet serving. One prediction at a time; requests wait for each other, /health does not."""
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENCE_S
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path != "/health":
                self.reply(404, {"error": "no such page; there are GET /health and POST /predict"})
                return
            self.reply(200, {"status": "ok", "classes": classifier.class_names, "device": str(classifier.device),
                             "models": len(classifier.vote.members)})

        def do_POST(self) -> None:
            if self.path != "/predict":
                self.close_connection = True
                self.reply(404, {"error": "no such page; there are GET /health and POST /predict"})
                return
            try:
                body = self.body()
                with turn:
                    said = answer_request(classifier, body)
                self.reply(200, said)
            except Refused as refused:
                self.reply(refused.status, {"error": str(refused)})

        def body(self) -> bytes:
            length = self.headers.get("Content-Length", "")
            if not length.isdigit():
                self.close_connection = True
                raise Refused(411, "Content-Length is missing")
            if int(length) > MOST_BYTES:
                self.close_connection = True
                raise Refused(413, f"a body of {length} bytes; at most {MOST_BYTES}")
            return self.rfile.read(int(length))

        def reply(self, status: int, content: Dict[str, Any]) -> None:
            raw = json.dumps(content).encode() + b"\n"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: Any) -> None:
            """Silent: a busy endpoint would fill the job's log."""

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    return server


def serve_stage(options: Options, here: Runtime) -> None:
    """Until the stop signal. Every rank serves at --port plus its local rank, each with a device of its own."""
    classifier = Classifier.of(load_vote([Path(name) for name in options["model"]], here.accelerator), here.device)
    for _ in range(options["warm_up"]):
        classifier.predict_batch(["POINT_END"])
    port = options["port"] + here.local_rank if options["port"] else 0
    server = make_server(classifier, options["host"], port)
    address: Tuple[str, int] = (str(server.server_address[0]), int(server.server_address[1]))
    print(f"serving on http://{address[0]}:{address[1]}: POST /predict, GET /health", flush=True)
    here.record(event="serving", host=address[0], port=address[1])
    serve_until(server, lambda: here.stop_asked)
    here.record(done=True)
    here.say("asked to stop; no request is left")


def serve_until(server: ThreadingHTTPServer, is_over: Callable[[], bool]) -> None:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": POLL_S}, daemon=True)
    thread.start()
    over = threading.Event()
    while not is_over():
        over.wait(POLL_S)
    server.shutdown()
    server.server_close()
    thread.join()
