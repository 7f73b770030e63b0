"""Base training next to upstream's: tokens/s of the same steps, taking turns, and tokens that best-fit rows keep.

    git clone https://github.com/karpathy/nanochat /tmp/upstream && git -C /tmp/upstream checkout 92d63d4
    OMP_NUM_THREADS=1 python -m benchmarks.nanochat.upstream /tmp/upstream BOOKS

Both train the same model (`current`, float32, eager) on the same tokens on one CPU core: upstream's model, optimizer
and the steps of its script's loop (rates, momentum and decay set, gradients dropped, the loss read), and our engine,
task and optimizer as our loop calls them. Only tokens per second of the process's CPU time count. Both read the same
rows; reading files and tokenizing is not part of either. BOOKS is a directory of parquet files with a column `text`.
Writes
results/upstream.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch

from ascendrun.programs.devices.accelerator import Precision, open_accelerator
from ascendrun.programs.nanochat.__main__ import OPTIONS
from ascendrun.programs.nanochat.base import NextToken, batch_of
from ascendrun.programs.nanochat.model import make_model, setup_optimizer
from ascendrun.programs.nanochat.sizes import Horizon, Sizes
from ascendrun.programs.nanochat.texts import BOS, TextEncoder, read_corpus, token_bytes, train_bpe
from ascendrun.programs.trainer import shards
from ascendrun.programs.trainer.options import parse, read_table
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.shards import Rows, best_fit
from ascendrun.programs.trainer.strategies.parallel import wrap
from benchmarks.nanochat import write_result

VOCABULARY, DEPTH, LENGTH, ROWS, STEPS = 4096, 4, 512, 4, 2
HIDDEN, HEAD = 256, 64
PACKED = 2048
"""Tokens of a row whose packing is compared."""
GOAL, PACKING_GOAL = 1.0, 0.01
FLOAT = Precision(torch.float32, torch.float32, False, "float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("upstream", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--packed-rows", type=int, default=400)
    asked = parser.parse_args()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.path.insert(0, str(asked.upstream.absolute()))
    torch.set_num_threads(1)
    options = parse([f"--data_path={asked.data}", "--dtype=float32", "--micro_batch_size=0"], read_table(OPTIONS))
    corpus = read_corpus(options)
    texts = list(corpus.documents)
    tokenizer = train_bpe(iter(texts), VOCABULARY)
    documents = [ids for ids, _ in TextEncoder(tokenizer)(texts)]
    with tempfile.TemporaryDirectory() as folder:
        source = lambda: shards.Source(texts, [None] * len(texts), TextEncoder(tokenizer), VOCABULARY)  # noqa: E731
        tokens = shards.open_or_build(Path(folder), source, context=None, log=lambda *line, **values: None)
        rows = Rows(tokens, seq_len=LENGTH, batch_size=ROWS, seed=1)
        speed = compare(our_steps(rows, token_bytes(tokenizer), options), upstream_steps(rows), asked.rounds)
    packing = kept(documents, tokenizer.encode(BOS).ids[0], asked.packed_rows)
    shape = {"layers": DEPTH, "hidden": HIDDEN, "vocabulary": VOCABULARY, "sequence": LENGTH, "sequences": ROWS}
    difference = packing["ours"] / packing["upstream"] - 1
    write_result(
        "upstream",
        {
            "shape": shape,
            "tokens_per_cpu_s": speed,
            "goal": GOAL,
            "is_met": speed["ratio"] >= GOAL,
            "kept": {**packing, "difference": round(difference, 5), "is_met": abs(difference) <= PACKING_GOAL},
        },
    )


Steps = Callable[[int], None]


def compare(ours: Steps, theirs: Steps, rounds: int) -> dict[str, Any]:
    """Take turns; return medians, and the ratio of each round."""
    found: dict[str, list[float]] = {"ours": [], "upstream": []}
    for number in range(rounds + 1):
        ways = [("ours", ours), ("upstream", theirs)]
        for name, run in ways if number % 2 else reversed(ways):
            began_s = time.process_time()
            run(number * STEPS)
            found[name].append(STEPS * ROWS * LENGTH / (time.process_time() - began_s))
    ratios = [one / other for one, other in list(zip(found["ours"], found["upstream"]))[1:]]
    medians = {name: round(statistics.median(each[1:]), 1) for name, each in found.items()}
    return {**medians, "ratio": round(statistics.median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios]}


def our_steps(rows: Rows, sizes_of_tokens: Sequence[int], options: dict[str, Any]) -> Steps:
    sizes = Sizes(DEPTH, HIDDEN, HIDDEN // HEAD, HIDDEN // HEAD, VOCABULARY, LENGTH)
    horizon = Horizon(0, ROWS * LENGTH, 1000, 1.0, 0.28)
    rates = {"embedding_lr": 0.3, "unembedding_lr": 0.008, "matrix_lr": 0.02, "scalar_lr": 0.5}
    shape = {"warmup_steps": 40, "warmdown_ratio": 0.65, "final_lr_frac": 0.05, "init_lr_frac": 1.0}
    here = Runtime(0, 0, 1, None, open_accelerator("cpu", 0))
    model = make_model(sizes, seed=1)
    plan: Any = lambda placed: setup_optimizer(model, {**options, **rates, **shape}, horizon, shard=False)  # noqa: E731
    engine = wrap(model, here, strategy="none", make_optimizer=plan, precision=FLOAT)
    task = NextToken(rows, rows, engine, sizes_of_tokens, options)

    def run(first: int) -> None:
        for step in range(first, first + STEPS):
            batch = batch_of(rows, rows.units(step))
            engine.begin(step)
            with engine.accumulate(last=True):
                with engine.autocast():
                    total = task.loss(engine.model, batch.tensors)
                engine.backward(total / batch.weight)
            engine.finish(0.0)
            total.item()

    return run


def upstream_steps(rows: Rows) -> Steps:
    from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]

    torch.manual_seed(1)
    heads = HIDDEN // HEAD
    with torch.device("meta"):
        model = GPT(GPTConfig(LENGTH, VOCABULARY, DEPTH, heads, heads, HIDDEN))
    model.to_empty(device="cpu")
    model.init_weights()
    optimizer = model.setup_optimizer(weight_decay=0.28)

    def run(first: int) -> None:
        for step in range(first, first + STEPS):
            ids, _ = rows.read(rows.units(step))
            inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            loss = model(inputs, targets)
            train_loss = loss.detach()
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * min(1.0, (step + 1) / 40)
                if group["kind"] == "muon":
                    group["momentum"], group["weight_decay"] = 0.85, 0.28
            optimizer.step()
            model.zero_grad(set_to_none=True)
            train_loss.item()

    return run


def kept(documents: Sequence[Any], first: int, count: int) -> dict[str, float]:
    """Return the fraction of tokens in the first rows, of those of the documents that were used for them."""
    lengths = [len(ids) for ids in documents]
    used = {document for row, document, _ in best_fit(np.array(lengths), PACKED + 1, crop=True) if row < count}
    taken = sum(lengths[document] for document in used)
    return {
        "rows": count,
        "length": PACKED,
        "ours": count * (PACKED + 1) / taken,
        "upstream": upstream_kept(lengths, first, count),
    }


def upstream_kept(lengths: Sequence[int], first: int, count: int) -> float:
    from nanochat import dataloader  # type: ignore[import-not-found]

    read: list[int] = []

    def batches(*given: Any) -> Iterator[Any]:
        for start in range(0, len(lengths), 128):
            yield lengths[start : start + 128], (0, start, 1)

    class Lengths:
        """Gives a document of each length instead of tokens of texts."""

        def get_bos_token_id(self) -> int:
            return first

        def encode(self, some: Sequence[int], **given: Any) -> list[list[int]]:
            read.extend(some)
            return [[first] * length for length in some]

    dataloader._document_batches = batches
    load = dataloader.tokenizing_distributed_data_loader_with_state_bos_bestfit
    loader = load(Lengths(), 1, PACKED, "train", device="cpu")
    for _ in range(count):
        next(loader)
    waiting = loader.gi_frame.f_locals["doc_buffer"]
    return count * (PACKED + 1) / (sum(read) - sum(map(len, waiting)))


if __name__ == "__main__":
    main()
