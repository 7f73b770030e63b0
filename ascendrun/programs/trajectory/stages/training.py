"""The training stages: prepare, pretrain, finetune; and `train`, which combines the first and the last."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ascendrun.programs import errors
from ascendrun.programs.devices.accelerator import choose_precision
from ascendrun.programs.trainer import runtime
from ascendrun.programs.trainer.checkpoint import replace_json, replace_text
from ascendrun.programs.trainer.data import Buckets, Loader
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.task import Progress, identity_of
from ascendrun.programs.trajectory import store
from ascendrun.programs.trajectory.data import Options, Samples, make_samples, prepare, save_prepared
from ascendrun.programs.trajectory.judge import Judged, judge, missing
from ascendrun.programs.trajectory.model import Sizes, make_guesser, make_model
from ascendrun.programs.trajectory.scores import MODEL, fit_temperature
from ascendrun.programs.trajectory.stages.common import check_base, introduce, start_with
from ascendrun.programs.trajectory.stages.trained import write_predictions
from ascendrun.programs.trajectory.tokens import Groups
from ascendrun.programs.trajectory.train import FREE, class_weights, make_loop, train_head, unlabelled
from ascendrun.programs.trajectory.trees import Trees, confidence, grow_both
from ascendrun.text import listed

# --- prepare ---


def prepare_stage(options: Options, here: Runtime) -> None:
    """Write tokens, splits and vocabulary to --output_dir on every node, by its first rank; all nodes must agree."""
    folder = Path(options["output_dir"]).absolute()
    with here.phase("data"):
        samples = prepare(options)
        if here.local_rank == 0:
            save_prepared(samples, folder)
        here.check_same(samples.digest)
    introduce(options, samples, here)
    here.record(done=True, **{f"segments_{name}": len(part) for name, part in samples.records.items()})
    here.log(listed("program.prepared", directory=folder))


def open_samples(options: Options, here: Runtime) -> Samples:
    """Return the data of a training. Unusable options are rejected before it is read. Raises InvalidDataError."""
    check_base(options)
    precision = choose_precision(options["dtype"], here.accelerator)
    errors.check_writable(Path(options["output_dir"]).absolute())
    with here.phase("data"):
        samples = make_samples(options)
        here.check_same(samples.digest)
    introduce(options, samples, here)
    here.log(precision.reason)
    return samples


# --- pretrain ---


def pretrain_stage(options: Options, here: Runtime) -> None:
    samples = open_samples(options, here)
    extra, labelled = len(samples.encoded.get("unlabelled", ())), len(samples.encoded["train"])
    if options["pretraining"] == "auto" and extra < labelled:
        here.log(listed("program.pretraining-skipped", extra=extra, labelled=labelled))
        skip(options, here)
        return
    sizes, fill = start_with(options, samples, here)
    model = make_guesser(sizes, seed=options["seed"])
    fill(model)
    here.log(listed("program.objective", objective=options["objective"], count=len(unlabelled(samples))))
    loop = make_loop(options, samples, model, here, runtime.checkpoint_folder(options["output_dir"]))
    if not ran_to_its_end(loop, options, here):
        return
    output = Path(options["output_dir"]).absolute()
    for name in ("final", "best"):
        if name == "best":
            loop.load_best()
        weights = loop.engine.whole().module.state_dict()
        if here.local_rank == 0:
            store.save_pretrained(weights, sizes, samples.vocabulary, samples.text, output / name)
    if here.is_first:
        replace_json(
            output / "report.json", {"training": summary_of(loop.progress, here, 0.0), "options": dict(options)}
        )
    here.log(listed("program.pretrained", output=output))
    here.record(done=True)


def skip(options: Options, here: Runtime) -> None:
    """Mark the output of this stage, on every node, as that of one that had nothing to do."""
    if here.local_rank == 0:
        replace_text(Path(options["output_dir"]).absolute() / store.SKIPPED_FILE, "{}\n")
    here.record(done=True)


def ran_to_its_end(loop: Loop, options: Options, here: Runtime) -> bool:
    """Run the loop; false: stopped by a signal, or out of time, with a saved checkpoint."""
    loop.resume(options["resume_from_checkpoint"])
    if options["auto_find_batch_size"]:
        assert isinstance(loop.source, Loader) and isinstance(loop.source.plan, Buckets)
        longest = [(int(number),) for number in np.argsort(-loop.source.plan.lengths)[:64]]
        loop.find_micro_batch(longest)
    return loop.run().is_complete


# --- train and finetune ---


def train(options: Options, here: Runtime) -> None:
    """Train, keep the best model, report on the test ships (mode finetune: validation ships). After a stop signal, save
    and return early. With --folds, do so for each fold in a directory of its own, then report on all of them."""
    if options["mode"] == "finetune" and options["pretraining"] == "never":
        if store.is_skipped(Path(options["base_model"])):
            here.log(listed("program.not-compared", base=options["base_model"]))
            skip(options, here)
            return
        options = {**options, "base_model": ""}
    if not options["folds"] or options["mode"] != "train":
        train_one(options, here, runtime.checkpoint_folder(options["output_dir"]))
        return
    output = Path(options["output_dir"]).absolute()
    checkpoints = runtime.checkpoint_folder(options["output_dir"])
    names = [f"fold-{number}" for number in range(options["folds"])]
    for number in range(options["folds"]) if options["fold"] < 0 else [options["fold"]]:
        here.log(listed("program.fold", number=number, folds=options["folds"]))
        own = {**options, "fold": number, "output_dir": str(output / names[number])}
        if not train_one(own, here, checkpoints / names[number]):
            return
    if here.is_first and all((output / name / "report.json").is_file() for name in names):
        report_folds([output / name for name in names], options, here)
    here.record(done=True)


def report_folds(folders: Sequence[Path], options: Options, here: Runtime) -> None:
    """Write the report of all folds together: each ship was a test ship once."""
    judged = Judged.joined([Judged.load(folder) for folder in folders])
    scores, output = judged.scores(), Path(options["output_dir"]).absolute()
    here.record(test_macro_f1=scores.macro_f1, test_accuracy=scores.accuracy)
    table = judged.write(output, "test", {"options": dict(options)}, seed=options["seed"], is_leaky=False)
    here.log(
        listed("program.folds-scores", folds=len(folders), ships=len(set(judged.ships)), table=table, output=output)
    )


def train_one(options: Options, here: Runtime, folder: Path) -> bool:
    """Train on one split. False: stopped by a signal, or out of time, with a saved checkpoint."""
    started_s = time.monotonic()
    samples = open_samples(options, here)
    output = Path(options["output_dir"]).absolute()
    identity = identity_of(options, FREE, data=samples.digest[:16])
    if options["folds"] and here.share(identity_in(output / "report.json")) == json.loads(json.dumps(identity)):
        here.log(listed("program.fold-done", output=output))
        here.record(done=True)
        return True
    sizes, fill = start_with(options, samples, here)
    model: Any = make_model(sizes, seed=options["seed"])
    fill(model)
    if options["freeze_backbone_epochs"] and options["resume_from_checkpoint"] in ("auto", "never"):
        model = train_head(options, samples, model, here, folder)
        if model is None:
            return False
    loop = make_loop(options, samples, model, here, folder)
    if not ran_to_its_end(loop, options, here):
        return False
    priors = [
        count / len(samples.encoded["train"])
        for count in np.bincount(samples.labels("train"), minlength=len(samples.names)).tolist()
    ]
    trained = store.Trained(model, sizes, samples.vocabulary, samples.names, samples.text, priors)
    trees = share_trees(options, samples, sizes, here)
    rows, ships = samples.encoded["val"], [record.ship for record in samples.records["val"]]
    for name in ("final", "best"):
        if name == "best":
            loop.load_best()
        model = loop.engine.whole().module
        model.trees = None
        answers = store.predict(model, rows, here, options)
        if trees is not None:
            model.trees = trees.weighed(answers, rows, ships)
            answers = model.trees.vote(answers, rows)
        vote = store.Vote((replace(trained, model=model),), fit_temperature(answers, samples.labels("val"), ships))
        if here.local_rank == 0:
            store.save_trained(vote.members[0], output / name)
            store.save_vote([output / name], temperature=vote.temperature, prior_shift=0.0, folder=output / name)
    seconds = time.monotonic() - started_s
    report(options, samples, vote, loop.progress, here, seconds, "test" if options["mode"] == "train" else "val")
    return True


def share_trees(options: Options, samples: Samples, sizes: Sizes, here: Runtime) -> Trees | None:
    """Return the trees that vote with the network, the same on all ranks; None: not asked for, or not possible."""
    if not options["boosted_trees"] or not sizes.knots:
        return None
    grown: Trees | str | None = None
    if here.is_first and missing() is None:
        try:
            train, ships = samples.encoded["train"], [record.ship for record in samples.records["train"]]
            classes = len(samples.names)
            weights = class_weights(samples.labels("train"), classes, options["class_weights"])
            heat = confidence(train, ships, classes, weights)
            grown = replace(grow_both(train, classes, weights), temperature=heat)
            groups = Groups.make(samples.vocabulary)
            if (groups.of > 0).any():
                nowhere = [groups.without(each, levels=0, has_size=True) for each in train]
                others = replace(grow_both(nowhere, classes, weights), temperature=heat)
                grown = replace(grown, places=groups.known_places(), elsewhere=others)
        except Exception as error:  # of any kind, from another library: it must not cost the training its model
            grown = errors.in_a_line(error)
    grown = here.share(grown)
    if isinstance(grown, str):
        here.log(listed("program.trees-failed", error=grown))
        return None
    return grown


def identity_in(file: Path) -> Any:
    """Return what a finished training was made of; None: there is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))["identity"]
    except (OSError, ValueError, KeyError):
        return None


