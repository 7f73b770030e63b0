"""The evaluate stage: one classifier, or a vote of several, on ships that none was trained on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ascendrun.programs.devices.accelerator import choose_precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.checkpoint import replacing
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory.data import Options, Samples, make_samples
from ascendrun.programs.trajectory.grammars import summary_of_text
from ascendrun.programs.trajectory.judge import Judged, judge
from ascendrun.programs.trajectory.points.tracks import Floats
from ascendrun.programs.trajectory.scores import (
    ACCURACY,
    MODEL,
    Calibration,
    Scores,
    as_confusion,
    choose_adjustment,
    measure,
    score,
)
from ascendrun.programs.trajectory.stages.common import introduce
from ascendrun.programs.trajectory.stages.serve import write_predictions
from ascendrun.programs.trajectory.store import (
    Vote,
    agreeing,
    check_vocabulary,
    each_member_on,
    is_skipped,
    load_vote,
    put_together,
    save_vote,
    vote_on,
)
from ascendrun.text import Text
from ascendrun.text.format import pad_left

BASELINES_S = 120.0
"""Seconds that each baseline may use."""


def evaluate_stage(options: Options, here: Runtime) -> None:
    """Fit the calibration on the validation ships, report on --eval_split, save the classifier."""
    precision = choose_precision(options["dtype"], here.accelerator)
    paths = [Path(name) for name in options["model_path"]]
    vote = load_vote(paths, here.accelerator, precision)
    samples = make_samples(options, text=vote.members[0].text)
    here.check_same(samples.digest)
    introduce(options, samples, here)
    here.log(precision.reason)
    if samples.text != vote.members[0].text:
        raise InvalidDataError(
            "program.model-grammar",
            "the model requires {model}, this data is {data}\nhint: use the same grammar for both",
            model=summary_of_text(vote.members[0].text),
            data=summary_of_text(samples.text),
        )
    split, losses = options["eval_split"], {}
    others = [Path(name) for name in options["compare_with"]]
    own, other = as_read_by(vote, samples), None
    if others and not is_skipped(others[0]):
        other = load_vote(others, here.accelerator, precision)
        agreeing(Vote((vote.members[0], other.members[0])))
        theirs = as_read_by(other, samples)
        if options["pretraining"] == "auto":
            losses = {
                name: measure(vote_on(of, read.encoded["val"], here, options), read.labels("val")).nll
                for name, of, read in (("model_path", vote, own), ("compare_with", other, theirs))
            }
            if losses["compare_with"] < losses["model_path"]:
                paths, vote, other, own, theirs = others, other, vote, theirs, own
    if losses:
        here.log(
            "program.better-model",
            "NLL on the validation ships: {own:.4f} for --model_path, {other:.4f} for --compare_with; kept: {kept}",
            own=losses["model_path"],
            other=losses["compare_with"],
            kept=paths,
        )
    vote, validation = adjusted(vote, options, own, here)
    check_vocabulary(vote, own.encoded[split], here)
    if min(own.labels(split)) < 0:
        raise InvalidDataError(
            "program.unknown-classes",
            "split {split} has classes that the model was not trained on; it cannot be evaluated",
            split=split,
        )
    judged = judge(lambda rows: vote_on(vote, rows, here, options), own, split, here, options, seconds=BASELINES_S)
    if other is not None:
        judged.methods["other"] = vote_on(other, theirs.encoded[split], here, options)
    each = each_member_on(vote, own.encoded[split], here, options)
    report_on(judged, vote, samples, options, here, paths=paths, each=each, validation={**validation, "nll": losses})


def as_read_by(vote: Vote, samples: Samples) -> Samples:
    return samples.as_read_by(vote.members[0].vocabulary, vote.names)


def report_on(
    judged: Judged,
    vote: Vote,
    samples: Samples,
    options: Options,
    here: Runtime,
    *,
    paths: Sequence[Path],
    each: Sequence[Floats],
    validation: dict[str, Any],
) -> None:
    """Record the scores, save the vote on every node and the report on rank 0's. `each`: what each member predicts."""
    split, truth, probabilities = options["eval_split"], judged.truth, judged.methods[MODEL]
    scores, calibration = judged.scores(), measure(probabilities, truth)
    here.record(
        done=True,
        **{f"{split}_macro_f1": scores.macro_f1, f"{split}_accuracy": scores.accuracy, f"{split}_ece": calibration.ece},
    )
    output = Path(options["output_dir"]).absolute()
    if here.local_rank == 0:
        save_vote(paths, temperature=vote.temperature, prior_shift=vote.prior_shift, folder=output)
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
        "program.evaluated",
        "\n{split} split, {models:plural model models}, prior shift {shift}, temperature {temperature}:\n\n"
        "{text}\n\nreport: {output}",
        split=split,
        models=len(vote.members),
        shift=vote.prior_shift,
        temperature=vote.temperature,
        text=f"{text}\n\n{as_confusion(scores)}",
        output=output,
    )


def adjusted(vote: Vote, options: Options, samples: Samples, here: Runtime) -> tuple[Vote, dict[str, Any]]:
    """Return the vote with its adjustment, and the scores of vote and members on the validation ships."""
    each = each_member_on(vote, samples.encoded["val"], here, options)
    truth, priors = samples.labels("val"), vote.members[0].priors
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


def calibration_lines(calibration: Calibration) -> list[str]:
    heads = ((Text("program.confidence", "confidence"), 10), (ACCURACY, 8), (Text("program.track-count", "tracks"), 6))
    summary = Text(
        "program.calibration",
        "calibration: ECE {ece:.3f}  NLL {nll:.3f}  Brier {brier:.3f}",
        ece=calibration.ece,
        nll=calibration.nll,
        brier=calibration.brier,
    )
    rows = [f"{each.confidence:10.3f}  {each.accuracy:8.3f}  {each.count:6d}" for each in calibration.bins]
    return ["", str(summary), "  ".join(pad_left(text, room) for text, room in heads), *rows]


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
