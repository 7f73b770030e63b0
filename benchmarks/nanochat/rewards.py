"""Mean reward on held-out questions before and after RL on sums and spelling, with three seeds, on one CPU core.

    python -m benchmarks.nanochat.rewards [--seeds 1,2,3]

A model of two layers is trained by supervised learning until it has some answers right, and then by rewards, on the
same kinds of questions: 80 of the 100 sums of one-digit numbers, and spelling. Held out are the other 20 sums, which
neither training has seen, and 100 spelling questions of other random words, at most two of which occur in a training by
chance. The reward is the chance that a reply drawn with temperature 1 is right, the mean of 16 replies. Each seed has
its own weights, sums and words. Writes results/rewards.json; a seed that is measured again replaces its row.

Settings were chosen with the seeds 101 and 102, which are not among those that count. The chosen ones were measured
with 101 only: sums rose from 0.36 to 0.89, spelling from 0.20 to 0.41. What was tried:

- Worked solutions with the calculator, as GSM8K has them. A sum without it is learned by heart, and then held-out ones
  do not gain: with the answer alone, sums rose by 0.02 and spelling by 0.14 (seed 1, rate 0.05, 120 steps), and by 0.01
  and 0.22 (seed 11, rate 0.15, 200 steps); a rate of 0.4 collapsed.
- Supervised learning is short, and has few sums, so that rewards differ between the replies to a question. With 25
  epochs of sums, 98 % of the held-out ones were right after 40 steps, and with 3 epochs 93 % after 100; 60 steps with 2
  epochs leave about a third (seed 101).
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
HELD_SUMS, HELD_WORDS = 20, 100
SAMPLES = 16
BASE = {
    "depth": 2, "aspect_ratio": 64, "head_dim": 32, "max_seq_len": 96, "micro_batch_size": 8, "total_batch_size": 1536,
    "max_steps": 20, "matrix_lr": 0.5, "embedding_lr": 6, "unembedding_lr": 0.3, "eval_steps": 0,
}  # fmt: skip
SFT = {"max_steps": 60, "micro_batch_size": 16, "init_lr_frac": 1.0, "eval_steps": 0}
RL = {
    "max_steps": 120, "target_examples_per_step": 16, "num_samples": SAMPLES, "micro_batch_size": 64,
    "max_new_tokens": 40, "init_lr_frac": 0.15, "eval_steps": 0, "max_num_seqs": 64,
}  # fmt: skip
ALWAYS = {"dtype": "float32", "save_steps": 0, "data_cache_dir": "cache"}
RESULT = Path(__file__).with_name("results") / "rewards.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    asked = parser.parse_args()
    rows = {row["seed"]: row for row in read(RESULT)["seeds"]} if RESULT.exists() else {}
    for seed in map(int, asked.seeds.split(",")):
        with tempfile.TemporaryDirectory() as name:
            rows[seed] = {"seed": seed, **measure(Path(name), seed)}
        found = [rows[number] for number in sorted(rows)]
        gains = [row["after"]["mean"] - row["before"]["mean"] for row in found]
        is_met = len(gains) >= 3 and min(gains) >= GOAL
        gained = [round(gain, 4) for gain in gains]
        write_result("rewards", {"seeds": found, "gains": gained, "goal": GOAL, "is_met": is_met})


def measure(folder: Path, seed: int) -> dict[str, Any]:
    sums = [(first, second) for first in range(10) for second in range(10)]
    random.Random(seed).shuffle(sums)
    for name, pairs in {"train": sums[HELD_SUMS:], "sums": sums[:HELD_SUMS]}.items():
        write_sums(folder / f"{name}.jsonl", pairs)
    always = {**ALWAYS, "seed": seed}
    letters = "".join(map(chr, range(32, 127)))
    (folder / "letters.jsonl").write_text(f"{json.dumps({'text': letters})}\n" * 40)
    texts = {"data_path": "letters.jsonl"}
    run_stage(folder, "tokenizer", tokenizer="chars", output_dir="tokenizer", seed=seed, **texts)
    run_stage(folder, "base", tokenizer_dir="tokenizer", output_dir="base", **texts, **BASE, **always)
    known = [{"kind": "gsm8k", "file": "train.jsonl", "epochs": 2}, {"kind": "spelling", "rows": 2000}]
    run_stage(folder, "sft", model_dir="base", output_dir="sft", mixture=known, load_optimizer="false", **SFT, **always)
    before = reward_of(folder, "sft", seed)
    questions = [{"kind": "gsm8k", "file": "train.jsonl", "epochs": 10}, {"kind": "spelling", "rows": 800}]
    run_stage(folder, "rl", model_dir="sft", output_dir="rl", mixture=questions, **RL, **always)
    return {"before": before, "after": reward_of(folder, "rl", seed)}


def write_sums(file: Path, pairs: Iterable[tuple[int, int]]) -> None:
    rows = [
        {
            "question": f"What is {first} + {second}?",
            "answer": f"<<{first}+{second}={first + second}>>#### {first + second}",
        }
        for first, second in pairs
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def reward_of(folder: Path, model: str, seed: int) -> dict[str, float]:
    """Return the reward of each task, and their mean."""
    held = [{"kind": "gsm8k", "file": "sums.jsonl"}, {"kind": "spelling", "rows": HELD_WORDS}]
    how = {"num_samples": SAMPLES, "temperature": 1.0, "max_new_tokens": 40, "max_num_seqs": 64, "dtype": "float32"}
    run_stage(folder, "evaluate", model_dir=model, output_dir=f"{model}-held", mixture=held, seed=1000 + seed, **how)
    tasks = read(folder / f"{model}-held" / "evaluation.json")["tasks"]
    scores = {name: round(task["pass@1"], 4) for name, task in tasks.items()}
    return {**scores, "mean": round(sum(scores.values()) / len(scores), 4)}


if __name__ == "__main__":
    main()
