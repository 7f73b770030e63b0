"""Speed next to CodonTransformer on one CPU core: training steps, and proteins to DNA in batches and one by one.

    PYTHONPATH=. python -m benchmarks.codon.upstream train UPSTREAM LINES
    PYTHONPATH=. python -m benchmarks.codon.upstream predict UPSTREAM LINES

UPSTREAM is a checkout of CodonTransformer (github.com/Adibvafa/CodonTransformer, commit 4a447b01) with its requirements
installed. LINES is a file of training lines in its format, also as `.gz`: those of the result are the 15,377 training
sequences of `benchmarks.codon.accuracy`. All run the model of 89.6 M weights in float32 in one process with one thread
and take turns. Only the CPU time of the process counts, so other work on the machine does not.

`train`: the same `--lines` sequences once, in batches of six. Ours: the loop of the program with its default options,
one step, then one step of upstream's. Upstream: the collator of its finetune.py, block-sparse attention as it sets
it before each step, AdamW and OneCycleLR; without Lightning around it, and with an iterator, which its
dataset lacks. Lines are in random order, as its data preparation leaves them. Only real tokens count, not padding.

`predict`: the likeliest codons of the proteins of `--lines` lines (the result: 300 of at most 400 tokens), by length
and by model: upstream's
predict_dna_sequence, ours one by one, and in batches as `--mode=optimize` makes them; models and tokenizer are loaded.
The small model is that of `jobs/codon.yaml`, with more positions. Three rounds, the medians count.

Writes results/upstream_train.json or upstream_predict.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Callable

import torch

from ascendrun.programs.codon.__main__ import OPTIONS
from ascendrun.programs.codon.decoding import decode
from ascendrun.programs.codon.genes import Genes, read_genes
from ascendrun.programs.codon.model import Config, make_model
from ascendrun.programs.codon.optimize import log_probs_of
from ascendrun.programs.codon.optimize import predict_dna_sequence as own_prediction
from ascendrun.programs.codon.train import MaskedCodons, optimizer_of
from ascendrun.programs.codon.vocabulary import ORGANISMS
from ascendrun.programs.devices.accelerator import Precision, open_accelerator
from ascendrun.programs.trainer.data import Buckets
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.options import parse, read_table
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.parallel import wrap
from ascendrun.programs.trainer.task import Settings
from benchmarks.stages import write_result

GUIDE_STEP_S = 428.87
"""Seconds of a step that the guide states for the same model and batch, on its device."""
GOAL, BATCH_GOAL = 1.5, 3.0
SMALL = Config(
    hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=2048
)
LENGTHS = {"at most 100 residues": (1, 100), "more": (101, 2046)}
MOST_PROTEINS = {"full": 8, "small": 200}
ROWS, ROUNDS = 16, 3
"""ROWS: the default of eval_batch_size."""
Proteins = Sequence[tuple[str, int]]
BATCH = 6
FLOAT = Precision(torch.float32, torch.float32, False, "float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=["train", "predict"])
    parser.add_argument("upstream", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--lines", type=int, default=36)
    parser.add_argument("--longest", type=int, default=1024, help="tokens; upstream's steps of 1,900 need over 20 GB")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    data = asked.data.absolute()
    lines = choose(data, asked.lines, asked.longest, asked.seed)
    sys.path.insert(0, str(asked.upstream.absolute()))
    torch.set_num_threads(1)
    upstream = asked.upstream.absolute()
    with tempfile.TemporaryDirectory() as name:
        result = train(lines, upstream, Path(name)) if asked.measure == "train" else predict(lines, upstream)
    write_result(Path(__file__).with_name("results") / f"upstream_{asked.measure}.json", result)


def choose(file: Path, count: int, longest: int, seed: int) -> list[dict[str, Any]]:
    """Return some lines of upstream's organisms and at most `longest` tokens, in random order."""
    opened = gzip.open(file, "rt") if file.suffix == ".gz" else open(file)
    with opened:
        lines = [json.loads(line) for line in opened]
    fit = [line for line in lines if line["organism"] < len(ORGANISMS) and len(line["codons"].split()) + 2 <= longest]
    print(f"{len(fit)} of {len(lines)} lines fit", file=sys.stderr)
    return random.Random(seed).sample(fit, count)


