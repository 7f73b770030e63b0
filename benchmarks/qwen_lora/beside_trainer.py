"""`python3 benchmarks/qwen_lora/beside_trainer.py [--out FILE]`: ours and transformers' Trainer, in one run.

The same model from its configuration, the same LoRA, the same made-up rows of mixed lengths up to 2048 tokens, in
bfloat16 on one card. Trainer runs twice: padded to the longest row of a batch, as most people do, and grouped by
length. Prints JSON: real tokens (no padding) a second, MFU, peak memory.
`--losses 50`: instead the losses of so many steps on the same samples in the same order, from the same files of a base
and an adapter, and how far they are apart. `--data`: on these instruct rows, those of at most `--length` tokens.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from ascendrun.planner.models import flops_per_token
from ascendrun.programs.devices import kernels
from ascendrun.programs.devices.accelerator import choose_precision, open_accelerator
from ascendrun.programs.qwen_lora import base, chat_template, lora
from ascendrun.programs.qwen_lora.curriculum import Course, Table
from ascendrun.programs.qwen_lora.dataset import read_conversations
from ascendrun.programs.qwen_lora.rules import read_stages
from ascendrun.programs.qwen_lora.sft_task import Instructions, Rows
from ascendrun.programs.trainer import metrics
from ascendrun.programs.trainer.data import IGNORED
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.optim import adamw
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.shards import Encoded
from ascendrun.programs.trainer.strategies.engine import cast
from ascendrun.programs.trainer.strategies.fsdp2 import materialise
from ascendrun.programs.trainer.strategies.parallel import wrap
from ascendrun.programs.trainer.task import Settings

SETTINGS: dict[str, Any] = {
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "use_dora": False,
    "use_rslora": False,
    "packing": True,
    "strategy": "ddp",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gradient_checkpointing": False,
    "cpu_offload": False,
    "shard_size": 0,
    "global_batch_size": 96,
}
LR, SEED = 2e-4, 3


class Timed:
    """Tokens and seconds of the steps after the first few, which warm everything up. Without a GPU, seconds of all
    threads of the process: other processes of the machine hardly change them."""

    clock = staticmethod(time.perf_counter if torch.cuda.is_available() else time.process_time)

    def __init__(self, skipped: int) -> None:
        self.skipped, self.steps, self.began_s, self.tokens = skipped, 0, 0.0, 0

    def step(self, tokens: int) -> None:
        self.steps += 1
        if self.steps > self.skipped:
            self.tokens += tokens
        elif self.steps == self.skipped:
            wait()
            self.began_s = self.clock()

    def per_second(self) -> float:
        wait()
        return self.tokens / (self.clock() - self.began_s)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_samples(count: int, longest: int, words: int) -> list[Encoded]:
    """Lengths lognormal with a mean near a fifth of the longest; the last 40 % of each sample is learned. `words`: the
    number of different tokens."""
    chance = np.random.default_rng(SEED)
    found = []
    for _ in range(count):
        length = int(np.clip(chance.lognormal(math.log(longest * 0.16), 0.7), 24, longest))
        ids = tuple(int(each) for each in chance.integers(0, words, length))
        asked = int(length * 0.6)
        found.append(Encoded(ids, (IGNORED,) * asked + ids[asked:], 0))
    return found


def alone(family: str) -> Runtime:
    return Runtime(0, 0, 1, None, open_accelerator(family, 0))


def reset(family: str) -> None:
    gc.collect()
    if family == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb(family: str) -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 3) if family == "cuda" else None


def filled(config: Any, here: Runtime, precision: Any) -> Any:
    """peft's model with values of some kind, the base in the precision of the arithmetic, on the device."""
    return filled_with(lora.add_lora(base.empty_model(config), SETTINGS), here, precision)


def filled_with(model: Any, here: Runtime, precision: Any) -> Any:
    cast(model, precision)
    materialise(model, here.device)
    model.base_model.model.tie_weights()
    torch.manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0) if "norm" in name else weight.normal_(0, 0.02)
            if "lora_B" in name:
                weight.zero_()
    return model


