"""Stages of a trained classifier: its evaluation, many tracks of a file, lines on standard input, an HTTP service.

One classifier, or a vote of several, is evaluated on ships that none was trained on. The service has POST /predict and
GET /health, on loopback by default.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, TextIO

import numpy as np

from ascendrun.programs.devices.accelerator import Precision, choose_precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.generation.requests import Reply, RequestRefusedError, read_json, refuse_unknown
from ascendrun.programs.generation.server import RankService
from ascendrun.programs.trainer.checkpoint import replacing
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory import data, store
from ascendrun.programs.trajectory import scores as scoring
from ascendrun.programs.trajectory.api import FAULTS_OF_INPUT, Classifier
from ascendrun.programs.trajectory.grammars import summary_of_text
from ascendrun.programs.trajectory.judge import Judged, judge
from ascendrun.programs.trajectory.points.tracks import Floats
from ascendrun.programs.trajectory.stages.common import introduce, log_cleaning
from ascendrun.programs.trajectory.tokens import Encoded
from ascendrun.text import Text, from_json, listed
from ascendrun.text.format import pad_left

BASELINES_S = 120.0
"""Seconds that each baseline may use."""


def evaluate_stage(options: data.Options, here: Runtime) -> None:
    """Fit the calibration on the validation ships, report on --eval_split, save the classifier."""
    precision = choose_precision(options["dtype"], here.accelerator)
    paths = [Path(name) for name in options["model_path"]]
    vote = store.load_vote(paths, here.accelerator, precision)
    samples = data.make_samples(options, text=vote.members[0].text)
    here.check_same(samples.digest)
    introduce(options, samples, here)
    here.log(precision.reason)
    check_grammar(vote, samples)
    split, losses = options["eval_split"], {}
    check_classes(vote, samples, ("val", split))
    others = [Path(name) for name in options["compare_with"]]
    own, other = as_read_by(vote, samples), None
    if others and not store.is_skipped(others[0]):
        other = store.load_vote(others, here.accelerator, precision)
        store.agreeing(store.Vote((vote.members[0], other.members[0])))
        theirs = as_read_by(other, samples)
        if options["pretraining"] == "auto":
            losses = {
                name: scoring.measure(store.vote_on(of, read.encoded["val"], here, options), read.labels("val")).nll
                for name, of, read in (("model_path", vote, own), ("compare_with", other, theirs))
            }
            if losses["compare_with"] < losses["model_path"]:
                paths, vote, other, own, theirs = others, other, vote, theirs, own
    if losses:
        here.log(listed("program.better-model", own=losses["model_path"], other=losses["compare_with"], kept=paths))
    vote, validation = adjusted(vote, options, own, here)
    store.check_vocabulary(vote, own.encoded[split], here)
    judged = judge(
        lambda rows: store.vote_on(vote, rows, here, options), own, split, here, options, seconds=BASELINES_S
    )
    if other is not None:
        judged.methods["other"] = store.vote_on(other, theirs.encoded[split], here, options)
    each = store.each_member_on(vote, own.encoded[split], here, options)
    report_on(judged, vote, samples, options, here, paths=paths, each=each, validation={**validation, "nll": losses})


def check_grammar(vote: store.Vote, samples: data.Samples) -> None:
    """Raise InvalidDataError if the model reads another text than that of the data."""
    if samples.text != vote.members[0].text:
        raise InvalidDataError(
            listed(
                "program.model-grammar", model=summary_of_text(vote.members[0].text), data=summary_of_text(samples.text)
            )
        )


def check_classes(vote: store.Vote, samples: data.Samples, splits: Sequence[str]) -> None:
    """Raise InvalidDataError if a split has classes that the model does not have."""
    for split in splits:
        names = classes_beyond(vote, samples.records[split])
        if names:
            raise InvalidDataError(listed("program.unknown-classes", split=split, names=names, known=vote.names))


def classes_beyond(vote: store.Vote, records: Sequence[data.Record]) -> list[str]:
    """Return the classes of the records that the model does not have."""
    return sorted({record.label for record in records if record.label is not None} - set(vote.names))


def warn_of_classes(vote: store.Vote, records: Sequence[data.Record], here: Runtime) -> None:
    """Log how many records have a class that the model does not have."""
    beyond = classes_beyond(vote, records)
    if beyond:
        count = sum(record.label in beyond for record in records)
        unscored = listed("program.classes-not-scored", count=count, names=beyond, known=vote.names)
        here.log(listed("program.warning", text=unscored))


def as_read_by(vote: store.Vote, samples: data.Samples) -> data.Samples:
    return samples.as_read_by(vote.members[0].vocabulary, vote.names)


def report_on(
    judged: Judged,
    vote: store.Vote,
    samples: data.Samples,
    options: data.Options,
    here: Runtime,
    *,
    paths: Sequence[Path],
    each: Sequence[Floats],
    validation: dict[str, Any],
) -> None:
    """Record the scores, save the vote on every node and the report on rank 0's. `each`: what each member predicts."""
    split, truth, probabilities = options["eval_split"], judged.truth, judged.methods[scoring.MODEL]
    scores, calibration = judged.scores(), scoring.measure(probabilities, truth)
    here.record(
        done=True,
        **{f"{split}_macro_f1": scores.macro_f1, f"{split}_accuracy": scores.accuracy, f"{split}_ece": calibration.ece},
    )
    output = Path(options["output_dir"]).absolute()
    if here.local_rank == 0:
        store.save_vote(paths, temperature=vote.temperature, prior_shift=vote.prior_shift, folder=output)
    if not here.is_first:
        return
    report = {
        "calibration": asdict(calibration),
        "members": {str(path): in_short(one, truth, vote.names) for path, one in zip(paths, each)},
        "validation": {name: value for name, value in validation.items() if value},
        "adjustment": {"temperature": vote.temperature, "prior_shift": vote.prior_shift, "chosen_on": "val"},
        "data": {"digest": samples.digest, "is_leaky": samples.is_leaky, "segments": samples.facts["segments"]},
        "options": dict(options),
    }
    last = calibration_lines(calibration)
    text = judged.write(output, split, report, seed=options["seed"], is_leaky=samples.is_leaky, last=last)
    judged.save(output)
    write_predictions(output / "predictions.jsonl", samples.records[split], probabilities, vote.names)
    here.log(draw(output, scores, calibration))
    here.log(
        listed(
            "program.evaluated",
            split=split,
            models=len(vote.members),
            shift=vote.prior_shift,
            temperature=vote.temperature,
            text=f"{text}\n\n{scoring.as_confusion(scores)}",
            output=output,
        )
    )


