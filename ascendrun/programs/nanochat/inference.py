"""Use of a trained model: a service of OpenAI's chat API on all ranks, a chat on the terminal, and their speed."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from ascendrun.programs import errors
from ascendrun.programs.devices import accelerator
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.generation import chat as chats
from ascendrun.programs.generation import terminal
from ascendrun.programs.generation.cache import Cache, of_model
from ascendrun.programs.generation.chat import Talker
from ascendrun.programs.generation.engine import Completion, Generator, Sampling
from ascendrun.programs.nanochat import conversations
from ascendrun.programs.nanochat import texts as words
from ascendrun.programs.nanochat.conversations import Tools, decoded, stops_of
from ascendrun.programs.nanochat.data_rules import foreign_tokenizer
from ascendrun.programs.nanochat.model import NanoChat, empty_model
from ascendrun.programs.nanochat.rules import too_long
from ascendrun.programs.nanochat.sizes import Sizes, settled
from ascendrun.programs.trainer.checkpoint import replace_json
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.programs.trainer.strategies.parallel import wrap
from ascendrun.text import listed

Options = Mapping[str, Any]


def serve(options: Options, here: Runtime) -> None:
    """Serve /v1/chat/completions on rank 0's node until the stop signal; all ranks generate."""
    talker = open_talker(options, here, rows=options["max_num_seqs"])
    chats.serve(talker, here, host=options["host"], port=options["port"])


def chat(options: Options, here: Runtime) -> None:
    """Chat on this terminal, on one device, or reply once to `prompt`."""
    terminal.refuse_ranks(here)
    talker = open_talker(options, here, rows=1)
    terminal.talk(talker, here, limit=options["max_new_tokens"], prompt=options["prompt"])
    here.record(done=True)


def open_talker(options: Options, here: Runtime, *, rows: int) -> Talker:
    options = settled(options)
    model, tokenizer = open_model(options)
    context = model.sizes.context
    generator = Generator.of(open_engine(model, options, here), of_model(model), context=context, rows=rows)
    generator.reserve()
    return Talker(
        str(options["model_dir"]).rstrip("/"),
        generator,
        lambda said: conversations.render_for_completion(tokenizer, said),
        lambda tokens: decoded(tokenizer, tokens),
        stops_of(tokenizer),
        Sampling(options["temperature"], options["top_k"], options["top_p"]),
        Tools(tokenizer),
    )


def open_model(options: Options) -> tuple[NanoChat, Tokenizer]:
    """Return the trained model and its tokenizer, on the CPU. Raises InvalidDataError."""
    _, model = read_model(options["model_dir"], recomputes=False)
    return model, read_tokenizer(options["model_dir"], model)


def read_model(path: str, *, recomputes: bool) -> tuple[dict[str, Any], NanoChat]:
    """Return the configuration and the model of a directory. Raises InvalidDataError."""
    try:
        config = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
        model = empty_model(Sizes.of_config(config), recomputes=recomputes)
        weights = load_file(str(Path(path, "model.safetensors")))
        model.load_state_dict({present_name(name): each for name, each in weights.items()}, assign=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise InvalidDataError(listed("program.no-model", path=path, reason=repr(error))) from error
    return config, model.requires_grad_()


OLD_NAMES = {
    "residual_scales": "resid_lambdas",
    "embedding_scales": "x0_lambdas",
    "smear_scale": "smear_lambda",
    "backout_scale": "backout_lambda",
    "value_gate": "ve_gate",
}
"""Of weights in models of release 0.2.0."""


def present_name(name: str) -> str:
    return ".".join(OLD_NAMES.get(word, word) for word in name.removeprefix("model.").split("."))


def read_tokenizer(path: str, model: NanoChat) -> Tokenizer:
    """Return the tokenizer of a model's directory. Raises InvalidDataError."""
    tokenizer = words.load(Path(path))
    tokens, vocabulary = tokenizer.get_vocab_size(), model.sizes.vocabulary
    if tokens != vocabulary:
        raise InvalidDataError(foreign_tokenizer({"option": "model_dir", "path": path}, tokens, vocabulary))
    return tokenizer


def open_engine(model: NanoChat, options: Options, here: Runtime) -> Engine:
    """Move a model to this rank's device, without an optimizer; each rank has all of it."""
    precision = accelerator.precision_to_use(options, here.accelerator)
    here.log(precision.reason)
    engine = wrap(model.requires_grad_(False), here, strategy="none", precision=precision)
    engine.module.eval()
    return engine


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
                here.log(listed("program.bench-memory", rows=size))
                break
            row["cache_bytes"] = model.cache_bytes(size, prompt + decoded, element_bytes=element)
            report["sweep"].append(row)
            here.log(
                listed(
                    "program.bench-row",
                    rows=size,
                    prefill=row["prefill_tokens_per_s"],
                    decode=row["decode_tokens_per_s"],
                    ms=1e3 * row["decode_s_per_token"],
                )
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
        raise InvalidDataError(listed("program.batch-sizes", texts=wrong or [""]))
    return sorted({int(text) for text in texts})


def lengths(options: Options, context: int) -> tuple[int, int]:
    """Return the tokens of a prompt and of a reply, which fit into the context. Raises InvalidDataError."""
    prompt = options["prompt_tokens"] or context // 2
    if prompt > context - 2:
        raise InvalidDataError(too_long("prompt_tokens", prompt, context, most=context - 2).text)
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
