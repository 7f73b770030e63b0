"""The base model: made from a shape, or read from its files by every rank as far as that rank holds it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn

from ascendrun.programs.trainer import errors
from ascendrun.programs.trainer.devices.accelerator import Precision
from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies import weights
from ascendrun.programs.trainer.strategies.engine import cast
from ascendrun.programs.trainer.strategies.fsdp2 import materialise

SHAPES = Path(__file__).with_name("shapes.json")
WRAPPER, WRAPPED = "base_model.model.", ".base_layer."
"""What peft puts around and into the names of a model's weights."""
HEAD, WORDS = "lm_head.weight", "model.embed_tokens.weight"


def shape_config(name: str, **changes: Any) -> Any:
    """The configuration of a Qwen2 of a known shape. Raises InvalidDataError."""
    from transformers import Qwen2Config

    shapes = json.loads(SHAPES.read_text(encoding="utf-8"))
    if name not in shapes:
        raise InvalidDataError(
            "program.unknown-preset",
            "--model_preset={name}: unknown preset; expected one of {known}",
            name=name,
            known=list(shapes),
        )
    # No window: transformers 4.51 warns of its default one, which is not used, on every rank.
    return Qwen2Config(
        max_position_embeddings=32768, use_cache=False, **{"sliding_window": None, **shapes[name], **changes}
    )


def folder_config(folder: Path, *, packed_tokens: int = 0) -> Any:
    """`packed_tokens`: in a packed row, 0: rows are not packed. Raises InvalidDataError."""
    if not (folder / "config.json").is_file():
        raise InvalidDataError(
            "program.no-config",
            "{directory}: config.json not found\n"
            "hint: set --base_model to a directory with config.json, tokenizer and *.safetensors, at the "
            "same path on every node",
            directory=folder,
        )
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # of many kinds: not JSON, no object, a field or a model that transformers does not know
        raise InvalidDataError(
            "program.config-rejected",
            "{directory}/config.json: rejected by transformers ({error})\n"
            "hint: copy the base again, or install a transformers version that supports it",
            directory=folder,
            error=errors.in_a_line(error),
        ) from error
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", False) else None
    config.sliding_window = window  # transformers 4.51 warns of one that is not used, on every rank
    if window and packed_tokens > window:
        raise InvalidDataError(
            "program.sliding-window",
            "{directory}: tokens of this model attend to {window} tokens back; packed sequences of {packed} "
            "tokens are not supported\n"
            "hint: set --packing=false, or --cutoff_len={cutoff}",
            directory=folder,
            window=window,
            packed=packed_tokens,
            cutoff=window,
        )
    return config


def make_base(folder: Path, config: Any, tokenizer: Any, *, seed: int, here: Runtime) -> None:
    """A model with random weights in `folder`, as if it had been downloaded. The first rank of every node writes it,
    then each that does not see it; one that is there already stays, for it was made from the same seed. All ranks
    call it together."""
    for writes in (here.local_rank == 0, True):
        if writes and not (folder / "config.json").is_file():
            write_base(folder, config, tokenizer, seed=seed, mark=here.rank)
        here.barrier()


def write_base(folder: Path, config: Any, tokenizer: Any, *, seed: int, mark: int) -> None:
    fresh = folder.with_name(f".{folder.name}-{mark}-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    torch.manual_seed(seed)
    write_model(fresh, build(config, attention="sdpa"))
    tokenizer.save_pretrained(str(fresh))
    try:
        fresh.rename(folder)
    except OSError:  # another rank sees the same disk and was faster
        shutil.rmtree(fresh)


def write_model(folder: Path, model: Any) -> None:
    """As transformers' save_pretrained, which since 5 writes on rank 0 alone: other nodes had nothing."""
    from safetensors.torch import save_file

    model.config.architectures = [type(model).__name__]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(model.config.to_json_string(), encoding="utf-8")
    tensors = {
        name: value.contiguous()
        for name, value in model.state_dict().items()
        if not (model.config.tie_word_embeddings and name == HEAD)
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def build(config: Any, *, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    return make(config, attn_implementation=attention)


def empty_model(config: Any, *, attention: str) -> Any:
    """The model without weights: they are on the meta device, which takes no memory; its buffers are real."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        model = build(config, attention=attention)
    model.tie_weights()
    model.config.use_cache = False
    return model


def checkpoint_activations(model: Any, *, strategy: str) -> None:
    """Recompute activations in the backward pass. ZeRO-3 requires the older kind, which does not look at shapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5 warns for 6, on every rank
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": strategy == "zero3"})
    if strategy == "zero3":
        model.enable_input_require_grads()


def name_in_file(model: nn.Module) -> Callable[[str], str | None]:
    """For weights.read_into: peft's names become those of the files; a tied head is the words."""
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))

    def find(name: str) -> str | None:
        if "lora_" in name:
            return None
        plain = name[len(WRAPPER) :] if name.startswith(WRAPPER) else name
        plain = plain.replace(WRAPPED, ".")
        return WORDS if is_tied and plain == HEAD else plain

    return find


def load_whole(model: Any, folder: Path, here: Runtime, precision: Precision) -> None:
    """Straight to this rank's device: host memory holds one weight at a time, not a model for every rank."""
    cast(model, precision)
    materialise(model, here.device)
    model.tie_weights()
    weights.read_into(model, folder, name_in_file=name_in_file(model))


def load_parts(module: nn.Module, folder: Path) -> None:
    """For FSDP2: every rank reads its own rows of every weight."""
    weights.read_into(module, folder, name_in_file=name_in_file(module))


def load_for_zero3(model: Any, folder: Path, here: Runtime, precision: Precision, config: dict[str, Any]) -> None:
    """One weight after the other: rank 0 reads it, DeepSpeed sends it round and each rank keeps its part.

    DeepSpeed's own way, zero.Init around the making of the model, runs the model's initialisation on empty
    parts, and loading through transformers holds whole files on every rank. All weights travel through one buffer:
    one of its own for each left the heap in pieces, up to a whole copy of the base.
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


class weights_of:
    """Reads whole weights by name from a folder's files: `with weights_of(folder) as read: tensor = read(name)`.

    One file is open at a time: what was read of an open one counts as memory of this process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, weights.file_of_tensor(folder)
        self.file, self.opened = "", contextlib.ExitStack()
        self.values: Any = None

    def __enter__(self) -> Callable[[str], torch.Tensor]:
        return self.read

    def read(self, name: str) -> torch.Tensor:
        """Raises weights.InvalidWeightsError."""
        from safetensors import safe_open

        if name not in self.files:
            raise weights.InvalidWeightsError(
                "program.weight-not-found",
                "{directory}: no file has the weight {name}, which the model requires",
                directory=self.folder,
                name=name,
            )
        if self.files[name] != self.file:
            self.opened.close()
            self.file = self.files[name]
            self.values = self.opened.enter_context(safe_open(str(self.folder / self.file), framework="pt"))
        return self.values.get_tensor(name)  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        self.values = None
        self.opened.close()
