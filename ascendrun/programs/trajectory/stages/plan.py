"""`--mode=plan`: steps and memory of pretraining and finetuning, estimated on any machine without a device."""

from __future__ import annotations

from collections.abc import Sequence

from ascendrun.programs.errors import ModelTooLargeError
from ascendrun.programs.trainer.dry_run import batch_problems
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies import memory
from ascendrun.programs.trajectory import sizing
from ascendrun.programs.trajectory.data import Options, Samples, make_samples
from ascendrun.programs.trajectory.model import Sizes
from ascendrun.programs.trajectory.pretrain import unlabelled
from ascendrun.programs.trajectory.stages.common import introduce, refuse, start_with
from ascendrun.programs.trajectory.tokens import Encoded
from ascendrun.programs.trajectory.train import plan_of, steps_of
from ascendrun.text import Text

LARGE = 100_000_000
"""Number of weights from which memory is also estimated before a training starts; smaller models fit anywhere."""


def plan_stage(options: Options, here: Runtime) -> None:
    """Log estimates. Raises ModelTooLargeError if a training does not fit, InvalidDataError if none is possible."""
    ranks = options["world_size"] or here.world_size
    target = memory.target_of(here.accelerator, options["dtype"], ranks, chip=options["chip"])
    refuse(options)
    samples = make_samples(options)
    introduce(options, samples, here)
    sizes, _ = start_with(options, samples, here)
    problems: list[Text] = []
    for name, rows, fraction in trainings(options, samples):
        lines, wrong = account(name, rows, fraction, sizes, options, target)
        here.log("\n".join(map(str, lines)))
        problems += wrong
    if problems:
        raise ModelTooLargeError.of(problems)
    here.record(done=True)


def trainings(options: Options, samples: Samples) -> list[tuple[str, Sequence[Encoded], float]]:
    """Return (name, tracks, fraction of the tokens to predict) of the trainings that the options could start."""
    asked = 1.0 if options["objective"] == "clm" else float(options["mlm_probability"])
    return [("pretrain", unlabelled(samples), asked), ("finetune", samples.encoded["train"], 0.0)]


def account(
    name: str, rows: Sequence[Encoded], fraction: float, sizes: Sizes, options: Options, target: memory.Target
) -> tuple[list[Text], list[Text]]:
    """Return (lines about steps, passes and memory, reasons why it does not fit)."""
    plan, ranks = plan_of(rows, options), target.world_size
    largest = sizing.largest_pass(plan, options, family=target.family, world_size=ranks, requested_fraction=fraction)
    checkpointed = options["gradient_checkpointing"]
    need = sizing.estimate(sizes, largest, target, checkpointed=checkpointed)
    amounts = memory.amounts(need, target)
    lines = [
        Text(
            "program.plan",
            "\n{stage}: {tracks} tracks, {tokens:,} tokens; {steps_per_epoch} steps per epoch of {batch} tracks, "
            "{steps} steps in total; {precision}",
            stage=name,
            tracks=len(rows),
            tokens=int(plan.lengths.sum()),
            steps_per_epoch=plan.steps_per_epoch,
            batch=options["global_batch_size"],
            steps=steps_of(options, plan),
            precision=target.precision.reason,
        ),
        Text(
            "program.plan-pass",
            "  {ranks:plural rank ranks}, at most {share:plural track tracks} each per step; the largest "
            "micro-batch "
            "has {rows} tracks x {length} tokens, {passes:plural pass passes} per step",
            ranks=ranks,
            share=-(-options["global_batch_size"] // ranks),
            rows=largest.rows,
            length=largest.length,
            passes=largest.of_step,
        ),
        Text("program.plan-memory", "  {memory}", memory=amounts),
        *(
            Text("program.plan-note", "  note: {text}", text=problem)
            for problem in batch_problems(options, ranks, len(rows))
        ),
    ]
    if need.fits(target):
        return lines, []
    changes = sizing.fixes(sizes, largest, target, checkpointed=checkpointed)
    return lines, [
        Text(
            "program.stage-does-not-fit",
            "{stage}: {need}; change one of: {fixes}",
            stage=name,
            need=amounts,
            fixes=changes,
        )
    ]


def warnings(
    name: str, samples: Samples, sizes: Sizes, options: Options, here: Runtime, *, weights: int
) -> Sequence[Text | str]:
    """Return warnings before a training: batches that do not divide, a large model that does not fit. An estimate may
    be wrong, so nothing is rejected. Rank 0 only; other ranks return nothing."""
    if not here.is_first:
        return []
    rows, fraction = next((rows, fraction) for each, rows, fraction in trainings(options, samples) if each == name)
    if weights < LARGE or options["auto_find_batch_size"]:
        return batch_problems(options, here.world_size, len(rows))
    target = memory.target_of(here.accelerator, options["dtype"], here.world_size)
    lines, wrong = account(name, rows, fraction, sizes, options, target)
    return [*(str(line).strip() for line in lines), *wrong]
