"""Plans of trainings: facts of the nodes and recorded runs, evaluated by the rules and the cost model of planner/."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.engines import time_limit_s
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobfile.spec import parse_program_options
from ascendrun.facts.chips import Chip, chip_of
from ascendrun.head.survey.submission import Submission
from ascendrun.options import JOB_FILE, check_arguments, with_defaults
from ascendrun.planner.cost import RecordedRun, with_history
from ascendrun.planner.fitting import devices_of, settle
from ascendrun.planner.models import Workload
from ascendrun.planner.plan import Disk, TrainingPlan, choose_micro_batch, make_plan
from ascendrun.planner.training import ANYWHERE, AUTO, PlanProblem, Training, batch_of_ranks, load_programs, rules_of
from ascendrun.text import Text, listed

if TYPE_CHECKING:
    from ascendrun.head.state.job_table import StoredJob
    from ascendrun.health.survey.check_context import CheckContext

PROBES = ("training", "npu-smi", "disk", "write")
RUNS_READ = 40
"""Newest jobs whose metrics are read for the speed of a new one."""
RunsOf = Callable[[str, Submission], Sequence[RecordedRun]]
"""Recorded runs of a program on the hosts of a stage, oldest first."""


@dataclass(frozen=True)
class TrainingStage:
    """A stage as it is known without its nodes. `training` None: its program has no rules, and it is not planned.

    `inputs`: paths of its files by option.
    """

    submission: Submission
    training: Training | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that the nodes read for the plan."""
        kept = self.training.checkpoints if self.training is not None else ""
        return tuple(path for path in (*self.inputs.values(), kept) if path.startswith("/"))


def training_stages(submissions: Sequence[Submission]) -> tuple[TrainingStage, ...]:
    """Return the stages of a job in their order; each knows what earlier ones write. Their hosts are placed."""
    written: list[str] = []
    earlier: dict[str, dict[str, Mapping[str, Any]]] = {}
    found = []
    for submission in submissions:
        spec = submission.spec
        name = spec.program or ""
        table, rules = load_programs(parse_program_options).get(name), rules_of(name)
        if table is None or rules is None:
            found.append(TrainingStage(submission))
            written.append(ANYWHERE)
            continue
        stages = earlier.setdefault(name, {})
        training = Training(
            name,
            with_defaults(table, spec.args),
            frozenset(spec.args),
            *_ranks(submission, None),
            tuple(host.name for host in submission.hosts),
            _family(spec),
            written=tuple(written),
            has_workdir=spec.workdir is not None,
            earlier=dict(stages),
            checkpoints=spec.checkpoint.dir or "",
        )
        found.append(TrainingStage(submission, training, rules.inputs(training)))
        output = str(spec.args.get("output_dir") or "out")
        stages[posixpath.normpath(output)] = training.options
        written.append(output)
    return tuple(found)


def refusal(plans: Sequence[TrainingPlan]) -> Text | None:
    """Return why the trainings would fail, with all fatal problems; None: none has one."""
    lines = [_line(plan, problem) for plan in plans for problem in plan.fatal]
    if not lines:
        return None
    return listed("plan.refused", count=len(lines), lines=lines)


def hosts_at_fault(plans: Sequence[TrainingPlan]) -> tuple[str, ...]:
    """Return the hosts on which the trainings would fail; (): on any."""
    fatal = [problem for plan in plans for problem in plan.fatal]
    if any(not problem.hosts for problem in fatal):
        return ()
    return tuple(sorted({host for problem in fatal for host in problem.hosts}))


def _line(plan: TrainingPlan, problem: PlanProblem) -> Text:
    what = problem.message
    if problem.hosts:
        what = listed("plan.on-hosts", hosts=problem.hosts, message=what)
    if plan.stage:
        what = listed("plan.in-stage", stage=plan.stage, message=what)
    if problem.hint is None:
        return what
    return listed("plan.with-hint", message=what, hint=problem.hint)


def expected(plan: TrainingPlan) -> dict[str, list[float]]:
    """Return (lowest, highest) of what a report compares with the measured values; missing: unknown."""
    chosen = plan.choice.chosen if plan.choice is not None else None
    cost = plan.cost
    found = {
        "memory_bytes": None if chosen is None or plan.memory_bytes is None else chosen.memory.range,
        "tokens_per_s": None if cost is None else cost.tokens_per_s,
        "hours": None if cost is None or cost.seconds is None else cost.seconds.times(1 / 3600),
    }
    return {name: [value.low, value.high] for name, value in found.items() if value is not None}