def course_of(samples: Sequence[Encoded], batch_size: int, *, row_tokens: int, steps: int) -> Course:
    """`row_tokens` 0: one sample a row."""
    return Course(
        Table(("all",), tuple(read_stages(["1=1"], 1))),
        [list(range(len(samples)))],
        [len(each.ids) for each in samples],
        steps=steps,
        batch_size=batch_size,
        seed=SEED,
        row_tokens=row_tokens,
    )


def make_loop(
    model: Any, rows: Rows, course: Course, here: Runtime, precision: Any, folder: Path, **settings: Any
) -> Loop:
    engine = wrap(model, here, strategy="ddp", make_optimizer=optimizer, precision=precision)
    task = Instructions(rows, evaluate=lambda name, step: {})
    return Loop(here, engine, course, task, Settings(steps=course.steps, **settings), folder=folder)


def optimizer(module: Any) -> Any:
    return adamw(module, LR, weight_decay=0.0, betas=(0.9, 0.999))


def measured(loop: Loop, timed: Timed) -> float:
    """Train to the end; return tokens a second."""
    original = loop.totals.add

    def add(share: Any, *rest: Any) -> None:
        original(share, *rest)
        timed.step(share.tokens)

    loop.totals.add = add  # type: ignore[method-assign,assignment]
    loop.run()
    return timed.per_second()


