"""Scores of a model by organism: loss and accuracy of its codons, beside baselines that know only frequencies."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ascendrun.programs import errors
from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.files import load_stored
from ascendrun.programs.codon.genes import MASKS, Array, Genes, read_genes
from ascendrun.programs.codon.model import CodonModel, batch_of, hidden, masked
from ascendrun.programs.devices import accelerator
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.checkpoint import replace_json, replace_text
from ascendrun.programs.trainer.runtime import Runtime

COUNTS = "codon_counts.json"
"""In a model's directory: how often each codon is in the training sequences of an organism, in the order of CODONS."""
ALL = "all"
ALLOWED = torch.from_numpy((MASKS[:, None] == MASKS[None, :]) & (np.arange(len(MASKS)) >= v.FIRST_CODON))
"""By token: the codons of the same residue."""
Table = dict[str, dict[str, float]]
"""Scores by organism, and of ALL."""


@dataclass(frozen=True)
class Scoring:
    """How a model is applied. `rate`: fraction of the codons that are masked; 1: all, only the protein is seen.

    `is_restricted`: it chooses among the codons of the residue, as decoding does; else among all tokens.
    """

    model: CodonModel
    here: Runtime
    compute: torch.dtype
    rows: int
    seed: int
    rate: float = 1.0
    is_restricted: bool = False

    def table(self, genes: Genes, numbers: Array) -> Table:
        """Return loss (nats a codon), accuracy and the number of codons by organism. All ranks call it together."""
        sums = np.zeros((len(genes.names), 3))
        # Long ones first: rows of similar length together, and the same for any number of ranks.
        order = sorted(map(int, numbers), key=lambda number: (-int(genes.lengths[number]), number))
        mine = order[self.here.rank :: self.here.world_size]
        for start in range(0, len(mine), self.rows):
            self.add(genes, mine[start : start + self.rows], sums)
        total = np.array(self.here.sum(sums.ravel().tolist())).reshape(sums.shape)
        found = {genes.names.names[place]: total[place] for place in np.flatnonzero(total[:, 2])}
        return {name: scores_of(*each) for name, each in {ALL: total.sum(0), **found}.items() if each[2]}

    def add(self, genes: Genes, numbers: Sequence[int], sums: Array) -> None:
        rows = [genes[number] for number in numbers]
        inputs = [self.hide(ids, number) for ids, number in zip(rows, numbers)]
        batch = batch_of(rows, inputs, genes.organisms[list(numbers)])
        tensors = {name: tensor.to(self.here.device) for name, tensor in batch.tensors.items()}
        targets = tensors.pop("targets")
        with torch.no_grad(), self.here.accelerator.autocast(self.compute):
            logits = self.model(**tensors)
        logits = logits.float()
        if self.is_restricted:
            logits = logits.masked_fill(~ALLOWED.to(self.here.device)[targets], -torch.inf)
        losses = functional.cross_entropy(logits, targets, reduction="none").double().cpu().numpy()
        right = (logits.argmax(-1) == targets).cpu().numpy()
        owners = np.repeat(genes.organisms[list(numbers)], [int((own != -1).sum()) for _, own in inputs])
        for column, values in enumerate((losses, right, np.ones(len(owners)))):
            np.add.at(sums[:, column], owners, values)

    def hide(self, ids: Array, number: int) -> tuple[Array, Array]:
        if self.rate == 1.0:
            return hidden(ids)
        return masked(ids, rate=self.rate, key=(self.seed, 0, number), as_mask=1.0, as_other=0.0)


def scores_of(nats: float, right: float, count: float) -> dict[str, float]:
    return {"loss": nats / count, "accuracy": right / count, "codons": count}


# --- baselines ---


def counts_of(genes: Genes, numbers: Array) -> dict[str, list[int]]:
    """Return how often each codon is in these genes, by organism."""
    found = np.zeros((len(genes.names), len(v.TOKENS)), dtype=np.int64)
    for number in numbers:
        own = genes.tokens[genes.starts[number] : genes.starts[number + 1]]
        found[genes.organisms[number]] += np.bincount(own, minlength=len(v.TOKENS))
    used = np.unique(genes.organisms[numbers])
    return {genes.names.names[int(each)]: found[each, v.FIRST_CODON :].tolist() for each in used}