def chosen_args(plan: TrainingPlan, spec: JobSpec) -> dict[str, Any]:
    """Return the options that the plan chose, as the ranks get them: the batch of a step is the same with any number of
    ranks."""
    if not plan.tried or plan.work is None:
        return {}
    table = load_programs(parse_program_options)[str(spec.program)]
    batch = {} if "global_batch_size" not in table.options else {"global_batch_size": plan.work.samples_per_step}
    return {"micro_batch_size": plan.tried[0].size, **batch}


def plan_stage(stage: TrainingStage, world: CheckContext, runs_of: RunsOf) -> TrainingPlan:
    """Return the plan of a stage. `world`: what its hosts have at its paths, and their devices and disks."""
    submission, spec, training = stage.submission, stage.submission.spec, stage.training
    is_auto = spec.args.get("micro_batch_size") == AUTO
    if training is None:
        plan = TrainingPlan(submission.stage, spec.program, tuple(host.name for host in submission.hosts), 0)
        return choose_micro_batch(plan, (), is_final=True) if is_auto else plan
    name, inputs = training.program, stage.inputs
    table, program = load_programs(parse_program_options)[name], rules_of(name)
    made = {path for path in inputs.values() if training.is_from_stage(path)}
    unknown = [listed("plan.unreached", host=host, reason=one.message) for host, one in world.unreached.items()]
    files: dict[str, Mapping[str, Any]] = {}
    for host, facts in world.facts.items():
        if facts.training is not None:
            found = facts.training.items()
            own = {path: raw for path, raw in found if path in stage.paths}
            files[host] = {path: raw for path, raw in own.items() if not (raw.get("missing") and path in made)}
        elif stage.paths:
            unknown.append(listed("plan.late", host=host))
    for option, path in inputs.items():
        at = {"option": option, "path": path}
        if path in made and not any(path in each for each in files.values()):
            unknown.append(listed("plan.from-stage", **at))
        elif not path.startswith("/") and spec.workdir is not None:
            unknown.append(listed("plan.in-workdir", **at))
    chip, memory_bytes = _chip(spec, world)
    ranks, per_host = _ranks(submission, world)
    batch = batch_of_ranks(table, spec.args, ranks)
    training = replace(
        training,
        options={**training.options, **({} if batch is None else {"global_batch_size": batch})},
        ranks=ranks,
        ranks_per_host=per_host,
        chip=chip,
        memory_bytes=memory_bytes,
        host_bytes=_host_bytes(world, per_host),
        files=files,
    )
    requested = training
    training, tried = settle(training)
    devices = devices_of(training)
    work = program.workload(training) if training.mode in program.TRAINS else None
    if work is not None:

        def estimate(run: RecordedRun) -> Workload | None:
            if check_arguments(table, run.args, JOB_FILE)[1]:  # of another release
                return None
            options = with_defaults(table, run.args)
            if str(options.get("mode")) != str(training.options.get("mode")):
                return None
            found: Workload | None = program.workload(replace(training, options=options, ranks=run.ranks))
            return found

        work, devices = with_history(work, devices, runs_of(name, submission), estimate)
    plan = make_plan(training, devices, work=work, stage=submission.stage, disks=_disks(spec, world), unknown=unknown)
    elastic = () if spec.min_nodes is None else tuple(_with_fewer_nodes(plan, requested, spec, batch))
    plan = replace(plan, problems=(*elastic, *plan.problems, *_beyond_limit(plan, spec)))
    is_final = world.plan is not None or not (unknown or training.written)
    return choose_micro_batch(plan, tried, is_final=is_final) if is_auto else plan


