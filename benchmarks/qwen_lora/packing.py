"""Tokens per second of packed rows beside unpacked rows of similar length, on the instruct rows, taking turns.

    OMP_NUM_THREADS=1 python -m benchmarks.qwen_lora.packing DATA.json [--rounds 5]

Both train the same samples with the same model. Unpacked rows are sorted by length within a step and divided into
micro-batches of at most --cutoff tokens with their padding, so that a pass of either has about as many tokens. Only
tokens of samples count, per second of the process's CPU time, which other processes of the machine hardly change.
Writes results/packing.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ascendrun.programs.qwen_lora import base, chat_template, lora
from ascendrun.programs.qwen_lora.__main__ import OPTIONS
from ascendrun.programs.qwen_lora.curriculum import Course, Table
from ascendrun.programs.qwen_lora.dataset import read_conversations
from ascendrun.programs.qwen_lora.rules import read_stages
from ascendrun.programs.qwen_lora.sft_task import Rows, forward
from ascendrun.programs.trainer import options as option_table
from ascendrun.programs.trainer.data import deal

RESULTS = Path(__file__).with_name("results") / "packing.json"
BATCH, SEED, STEPS = 32, 0, 2
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cutoff", type=int, default=2048)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = make_rows(asked.data, asked.cutoff)
    report = {"cutoff": asked.cutoff, "batch": BATCH, "steps": STEPS, **lengths_of(rows), **compare(rows, asked)}
    text = json.dumps(report, indent=1)
    RESULTS.write_text(text + "\n")
    print(text)


def make_rows(data: Path, cutoff: int) -> Rows:
    conversations = read_conversations(data, system="")
    tokenizer = chat_template.wrap_tokenizer(chat_template.make_tokenizer(conversations))
    samples = [chat_template.encode(tokenizer, each, cutoff=cutoff) for each in conversations]
    return Rows(samples, ("all",), 0, 8)


def lengths_of(rows: Rows) -> dict[str, Any]:
    lengths = sorted(len(sample.ids) for sample in rows.samples)
    return {"samples": len(lengths), "mean": round(statistics.mean(lengths)), "longest": lengths[-1]}


def compare(rows: Rows, asked: argparse.Namespace) -> dict[str, Any]:
    model = make_model()
    micro_batches = {name: plan(rows, asked.cutoff, packed=name == "packed") for name in ("packed", "unpacked")}
    rates: dict[str, list[float]] = {name: [] for name in micro_batches}
    for _ in range(asked.rounds + 1):
        for name, steps in micro_batches.items():
            rates[name].append(run(model, rows, steps))
    kept = {name: found[1:] for name, found in rates.items()}
    medians = {name: statistics.median(found) for name, found in kept.items()}
    ratios = [one / other for one, other in zip(kept["packed"], kept["unpacked"])]
    return {
        "tokens_per_s": {name: round(rate, 1) for name, rate in medians.items()},
        "passes": {name: sum(map(len, steps)) for name, steps in micro_batches.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def plan(rows: Rows, cutoff: int, *, packed: bool) -> list[list[list[Any]]]:
    """Return the micro-batches of each step."""
    lengths = [len(sample.ids) for sample in rows.samples]
    course = Course(
        Table(("all",), tuple(read_stages(["1=1"], 1))),
        [list(range(len(lengths)))],
        lengths,
        steps=STEPS,
        batch_size=BATCH,
        seed=SEED,
        row_tokens=cutoff if packed else 0,
    )
    steps = [course.units(step) for step in range(STEPS)]
    if packed:
        return [deal(units, 0, 1, micro_batch=1) for units in steps]
    return [
        deal(units, 0, 1, micro_tokens=cutoff, length_of=lambda unit: sum(lengths[number] for number in unit))
        for units in steps
    ]


def make_model() -> Any:
    torch.manual_seed(SEED)
    config = base.shape_config("tiny", vocab_size=2048, num_key_value_heads=2, **SHAPE)
    return lora.add_lora(base.build(config), option_table.parse([], option_table.read_table(OPTIONS))).train()


def run(model: Any, rows: Rows, steps: Sequence[Sequence[Any]]) -> float:
    began_s, tokens = time.process_time(), 0
    for pieces in steps:
        for piece in pieces:
            batch = rows.batch(piece)
            loss: Any = forward(model, batch.tensors).sum() / batch.weight
            loss.backward()
            tokens += batch.tokens
        model.zero_grad()
    return tokens / (time.process_time() - began_s)


if __name__ == "__main__":
    main()
