"""`python -m ascendrun.programs.nanochat --mode=… --option=value …`: one rank of one stage."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ascendrun.programs.trainer.options import run_program

OPTIONS = Path(__file__).with_name("options.json")
STAGES = {
    "tokenizer": ("texts", "tokenizer_stage"),
    "base": ("base", "base_stage"),
    "mid": ("sft", "sft_stage"),
    "sft": ("sft", "sft_stage"),
    "rl": ("sft", "rl_stage"),
    "evaluate": ("evaluation", "evaluate_stage"),
    "report": ("evaluation", "report_stage"),
    "export": ("export", "export_stage"),
    "infer_bench": ("inference", "infer_bench"),
    "chat": ("inference", "chat"),
    "serve": ("inference", "serve"),
}
ON_CPU = ("tokenizer", "report", "export")
SHORT = {"-p": "--prompt", "-t": "--temperature", "-k": "--top_k"}


def main(argv: Sequence[str]) -> None:
    argv = [SHORT.get(word, word) for word in argv]
    run_program(argv, OPTIONS, STAGES, on_cpu=lambda values: values["mode"] in ON_CPU)


if __name__ == "__main__":
    main(sys.argv[1:])
