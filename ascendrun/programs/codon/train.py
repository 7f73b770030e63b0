"""Pretraining and fine-tuning, from checked sequences to the best and the last model, and scores by organism.

Loss and accuracy of predicted codons are beside baselines that know only frequencies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ascendrun.planner.models import multiple_of, steps_of
from ascendrun.programs import errors
from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.context import fill
from ascendrun.programs.codon.files import Stored, load_stored, save_model
from ascendrun.programs.codon.genes import MASKS, REASONS, Array, Genes, facts_of, read_genes, save
from ascendrun.programs.codon.model import CodonModel, Config, batch_of, hidden, make_model, masked, masked_for
from ascendrun.programs.codon.rules import (
    MEAN_RATES,
    attended,
    flops_per_token,
    selected,
    shape_of_config,
    too_long,
    work_of,
)
from ascendrun.programs.codon.vocabulary import ORGANISMS, Organisms
from ascendrun.programs.devices import accelerator
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer import runtime, schedule
from ascendrun.programs.trainer.checkpoint import replace_json, replace_text
from ascendrun.programs.trainer.data import Batch, Buckets, Unit
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.optim import Group, OptimizerPlan
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.programs.trainer.strategies.parallel import wrap_for
from ascendrun.programs.trainer.task import Settings, Task, identity_of
from ascendrun.text import listed

Options = Mapping[str, Any]
FREE = "base_model", "gradient_checkpointing", "mode"
"""Options beside those of `identity_of` that may differ between a checkpoint and the run that resumes from it."""
BETAS = (0.9, 0.999)


class MaskedCodons(Task):
    """Training task. `multiple`: of the padded lengths. `scoring` and `engine` None: another loop evaluates."""

    def __init__(
        self,
        genes: Genes,
        options: Options,
        *,
        multiple: int,
        scoring: Scoring | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.genes, self.scoring, self.engine, self.options, self.multiple = genes, scoring, engine, options, multiple
        self.train, self.val = genes.numbers(val=False), genes.numbers(val=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return what worker processes need to make batches."""
        return {**super().__getstate__(), "scoring": None}

    def collate(self, units: Sequence[Unit], step: int) -> Batch:
        numbers = [int(self.train[place]) for unit in units for place in unit]
        rows = [self.genes[number] for number in numbers]
        seed = self.options["seed"]
        made = [masked_for(self.options, ids, key=(seed, 1 + step, number)) for ids, number in zip(rows, numbers)]
        return batch_of(rows, made, self.genes.organisms[numbers], multiple=self.multiple)

    def loss(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        given = {name: tensor for name, tensor in tensors.items() if name != "targets"}
        return functional.cross_entropy(model(**given).float(), tensors["targets"], reduction="sum")

    def evaluate(self, name: str, step: int) -> dict[str, float]:
        """Score the validation genes, with the same codons masked each time."""
        assert self.engine is not None and self.scoring is not None
        model: Any = self.engine.whole().module
        table = replace(self.scoring, model=model).table(self.genes, self.val)
        return {score: table[ALL][score] for score in ("loss", "accuracy")} if table else {}


def prepare_stage(options: Options, here: Runtime) -> None:
    """Check and encode the sequences on every host."""
    output = Path(options["output_dir"]).absolute()
    errors.check_writable(output)
    organisms = load_stored(Path(options["base_model"])).organisms if options["base_model"] else ORGANISMS
    genes = read_genes(options, organisms)
    here.check_same(genes.digest)
    introduce(genes, here)
    if here.local_rank == 0:
        save(genes, output)
    here.log(listed("program.codon-prepared", directory=output))
    here.record(done=True)


def introduce(genes: Genes, here: Runtime) -> None:
    facts = facts_of(genes)
    here.log(
        listed(
            "program.codon-data",
            train=facts["sequences"]["train"],
            val=facts["sequences"]["val"],
            mean=facts["mean_tokens"],
            longest=facts["longest"],
            count=len(facts["by_organism"]),
        )
    )
    for reason, count in genes.skipped.items():
        here.log(listed("program.codon-skipped", count=count, reason=REASONS[reason]))


def train_stage(options: Options, here: Runtime) -> None:
    """Train, save the best and the last model, report. After a stop signal, save a checkpoint and return early."""
    precision = accelerator.precision_of(options, here.accelerator)
    output = Path(options["output_dir"]).absolute()
    errors.check_writable(output)
    stored = load_stored(Path(options["base_model"])) if options["base_model"] else None
    known = stored.organisms if stored else ORGANISMS
    genes = read_genes(options, known).known_to(known)
    here.check_same(genes.digest)
    introduce(genes, here)
    model = start(options, stored, genes)
    check_lengths(genes, model.config.max_position_embeddings)
    here.log(listed("program.codon-precision", reason=precision.reason))
    loop, task = loop_of(options, genes, model, precision, here)
    loop.resume(options["resume_from_checkpoint"])
    if not loop.run().is_complete:
        return
    counts = counts_of(genes, task.train)
    whole: Any = None
    for name in ("final", "best"):
        if name == "best":
            loop.load_best()
        whole = loop.engine.whole().module
        if here.local_rank == 0:
            save_model(whole, genes.names, output / name)
            write_counts(counts, output / name)
    whole.eval()
    assert task.scoring is not None
    scoring = replace(task.scoring, model=whole)
    table = full_table(scoring, genes, task.val, counts, options["mlm_probability"])
    show(table, here)
    if here.local_rank == 0:
        report = {
            "model": model.config.as_json(),
            "weights": sum(each.numel() for each in whole.parameters()),
            "training": {"steps": loop.progress.step, "best_step": loop.progress.best_step},
            "data": {name: value for name, value in facts_of(genes).items() if name != "organisms"},
            "evaluations": loop.progress.history,
            "scores": table,
        }
        replace_json(output / "report.json", report)
    here.log(listed("program.codon-done", best=output / "best", final=output / "final"))
    here.record(done=True, **{f"final_{name}": table[ALL][name] for name in ("loss", "accuracy")})


def loop_of(
    options: Options, genes: Genes, model: CodonModel, precision: Precision, here: Runtime
) -> tuple[Loop, MaskedCodons]:
    """Return the training's loop and task: batches by length, the strategy of the options, evaluation by `Scoring`."""
    plan = Buckets.of(options, genes.lengths[genes.numbers(val=False)])
    steps, config = steps_of(options, plan.steps_per_epoch), model.config
    rows = plan.rows_of(here.world_size, here.family, steps)
    engine = wrap_for(
        options,
        model,
        here,
        work=work_of(options, shape_of_config(config.as_json()), rows),
        make_optimizer=lambda module: optimizer_of(module, options, steps),
        precision=precision,
    )
    rate = 1.0 if options["mask_schedule"] in MEAN_RATES else options["mlm_probability"]
    scoring = Scoring(model, here, precision.compute, options["eval_batch_size"], options["seed"], rate)
    task = MaskedCodons(genes, options, multiple=multiple_of(options, here.family), scoring=scoring, engine=engine)
    sizes = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    settings = Settings.of(
        options,
        steps=steps,
        eval_steps=options["eval_steps"] or plan.steps_per_epoch,
        best="loss",
        best_is_low=True,
        flops_per_token=flops_per_token(*sizes, mean_attended(plan.lengths, model), selected(options)),
    )
    folder = runtime.checkpoint_folder(options["output_dir"])
    identity = identity_of(options, FREE, data=genes.digest[:16], organisms=config.type_vocab_size)
    return Loop(here, engine, plan, task, settings, folder=folder, identity=identity), task


def mean_attended(lengths: Array, model: CodonModel) -> float:
    """Return the number of tokens that a token of these sequences attends to on average."""
    config = model.config
    sizes = {"block": config.block_size, "count": config.num_random_blocks}
    seen = [attended(int(length), model.attention, **sizes) for length in lengths]
    return float(np.average(seen, weights=lengths))


def start(options: Options, stored: Stored | None, genes: Genes) -> CodonModel:
    """Return the model at the beginning of a training, the same on all ranks."""
    given = {"recomputes": options["gradient_checkpointing"], "attention": options["attention"]}
    if stored is not None:
        model = stored.make(organisms=genes.names, dropout=options["dropout"], **given)
    else:
        model = make_model(config_of(options, genes.names), seed=options["seed"], **given)
    if model.context is not None:
        fill(model.context, genes)
    return model


def config_of(options: Options, organisms: Organisms) -> Config:
    own = {
        "intermediate_size": options["intermediate_size"] or 4 * options["hidden_size"],
        "type_vocab_size": len(organisms),
        "hidden_dropout_prob": options["dropout"],
        "attention_probs_dropout_prob": options["dropout"],
    }
    return Config.of({**options, **own})


def optimizer_of(model: nn.Module, options: Options, steps: int) -> OptimizerPlan:
    """Return AdamW for all weights, with torch's OneCycleLR over the steps of the training."""
    rate = schedule.scaled(options["learning_rate"], schedule.onecycle(steps, rise=options["warmup_ratio"]))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return OptimizerPlan([Group(trained, "adamw", rate, options["weight_decay"], BETAS)])


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
            listed(
                "program.codon-scores",
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
            listed("program.codon-untrained", path=path, organisms=list(genes.names.names[len(stored.organisms) :]))
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
        raise InvalidDataError(too_long(longest, positions).text)
