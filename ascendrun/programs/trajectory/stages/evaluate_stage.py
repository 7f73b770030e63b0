"""The evaluate stage: one classifier, or a vote of several, on ships that none was trained on."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ascendrun.programs.trainer.checkpoint import replace_text, replacing
from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory.data import Options, Samples, encode_all, make_samples
from ascendrun.programs.trajectory.evaluation.calibrate import Calibration, choose_adjustment, measure
from ascendrun.programs.trajectory.evaluation.scores import ACCURACY, Scores, as_confusion, as_table, majority, score
from ascendrun.programs.trajectory.points.tracks import Floats
from ascendrun.programs.trajectory.stages.common import introduce
from ascendrun.programs.trajectory.stages.predict import write_predictions
from ascendrun.programs.trajectory.store import Vote, load_vote, save_vote
from ascendrun.programs.trajectory.vote import each_member_on, ids_of, put_together
from ascendrun.text import Text
from ascendrun.text.format import pad_left


def evaluate_stage(options: Options, here: Runtime) -> None:
    """Fit the calibration on the validation ships, report on --eval_split, save the classifier."""
    paths = [Path(name) for name in options["model_path"]]
    vote = load_vote(paths, here.accelerator)
    samples = make_samples(options)
    here.check_same(samples.digest)
    introduce(options, samples, here)
    if samples.text != vote.members[0].text:
        raise InvalidDataError(
            "program.model-grammar",
            "the model requires {model}, this data is {data}\nhint: use the same grammar for both",
            model=vote.members[0].text,
            data=samples.text,
        )
    vote, validation = adjusted(vote, options, samples, here)
    split = options["eval_split"]
    records = samples.records[split]
    encoded = encode_all(records, vote.members[0].vocabulary, ids_of(vote))
    each = each_member_on(vote, encoded, here, options)
    probabilities = put_together(vote, each)
    truth = [sample.label for sample in encoded]
    if min(truth) < 0:
        raise InvalidDataError(
            "program.unknown-classes",
            "split {split} has classes that the model was not trained on; it cannot be evaluated",
            split=split,
        )
    scores = score(truth, probabilities.argmax(1).tolist(), vote.names)
    baseline = majority(samples.labels("train"), truth, vote.names)
    ships, by_ship, ship_truth = vote_by_ship([record.ship for record in records], probabilities, truth)
    of_ships = score(ship_truth, by_ship.argmax(1).tolist(), vote.names) if len(ships) < len(records) else None
    calibration = measure(probabilities, truth)
    here.record(
        done=True,
        **{f"{split}_macro_f1": scores.macro_f1, f"{split}_accuracy": scores.accuracy, f"{split}_ece": calibration.ece},
    )
    text = as_text(scores, baseline, of_ships, calibration)
    output = Path(options["output_dir"]).absolute()
    if here.local_rank == 0:
        save_vote(paths, temperature=vote.temperature, prior_shift=vote.prior_shift, folder=output)
    if here.is_first:
        report: dict[str, Any] = {
            split: scores.as_json(),
            "majority_baseline": baseline.as_json(),
            "calibration": calibration.as_json(),
            "by_ship": of_ships.as_json() if of_ships else None,
            "validation": validation,
            "members": {str(path): in_short(one, truth, vote.names) for path, one in zip(paths, each)},
            "adjustment": {"temperature": vote.temperature, "prior_shift": vote.prior_shift, "chosen_on": "val"},
            "data": {"digest": samples.digest, "segments": samples.facts["segments"]},
            "options": dict(options),
        }
        replace_text(output / "report.json", json.dumps(report, indent=1) + "\n")
        replace_text(output / "report.txt", text + "\n")
        write_predictions(output / "predictions.jsonl", records, probabilities, vote.names)
        here.log(draw(output, scores, calibration))
    here.log(
        "program.evaluated",
        "\n{split} split, {models:plural model models}, prior shift {shift}, temperature {temperature}:\n\n"
        "{text}\n\nreport: {output}",
        split=split,
        models=len(vote.members),
        shift=vote.prior_shift,
        temperature=vote.temperature,
        text=text,
        output=output,
    )


def adjusted(vote: Vote, options: Options, samples: Samples, here: Runtime) -> tuple[Vote, dict[str, Any]]:
    """Return the vote with its adjustment, and the scores of vote and members on the validation ships."""
    encoded = encode_all(samples.records["val"], vote.members[0].vocabulary, ids_of(vote))
    each = each_member_on(vote, encoded, here, options)
    truth, priors = [sample.label for sample in encoded], vote.members[0].priors
    if options["calibration"] != "none":
        share = options["macro_f1_weight"] if options["calibration"] == "prior" else -1.0
        plain = put_together(replace(vote, temperature=1.0, prior_shift=0.0), each)
        chosen = choose_adjustment(plain, truth, priors, vote.names, macro_share=share)
        vote = replace(vote, temperature=chosen.temperature, prior_shift=chosen.prior_shift)
    return vote, {
        "vote": in_short(put_together(vote, each), truth, vote.names),
        "members": [in_short(one, truth, vote.names) for one in each],
    }


def in_short(probabilities: Floats, truth: Sequence[int], names: Sequence[str]) -> dict[str, float]:
    scores = score(truth, probabilities.argmax(1).tolist(), names)
    return {"macro_f1": round(scores.macro_f1, 4), "accuracy": round(scores.accuracy, 4)}


def vote_by_ship(
    ships: Sequence[str], probabilities: Floats, truth: Sequence[int]
) -> tuple[list[str], Floats, list[int]]:
    """Return each ship once: the mean over its segments, and its class."""
    rows: dict[str, list[int]] = {}
    for i, ship in enumerate(ships):
        rows.setdefault(ship, []).append(i)
    means: Floats = np.stack([probabilities[each].mean(0) for each in rows.values()])
    return list(rows), means, [truth[each[0]] for each in rows.values()]


def as_text(scores: Scores, baseline: Scores, of_ships: Any, calibration: Calibration) -> str:
    heads = ((Text("program.confidence", "confidence"), 10), (ACCURACY, 8), (Text("program.track-count", "tracks"), 6))
    lines: list[Text | str] = [as_table(scores, baseline)]
    if of_ships is not None:
        by_ship = Text(
            "program.by-ship",
            "by ship (mean of its segments): macro F1 {macro_f1:.3f}  accuracy {accuracy:.3f}",
            macro_f1=of_ships.macro_f1,
            accuracy=of_ships.accuracy,
        )
        lines.append(by_ship)
    lines += [
        "",
        Text(
            "program.calibration",
            "calibration: ECE {ece:.3f}  NLL {nll:.3f}  Brier {brier:.3f}",
            ece=calibration.ece,
            nll=calibration.nll,
            brier=calibration.brier,
        ),
        "  ".join(pad_left(text, room) for text, room in heads),
    ]
    lines += [f"{each.confidence:10.3f}  {each.accuracy:8.3f}  {each.count:6d}" for each in calibration.bins]
    return "\n".join(map(str, [*lines, "", as_confusion(scores)]))


def draw(output: Path, scores: Scores, calibration: Calibration) -> Text:
    """Write report.png if matplotlib is installed; return the log message."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its messages about fonts do not belong in a job's log
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return Text("program.no-matplotlib", "no report.png: matplotlib is not installed")
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
    return Text("program.plot", "plot: {path}", path=output / "report.png")
