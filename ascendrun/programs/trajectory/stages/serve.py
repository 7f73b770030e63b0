"""Use of a trained classifier: many tracks from a file on all ranks, lines on standard input, an HTTP service.

The service has POST /predict and GET /health, on loopback by default.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, TextIO

from ascendrun.programs.devices.accelerator import Precision, choose_precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.generation.requests import Reply, RequestRefusedError, read_json, refuse_unknown
from ascendrun.programs.generation.service import RankService
from ascendrun.programs.trainer.checkpoint import replacing
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory.api import FAULTS_OF_INPUT, Classifier
from ascendrun.programs.trajectory.data import Options, Record, as_records, encode_all, load_data, load_prepared
from ascendrun.programs.trajectory.grammars import summary_of_text
from ascendrun.programs.trajectory.points.tracks import Floats
from ascendrun.programs.trajectory.scores import score
from ascendrun.programs.trajectory.store import Vote, answer, check_vocabulary, load_vote, vote_on
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


def service_of(classifier: Classifier) -> RankService:
    facts = {
        "classes": classifier.class_names,
        "device": str(classifier.accelerator.device),
        "models": len(classifier.vote.members),
    }
    return RankService("/predict", partial(read_question, classifier), partial(answer_questions, classifier), facts)


def serve_stage(options: Options, here: Runtime) -> None:
    """Serve until the stop signal. Every rank serves at --port plus its local rank, each with its own device."""
    precision = choose_precision(options["dtype"], here.accelerator)
    vote = load_vote([Path(name) for name in options["model_path"]], here.accelerator, precision)
    classifier = Classifier.of(vote, here.accelerator, precision)
    here.log(precision.reason)
    classifier.warm_up(options["inference_warmup_steps"])
    service_of(classifier).serve(options, here)


def classify(options: Options, here: Runtime) -> None:
    """Predict every track of --prepared_dir or --data_path (- : lines on standard input); score known classes."""
    precision = choose_precision(options["dtype"], here.accelerator)
    vote = load_vote([Path(name) for name in options["model_path"]], here.accelerator, precision)
    if options["data_path"] == "-":
        classify_stream(vote, precision, options, here)
        return
    here.log(precision.reason)
    records = records_to_classify(options, vote)
    samples = encode_all(records, vote.members[0].vocabulary, {name: i for i, name in enumerate(vote.names)})
    check_vocabulary(vote, samples, here)
    warm = samples[: min(len(samples), options["global_batch_size"] * here.world_size)]
    for _ in range(options["inference_warmup_steps"]):
        vote_on(vote, warm, here, options)
    here.accelerator.synchronize()
    started_s = time.monotonic()
    probabilities = vote_on(vote, samples, here, options)
    seconds = time.monotonic() - started_s
    path = Path(options["output_dir"]).absolute() / "predictions.jsonl"
    if here.is_first:
        write_predictions(path, records, probabilities, vote.names, with_all=options["save_probabilities"])
    known = [i for i, sample in enumerate(samples) if sample.label >= 0]
    if known:
        scores = score([samples[i].label for i in known], probabilities[known].argmax(1).tolist(), vote.names)
        here.log(
            "program.known-tracks",
            "{count} tracks of known class: macro F1 {f1:.3f} accuracy {accuracy:.3f}",
            count=len(known),
            f1=scores.macro_f1,
            accuracy=scores.accuracy,
        )
    tokens = sum(map(len, samples))
    here.record(
        done=True,
        tracks=len(samples),
        duration_s=seconds,
        tracks_per_s=len(samples) / seconds,
        tokens_per_s=tokens / seconds,
    )
    here.log(
        "program.predict-speed",
        "{tracks:,} tracks in {seconds:.2f} s on {ranks:plural rank ranks} ({family}), after {warmup} "
        "warm-up passes: "
        "{rate:,.0f} tracks/s, {tokens:,.0f} tokens/s, {each:.2f} ms per track and device",
        tracks=len(samples),
        seconds=seconds,
        ranks=here.world_size,
        family=here.family,
        warmup=options["inference_warmup_steps"],
        rate=len(samples) / seconds,
        tokens=tokens / seconds,
        each=1e3 * seconds * here.world_size / len(samples),
    )
    here.log("program.predictions", "{count} predictions: {path}", count=len(records), path=path)


def records_to_classify(options: Options, vote: Vote) -> list[Record]:
    if options["prepared_dir"]:
        prepared = load_prepared(Path(options["prepared_dir"]))
        if prepared.facts["text"] != vote.members[0].text:
            raise InvalidDataError(
                "program.prepared-grammar",
                "{directory} has {found}, the model requires {expected}\n"
                "hint: prepare the data with the grammar of the model",
                directory=options["prepared_dir"],
                found=summary_of_text(prepared.facts["text"]),
                expected=summary_of_text(vote.members[0].text),
            )
        return prepared.records[options["eval_split"]]
    return as_records(load_data(options)[0], vote.members[0].text)


def write_predictions(
    path: Path, records: Sequence[Record], probabilities: Floats, names: Sequence[str], *, with_all: bool = True
) -> None:
    """Write one line per track: its class_name and confidence, and the truth if known."""
    with replacing(path) as fresh, open(fresh, "w", encoding="utf-8") as file:
        for record, row in zip(records, probabilities):
            line = {"track": record.id, "ship": record.ship, **answer(row, names, with_all=with_all)}
            if record.label is not None:
                line["truth"] = record.label
            file.write(json.dumps(line) + "\n")


def classify_stream(vote: Vote, precision: Precision, options: Options, here: Runtime) -> None:
    if here.world_size > 1:
        raise InvalidDataError(
            "program.stdin-ranks",
            "--data_path=- reads standard input and requires one rank\nhint: use a file for several devices",
        )
    lines = lines_until(lambda: here.stop_requested, sys.stdin.fileno())
    classifier = Classifier.of(vote, here.accelerator, precision)
    answer_lines(classifier, lines, sys.stdout, with_all=options["save_probabilities"])
    here.record(done=True)


def lines_until(is_over: Callable[[], bool], source: int) -> Iterator[bytes]:
    """Yield each line of a file descriptor when it arrives, until its end or a signal after which `is_over`.

    A plain read would not end: Python resumes it after every signal.
    """
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    before = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    rest = b""
    try:
        while not is_over():
            if source not in select.select([source, woken], [], [])[0]:
                os.read(woken, 1)
                continue
            piece = os.read(source, 2**16)
            *lines, rest = (rest + piece).split(b"\n")
            if not piece and rest:
                lines.append(rest)
            for line in lines:
                if is_over():
                    return
                yield line
            if not piece:
                return
    finally:
        signal.set_wakeup_fd(before)
        os.close(woken)
        os.close(wakes)


def answer_lines(classifier: Classifier, lines: Iterable[bytes | str], out: TextIO, *, with_all: bool) -> None:
    """Write each reply immediately: a client may wait for it before it sends the next line."""
    for line in lines:
        out.write(json.dumps(answer_line(classifier, line, with_all)) + "\n")
        out.flush()


def answer_line(classifier: Classifier, line: bytes | str, with_all: bool) -> dict[str, Any]:
    """Reply to a line. An invalid line gets {"error"} and does not end the stream."""
    try:
        asked = json.loads(line)
        if not isinstance(asked, dict) or not ({"text", "points"} & set(asked)):
            raise InvalidDataError("program.line-form", 'expected {{"text": "…"}} or {{"points": [{{…}}, …]}}')
        reply = (
            classifier.predict_single(str(asked["text"]), return_probs=with_all)
            if "text" in asked
            else classifier.predict_track(asked["points"], return_probs=with_all)
        )
    except FAULTS_OF_INPUT as error:
        return {"error": str(error)}
    return {**({"id": asked["id"]} if "id" in asked else {}), **reply}
