"""Use of a base model with an adapter: a service of OpenAI's chat API on all ranks, and a chat on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascendrun.programs.devices import accelerator, kernels
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.generation import chat as chats
from ascendrun.programs.generation import terminal
from ascendrun.programs.generation.cache import of_transformers
from ascendrun.programs.generation.chat import Talker
from ascendrun.programs.generation.engine import Generator, Sampling
from ascendrun.programs.qwen_lora import base, chat_template, lora
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.programs.trainer.strategies.parallel import wrap
from ascendrun.text import listed

Options = Mapping[str, Any]
MODEL_SHARE = 0.7
"""The part of a device's memory that weights may have, for a model that is not sharded; the rest is for the cache."""


def serve(options: Options, here: Runtime) -> None:
    """Serve /v1/chat/completions on rank 0's node until the stop signal; all ranks generate."""
    talker = open_talker(options, here, rows=options["max_num_seqs"])
    chats.serve(talker, here, host=options["host"], port=options["port"])


def chat(options: Options, here: Runtime) -> None:
    """Chat on this terminal, on one device."""
    terminal.refuse_ranks(here)
    talker = open_talker(options, here, rows=1)
    terminal.talk(talker, here, limit=options["max_model_len"], system=options["default_system"])
    here.record(done=True)


def open_talker(options: Options, here: Runtime, *, rows: int) -> Talker:
    """Load the base, with the adapter if there is one, on this rank's device."""
    adapter = Path(options["adapter_path"]) if options["adapter_path"] else None
    settings = adapter_settings(adapter) if adapter else {}
    home = options["base_model"] or settings.get("base_model_name_or_path")
    if not home:
        raise InvalidDataError(listed("program.no-base"))
    config = base.folder_config(Path(home))
    tokenizer = chat_template.load_tokenizer(Path(home), template=options["template"])
    base.check_tokenizer(Path(home), config, tokenizer)
    engine = open_engine(config, options, Path(home), adapter, settings, here)
    context = min(options["max_model_len"], config.max_position_embeddings)
    generator = Generator.of(engine, of_transformers(engine.model), context=context, rows=rows)
    generator.reserve()
    sampling = Sampling(options["temperature"], options["top_k"], options["top_p"])

    def decode(tokens: Any) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    name = str(adapter or Path(home)).rstrip("/")
    stop = chat_template.ends_of(tokenizer)
    return Talker(name, generator, lambda said: chat_template.prompt_of(tokenizer, said), decode, stop, sampling)


def adapter_settings(adapter: Path) -> dict[str, Any]:
    for name in ("adapter_config.json", lora.ADAPTER_FILE):
        if not (adapter / name).is_file():
            raise InvalidDataError(listed("program.no-adapter", directory=adapter, name=name))
    return lora.read_settings(adapter)


def open_engine(
    config: Any, options: Options, home: Path, adapter: Path | None, settings: Mapping[str, Any], here: Runtime
) -> Engine:
    """Return a model without an optimizer: whole on each rank, or sharded over all of them."""
    precision = accelerator.precision_to_use(options, here.accelerator)
    here.log(precision.reason)
    model = base.empty_model(config)
    strategy = strategy_of(options, model, precision, here)
    if adapter is not None:
        given = {**settings, "lora_r": settings["r"], "lora_dropout": 0.0}
        model = lora.add_lora(model, given)
        lora.put_values(model, adapter_values(model, adapter))
    sound, _ = kernels.sound_kernels(here.accelerator, precision.compute)
    kernels.fuse(model, kernels.operators_of(sound), device=here.family)
    model.requires_grad_(False)
    if strategy == "none":
        base.load_whole(model, home, here, precision)
    engine = wrap(model, here, strategy=strategy, precision=precision, shard_size=options["shard_size"])
    if strategy != "none":
        base.load_parts(engine.module, home)
    engine.module.eval()
    here.log(
        listed(
            "program.serving-layout",
            millions=sum(weight.numel() for weight in model.parameters()) / 1e6,
            strategy=strategy,
        )
    )
    return engine


def strategy_of(options: Options, model: Any, precision: Precision, here: Runtime) -> str:
    """Return none (each rank has the model), fsdp2 or hsdp: as requested, or by the memory of a device."""
    requested = options["strategy"]
    if requested == "zero3":
        raise InvalidDataError(listed("program.serve-zero3"))
    if here.world_size == 1 or requested in ("none", "ddp"):
        return "none"
    if requested != "auto":
        return str(requested)
    size = sum(weight.numel() for weight in model.parameters()) * precision.compute.itemsize
    total = here.accelerator.memory_total_bytes()
    return "none" if total is None or size <= MODEL_SHARE * total else "fsdp2"


def adapter_values(model: Any, adapter: Path) -> dict[str, Any]:
    """Read an adapter's weights by the model's names. Raises InvalidDataError if it belongs to another base."""
    from safetensors.torch import load_file

    values = load_file(str(adapter / lora.ADAPTER_FILE))
    wanted = {lora.saved_name(name): (name, shape) for name, shape in lora.trained_shapes(model).items()}
    differ = sorted(set(values) ^ set(wanted)) or [
        name for name, (_, shape) in wanted.items() if tuple(values[name].shape) != shape
    ]
    if differ:
        raise InvalidDataError(listed("program.other-adapter", adapter=adapter, name=differ[0]))
    return {name: values[saved] for saved, (name, _) in wanted.items()}
