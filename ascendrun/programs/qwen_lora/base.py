"""The base model: created from a shape, or read from its files; a rank reads only the weights that it holds."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn

from ascendrun.planner.model_rules import tokenizer_rows
from ascendrun.programs import errors
from ascendrun.programs.devices import attention
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.qwen_lora.rules import presets
from ascendrun.programs.trainer.checkpoint import replace_weights
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies import fsdp2
from ascendrun.programs.trainer.strategies.engine import cast
from ascendrun.programs.trainer.strategies.fsdp2 import materialise
from ascendrun.text import listed

WRAPPER, WRAPPED = "base_model.model.", ".base_layer."
"""Prefix and infix that peft adds to the names of a model's weights."""
HEAD, WORDS = "lm_head.weight", "model.embed_tokens.weight"


def shape_config(name: str, **changes: Any) -> Any:
    """Return the configuration of a Qwen2 of a known shape."""
    from transformers import Qwen2Config

    # No sliding window: transformers 4.51 warns on every rank about its unused default.
    return Qwen2Config(use_cache=False, **{"sliding_window": None, **presets()[name], **changes})


def folder_config(folder: Path) -> Any:
    """Read a configuration. Raises InvalidDataError."""
    if not (folder / "config.json").is_file():
        raise InvalidDataError(listed("program.no-config", directory=folder))
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # various types: invalid JSON, not an object, an unknown field or model
        raise InvalidDataError(
            listed("program.config-rejected", directory=folder, error=errors.in_a_line(error))
        ) from error
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", False) else None
    config.sliding_window = window  # transformers 4.51 warns on every rank about an unused window
    return config


def check_tokenizer(folder: Path, config: Any, tokenizer: Any) -> None:
    """Raise InvalidDataError for a tokenizer with tokens that the model has no rows for."""
    ids = max(tokenizer.get_vocab().values(), default=-1) + 1
    problem = tokenizer_rows(str(folder), ids, {"vocab_size": config.vocab_size})
    if problem is not None:
        raise InvalidDataError.of([problem.text])


def make_base(folder: Path, config: Any, tokenizer: Any, *, seed: int, here: Runtime) -> None:
    """Write a model with random weights to `folder`, in the layout of a downloaded model. The first rank of every node
    writes it, then each rank that does not see it. An existing model is kept: it has the same seed. All ranks call it
    together."""
    for writes in (here.local_rank == 0, True):
        if writes and not (folder / "config.json").is_file():
            write_base(folder, config, tokenizer, seed=seed, mark=here.rank)
        here.barrier()


def write_base(folder: Path, config: Any, tokenizer: Any, *, seed: int, mark: int) -> None:
    fresh = folder.with_name(f".{folder.name}-{mark}-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    torch.manual_seed(seed)
    write_model(fresh, build(config))
    tokenizer.save_pretrained(str(fresh))
    try:
        fresh.rename(folder)
    except OSError:  # another rank on the same disk was faster
        shutil.rmtree(fresh)


def write_model(folder: Path, model: Any) -> None:
    """Write like transformers' save_pretrained, which since 5 writes on rank 0 only: other nodes had no files."""
    model.config.architectures = [type(model).__name__]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(model.config.to_json_string(), encoding="utf-8")
    tensors = {
        name: value.contiguous()
        for name, value in model.state_dict().items()
        if not (model.config.tie_word_embeddings and name == HEAD)
    }
    replace_weights(folder / "model.safetensors", tensors)


def build(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    return attention.mask_free(make(config, attn_implementation=attention.register()))


def empty_model(config: Any) -> Any:
    """Return the model with its weights on the meta device, which uses no memory, and with real buffers."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        model = build(config)
    model.tie_weights()
    model.config.use_cache = False
    return model


def checkpoint_activations(model: Any, *, strategy: str) -> None:
    """Recompute activations in the backward pass. ZeRO-3 requires the reentrant kind, which ignores shapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5 warns about version 6, on every rank
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": strategy == "zero3"})
    if strategy == "zero3":
        model.enable_input_require_grads()


def name_in_file(model: nn.Module) -> Callable[[str], str | None]:
    """Return the renaming for fsdp2.read_into: peft names to file names; a tied head to the embedding."""
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))

    def find(name: str) -> str | None:
        if "lora_" in name:
            return None
        plain = name[len(WRAPPER) :] if name.startswith(WRAPPER) else name
        plain = plain.replace(WRAPPED, ".")
        return WORDS if is_tied and plain == HEAD else plain

    return find


def load_whole(model: Any, folder: Path, here: Runtime, precision: Precision) -> None:
    """Read to this rank's device directly: host memory holds one weight at a time, not a model for every rank."""
    cast(model, precision)
    materialise(model, here.device)
    model.tie_weights()
    fsdp2.read_into(model, folder, name_in_file=name_in_file(model))


def load_parts(module: nn.Module, folder: Path) -> None:
    """Read the rows of every weight that this rank holds under FSDP2."""
    fsdp2.read_into(module, folder, name_in_file=name_in_file(module))


def load_for_zero3(model: Any, folder: Path, here: Runtime, precision: Precision, config: dict[str, Any]) -> None:
    """Load one weight after the other: rank 0 reads it, DeepSpeed broadcasts it and each rank keeps its partition.

    DeepSpeed's standard method, zero.Init around the model's construction, runs the initialisation on empty partitions.
    Loading through transformers holds complete files on every rank. All weights use one shared buffer: a separate
    buffer for each fragmented the heap, by up to the size of the base.
    """
    import deepspeed

    cast(model, Precision(precision.compute, precision.compute, False, ""))
    rename = name_in_file(model)
    seen: dict[int, nn.Parameter] = {}
    largest = max(weight.numel() for weight in model.parameters() if weight.is_meta)
    buffer = torch.empty(largest, device=here.device, dtype=precision.compute)
    with weights_of(folder) as read:
        for path, module in model.named_modules():
            for leaf, weight in list(module._parameters.items()):
                wanted = rename(f"{path}.{leaf}" if path else leaf)
                if weight is None or not weight.is_meta or wanted is None:
                    continue
                if id(weight) in seen:
                    module._parameters[leaf] = seen[id(weight)]
                    continue
                value = buffer[: weight.numel()].view(weight.shape)
                if here.is_first:
                    value.copy_(read(wanted))
                holder = nn.Module()
                holder.weight = nn.Parameter(value, requires_grad=weight.requires_grad)
                deepspeed.zero.Init(module=holder, config_dict_or_path=config, dtype=precision.compute)
                module._parameters[leaf] = seen[id(weight)] = holder.weight


@contextlib.contextmanager
def weights_of(folder: Path) -> Iterator[Callable[[str], torch.Tensor]]:
    """Yield a reader of complete weights by name, which raises fsdp2.InvalidWeightsError.

    Only one file is open at a time: the parts read of an open file count as memory of this process.
    """
    from safetensors import safe_open

    files, current = fsdp2.file_of_tensor(folder), ""
    values: Any = None
    with contextlib.ExitStack() as opened:

        def read(name: str) -> torch.Tensor:
            nonlocal current, values
            if name not in files:
                raise fsdp2.missing(folder, name)
            if files[name] != current:
                values = None
                opened.close()
                current = files[name]
                values = opened.enter_context(safe_open(str(folder / current), framework="pt"))
            return values.get_tensor(name)  # type: ignore[no-any-return]

        yield read
        values = None
