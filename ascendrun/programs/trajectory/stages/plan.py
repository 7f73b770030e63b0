"""`--mode=plan`: what pretraining and finetuning would do and need, reckoned on any machine, no device taken."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ascendrun.programs.trainer.devices.accelerator import Precision
from ascendrun.programs.trainer.dry_run import batch_problems
from ascendrun.programs.trainer.errors import ModelTooLargeError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies import memory
from ascendrun.programs.trainer.target_device import planned
from ascendrun.programs.trajectory import sizing
from ascendrun.programs.trajectory.data import Options, Samples, make_samples
from ascendrun.programs.trajectory.model import Sizes
from ascendrun.programs.trajectory.pretrain import unlabelled
from ascendrun.programs.trajectory.stages.common import begin_with, introduce, refuse
from ascendrun.programs.trajectory.tokens import Encoded
from ascendrun.programs.trajectory.train import plan_of, steps_of
from ascendrun.text import Text

LARGE = 100_000_000
"""Weights from which on a training is reckoned before it begins, too; smaller ones fit anywhere."""


def plan_stage(options: Options, here: Runtime) -> None:
    """Raises ModelTooLargeError when a training would not fit, InvalidDataError when nothing can be said."""
    ranks = options["world_size"] or here.world_size
    family, precision, card_bytes = planned(options["chip"], options["dtype"], here.accelerator)
    refuse(options)
    if family == "cpu" and card_bytes is not None:
        card_bytes //= int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    samples = make_samples(options)
    introduce(options, samples, here)
    sizes, _ = begin_with(options, samples, here)
    problems: list[Text] = []
    for name, rows, share in trainings(options, samples):
        lines, wrong = account(
            name, rows, share, sizes, options, ranks=ranks, family=family, precision=precision, card_bytes=card_bytes
        )
        here.log("\n".join(map(str, lines)))
        problems += wrong
    if problems:
        raise ModelTooLargeError.of(problems)
    here.record(done=True)


def trainings(options: Options, samples: Samples) -> list[tuple[str, Sequence[Encoded], float]]:
    """(name, tracks, share of the words that are asked for): what the options could start."""
    asked = 1.0 if options["objective"] == "clm" else float(options["mlm_probability"])
    return [("pretrain", unlabelled(samples), asked), ("finetune", samples.encoded["train"], 0.0)]


def account(
    name: str,
    rows: Sequence[Encoded],
    share: float,
    sizes: Sizes,
    options: Options,
    *,
    ranks: int,
    family: str,
    precision: Precision,
    card_bytes: int | None,
) -> tuple[list[Text], list[Text]]:
    """(what there is to know, why it would not fit)."""
    plan = plan_of(rows, options)
    heavy = sizing.heaviest(plan, options, family=family, world_size=ranks, asked_share=share)
    steps, checkpointed = steps_of(options, plan), options["gradient_checkpointing"]
    need = sizing.reckon(sizes, heavy, precision=precision, world_size=ranks, family=family, checkpointed=checkpointed)
    needs = memory.amounts(need, card_bytes, family)
    words = int(plan.lengths.sum())
    lines = [
        Text(
            "program.plan",
            "\n{stage}: {tracks} tracks, {tokens:,} tokens; {steps_per_epoch} steps per epoch of {batch} tracks, "
            "{steps} steps in total; {precision}",
            stage=name,
            tracks=len(rows),
            tokens=words,
            steps_per_epoch=plan.steps_per_epoch,
            batch=options["global_batch_size"],
            steps=steps,
            precision=precision.reason,
        ),
        Text(
            "program.plan-pass",
            "  {ranks:plural rank ranks}, at most {share:plural track tracks} each per step; the largest "
            "micro-batch "
            "has {rows} tracks x {length} tokens, {passes:plural pass passes} per step",
            ranks=ranks,
            share=-(-options["global_batch_size"] // ranks),
            rows=heavy.rows,
            length=heavy.length,
            passes=heavy.of_step,
        ),
        Text("program.plan-memory", "  {memory}", memory=needs),
    ]
    lines += [
        Text("program.plan-note", "  note: {text}", text=problem)
        for problem in batch_problems(
            batch_size=options["global_batch_size"],
            world_size=ranks,
            micro_batch=options["micro_batch_size"],
            samples=len(rows),
        )
    ]
    if card_bytes is None or need.on_card(family) <= card_bytes:
        return lines, []
    out = sizing.fixes(
        sizes,
        heavy,
        precision=precision,
        world_size=ranks,
        family=family,
        card_bytes=card_bytes,
        checkpointed=checkpointed,
    )
    return lines, [
        Text("program.stage-does-not-fit", "{stage}: {need}; change one of: {fixes}", stage=name, need=needs, fixes=out)
    ]


def warnings(
    name: str, samples: Samples, sizes: Sizes, options: Options, here: Runtime, *, weights: int
) -> Sequence[Text | str]:
    """Before a training begins: what does not divide, and whether a large model will not fit; an estimate is no fact,
    so nothing is refused. For rank 0; nothing elsewhere."""
    if not here.is_first:
        return []
    rows, share = next((rows, share) for each, rows, share in trainings(options, samples) if each == name)
    if weights < LARGE or options["auto_find_batch_size"]:
        return batch_problems(
            batch_size=options["global_batch_size"],
            world_size=here.world_size,
            micro_batch=options["micro_batch_size"],
            samples=len(rows),
        )
    family, precision, card_bytes = planned("", options["dtype"], here.accelerator)
    lines, wrong = account(
        name,
        rows,
        share,
        sizes,
        options,
        ranks=here.world_size,
        family=family,
        precision=precision,
        card_bytes=card_bytes,
    )
    return [*(str(line).strip() for line in lines), *wrong]
