"""The mode infer_bench: how fast a model reads prompts and writes replies, by the number of replies at once."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ascendrun.programs import errors
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.generation.cache import Cache, of_model
from ascendrun.programs.generation.engine import Completion, Generator
from ascendrun.programs.nanochat.inference import open_engine, open_model
from ascendrun.programs.nanochat.sizes import settled
from ascendrun.programs.trainer.checkpoint import replace_json
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Engine

Options = Mapping[str, Any]
ROUNDS = 3
"""Measurements of each batch size, of which the median counts; one more before them warms up."""


def infer_bench(options: Options, here: Runtime) -> None:
    """Measure each of `batch_sizes`, write infer_bench.json and print it as the last line. Ranks run side by side;
    tokens/s are those of all."""
    options = settled(options)
    output = Path(options["output_dir"]).absolute()
    errors.check_writable(output)
    sizes = batch_sizes(options)
    model, tokenizer = open_model(options)
    prompt, decoded = lengths(options, model.sizes.context)
    engine = open_engine(model, options, here)
    element = next(engine.module.parameters()).element_size()
    report: dict[str, Any] = {
        "model": str(options["model_dir"]),
        "device": here.accelerator.name,
        "ranks": here.world_size,
        "weights": model.sizes.weights,
        "weight_bytes": model.sizes.weights * element,
        "prompt_tokens": prompt,
        "decode_tokens": decoded,
        "sweep": [],
    }
    with here.phase("infer_bench"):
        for size in sizes:
            row = measure(
                engine, here, size, prompt, decoded, context=model.sizes.context, vocabulary=tokenizer.get_vocab_size()
            )
            if row is None:
                here.log("program.bench-memory", "{rows} rows: out of memory", rows=size)
                break
            row["cache_bytes"] = model.cache_bytes(size, prompt + decoded, element_bytes=element)
            report["sweep"].append(row)
            here.log(
                "program.bench-row",
                "{rows} rows: prefill {prefill:,.0f} tokens/s, decode {decode:,.0f} tokens/s, {ms:.2f} ms a token",
                rows=size,
                prefill=row["prefill_tokens_per_s"],
                decode=row["decode_tokens_per_s"],
                ms=1e3 * row["decode_s_per_token"],
            )
    if here.is_first:
        replace_json(output / "infer_bench.json", report)
        print(json.dumps(report), flush=True)
    here.record(done=True)


def batch_sizes(options: Options) -> list[int]:
    """Return the sizes in ascending order. Raises InvalidDataError."""
    texts = [str(size) for size in options["batch_sizes"]]
    wrong = [text for text in texts if not text.isdigit() or int(text) < 1]
    if wrong or not texts:
        raise InvalidDataError(
            "program.batch-sizes", "--batch_sizes: expected numbers such as 1,8,32, got {texts}", texts=wrong or [""]
        )
    return sorted({int(text) for text in texts})


def lengths(options: Options, context: int) -> tuple[int, int]:
    """Return the tokens of a prompt and of a reply, which fit into the context. Raises InvalidDataError."""
    prompt = options["prompt_tokens"] or context // 2
    if prompt > context - 2:
        raise InvalidDataError(
            "program.long-prompt",
            "--prompt_tokens={prompt}: the model has a context of {context} tokens\nhint: set --prompt_tokens to "
            "{most} or less",
            prompt=prompt,
            context=context,
            most=context - 2,
        )
    room = context - prompt - 1
    return prompt, min(options["max_new_tokens"] or room, room)


def measure(
    engine: Engine, here: Runtime, rows: int, prompt: int, decoded: int, *, context: int, vocabulary: int
) -> dict[str, Any] | None:
    """Return medians of ROUNDS generations of `rows` replies; None: a rank's memory is too small for them."""
    times: list[tuple[float, float]] = []
    is_over = False
    try:
        for number in range(ROUNDS + 1):
            chance = torch.Generator().manual_seed(number)
            prompts = torch.randint(0, vocabulary, (rows, prompt), generator=chance).tolist()
            times.append(timed(engine, here, prompts, decoded, context=context))
    except Exception as error:  # torch_npu has its own kinds of this error
        if not here.accelerator.is_out_of_memory(error):
            raise
        is_over = True
    if any(here.gather(is_over)):
        here.accelerator.empty_cache()
        return None
    prefill_s, decode_s = (statistics.median(each) for each in zip(*times[1:]))
    all_prefill, all_decode = here.sum([rows * prompt / prefill_s, rows * decoded / decode_s])
    return {
        "batch_size": rows,
        "prefill_s": prefill_s,
        "prefill_tokens_per_s": all_prefill,
        "decode_s_per_token": decode_s / decoded,
        "decode_tokens_per_s": all_decode,
        "peak_bytes": here.accelerator.memory_bytes(),
    }


@torch.no_grad()
def timed(
    engine: Engine, here: Runtime, prompts: list[list[int]], decoded: int, *, context: int
) -> tuple[float, float]:
    """Return the seconds in which all prompts are read, with the first token of each reply, and those of the rest."""
    generator = Generator.of(engine, of_model(engine.module), context=context, rows=len(prompts))
    generator.cache = Cache(len(prompts), context)
    for each in prompts:
        generator.add(Completion(each, decoded + 1))
    began_s = time.perf_counter()
    while generator.waiting:
        generator.prefill(generator.admit())
    here.accelerator.synchronize()
    middle_s = time.perf_counter()
    for _ in range(decoded):
        generator.decode()
    here.accelerator.synchronize()
    return middle_s - began_s, time.perf_counter() - middle_s
