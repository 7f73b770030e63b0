"""A bad input is reported before anything is held: by plan, by --dry-run and by submit, in the same words."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascendrun.cli import main
from ascendrun.core.jobfile.spec import parse_program_options
from ascendrun.core.settings import Settings
from ascendrun.head.survey.training_plan import expected, hosts_at_fault, refusal
from ascendrun.node import tree_hash
from ascendrun.node.agent import training_files
from ascendrun.options import Option
from ascendrun.planner.training import find_programs, load_programs
from tests.lib.plan_world import BAD, CONFIG, HOSTS, POINTS, Change, PlanCluster, files, saved, write_job
from tests.thorough import examples


class Head:
    """The command line of a head node that has two hosts and no data."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.cluster = PlanCluster(Settings(state_dir=folder / "state"), folder / "hosts")
        for host in HOSTS:
            for path, data in files().items():
                self.cluster.write(host, path, data)
        (folder / "two.hosts").write_text("n1 addr=10.0.0.1 slots=2\nn2 addr=10.0.0.2 slots=2\n")

    def change(self, changes: Change) -> None:
        for place, data in changes.items():
            host, _, path = place.rpartition(":")
            for each in (host,) if host else HOSTS:
                self.cluster.write(each, path, data)

    def write_job(self, program: str, args: Change, **more: Any) -> str:
        return str(write_job(self.folder, program, args, **more))

    def say(self, *argv: str) -> tuple[int, str, str]:
        self.capsys.readouterr()
        try:
            code = main(argv, make_cluster=lambda settings: self.cluster)
        except SystemExit as end:
            code = int(end.code or 0)
        captured = self.capsys.readouterr()
        return code, captured.out, captured.err