def adjusted(
    vote: store.Vote, options: data.Options, samples: data.Samples, here: Runtime
) -> tuple[store.Vote, dict[str, Any]]:
    """Return the vote with its adjustment, and the scores of vote and members on the validation ships."""
    each = store.each_member_on(vote, samples.encoded["val"], here, options)
    truth, priors = samples.labels("val"), vote.members[0].priors
    if options["calibration"] != "none":
        share = options["macro_f1_weight"] if options["calibration"] == "prior" else -1.0
        plain = store.put_together(replace(vote, temperature=1.0, prior_shift=0.0), each)
        ships = [record.ship for record in samples.records["val"]]
        chosen = scoring.choose_adjustment(plain, truth, ships, priors, vote.names, macro_share=share)
        vote = replace(vote, temperature=chosen.temperature, prior_shift=chosen.prior_shift)
    return vote, {
        "vote": in_short(store.put_together(vote, each), truth, vote.names),
        "members": [in_short(one, truth, vote.names) for one in each],
    }


def in_short(probabilities: Floats, truth: Sequence[int], names: Sequence[str]) -> dict[str, float]:
    scores = scoring.score(truth, probabilities.argmax(1).tolist(), names)
    return {"macro_f1": round(scores.macro_f1, 4), "accuracy": round(scores.accuracy, 4)}


def calibration_lines(calibration: scoring.Calibration) -> list[str]:
    heads = ((listed("program.confidence"), 10), (scoring.ACCURACY, 8), (listed("program.track-count"), 6))
    summary = listed("program.calibration", ece=calibration.ece, nll=calibration.nll, brier=calibration.brier)
    rows = [f"{each.confidence:10.3f}  {each.accuracy:8.3f}  {each.count:6d}" for each in calibration.bins]
    return ["", str(summary), "  ".join(pad_left(text, room) for text, room in heads), *rows]