def report(
    options: Options, samples: Samples, vote: store.Vote, progress: Progress, here: Runtime, seconds: float, split: str
) -> None:
    """Write the split's report and predictions to `output` on rank 0's node."""
    judged = judge(
        lambda rows: store.vote_on(vote, rows, here, options),
        samples,
        split,
        here,
        options,
        seconds=seconds,
        known=known_of_trees(vote, samples, split, options, here),
    )
    scores, baseline = judged.scores(), judged.scores("majority")
    here.record(
        step=progress.step,
        baseline_macro_f1=baseline.macro_f1,
        baseline_accuracy=baseline.accuracy,
        **{f"{split}_macro_f1": scores.macro_f1, f"{split}_accuracy": scores.accuracy},
    )
    if here.is_first:
        report_on(judged, samples, vote, split, options, progress, here, seconds)
    here.record(done=True)


def known_of_trees(vote: store.Vote, samples: Samples, split: str, options: Options, here: Runtime) -> dict[str, Any]:
    """Return what the trees, the network alone and both together predict; {} for a model without trees."""
    model, rows = vote.members[0].model, samples.encoded[split]
    trees = model.trees
    if trees is None:
        return {}
    boosted = replace(trees, temperature=1.0, forest=None)
    known = {"boosting": boosted.ask(rows)} if "boosting" in options["baselines"] else {}
    model.trees = None
    known["network"] = store.predict(model, rows, here, options)
    model.trees = trees
    return {**known, MODEL: store.put_together(vote, [trees.vote(known["network"], rows)])}