# --- training ---


class Turns(MaskedCodons):
    """Our task; its evaluation, after each step, is a step of the other."""

    def __init__(self, genes: Genes, options: Mapping[str, Any], other: Iterator[dict[str, float]]) -> None:
        super().__init__(genes, dict(options), multiple=1)
        self.other = other
        self.ours: list[dict[str, float]] = []
        self.theirs: list[dict[str, float]] = []
        self.began = clocks()

    def evaluate(self, name: str, step: int) -> dict[str, float]:
        self.ours.append(since(self.began))
        print("ours", self.ours[-1], file=sys.stderr)
        with torch.enable_grad():
            self.theirs.append(next(self.other))
        print("upstream", self.theirs[-1], file=sys.stderr)
        self.began = clocks()
        return {}


def clocks() -> dict[str, float]:
    return {"cpu_s": time.process_time(), "wall_s": time.monotonic()}


def since(began: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value - began[name], 2) for name, value in clocks().items()}


def train(lines: Sequence[Mapping[str, Any]], upstream: Path, folder: Path) -> dict[str, Any]:
    data = folder / "lines.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--mode=pretrain", f"--data_path={data}", "--dtype=float32", f"--global_batch_size={BATCH}",
             "--val_size=0", "--num_train_epochs=1", f"--output_dir={folder / 'out'}"]  # fmt: skip
    options = parse(words, read_table(OPTIONS))
    genes = read_genes(options, ORGANISMS)
    assert len(genes) == len(lines), genes.skipped
    model = make_model(Config(), seed=1, attention=options["attention"])
    steps = -(-len(lines) // BATCH)
    widths: list[int] = []
    task = Turns(genes, options, upstream_steps(lines, model.state_dict(), steps, upstream, widths))
    plan = Buckets(genes.lengths[task.train], batch_size=BATCH, seed=1, window=options["length_bucket_batches"])
    here = Runtime(0, 0, 1, None, open_accelerator("cpu", 0))
    engine = wrap(model, here, make_optimizer=lambda module: optimizer_of(module, options, steps), precision=FLOAT)
    settings = Settings.of(options, steps=steps, eval_steps=1, save_steps=0, logging_steps=1)
    loop = Loop(here, engine, plan, task, settings, folder=folder / "checkpoints")
    task.began = clocks()
    loop.run()
    tokens = int(genes.lengths.sum())
    own = sum(
        int(genes.lengths[task.train[[place for (place,) in batch]]].max()) * len(batch) for batch in plan.batches(0)
    )
    found = {
        name: {
            "tokens_per_cpu_s": round(tokens / sum(each["cpu_s"] for each in turns), 1),
            "cpu_s_per_step": round(fmean(each["cpu_s"] for each in turns), 2),
            "wall_s_per_step": round(fmean(each["wall_s"] for each in turns), 2),
            "padding": round(1 - tokens / padded, 3),
        }
        for name, turns, padded in (("ours", task.ours, own), ("upstream", task.theirs, sum(widths)))
    }
    ratio = found["ours"]["tokens_per_cpu_s"] / found["upstream"]["tokens_per_cpu_s"]
    return {
        **found, "ratio": round(ratio, 2), "goal": GOAL, "is_met": ratio >= GOAL, "guide_s_per_step": GUIDE_STEP_S,
        "weights": sum(weight.numel() for weight in model.parameters()), "sequences": len(lines), "steps": steps,
        "batch": BATCH, "mean_tokens": round(tokens / len(lines), 1), "longest": int(genes.lengths.max()),
        "attention": options["attention"], "steps_s": {"ours": task.ours, "upstream": task.theirs},
    }  # fmt: skip


def upstream_steps(
    lines: Sequence[Mapping[str, Any]],
    weights: Mapping[str, torch.Tensor],
    steps: int,
    upstream: Path,
    widths: list[int],
) -> Iterator[dict[str, float]]:
    """Run a step of upstream at a time. `widths`: receives the padded tokens of each batch."""
    from CodonTransformer.CodonPrediction import load_bigbird_config, load_tokenizer  # type: ignore[import-not-found]
    from finetune import MaskedTokenizerCollator  # type: ignore[import-not-found]
    from transformers import BigBirdForMaskedLM

    torch.manual_seed(1)
    collate = MaskedTokenizerCollator(load_tokenizer(str(upstream / "src" / "CodonTransformerTokenizer.json")))
    model = BigBirdForMaskedLM(load_bigbird_config(len(ORGANISMS))).train()
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys, missing
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-5, total_steps=steps, pct_start=0.1)
    for start in range(0, len(lines), BATCH):
        began = clocks()
        batch = collate(lines[start : start + BATCH])
        model.bert.set_attention_type("block_sparse")
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        loss.item()
        widths.append(batch["input_ids"].numel())
        yield since(began)


