"""Use of a trained model: a service of OpenAI's chat API on all ranks, and a chat on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from ascendrun.programs.devices import accelerator
from ascendrun.programs.generation import chat as chats
from ascendrun.programs.generation import terminal
from ascendrun.programs.generation.cache import Cache, of_model
from ascendrun.programs.generation.chat import Talker
from ascendrun.programs.generation.engine import Completion, Generator, generate
from ascendrun.programs.generation.sampling import Sampling
from ascendrun.programs.nanochat import conversations, sft
from ascendrun.programs.nanochat.calculator import Tools
from ascendrun.programs.nanochat.model import NanoChat
from ascendrun.programs.nanochat.replies import decoded, stops_of
from ascendrun.programs.nanochat.sizes import settled
from ascendrun.programs.trainer.optim import OptimizerPlan
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.programs.trainer.strategies.parallel import wrap

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
    generator.cache = Cache(rows, context)  # all of it now: too little memory shows before the first request
    generate(generator, [Completion([0], 2)])
    return Talker(
        str(options["model_dir"]).rstrip("/"),
        generator,
        lambda said: conversations.prompt(tokenizer, said),
        lambda tokens: decoded(tokenizer, tokens),
        stops_of(tokenizer),
        Sampling(options["temperature"], options["top_k"], options["top_p"]),
        Tools(tokenizer),
    )


def open_model(options: Options) -> tuple[NanoChat, Tokenizer]:
    """Return the trained model and its tokenizer, on the CPU. Raises InvalidDataError."""
    _, model = sft.open_model(options["model_dir"], recomputes=False)
    return model, sft.open_tokenizer(options["model_dir"], model)


def open_engine(model: NanoChat, options: Options, here: Runtime) -> Engine:
    """Move a model to this rank's device, without an optimizer; each rank has all of it."""
    chosen = accelerator.choose_precision(options["dtype"], here.accelerator)
    precision = replace(chosen, weights=chosen.compute, scales=False)
    here.log(precision.reason)
    plan: Any = lambda module: OptimizerPlan(())  # noqa: E731
    engine = wrap(model.requires_grad_(False), here, strategy="none", make_optimizer=plan, precision=precision)
    engine.module.eval()
    return engine
