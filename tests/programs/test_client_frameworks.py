"""ascendrun.callback in a real Trainer and a real Accelerator, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
