"""Accuracy and loss of a small model on test sequences of three organisms, next to three baselines, on one CPU core.

    python -m benchmarks.codon.accuracy FOLDER

FOLDER has cds_train.csv.gz and cds_test.csv.gz with columns dna, protein and organism: here all coding sequences of
E. coli K-12 MG1655, S. cerevisiae R64-1-1 and Y. lipolytica (Ensembl Genomes 57) without equal proteins, 15,377 to
train on and 845 others to test with. A part of the former selects the weights. About five minutes.
Writes results/accuracy.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.stages import read, run_stage, write_result

GOALS = {
    "all": 0.507,
    "Escherichia coli str. K-12 substr. MG1655": 0.517,
    "Saccharomyces cerevisiae": 0.487,
    "Yarrowia lipolytica": 0.523,
}
"""The accuracy of the most frequent codon on these test sequences."""
LOSS_GOAL = 1.046
"""Nats a codon of the frequencies of the training sequences."""
MODEL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 2048, "dropout": 0,
}  # fmt: skip
TRAINING = {
    "learning_rate": 3e-3, "global_batch_size": 8, "num_train_epochs": 1, "mlm_probability": 0.5, "save_steps": 0,
    "logging_steps": 100, "dtype": "float32",
}  # fmt: skip
SHOWN = (
    "masked_accuracy", "masked_loss", "accuracy", "loss", "highest_frequency_accuracy", "background_loss",
    "uniform_loss", "codons",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    data = parser.parse_args().folder.absolute()
    with tempfile.TemporaryDirectory() as name:
        scores = measure(data, Path(name))
    is_met = all(scores[group]["masked_accuracy"] > goal for group, goal in GOALS.items())
    is_met = is_met and scores["all"]["masked_loss"] < LOSS_GOAL
    result = {"scores": scores, "goals": GOALS, "loss_goal": LOSS_GOAL, "is_met": is_met, **MODEL, **TRAINING}
    write_result(Path(__file__).with_name("results") / "accuracy.json", result)


def measure(data: Path, folder: Path) -> dict[str, Any]:
    """Return the scores of the test sequences by organism: `masked_…` of 15 % of the codons, with the others given, and
    without that of all codons, from the protein alone."""
    new = {"new_organisms": "Yarrowia lipolytica"}
    run_stage("codon", folder, "prepare", data_path=data / "cds_train.csv.gz", output_dir="prepared", **new)
    run_stage("codon", folder, "pretrain", prepared_dir="prepared", output_dir="out", **MODEL, **TRAINING)
    test = {"data_path": data / "cds_test.csv.gz", "eval_split": "all", "model_path": "out/best", "dtype": "float32"}
    run_stage("codon", folder, "evaluate", **test, output_dir="test", mlm_probability=0.15)
    table = read(folder / "test" / "report.json")["scores"]
    return {group: {name: round(row[name], 4) for name in SHOWN} for group, row in table.items()}


if __name__ == "__main__":
    main()