def baselines(genes: Genes, numbers: Array, counts: Mapping[str, Sequence[int]]) -> Table:
    """Return, for all codons of these genes: the accuracy of each residue's most frequent codon, and the loss of the
    frequencies (background) and of equal ones (uniform). An organism that `counts` lacks has equal frequencies."""
    residues = MASKS[v.FIRST_CODON :] - v.FIRST_RESIDUE
    sizes = np.array([len(v.codons_of(each)) for each in v.RESIDUES])[residues]
    result: Table = {}
    every = np.zeros(4)
    for name, seen in counts_of(genes, numbers).items():
        known = np.array(counts.get(name, [0] * len(v.CODONS)), dtype=np.float64) + 1.0  # none has frequency 0
        totals = np.bincount(residues, weights=known, minlength=len(v.RESIDUES))[residues]
        tops = [max(v.codons_of(each), key=lambda token: known[token - v.FIRST_CODON]) for each in v.RESIDUES]
        own = np.array(seen, dtype=np.float64)
        right = own[[token - v.FIRST_CODON for token in tops]].sum()
        sums = np.array([right, -(own * np.log(known / totals)).sum(), (own * np.log(sizes)).sum(), own.sum()])
        result[name] = baseline_scores(sums)
        every += sums
    return {ALL: baseline_scores(every), **result}


def baseline_scores(sums: Array) -> dict[str, float]:
    right, background, uniform, count = (float(each) for each in sums)
    return {
        "highest_frequency_accuracy": right / count,
        "background_loss": background / count,
        "uniform_loss": uniform / count,
    }


def read_counts(folder: Path) -> dict[str, list[int]]:
    """Return the counts beside a model; none: it was not trained by this program."""
    try:
        return dict(json.loads((folder / COUNTS).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def write_counts(counts: Mapping[str, Sequence[int]], folder: Path) -> None:
    replace_text(folder / COUNTS, json.dumps(counts) + "\n")


def full_table(
    scoring: Scoring, genes: Genes, numbers: Array, counts: Mapping[str, Sequence[int]], rate: float
) -> Table:
    """Return all scores by organism: from the protein alone, with a part of the codons masked, and the baselines."""
    alone, part = (replace(scoring, rate=each, is_restricted=True).table(genes, numbers) for each in (1.0, rate))
    plain = baselines(genes, numbers, counts)
    return {
        name: {
            **each,
            "masked_loss": part.get(name, {}).get("loss", math.nan),
            "masked_accuracy": part.get(name, {}).get("accuracy", math.nan),
            **plain[name],
        }
        for name, each in alone.items()
    }


def show(table: Table, here: Runtime) -> None:
    for name, each in table.items():
        here.log(
            "program.codon-scores",
            "{organism}: accuracy {accuracy:.3f}, loss {loss:.3f} from the protein alone, {masked_accuracy:.3f} and "
            "{masked_loss:.3f} with other codons given ({codons:,.0f} codons); most frequent codon: accuracy "
            "{top:.3f}; frequencies: loss {background:.3f}; equal frequencies: loss {uniform:.3f}",
            organism=name,
            accuracy=each["accuracy"],
            loss=each["loss"],
            masked_accuracy=each["masked_accuracy"],
            masked_loss=each["masked_loss"],
            codons=each["codons"],
            top=each["highest_frequency_accuracy"],
            background=each["background_loss"],
            uniform=each["uniform_loss"],
        )


def evaluate_stage(options: Mapping[str, Any], here: Runtime) -> None:
    """Score a model on the validation part of the data, or on all of it, and write report.json."""
    output, path = Path(options["output_dir"]).absolute(), Path(options["model_path"])
    errors.check_writable(output)
    stored = load_stored(path)
    genes = read_genes(options, stored.organisms).known_to(stored.organisms)
    here.check_same(genes.digest)
    if len(genes.names) > len(stored.organisms):
        raise InvalidDataError(
            "program.codon-untrained",
            "{path} was not trained for {organisms}\nhint: evaluate sequences of other organisms, or train it with "
            "these by --mode=finetune",
            path=path,
            organisms=list(genes.names.names[len(stored.organisms) :]),
        )
    check_lengths(genes, stored.config.max_position_embeddings)
    precision = accelerator.precision_of(options, here.accelerator)
    model = stored.make().to(here.device).eval()
    numbers = np.arange(len(genes)) if options["eval_split"] == "all" else genes.numbers(val=True)
    scoring = Scoring(model, here, precision.compute, options["eval_batch_size"], options["seed"])
    table = full_table(scoring, genes, numbers, read_counts(path), options["mlm_probability"])
    show(table, here)
    if here.local_rank == 0:
        replace_json(output / "report.json", {"scores": table, "model": str(path)})
    here.record(done=True, **{f"final_{name}": table[ALL][name] for name in ("loss", "accuracy")})


def check_lengths(genes: Genes, positions: int) -> None:
    """Raise InvalidDataError for a sequence that is longer than the positions of a model."""
    longest = int(genes.lengths.max())
    if longest > positions:
        raise InvalidDataError(
            "program.codon-positions",
            "a sequence has {longest} tokens, the model {positions} positions\n"
            "hint: raise --max_position_embeddings of a new model, or remove longer sequences",
            longest=longest,
            positions=positions,
        )
