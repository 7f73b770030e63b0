"""The scripts of `ascendrun init nanochat`: options, directories and mixtures, and the guide's lines as printed."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ascendrun.programs.nanochat import check, guide
from ascendrun.programs.trainer.options import InvalidOptionsError, parse, read_table
from ascendrun.query.templates import copy_template

REPO = Path(__file__).resolve().parents[3]
TABLE = read_table(guide.program.OPTIONS)
DEADLINE_S = 1500
SIZES = (
    "--vocab_size=300 --depth=2 --aspect_ratio=16 --head-dim 16 --max_seq_len=64 --total-batch-size=256 --max_steps=2 "
    "--micro_batch_size=2 --num_samples=2 --max_new_tokens=4 --eval_steps=0 --eval_tokens=128 --dtype=float32"
)
PYTHON_LINES = (
    "python check_npu.py --device=cpu",
    "python -m scripts.tok_train",
    "python -m scripts.base_train --depth=12 --device_batch_size=16",
)
TORCHRUN = "torchrun --standalone --nproc_per_node=8 -m scripts."
TORCHRUN_LINES = (
    "base_train -- --depth=12 --device_batch_size=16 --total_batch_size=262144",
    "mid_train -- --device_batch_size=16 --total_batch_size=262144",
    "chat_sft -- --device_batch_size=8 --target_examples_per_step=32",
    "chat_rl -- --device_batch_size=4 --examples_per_step=16",
)
"""As the guide prints them."""


def options_of(name, words="", **environ):
    """What a script passes to the program."""
    return parse(list(guide.words_of(guide.SCRIPTS[name], shlex.split(words), environ)), TABLE)


def codes_of(caught):
    return [problem.message.key for problem in caught.value.problems]


def test_every_script_is_in_the_template_and_has_valid_defaults(tmp_path):
    names = {path.stem for path in copy_template("nanochat", tmp_path) if path.parent.name == "scripts"}
    assert names == {*guide.SCRIPTS, "tok_eval", "__init__"}
    (tmp_path / "gsm8k_train.jsonl").touch()
    for name, script in guide.SCRIPTS.items():
        assert options_of(name, NANOCHAT_DATA_DIR=str(tmp_path))["mode"] == script.mode


def test_all_spellings_of_an_option_are_one_and_the_environment_replaces_it():
    words = "--device-batch-size 16 --depth=12 --total_batch_size=262144"
    usual = options_of("base_train", words)
    assert (usual["micro_batch_size"], usual["depth"], usual["total_batch_size"]) == (16, 12, 262144)
    assert (usual["data_path"], usual["tokenizer_dir"], usual["output_dir"]) == (
        "data/text",
        "out/tokenizer",
        "out/base",
    )
    small = options_of("base_train", words, NANOCHAT_ARGS="--depth 2 --micro-batch-size=4", NANOCHAT_BASE_DIR="there")
    assert (small["micro_batch_size"], small["depth"], small["output_dir"]) == (4, 2, "there/base")
    assert options_of("base_train", "--output_dir=mine")["output_dir"] == "mine"
    with pytest.raises(InvalidOptionsError) as caught:
        options_of("base_train", "stray --depth", NANOCHAT_ARGS="other")
    assert codes_of(caught) == ["options.stray", "options.no-value", "options.stray"]


def test_stages_read_the_model_before_them_or_that_of_source(tmp_path):
    (tmp_path / "gsm8k_train.jsonl").touch()
    environ = {"NANOCHAT_DATA_DIR": str(tmp_path)}
    read = [options_of(name, **environ)["model_dir"] for name in ("mid_train", "chat_sft", "chat_rl", "chat_cli")]
    assert read == ["out/base", "out/mid", "out/sft", "out/sft"]
    scored = options_of("chat_eval", "--source=rl --task_name=GSM8K|SpellingBee --max_problems 9", **environ)
    assert (scored["model_dir"], scored["output_dir"]) == ("out/rl", "out/eval-rl")
    assert scored["mixture"] == [{"kind": "spelling", "rows": 9}], "the file of the other is not there"


def test_mixtures_have_the_files_that_exist_and_none_is_an_error(tmp_path, capsys):
    (tmp_path / "conversations.jsonl").touch()
    environ = {"NANOCHAT_DATA_DIR": str(tmp_path)}
    assert options_of("chat_sft", **environ)["mixture"] == [
        {"file": str(tmp_path / "conversations.jsonl"), "kind": "messages", "rows": 10000}
    ]
    assert "arc_train.jsonl" in capsys.readouterr().err
    with pytest.raises(InvalidOptionsError) as caught:
        options_of("chat_rl", **environ)
    assert codes_of(caught) == ["guide.no-tasks"]
    assert options_of("chat_rl", '--mixture=\'[{"kind": "sums"}]\'', **environ)["mixture"] == [{"kind": "sums"}]
    with pytest.raises(InvalidOptionsError) as caught:
        options_of("chat_eval", "--task_name=MMLU", **environ)
    assert codes_of(caught) == ["guide.task-name"]


def test_the_mixtures_are_those_of_the_job_file():
    stages = {
        stage["name"]: stage["args"]
        for stage in yaml.safe_load((REPO / "jobs/nanochat-speedrun.yaml").read_text())["stages"]
    }
    for name, stage in (("mid_train", "mid"), ("chat_sft", "sft"), ("chat_rl", "rl")):
        in_file = [
            {**task, **({"file": Path(task["file"]).name} if "file" in task else {})}
            for task in stages[stage]["mixture"]
        ]
        assert in_file == [dict(task) for task in guide.SCRIPTS[name].tasks]
    assert guide.SCRIPTS["tok_train"].options["vocab_size"] == str(stages["tokenizer"]["vocab_size"])


def test_the_advice_of_the_guide_is_answered():
    def keys(**environ):
        return [advice.key for advice in guide.advices(environ)]

    assert keys(ASCEND_LAUNCH_BLOCKING="1", ASCEND_GLOBAL_LOG_LEVEL="0") == ["guide.blocking", "guide.log-level"]
    assert keys(ASCEND_LAUNCH_BLOCKING="0", ASCEND_GLOBAL_LOG_LEVEL="3") == keys() == []


@pytest.fixture
def shell(tmp_path):
    """shell(line, **environ): run a line in the directory of `init`, which has a little data."""
    copy_template("nanochat", tmp_path)
    data = tmp_path / "data"
    (data / "text").mkdir(parents=True)
    text = {"text": "the calm sea rises over the stone harbour " * 8}
    (data / "text" / "a.jsonl").write_text(f"{json.dumps(text)}\n" * 60)
    sums = [{"question": f"{i} + 1?", "answer": f"<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"} for i in range(400)]
    (data / "gsm8k_train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    usual = {**os.environ, "PATH": path, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "NANOCHAT_ARGS": SIZES}
    usual["XDG_CACHE_HOME"] = str(tmp_path / "cache")

    def run(line, **environ):
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env={**usual, **environ},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.mark.timeout(DEADLINE_S + 100)
def test_torchrun_on_a_cpu_forms_one_group(shell, launch, tmp_path):
    launch("nanochat", ["--mode=tokenizer", "--data_path=data/text", "--vocab_size=300"], name="").succeed()
    line = TORCHRUN.replace("=8", "=2") + TORCHRUN_LINES[0] + " --tokenizer_dir=out"
    code, text = shell(line)
    assert code == 0, text
    assert report_of(tmp_path / "out" / "base")["run"]["ranks"] == 2


def test_the_check_of_a_device_passes_on_the_cpu_only_if_that_is_asked_for(capsys, monkeypatch):
    assert check.main(["--device=cpu"]) == 0
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert check.main([]) == 1
    found = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["FAILED", "torch_npu"] in found and ["FAILED", "device"] in found


@pytest.mark.thorough
@pytest.mark.timeout(4 * DEADLINE_S)
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_lines_of_the_guide_run_as_printed(shell, tmp_path, ranks):
    """On eight ranks the line for conversations is refused with its own batch, and runs with the one that is named."""
    for line in PYTHON_LINES:
        code, text = shell(line)
        assert code == 0, text
    ran = {"NANOCHAT_BASE_DIR": "many", "NANOCHAT_ARGS": f"{SIZES} --total_batch_size=1024"}
    (tmp_path / "many").mkdir()
    (tmp_path / "out" / "tokenizer").rename(tmp_path / "many" / "tokenizer")
    for words in TORCHRUN_LINES:
        line = (TORCHRUN + words).replace("=8", f"={ranks}", 1)
        if words.startswith("chat_sft") and ranks == 8:
            own_batch = ran["NANOCHAT_ARGS"].replace("--micro_batch_size=2", "--micro_batch_size=8")
            code, text = shell(line, **{**ran, "NANOCHAT_ARGS": own_batch})
            assert code != 0 and "target_examples_per_step: 32" in text and " 64" in text, text
            ran["NANOCHAT_ARGS"] += " --target_examples_per_step=64"
        code, text = shell(line, **ran)
        ran["NANOCHAT_ARGS"] = ran["NANOCHAT_ARGS"].replace(" --target_examples_per_step=64", "")
        assert code == 0, text
    found = [report_of(tmp_path / "many" / stage)["run"]["ranks"] for stage in ("base", "mid", "sft", "rl")]
    assert found == [ranks] * 4


@pytest.mark.thorough
@pytest.mark.timeout(4 * DEADLINE_S)
def test_the_speedrun_writes_a_report(shell, tmp_path):
    code, text = shell("bash speedrun_npu.sh", NPROC_PER_NODE="2", NANOCHAT_DEVICE="cpu")
    assert code == 0, text
    assert (tmp_path / "out" / "report" / "report.md").stat().st_size > 0
