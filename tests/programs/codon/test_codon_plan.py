"""What the plan refuses before devices are taken, and the steps and size of a training."""

import json
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.node.agent import training_files
from ascendrun.option_tables import read_table
from ascendrun.options import with_defaults
from ascendrun.planner.training import Training, judge
from ascendrun.programs import codon as program
from ascendrun.programs.codon import rules as plan
from ascendrun.programs.codon.asked import read_ambiguity
from ascendrun.programs.codon.model import Config
from ascendrun.programs.codon.sequences import read_proteins
from ascendrun.programs.codon.train import steps_of
from ascendrun.programs.codon.vocabulary import ORGANISMS
from ascendrun.programs.trainer.data import Buckets, deal

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


def test_long_sequences_attend_to_fewer_tokens_with_block_sparse():
    files = {"/prep": {"kind": "prepared", "facts": {**FACTS, "mean_tokens": 1500.0}}}
    full, sparse = (
        plan.workload(training(1, files, prepared_dir="/prep", attention=each)) for each in ("full", "block_sparse")
    )
    assert full is not None and sparse is not None
    seen = 512 + 128 * (1500 - 512) / 1500
    assert full.flops_per_token - sparse.flops_per_token == pytest.approx(12 * 12 * 768 * (1500 - seen))
    assert plan.attended(704, "block_sparse") == 704 > plan.attended(705, "block_sparse")


@given(
    count=st.integers(1, 90), batch=st.integers(1, 24), micro=st.integers(0, 7), ranks=st.integers(1, 6),
    epochs=st.integers(1, 4), window=st.integers(1, 9), most=st.integers(0, 60),
)  # fmt: skip
def test_the_schedule_has_the_steps_in_which_all_ranks_read_every_sequence_once_an_epoch(
    count, batch, micro, ranks, epochs, window, most
):
    """S4-B2: whatever is accumulated, on any number of ranks, with a last batch that is not full."""
    args = {
        "global_batch_size": batch, "micro_batch_size": micro, "num_train_epochs": epochs, "max_steps": most,
        "length_bucket_batches": window,
    }  # fmt: skip
    files = {"/prep": {"kind": "prepared", "facts": {**FACTS, "sequences": {"train": count, "val": 5}}}}
    asked = training(ranks, files, prepared_dir="/prep", **args)
    order = Buckets([3 + number % 7 for number in range(count)], batch_size=batch, seed=23, window=window)
    taken = []
    for step in range(epochs * order.steps_per_epoch):
        shares = [deal(order.units(step), rank, ranks, micro_batch=micro) for rank in range(ranks)]
        assert len({len(pieces) for pieces in shares}) == 1
        numbers = [number for pieces in shares for piece in pieces for unit in piece for number in unit]
        assert numbers and all(len(piece) <= micro for pieces in shares for piece in pieces if micro)
        taken += [(step // order.steps_per_epoch, number) for number in numbers]
    assert sorted(taken) == [(epoch, number) for epoch in range(epochs) for number in range(count)]
    needed = epochs * order.steps_per_epoch
    limit = most or needed
    assert plan.steps(asked) == steps_of(asked.options, order.steps_per_epoch) == min(needed, limit)


def test_the_job_file_of_the_guide_trains_the_whole_model_with_its_values():
    job = yaml.safe_load((Path(__file__).parents[3] / "jobs" / "codon-full.yaml").read_text(encoding="utf-8"))
    args = {**job["args"], **next(stage["args"] for stage in job["stages"] if stage["name"] == "train")}
    guide = {"global_batch_size": 6, "num_train_epochs": 15, "learning_rate": 5e-5, "warmup_ratio": 0.1, "seed": 23}
    assert {name: args[name] for name in guide} == guide
    base = {"kind": "model", "config": Config().as_json()}
    files = {args["prepared_dir"]: {"kind": "prepared", "facts": FACTS}, args["base_model"]: base}
    work = plan.workload(training(files=files, **args))
    assert work is not None and (work.steps, work.weights) == (255, 89_579_610)


# --- optimization ---

MODEL = {"kind": "model", "config": {"max_position_embeddings": 40}, "organisms": {"organisms": ["Yeast", "E. coli"]}}


def optimization(files=None, earlier=None, **args):
    options = {"mode": "optimize", "model_path": "/model", "organism": "Yeast", "input": "MKT", **args}
    found = training(files={"/model": MODEL, **(files or {})}, **options)
    return Training(**{**vars(found), "earlier": earlier or {}})


def codes(found):
    return [problem.code for problem in judge(found, plan.RULES)]


@pytest.mark.parametrize(
    "args, found",
    [
        ({}, []),
        ({"avoid": ["GAATTC"]}, []),
        ({"avoid": ["ATG", "GAAJ"]}, ["codon-site"]),
        ({"avoid": ["ATG"], "gc": "40-60/50"}, ["codon-no-codon"]),
        ({"gc": "60-40"}, ["codon-gc-range"]),
        ({"no_repeat_bases": 3, "ambiguous": "perhaps"}, ["codon-repeat", "codon-ambiguous-option"]),
        ({"organism": "Yeasts", "input": "M1"}, ["codon-organism", "codon-residues"]),
        ({"organism": ""}, ["codon-organism"]),
        ({"input": "M" * 38}, ["codon-long"]),
        ({"input": "MX"}, ["codon-residues", "codon-ambiguous"]),
        ({"input": "MX", "ambiguous": "X=G"}, []),
        ({"input": "/data/proteins.txt"}, ["codon-input-form"]),
        ({"output": "dna.txt", "num_sequences": 2}, ["codon-several", "codon-output"]),
        ({"mode": "serve", "input": "", "avoid": ["TGG"]}, ["codon-no-codon"]),
    ],
)
def test_an_optimization_that_is_impossible_is_refused(args, found):
    assert codes(optimization(**args)) == found


def test_organisms_and_positions_are_those_of_the_stage_that_trains_the_model():
    stage = with_defaults(TABLE, {"mode": "pretrain", "new_organisms": ["Moss"], "max_position_embeddings": 30})
    args = {"earlier": {"out": stage}, "model_path": "out/best"}
    own = Training(**{**vars(optimization(**args, organism="Moss", input="M" * 28)), "written": ("out",)})
    assert codes(own) == ["codon-long"]
    other = Training(**{**vars(optimization(**args, organism="Mosses")), "written": ("out",)})
    assert codes(other) == ["codon-organism"]
    unknown = {"out": {**stage, "base_model": "/models/base"}}
    assert codes(Training(**{**vars(other), "earlier": unknown})) == []


PROTEINS = ["MKT", "MA1K", "M*K", "MKBX*", "", "M" * 2046, "mk t_"]


def write_proteins(path):
    rows = [{"id": f"p{at}", "protein": each, "organism": "51" if at else "nobody"} for at, each in enumerate(PROTEINS)]
    if path.suffix == ".csv":
        text = "id,protein,organism\n" + "".join(f"{row['id']},{row['protein']},{row['organism']}\n" for row in rows)
    elif path.suffix == ".jsonl":
        text = "".join(json.dumps(row) + "\n\n" for row in rows)
    else:
        text = "".join(f">{row['id']} [organism={row['organism']}]\n{row['protein']}\n" for row in rows)
    path.write_text(text)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "faa"])