def ours(config: Any, samples: Sequence[Encoded], asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    here = alone(asked.family)
    precision = choose_precision(asked.dtype, here.accelerator)
    kernels.sound_kernels(here.accelerator, precision.compute)
    rows = Rows(samples, ("all",), 0, 64)
    course = course_of(samples, asked.batch_size, row_tokens=asked.length, steps=asked.steps)
    reset(asked.family)
    model = filled(config, here, precision)
    loop = make_loop(model, rows, course, here, precision, folder, micro_batch_size=asked.rows, logging_steps=10**6)
    rate = measured(loop, Timed(asked.warmup))
    flops = flops_of(model, config, samples)
    return {"tokens_per_s": round(rate), "peak_gb": peak_gb(asked.family), **used(rate, flops, here)}


def flops_of(model: Any, config: Any, samples: Sequence[Encoded]) -> float:
    every = list(model.parameters())
    trained = [each for each in every if each.requires_grad]
    return flops_per_token(
        parameters=sum(each.numel() for each in every),
        trainable=sum(each.numel() for each in trained),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mean_length=sum(len(each.ids) ** 2 for each in samples) / sum(len(each.ids) for each in samples),
    )


def used(rate: float, flops: float, here: Runtime) -> dict[str, Any]:
    share = metrics.mfu(rate, flops, metrics.peak_flops(here.accelerator), 1)
    return {} if share is None else {"mfu": round(share, 4)}


class Listed(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, samples: Sequence[Encoded]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample = self.samples[number]
        return {"input_ids": sample.ids, "labels": sample.labels, "length": len(sample.ids)}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = -(-max(len(row["input_ids"]) for row in rows) // 8) * 8
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        size = len(row["input_ids"])
        ids[i, :size], labels[i, :size] = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        mask[i, :size] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def arguments_of(folder: Path, asked: argparse.Namespace, steps: int, rows: int, pieces: int, **more: object) -> Any:
    """Of the Trainer, for `rows` at once and `pieces` of them a step."""
    from transformers import TrainingArguments

    make: Any = TrainingArguments
    return make(
        output_dir=str(folder / "theirs"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=pieces,
        max_steps=steps,
        learning_rate=LR,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        use_cpu=asked.family == "cpu",
        optim="adamw_torch",
        disable_tqdm=True,
        **more,
    )


def theirs(
    config: Any, samples: Sequence[Encoded], asked: argparse.Namespace, folder: Path, *, grouped: bool
) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    here = alone(asked.family)
    precision = choose_precision(asked.dtype, here.accelerator)
    reset(asked.family)
    model = filled(config, here, precision)
    model.config._attn_implementation = "sdpa"  # as with the Trainer's own model: padding is in a mask
    lengths = [len(each.ids) for each in samples]

    timed = Timed(asked.warmup)
    per_piece = max(1, asked.rows * asked.length // (4 * max(1, sum(lengths) // len(lengths))))
    pieces = max(1, asked.batch_size // per_piece)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *given: Any, **more: Any) -> None:
            timed.step(0)

    order: dict[str, Any] = {"train_sampling_strategy": "group_by_length"} if grouped else {}
    if "train_sampling_strategy" not in TrainingArguments.__dataclass_fields__ and grouped:
        order = {"group_by_length": True}
    order |= {"dataloader_num_workers": 2, "length_column_name": "length"}
    is_half = precision.compute == torch.bfloat16
    arguments = arguments_of(folder, asked, asked.steps, per_piece, pieces, logging_steps=10**6, bf16=is_half, **order)
    Trainer(
        model=model, args=arguments, train_dataset=Listed(samples), data_collator=collate, callbacks=[Clock()]
    ).train()
    wait()
    rows = (asked.steps - asked.warmup) * per_piece * pieces  # of the mean length: more than all rows are seen
    rate = rows * sum(lengths) / len(lengths) / (timed.clock() - timed.began_s)
    return {
        "tokens_per_s": round(rate),
        "peak_gb": peak_gb(asked.family),
        "rows_at_once": per_piece,
        "pieces": pieces,
        **used(rate, flops_of(model, config, samples), here),
    }


def losses(config: Any, samples: Sequence[Encoded], asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train both on the same samples in the same order, from the same files of a base and an adapter; return how far
    the losses of a step are apart."""
    torch.manual_seed(SEED)
    base.write_model(folder / "base", base.build(config))
    started = [time.perf_counter()]
    mine, order, found = ours_from(folder, samples, asked)
    started.append(time.perf_counter())
    reset(asked.family)
    other = theirs_from(folder, [samples[number] for number in order], asked)
    started.append(time.perf_counter())
    apart = [abs(a / b - 1) for a, b in zip(mine, other)]
    assert len(mine) == len(other) == asked.losses
    return {
        "steps": asked.losses,
        "samples_of_a_step": asked.batch_size,
        "tokens": sum(len(samples[number].ids) for number in order),
        **found,
        "seconds": [round(end - start) for start, end in zip(started, started[1:])],
        "first": [mine[0], other[0]],
        "last": [mine[-1], other[-1]],
        "largest_difference": max(apart),
        "last_difference": apart[-1],
        "ours": mine,
        "trainer": other,
    }


def ours_from(
    folder: Path, samples: Sequence[Encoded], asked: argparse.Namespace
) -> tuple[list[float], list[int], dict[str, Any]]:
    """Make a fresh adapter, save it as peft does, and train. Return the losses, the samples in order, and facts."""
    here = alone(asked.family)
    here.metrics = io.StringIO()
    precision = choose_precision(asked.dtype, here.accelerator)
    kernels.sound_kernels(here.accelerator, precision.compute)
    model = lora.add_lora(base.empty_model(base.folder_config(folder / "base")), SETTINGS)
    with base.weights_of(folder / "base") as read:
        values = lora.first_values(model, seed=SEED, read=read, here=here)
    base.load_whole(model, folder / "base", here, precision)
    lora.put_values(model, values)
    model.to(here.device).save_pretrained(str(folder / "adapter"))
    course = course_of(samples, asked.batch_size, row_tokens=asked.length, steps=asked.losses)
    settings = {"micro_batch_size": asked.rows, "logging_steps": 1}
    make_loop(model, Rows(samples, ("all",), 0, 64), course, here, precision, folder / "ours", **settings).run()
    lines = [json.loads(line) for line in here.metrics.getvalue().splitlines()]
    order = [number for step in range(asked.losses) for unit in course.units(step) for number in unit]
    assert len(order) == asked.losses * asked.batch_size
    every = [(each.numel(), each.requires_grad) for each in model.parameters()]
    facts = {"weights": sum(size for size, _ in every), "trained": sum(size for size, trained in every if trained)}
    return [line["loss"] for line in lines if "loss" in line], order, facts


def theirs_from(folder: Path, samples: Sequence[Encoded], asked: argparse.Namespace) -> list[float]:
    """Train base and adapter by transformers' Trainer, loaded by transformers and peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, Trainer

    whole = AutoModelForCausalLM.from_pretrained(str(folder / "base"), dtype=getattr(torch, asked.dtype))
    model: Any = PeftModel.from_pretrained(whole, str(folder / "adapter"), is_trainable=True)
    pieces = max(1, asked.batch_size // 12)

    class InOrder(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            size = self.args.per_device_train_batch_size
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=size, collate_fn=collate)

    shown = {"logging_steps": 1, "logging_nan_inf_filter": False, "lr_scheduler_type": "constant"}
    rows, is_half = asked.batch_size // pieces, asked.dtype == "bfloat16"
    arguments = arguments_of(folder, asked, asked.losses, rows, pieces, bf16=is_half, **shown)
    trainer = InOrder(model=model, args=arguments, train_dataset=Listed(samples))
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def read_samples(data: Path, longest: int) -> list[Encoded]:
    """Read the instruct rows of at most `longest` tokens, with a tokenizer made from their words."""
    conversations = read_conversations(data, system="")
    tokenizer = chat_template.wrap_tokenizer(chat_template.make_tokenizer(conversations))
    found = [chat_template.encode(tokenizer, each, cutoff=longest + 1) for each in conversations]
    return [each for each in found if len(each.ids) <= longest]


def make_parser(about: str | None, *, steps: int, warmup: int) -> argparse.ArgumentParser:
    """The options of what is trained; `about`: the script's docstring, `steps` and `warmup`: its defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=8, help="packed rows at once")
    parser.add_argument("--batch_size", type=int, default=96, help="samples a step")
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--warmup", type=int, default=warmup)
    parser.add_argument("--out", type=Path)
    return parser


def main() -> None:
    parser = make_parser(__doc__, steps=24, warmup=6)
    parser.add_argument("--losses", type=int, default=0, help="steps whose losses are compared")
    parser.add_argument("--data", type=Path, help="instruct rows of --losses; without: made-up ones")
    parser.add_argument("--different", type=int, default=200, help="different tokens of the samples of --losses")
    asked = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    config = base.shape_config(asked.shape)
    samples = make_samples(asked.samples, asked.length, config.vocab_size)
    found: dict[str, Any] = {
        "device": open_accelerator(asked.family, 0).name,
        "torch": torch.__version__,
        "shape": asked.shape,
        "dtype": asked.dtype,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "data": asked.data.name if asked.data else "made up",
        "length": asked.length,
        "mean_length": round(sum(len(each.ids) for each in samples) / len(samples), 1),
    }
    with tempfile.TemporaryDirectory() as folder:
        if asked.losses:
            few = make_samples(asked.samples, asked.length, asked.different)
            if asked.data:
                few = read_samples(asked.data, asked.length)[: asked.samples]
            found["mean_length"] = round(sum(len(each.ids) for each in few) / len(few), 1)
            found["different_tokens"] = len({int(token) for each in few for token in each.ids})
            found["losses"] = losses(config, few, asked, Path(folder))
        else:
            found["ours"] = ours(config, samples, asked, Path(folder))
            found["trainer_grouped"] = attempt(lambda: theirs(config, samples, asked, Path(folder), grouped=True))
            found["trainer"] = attempt(lambda: theirs(config, samples, asked, Path(folder), grouped=False))
    for name in ("trainer", "trainer_grouped"):
        if "tokens_per_s" in found.get(name, {}):
            found[f"ours_to_{name}"] = round(found["ours"]["tokens_per_s"] / found[name]["tokens_per_s"], 2)
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(text + "\n", encoding="utf-8")


def attempt(body: Any) -> dict[str, Any]:
    """What the peer cannot do is a result too."""
    try:
        return dict(body())
    except Exception as error:  # it stands in the result
        return {"failed": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
