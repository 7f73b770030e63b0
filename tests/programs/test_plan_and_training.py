"""What `ascendrun plan` says of a training is what the training then does: steps, weights, work, checkpoints."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascendrun.core.jobfile.spec import parse_program_options
from ascendrun.node.agent import training_files
from ascendrun.options import make_arguments, with_defaults
from ascendrun.planner.models import LINEAR, steps_of
from ascendrun.planner.training import Training, judge, load_programs
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.qwen_lora import dataset
from ascendrun.programs.qwen_lora import rules as qwen_lora
from ascendrun.programs.trainer import options as program_options
from ascendrun.programs.trajectory import rules as trajectory
from ascendrun.programs.trajectory.data import prepare, save_prepared
from ascendrun.programs.trajectory.train import plan_of, unlabelled
from tests.thorough import examples

TABLES = load_programs(parse_program_options)
LEVELS = ("explain", "reasoning", "topology")


def training_of(program: str, args: dict[str, Any], *, ranks: int = 1) -> Training:
    """What the head knows of a training on this host."""
    table = TABLES[program]
    paths = [value for value in args.values() if isinstance(value, str) and value.startswith("/")]
    files = training_files.examine({"paths": paths}, time.monotonic() + 60)["paths"]
    options = with_defaults(table, args)
    return Training(program, options, frozenset(args), ranks, ranks, ("here",), "cpu", files={"here": files})


def parsed(program: str, args: dict[str, Any]) -> dict[str, Any]:
    return program_options.parse(make_arguments(args), TABLES[program])


def write_chats(path: Path, count: int, *, has_levels: bool) -> None:
    rows = [
        {
            "instruction": f"question {number}",
            "output": "answer " * (1 + number % 7),
            **({"difficulty": LEVELS[number % 3]} if has_levels else {}),
        }
        for number in range(count)
    ]
    path.write_text(json.dumps(rows))


@settings(max_examples=examples(15, 400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 40),
    has_levels=st.booleans(),
    ranks=st.integers(1, 4),
    args=st.fixed_dictionaries(
        {},
        optional={
            "global_batch_size": st.integers(1, 20),
            "num_train_epochs": st.integers(1, 4),
            "max_steps": st.integers(0, 30),
            "val_size": st.sampled_from([0.0, 0.05, 0.2, 0.5]),
            "packing": st.booleans(),
            "curriculum": st.sampled_from(["auto", "off"]),
        },
    ),
)
def test_the_steps_of_a_plan_are_those_of_the_course(
    tmp_path: Path, tokenizer: Any, count: int, has_levels: bool, ranks: int, args: dict[str, Any]
) -> None:
    data = tmp_path / "chat.json"
    write_chats(data, count, has_levels=has_levels)
    args = {**args, "data_path": str(data), "data_cache_dir": str(tmp_path / "cache")}
    training = training_of("qwen_lora", args, ranks=ranks)
    fatal = {problem.code for problem in judge(training, qwen_lora.RULES) if problem.is_fatal}
    options = parsed("qwen_lora", args)
    try:
        lessons = dataset.make_lessons(dataset.read_texts(options), tokenizer, options)
    except InvalidDataError:
        assert fatal, "what a training refuses, the plan refuses"
        return
    assert not fatal
    course, work = dataset.make_course(lessons, options, world_size=ranks), qwen_lora.workload(training)
    assert work is not None and work.steps == course.steps
    assert qwen_lora.train_rows(training) == len(lessons.train.samples)
    given = [sum(len(unit) for unit in course.units(step)) for step in range(course.steps)]
    assert given == [work.samples_per_step] * course.steps


POINTS = "MMSI,BaseDateTime,LAT,LON,SOG,COG,class\n" + "".join(
    f"{211000000 + ship},2024-01-01T{minute // 60:02d}:{minute % 60:02d}:00,{54 + minute / 900 + ship / 50:.4f},"
    f"{10 + ship / 10:.4f},{ship % 9 + 1}.5,90.0,{('Cargo', 'Tug', '')[ship % 3]}\n"
    for ship in range(45)
    for minute in range(0, 600, 10)
)
"""Ships of two classes and of none."""


@pytest.mark.parametrize("mode", ["train", "pretrain"])
def test_the_steps_of_prepared_data_are_planned_exactly(tmp_path: Path, mode: str) -> None:
    (tmp_path / "points.csv").write_text(POINTS)
    samples = prepare({**parsed("trajectory", {}), "data_path": str(tmp_path / "points.csv")})
    save_prepared(samples, tmp_path)
    assert samples.encoded["unlabelled"]
    tracks = unlabelled(samples) if mode == "pretrain" else samples.encoded["train"]
    for changes in ({}, {"global_batch_size": 7}, {"max_steps": 5}, {"num_train_epochs": 3, "max_steps": 10**6}):
        given = {"mode": mode, "prepared_dir": str(tmp_path), **changes}
        options = parsed("trajectory", given)
        found = trajectory.workload(training_of("trajectory", given))
        assert found is not None and found.steps == steps_of(options, plan_of(tracks, options).steps_per_epoch)
        assert found.model.vocabulary == len(samples.vocabulary)
        lengths, cropped = [len(track) for track in tracks], 1 - 0.25 * options["random_crop_prob"]
        assert found.micro_length == max(lengths)
        assert found.mean_length == pytest.approx(cropped * sum(lengths) / len(lengths))


QWEN = {
    "data_path": "generated", "synthetic_samples": 40, "global_batch_size": 8, "max_steps": 3, "cutoff_len": 64,
    "lora_r": 32, "target_modules": ["q_proj", "down_proj"],
    "logging_steps": 1, "num_sample_prompts": 0,
    "save_steps": 2, "dtype": "float32", "strategy": "ddp", "gradient_checkpointing": False,
}  # fmt: skip


def test_a_training_reports_the_numbers_of_its_plan(launch: Any) -> None:
    work = qwen_lora.workload(training_of("qwen_lora", QWEN))
    assert work is not None and {"q_proj", "down_proj"} <= set(LINEAR)
    run = launch("qwen_lora", list(make_arguments(QWEN)), ranks=1).succeed()
    lines = run.metrics()
    (start,) = [line for line in lines if line.get("event") == "start"]
    assert (start["total_steps"], start["parameters"]) == (work.steps, work.trained)
    assert sum(line.get("event") == "end" and line["step"] == work.steps for line in lines) == 1
    work_per_token = start["flops_per_step"] / start["tokens_per_step"]
    assert work_per_token == pytest.approx(work.flops_per_token, rel=0.1), "but for the length of the samples"
    saved = [path for path in (run.folder / "ckpt").rglob("*") if path.is_file()]
    newest = max(path.parent for path in saved if path.name == "manifest.json")
    size = sum(path.stat().st_size for path in newest.iterdir())
    assert work.checkpoint_bytes < size < 1.1 * work.checkpoint_bytes + 30_000, "beside random numbers and names"
