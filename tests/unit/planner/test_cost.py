"""Estimates: their numbers add up whatever the options; layouts, recorded runs, and a job file at full size."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.cli import main
from ascendrun.core.jobfile.spec import parse_program_options
from ascendrun.core.settings import Settings
from ascendrun.head.protocol.control_messages import ReadJob
from ascendrun.head.survey.job_reading import read_submissions
from ascendrun.head.survey.training_plan import plan_stage, training_stages
from ascendrun.options import with_defaults
from ascendrun.planner import cost
from ascendrun.planner.cost import Devices, Option, Range, RecordedRun, compare, layouts, with_history
from ascendrun.planner.fitting import make_choice, memory_problems
from ascendrun.planner.models import LINEAR, Workload, shape_of
from ascendrun.planner.plan import TrainingPlan, make_plan, render
from ascendrun.planner.training import PlanProblem, Training, load_programs, rules_of
from ascendrun.programs.qwen_lora import rules as qwen_lora
from ascendrun.programs.trajectory import rules as trajectory
from tests.lib.plan_world import PlanCluster
from tests.thorough import examples

SHARED = {
    "data_path": st.just("generated"),
    "global_batch_size": st.integers(1, 300),
    "micro_batch_size": st.integers(0, 16),
    "num_train_epochs": st.integers(1, 5),
    "max_steps": st.integers(0, 500),
    "save_steps": st.integers(0, 200),
    "save_total_limit": st.integers(1, 4),
}
OF_PROGRAM = {
    "qwen_lora": {
        **SHARED,
        "synthetic_samples": st.integers(20, 5000),
        "val_size": st.sampled_from([0.0, 0.05, 0.3]),
        "model_preset": st.sampled_from(["tiny", "qwen2.5-1.5b", "qwen2.5-32b"]),
        "lora_r": st.integers(1, 64),
        "lora_dropout": st.sampled_from([0.0, 0.1]),
        "target_modules": st.lists(st.sampled_from(LINEAR), min_size=1, unique=True),
        "cutoff_len": st.sampled_from([64, 1024, 2048]),
        "packing": st.booleans(),
        "gradient_checkpointing": st.sampled_from([None, True, False]),
        "strategy": st.sampled_from(["auto", "ddp", "fsdp2", "hsdp", "zero3"]),
        "cpu_offload": st.booleans(),
    },
    "trajectory": {
        **SHARED,
        "mode": st.sampled_from(["train", "pretrain"]),
        "synthetic_tracks": st.integers(20, 5000),
        "hidden_size": st.sampled_from([48, 96, 768]),
        "num_attention_heads": st.sampled_from([2, 4]),
        "num_hidden_layers": st.integers(1, 12),
        "max_tokens_per_micro_batch": st.sampled_from([-1, 0, 5000]),
        "gradient_checkpointing": st.booleans(),
        "strategy": st.sampled_from(["auto", "ddp", "fsdp2", "hsdp", "zero3"]),
    },
}
PEAK, MEMORY = 3e14, 64 << 30


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Training, Devices]:
    program = draw(st.sampled_from(sorted(OF_PROGRAM)))
    family, hosts, each = (
        draw(st.sampled_from(["cpu", "cuda", "npu"])),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 8)),
    )
    args = draw(st.fixed_dictionaries({}, optional=OF_PROGRAM[program])) | {"data_path": "generated"}
    if args.get("strategy") in ("fsdp2", "hsdp", "zero3") and hosts * each == 1:
        args["strategy"] = "auto"
    if args.get("strategy") == "ddp" or hosts * each == 1:
        args.pop("cpu_offload", None)
    names = tuple(f"n{number}" for number in range(hosts))
    options = with_defaults(load_programs(parse_program_options)[program], args)
    training = Training(program, options, frozenset(args), hosts * each, each, names, family)
    recorded = draw(st.sampled_from([None, Range(1e9, 1.5e9)]))
    is_known = family != "cpu"
    devices = Devices(
        family, hosts * each, each, PEAK if is_known else None, MEMORY if is_known else None, recorded=recorded
    )
    return training, devices


@settings(max_examples=examples(60, 600))
@given(trainings())
def test_the_numbers_of_a_plan_add_up(given: tuple[Training, Devices]) -> None:
    training, devices = given
    work = rules_of(training.program).workload(training)
    plan = make_plan(training, devices, work=work)
    assert render(plan) and plan.work is not None and plan.choice is not None and plan.choice.options
    for option in plan.choice.options:
        check_memory(option, plan, devices)
    check_passes(plan, training)
    check_time(plan, devices)
    check_checkpoints(plan, training.options)


def check_memory(option: Option, plan: TrainingPlan, devices: Devices) -> None:
    memory, work = option.memory, plan.work
    assert work is not None and min(memory.parts.values()) >= 0
    assert memory.total == sum(memory.parts.values()) and memory.range.low <= memory.total <= memory.range.high
    assert set(memory.parts) <= set(cost.PARTS), "every part has a name"
    tensors = memory.total - memory.parts["overhead"]
    assert memory.parts["overhead"] == cost.overhead_of(tensors, devices.family)
    assert option.fits is (None if devices.memory_bytes is None else memory.range.low <= devices.memory_bytes)
    whole = 4 * work.trained + (work.model.weights * devices.compute_bytes if work.is_frozen else 0)
    if option.layout.offloads:
        assert memory.host * devices.ranks >= whole and "weights" not in memory.parts
        return
    group = {"ddp": 1, "hsdp": devices.ranks_per_host}.get(option.layout.strategy, devices.ranks)
    assert 0 <= memory.parts["weights"] * group - whole < group, "shards of the weights are the weights"
    assert 0 <= memory.parts["optimizer"] * group - 8 * work.trained < group


def check_passes(plan: TrainingPlan, training: Training) -> None:
    """A step's passes have room for its samples, and none of them is superfluous."""
    work, batch = plan.work, int(training.options["global_batch_size"])
    assert work is not None and work.samples_per_step == batch
    assert math.isclose(work.tokens_per_step, batch * work.mean_length)
    assert work.micro_learned <= (work.micro_rows * work.micro_length if not work.is_frozen else work.micro_length)
    if training.options.get("packing"):
        room = work.micro_rows * work.micro_batches * training.ranks * work.micro_length
        assert room >= min(work.tokens_per_step, batch * training.options["cutoff_len"])
        return
    mine = -(-batch // training.ranks)
    assert work.micro_rows * (work.micro_batches - 1) < mine <= work.micro_rows * work.micro_batches


def check_time(plan: TrainingPlan, devices: Devices) -> None:
    costs, work, choice = plan.cost, plan.work, plan.choice
    assert costs is not None and work is not None and work.steps is not None and choice is not None
    times = [option.step_s for option in choice.options]
    if devices.speed is None:
        assert times == [None] * len(times) and costs.step_s is costs.seconds is costs.tokens_per_s is None
        return
    highest = [each.high for each in times if each is not None]
    assert len(highest) == len(times) and highest == sorted(highest)
    usable = [option for option in choice.options if option.fits is not False]
    assert choice.chosen is (usable[0] if usable else None)
    assert costs.step_s is (choice.chosen or choice.options[0]).step_s
    assert costs.step_s is not None and costs.seconds is not None and costs.device_hours is not None
    assert costs.tokens_per_s is not None and costs.step_s.low <= costs.step_s.high
    assert numbers(costs.seconds) == pytest.approx(numbers(costs.step_s.times(work.steps)))
    assert numbers(costs.device_hours) == pytest.approx(
        [each * devices.ranks / 3600 for each in numbers(costs.seconds)]
    )
    whole = work.tokens_per_step * work.steps
    assert costs.tokens_per_s.low * costs.seconds.high == pytest.approx(whole)
    assert costs.tokens_per_s.high * costs.seconds.low == pytest.approx(whole)


def numbers(found: Range) -> list[float]:
    return [found.low, found.high]


def check_checkpoints(plan: TrainingPlan, options: dict[str, Any]) -> None:
    """As the loop saves: every `save_steps`, and at the end."""
    costs, work, every = plan.cost, plan.work, int(options["save_steps"])
    assert costs is not None and work is not None and work.steps is not None
    saved = [step for step in range(1, work.steps + 1) if step == work.steps or (every and step % every == 0)]
    assert costs.checkpoints == len(saved)
    together = min(len(saved), options["save_total_limit"] + 1)
    assert costs.kept_bytes == together * costs.checkpoint_bytes + work.weight_bytes_saved
    assert costs.checkpoint_bytes == 3 * 4 * work.trained, "weights and two moments"


@settings(max_examples=examples(40, 600))
@given(trainings())
def test_the_steps_of_a_plan_are_those_of_its_epochs(given: tuple[Training, Devices]) -> None:
    training, _ = given
    options, batch = training.options, int(training.options["global_batch_size"])
    if training.program == "qwen_lora":
        found, rows = qwen_lora.steps(training), qwen_lora.train_rows(training)
        is_limit = False
    else:
        found, rows = trajectory.steps(training), int(options["synthetic_tracks"] * 0.7)
        is_limit = True
    assert rows is not None and found is not None
    of_data = options["num_train_epochs"] * len(range(0, rows, batch))
    limit = options["max_steps"]
    assert found == ((min(limit, of_data) if is_limit else limit) if limit else of_data)


# --- layouts, and what recorded runs make of an estimate ---


def work(preset: str, **changes: Any) -> Workload:
    model = shape_of(qwen_lora.presets()[preset])
    assert model is not None
    values: dict[str, Any] = {
        "model": model,
        "trained": sum(64 * sum(sizes) * model.layers for sizes in model.linear.values()),
        "is_frozen": True,
        "steps": 100,
        "samples_per_step": 128,
        "tokens_per_step": 128 * 1000.0,
        "mean_length": 1000.0,
        "micro_rows": 1,
        "micro_length": 2048,
        "micro_learned": 1024,
        "micro_batches": 4,
        "is_exact": True,
        "weight_bytes_saved": 0,
    }
    return Workload(**{**values, **changes})


def npus(**changes: Any) -> Devices:
    return Devices(
        **{"family": "npu", "ranks": 16, "ranks_per_host": 8, "peak_flops": 3e14, "memory_bytes": 64 << 30, **changes}
    )


EVERY = ("ddp", "hsdp", "fsdp2", "zero3")


def test_a_small_model_is_replicated_and_a_large_one_sharded_inside_hosts() -> None:
    small = compare(work("qwen2.5-1.5b"), npus(), layouts(EVERY, recompute=True, offload=False)).chosen
    large = compare(work("qwen2.5-32b"), npus(), layouts(EVERY, recompute=True, offload=False)).chosen
    assert small is not None and small.layout.strategy == "ddp"
    assert large is not None and large.layout.strategy == "hsdp"


def test_a_model_that_fits_in_no_way_has_no_choice() -> None:
    choice = compare(
        work("qwen2.5-72b"), npus(ranks=1, ranks_per_host=1), layouts(("ddp",), recompute=None, offload=False)
    )
    assert choice.chosen is None and choice.options


def test_shards_inside_hosts_move_less_between_them() -> None:
    times = {
        option.layout.strategy: option.step_s
        for option in compare(
            work("qwen2.5-32b"), npus(), layouts(("hsdp", "fsdp2"), recompute=True, offload=False)
        ).options
    }
    assert times["hsdp"] is not None and times["fsdp2"] is not None and times["hsdp"].high < times["fsdp2"].high


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_replicated_ranks_exchange_each_gradient_twice_but_for_their_own_part(ranks: int) -> None:
    devices = npus(ranks=ranks, ranks_per_host=8, in_host=1e9)
    took_s = cost.exchange_time(work("qwen2.5-32b"), devices, cost.Layout("ddp"))
    sent = 4 * work("qwen2.5-32b").trained
    assert took_s == pytest.approx(2 * (ranks - 1) / ranks * sent / 1e9, rel=0.01)


def test_recomputed_activations_take_another_forward_pass() -> None:
    """Of six operations of a weight two are those of the forward pass."""
    once, again = (
        cost.step_time(work("tiny", is_frozen=False), npus(ranks=1), cost.Layout("ddp", recomputes), 0.0)
        for recomputes in (False, True)
    )
    assert once is not None and again is not None and again.high / once.high == pytest.approx((6 + 2) / 6)


def test_one_recorded_run_gives_a_range_of_at_most_twice_its_lower_end() -> None:
    small = work("tiny", is_frozen=False)
    run = RecordedRun("j-1", 4, float(small.trained), 5000.0, small.tokens_per_step, small.flops_per_token)
    same, devices = with_history(small, Devices("cpu", 4, 2), [run])
    assert devices.recorded is not None
    speed = devices.recorded.times(4 / same.flops_per_token)
    assert speed.low < 5000.0 < speed.high <= 2 * speed.low
    assert isinstance(speed, Range)


def test_sizes_that_a_plan_assumes_do_not_make_the_same_training_another_one() -> None:
    """The plan assumes three times the vocabulary that the data has, for the recorded run as for the new one."""
    assumed = work("tiny", is_frozen=False)
    run = RecordedRun("j-1", 4, assumed.trained / 3, 5000.0, assumed.tokens_per_step / 1.4, assumed.flops_per_token / 2)
    same, devices = with_history(assumed, Devices("cpu", 4, 2), [run], lambda run: assumed)
    assert devices.recorded is not None and same.tokens_per_step == run.tokens_per_step
    speed = devices.recorded.times(4 / same.flops_per_token)
    assert (speed.low * speed.high) ** 0.5 == pytest.approx(5000.0) and speed.high <= 2 * speed.low
    twice = work("tiny", is_frozen=False, trained=2 * assumed.trained)
    _, wider = with_history(twice, Devices("cpu", 4, 2), [run], lambda run: assumed)
    assert wider.recorded is not None and wider.recorded.high > 2 * wider.recorded.low


# --- jobs/nanochat-speedrun.yaml at full size, for eight 910B3 of one host ---


JOB = Path(__file__).resolve().parents[3] / "jobs" / "nanochat-speedrun.yaml"
ROWS: dict[str, Any] = {
    "text/a.jsonl": {"text": "a"},
    "text/b.jsonl": {"text": "b"},
    "conversations.jsonl": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "humaneval.jsonl": {"prompt": "def f():", "test": "def check(f): pass", "entry_point": "f"},
    **{f"gsm8k_{part}.jsonl": {"question": "a", "answer": "#### 1"} for part in ("train", "test")},
    **{
        f"{name}.jsonl": {"question": "a", "choices": ["b", "c"], "answer": "B"}
        for name in ("mmlu_auxiliary", "arc_train", "arc_test")
    },
}


def test_the_plan_has_memory_hours_and_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = PlanCluster(Settings(state_dir=tmp_path / "state"), tmp_path / "hosts")
    for name, row in ROWS.items():
        cluster.write("n1", f"/data/{name}", f"{json.dumps(row)}\n".encode() * 4)
    (tmp_path / "one.hosts").write_text("n1 addr=10.0.0.1 slots=8\n")
    argv = ["plan", str(JOB), "-H", str(tmp_path / "one.hosts"), "--set", "args.chip=910B3", "-o", "json"]
    assert main(argv, make_cluster=lambda settings: cluster) == 0
    stages = {each["stage"]: each for each in json.loads(capsys.readouterr().out)["stages"]}
    assert [each for stage in stages.values() for each in stage["problems"]] == []
    base = stages["base"]
    assert (base["work"]["samples_per_step"], base["ranks"], base["memory_bytes"]) == (128, 8, 64 << 30)
    for stage in map(stages.get, ("base", "mid", "sft", "rl")):
        option = stage["choice"]["chosen"]
        assert 0 < sum(option["memory"]["parts"].values()) < stage["memory_bytes"]
    cost = base["cost"]
    assert 0 < cost["tokens_per_s"]["low"] < cost["tokens_per_s"]["high"]
    tokens = base["work"]["steps"] * base["work"]["tokens_per_step"]
    for slow, fast in (("low", "high"), ("high", "low")):
        seconds = tokens / cost["tokens_per_s"][slow]
        assert cost["device_hours"][fast] == pytest.approx(8 * seconds / 3600, rel=0.01)
    assert base["speed_source"] == "assumed", "nobody has run it on an NPU"


@pytest.mark.parametrize(("limit", "restarts", "codes"), [("1", 0, ["time-limit"]), ("1", 2, []), ("365-0", 0, [])])
def test_a_training_that_its_engine_ends_before_it_is_done_is_told(
    tmp_path: Path, limit: str, restarts: int, codes: list[str]
) -> None:
    cluster = PlanCluster(Settings(state_dir=tmp_path / "state"), tmp_path / "hosts")
    for name, row in ROWS.items():
        cluster.write("n1", f"/data/{name}", f"{json.dumps(row)}\n".encode() * 4)
    (tmp_path / "one.hosts").write_text("n1 addr=10.0.0.1 slots=8\n")
    overrides = ("args.chip=910B3", f"restart.max_restarts={restarts}")
    request = ReadJob(str(JOB), "k", overrides=overrides, hostfile=str(tmp_path / "one.hosts"))
    first = read_submissions(cluster.settings, request)[1]
    engine = {"type": "slurm", "time": limit}
    stage = training_stages([replace(first, spec=first.spec.model_copy(update={"engine": engine}))])[0]
    world = cluster.head.survey(stage.submission.hosts, None, training=stage.paths)
    found = [one.code for one in plan_stage(stage, world, lambda *_: ()).problems]
    assert [code for code in found if code == "time-limit"] == codes


@settings(max_examples=examples(60, 600))
@given(trainings(), st.integers(28, 36), st.booleans())
def test_what_a_plan_proposes_makes_the_training_fit(
    given: tuple[Training, Devices], power: int, is_on_host: bool
) -> None:
    """On devices of 256 MiB to 64 GiB, or on such hosts."""
    training, devices = given
    devices = replace(devices, **{"host_bytes" if is_on_host else "memory_bytes": 1 << power})
    program = rules_of(training.program)

    def problems(training: Training, devices: Devices) -> dict[str, PlanProblem]:
        work = program.workload(training)
        found = memory_problems(training, work, make_choice(training, work, devices), devices)
        return {one.code: one for one in found}

    for code, problem in problems(training, devices).items():
        assert problem.hint is not None
        values = problem.hint.values
        if problem.hint.key == "plan.fits-nowhere":
            continue
        ranks = int(values.get("ranks", training.ranks))
        changes = values.get("changes", ["strategy: auto"] if "strategy" in training.options else ["seed: 42"])
        for change in changes if isinstance(changes, list) else [changes]:
            options = {**training.options, **yaml.safe_load(change.replace(", ", "\n"))}
            changed = replace(training, options=options, ranks=ranks)
            assert code not in problems(changed, replace(devices, ranks=ranks)), (code, change, ranks)