def draw(output: Path, scores: scoring.Scores, calibration: scoring.Calibration) -> Text:
    """Write report.png if matplotlib is installed; return the log message."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its messages about fonts do not belong in a job's log
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return listed("program.no-matplotlib")
    figure = Figure(figsize=(11, 5), layout="constrained")
    matrix, reliability = figure.subplots(1, 2)
    names = [row.name for row in scores.classes]
    counts = np.asarray(scores.confusion, dtype=float)
    matrix.imshow(counts / np.maximum(counts.sum(1, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1)
    matrix.set_xticks(range(len(names)), names, rotation=45, ha="right")
    matrix.set_yticks(range(len(names)), names)
    matrix.set_xlabel("prediction")
    matrix.set_ylabel("truth")
    for place, count in np.ndenumerate(counts):
        matrix.text(place[1], place[0], int(count), ha="center", va="center", fontsize=8)
    matrix.set_title(f"macro F1 {scores.macro_f1:.3f}, accuracy {scores.accuracy:.3f}")
    reliability.plot([0, 1], [0, 1], color="grey", linewidth=1)
    reliability.plot([each.confidence for each in calibration.bins], [each.accuracy for each in calibration.bins], "o-")
    reliability.set_xlabel("confidence")
    reliability.set_ylabel("accuracy")
    reliability.set_title(f"ECE {calibration.ece:.3f}")
    with replacing(output / "report.png") as fresh:
        figure.savefig(fresh, dpi=120, format="png")
    return listed("program.plot", path=output / "report.png")


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
        raise RequestRefusedError(400, listed("program.body-keys", keys=list(INPUT_KEYS)))
    given, is_list = asked[keys[0]], keys[0] in ("texts", "tracks")
    many: list[Any] = given if is_list else [given]
    if not isinstance(many, list) or not 0 < len(many) <= MOST_TRACKS:
        raise RequestRefusedError(
            413 if isinstance(many, list) and many else 400, listed("program.body-tracks", most=MOST_TRACKS)
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


def serve_stage(options: data.Options, here: Runtime) -> None:
    """Serve until the stop signal. Every rank serves at --port plus its local rank, each with its own device."""
    precision = choose_precision(options["dtype"], here.accelerator)
    vote = store.load_vote([Path(name) for name in options["model_path"]], here.accelerator, precision)
    classifier = Classifier.of(vote, here.accelerator, precision)
    here.log(precision.reason)
    classifier.warm_up(options["inference_warmup_steps"])
    service_of(classifier).serve(options, here)


def classify(options: data.Options, here: Runtime) -> None:
    """Predict every track of --prepared_dir or --data_path (- : lines on standard input); score known classes."""
    precision = choose_precision(options["dtype"], here.accelerator)
    vote = store.load_vote([Path(name) for name in options["model_path"]], here.accelerator, precision)
    if options["data_path"] == "-":
        classify_stream(vote, precision, options, here)
        return
    here.log(precision.reason)
    dropped: dict[str, Text] = {}
    if options["prepared_dir"]:
        prepared = data.load_prepared(Path(options["prepared_dir"]))
        check_grammar(vote, prepared)
        records = prepared.records[options["eval_split"]]
    else:
        pieces, cleaning = data.load_data(options)
        log_cleaning(cleaning, here)
        dropped = from_json(cleaning.get("dropped", {}))
        records = data.as_records(pieces, vote.members[0].text)
    samples = data.encode_all(records, vote.members[0].vocabulary, {name: i for i, name in enumerate(vote.names)})
    store.check_vocabulary(vote, samples, here)
    warn_of_classes(vote, records, here)
    warm = samples[: min(len(samples), options["global_batch_size"] * here.world_size)]
    for _ in range(options["inference_warmup_steps"]):
        store.vote_on(vote, warm, here, options)
    here.accelerator.synchronize()
    started_s = time.monotonic()
    probabilities = store.vote_on(vote, samples, here, options)
    seconds = time.monotonic() - started_s
    path = Path(options["output_dir"]).absolute() / "predictions.jsonl"
    if here.is_first:
        write_predictions(
            path, records, probabilities, vote.names, with_all=options["save_probabilities"], dropped=dropped
        )
    known = [i for i, sample in enumerate(samples) if sample.label >= 0]
    if known:
        scores = scoring.score([samples[i].label for i in known], probabilities[known].argmax(1).tolist(), vote.names)
        here.log(listed("program.known-tracks", count=len(known), f1=scores.macro_f1, accuracy=scores.accuracy))
    tokens = sum(map(len, samples))
    here.record(
        done=True,
        tracks=len(samples),
        duration_s=seconds,
        tracks_per_s=len(samples) / seconds,
        tokens_per_s=tokens / seconds,
    )
    here.log(
        listed(
            "program.predict-speed",
            tracks=len(samples),
            seconds=seconds,
            ranks=here.world_size,
            family=here.family,
            warmup=options["inference_warmup_steps"],
            rate=len(samples) / seconds,
            tokens=tokens / seconds,
            each=1e3 * seconds * here.world_size / len(samples),
        )
    )
    here.log(listed("program.predictions", count=len(records), path=path))


def write_predictions(
    path: Path,
    records: Sequence[data.Record],
    probabilities: Floats,
    names: Sequence[str],
    *,
    with_all: bool = True,
    dropped: Mapping[str, Text] | None = None,
) -> None:
    """Write one line per track: its class_name and confidence, and the truth if known; then one per ship that has no
    track, with the reason as `error`."""
    with replacing(path) as fresh, open(fresh, "w", encoding="utf-8") as file:
        for record, row in zip(records, probabilities):
            line = {"track": record.id, "ship": record.ship, **store.answer(row, names, with_all=with_all)}
            if record.label is not None:
                line["truth"] = record.label
            file.write(json.dumps(line) + "\n")
        for ship, reason in (dropped or {}).items():
            file.write(json.dumps({"ship": ship, "class_name": None, "error": str(reason)}) + "\n")


def classify_stream(vote: store.Vote, precision: Precision, options: data.Options, here: Runtime) -> None:
    if here.world_size > 1:
        raise InvalidDataError(listed("program.stdin-ranks"))
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
            raise InvalidDataError(listed("program.line-form"))
        reply = (
            classifier.predict_single(str(asked["text"]), return_probs=with_all)
            if "text" in asked
            else classifier.predict_track(asked["points"], return_probs=with_all)
        )
    except FAULTS_OF_INPUT as error:
        return {"error": str(error)}
    return {**({"id": asked["id"]} if "id" in asked else {}), **reply}