def test_the_plan_finds_the_same_problems_in_a_file_as_the_program(tmp_path, ending):
    path = tmp_path / f"proteins.{ending}"
    write_proteins(path)
    seen = training_files.examine({"paths": [str(path)]}, time.monotonic() + 60)["paths"]
    found = optimization(
        {**seen, "/model": {**MODEL, "config": {"model_type": "big_bird"}, "organisms": None}},
        input=str(path),
        organism="",
    )
    problems = judge(found, plan.RULES)
    proteins, expected = read_proteins(str(path), "", ORGANISMS, read_ambiguity("error")[0])
    assert len(proteins) == 1 and len(expected) == 7
    assert sorted(str(each.message) for each in problems) == sorted(map(str, expected))
    assert {each.hosts for each in problems} == {("a",)}


def test_rows_without_a_protein_and_other_models_are_refused(tmp_path):
    path = tmp_path / "proteins.jsonl"
    path.write_text('{"protein": "MK"}\n{"dna": "ATG"}\nno\n')
    (tmp_path / "model").mkdir()
    paths = [str(path), str(tmp_path / "model")]
    seen = training_files.examine({"paths": paths}, time.monotonic() + 60)["paths"]
    found = judge(optimization(seen, input=paths[0], model_path=paths[1], organism="51"), plan.RULES)
    assert [each.code for each in found] == ["no-config", "codon-no-protein", "codon-no-protein"]
    assert [each.message.values["place"].rpartition(":")[2] for each in found[1:]] == ["2", "3"]
