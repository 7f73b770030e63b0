"""Validation loss on tinyshakespeare by characters: 4 layers of 128, context 64, batch 12, 2,000 steps, one CPU core.

    python -m benchmarks.nanochat.tinyshakespeare input.txt

`input.txt` is data/tinyshakespeare/input.txt of karpathy/char-rnn. nanoGPT states a validation loss of about 1.88 nats
a character for these sizes on a CPU. A document has 64 characters, so that no part of the text is cropped; the last
tenth of the text is for validation, all of it. Writes results/tinyshakespeare.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.nanochat import run_stage, write_result
from benchmarks.stages import read

LENGTH, ROWS, STEPS = 64, 12, 2000
GOAL = 1.88
MODEL = {"depth": 4, "aspect_ratio": 32, "head_dim": 32, "max_seq_len": LENGTH}
RATES = {"matrix_lr": 0.5, "embedding_lr": 6, "unembedding_lr": 0.3}
"""For steps of 524,288 tokens; these steps of 768 scale them by their root."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    asked = parser.parse_args()
    data = {"data_path": asked.text.absolute(), "document_chars": LENGTH}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_stage(folder, "tokenizer", tokenizer="chars", output_dir="tokenizer", **data)
        batch = {"micro_batch_size": ROWS, "total_batch_size": ROWS * LENGTH, "max_steps": STEPS}
        own = {"tokenizer_dir": "tokenizer", "output_dir": "base", "data_cache_dir": "cache", "dtype": "float32"}
        how = {"eval_steps": 500, "save_steps": 0, "logging_steps": 200}
        run_stage(folder, "base", **data, **MODEL, **batch, **RATES, **own, **how)
        report = read(folder / "base" / "report.json")
    losses = {str(each["step"]): round(each["loss"], 4) for each in report["evaluations"]}
    write_result(
        "tinyshakespeare",
        {
            "validation_loss": losses,
            "goal": GOAL,
            "is_met": losses[str(STEPS)] <= GOAL,
            "weights": report["model"]["weights"],
        },
    )


if __name__ == "__main__":
    main()
