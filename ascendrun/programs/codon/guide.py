"""`finetune.py` of guide 004, which `ascendrun init codon` writes: its command line as a training of the program codon.

Options that it does not have are those of the program, such as --base_model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ascendrun.options import OptionProblem, ProgramOptions
from ascendrun.programs.codon import __main__ as program
from ascendrun.programs.codon.files import load_stored
from ascendrun.programs.devices.accelerator import choose_family
from ascendrun.programs.trainer import options as command_line
from ascendrun.programs.trainer.checkpoint import replacing
from ascendrun.programs.trainer.options import InvalidOptionsError, exit_with, make_help, parse, read_words
from ascendrun.text import language_of, listed, use_language

TABLE = Path(__file__).with_name("guide.json")
BASES = ("CodonTransformer-base", "adibvafa/CodonTransformer-base", "CodonTransformer")
"""Directories with the published weights, relative to the working directory."""
RENAMED = {
    "dataset_dir": "data_path",
    "checkpoint_dir": "output_dir",
    "max_epochs": "num_train_epochs",
    "num_workers": "dataloader_num_workers",
    "learning_rate": "learning_rate",
    "warmup_fraction": "warmup_ratio",
    "save_every_n_steps": "save_steps",
    "seed": "seed",
}
"""Options of the guide, each with the program's option of the same meaning."""


def main(argv: Sequence[str] | None = None) -> None:
    """Train with the words of the command line, and write the weights to one file. Ends the process."""
    use_language(language_of())
    words = ["--debug=true" if word == "--debug" else word for word in (sys.argv[1:] if argv is None else argv)]
    table = read_guide()
    if {"-h", "--help"} & set(words):
        print(make_help(table), end="")
        raise SystemExit(0)
    try:
        values, rest = read(words, table)
    except InvalidOptionsError as error:
        exit_with(error)
    command = command_of(values, rest)
    if "--mode=pretrain" in command and "mode" not in rest:
        warning = listed("codon.guide-no-base", places=list(BASES))
        print(warning, file=sys.stderr, flush=True)
    code = subprocess.call(command)
    final = Path(values["checkpoint_dir"]) / "final"
    if code == 0 and final.is_dir():
        export(final, Path(values["checkpoint_dir"]) / values["checkpoint_filename"])
    raise SystemExit(code)


def read_guide() -> ProgramOptions:
    from ascendrun import option_tables

    return option_tables.read_table("finetune.py", TABLE.read_text(encoding="utf-8"))


def read(words: Sequence[str], table: ProgramOptions) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the guide's options, and the texts of others. Raises InvalidOptionsError with all problems, those of this
    machine included."""
    texts, problems = read_words(words, table)
    rest = {name: text for name, text in texts.items() if table.find(name) is None}
    own = [f"--{name}={text}" for name, text in texts.items() if name not in rest]
    values: dict[str, Any] = {}
    try:
        values = parse(own, table)
    except InvalidOptionsError as error:
        problems += list(error.problems)
    if values.get("debug"):
        values.update(num_gpus=1, num_workers=0, max_epochs=1)
    elif texts.get("num_gpus", "").isdigit():
        problem = devices_problem(int(texts["num_gpus"]))
        problems += [problem] if problem else []
    try:
        command_line.parse([f"--{name}={text}" for name, text in rest.items()], program_table())
    except InvalidOptionsError as error:
        problems += list(error.problems)
    if problems:
        raise InvalidOptionsError(problems)
    return values, rest


def program_table() -> ProgramOptions:
    return command_line.read_table(program.OPTIONS)


def devices_problem(requested: int) -> OptionProblem | None:
    """Return why this machine cannot train on so many devices; None: it can."""
    family = choose_family("auto", os.environ)
    count = 1 if family == "cpu" else device_count(family)
    if requested <= count:
        return None
    return OptionProblem(
        "--num_gpus",
        listed("codon.guide-devices", count=requested, present=count, family=family),
        listed("codon.guide-devices-hint", present=count),
    )


def device_count(family: str) -> int:
    if family == "cuda":
        return torch.cuda.device_count()
    import torch_npu

    return int(torch_npu.npu.device_count())


def command_of(values: Mapping[str, Any], rest: Mapping[str, str]) -> list[str]:
    """Return the command of the training: one process, or one for each device by torchrun."""
    ranks = values["num_gpus"]
    options = {RENAMED[name]: values[name] for name in RENAMED}
    options["micro_batch_size"] = values["batch_size"]
    options["global_batch_size"] = values["batch_size"] * values["accumulate_grad_batches"] * ranks
    base = next((each for each in BASES if Path(each).exists()), "")
    options["base_model"] = rest.get("base_model", base)
    options["mode"] = "finetune" if options["base_model"] else "pretrain"
    options = {name: value for name, value in {**options, **rest}.items() if value != ""}
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return [
        sys.executable,
        *start,
        "-m",
        "ascendrun.programs.codon",
        *(f"--{name}={value}" for name, value in options.items()),
    ]


def export(final: Path, path: Path) -> None:
    """Write the weights of a model to one file, in the form of CodonTransformer's .ckpt files."""
    weights = {f"model.{name}": weight for name, weight in load_stored(final).weights.items()}
    with replacing(path) as fresh:
        torch.save({"state_dict": weights}, fresh)
    print(listed("codon.guide-weights", path=path), flush=True)
