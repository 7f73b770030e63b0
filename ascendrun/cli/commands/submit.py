"""submit: validate a job file, start the job, follow it. plan: what its trainings need, from the files on the nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ascendrun.cli.commands.sweep import print_sweep
from ascendrun.cli.context import CliContext
from ascendrun.cli.options import check_alone, cli_command, engine_option, hostfile_option, output_option
from ascendrun.cli.outcome import follow_job, print_outcome, print_outputs
from ascendrun.cli.output import PEOPLE, describe_seconds, print_record, sanitise_line
from ascendrun.cli.plans import exit_code, plan_lines, plan_record, plan_text
from ascendrun.cluster import JobView
from ascendrun.core.logs.log_view import LogView
from ascendrun.core.records import as_record
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cluster.job import Job
    from ascendrun.planner.plan import TrainingPlan


@cli_command("submit")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--detach", "-d", is_flag=True, help="Return as soon as the job is stored.")
@click.option("--wait", "waits", is_flag=True, help="Wait without printing log lines; exit with the job's exit code.")
@click.option("--dry-run", is_flag=True, help="Query the nodes and print what would run; start nothing.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key: args.learning_rate=1e-4.")
@click.option("--resume", metavar="PIPELINE", help="Resume this pipeline in its directory, with the file as it is now.")
@click.option(
    "--from-stage",
    metavar="STAGE",
    help="Start from this stage.  [default with --resume: the first that has not succeeded]",
)
@click.option("--until", "until_stage", metavar="STAGE", help="Omit the stages below this one.")
@click.option("--only", "only_stages", multiple=True, metavar="STAGE", help="Only this stage. Can be repeated.")
@click.option("--priority", type=click.IntRange(-1000, 1000), default=0, help="Higher ones start first.  [default: 0]")
@click.option("--hosts", metavar="HOSTS", help="Use only these hosts of the hostfile: npu[01-04] or @group.")
@click.option("--exclude", metavar="HOSTS", help="Do not use these hosts of the hostfile.")
@hostfile_option
@engine_option
@output_option
def command(
    ctx: CliContext,
    file: Path,
    detach: bool,
    waits: bool,
    dry_run: bool,
    overrides: tuple[str, ...],
    resume: str | None,
    priority: int,
    hostfile: str | None,
    engine: str | None,
    output: str | None,
    **choice: str | tuple[str, ...] | None,
) -> int:
    """Validate a job file, start the job on all its nodes, follow its output.

    ^C detaches; the job keeps running. Exits 0 when the job succeeded, 1 when it failed or was stopped,
    3 when its training would fail.

    Examples:
    ascendrun submit jobs/quickstart.yaml
    ascendrun submit job.yaml --set args.learning_rate=1e-4 --set nodes=4 --hostfile cluster.hosts
    ascendrun submit job.yaml --dry-run          # what every rank would run, and its plan
    id=$(ascendrun submit job.yaml --detach -o json | jq -r .id)
    ascendrun submit pipeline.yaml --until pretrain          # or --only pretrain, without those above it
    ascendrun submit pipeline.yaml --resume j-0003 --from-stage finetune   # keep the outputs of earlier stages
    """
    check_alone("--detach", {"--wait": detach and waits})
    of_file: dict[str, Any] = {"overrides": overrides, "hostfile": Path(hostfile) if hostfile else None}
    of_file["engine"] = engine
    here = {**of_file, **choice}
    if dry_run:
        _say_sweep(ctx, file, overrides)
        return _print_plan(file.stem, *ctx.cluster.job_files.dry_run(file, **here), output)
    made = ctx.cluster.jobs.submit(file, **here, resume=resume, priority=priority, install_log=ctx.echo)
    if made.sweep:
        return _leave_sweep(ctx, made, made.sweep, waits=waits, output=output)
    job = made.view
    submitted = Text("submit.submitted", "{job} submitted ({name})", job=job.id, name=job.name)
    if job.stages:
        submitted = Text(
            "submit.submitted-pipeline",
            "{job} submitted ({name}, {stages:plural stage stages})",
            job=job.id,
            name=job.name,
            stages=len(job.stages),
        )
    ctx.echo(submitted)
    for warning in made.warnings:
        ctx.warn(warning)
    if detach or (output is not None and not waits):
        return _leave(ctx, job, output)
    if job.stages:
        return follow_stages(ctx, job, shows_lines=not waits, output=output)
    return follow_to_the_end(ctx, job.id, shows_lines=not waits, output=output)


def _leave_sweep(ctx: CliContext, made: Job, sweep: str, *, waits: bool, output: str | None) -> int:
    """Print the jobs of a sweep, with `waits` after their end. Return the highest exit code."""
    rows, code = made.jobs, 0
    ctx.say("submit.sweep", "{sweep} submitted ({count:plural job jobs})", sweep=sweep, count=len(rows))
    for warning in made.warnings:
        ctx.warn(warning)
    if waits:
        code = max(print_outcome(ctx, ctx.cluster.jobs.wait(one.id)) for one in rows)
    print_sweep(ctx.cluster.samples.sweep(sweep), output)
    ctx.hint(f"ascendrun sweep {sweep}")
    return code


def _say_sweep(ctx: CliContext, file: Path, overrides: Sequence[str]) -> None:
    """Print how many jobs a sweep has, of which the first is planned."""
    sweep = ctx.cluster.job_files.read(file, overrides=overrides).sweep
    if sweep is not None:
        ctx.say("plan.sweep", "sweep of {count:plural job jobs}; the plan of the first:", count=sweep.count)


def _print_plan(
    job: str, plans: Sequence[Mapping[str, Any]], trainings: Sequence[TrainingPlan], output: str | None
) -> int:
    if output in PEOPLE:
        sys.stdout.write(plan_text(job, plans, trainings))
    else:
        whole = [
            {**plan, "training": plan_record(training)} if training.program is not None else dict(plan)
            for plan, training in zip(plans, trainings)
        ]
        print_record(whole[0] if len(whole) == 1 else {"stages": whole}, output)
    return exit_code(trainings)


def _leave(ctx: CliContext, job: JobView, output: str | None) -> int:
    if not print_record(job, output):
        print(job.id)
    ctx.hint(f"ascendrun logs -f {job.id}")
    ctx.hint(f"ascendrun stop {job.id}")
    return 0


def follow_stages(
    ctx: CliContext,
    pipeline: JobView,
    *,
    shows_lines: bool = True,
    output: str | None = None,
    view: LogView | None = None,
) -> int:
    """Follow the stages until all have ended or one has not succeeded; return the exit code of the last.

    `view`: its `tail` applies to the first stage only, the others are shown from their start.
    """
    code = 0
    for number, stage in enumerate(pipeline.stages, start=1):
        if stage.state.value == "SUCCEEDED":
            continue
        ctx.say(
            "submit.stage",
            "stage {number}/{count} {stage}: {job}",
            number=number,
            count=len(pipeline.stages),
            stage=stage.stage,
            job=stage.job_id,
        )
        code = follow_to_the_end(ctx, stage.job_id, shows_lines=shows_lines, view=view)
        if code:
            break
        view = None if view is None else replace(view, tail=None)
    whole = ctx.cluster.jobs.pipeline(pipeline.id)
    assert whole is not None
    if print_record(whole, output):
        return code
    if code == 0:
        ctx.say(
            "submit.pipeline-ended",
            "{job} {state} after {duration}: {stages:plural stage stages} of {name}",
            job=whole.id,
            state=whole.state,
            duration=describe_seconds((whole.ended_at_s or time.time()) - whole.created_at_s),
            stages=len(whole.stages),
            name=whole.name,
        )
    elif code == 1:
        ctx.hint(f"ascendrun submit {whole.file} --resume {whole.id}")
    if code in (0, 1) and any(stage.spec.get("outputs") for stage in ctx.cluster.jobs.stages(whole.id)):
        print_outputs(ctx, whole)
    return code


def follow_to_the_end(
    ctx: CliContext, job_id: str, *, shows_lines: bool = True, output: str | None = None, view: LogView | None = None
) -> int:
    """Follow until the job has ended and return its exit code; ^C detaches and returns 130."""
    try:
        detail = follow_job(ctx, job_id, view or LogView(), shows_lines=shows_lines)
    except KeyboardInterrupt:
        return ctx.detach(Text("submit.detached", "detached; {job} keeps running", job=job_id), f"logs -f {job_id}")
    code = print_outcome(ctx, detail)
    if detail.job.pipeline is None and detail.spec.get("outputs") and detail.job.started_at_s is not None:
        print_outputs(ctx, detail.job)
    print_record(detail.job, output)
    return code


@cli_command("plan")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key: args.learning_rate=1e-4.")
@hostfile_option
@engine_option
@output_option
def plan_command(
    ctx: CliContext,
    file: Path,
    overrides: tuple[str, ...],
    hostfile: str | None,
    engine: str | None,
    output: str | None,
) -> int:
    """Report what would fail, which strategy fits, memory, time and disk; use no device.

    The nodes read the headers of models and the rows of data. Every start of a job makes the same checks.
    Exits 3 if a training would fail.

    Examples:
    ascendrun plan jobs/qwen32b.yaml           # from the files on its nodes
    ascendrun plan job.yaml --set args.strategy=fsdp2 --set args.chip=910B3
    ascendrun plan job.yaml -o json | jq '.problems[].message'
    """
    of_file: dict[str, Any] = {"overrides": overrides, "hostfile": hostfile or None, "engine": engine}
    origins = ctx.cluster.job_files.origins(file, **of_file)
    plans = ctx.cluster.job_files.training_plans(file, **of_file)
    _say_sweep(ctx, file, overrides)
    if output in PEOPLE:
        from ascendrun.core.jobs.plan_text import origin_line

        for one in dict.fromkeys(str(origin_line(**vars(one))) for stage in origins for one in stage):
            print(sanitise_line(one))
        for line in plan_lines(plans, file.stem):
            print(line)
    else:
        records = [{**plan_record(plan), "origins": as_record(stage)} for plan, stage in zip(plans, origins)]
        print_record(records[0] if len(records) == 1 else {"stages": records}, output)
    return exit_code(plans)
