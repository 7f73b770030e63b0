"""The program's two jobs from end to end: train and report; classify with a trained model."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict

from ascendrun.programs.trainer import task
from ascendrun.programs.trainer.start import Runtime
from ascendrun.programs.trainer.task import Progress
from ascendrun.programs.trajectory.data import Options, Samples, load_tracks, make_samples
from ascendrun.programs.trajectory.evaluate import Scores, as_confusion, as_table, majority, predict, score
from ascendrun.programs.trajectory.model import Classifier, make_model
from ascendrun.programs.trajectory.predict import Trained, load_trained, save_trained, write_predictions
from ascendrun.programs.trajectory.tokens import as_texts, encode
from ascendrun.programs.trajectory.tracks import BadData
from ascendrun.programs.trajectory.train import make_loop

EXPECTED = (BadData, *task.EXPECTED)
"""Faults of what was given, not of this program: their message is the whole story."""


def train(options: Options, runtime: Runtime) -> None:
    """Trains, keeps the best model, reports on the test ships. Stopped by a signal it saves and returns early."""
    started_s = time.monotonic()
    samples = make_samples(options)
    check_same(samples.digest, runtime)
    introduce(options, samples, runtime)
    sizes = model_sizes(options, samples)
    model = make_model(sizes, seed=options["seed"])
    output = Path(options["output"]).absolute()
    loop = make_loop(options, samples, model, runtime)
    if options["resume"] == "auto":
        loop.resume()
    if not loop.run().is_complete:
        runtime.say(f"stopped after step {loop.progress.step}/{loop.settings.steps}; the same command goes on from "
                    f"there, with the checkpoint in {loop.saver.parent}")
        return
    loop.load_best()
    trained = Trained(model, sizes, samples.vocabulary, samples.names,
                      {"grammar": options["grammar"], "resolution": options["h3_resolution"]})
    finish(options, samples, trained, loop.progress, runtime, output, time.monotonic() - started_s)


def check_same(digest: str, runtime: Runtime) -> None:
    """Raises BadData when ranks read different data: they would train on different samples and never notice."""
    digests = Counter(runtime.gather(digest))
    if len(digests) > 1:
        most = digests.most_common(1)[0][0]
        odd = [rank for rank, other in enumerate(runtime.gather(digest)) if other != most]
        raise BadData(f"rank(s) {odd} read other data than the rest; the file must be the same on every node")


def introduce(options: Options, samples: Samples, runtime: Runtime) -> None:
    source = options["data"] or f"generated, seed {options['seed']}"
    counts = " · ".join(f"{name} {len(part)}" for name, part in samples.tracks.items())
    runtime.say(f"tracks: {counts} ({source}); no ship is in two splits")
    if samples.cleaning is not None:
        cleaning = samples.cleaning
        runtime.say(f"read {cleaning.points} points: {cleaning.bad_points} unusable, "
                    f"{cleaning.repeated_points} repeated; {cleaning.short_pieces} pieces too short")
    runtime.say(f"classes: {', '.join(samples.names)}; {len(samples.vocabulary)} words, grammar {options['grammar']}")
    runtime.say(f"{runtime.world_size} rank(s) on {runtime.family}")


def model_sizes(options: Options, samples: Samples) -> Dict[str, Any]:
    if options["hidden"] % (2 * options["heads"]):
        raise BadData(f"--hidden={options['hidden']} must be an even multiple of --heads={options['heads']}")
    multiple = options["pad_multiple"]
    return {"words": len(samples.vocabulary), "classes": len(samples.names), "hidden": options["hidden"],
            "layers": options["layers"], "heads": options["heads"], "dropout": options["dropout"],
            "pooling": options["pooling"], "max_length": -(-samples.longest() // multiple) * multiple}


def finish(options: Options, samples: Samples, trained: Trained, progress: Progress, runtime: Runtime, output: Path,
           seconds: float) -> None:
    """The test split's report, predictions and model, in `output` on rank 0's node."""
    probabilities = predict(trained.model, samples.encoded["test"], runtime, batch_size=options["batch_size"],
                            multiple=options["pad_multiple"])
    truth = samples.labels("test")
    scores = score(truth, probabilities.argmax(1).tolist(), samples.names)
    baseline = majority(samples.labels("train"), truth, samples.names)
    runtime.record(step=progress.step, test_macro_f1=scores.macro_f1, test_accuracy=scores.accuracy,
                   baseline_macro_f1=baseline.macro_f1, baseline_accuracy=baseline.accuracy)
    if runtime.is_first:
        save_trained(trained, output / "best")
        write_predictions(output / "predictions.jsonl", samples.tracks["test"], probabilities, samples.names)
        write_report(output, options, samples, progress, scores, baseline, runtime, seconds)
    runtime.say(f"\ntest split, best model of step {progress.best_step}:\n\n{as_table(scores, baseline)}\n\n"
                f"report, model and predictions: {output}")
    runtime.record(done=True)


def write_report(output: Path, options: Options, samples: Samples, progress: Progress, scores: Scores, baseline: Scores,
                 runtime: Runtime, seconds: float) -> None:
    report = {
        "test": scores.as_json(), "majority_baseline": baseline.as_json(),
        "training": {"steps": progress.step, "best_step": progress.best_step,
                     "seconds": round(seconds, 1), "world_size": runtime.world_size, "device": runtime.family,
                     "validation": progress.history},
        "data": {"tracks": {name: len(part) for name, part in samples.tracks.items()}, "digest": samples.digest,
                 "cleaning": None if samples.cleaning is None else asdict(samples.cleaning)},
        "options": dict(options),
    }
    replace_text(output / "report.json", json.dumps(report, indent=1) + "\n")
    replace_text(output / "report.txt", f"{as_table(scores, baseline)}\n\nrows: truth, columns: prediction\n"
                                        f"{as_confusion(scores)}\n")


def replace_text(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def classify(options: Options, runtime: Runtime) -> None:
    """Predictions for every track of --data, with classes known or not; scores too where they are known."""
    if not options["model"]:
        raise BadData("--mode=predict needs --model, the folder `best` of a training's output")
    trained = load_trained(Path(options["model"]))
    tracks, _ = load_tracks(options)
    texts = as_texts(tracks, **trained.text)
    ids = {name: i for i, name in enumerate(trained.names)}
    samples = [encode(words, trained.vocabulary, ids.get(str(track.label), -1)) for words, track in zip(texts, tracks)]
    model: Classifier = trained.model.to(runtime.device)
    probabilities = predict(model, samples, runtime, batch_size=options["batch_size"], multiple=options["pad_multiple"])
    path = Path(options["output"]).absolute() / "predictions.jsonl"
    if runtime.is_first:
        write_predictions(path, tracks, probabilities, list(trained.names))
    known = [i for i, sample in enumerate(samples) if sample.label >= 0]
    if known:
        scores = score([samples[i].label for i in known], probabilities[known].argmax(1).tolist(), trained.names)
        runtime.say(f"{len(known)} tracks of known class: macro F1 {scores.macro_f1:.3f} "
                    f"accuracy {scores.accuracy:.3f}")
    runtime.say(f"{len(tracks)} predictions: {path}")
    runtime.record(done=True)
