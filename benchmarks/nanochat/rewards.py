"""Mean reward on held-out questions before and after RL on sums and spelling, with three seeds, on one CPU core.

    python -m benchmarks.nanochat.rewards [--seeds 1,2,3]

A model of two layers is trained by supervised learning until it has some answers right, and then by rewards
on 80 of the 100 sums of one-digit numbers, and on spelling. Held out are the other 20 sums, which supervised learning
has seen and RL has not, and 100 spelling questions, which neither has seen. The reward is the chance that a reply drawn
with temperature 1 is right, the mean of 16 replies. Writes results/rewards.json.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.nanochat import run_stage, write_result
from benchmarks.stages import read

GOAL = 0.15
HELD_SUMS = 20
SAMPLES = 16
BASE = {
    "depth": 2, "aspect_ratio": 64, "head_dim": 32, "max_seq_len": 96, "micro_batch_size": 8, "total_batch_size": 1536,
    "max_steps": 20, "matrix_lr": 0.5, "embedding_lr": 6, "unembedding_lr": 0.3, "eval_steps": 0,
}  # fmt: skip
SFT = {"max_steps": 100, "micro_batch_size": 16, "init_lr_frac": 1.0, "eval_steps": 0}
RL = {
    "max_steps": 120, "target_examples_per_step": 16, "num_samples": SAMPLES, "micro_batch_size": 64,
    "max_new_tokens": 40, "init_lr_frac": 0.05, "eval_steps": 0, "max_num_seqs": 64,
}  # fmt: skip
ALWAYS = {"dtype": "float32", "save_steps": 0, "data_cache_dir": "cache"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    asked = parser.parse_args()
    rows = []
    for seed in map(int, asked.seeds.split(",")):
        with tempfile.TemporaryDirectory() as name:
            rows.append({"seed": seed, **measure(Path(name), seed)})
    gains = [row["after"]["mean"] - row["before"]["mean"] for row in rows]
    write_result(
        "rewards",
        {"seeds": rows, "gains": [round(gain, 4) for gain in gains], "goal": GOAL, "is_met": min(gains) >= GOAL},
    )


def measure(folder: Path, seed: int) -> dict[str, Any]:
    sums = [(first, second) for first in range(10) for second in range(10)]
    random.Random(seed).shuffle(sums)
    files = {"all": sums, "train": sums[HELD_SUMS:], "held": sums[:HELD_SUMS]}
    for name, pairs in files.items():
        write_sums(folder / f"{name}.jsonl", pairs)
    always = {**ALWAYS, "seed": seed}
    letters = "".join(map(chr, range(32, 127)))
    (folder / "letters.jsonl").write_text(f"{json.dumps({'text': letters})}\n" * 40)
    texts = {"data_path": "letters.jsonl"}
    run_stage(folder, "tokenizer", tokenizer="chars", output_dir="tokenizer", seed=seed, **texts)
    run_stage(folder, "base", tokenizer_dir="tokenizer", output_dir="base", **texts, **BASE, **always)
    known = [{"kind": "gsm8k", "file": "all.jsonl", "epochs": 20}, {"kind": "spelling", "rows": 2000}]
    run_stage(folder, "sft", model_dir="base", output_dir="sft", mixture=known, load_optimizer="false", **SFT, **always)
    questions = [{"kind": "gsm8k", "file": "train.jsonl", "epochs": 10}, {"kind": "spelling", "rows": 800}]
    run_stage(folder, "rl", model_dir="sft", output_dir="rl", mixture=questions, **RL, **always)
    return {"before": reward_of(folder, "sft", seed), "after": reward_of(folder, "rl", seed)}


def write_sums(file: Path, pairs: Iterable[tuple[int, int]]) -> None:
    rows = [{"question": f"What is {first} + {second}?", "answer": f"#### {first + second}"} for first, second in pairs]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def reward_of(folder: Path, model: str, seed: int) -> dict[str, float]:
    held = [{"kind": "gsm8k", "file": "held.jsonl"}, {"kind": "spelling", "rows": 100}]
    how = {"num_samples": SAMPLES, "temperature": 1.0, "max_new_tokens": 40, "max_num_seqs": 64, "dtype": "float32"}
    run_stage(folder, "evaluate", model_dir=model, output_dir=f"{model}-held", mixture=held, seed=1000 + seed, **how)
    tasks = read(folder / f"{model}-held" / "evaluation.json")["tasks"]
    scores = {name: round(task["pass@1"], 4) for name, task in tasks.items()}
    return {**scores, "mean": round(sum(scores.values()) / len(scores), 4)}


if __name__ == "__main__":
    main()
