"""What the plan refuses before devices are taken, with the numbers that are valid; and the size of a step."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import models

from ascendrun.node.agent.training_files import examine
from ascendrun.option_tables import read_table
from ascendrun.options import with_defaults
from ascendrun.planner.training import Training, judge
from ascendrun.programs import nanochat as program
from ascendrun.programs.nanochat import rules as nanochat
from ascendrun.programs.nanochat import texts
from ascendrun.programs.nanochat.sizes import config_of
from tests.programs.nanochat.test_nanochat_model import sizes_of

TABLE = read_table("nanochat", Path(program.__file__).with_name("options.json").read_text(encoding="utf-8"))
BASE = {"mode": "base", "data_path": "generated", "tokenizer_dir": "/tok"}


def training(ranks=8, files=None, **args):
    options = with_defaults(TABLE, {**BASE, **args})
    return Training("nanochat", options, frozenset(args), ranks, ranks, ("a",), "npu", files={"a": files or {}})


def problems(*given, **args):
    return {problem.code: problem for problem in judge(training(*given, **args), nanochat.RULES)}


def test_the_guides_batch_is_valid_on_eight_ranks_and_refused_on_five():
    """S2-B2: the published single-node run asserts on five ranks; here the plan has the nearest valid batches."""
    guide = {"depth": 12, "micro_batch_size": 16, "total_batch_size": 262144}
    assert problems(8, **guide) == {}
    refused = problems(5, **guide)["batch-tokens"]
    assert refused.is_fatal and refused.hint is not None and refused.option == "total_batch_size"
    assert refused.hint.values["near"] == [163840, 327680]
    few = problems(1, **{**guide, "total_batch_size": 1000})["batch-tokens"]
    assert few.hint.values["near"] == [32768]


def test_the_batch_that_follows_from_the_length_is_checked_too():
    assert problems(3, depth=12)["batch-tokens"].message.values["batch"] == 1 << 19


@pytest.mark.parametrize(
    "args, code",
    [
        ({"kv_heads": 4}, "kv-heads"),
        ({"window_pattern": "SXL"}, "window-pattern"),
        ({"window_pattern": ""}, "window-pattern"),
        ({"head_dim": 3}, "head-dim"),
        ({"depth": 1, "aspect_ratio": 8, "head_dim": 8}, "narrow-model"),
        ({"data_path": ""}, "no-data-path"),
        ({"tokenizer_dir": ""}, "no-tokenizer-dir"),
        ({"tokenizer_dir": "out/tok"}, "not-written"),
        ({"max_steps": 30}, "warmup-too-long"),
    ],
)
def test_options_that_do_not_fit_are_problems(args, code):
    assert code in problems(1, **args)


@pytest.mark.parametrize("mode", ["chat", "serve", "evaluate"])
def test_a_model_that_is_not_there_or_not_ours_is_a_problem(mode):
    def found(**raw):
        given = {"tokenizer_dir": "", "data_path": "", "mixture": [{"kind": "sums"}]}
        return problems(1, {"/m": raw}, mode=mode, model_dir="/m", **given).keys()

    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    config = {"model_type": "nanochat", "max_position_embeddings": 64, **dict.fromkeys(sizes, 4)}
    assert problems(1, mode=mode, model_dir="").keys() == {"no-model-dir"}
    assert problems(1, mode=mode, model_dir="out/base").keys() == {"not-written"}
    assert found(missing=True) == {"not-found"}
    assert found(kind="data", names=("report.json",)) == {"no-chat-model"}
    assert found(kind="model", config={"model_type": "qwen2"}) == {"no-chat-model"}
    assert found(kind="model", config=config) == {"no-tokenizer"}
    assert found(kind="model", config=config, tokenizer={"found": True}) == set()


def test_an_export_reads_a_model_or_checkpoints_of_nanochat_with_a_tokenizer():
    usual = {"mode": "export", "model_dir": "/m", "data_path": ""}
    theirs = {"kind": "model", "names": ("meta_000120.json", "model_000120.pt")}
    assert problems(1, {"/m": theirs}, **usual, tokenizer_dir="").keys() == {"no-tokenizer-of-checkpoint"}
    assert problems(1, {"/m": theirs}, **usual) == {}
    assert problems(1, {"/m": {"kind": "data", "names": ("x.pt",)}}, **usual).keys() == {"no-chat-model"}


def test_an_evaluation_needs_something_to_score():
    usual = {"mode": "evaluate", "model_dir": "/m", "tokenizer_dir": ""}
    assert problems(1, **usual, data_path="").keys() == {"nothing-to-evaluate"}
    assert problems(1, **usual, data_path="", mixture=[{"kind": "sums"}]) == {}
    assert problems(1, **usual) == {}
    assert "no-answers" in problems(1, **usual, mixture=[{"kind": "messages", "file": "/chats.jsonl"}])
    assert "not-found" in problems(1, {"/data": {"missing": True}}, **{**usual, "data_path": "/data"})


def seen(*paths):
    """What the agent of a node finds at these paths."""
    return examine({"paths": [str(path) for path in paths]}, deadline=float("inf"))["paths"]


def write_table(path, rows, **columns):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    nested = [{"text": "inside", "turns": [{"text": "x"}]}] * rows
    parquet.write_table(
        arrow.table({"meta": nested, **{name: [value] * rows for name, value in columns.items()}}), path
    )


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


TEXT = {"text": "a"}


@pytest.mark.parametrize(
    "files, code",
    [
        ({}, "no-shards"),
        ({"stats.json": "{}", "a.csv": "text\na\n"}, "no-shards"),
        ({"a.txt": "text"}, None),
        ({"notes.txt": "x", "a.jsonl": lines(TEXT, TEXT)}, None),
        ({"stats.json": "{}", "a.jsonl": lines(TEXT), "b.jsonl": lines(TEXT)}, None),
        ({"a.jsonl": lines(TEXT)}, "few-documents"),
        ({"a.jsonl": lines(TEXT, TEXT), "b.jsonl": ""}, "few-documents"),
        ({"a.jsonl": "", "b.jsonl": lines(TEXT, TEXT)}, "few-documents"),
        ({"a.jsonl": lines(TEXT, {"body": "a"}, TEXT)}, "no-text"),
        ({"a.jsonl": lines(TEXT, {"text": 3}, TEXT)}, "no-text"),
        ({"a.jsonl": lines(TEXT) + "{broken\n" + lines(TEXT)}, "no-text"),
        ({"a.jsonl": b"\xff\xfe\x00"}, "unreadable"),
        ({"a.parquet": b"PAR1 and no more"}, "unreadable"),
        ({"a.parquet": {"rows": 3, "text": "a"}}, None),
        ({"a.parquet": {"rows": 1, "text": "a"}}, "few-documents"),
        ({"a.parquet": {"rows": 3, "body": "a"}}, "no-text-column"),
        ({"a.parquet": {"rows": 3, "text": "a"}, "b.parquet": {"rows": 3, "body": "a"}}, "no-text-column"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["tokenizer", "base", "evaluate"])
def test_documents_that_no_stage_can_read_are_a_problem(tmp_path, mode, files, code):
    """Also those of a Parquet file, whose columns the node reads without a library; of columns the outer ones."""
    for name, content in files.items():
        if isinstance(content, dict):
            write_table(tmp_path / name, **content)
        else:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    given = {"mode": mode, "data_path": str(tmp_path), "tokenizer_dir": "/tok", "model_dir": "/model"}
    found = problems(1, seen(tmp_path), max_steps=100, **given)
    assert found.keys() == ({code} if code else set())
    if len(files) == 1 and code:
        (name,) = files
        assert code in problems(1, seen(tmp_path / name), max_steps=100, **{**given, "data_path": str(tmp_path / name)})


def test_rows_and_columns_of_a_table_are_those_of_pyarrow(tmp_path):
    import pyarrow.parquet as parquet

    write_table(tmp_path / "a.parquet", 70, text="a", **{f"number {at}": at for at in range(40)})
    table = parquet.ParquetFile(tmp_path / "a.parquet")
    (file,) = seen(tmp_path)[str(tmp_path)]["files"]
    assert (file["fields"], file["rows"]) == (table.schema_arrow.names, table.metadata.num_rows)


def save_tokenizer(folder, size, **added):
    tokenizer = texts.train_bpe(texts.generated(50, seed=1), size)
    folder.mkdir()
    texts.save_files(folder, tokenizer.to_str())
    return tokenizer.get_vocab_size()


def test_a_tokenizer_that_is_not_of_this_program_or_not_the_models_is_a_problem(tmp_path):
    for name, size in (("own", 300), ("other", 301)):
        assert save_tokenizer(tmp_path / name, size) == size
    own, other, bare, empty = (tmp_path / name for name in ("own", "other", "bare", "empty"))
    bare.mkdir(), empty.mkdir()
    texts.byte_pairs(models.BPE()).save(str(bare / "tokenizer.json"))
    for path, code in ((own, None), (empty, "no-tokenizer"), (bare, "other-tokenizer")):
        assert problems(1, seen(path), tokenizer_dir=str(path)).keys() == ({code} if code else set())
    assert nanochat.planned(training(files=seen(own), tokenizer_dir=str(own)))[1].vocabulary == 300

    config = {**config_of(sizes_of(vocabulary=300)), "training": {}}
    for folder in (own, other):
        (folder / "config.json").write_text(json.dumps(config))
    for mode in ("sft", "rl", "evaluate", "serve", "infer_bench"):
        usual = {"mode": mode, "mixture": SUMS, "data_path": "", "max_seq_len": 64, "max_steps": 9}
        usual |= {"total_batch_size": 2048, "micro_batch_size": 1}
        assert problems(1, seen(own), **usual, model_dir=str(own), tokenizer_dir="").keys() == set()
        refused = problems(1, seen(other), **usual, model_dir=str(other), tokenizer_dir="")
        assert refused.keys() == {"foreign-tokenizer"}
        assert refused["foreign-tokenizer"].message.values["tokens"] == 301
        both = problems(1, seen(own, other, bare), **usual, model_dir=str(own), tokenizer_dir=str(other))
        assert both.keys() == {"given-tokenizer"} and both["given-tokenizer"].option == "tokenizer_dir"
    assert chat_problems(tokenizer_dir="tok", base={"max_steps": 90}).keys() == set()
    assert "given-tokenizer" in chat_problems(tokenizer_dir="/elsewhere", base={"max_steps": 90})


def test_prompts_longer_than_the_context_are_a_problem(tmp_path):
    save_tokenizer(tmp_path / "model", 300)
    config = {**config_of(sizes_of(vocabulary=300)), "training": {}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    usual = {"mode": "infer_bench", "model_dir": str(tmp_path / "model"), "tokenizer_dir": "", "data_path": ""}
    assert problems(1, seen(tmp_path / "model"), **usual, prompt_tokens=94) == {}
    assert problems(1, seen(tmp_path / "model"), **usual, prompt_tokens=95).keys() == {"long-context"}


def test_the_size_of_a_step_is_that_of_the_model():
    work = nanochat.workload(training(depth=12, micro_batch_size=16, total_batch_size=262144))
    _, sizes = nanochat.planned(training(depth=12))
    assert (work.micro_rows, work.micro_batches, work.samples_per_step) == (16, 1, 128)
    assert (work.weights, work.trained) == (sizes.weights, sizes.weights)
    assert work.flops_per_token == sizes.flops_per_token
    assert nanochat.workload(training(mode="tokenizer")) is None and problems(mode="tokenizer") == {}


TOKENIZER = {"mode": "tokenizer", "data_path": "generated", "vocab_size": 4096}
SUMS = ({"kind": "sums"},)


def chat(ranks=8, files=None, base=None, **args):
    """A stage sft after the stages tok and base of one job."""
    earlier = {
        "tok": with_defaults(TABLE, TOKENIZER),
        "base": with_defaults(TABLE, {**BASE, "tokenizer_dir": "tok", **(base or {})}),
    }
    options = {"mode": "sft", "model_dir": "base", "mixture": SUMS, **args}
    return Training(
        *("nanochat", with_defaults(TABLE, options), frozenset(options), ranks, ranks, ("a",), "npu"),
        files={"a": files or {}},
        written=("tok", "base"),
        earlier=earlier,
    )


def chat_problems(*given, **args):
    return {problem.code: problem for problem in judge(chat(*given, **args), nanochat.RULES)}


def test_the_guides_line_for_conversations_is_refused_on_eight_ranks():
    """S2-B1: eight ranks take 64 examples in a pass, the guide asks for 32; upstream stops with an assertion."""
    guide = {"micro_batch_size": 8, "target_examples_per_step": 32}
    refused = chat_problems(8, **guide)["batch-examples"]
    assert refused.is_fatal and refused.message.values["unit"] == 64
    assert (refused.hint.values["near"], refused.hint.values["fewer"]) == ([64], 4)
    for valid in ({**guide, "target_examples_per_step": 64}, {**guide, "micro_batch_size": 4}):
        assert chat_problems(8, **valid) == {}
    assert chat_problems(4, **guide) == {}
    assert chat_problems(3, **guide)["batch-examples"].hint.values["near"] == [24, 48]


def test_conversations_inherit_the_batch_and_the_context_of_the_model():
    base = {"depth": 4, "max_seq_len": 512, "total_batch_size": 65536, "matrix_lr": 0.5}
    options, sizes = nanochat.planned(chat(base=base))
    assert (options["total_batch_size"], options["max_seq_len"], options["matrix_lr"]) == (65536, 512, 0.5)
    assert (sizes.layers, sizes.context, sizes.vocabulary) == (4, 512, 4096)
    assert (options["warmup_steps"], options["init_lr_frac"]) == (0, 0.8)
    assert chat_problems(base=base) == {} == chat_problems(base=base, max_seq_len=256)
    assert "long-context" in chat_problems(base=base, max_seq_len=1024)
    assert nanochat.workload(chat(base=base)).tokens_per_step == 65536


@pytest.mark.parametrize(
    "args, code",
    [
        ({"model_dir": ""}, "no-model-dir"),
        ({"model_dir": "mid"}, "not-written"),
        ({"model_dir": "tok"}, "no-chat-model"),
        ({"mixture": ()}, "no-mixture"),
        ({"mixture": ({"kind": "poems"},)}, "task-kind"),
        ({"mixture": ({"kind": "gsm8k"},)}, "task-file"),
        ({"mixture": ({"kind": "sums", "file": "/data/x.jsonl"},)}, "task-generated"),
        ({"mixture": ({"kind": "sums", "epochs": 0},)}, "task-number"),
        ({"mixture": ({"kind": "sums", "rows": "all"},)}, "task-number"),
        ({"mixture": ({"kind": "gsm8k", "file": "x.jsonl"},)}, "not-written"),
    ],
)
def test_stages_on_conversations_without_a_model_or_a_task_are_problems(args, code):
    assert code in chat_problems(8, **args)


def test_the_guides_line_for_rewards_is_valid_on_eight_ranks_and_refused_on_five():
    """16 questions of 16 replies, 4 in a pass: upstream stops with an assertion where the ranks cannot share them."""
    guide = {"mode": "rl", "micro_batch_size": 4, "target_examples_per_step": 16}
    assert chat_problems(8, **guide) == {}
    refused = chat_problems(5, **guide)["rl-questions"]
    assert refused.is_fatal and refused.hint.values["near"] == [15, 20]
    assert chat_problems(8, mode="rl", num_samples=1).keys() == {"rl-samples"}
    assert chat_problems(8, mode="rl", rollout_updates=2).keys() == {"rl-updates"}
    assert chat_problems(8, mode="rl", rollout_updates=2, clip=0.2) == {}
    assert "no-answers" in chat_problems(8, mode="rl", mixture=({"kind": "messages", "file": "/x.jsonl"},))
    work = nanochat.workload(chat(**guide, base={"depth": 4}))
    assert (work.samples_per_step, work.micro_rows, work.micro_batches, work.steps) == (256, 4, 8, None)


def test_the_rates_of_rl_are_a_twentieth_of_those_of_the_model_and_fall_to_zero():
    from ascendrun.programs.nanochat.model import get_lr_multiplier, get_muon_momentum

    options, _ = nanochat.planned(chat(mode="rl", base={"matrix_lr": 0.5}))
    assert (options["matrix_lr"], options["num_samples"], options["temperature"]) == (0.5, 16, 1.0)
    rates = [get_lr_multiplier(options, 400)(step) for step in (0, 200, 400)]
    assert rates == pytest.approx([0.05, 0.025, 0.0]) and get_muon_momentum(options, 400)(0) == 0.95


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CHOICE = {"question": "a", "choices": ["b", "c"], "answer": "B"}
SOLUTION = {"question": "a", "answer": "#### 1"}
CODE = {"prompt": "def f():", "test": "def check(f): pass", "entry_point": "f"}


@pytest.mark.parametrize(
    "kind, rows, first_bad",
    [
        ("messages", [TURNS, {"messages": [{"role": "system", "content": "x"}, *TURNS]}], None),
        ("messages", [TURNS, TURNS[::-1]], 2),
        ("messages", [TURNS, SOLUTION], 2),
        ("messages", [TURNS, TURNS[:1]], 2),
        ("choices", [CHOICE, CHOICE], None),
        ("choices", [SOLUTION, CHOICE], 1),
        ("gsm8k", [SOLUTION, SOLUTION], None),
        ("gsm8k", [SOLUTION, CHOICE, CHOICE], 2),
        ("gsm8k", ["{broken", SOLUTION], 1),
        ("code", [CODE, CODE], None),
        ("code", [CODE, SOLUTION], 2),
    ],
)
def test_a_file_of_another_kind_is_found_by_the_node(tmp_path, kind, rows, first_bad):
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    found = examine({"paths": [str(path)]}, deadline=float("inf"))["paths"]
    problem = chat_problems(8, found, mixture=({"kind": kind, "file": str(path)},)).get("task-row")
    assert (problem and problem.message.values["row"]) == first_bad


def test_a_file_that_is_not_there_is_a_problem():
    path = "/data/none.jsonl"
    assert "not-found" in chat_problems(8, {path: {"missing": True}}, mixture=({"kind": "gsm8k", "file": path},))


def test_the_optimizers_state_is_that_of_muon_and_is_shared_by_the_ranks():
    """A momentum for each weight of a layer and two moments for each of the others; 8 ranks have an eighth each."""
    work = nanochat.workload(training(depth=12, micro_batch_size=16, total_batch_size=262144))
    sizes = work.model.sizes
    others = sizes.weights - sizes.layer_matrices
    assert work.moments() == pytest.approx(sizes.layer_matrices + 2 * others, rel=0.01)
    assert work.moments(6) == pytest.approx(work.moments() / 6, rel=0.01)
    assert work.moments(8) > work.moments() / 8  # 12 matrices of a shape are two for each of six ranks
    assert work.checkpoint_bytes == 4 * (sizes.weights + work.moments())
    whole = nanochat.workload(training(depth=12, shard_optimizer=False))
    assert whole.moments(8) == whole.moments()


def test_the_state_of_a_trained_optimizer_has_as_many_values():
    from ascendrun.programs.nanochat.model import make_model, setup_optimizer
    from ascendrun.programs.trainer.optim import names_of
    from ascendrun.programs.trainer.optimizer import Muon, Owners

    options, sizes = nanochat.planned(training(depth=2, vocab_size=300))
    model = make_model(sizes, seed=1)
    plan = setup_optimizer(model, options, nanochat.length_of(training(), options, sizes), shard=True)
    rule = Muon(plan.groups[0], names_of(model), Owners(), torch.float32)
    held = sum(stack.momentum.numel() + stack.variance.numel() for stack in rule.stacks)
    others = 2 * (sizes.weights - sizes.layer_matrices)
    assert held + others == pytest.approx(sizes.state_values(1), rel=0.001)


def test_the_vocabulary_is_that_of_the_tokenizer_of_the_job():
    """Not that of the options, which only the stage tokenizer reads."""
    assert nanochat.planned(chat())[1].vocabulary == 4096
    characters = with_defaults(TABLE, {**TOKENIZER, "tokenizer": "chars"})
    base = training(tokenizer_dir="tok")
    assert nanochat.vocabulary_of(replace(base, earlier={"tok": characters}), dict(base.options)) == 1024
    there = training(files={"/tok": {"kind": "model", "tokenizer": {"tokens": 100}}})
    assert nanochat.planned(there)[1].vocabulary == 100
