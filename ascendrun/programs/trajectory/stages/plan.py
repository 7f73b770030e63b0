"""`--mode=plan`: steps and memory of pretraining and finetuning, estimated on any machine without a device."""

from __future__ import annotations

from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.choice import log_plan, training_of
from ascendrun.programs.trajectory.data import Options, make_samples
from ascendrun.programs.trajectory.pretrain import unlabelled
from ascendrun.programs.trajectory.stages.common import introduce, refuse, start_with
from ascendrun.programs.trajectory.train import plan_of, work_on


def plan_stage(options: Options, here: Runtime) -> None:
    """Log estimates. Raises ModelTooLargeError if a training does not fit, InvalidDataError if none is possible."""
    refuse(options)
    samples = make_samples(options)
    introduce(options, samples, here)
    sizes, _ = start_with(options, samples, here)
    for mode, rows in (("pretrain", unlabelled(samples)), ("finetune", samples.encoded["train"])):
        training = training_of({**options, "mode": mode}, here, program="trajectory")
        plan = plan_of(rows, options)
        here.log(
            "program.plan",
            "\n{stage}: {tracks} tracks, {tokens:,} tokens",
            stage=mode,
            tracks=len(rows),
            tokens=int(plan.lengths.sum()),
        )
        work = work_on(plan, training.options, sizes, ranks=training.ranks, family=training.family)
        log_plan(training, work, here)
    here.record(done=True)