# --- prediction ---


def predict(lines: Sequence[Mapping[str, Any]], upstream: Path) -> dict[str, Any]:
    from CodonTransformer.CodonPrediction import load_tokenizer, predict_dna_sequence
    from transformers import BigBirdConfig, BigBirdForMaskedLM

    tokenizer = load_tokenizer(str(upstream / "src" / "CodonTransformerTokenizer.json"))
    asked = [("".join(word[0] for word in line["codons"].split()), int(line["organism"])) for line in lines]
    found: dict[str, Any] = {}
    for kind, config in (("full", Config()), ("small", SMALL)):
        model = make_model(config, seed=1).eval()
        theirs = BigBirdForMaskedLM(BigBirdConfig(**config.as_json()))
        theirs.load_state_dict(model.state_dict(), strict=False)

        def upstreams(proteins: Proteins, theirs: Any = theirs) -> list[str]:
            how = {"device": torch.device("cpu"), "tokenizer": tokenizer, "model": theirs, "match_protein": True}
            return [predict_dna_sequence(protein, number, **how).predicted_dna for protein, number in proteins]

        def alone(proteins: Proteins, model: Any = model) -> list[str]:
            made: list[Any] = [
                own_prediction(protein, number, model=model, match_protein=True) for protein, number in proteins
            ]
            return [each.predicted_dna for each in made]

        def together(proteins: Proteins, model: Any = model) -> list[str]:
            made = dict(log_probs_of(model, proteins, open_accelerator("cpu", 0), FLOAT, ROWS))
            return [decode(protein, made[place]).dna for place, (protein, _) in enumerate(proteins)]

        ways = {"upstream_one_by_one": upstreams, "one_by_one": alone, "batches": together}
        for name, (least, most) in LENGTHS.items():
            proteins = [each for each in asked if least <= len(each[0]) <= most][: MOST_PROTEINS[kind]]
            for each in ways.values():
                each(proteins[:1])
            found[f"{kind}, {name}"] = compare(ways, proteins)
            print(f"{kind}, {name}", found[f"{kind}, {name}"], file=sys.stderr)
    return {"residues_per_cpu_s": found, "goal": BATCH_GOAL, "rows": ROWS}


def compare(ways: Mapping[str, Callable[[Proteins], list[str]]], proteins: Proteins) -> dict[str, Any]:
    residues = sum(len(protein) for protein, _ in proteins)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    made: dict[str, list[str]] = {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began_s = time.process_time()
            made[name] = way(proteins)
            speeds[name].append(residues / (time.process_time() - began_s))
    assert made["batches"] == made["one_by_one"]
    middle = {name: round(median(each), 1) for name, each in speeds.items()}
    ratio = middle["batches"] / middle["one_by_one"]
    equal = sum(one == other for one, other in zip(made["one_by_one"], made["upstream_one_by_one"]))
    facts = {"proteins": len(proteins), "mean_residues": round(residues / len(proteins), 1), "equal_dna": equal}
    return {**middle, "ratio": round(ratio, 2), "is_met": ratio >= BATCH_GOAL, **facts}


if __name__ == "__main__":
    main()
