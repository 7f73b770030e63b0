"""Mean reward on held-out questions before and after RL on sums and spelling, by seed, on one CPU core.

    python -m benchmarks.nanochat.rewards [--seeds 11,12,13]

A model of two layers is trained by supervised learning, and then by rewards. The 100 sums of two one-digit numbers are
split by the seed into three disjoint parts: 40 for supervised learning, 40 for rewards, 20 held out. In supervised
learning a sum has two kinds of solutions: with the calculator, and the bare answer. Both are learned, but only the
calculator helps with other sums, as the bare answer is learned by heart. Rewards are to teach which of the two to use.
Spelling questions have random words; 100 other ones are held out, at most a few of which occur in a training by chance.

The reward is the chance that a reply drawn with temperature 1 is right, the mean of 16 replies. Each seed has its own
weights, sums and words. Writes results/rewards.json; a seed that is measured again replaces its row.

Settings were chosen with the seeds of DEVELOPMENT, which do not count for the goal. With earlier settings all solutions
used the calculator and supervised learning was stopped while about a third of the sums were right. When that happens
differs by seed: the gains of the seeds 1, 2 and 3 were 0.52, 0.18 and 0.08.
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
DEVELOPMENT = (101, 102, 103)
HELD_SUMS, SUPERVISED_SUMS, HELD_WORDS = 20, 40, 100
BARE_ANSWERS = 2
"""Solutions of a sum without the calculator, for each with it."""
SAMPLES = 16
BASE = {
    "depth": 2, "aspect_ratio": 64, "head_dim": 32, "max_seq_len": 96, "micro_batch_size": 8, "total_batch_size": 1536,
    "max_steps": 20, "matrix_lr": 0.5, "embedding_lr": 6, "unembedding_lr": 0.3, "eval_steps": 0,
}  # fmt: skip
SFT = {"max_steps": 90, "micro_batch_size": 16, "init_lr_frac": 1.0, "eval_steps": 0}
RL = {
    "max_steps": 120, "target_examples_per_step": 16, "num_samples": SAMPLES, "micro_batch_size": 64,
    "max_new_tokens": 40, "init_lr_frac": 0.15, "eval_steps": 0, "max_num_seqs": 64,
}  # fmt: skip
ALWAYS = {"dtype": "float32", "save_steps": 0, "sample_steps": 0, "data_cache_dir": "cache"}
RESULT = Path(__file__).with_name("results") / "rewards.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="11,12,13")
    asked = parser.parse_args()
    rows = {row["seed"]: row for row in read(RESULT)["seeds"]} if RESULT.exists() else {}
    for seed in map(int, asked.seeds.split(",")):
        with tempfile.TemporaryDirectory() as name:
            rows[seed] = {"seed": seed, **measure(Path(name), seed)}
        write_result("rewards", result_of([rows[number] for number in sorted(rows)]))


def result_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows and whether every seed gains as much as the goal, apart from those that settings were chosen
    with."""
    gains = [row["gain"] for row in rows if row["seed"] not in DEVELOPMENT]
    is_met = len(gains) >= 3 and min(gains) >= GOAL
    return {"seeds": rows, "development": list(DEVELOPMENT), "goal": GOAL, "is_met": is_met}


def measure(folder: Path, seed: int) -> dict[str, Any]:
    sums = [(first, second) for first in range(10) for second in range(10)]
    random.Random(seed).shuffle(sums)
    held, rest = sums[:HELD_SUMS], sums[HELD_SUMS:]
    supervised, rewarded = rest[:SUPERVISED_SUMS], rest[SUPERVISED_SUMS:]
    write_rows(folder / "sums.jsonl", (worked(*pair) for pair in held))
    write_rows(folder / "rewarded.jsonl", (worked(*pair) for pair in rewarded))
    solutions = (worked, *[bare] * BARE_ANSWERS)
    write_rows(folder / "supervised.jsonl", (solve(*pair) for pair in supervised for solve in solutions))
    write_rows(folder / "letters.jsonl", [{"text": "".join(map(chr, range(32, 127)))}] * 40)

    always, texts = {**ALWAYS, "seed": seed}, {"data_path": "letters.jsonl"}
    run_stage(folder, "tokenizer", tokenizer="chars", output_dir="tokenizer", seed=seed, **texts)
    run_stage(folder, "base", tokenizer_dir="tokenizer", output_dir="base", **texts, **BASE, **always)
    known = [{"kind": "gsm8k", "file": "supervised.jsonl", "epochs": 12}, {"kind": "spelling", "rows": 1500}]
    run_stage(folder, "sft", model_dir="base", output_dir="sft", mixture=known, load_optimizer="false", **SFT, **always)
    before = reward_of(folder, "sft", seed)
    questions = [{"kind": "gsm8k", "file": "rewarded.jsonl", "epochs": 20}, {"kind": "spelling", "rows": 800}]
    run_stage(folder, "rl", model_dir="sft", output_dir="rl", mixture=questions, **RL, **always)
    after = reward_of(folder, "rl", seed)
    return {"before": before, "after": after, "gain": round(after["mean"] - before["mean"], 4)}


def worked(first: int, second: int) -> dict[str, str]:
    answer = f"<<{first}+{second}={first + second}>>#### {first + second}"
    return {"question": f"What is {first} + {second}?", "answer": answer}


def bare(first: int, second: int) -> dict[str, str]:
    return {"question": f"What is {first} + {second}?", "answer": f"#### {first + second}"}


def write_rows(file: Path, rows: Iterable[dict[str, str]]) -> None:
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
