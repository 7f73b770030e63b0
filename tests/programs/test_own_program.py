"""The program of docs/own-program.md: its files are taken from the page, and run as the page says."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ascendrun.core.errors import InvalidInputError
from ascendrun.core.jobfile.launchers import program_command
from ascendrun.query.submit import read_job
from tests.programs.conftest import REPO

PAGE = REPO / "docs" / "own-program.md"
FILES = {"yaml": "my_gpt.yaml", "json": "my_gpt.json", "python": "my_gpt.py"}
SMALL = ("--num_train_epochs=3", "--seq_len=32", "--width=32", "--save_steps=2", "--logging_steps=1", "--dtype=float32")


def write_example(folder: Path) -> None:
    """Write the files that the page shows."""
    blocks = re.findall(r"```(yaml|json|python)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert [kind for kind, _ in blocks] == list(FILES)
    for kind, text in blocks:
        (folder / FILES[kind]).write_text(text, encoding="utf-8")


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
