"""Shared code of the stages: option checks, the description of the data, the initial model of a training, its plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascendrun.options import GENERATED
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.parallel import log_plan, training_of
from ascendrun.programs.trajectory import model as models
from ascendrun.programs.trajectory.data import Options, Samples, make_samples
from ascendrun.programs.trajectory.grammars import knots_of, summary_of_text
from ascendrun.programs.trajectory.points.read_ais import because
from ascendrun.programs.trajectory.split import LEAKY, doubts
from ascendrun.programs.trajectory.store import is_skipped, load_pretrained, pretrained_folder
from ascendrun.programs.trajectory.tokens import check_known
from ascendrun.programs.trajectory.train import plan_of, unlabelled, work_on
from ascendrun.text import Text, from_json, listed


def check_base(options: Options) -> None:
    """Raise InvalidDataError for a base that cannot be read: before the data is."""
    base = Path(options["base_model"])
    if options["base_model"] and not is_skipped(base) and pretrained_folder(base) is None:
        models.config_of_folder(base, words=1)


NAMED = 8
"""Dropped ships that the log names; predictions.jsonl has all of them."""


def log_cleaning(cleaning: Mapping[str, Any], here: Runtime) -> None:
    """Log what of the data was not used, and why."""
    if "points" in cleaning:
        here.log(
            listed(
                "program.cleaning",
                points=cleaning["points"],
                bad=cleaning["bad_points"],
                why=because(from_json(cleaning.get("why_bad", ()))),
                repeated=cleaning["repeated_points"],
                outliers=cleaning["outliers"],
                jumps=cleaning["jumps"],
                short=cleaning["short_pieces"],
            )
        )
    for note in from_json(cleaning.get("notes", ())):
        here.log(listed("program.reading-note", note=note))
    if cleaning.get("class_words_removed"):
        here.log(listed("program.class-tokens-removed", count=cleaning["class_words_removed"]))
    dropped = from_json(cleaning.get("dropped", {}))
    by_reason: dict[Text, list[str]] = {}
    for ship, reason in dropped.items():
        by_reason.setdefault(reason, []).append(ship)
    for reason, ships in by_reason.items():
        lost = listed("program.ships-dropped", count=len(ships), reason=reason, ships=ships[:NAMED])
        here.log(listed("program.warning", text=lost))


def introduce(options: Options, samples: Samples, here: Runtime) -> None:
    source = (
        listed("program.synthetic", seed=options["seed"])
        if not options["prepared_dir"] and options["data_path"] == GENERATED
        else options["prepared_dir"] or options["data_path"]
    )
    counts = " · ".join(f"{name} {len(part)}" for name, part in samples.records.items() if part)
    here.log(listed("program.tracks", counts=counts, source=source))
    if samples.is_leaky:
        here.log(listed("program.warning", text=LEAKY))
    else:
        here.log(listed("program.split-by-ship"))
    log_cleaning(samples.facts["cleaning"], here)
    here.log(
        listed(
            "program.classes",
            names=list(samples.names),
            tokens=len(samples.vocabulary),
            grammar=samples.text["grammar"],
        )
    )
    for leak in from_json(samples.facts.get("leaks", ())):
        suspected = listed("program.leak-suspected", found=leak)
        here.log(listed("program.warning", text=suspected))
    for doubt in doubts(samples.records):
        here.log(listed("program.warning", text=doubt))
    if options["mode"] != "plan":
        here.log(listed("program.ranks", count=here.world_size, family=here.family))


def start_with(options: Options, samples: Samples, here: Runtime) -> tuple[models.Sizes, Any]:
    """Return the sizes of the model, and a function that fills a new reader, the same on all ranks."""
    base = Path(options["base_model"]) if options["base_model"] else None
    if base is None or is_skipped(base):
        return own_sizes(options, samples), lambda reader: None
    folder = pretrained_folder(base)
    if folder is not None:
        saved = load_pretrained(folder)
        if saved["text"] != samples.text:
            raise InvalidDataError(
                listed(
                    "program.other-grammar",
                    directory=folder,
                    pretrained=summary_of_text(saved["text"]),
                    data=summary_of_text(samples.text),
                )
            )
        warning = check_known(samples.encoded["train"], samples.vocabulary, saved["vocabulary"], model=folder)
        if warning is not None:
            here.log(listed("program.warning", text=warning))
        config = {**saved["sizes"]["config"], "vocab_size": len(samples.vocabulary), "attention_dropout": 0.0}
        sizes = sizes_of(config, options, samples, attention=saved["sizes"]["attention"])

        def fill(reader: models.Reader) -> None:
            known = models.take_words(reader, saved["weights"], saved["vocabulary"], samples.vocabulary)
            here.log(listed("program.starts-from", directory=folder, known=known, total=len(samples.vocabulary)))

        return sizes, fill
    config = models.config_of_folder(base, words=len(samples.vocabulary))
    sizes = sizes_of(config, options, samples, attention=options["attention"])
    return sizes, lambda reader: here.log(models.read_checkpoint(reader, base, samples.vocabulary))


def own_sizes(options: Options, samples: Samples) -> models.Sizes:
    multiple = options["pad_to_multiple_of"] or 16
    config = models.config_of_sizes(
        words=len(samples.vocabulary),
        hidden=options["hidden_size"],
        layers=options["num_hidden_layers"],
        heads=options["num_attention_heads"],
        max_length=-(-samples.longest() // multiple) * multiple,
    )
    return sizes_of(config, options, samples, attention=options["attention"])


def sizes_of(config: dict[str, Any], options: Options, samples: Samples, *, attention: str) -> models.Sizes:
    knots = knots_of(samples.text)
    return models.Sizes(config, len(samples.names), options["dropout"], options["pooling"], attention, knots)


def plan_stage(options: Options, here: Runtime) -> None:
    """Log estimates. Raises ModelTooLargeError if a training does not fit, InvalidDataError if none is possible."""
    check_base(options)
    samples = make_samples(options)
    introduce(options, samples, here)
    sizes, _ = start_with(options, samples, here)
    for mode, rows in (("pretrain", unlabelled(samples)), ("finetune", samples.encoded["train"])):
        training = training_of({**options, "mode": mode}, here, program="trajectory")
        plan = plan_of(rows, options)
        here.log(listed("program.plan", stage=mode, tracks=len(rows), tokens=int(plan.lengths.sum())))
        work = work_on(plan, training.options, sizes, ranks=training.ranks, family=training.family)
        log_plan(training, work, here)
    here.record(done=True)
