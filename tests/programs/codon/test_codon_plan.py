"""What the plan refuses before devices are taken, and the steps and size of a training."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendrun.options import read_table
from ascendrun.planner import codon as plan
from ascendrun.planner.training import Training, judge, with_defaults
from ascendrun.programs import codon as program

TABLE = read_table("codon", Path(program.__file__).with_name("options.json").read_text(encoding="utf-8"))
FACTS = {"sequences": {"train": 102, "val": 5}, "mean_tokens": 300.0, "longest": 1500}


def training(ranks=1, files=None, **args):
    options = with_defaults(TABLE, {"mode": "pretrain", "data_path": "generated", **args})
    return Training("codon", options, frozenset(args), ranks, ranks, ("a",), "npu", files={"a": files or {}})


@pytest.mark.parametrize(
    "args, code",
    [
        ({"mode": "finetune"}, "codon-base"),
        ({"mode": "evaluate"}, "model-required"),
        ({"attention": "block_sparse"}, "codon-block-sparse"),
        ({"hidden_size": 100}, "codon-heads"),
        ({"data_path": ""}, "no-data-path"),
        ({"prepared_dir": "out/prep"}, "not-written"),
        ({"mode": "finetune", "base_model": "out/best"}, "not-written"),
        ({"ranks": 4, "global_batch_size": 6}, "uneven-batch"),
        ({"chip": "910Z"}, "unknown-chip"),
    ],
)
def test_options_that_do_not_fit_are_problems(args, code):
    assert code in {problem.code for problem in judge(training(**args), plan.RULES)}


def test_data_on_the_nodes_is_looked_at():
    file = {"name": "a.csv", "bytes": 9, "columns": ["dna", "protein"]}
    found = {"/data/a.csv": {"kind": "data", "files": [file], "more": 0}}
    (problem,) = judge(training(files=found, data_path="/data/a.csv"), plan.RULES)
    assert (
        problem.code == "codon-columns"
        and problem.hosts == ("a",)
        and problem.message.values["missing"] == ["organism"]
    )
    assert judge(training(files=found, data_path="/data/a.csv", organism="51"), plan.RULES) == ()
    prepared = {"/prep": {"kind": "prepared", "facts": FACTS}}
    (problem,) = judge(training(files=prepared, prepared_dir="/prep", max_position_embeddings=1024), plan.RULES)
    assert problem.code == "codon-positions"


@pytest.mark.parametrize(
    "ranks, args, steps", [(1, {}, 17 * 15), (2, {"global_batch_size": 12}, 9 * 15), (1, {"max_steps": 20}, 20)]
)
def test_steps_and_size_of_the_guides_training(ranks, args, steps):
    """S4-31, S4-B2: 102 samples in batches of 6 are 17 steps an epoch, for 15 epochs."""
    found = training(ranks, {"/prep": {"kind": "prepared", "facts": FACTS}}, prepared_dir="/prep", **args)
    work = plan.workload(found)
    assert work is not None and work.steps == steps and judge(found, plan.RULES) == ()
    assert (
        work.weights == 89_579_610 and work.micro_length == 1504 and work.tokens_per_step == 300 * work.samples_per_step
    )
