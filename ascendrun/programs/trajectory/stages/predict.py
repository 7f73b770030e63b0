"""The predictions of a trained classifier for many tracks: from a file on all ranks, with their throughput."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from ascendrun.programs.devices.accelerator import choose_precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.checkpoint import replacing
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory.data import Options, as_records, encode_all, load_data
from ascendrun.programs.trajectory.evaluation.scores import score
from ascendrun.programs.trajectory.grammars import summary_of_text
from ascendrun.programs.trajectory.points.tracks import Floats
from ascendrun.programs.trajectory.records import Record, load_prepared
from ascendrun.programs.trajectory.stages.stream import classify_stream
from ascendrun.programs.trajectory.store import Vote, load_vote
from ascendrun.programs.trajectory.vote import answer, check_vocabulary, ids_of, vote_on


def classify(options: Options, here: Runtime) -> None:
    """Predict every track of --prepared_dir or --data_path (- : lines on standard input); score known classes."""
    precision = choose_precision(options["dtype"], here.accelerator)
    vote = load_vote([Path(name) for name in options["model_path"]], here.accelerator, precision)
    if options["data_path"] == "-":
        classify_stream(vote, precision, options, here)
        return
    here.log(precision.reason)
    records = records_to_classify(options, vote)
    samples = encode_all(records, vote.members[0].vocabulary, ids_of(vote))
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
