"""What the stages share: option checks, the description of the data, the model that a training starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from ascendrun.programs.trajectory.points.tracks import InvalidDataError
from ascendrun.programs.trajectory.store import PRETRAINED_FILE, load_pretrained


def check_same(digest: str, here: Runtime) -> None:
    """Raises InvalidDataError when ranks read different data: they would train on different samples and never notice."""  # noqa: E501
    odd = here.odd_ones(digest)
    if odd:
        raise InvalidDataError(f"rank(s) {odd} read other data than the rest; the file must be the same on every node")


def refuse(options: Options) -> None:
    """Raises InvalidDataError for options that contradict each other."""
    if not options["base_model"]:
        if options["hidden_size"] % (2 * options["num_attention_heads"]):
            raise InvalidDataError(
                f"--hidden_size={options['hidden_size']} must be an even multiple of --num_attention_heads={options['num_attention_heads']}"  # noqa: E501
            )
    elif pretrained_folder(Path(options["base_model"])) is None:
        config_of_folder(Path(options["base_model"]), words=1, dropout=0.0)
    if options["mode"] == "pretrain" and (options["objective"], options["attention"]) == ("clm", "bidirectional"):
        raise InvalidDataError(
            "--objective=clm: with --attention=bidirectional a word sees the next word, which it is to guess; use "
            "--objective=mlm, or --attention=causal"
        )


def introduce(options: Options, samples: Samples, here: Runtime) -> None:
    source = options["prepared_dir"] or options["data_path"] or f"generated, seed {options['seed']}"
    counts = " · ".join(f"{name} {len(part)}" for name, part in samples.records.items() if part)
    here.say(f"tracks: {counts} ({source}); no ship is in two splits")
    cleaning = samples.facts["cleaning"]
    if "points" in cleaning:
        why = f" ({'; '.join(cleaning['why_bad'])})" if cleaning.get("why_bad") else ""
        here.say(
            f"read {cleaning['points']} points: {cleaning['bad_points']} unusable{why}, "
            f"{cleaning['repeated_points']} repeated, {cleaning['outliers']} outliers; {cleaning['jumps']} jumps; "
            f"{cleaning['short_pieces']} pieces too short"
        )
    if cleaning.get("class_words_removed"):
        here.say(f"{cleaning['class_words_removed']} class words were taken out of the texts")
    here.say(f"classes: {', '.join(samples.names)}; {len(samples.vocabulary)} words, grammar {samples.text['grammar']}")
    if options["mode"] != "plan":
        here.say(f"{here.world_size} rank(s) on {here.family}")


def begin_with(options: Options, samples: Samples, here: Runtime) -> tuple[Sizes, Any]:
    """The sizes of the model, and what fills a new one: a function of the reader, for all ranks alike."""
    base = Path(options["base_model"]) if options["base_model"] else None
    if base is None:
        return own_sizes(options, samples), lambda reader: None
    folder = pretrained_folder(base)
    if folder is not None:
        saved = load_pretrained(folder)
        if saved["text"] != samples.text:
            raise InvalidDataError(
                f"{folder} was pretrained on {saved['text']}, this data is {samples.text}; use the same "
                "grammar for both"
            )
        config = {
            **saved["sizes"]["config"],
            "vocab_size": len(samples.vocabulary),
            "attention_dropout": options["dropout"],
        }
        sizes = Sizes(config, len(samples.names), options["dropout"], options["pooling"], saved["sizes"]["attention"])

        def fill(reader: Reader) -> None:
            known = take_words(reader, saved["weights"], saved["vocabulary"], samples.vocabulary)
            here.say(f"begins with {folder}: all layers, {known} of {len(samples.vocabulary)} words")

        return sizes, fill
    config = config_of_folder(base, words=len(samples.vocabulary), dropout=options["dropout"])
    sizes = Sizes(config, len(samples.names), options["dropout"], options["pooling"], options["attention"])
    return sizes, lambda reader: here.say(read_checkpoint(reader, base, samples.vocabulary))


def pretrained_folder(base: Path) -> Path | None:
    """Where in `base` a pretraining left its model; None: it is no output of one."""
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
