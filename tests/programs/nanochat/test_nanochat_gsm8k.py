"""The GSM8K recipe on the real questions: conversations with the calculator, rewards, and the test set, in small.

TESTS_SHARED_DATA is a directory with gsm8k/train.jsonl and gsm8k/test.jsonl of openai/grade-school-math.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("TESTS_SHARED_DATA", "shared/data")).absolute() / "gsm8k"
BASE = {
    "depth": 2, "head_dim": 32, "max_seq_len": 512, "micro_batch_size": 4, "total_batch_size": 4096, "max_steps": 20,
    "warmup_steps": 3, "matrix_lr": 0.2, "embedding_lr": 3, "unembedding_lr": 0.1, "eval_steps": 20,
}  # fmt: skip
RL = {
    "examples_per_step": 4, "num_samples": 4, "max_new_tokens": 120, "max_steps": 3, "eval_steps": 3,
    "eval_questions": 8, "micro_batch_size": 4,
}  # fmt: skip


def questions(name, rows):
    return json.dumps([{"file": str(DATA / f"{name}.jsonl"), "kind": "gsm8k", "rows": rows}])


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not (DATA / "train.jsonl").exists(), reason="requires GSM8K in TESTS_SHARED_DATA")
def test_the_recipe_of_gsm8k_runs(launch, tmp_path):
    def stage(mode, *, ranks=2, result="report.json", **options):
        always = {"mode": mode, "output_dir": tmp_path / mode, "data_cache_dir": tmp_path / "cache", "dtype": "float32"}
        words = [f"--{name}={value}" for name, value in {**always, **options}.items()]
        launch("nanochat", words, name=f"run-{mode}", ranks=ranks).succeed()
        return json.loads((tmp_path / mode / result).read_text())

    (tmp_path / "texts").mkdir()
    for number, name in enumerate(("train", "test")):
        rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
        texts = [json.dumps({"text": f"{row['question']}\n{row['answer']}"}) for row in rows]
        (tmp_path / "texts" / f"{number}.jsonl").write_text("\n".join(texts) + "\n")
    stage("tokenizer", ranks=1, data_path=tmp_path / "texts", vocab_size=2048)
    texts = {"data_path": tmp_path / "texts", "tokenizer_dir": tmp_path / "tokenizer"}
    stage("base", **texts, **BASE, eval_tokens=16384)

    few = {"micro_batch_size": 4, "max_steps": 25, "eval_steps": 5, "eval_tokens": 16384}
    scores = stage("sft", model_dir=tmp_path / "base", mixture=questions("train", 1200), **few)["evaluations"]
    assert scores[-1]["loss"] < scores[0]["loss"]

    report = stage("rl", model_dir=tmp_path / "sft", mixture=questions("train", 1200), **RL)
    assert report["training"]["questions_per_step"] == 4 and report["data"]["questions"] == 1080
    assert report["evaluations"][-1].keys() == {"step", "reward", "pass@4"}

    asked = {"model_dir": tmp_path / "rl", "mixture": questions("test", 24), "max_new_tokens": 200}
    found = stage("evaluate", result="evaluation.json", **asked)["tasks"]["test"]
    assert found["questions"] == 24 and 0 <= found["score"] <= 1
