"""The training stages: prepare, pretrain, finetune; and `train`, which combines the first and the last."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ascendrun.programs.trainer import errors, runtime
from ascendrun.programs.trainer.checkpoint import replace_text
from ascendrun.programs.trainer.data import Buckets
from ascendrun.programs.trainer.devices.accelerator import choose_precision
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.task import Progress
from ascendrun.programs.trajectory.data import Options, Samples, encode_prepared, make_samples, prepare
from ascendrun.programs.trajectory.evaluation.evaluate import predict
from ascendrun.programs.trajectory.evaluation.scores import as_confusion, as_table, majority, score
from ascendrun.programs.trajectory.model import Reader, Sizes, make_guesser, make_model
from ascendrun.programs.trajectory.pretrain import make_pretraining, unlabelled
from ascendrun.programs.trajectory.records import save_prepared
from ascendrun.programs.trajectory.stages import plan
from ascendrun.programs.trajectory.stages.common import introduce, refuse, start_with
from ascendrun.programs.trajectory.stages.predict import write_predictions
from ascendrun.programs.trajectory.store import Trained, save_pretrained, save_trained
from ascendrun.programs.trajectory.train import class_weights, make_loop, train_head
from ascendrun.text import Text

# --- prepare ---


def prepare_stage(options: Options, here: Runtime) -> None:
    """Write tokens, splits and vocabulary to --output_dir on every node, by its first rank; all nodes must agree."""
    folder = Path(options["output_dir"]).absolute()
    prepared = prepare(options)
    if here.local_rank == 0:
        save_prepared(prepared, folder)
    samples = encode_prepared(prepared)
    here.check_same(samples.digest)
    introduce(options, samples, here)
    here.record(done=True, **{f"segments_{name}": len(part) for name, part in samples.records.items()})
    here.log(
        "program.prepared",
        "no segment is in two splits, and no token names a class\nprepared: {directory}",
        directory=folder,
    )


def open_samples(options: Options, here: Runtime) -> Samples:
    """Return the data of a training. Unusable options are rejected before it is read. Raises InvalidDataError."""
    refuse(options)
    choose_precision(options["dtype"], here.accelerator)
    errors.check_writable(Path(options["output_dir"]).absolute())
    samples = make_samples(options)
    here.check_same(samples.digest)
    introduce(options, samples, here)
    return samples


def log_estimate(name: str, samples: Samples, model: Reader, sizes: Sizes, options: Options, here: Runtime) -> None:
    for line in plan.warnings(name, samples, sizes, options, here, weights=sum(w.numel() for w in model.parameters())):
        here.log("program.note", "note: {text}", text=line)


# --- pretrain ---


def pretrain_stage(options: Options, here: Runtime) -> None:
    samples = open_samples(options, here)
    sizes, fill = start_with(options, samples, here)
    model = make_guesser(sizes, seed=options["seed"])
    fill(model)
    log_estimate("pretrain", samples, model, sizes, options, here)
    here.log(
        "program.objective",
        "objective {objective}: {count} tracks without their classes",
        objective=options["objective"],
        count=len(unlabelled(samples)),
    )
    loop = make_pretraining(options, samples, model, here, runtime.checkpoint_folder(options["output_dir"]))
    if not ran_to_its_end(loop, options, here):
        return
    output = Path(options["output_dir"]).absolute()
    for name in ("final", "best"):
        if name == "best":
            loop.load_best()
        if here.local_rank == 0:
            save_pretrained(model.state_dict(), sizes, samples.vocabulary, samples.text, output / name)
    if here.is_first:
        replace_text(
            output / "report.json",
            json.dumps({"training": summary_of(loop.progress, here, 0.0), "options": dict(options)}, indent=1) + "\n",
        )
    here.log("program.pretrained", "pretrained model: {output}", output=output)
    here.record(done=True)


def ran_to_its_end(loop: Loop, options: Options, here: Runtime) -> bool:
    """Run the loop; false: stopped by a signal, or out of time, with a saved checkpoint."""
    loop.resume(options["resume_from_checkpoint"])
    if options["auto_find_batch_size"]:
        assert isinstance(loop.plan, Buckets)
        longest = [(int(number),) for number in np.argsort(-loop.plan.lengths)[:64]]
        loop.find_micro_batch(longest)
    if loop.run().is_complete:
        return True
    here.log(
        "program.training-stopped",
        "stopped after step {step}/{steps}; the same command resumes from the checkpoint in {directory}",
        step=loop.progress.step,
        steps=loop.settings.steps,
        directory=loop.saver.parent,
    )
    return False


# --- train and finetune ---


def train(options: Options, here: Runtime) -> None:
    """Train, keep the best model, report on the test ships (mode finetune: validation ships). After a stop signal, save
    and return early."""
    started_s = time.monotonic()
    samples = open_samples(options, here)
    sizes, fill = start_with(options, samples, here)
    model: Any = make_model(sizes, seed=options["seed"])
    fill(model)
    log_estimate("finetune", samples, model, sizes, options, here)
    folder = runtime.checkpoint_folder(options["output_dir"])
    if options["freeze_backbone_epochs"] and options["resume_from_checkpoint"] in ("auto", "never"):
        model = train_head(options, samples, model, here, folder)
        if model is None:
            here.log(
                "program.head-stopped", "stopped while the backbone was frozen; the same command resumes from there"
            )
            return
    loop = make_loop(options, samples, model, here, folder)
    if not ran_to_its_end(loop, options, here):
        return
    output = Path(options["output_dir"]).absolute()
    priors = [
        count / len(samples.encoded["train"])
        for count in np.bincount(samples.labels("train"), minlength=len(samples.names)).tolist()
    ]
    trained = Trained(model, sizes, samples.vocabulary, samples.names, samples.text, priors)
    if here.local_rank == 0:
        save_trained(trained, output / "final")
    loop.load_best()
    if here.local_rank == 0:
        save_trained(trained, output / "best")
    seconds = time.monotonic() - started_s
    report(options, samples, trained, loop.progress, here, seconds, "test" if options["mode"] == "train" else "val")


def report(
    options: Options, samples: Samples, trained: Trained, progress: Progress, here: Runtime, seconds: float, split: str
) -> None:
    """Write the split's report and predictions to `output` on rank 0's node."""
    output = Path(options["output_dir"]).absolute()
    probabilities = predict(trained.model, samples.encoded[split], here, options)
    truth = samples.labels(split)
    scores = score(truth, probabilities.argmax(1).tolist(), samples.names)
    baseline = majority(samples.labels("train"), truth, samples.names)
    here.record(
        step=progress.step,
        baseline_macro_f1=baseline.macro_f1,
        baseline_accuracy=baseline.accuracy,
        **{f"{split}_macro_f1": scores.macro_f1, f"{split}_accuracy": scores.accuracy},
    )
    if here.is_first:
        write_predictions(output / "predictions.jsonl", samples.records[split], probabilities, samples.names)
        content = {
            split: scores.as_json(),
            "majority_baseline": baseline.as_json(),
            "training": summary_of(progress, here, seconds),
            "data": {
                "tracks": {name: len(part) for name, part in samples.records.items()},
                "digest": samples.digest,
                "cleaning": samples.facts["cleaning"],
            },
            "class_weights": class_weights(samples.labels("train"), len(samples.names), options["class_weights"]),
            "options": dict(options),
        }
        replace_text(output / "report.json", json.dumps(content, indent=1) + "\n")
        replace_text(output / "report.txt", f"{as_table(scores, baseline)}\n\n{as_confusion(scores)}\n")
    chosen = (
        Text("program.best-model", "best model of step {step}", step=progress.best_step)
        if progress.best_step is not None
        else Text("program.last-model", "last model")
    )
    here.log(
        "program.final-scores",
        "\n{split} split, {model}:\n\n{table}\n\nreport, model and predictions: {output}",
        split=split,
        model=chosen,
        table=as_table(scores, baseline),
        output=output,
    )
    here.record(done=True)


def summary_of(progress: Progress, here: Runtime, seconds: float) -> dict[str, Any]:
    return {
        "steps": progress.step,
        "best_step": progress.best_step,
        "seconds": round(seconds, 1),
        "world_size": here.world_size,
        "device": here.family,
        "torch": torch.__version__,
        "validation": progress.history,
    }
