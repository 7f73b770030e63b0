"""HTTP service of the classifier: POST /predict and GET /health, on loopback by default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendrun.programs.devices.accelerator import choose_precision
from ascendrun.programs.generation.requests import Limits, Reply, RequestRefusedError, read_json, refuse_unknown
from ascendrun.programs.generation.server import Server
from ascendrun.programs.generation.service import serve_rank
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory.api import FAULTS_OF_INPUT, Classifier
from ascendrun.programs.trajectory.data import Options
from ascendrun.programs.trajectory.store import load_vote
from ascendrun.programs.trajectory.tokens import Encoded
from ascendrun.text import Text

MOST_TRACKS = 256
INPUT_KEYS = ("text", "texts", "points", "tracks")


@dataclass(frozen=True)
class Question:
    """The tracks of a request, as tokens and numbers. `is_list`: the reply is a list."""

    rows: list[Encoded]
    is_list: bool
    with_all: bool


def read_question(classifier: Classifier, body: bytes) -> Question:
    """Read {"text"}, {"texts": […]}, {"points": […]} or {"tracks": [[…], …]}; optional: "probabilities": true."""
    asked = read_json(body)
    refuse_unknown(asked, (*INPUT_KEYS, "probabilities"))
    keys = [key for key in INPUT_KEYS if key in asked]
    if len(keys) != 1:
        raise RequestRefusedError(
            400, Text("program.body-keys", "expected exactly one of {keys}", keys=list(INPUT_KEYS))
        )
    given, is_list = asked[keys[0]], keys[0] in ("texts", "tracks")
    many: list[Any] = given if is_list else [given]
    if not isinstance(many, list) or not 0 < len(many) <= MOST_TRACKS:
        raise RequestRefusedError(
            413 if isinstance(many, list) and many else 400,
            Text("program.body-tracks", "expected 1 to {most} tracks per request", most=MOST_TRACKS),
        )
    of_text = keys[0].startswith("text")
    try:
        words = [classifier.words_of_text(str(each)) if of_text else classifier.words_of(each) for each in many]
        return Question(classifier.rows_of(words), is_list, bool(asked.get("probabilities", False)))
    except FAULTS_OF_INPUT as error:
        raise RequestRefusedError(422, str(error)) from None


def answer_questions(classifier: Classifier, questions: list[Question]) -> list[Reply]:
    """Classify the tracks of several requests together."""
    answers = iter(classifier.classify([row for each in questions for row in each.rows]))
    replies: list[Reply] = []
    for question in questions:
        own = [classifier.reply_of(row, next(answers), return_probs=question.with_all) for row in question.rows]
        replies.append({"predictions": own} if question.is_list else own[0])
    return replies


def make_server(classifier: Classifier, host: str, port: int, limits: Limits | None = None) -> Server:
    """Create a server that listens and does not serve yet. Raises OSError."""

    def health() -> dict[str, Any]:
        return {
            "status": "ok",
            "classes": classifier.class_names,
            "device": str(classifier.accelerator.device),
            "models": len(classifier.vote.members),
            "waiting": server.queue.waiting - 1,  # without this one
        }

    def read(body: bytes) -> Question:
        return read_question(classifier, body)

    server = Server(host, port, pages={"/health": health}, routes={"/predict": read}, limits=limits)
    return server


def serve_stage(options: Options, here: Runtime) -> None:
    """Serve until the stop signal. Every rank serves at --port plus its local rank, each with its own device."""
    precision = choose_precision(options["dtype"], here.accelerator)
    vote = load_vote([Path(name) for name in options["model_path"]], here.accelerator, precision)
    classifier = Classifier.of(vote, here.accelerator, precision)
    here.log(precision.reason)
    classifier.warm_up(options["inference_warmup_steps"])
    serve_rank(
        options,
        here,
        lambda host, port: make_server(classifier, host, port),
        lambda questions: answer_questions(classifier, questions),
    )