@pytest.fixture
def head(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Head:
    monkeypatch.setenv("LANG", "C.UTF-8")
    return Head(tmp_path, capsys)


def codes(out: str) -> list[str]:
    return [problem["code"] for problem in json.loads(out)["problems"]]


PROGRAMS = tuple(name for name, program in find_programs().items() if program.has_rules)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_healthy_job_has_no_problem(head: Head, program: str) -> None:
    code, out, _ = head.say("plan", head.write_job(program, {}), "-o", "json")
    assert (code, [each["code"] for each in json.loads(out)["problems"] if each["is_fatal"]]) == (0, [])


@pytest.mark.parametrize("program", ["qwen_lora", "trajectory"])
def test_generated_data_must_be_asked_for(head: Head, program: str) -> None:
    code, out, _ = head.say("plan", head.write_job(program, {"data_path": "generated"}), "-o", "json")
    assert (code, json.loads(out)["work"]["steps"] is None) == (0, False)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_is_found_before_the_start(head: Head, name: str) -> None:
    program, args, changes, code = BAD[name]
    head.change(changes)
    exit_code, out, _ = head.say("plan", head.write_job(program, args), "-o", "json")
    assert exit_code == 3 and code in codes(out)


OLD = {"lora_r": 8, "lora_alpha": 128, "seed": 42, "target_modules": ["q_proj"], "data": "5e1f", "gone": 1}
"""What the newest checkpoint keeps of its training; what no option is, is the ranks' to compare."""


@pytest.mark.parametrize(
    "args, code",
    [
        ({"lora_r": 16, "target_modules": ["q_proj"]}, 3),
        ({"lora_r": 8}, 3),
        ({"lora_r": 8, "target_modules": ["q_proj"]}, 0),
        ({"lora_r": 16, "resume_from_checkpoint": "never"}, 0),
    ],
)
def test_a_checkpoint_of_another_training_is_refused_before_the_start(head: Head, args: Change, code: int) -> None:
    head.change(
        {
            "/ckpt/step-00000002/manifest.json": saved(**{**OLD, "seed": 1}),
            "/ckpt/step-00000004-e0001/manifest.json": saved(**OLD),
        }
    )
    job = head.write_job("qwen_lora", args, checkpoint={"dir": "/ckpt"})
    exit_code, out, _ = head.say("plan", job, "-o", "json")
    dry, whole, _ = head.say("submit", "--dry-run", "-o", "json", job)
    assert (exit_code, dry) == (code, code)
    for found in (codes(out), [each["code"] for each in json.loads(whole)["training"]["problems"]]):
        assert ("other-training" in found) == (code == 3)


ELASTIC: Change = {"min_nodes": 1, "restart": {"max_restarts": 3}}
LARGE = {"base_model": None, "model_preset": "qwen2.5-32b", "chip": "910B4", "device": "npu", "strategy": "fsdp2"}


@pytest.mark.parametrize(
    "program, args, per_node, hint",
    [
        ("qwen_lora", LARGE, 2, "set min_nodes: 2"),
        ("qwen_lora", {"strategy": "hsdp", "shard_size": 4}, 2, "set min_nodes: 2"),
        ("trajectory", {"micro_batch_size": 4}, 2, "set global_batch_size: 16"),
        ("qwen_lora", {"strategy": "fsdp2"}, 1, None),
        ("qwen_lora", {"strategy": "zero3", "shard_size": 2}, 1, None),
        ("trajectory", {"micro_batch_size": 4, "global_batch_size": 16}, 2, None),
    ],
)
def test_what_would_end_a_training_that_loses_a_host_is_refused_at_its_start(
    head: Head, program: str, args: Change, per_node: int, hint: str | None
) -> None:
    devices = {"type": "cpu", "per_node": per_node}
    assert head.say("plan", head.write_job(program, args, devices=devices))[0] == 0, "without min_nodes"
    code, out, _ = head.say("plan", head.write_job(program, args, devices=devices, **ELASTIC), "-o", "json")
    fatal = [each for each in json.loads(out)["problems"] if each["is_fatal"]]
    assert code == (3 if hint else 0) and [each["hint"] for each in fatal] == ([hint] if hint else [])


def test_there_are_at_least_30_bad_inputs() -> None:
    assert len(BAD) >= 30 and len({code for _, _, _, code in BAD.values()}) >= 30


@pytest.mark.parametrize(
    "program, args, found",
    [
        (
            "qwen_lora",
            {"base_model": "/none", "data_path": "/data/none.json", "target_modules": ["wqkv"], "chip": "911"},
            {"not-found": 2, "unknown-chip": 1},
        ),
        ("qwen_lora", {"target_modules": ["wqkv"], "data_path": ""}, {"unknown-target": 1, "no-data-path": 1}),
        ("trajectory", {"hidden_size": 65, "data_path": "/none"}, {"hidden-heads": 1, "not-found": 1}),
    ],
)
def test_all_problems_are_reported_at_once_by_every_command(
    head: Head, program: str, args: Change, found: Mapping[str, int]
) -> None:
    job = head.write_job(program, args)
    code, out, _ = head.say("plan", job, "-o", "json")
    dry, whole, _ = head.say("submit", "--dry-run", "-o", "json", job)
    assert code == dry == 3
    for each in (json.loads(out)["problems"], json.loads(whole)["training"]["problems"]):
        fatal = [one["code"] for one in each if one["is_fatal"]]
        assert {code: fatal.count(code) for code in fatal} == found


def test_the_reason_of_a_refusal_has_every_problem_with_its_hosts_and_the_hosts_at_fault(head: Head) -> None:
    head.change({"n2:/data/chat.json": None})
    plans = head.cluster.job_files.training_plans(head.write_job("qwen_lora", {}))
    why = refusal(plans)
    assert why is not None and why.values["count"] == 1 and hosts_at_fault(plans) == ("n2",)
    head.change({"/base/tokenizer.json": None})
    plans = head.cluster.job_files.training_plans(
        head.write_job("qwen_lora", {"target_modules": ["wqkv"], "quantization_bit": "4"})
    )
    why = refusal(plans)
    assert why is not None and why.values["count"] == len(why.values["lines"]) == len(plans[0].fatal) >= 4
    assert hosts_at_fault(plans) == (), "an unknown target is wrong on any host"
    assert all(what in str(why) for what in ("n2: args.data_path", "tokenizer", "wqkv", "quantization_bit"))


def test_a_dry_run_packs_the_directories_of_a_job_once(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    (head.folder / "code").mkdir()
    listed: list[str] = []
    list_tree = tree_hash.list_tree

    def counted(folder: str, *given: Any) -> Any:
        listed.append(folder)
        return list_tree(folder, *given)

    monkeypatch.setattr(tree_hash, "list_tree", counted)
    job = head.write_job("trajectory", {}, stages=STAGES, workdir={"path": str(head.folder / "code")})
    said = head.say("submit", "--dry-run", "-o", "json", job)
    assert said[0] != 2, said
    assert listed.count(str(head.folder / "code")) == 1 and len(listed) == 2


def test_foreign_columns_get_the_line_to_write(head: Head) -> None:
    _, _, changes, _ = BAD["foreign columns"]
    head.change(changes)
    _, out, _ = head.say("plan", head.write_job("trajectory", {}))
    assert "column_map: [time=T, lat=Y, lon=X" in out


def test_a_ship_column_of_another_name_gets_the_line_to_write(head: Head) -> None:
    head.change({"/data/points.csv": POINTS.replace("MMSI", "Rufnummer").encode()})
    _, out, _ = head.say("plan", head.write_job("trajectory", {}))
    assert "column_map: [ship=Rufnummer" in out
    _, out, _ = head.say("plan", head.write_job("trajectory", {"column_map": ["ship=Rufnummer"]}))
    assert "column_map: [" not in out


def test_what_is_expected_of_a_training_has_a_range_of_each_measure(head: Head) -> None:
    (plan,) = head.cluster.job_files.training_plans(head.write_job("qwen_lora", {"chip": "910B3", "device": "npu"}))
    found = expected(plan)
    assert set(found) == {"memory_bytes", "tokens_per_s", "hours"} and all(low < high for low, high in found.values())


def test_a_length_beyond_the_positions_of_a_model_with_scaled_rotary_embeddings_is_a_warning(head: Head) -> None:
    head.change({"/base/config.json": json.dumps({**CONFIG, "rope_scaling": {"type": "yarn", "factor": 4}}).encode()})
    code, out, _ = head.say("plan", head.write_job("qwen_lora", {"cutoff_len": 5000}), "-o", "json")
    assert code == 0 and "over-positions" in codes(out)


def test_a_plan_ends_with_its_error_and_estimates_nothing(head: Head) -> None:
    args = {"base_model": None, "model_preset": "qwen2.5-72b", "save_steps": 1}
    code, out, _ = head.say("plan", head.write_job("qwen_lora", args))
    lines = out.splitlines()
    assert code == 3 and lines[-2].startswith("error: ") and lines[-1].startswith("  hint: "), out
    void = ("speed:", "time:", "steps:", "checkpoints:", "strategy:")
    assert "memory of each rank, by formula:" in lines and not [line for line in lines if line.startswith(void)]


def test_a_warning_does_not_refuse(head: Head) -> None:
    job = head.write_job("qwen_lora", {"warmup_steps": 10_000})
    code, out, _ = head.say("plan", job, "-o", "json")
    assert code == 0 and "warmup-too-long" in codes(out)


def test_a_micro_batch_alone_is_the_batch_of_one_device_for_the_plan_too(head: Head) -> None:
    job = head.write_job("trajectory", {"micro_batch_size": 3})
    code, out, _ = head.say("plan", job, "-o", "json")
    assert code == 0 and "uneven-batch" not in codes(out)
    job = head.write_job("trajectory", {"micro_batch_size": 3, "global_batch_size": 64})
    assert "uneven-batch" in codes(head.say("plan", job, "-o", "json")[1])


STAGES = [
    {"name": "prepare", "args": {"mode": "prepare", "output_dir": "out/prepared"}},
    {"name": "pretrain", "args": {"mode": "pretrain", "prepared_dir": "/out/prepared", "output_dir": "/out/pre"}},
    {"name": "finetune", "args": {"mode": "finetune", "prepared_dir": "out/prepared", "base_model": "/out/pre"}},
    {"name": "evaluate", "args": {"mode": "evaluate", "model_path": ["out/best"], "prepared_dir": "out/prepared"}},
]


def test_what_an_earlier_stage_writes_is_unknown_and_what_none_writes_is_an_error(head: Head) -> None:
    job = head.write_job("trajectory", {}, stages=STAGES)
    code, out, _ = head.say("plan", job, "-o", "json")
    stages = json.loads(out)["stages"]
    assert code == 3 and [[each["code"] for each in stage["problems"] if each["is_fatal"]] for stage in stages] == [
        *([], ["not-found"], [], [])
    ]
    texts = ["\n".join(line for line in stage["text"] if line.startswith("unknown: args.")) for stage in stages]
    assert texts[0] == texts[1] == ""
    assert "prepared_dir: out/prepared is written" in texts[2] and "base_model: /out/pre is written" in texts[2]
    assert "model_path: out/best is written" in texts[3]


def test_a_stage_that_continues_a_pretrained_model_has_the_sizes_of_its_stage(head: Head) -> None:
    wide = {"mode": "pretrain", "output_dir": "/out/pre", "hidden_size": 256, "num_attention_heads": 8}
    stages = [
        {"name": "pretrain", "args": wide},
        {"name": "tune", "args": {"mode": "finetune", "base_model": "/out/pre"}},
    ]
    _, out, _ = head.say("plan", head.write_job("trajectory", {}, stages=stages), "-o", "json")
    models = [line for stage in json.loads(out)["stages"] for line in stage["text"] if line.startswith("model: ")]
    weights = [float(line.split()[1]) for line in models]
    assert len(weights) == 2 and weights[1] == pytest.approx(weights[0], rel=0.25)


def test_a_stage_of_another_program_may_write_any_path(head: Head) -> None:
    make = {"name": "make", "program": None, "command": ["python", "/opt/make.py"], "args": None}
    job = head.write_job("trajectory", {"data_path": "/data/new.csv"}, stages=[make, {"name": "train"}])
    code, out, _ = head.say("plan", job, "-o", "json")
    train = json.loads(out)["stages"][1]
    assert code == 0 and any("/data/new.csv is written" in line for line in train["text"])


def test_the_plan_says_that_the_bandwidths_of_its_table_are_not_verified(head: Head) -> None:
    _, out, _ = head.say("plan", head.write_job("qwen_lora", {"chip": "910B3", "device": "npu"}), "-o", "json")
    found = json.loads(out)
    assert found["links"] == [28e9, 12e9] and any("not verified" in line for line in found["text"])


def test_a_full_disk_is_found(head: Head) -> None:
    head.cluster.free_bytes = 1000
    code, out, _ = head.say("plan", head.write_job("qwen_lora", {}), "-o", "json")
    assert code == 3 and "disk-full" in codes(out)


OF_BOTH = {
    "global_batch_size": st.integers(1, 64),
    "micro_batch_size": st.integers(0, 8),
    "dtype": st.sampled_from(["auto", "float32", "float16", "bfloat16"]),
    "num_train_epochs": st.integers(1, 5),
    "max_steps": st.integers(0, 40),
    "warmup_steps": st.integers(0, 50),
    "chip": st.sampled_from(["910B3", "910A", "911"]),
    "data_path": st.sampled_from(["", "generated", "/data/none", "/data/chat.json", "/data/points.csv"]),
}
OF_ONE = {
    "qwen_lora": {
        "base_model": st.sampled_from(["/base", "/none", ""]),
        "model_preset": st.sampled_from(["tiny", "qwen2.5-72b", "none"]),
        "target_modules": st.sampled_from([["q_proj"], ["wqkv"], ["all"]]),
        "strategy": st.sampled_from(["auto", "ddp", "fsdp2", "hsdp", "zero3"]),
        "shard_size": st.integers(0, 4),
        "cpu_offload": st.booleans(),
        "cutoff_len": st.sampled_from([32, 2048, 8192]),
        "packing": st.booleans(),
        "curriculum": st.sampled_from(["auto", "on", "off"]),
        "quantization_bit": st.sampled_from(["none", "4"]),
        "val_size": st.sampled_from([0.0, 0.5]),
    },
    "trajectory": {
        "mode": st.sampled_from(["train", "prepare", "pretrain", "finetune", "evaluate"]),
        "base_model": st.sampled_from(["", "/base", "/none"]),
        "prepared_dir": st.sampled_from(["", "/data"]),
        "hidden_size": st.sampled_from([64, 65]),
        "segment_size": st.sampled_from([5, 100]),
        "objective": st.sampled_from(["mlm", "clm"]),
        "attention": st.sampled_from(["causal", "bidirectional"]),
        "split": st.sampled_from(["ship", "segment"]),
    },
    "codon": {
        "mode": st.sampled_from(["prepare", "pretrain", "finetune"]),
        "base_model": st.sampled_from(["", "/base", "/none"]),
        "prepared_dir": st.sampled_from(["", "/data"]),
        "hidden_size": st.sampled_from([48, 100, 768]),
        "num_attention_heads": st.sampled_from([4, 12]),
        "context_residues": st.integers(0, 2),
        "strategy": st.sampled_from(["auto", "ddp", "fsdp2", "hsdp", "zero3"]),
        "shard_size": st.integers(0, 4),
        "attention": st.sampled_from(["full", "block_sparse"]),
    },
    "nanochat": {
        "mode": st.sampled_from(["tokenizer", "base", "sft"]),
        "tokenizer_dir": st.sampled_from(["/tokens", "/base", "/none", "out/tokenizer"]),
        "depth": st.integers(1, 24),
        "kv_heads": st.integers(0, 3),
        "max_seq_len": st.sampled_from([64, 2048]),
        "total_batch_size": st.sampled_from([0, 4 * 2048, 100_000]),
        "strategy": st.sampled_from(["auto", "ddp", "fsdp2", "hsdp", "zero3"]),
        "shard_size": st.integers(0, 4),
        "window_pattern": st.sampled_from(["SSSL", "SXL"]),
    },
}


def values_of(option: Option) -> st.SearchStrategy[Any] | None:
    """Return values that the option's row allows, and some that it does not. None: any text."""
    if option.choices:
        return st.sampled_from([*option.choices, "other"])
    if option.type == "bool":
        return st.booleans()
    if option.type == "path":
        return OF_BOTH["data_path"]
    low, high = option.low or 0, 64 if option.high is None else min(option.high, 64 + (option.low or 0))
    if option.type == "int":
        return st.integers(int(low) - 1, int(high))
    return st.floats(low, high) if option.type == "float" else None


def random_args(program: str) -> st.SearchStrategy[tuple[str, Change]]:
    """Return a program with some of all its options. Those that often meet in a rule have values of their own."""
    options = load_programs(parse_program_options)[program].options
    of_table = {name: values_of(option) for name, option in options.items()}
    chosen = {**OF_BOTH, **OF_ONE.get(program, {})}
    every = {**{name: values for name, values in of_table.items() if values is not None}, **chosen}
    known = {name: values for name, values in every.items() if name in of_table}
    few = st.lists(st.sampled_from(sorted(known)), max_size=12, unique=True)
    return few.flatmap(
        lambda names: st.tuples(st.just(program), st.fixed_dictionaries({name: known[name] for name in names}))
    )


@settings(max_examples=examples(5, 40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PROGRAMS).flatmap(random_args))
def test_plan_and_dry_run_never_disagree(head: Head, given: tuple[str, Change]) -> None:
    program, args = given
    job = head.write_job(program, args)
    planned, text, _ = head.say("plan", job, "-o", "json")
    dry, whole, _ = head.say("submit", "--dry-run", "-o", "json", job)
    assert planned in (0, 2, 3) and planned == dry
    if planned == 2:  # the job file is invalid
        return
    assert {**json.loads(whole)["training"], "origins": [], "schema_version": 2} == json.loads(text)


LIST, OBJECT = b'[{"instruction": "a", "output": "\xe4\xb8\xad"}', b'{"data":\n [{"instruction": "a"'


@pytest.mark.parametrize("start, rows", [(LIST, True), (OBJECT, False)])
def test_a_large_file_is_read_in_part(tmp_path: Path, start: bytes, rows: bool) -> None:
    row = b', {"instruction": "a", "output": "\xe4\xb8\xad"}'
    (tmp_path / "large.json").write_bytes(start + row * ((33 << 20) // len(row)))
    file = training_files.examine({"paths": [str(tmp_path)]}, time.monotonic() + 30)["paths"][str(tmp_path)]["files"][0]
    assert not file["whole"] and not file["faults"] and "not_utf8" not in file
    assert (file["rows_estimate"] > 500_000) is rows


def test_no_torch_is_imported() -> None:
    code = """if True:
        import sys
        sys.modules['torch'] = sys.modules['numpy'] = None
        import ascendrun.head.survey.training_plan
        from ascendrun.planner.training import find_programs, rules_of
        print(sum(rules_of(name) is not None for name in find_programs()))"""
    loaded = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert int(loaded.stdout) == len(PROGRAMS)
