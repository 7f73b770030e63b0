"""The program of docs/trainer-api.md: its files are taken from the page, and run as the page says."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ascendrun.core.errors import InvalidInputError
from ascendrun.core.jobfile.launchers import program_command
from ascendrun.core.jobfile.spec import parse_program_options
from ascendrun.head.survey.job_reading import read_job
from ascendrun.options import with_defaults
from ascendrun.planner.fitting import devices_of
from ascendrun.planner.plan import make_plan
from ascendrun.planner.training import Training, load_programs, rules_of
from tests.ports import free_port
from tests.programs.conftest import REPO

PAGE = REPO / "docs" / "trainer-api.md"
FILES = ("my_gpt.yaml", "my_gpt.json", "my_gpt.py", "judged.json", "judged.py", "by_hand.sh", "rules.py")
SMALL = ("--num_train_epochs=3", "--seq_len=32", "--width=32", "--save_steps=2", "--logging_steps=1", "--dtype=float32")


def write_example(folder: Path) -> None:
    """Write the files that the page shows."""
    blocks = re.findall(r"```(yaml|json|python|sh)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert [kind for kind, _ in blocks] == [name.split(".")[1].replace("py", "python") for name in FILES]
    for name, (_, text) in zip(FILES, blocks):
        (folder / name).write_text(text, encoding="utf-8")


def test_the_chinese_page_has_the_same_files(tmp_path: Path) -> None:
    """Its comments may be Chinese."""

    def files(page: Path) -> list[str]:
        return [re.sub(r" +# .*", "", text) for text in re.findall(r"```\w+\n(.*?)```", page.read_text(), re.DOTALL)]

    assert files(PAGE) == files(PAGE.with_suffix(".zh.md"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "own"
    home.mkdir()
    write_example(home)
    (home / "cluster.hosts").write_text("local1 slots=8 addr=local\nlocal2 slots=8 addr=local\n")
    (home / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    return home


def test_a_run_that_was_killed_on_two_hosts_resumes_to_the_bit(launch, folder, tmp_path):
    def begin(name: str):
        hosts = [tmp_path / name / f"host{rank}" for rank in range(2)]  # no shared disk
        for host in hosts:
            host.mkdir(parents=True, exist_ok=True)
        env = {rank: {"ASCENDRUN_CHECKPOINT_DIR": str(host / "ckpt")} for rank, host in enumerate(hosts)}
        argv = [str(folder / "my_gpt.py"), f"--data_path={folder / 'book.txt'}", *SMALL]
        return launch("file", argv, ranks=2, name=name, rank_env=env, folders=hosts)

    straight = begin("straight").succeed()
    assert begin("broken").killed_at(7, 1)[1] == -signal.SIGKILL
    again = begin("broken").succeed()
    assert "resumed at step" in again.text()
    one, other = (torch.load(tmp_path / name / "host0" / "out" / "model.pt") for name in ("straight", "broken"))
    assert all(torch.equal(one[name], other[name]) for name in one) and len(one) > 10
    losses = straight.losses()
    assert again.losses().items() <= {**losses, **again.losses()}.items() == losses.items()
    assert min(losses.values()) < 0.8 * losses[1] and "The " in straight.out[0].read_text().splitlines()[-1]


def test_the_job_file_is_checked_with_the_programs_own_options(folder):
    spec = read_job(folder / "my_gpt.yaml", overrides=["args.data_path=book.txt", "args.seq_len=64"])
    assert spec.program == "./my_gpt.py" and spec.args == {
        "num_train_epochs": 2,
        "data_path": str(folder / "book.txt"),
        "seq_len": 64,
    }
    assert program_command(spec.program, ["--a=1"], python="python3") == ("python3", "./my_gpt.py", "--a=1")
    with pytest.raises(InvalidInputError) as caught:
        read_job(folder / "my_gpt.yaml", overrides=["args.seq_length=64", "args.width=1"])
    assert len(caught.value.problems) == 2


def test_the_best_model_is_kept_and_a_checkpoint_of_other_data_refused(launch, folder):
    def begin(*options: str):
        return launch("file", [str(folder / "judged.py"), f"--data_path={folder / 'book.txt'}", *options], ranks=2)

    run = begin().succeed()
    scores = [line["eval_loss"] for line in run.metrics() if "eval_loss" in line]
    assert len(scores) == 4 and min(scores) < 0.8 * scores[0] and "best step: 20" in run.text()
    whole = (folder / "book.txt").read_text()
    (folder / "book.txt").write_text(whole.replace("fox", "cow"))
    refused = begin("--max_steps=25")
    assert refused.wait() != [0, 0] and "data was" in refused.text()


def test_ranks_that_are_started_by_hand_train_together(folder):
    script = (
        (folder / "by_hand.sh").read_text().replace("29555", str(free_port())).replace("python ", f"{sys.executable} ")
    )
    env = {**os.environ, "PYTHONPATH": str(REPO), "ASCENDRUN_CHECKPOINT_DIR": str(folder / "ckpt")}
    done = subprocess.run(["sh", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and (folder / "out" / "best.pt").exists(), done.stderr[-2000:]
    assert "best step: 20" in done.stdout


def test_a_package_with_rules_is_planned(folder, tmp_path, monkeypatch):
    package = tmp_path / "site" / "judged"
    shutil.copytree(folder, package)
    (package / "judged.json").rename(package / "options.json")
    info = package.parent / "judged-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: judged\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[ascendrun.programs]\njudged = judged\n")
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    table, rules = load_programs(parse_program_options)["judged"], rules_of("judged")
    options = with_defaults(table, {"data_path": "/data/book.txt", "global_batch_size": 30})
    training = Training("judged", options, frozenset(), 4, 4, ("n1",), "npu", memory_bytes=64 << 30, has_workdir=True)
    training = replace(training, files={"n1": {"/data/book.txt": {"missing": True}}})
    plan = make_plan(training, devices_of(training), work=rules.workload(training))
    assert rules.inputs(training) == {"data_path": "/data/book.txt"}
    assert {problem.code for problem in plan.problems} == {"not-found", "uneven-batch"}
    assert plan.work is not None and plan.work.steps == 20 and plan.choice is not None and plan.choice.chosen


@pytest.mark.parametrize(
    "change, key",
    [
        (("workdir: {path: .}\n", ""), "jobfile.own-program-workdir"),
        (("./my_gpt.py", "./other.py"), "jobfile.own-program-options"),
        (("./my_gpt.py", "./../my_gpt.py"), "jobfile.own-program-options"),
    ],
)
def test_what_is_missing_is_named(folder, change, key):
    job = folder / "my_gpt.yaml"
    job.write_text(job.read_text().replace(*change))
    with pytest.raises(InvalidInputError) as caught:
        read_job(job)
    assert key in {problem.message.key for problem in caught.value.problems}


def test_a_table_with_a_fault_is_reported_with_its_file(folder):
    (folder / "my_gpt.json").write_text('{"options": {"data_path": {"type": "no"}}}')
    with pytest.raises(InvalidInputError) as caught:
        read_job(folder / "my_gpt.yaml")
    assert caught.value.problems[0].file.endswith("my_gpt.json")


# --- ascendrun.callback in a real Trainer and a real Accelerator, each in a process of its own ---


REPO = Path(__file__).resolve().parents[2]
TRAINER = """
import torch, transformers, ascendrun
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=2))
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
arguments = TrainingArguments("out", max_steps=4, logging_steps=2, per_device_train_batch_size=2, use_cpu=True,
                              report_to=[], save_strategy="no", disable_tqdm=True)
Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[ascendrun.callback()]).train()
"""
ACCELERATOR = """
from accelerate import Accelerator
import ascendrun
accelerator = Accelerator(cpu=True, log_with=[ascendrun.callback()])
accelerator.init_trackers("project", config={"lr": 0.1})
accelerator.log({"loss": 2.0}, step=1)
accelerator.log({"loss": 1.0}, step=4)
accelerator.end_training()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("script, steps", [(TRAINER, [2, 4]), (ACCELERATOR, [1, 4])])
def test_frameworks_report_their_steps(tmp_path, script, steps):
    pytest.importorskip("accelerate")
    env = {**os.environ, "PYTHONPATH": str(REPO), "ASCENDRUN_METRICS_FILE": str(tmp_path / "metrics")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**env, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == steps