def report_on(
    judged: Judged,
    samples: Samples,
    vote: store.Vote,
    split: str,
    options: Options,
    progress: Progress,
    here: Runtime,
    seconds: float,
) -> None:
    output, trees = Path(options["output_dir"]).absolute(), vote.members[0].model.trees
    more = {
        "data": {
            "tracks": {name: len(part) for name, part in samples.records.items()},
            "digest": samples.digest,
            "is_leaky": samples.is_leaky,
            "cleaning": samples.facts["cleaning"],
        },
        "training": summary_of(progress, here, seconds),
        "trees_weight": trees.weight if trees else None,
        "temperature": vote.temperature,
        "class_weights": class_weights(samples.labels("train"), len(samples.names), options["class_weights"]),
        "identity": identity_of(options, FREE, data=samples.digest[:16]),
        "options": dict(options),
    }
    table = judged.write(output, split, more, seed=options["seed"], is_leaky=samples.is_leaky)
    judged.save(output)
    write_predictions(output / "predictions.jsonl", samples.records[split], judged.methods[MODEL], samples.names)
    chosen = (
        listed("program.best-model", step=progress.best_step)
        if progress.best_step is not None
        else listed("program.last-model")
    )
    here.log(listed("program.final-scores", split=split, model=chosen, table=table, output=output))


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
