"""`micro_batch_size: auto`: the plan chooses the fastest that surely fits, and the batch of a step stays the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ascendrun.cli import main
from ascendrun.core.jobfile.spec import parse_program_options
from ascendrun.core.settings import Settings
from ascendrun.planner.fitting import MicroBatch, devices_of, make_choice, settle
from ascendrun.planner.models import Workload
from ascendrun.planner.training import AUTO, Training, batch_of_ranks, load_programs, rules_of
from ascendrun.programs.trainer import options as command_line
from tests.lib.plan_world import PlanCluster, files, write_job
from tests.thorough import examples
from tests.unit.planner.test_cost import trainings

JOBS = Path(__file__).resolve().parents[3] / "jobs"
LONG = [{"instruction": "question " * 200, "output": "answer " * 400, "difficulty": "explain"} for _ in range(400)]
LARGE = ("--set", "args.base_model=", "--set", "args.model_preset=qwen2.5-32b")


class Plans:
    """The plan of a job on two hosts of eight 910B3, which have the data."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.cluster = PlanCluster(Settings(state_dir=folder / "state"), folder / "hosts")
        (folder / "two.hosts").write_text("n1 addr=10.0.0.1 slots=8\nn2 addr=10.0.0.2 slots=8\n")
        for host in ("n1", "n2"):
            self.cluster.write(host, "/data/train.json", json.dumps(LONG).encode())

    def make(self, job: Path, *argv: str, chip: str = "args.chip=910B3") -> tuple[int, dict[str, Any]]:
        hosts = ["-H", str(self.folder / "two.hosts"), "--set", chip, *argv, "-o", "json"]
        code = main(["plan", str(job), *hosts], make_cluster=lambda settings: self.cluster)
        captured = self.capsys.readouterr()
        assert captured.out, captured.err
        found = json.loads(captured.out)
        return code, found["stages"][0] if "stages" in found else found


@pytest.fixture
def plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Plans:
    return Plans(tmp_path, capsys)


@pytest.mark.parametrize("name", ["qwen32b", "qwen32b-single"])
def test_the_ready_jobs_use_the_memory_that_they_have(plans: Plans, name: str) -> None:
    code, plan = plans.make(JOBS / f"{name}.yaml", *LARGE)
    tried = {each["size"]: each for each in plan["tried"]}
    chosen = plan["tried"][0]
    assert code == 0 and sorted(tried)[:3] == [1, 2, 4] and chosen["size"] > 1 and chosen["fits"]
    assert tried[1]["time"] == 1.0 and chosen["time"] == min(each["time"] for each in tried.values() if each["fits"])
    assert chosen["time"] < 0.8, "fewer passes gather the weights less often"
    one = plans.make(JOBS / f"{name}.yaml", *LARGE, "--set", "args.micro_batch_size=1")[1]
    assert one["tried"] == [] and plan["work"]["samples_per_step"] == one["work"]["samples_per_step"] == 128
    ratio = plan["choice"]["chosen"]["step_s"]["high"] / one["choice"]["chosen"]["step_s"]["high"]
    assert ratio == pytest.approx(chosen["time"])


@pytest.mark.parametrize("per_node", [1, 3, 8])
def test_the_batch_of_a_step_does_not_depend_on_the_number_of_ranks(plans: Plans, per_node: int) -> None:
    plan = plans.make(JOBS / "qwen32b.yaml", *LARGE, "--set", f"devices.per_node={per_node}")[1]
    assert plan["ranks"] == 2 * per_node and plan["work"]["samples_per_step"] == 128


@settings(max_examples=examples(40, 400))
@given(trainings(), st.integers(28, 36))
def test_no_size_is_better_than_the_chosen_one(made: tuple[Training, object], power: int) -> None:
    training = replace(made[0], options={**made[0].options, "micro_batch_size": AUTO}, memory_bytes=1 << power)
    assume(training.family != "cpu" and not training.options.get("auto_find_batch_size"))
    settled, tried = settle(training)
    assume(tried)
    size = settled.options["micro_batch_size"]
    assert size == tried[0].size and settle(training) == (settled, tried)
    program, devices = rules_of(training.program), devices_of(training)

    def attempt(size: int) -> MicroBatch:
        options = {**settled.options, "micro_batch_size": size}
        work = program.workload(replace(settled, options=options))
        assert isinstance(work, Workload)
        choice = make_choice(replace(settled, options=options), work, devices)
        option = choice.chosen or choice.options[0]
        fits = choice.chosen is not None and option.memory.range.high <= 1 << power
        return MicroBatch(size, work.micro_batches, option, option.step_s and option.step_s.high, fits)

    found, chosen = [attempt(each.size) for each in tried], attempt(size)
    assert chosen.fits or not any(each.fits for each in found)
    if chosen.fits:
        assert all(chosen.rank <= each.rank for each in found)


@pytest.mark.parametrize("program", ["codon", "nanochat", "trajectory"])
def test_the_other_programs_with_rules_choose_too(plans: Plans, program: str) -> None:
    for host in ("n1", "n2"):
        for path, data in files().items():
            plans.cluster.write(host, path, data)
    args = {"micro_batch_size": "auto", "device": "npu"}
    code, plan = plans.make(write_job(plans.folder, program, args))
    sizes = [each["size"] for each in plan["tried"]]
    assert code == 0 and sizes and plan["choice"]["chosen"] is not None
    if program == "nanochat":
        assert plan["work"]["samples_per_step"] % (plan["ranks"] * sizes[0]) == 0


@pytest.mark.parametrize("change", ["args.chip=", "devices.type=cpu"])
def test_devices_of_unknown_memory_are_refused(plans: Plans, change: str) -> None:
    code, plan = plans.make(JOBS / "qwen32b.yaml", *LARGE[:2], "--set", "args.model_preset=tiny", "--set", change)
    found = [each["code"] for each in plan["problems"] if each["is_fatal"]]
    assert (code, found, plan["tried"]) == (3, ["micro-auto"], [])


def test_data_that_an_earlier_stage_writes_leaves_the_choice_to_the_start(plans: Plans) -> None:
    make = {"name": "make", "program": None, "command": ["python", "/opt/make.py"], "args": None}
    args = {"data_path": "/data/new.json", "model_preset": "tiny", "device": "npu", "micro_batch_size": "auto"}
    job = write_job(plans.folder, "qwen_lora", {**args, "base_model": None}, stages=[make, {"name": "train"}])
    argv = ["plan", str(job), "--set", "args.chip=910B3", "-o", "json"]
    assert main(argv, make_cluster=lambda settings: plans.cluster) == 0
    train = json.loads(plans.capsys.readouterr().out)["stages"][1]
    assert train["tried"] == [] and "plan.micro-unknown" in str(train["unknown"])


def test_a_program_of_ones_own_and_a_command_line_need_a_number(plans: Plans) -> None:
    (plans.folder / "own.py").write_text("")
    (plans.folder / "own.json").write_text('{"options": {"micro_batch_size": {}}}')
    job = write_job(plans.folder, "./own.py", {"micro_batch_size": "auto"}, workdir={"path": str(plans.folder)})
    code, plan = plans.make(job, chip="nodes=2")
    assert (code, [each["code"] for each in plan["problems"]]) == (3, ["micro-auto"])
    table = load_programs(parse_program_options)["qwen_lora"]
    with pytest.raises(command_line.InvalidOptionsError) as error:
        command_line.parse(["--micro_batch_size=auto", "--data_path=generated"], table)
    assert [each.name for each in error.value.problems] == ["micro_batch_size"]
    assert batch_of_ranks(table, {"micro_batch_size": AUTO, "packing": False}, 4) is None
