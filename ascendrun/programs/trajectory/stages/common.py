"""Shared code of the stages: option checks, the description of the data, the initial model of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory.data import Options, Samples
from ascendrun.programs.trajectory.model import (
    Reader,
    Sizes,
    config_of_folder,
    config_of_sizes,
    read_checkpoint,
    take_words,
)
from ascendrun.programs.trajectory.points.read_ais import because
from ascendrun.programs.trajectory.store import PRETRAINED_FILE, load_pretrained
from ascendrun.text import Text, from_json


def refuse(options: Options) -> None:
    """Raise InvalidDataError for options that contradict each other."""
    if not options["base_model"]:
        if options["hidden_size"] % (2 * options["num_attention_heads"]):
            raise InvalidDataError(
                "program.hidden-heads",
                "--hidden_size={hidden} must be an even multiple of --num_attention_heads={heads}",
                hidden=options["hidden_size"],
                heads=options["num_attention_heads"],
            )
    elif pretrained_folder(Path(options["base_model"])) is None:
        config_of_folder(Path(options["base_model"]), words=1, dropout=0.0)
    if options["mode"] == "pretrain" and (options["objective"], options["attention"]) == ("clm", "bidirectional"):
        raise InvalidDataError(
            "program.clm-bidirectional",
            "--objective=clm cannot be combined with --attention=bidirectional: each token sees the next "
            "token, which it must predict\n"
            "hint: set --objective=mlm, or --attention=causal",
        )


def introduce(options: Options, samples: Samples, here: Runtime) -> None:
    source = (
        options["prepared_dir"]
        or options["data_path"]
        or Text("program.synthetic", "synthetic tracks, seed {seed}", seed=options["seed"])
    )
    counts = " · ".join(f"{name} {len(part)}" for name, part in samples.records.items() if part)
    here.log("program.tracks", "tracks: {counts} ({source}); no ship is in two splits", counts=counts, source=source)
    cleaning = samples.facts["cleaning"]
    if "points" in cleaning:
        here.log(
            "program.cleaning",
            "read {points} points: {bad} unusable{why}, {repeated} repeated, {outliers} outliers; {jumps} "
            "jumps; {short} segments too short",
            points=cleaning["points"],
            bad=cleaning["bad_points"],
            why=because(from_json(cleaning.get("why_bad", ()))),
            repeated=cleaning["repeated_points"],
            outliers=cleaning["outliers"],
            jumps=cleaning["jumps"],
            short=cleaning["short_pieces"],
        )
    if cleaning.get("class_words_removed"):
        here.log(
            "program.class-tokens-removed",
            "removed {count} class tokens from the texts",
            count=cleaning["class_words_removed"],
        )
    here.log(
        "program.classes",
        "classes: {names}; vocabulary of {tokens} tokens, grammar {grammar}",
        names=list(samples.names),
        tokens=len(samples.vocabulary),
        grammar=samples.text["grammar"],
    )
    if options["mode"] != "plan":
        here.log("program.ranks", "{count:plural rank ranks} on {family}", count=here.world_size, family=here.family)


def start_with(options: Options, samples: Samples, here: Runtime) -> tuple[Sizes, Any]:
    """Return the sizes of the model, and a function that fills a new reader, the same on all ranks."""
    base = Path(options["base_model"]) if options["base_model"] else None
    if base is None:
        return own_sizes(options, samples), lambda reader: None
    folder = pretrained_folder(base)
    if folder is not None:
        saved = load_pretrained(folder)
        if saved["text"] != samples.text:
            raise InvalidDataError(
                "program.other-grammar",
                "{directory} was pretrained on {pretrained}, this data is {data}\nhint: use the same grammar for both",
                directory=folder,
                pretrained=saved["text"],
                data=samples.text,
            )
        config = {
            **saved["sizes"]["config"],
            "vocab_size": len(samples.vocabulary),
            "attention_dropout": options["dropout"],
        }
        sizes = Sizes(config, len(samples.names), options["dropout"], options["pooling"], saved["sizes"]["attention"])

        def fill(reader: Reader) -> None:
            known = take_words(reader, saved["weights"], saved["vocabulary"], samples.vocabulary)
            here.log(
                "program.starts-from",
                "starting from {directory}: all layers, {known} of {total} tokens",
                directory=folder,
                known=known,
                total=len(samples.vocabulary),
            )

        return sizes, fill
    config = config_of_folder(base, words=len(samples.vocabulary), dropout=options["dropout"])
    sizes = Sizes(config, len(samples.names), options["dropout"], options["pooling"], options["attention"])
    return sizes, lambda reader: here.log(read_checkpoint(reader, base, samples.vocabulary))


def pretrained_folder(base: Path) -> Path | None:
    """Return the directory in `base` with a pretrained model; None: not the output of a pretraining."""
    return next((folder for folder in (base, base / "best") if (folder / PRETRAINED_FILE).is_file()), None)


def own_sizes(options: Options, samples: Samples) -> Sizes:
    multiple = options["pad_to_multiple_of"] or 16
    config = config_of_sizes(
        words=len(samples.vocabulary),
        hidden=options["hidden_size"],
        layers=options["num_hidden_layers"],
        heads=options["num_attention_heads"],
        dropout=options["dropout"],
        max_length=-(-samples.longest() // multiple) * multiple,
    )
    return Sizes(config, len(samples.names), options["dropout"], options["pooling"], options["attention"])
