"""All stages on real data, in small: books, conversations, multiple choice and the questions of GSM8K.

TESTS_SHARED_DATA is a directory with books_pd (Parquet files of public-domain books), and as JSON lines chat_sft
(conversations), mc_tasks (ARC and OpenBookQA) and gsm8k (openai/grade-school-math).
"""

import json
import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("TESTS_SHARED_DATA", "shared/data")).absolute()
BASE = {
    "depth": 2, "head_dim": 32, "max_seq_len": 512, "micro_batch_size": 4, "total_batch_size": 4096, "max_steps": 30,
    "warmup_steps": 3, "matrix_lr": 0.05, "embedding_lr": 1, "unembedding_lr": 0.03, "eval_steps": 10,
    "eval_tokens": 16384,
}  # fmt: skip
CHAT = {"micro_batch_size": 4, "max_steps": 25, "eval_steps": 5, "eval_tokens": 16384}
RL = {
    "examples_per_step": 4, "num_samples": 4, "max_new_tokens": 120, "max_steps": 3, "eval_steps": 3,
    "eval_questions": 8, "micro_batch_size": 4,
}  # fmt: skip


def task(name, kind, **given):
    return {"file": str(DATA / f"{name}.jsonl"), "kind": kind, **given}


MID = [
    task("chat_sft/glaive_chat", "messages"), task("mc_tasks/openbookqa_train", "choices", rows=400),
    task("gsm8k/train", "gsm8k", rows=400), {"kind": "spelling", "rows": 300}, {"kind": "sums", "rows": 300},
]  # fmt: skip
SFT = [
    task("chat_sft/identity", "messages"), task("mc_tasks/ARC-Easy_train", "choices", rows=400),
    task("gsm8k/train", "gsm8k", rows=800),
]  # fmt: skip
TESTS = [
    task("mc_tasks/ARC-Easy_test", "choices", rows=16), task("mc_tasks/ARC-Challenge_test", "choices", rows=16),
    task("mc_tasks/openbookqa_test", "choices", rows=16), task("gsm8k/test", "gsm8k", rows=16),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not (DATA / "books_pd").exists(), reason="requires books_pd and others in TESTS_SHARED_DATA")
def test_all_stages_learn_from_books_conversations_choices_and_questions(launch, tmp_path):
    def stage(name, *, mode=None, ranks=2, result="report.json", **options):
        always = {"mode": mode or name, "output_dir": tmp_path / name, "data_cache_dir": tmp_path / "cache"}
        given = {key: json.dumps(value) if key == "mixture" else value for key, value in options.items()}
        words = [f"--{key}={value}" for key, value in {**always, "dtype": "float32", **given}.items()]
        launch("nanochat", words, name=f"run-{name}", ranks=ranks).succeed()
        return json.loads((tmp_path / name / result).read_text()) if result else None

    def scores(model):
        asked = {"model_dir": tmp_path / model, "mixture": TESTS, "max_new_tokens": 60, "eval_tokens": 16384}
        found = stage(f"eval-{model}", mode="evaluate", result="evaluation.json", data_path=DATA / "books_pd", **asked)
        assert [each["questions"] for each in found["tasks"].values()] == [16] * 4
        return found

    def falls(report, score):
        before, *_, after = (each[score] for each in report["evaluations"])
        assert after < before, report["evaluations"]

    books = {"data_path": DATA / "books_pd"}
    stage("tokenizer", ranks=1, vocab_size=2048, max_chars=2_000_000, **books)
    falls(stage("base", tokenizer_dir=tmp_path / "tokenizer", **books, **BASE), "bits_per_byte")
    falls(stage("mid", model_dir=tmp_path / "base", mixture=MID, **CHAT), "loss")
    falls(stage("sft", model_dir=tmp_path / "mid", mixture=SFT, **CHAT), "loss")
    before = scores("sft")
    report = stage("rl", model_dir=tmp_path / "sft", mixture=[task("gsm8k/train", "gsm8k", rows=1200)], **RL)
    assert report["training"]["questions_per_step"] == 4 and report["data"]["questions"] == 1080
    assert report["evaluations"][-1].keys() == {"step", "reward", "pass@4"}
    after = scores("rl")
    assert before["tasks"].keys() == after["tasks"].keys()
    dirs = ",".join(str(tmp_path / name) for name in ("base", "mid", "sft", "eval-sft", "rl", "eval-rl"))
    stage("report", ranks=1, result=None, report_dirs=dirs)
    page = (tmp_path / "report" / "report.md").read_text()
    assert "ARC-Easy_test centered" in page and "bits_per_byte" in page
