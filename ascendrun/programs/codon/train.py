"""Pretraining and fine-tuning: predict masked codons, from checked sequences to the best and the last model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ascendrun.planner.workload import multiple_of, steps_of
from ascendrun.programs import errors
from ascendrun.programs.codon import scores
from ascendrun.programs.codon.files import Stored, load_stored, save_model
from ascendrun.programs.codon.genes import REASONS, Array, Genes, facts_of, read_genes, save
from ascendrun.programs.codon.model import CodonModel, Config, batch_of, make_model, masked
from ascendrun.programs.codon.rules import attended, flops_per_token, shape_of_config, work_of
from ascendrun.programs.codon.scores import ALL, Scoring
from ascendrun.programs.codon.vocabulary import ORGANISMS, Organisms
from ascendrun.programs.devices import accelerator
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.trainer import runtime, schedule
from ascendrun.programs.trainer.checkpoint import replace_json
from ascendrun.programs.trainer.data import Batch, Buckets, Unit
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.optim import Group, OptimizerPlan
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.choice import choose
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.programs.trainer.strategies.parallel import wrap
from ascendrun.programs.trainer.task import Settings, Task

Options = Mapping[str, Any]
FREE_TO_CHANGE = (
    "mode", "data_path", "prepared_dir", "base_model", "model_path", "output_dir", "device", "chip",
    "resume_from_checkpoint", "logging_steps", "eval_batch_size", "eval_split", "save_steps", "save_total_limit",
    "on_save_failure", "micro_batch_size", "gradient_checkpointing", "dataloader_num_workers", "dist_timeout_s",
    "loss_scale", "compile", "strategy", "shard_size", "max_time_s", "peak_tflops", "profile_dir", "invalid_rows",
    "organism", "new_organisms",
)  # fmt: skip
"""Options that may differ between a checkpoint and the run that resumes from it; data is compared by content."""
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
        rate, seed = self.options["mlm_probability"], self.options["seed"]
        made = [masked(ids, rate=rate, key=(seed, 1 + step, number)) for ids, number in zip(rows, numbers)]
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
    here.log("program.codon-prepared", "encoded sequences: {directory}", directory=output)
    here.record(done=True)


def introduce(genes: Genes, here: Runtime) -> None:
    facts = facts_of(genes)
    here.log(
        "program.codon-data",
        "{train:,} sequences to train on, {val:,} of other proteins to validate with; {mean:,.0f} tokens on average, "
        "{longest:,} at most; {count:plural organism organisms}",
        train=facts["sequences"]["train"],
        val=facts["sequences"]["val"],
        mean=facts["mean_tokens"],
        longest=facts["longest"],
        count=len(facts["by_organism"]),
    )
    for reason, count in genes.skipped.items():
        here.log(
            "program.codon-skipped",
            "skipped {count:plural sequence sequences}: {reason}",
            count=count,
            reason=REASONS[reason],
        )


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
    model = start(options, stored, genes.names)
    scores.check_lengths(genes, model.config.max_position_embeddings)
    here.log("program.codon-precision", "{reason}", reason=precision.reason)
    loop, task = loop_of(options, genes, model, precision, here)
    loop.resume(options["resume_from_checkpoint"])
    if not loop.run().is_complete:
        return
    counts = scores.counts_of(genes, task.train)
    whole: Any = None
    for name in ("final", "best"):
        if name == "best":
            loop.load_best()
        whole = loop.engine.whole().module
        if here.local_rank == 0:
            save_model(whole, genes.names, output / name)
            scores.write_counts(counts, output / name)
    whole.eval()
    assert task.scoring is not None
    scoring = replace(task.scoring, model=whole)
    table = scores.full_table(scoring, genes, task.val, counts, options["mlm_probability"])
    scores.show(table, here)
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
    here.log("program.codon-done", "models: {best} and {final}", best=output / "best", final=output / "final")
    here.record(done=True, **{f"final_{name}": table[ALL][name] for name in ("loss", "accuracy")})


def loop_of(
    options: Options, genes: Genes, model: CodonModel, precision: Precision, here: Runtime
) -> tuple[Loop, MaskedCodons]:
    """Return the training's loop and task: batches by length, the strategy of the options, evaluation by `Scoring`."""
    plan = Buckets(
        genes.lengths[genes.numbers(val=False)],
        batch_size=options["global_batch_size"],
        seed=options["seed"],
        window=options["length_bucket_batches"],
    )
    steps, config, rate = steps_of(options, plan.steps_per_epoch), model.config, options["mlm_probability"]
    work = work_of(
        options,
        shape_of_config(config.as_json()),
        ranks=here.world_size,
        family=here.family,
        steps=steps,
        mean=float(plan.lengths.mean()),
        longest=int(plan.lengths.max()),
    )
    engine = wrap(
        model,
        here,
        strategy=choose(options, here, precision, work).strategy,
        shard_size=options["shard_size"],
        make_optimizer=lambda module: optimizer_of(module, options, steps),
        precision=precision,
        compile=options["compile"],
    )
    scoring = Scoring(model, here, precision.compute, options["eval_batch_size"], options["seed"], rate)
    task = MaskedCodons(genes, options, multiple=multiple_of(options, here.family), scoring=scoring, engine=engine)
    sizes = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    settings = Settings.of(
        options,
        steps=steps,
        eval_steps=options["eval_steps"] or plan.steps_per_epoch,
        best="loss",
        best_is_low=True,
        flops_per_token=flops_per_token(*sizes, mean_attended(plan.lengths, model), rate),
    )
    folder = runtime.checkpoint_folder(options["output_dir"])
    identity = identity_of(options, genes, model)
    return Loop(here, engine, plan, task, settings, folder=folder, identity=identity), task


def mean_attended(lengths: Array, model: CodonModel) -> float:
    """Return the number of tokens that a token of these sequences attends to on average."""
    config = model.config
    sizes = {"block": config.block_size, "count": config.num_random_blocks}
    seen = [attended(int(length), model.attention, **sizes) for length in lengths]
    return float(np.average(seen, weights=lengths))


def start(options: Options, stored: Stored | None, organisms: Organisms) -> CodonModel:
    """Return the model at the beginning of a training, the same on all ranks."""
    given = {"recomputes": options["gradient_checkpointing"], "attention": options["attention"]}
    if stored is not None:
        return stored.make(organisms=organisms, dropout=options["dropout"], **given)
    return make_model(config_of(options, organisms), seed=options["seed"], **given)


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


def identity_of(options: Options, genes: Genes, model: CodonModel) -> dict[str, Any]:
    """Return the values that must be equal in a checkpoint and in the run that resumes from it."""
    kept = {name: value for name, value in options.items() if name not in FREE_TO_CHANGE}
    return {**kept, "data": genes.digest[:16], "organisms": model.config.type_vocab_size}
