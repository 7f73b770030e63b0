"""Loss of a small model on test sequences of three organisms, from the protein alone, next to tables, on a CPU core.

    python -m benchmarks.codon.accuracy FOLDER

FOLDER has cds_train.csv.gz, cds_val.csv.gz and cds_test.csv.gz with columns dna, protein and organism: here all coding
sequences of E. coli K-12 MG1655, S. cerevisiae R64-1-1 and Y. lipolytica (Ensembl Genomes 57) without equal proteins:
15,377 to train on, 831 that choose the smoothing of the tables, and 845 others to test with. Nats a codon, among the
codons of its residue:

    frequencies      of the codons in the training sequences of the organism
    previous, next   of the codons by the residue before or after, drawn towards the frequencies
    counts           the table of the model's context before the training: both sides together
    protein          the model, all codons masked: what `--mode=optimize` uses

Each difference has its interval of 95 % over genes: the same RESAMPLES bootstrap samples for all. Trains with each
seed, about two minutes of CPU each; `--seeds` without a number compares the tables only. Writes results/accuracy.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch
from torch.nn import functional

from ascendrun.programs.codon.__main__ import OPTIONS
from ascendrun.programs.codon.context import Context, fill
from ascendrun.programs.codon.files import load_stored
from ascendrun.programs.codon.genes import Array, Genes, read_genes
from ascendrun.programs.codon.model import batch_of, hidden
from ascendrun.programs.codon.train import ALLOWED
from ascendrun.programs.codon.vocabulary import ORGANISMS
from ascendrun.programs.trainer.options import parse, read_table
from benchmarks.codon.tables import Seen, losses
from benchmarks.stages import run_stage, write_result

NEW = "Yarrowia lipolytica"
MODEL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 2048, "dropout": 0,
    "context_residues": 2,
}  # fmt: skip
TRAINING = {
    "learning_rate": 2e-3, "global_batch_size": 4, "max_steps": 260, "mask_schedule": "full",
    "val_size": 0.005, "eval_steps": 130, "eval_on_start": True, "save_steps": 0, "logging_steps": 100,
    "dtype": "float32",
}  # fmt: skip
ROWS, RESAMPLES = 8, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    asked = parser.parse_args()
    data = asked.folder.absolute()
    train, val, test = (read(data / f"cds_{name}.csv.gz") for name in ("train", "val", "test"))
    seen, known, asked_of = (Seen.of(genes, range(len(genes))) for genes in (train, val, test))
    by_gene, smoothing = losses(seen, known, asked_of, len(test.names))
    context = Context(len(train.names), MODEL["context_residues"])
    context.table.weight.data.zero_()
    fill(context, replace(train, is_val=np.zeros(len(train), bool)))
    by_gene["counts"] = model_losses(lambda ids, organisms, segments, places: context(ids, organisms, places), test)
    seeds = {}
    for seed in asked.seeds:
        with tempfile.TemporaryDirectory() as name:
            run_stage(
                "codon", Path(name), "pretrain", data_path=data / "cds_train.csv.gz", new_organisms=NEW, seed=seed,
                output_dir="out", **MODEL, **TRAINING,
            )  # fmt: skip
            model = load_stored(Path(name) / "out" / "best").make().eval()
        seeds[seed] = compare({**by_gene, "protein": model_losses(model, test)}, test, "protein", list(by_gene))
    tables = compare(by_gene, test, "counts", ["frequencies", "previous", "next"])
    settings = {"smoothing": smoothing, **MODEL, **TRAINING}
    result = {"tables": tables, "seeds": seeds, **settings}
    write_result(Path(__file__).with_name("results") / "accuracy.json", result)


def read(file: Path) -> Genes:
    options = parse(["--mode=prepare", f"--data_path={file}", f"--new_organisms={NEW}"], read_table(OPTIONS))
    return read_genes(options, ORGANISMS)


def model_losses(model: Callable[..., torch.Tensor], genes: Genes) -> Array:
    """Return the nats of each gene from its protein alone. `model`: with the arguments of CodonModel."""
    found = np.zeros(len(genes))
    order = np.argsort(-genes.lengths, kind="stable")
    for start in range(0, len(order), ROWS):
        numbers = order[start : start + ROWS]
        rows = [genes[number] for number in numbers]
        made = [hidden(ids) for ids in rows]
        owners = np.repeat(numbers, [int((targets >= 0).sum()) for _, targets in made])
        tensors: dict[str, Any] = {
            "segments": None,
            **batch_of(rows, made, np.asarray(genes.organisms)[numbers]).tensors,
        }
        targets = tensors.pop("targets")
        with torch.no_grad():
            logits = model(**tensors).float().masked_fill(~ALLOWED[targets], -torch.inf)
        np.add.at(found, owners, functional.cross_entropy(logits, targets, reduction="none").double().numpy())
    return found


def compare(by_gene: Mapping[str, Array], genes: Genes, way: str, others: Sequence[str]) -> dict[str, Any]:
    """Return by organism the loss of each way, and the difference of one to others with the interval."""
    return {
        group: {
            "genes": len(numbers),
            "loss": {name: round(float(nats[numbers].sum() / sizes.sum()), 4) for name, nats in by_gene.items()},
            f"{way} minus": {
                other: interval(by_gene[way][numbers] - by_gene[other][numbers], sizes) for other in others
            },
        }
        for group, numbers in groups_of(genes)
        for sizes in [genes.lengths[numbers] - 2]
    }


def groups_of(genes: Genes) -> Iterator[tuple[str, Array]]:
    yield "all", np.arange(len(genes))
    for number in np.unique(genes.organisms):
        yield genes.names.names[int(number)], np.flatnonzero(genes.organisms == number)


def interval(nats: Array, sizes: Array) -> dict[str, float]:
    rng = np.random.default_rng(5)
    drawn = rng.integers(len(nats), size=(RESAMPLES, len(nats)))
    low, high = np.percentile(nats[drawn].sum(1) / sizes[drawn].sum(1), [2.5, 97.5])
    return {name: round(float(each), 4) for name, each in
            (("mean", nats.sum() / sizes.sum()), ("low", low), ("high", high))}  # fmt: skip


if __name__ == "__main__":
    main()