def _with_fewer_nodes(
    plan: TrainingPlan, training: Training, spec: JobSpec, batch: int | None
) -> Iterator[PlanProblem]:
    """Yield what would end a training that loses hosts: its batch of a step if it has one by the number of ranks
    (`batch`), and what refuses it on the largest number of nodes on which it is refused."""
    now, program = len(training.hosts), rules_of(training.program)
    wanted, least = spec.nodes or now, spec.min_nodes or now
    if batch is not None and least < wanted:
        yield PlanProblem.of("batch-of-nodes", "global_batch_size", batch=batch // now * wanted)
    for nodes in range(now - 1, least - 1, -1) if not plan.fatal else ():
        fewer, _ = settle(replace(training, ranks=nodes * training.ranks_per_host))
        work = program.workload(fewer) if fewer.mode in program.TRAINS else None
        for problem in make_plan(fewer, devices_of(fewer), work=work).fatal[:1]:
            yield PlanProblem.of("fewer-nodes", problem.option, nodes=nodes, above=nodes + 1, message=problem.message)
            return


def _beyond_limit(plan: TrainingPlan, spec: JobSpec) -> Sequence[PlanProblem]:
    """Return the problem that its engine ends the job before the training is done."""
    limit_s, seconds = time_limit_s(spec.engine), plan.cost.seconds if plan.cost is not None else None
    if limit_s is None or seconds is None or seconds.low <= limit_s or spec.restart.max_restarts:
        return ()
    return (PlanProblem.of("time-limit", is_fatal=False, limit_s=limit_s, least_s=seconds.low),)


def _ranks(submission: Submission, world: CheckContext | None) -> tuple[int, int]:
    """Return (all ranks, ranks of the fullest host): by the launch plan, else by the job file and the hostfile."""
    if world is not None and world.plan is not None:
        each = [len(node.ranks) for node in world.plan.nodes]
        return sum(each), max(each)
    devices = submission.spec.devices
    each = [len(devices.ids or ()) or devices.per_node or host.slots or 1 for host in submission.hosts]
    return sum(each), max(each)


def _family(spec: JobSpec) -> str:
    given = str(spec.args.get("device") or "auto")
    return str(spec.devices.type) if given == "auto" else given


def _chip(spec: JobSpec, world: CheckContext) -> tuple[Chip | None, int | None]:
    """Return (the chip, bytes of one device); None: unknown, or they differ."""
    named = spec.args.get("chip")
    if named:
        chip = chip_of(str(named))
        return chip, None if chip is None else chip.memory_bytes
    if _family(spec) == "cpu":
        return None, None
    infos = [facts.npu.info for facts in world.facts.values()]
    names = {chip.name for info in infos if info is not None for chip in info.chips if chip.name}
    if len(names) != 1:
        return None, None
    chip = chip_of(names.pop())
    return chip, None if chip is None else chip.memory_bytes


def _host_bytes(world: CheckContext, ranks: int) -> int | None:
    """Return the memory of the smallest host for each of this many ranks; None: unknown."""
    known = [facts.memory_bytes for facts in world.facts.values() if facts.memory_bytes]
    return min(known) // ranks if known and ranks else None


def _disks(spec: JobSpec, world: CheckContext) -> dict[str, Disk]:
    found = {}
    for host, facts in world.facts.items():
        path = spec.checkpoint.dir or facts.root
        if not path:
            continue
        disk = (facts.disks or {}).get(path)
        write = (facts.writes or {}).get(path)
        error = write.error if write is not None else None
        found[host] = Disk(path, disk.free_bytes if disk is not None else None, error)
    return found


def recorded_runs(
    stored: Sequence[StoredJob], state_dir: Path, program: str, submission: Submission
) -> tuple[RecordedRun, ...]:
    """Return the runs of this program on these hosts and this kind of device, oldest first; `stored` are read."""
    from ascendrun.head.spool.metrics_reader import read_first_rank
    from ascendrun.head.state.state_dir import spool_dir

    hosts, family = {host.name for host in submission.hosts}, str(submission.spec.devices.type)
    found: list[RecordedRun] = []
    for one in reversed(stored):
        spec = one.spec
        if spec.get("program") != program or (spec.get("devices") or {}).get("type") != family:
            continue
        if not hosts & set(one.job.hosts) or not one.job.attempt:
            continue
        lines, _ = read_first_rank(spool_dir(state_dir, one.job.id, one.job.attempt), most=2000)
        start = next((line for line in lines if line.event == "start"), None)
        speeds = [line.tokens_per_s for line in lines if line.tokens_per_s and line.event is None]
        if start is None or not speeds or not (start.world_size and start.tokens_per_step and start.flops_per_step):
            continue
        speeds = speeds[1:] or speeds  # the first line has the warm-up of caches and kernels
        found.append(
            RecordedRun(
                one.job.id,
                start.world_size,
                start.parameters or 0.0,
                median(speeds),
                start.tokens_per_step,
                start.flops_per_step / start.tokens_per_step,
                spec.get("args") or {},
            )
        )
    return tuple(reversed(found))
