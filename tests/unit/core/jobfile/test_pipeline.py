"""What a stage inherits of its pipeline's common part, and what it says itself."""

import pytest

from ascendrun.core.errors import InvalidInputError
from ascendrun.core.jobfile.pipeline import StageJob
from ascendrun.core.jobfile.spec import parse_program_options, parse_stages

OPTIONS = '{"options": {"lr": {"type": "float", "help": "h"}, "epochs": {"type": "int", "help": "h"}}}'
PROGRAMS = {name: parse_program_options(name, OPTIONS) for name in ("trainer", "other")}
COMMON = "name: pipe\nprogram: trainer\nargs: {lr: 1e-4, epochs: 3}\nenv: {A: 1, B: 2}\ndevices: {per_node: 4}\n"


def stages(text: str, *overrides: str) -> tuple[StageJob, ...]:
    return parse_stages(text, "pipe.yaml", overrides=overrides, programs=PROGRAMS)


def test_a_stage_gets_the_common_part_and_its_own_keys_win_one_by_one() -> None:
    first, second = stages(COMMON + "stages: [{name: one}, {name: two, args: {lr: 0.1}, env: {B: 3}, nodes: 2}]\n")
    assert (first.stage, first.needs, first.spec.name) == ("one", None, "pipe.one")
    assert (second.stage, second.needs, second.spec.name) == ("two", "one", "pipe.two")
    assert first.spec.args == {"lr": 1e-4, "epochs": 3} and second.spec.args == {"lr": 0.1, "epochs": 3}
    assert second.spec.env == {"A": "1", "B": "3"} and (first.spec.nodes, second.spec.nodes) == (None, 2)
    assert not first.spec.stages and not second.spec.stages


def test_a_stage_needs_the_one_above_it_or_the_one_that_it_names() -> None:
    found = stages(COMMON + "stages: [{name: a}, {name: b}, {name: c, needs: a}, {name: d}]\n")
    assert [one.needs for one in found] == [None, "a", "a", "c"]


def test_a_stage_with_a_command_or_another_program_gets_no_words_of_the_common_program() -> None:
    found = stages(COMMON + "stages: [{name: a, command: [python, x.py]}, {name: b, program: other}, {name: c}]\n")
    assert found[0].spec.program is None and not found[0].spec.args and not found[1].spec.args
    assert found[2].spec.args == {"lr": 1e-4, "epochs": 3}


def test_devices_by_number_and_by_id_replace_each_other() -> None:
    (one,) = stages(
        COMMON.replace("{per_node: 4}", "{type: npu, per_node: 4}") + "stages: [{name: a, devices: {ids: [0, 1]}}]\n"
    )
    assert (one.spec.devices.type, one.spec.devices.per_node, one.spec.devices.ids) == ("npu", None, (0, 1))


def test_an_override_of_the_common_part_reaches_every_stage_and_one_of_a_stage_that_one_alone() -> None:
    text = COMMON + "stages: [{name: a}, {name: b, args: {lr: 0.1}}]\n"
    assert [one.spec.args["lr"] for one in stages(text, "args.lr=7")] == [7.0, 7.0]
    assert [one.spec.args["lr"] for one in stages(text, "stages.b.args.lr=7")] == [1e-4, 7.0]
    assert [one.spec.nodes for one in stages(text, "nodes=3")] == [3, 3]
    with pytest.raises(InvalidInputError) as refused:
        stages(text, "stages.zz.args.lr=7")
    assert refused.value.problems[0].message.values == {"stage": "zz"}


def test_stages_that_may_run_side_by_side_must_stage_the_same_files() -> None:
    """They share one working folder on a host: each start would take the other's files away."""
    text = (
        COMMON + "workdir: {path: a}\nstages:\n- {name: one}\n- {name: two, workdir: {path: b}}\n"
        "- {name: three, needs: one, workdir: {path: c}}\n- {name: four, needs: one, workdir: {path: c}}\n"
    )
    with pytest.raises(InvalidInputError) as refused:
        stages(text)
    assert [(problem.line, problem.message.values) for problem in refused.value.problems] == [
        (10, {"first": "two", "second": "three"}),
        (11, {"first": "two", "second": "four"}),
    ]
    assert len(stages(text.replace("needs: one, workdir: {path: c}", "needs: one, workdir: {path: b}"))) == 4
    assert len(stages(text.replace("needs: one", "needs: two").replace("four, needs: two", "four, needs: three"))) == 4


def test_a_file_without_stages_is_one_job() -> None:
    (one,) = stages(COMMON)
    assert (one.stage, one.needs, one.spec.name) == (None, None, "pipe")
    assert parse_stages(COMMON + "stages: [{name: a}]\n", "pipe.yaml", programs=PROGRAMS)[0].spec.name == "pipe.a"


def test_a_problem_of_the_common_part_is_told_once() -> None:
    with pytest.raises(InvalidInputError) as refused:
        stages(COMMON + "nodez: 2\nstages: [{name: a}, {name: b}]\n")
    assert len(refused.value.problems) == 1


ALIASED = {
    "train": parse_program_options(
        "train", '{"options": {"learning_rate": {"type": "float", "default": 1.0, "help": "x", "aliases": ["lr"]}}}'
    )
}
ARGS = "name: p\nprogram: train\nargs: {learning_rate: 0.1}\n"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (ARGS + "stages: [{name: a, args: {lr: 0.5}}]\n", ()),
        (ARGS + "stages: [{name: a}]\n", ("stages.a.args.lr=0.5",)),
        (ARGS + "stages: [{name: a, args: {learning_rate: 0.2}}]\n", ("args.lr=0.5",)),
        (ARGS, ("args.lr=0.5",)),
        (ARGS.replace("learning_rate", "lr"), ("args.learning_rate=0.5",)),
    ],
)
def test_a_name_and_its_alias_override_each_other(text: str, overrides: tuple[str, ...]) -> None:
    (job,) = parse_stages(text, "p.yaml", overrides=overrides, programs=ALIASED)
    assert job.spec.args == {"learning_rate": 0.5}


@pytest.mark.parametrize("args", ["{lr: 1, learning_rate: 2}", "{learning_rate: 2, lr: 1}"])
def test_a_name_and_its_alias_in_one_section_are_a_problem(args: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_stages(ARGS + f"stages: [{{name: a, args: {args}}}]\n", "p.yaml", programs=ALIASED)
    assert [problem.message.key for problem in caught.value.problems] == ["options.same"]
