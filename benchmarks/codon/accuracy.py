"""Loss of a small model on test sequences of three organisms, from the protein alone, next to tables, on a CPU core.

    python -m benchmarks.codon.accuracy FOLDER

FOLDER has cds_train.csv.gz, cds_val.csv.gz and cds_test.csv.gz with columns dna, protein and organism: here all coding
sequences of E. coli K-12 MG1655, S. cerevisiae R64-1-1 and Y. lipolytica (Ensembl Genomes 57) without equal proteins:
15,377 to train on, 831 that choose the smoothing of the tables, and 845 others to test with. Nats a codon, among the
codons of its residue:

    frequencies      of the codons in the training sequences of the organism
    previous, next   of the codons by the residue before or after, drawn towards the frequencies
    protein          the model, all codons masked: what `--mode=optimize` uses
    passes           the model in PASSES passes: each predicts a part of the codons, chosen at random and before any is
                     known, from the protein and the true codons of the parts before. The product is a likelihood of
                     the sequence: over all sequences of a protein it sums to 1

Each difference has its interval of 95 % over genes: the same RESAMPLES bootstrap samples for all. Trains with each
seed, about 14 minutes of CPU each; `--seeds` without a number compares the tables only. Writes results/accuracy.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ascendrun.programs.codon.__main__ import OPTIONS
from ascendrun.programs.codon.files import load_stored
from ascendrun.programs.codon.genes import MASKS, Array, Genes, read_genes
from ascendrun.programs.codon.model import CodonModel, batch_of
from ascendrun.programs.codon.train import ALLOWED
from ascendrun.programs.codon.vocabulary import FIRST_CODON, ORGANISMS
from ascendrun.programs.trainer.options import parse, read_table
from benchmarks.codon.tables import Seen, losses
from benchmarks.stages import run_stage, write_result

NEW = "Yarrowia lipolytica"
MODEL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 2048, "dropout": 0,
}  # fmt: skip
TRAINING = {
    "learning_rate": 2e-3, "global_batch_size": 4, "num_train_epochs": 4, "mask_schedule": "cosine",
    "val_size": 0.01, "save_steps": 0, "logging_steps": 100, "dtype": "float32",
}  # fmt: skip
PASSES, ROWS, RESAMPLES = 8, 8, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2])
    asked = parser.parse_args()
    data = asked.folder.absolute()
    train, val, test = (read(data / f"cds_{name}.csv.gz") for name in ("train", "val", "test"))
    seen, known, asked_of = (Seen.of(genes, range(len(genes))) for genes in (train, val, test))
    by_gene, smoothing = losses(seen, known, asked_of, len(test.names))
    seeds = {}
    for seed in asked.seeds:
        with tempfile.TemporaryDirectory() as name:
            run_stage(
                "codon", Path(name), "pretrain", data_path=data / "cds_train.csv.gz", new_organisms=NEW, seed=seed,
                output_dir="out", **MODEL, **TRAINING,
            )  # fmt: skip
            model = load_stored(Path(name) / "out" / "best").make().eval()
        own = {"protein": model_losses(model, test, 1), "passes": model_losses(model, test, PASSES)}
        seeds[seed] = compare({**by_gene, **own}, test, "protein", list(by_gene))
    tables = compare(by_gene, test, "next", ["frequencies", "previous"])
    settings = {"smoothing": smoothing, "passes": PASSES, **MODEL, **TRAINING}
    result = {"tables": tables, "seeds": seeds, **settings}
    write_result(Path(__file__).with_name("results") / "accuracy.json", result)


def read(file: Path) -> Genes:
    options = parse(["--mode=prepare", f"--data_path={file}", f"--new_organisms={NEW}"], read_table(OPTIONS))
    return read_genes(options, ORGANISMS)


def model_losses(model: CodonModel, genes: Genes, passes: int, *, seed: int = 0) -> Array:
    """Return the nats of each gene in so many passes. Groups of codons follow from the seed and the gene alone."""
    found = np.zeros(len(genes))
    order = np.argsort(-genes.lengths, kind="stable")
    for start in range(0, len(order), ROWS):
        numbers = order[start : start + ROWS]
        rows = [genes[number] for number in numbers]
        groups = [np.random.default_rng([seed, int(number)]).integers(passes, size=len(ids)) for number, ids in
                  zip(numbers, rows)]  # fmt: skip
        for now in range(passes):
            made = [
                (
                    np.where(group < now, ids, MASKS[ids]).astype(np.int64),
                    np.where((group == now) & (ids >= FIRST_CODON), ids, -1),
                )
                for ids, group in zip(rows, groups)
            ]
            owners = np.repeat(numbers, [int((targets >= 0).sum()) for _, targets in made])
            tensors = batch_of(rows, made, np.asarray(genes.organisms)[numbers]).tensors
            targets = tensors.pop("targets")
            if len(targets):
                with torch.no_grad():
                    logits = model(**tensors).float().masked_fill(~ALLOWED[targets], -torch.inf)
                nats = functional.cross_entropy(logits, targets, reduction="none").double().numpy()
                np.add.at(found, owners, nats)
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
