"""The adapter: low-rank matrices next to those of the base, their initial values, the check of a saved adapter, and its
merge into the base, file by file: a sharded checkpoint is never completely in memory."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn

from ascendrun.programs.errors import InvalidDataError, ProgramError
from ascendrun.programs.qwen_lora.base import WRAPPER, name_in_file
from ascendrun.programs.trainer.checkpoint import replace_weights
from ascendrun.programs.trainer.data import seed_of
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.programs.trainer.strategies.fsdp2 import file_of_tensor
from ascendrun.text import Text, listed

ADAPTER_FILE = "adapter_model.safetensors"
NAME = "default"
MAGNITUDE = "lora_magnitude_vector"


class IncompleteAdapterError(ProgramError):
    """The gathered adapter lacks a matrix, or a matrix has another shape; nothing was saved."""


def add_lora(model: Any, options: Mapping[str, Any]) -> Any:
    """Wrap the model in peft's, with a frozen base. Raises InvalidDataError for targets not found in the model."""
    from peft import LoraConfig, get_peft_model

    leaves = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    unknown = [name for name in options["target_modules"] if name not in leaves]
    if unknown:
        raise InvalidDataError(listed("program.unknown-target", unknown=list(unknown), known=sorted(leaves)))
    config = LoraConfig(
        r=options["lora_r"],
        lora_alpha=options["lora_alpha"],
        lora_dropout=options["lora_dropout"],
        target_modules=list(options["target_modules"]),
        use_dora=options["use_dora"],
        use_rslora=options["use_rslora"],
        task_type="CAUSAL_LM",
        bias="none",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls newer transformers by an old name, on every rank
        return get_peft_model(model, config)


def first_values(
    model: nn.Module, *, seed: int, read: Callable[[str], torch.Tensor], here: Runtime
) -> dict[str, torch.Tensor]:
    """Return random A and zero B, so that training starts at the base; DoRA's magnitudes are row norms of the base.

    The values are equal on every rank and for every strategy. `read`: return a complete base weight by name. All ranks
    call it together. Raises InvalidDataError.
    """
    shapes = sorted(trained_shapes(model).items())
    values = lengths_of_rows(model, [name for name, _ in shapes if MAGNITUDE in name], read, here)
    for number, (name, shape) in enumerate(shapes):
        if "lora_A" in name:
            chance = torch.Generator().manual_seed(seed_of(seed, 11, number))
            bound = 1 / math.sqrt(shape[1])
            values[name] = (torch.rand(shape, generator=chance) * 2 - 1) * bound
        elif "lora_B" in name:
            values[name] = torch.zeros(shape)
        elif name not in values:
            raise InvalidDataError(listed("program.unknown-adapter-part", name=name))
    return values


def lengths_of_rows(
    model: nn.Module, names: Sequence[str], read: Callable[[str], torch.Tensor], here: Runtime
) -> dict[str, torch.Tensor]:
    """Return DoRA's magnitudes by name. Each rank reads its part of the base, one weight at a time."""
    rename = name_in_file(model)
    mine: dict[str, torch.Tensor] = {}
    for name in names[here.rank :: here.world_size]:
        base = rename(name.split(f".{MAGNITUDE}")[0] + ".weight")
        assert base is not None
        mine[name] = read(base).float().norm(dim=1)
    return {name: tensor for part in here.gather(mine) for name, tensor in part.items()} if names else {}


def put_values(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Replace the adapter's weights, which have no values yet."""
    for name, value in values.items():
        home, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(home), leaf, nn.Parameter(value.clone()))


def trained_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the expected shapes of the adapter by name, before sharding."""
    return {name: tuple(weight.shape) for name, weight in model.named_parameters() if weight.requires_grad}


def save_adapter(
    weights: Mapping[str, torch.Tensor],
    expected: Mapping[str, tuple[int, ...]],
    model: Any,
    folder: Path,
    tokenizer: Any,
) -> None:
    """Write unsharded weights to the files that PeftModel.from_pretrained reads.

    Raises IncompleteAdapterError before a file is written, or if the file has other values than were written. An
    existing adapter is kept until then.
    """
    check_whole(weights, expected)
    fresh = folder.with_name(f".{folder.name}-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    plain = {saved_name(name): tensor.contiguous() for name, tensor in weights.items()}
    replace_weights(fresh / ADAPTER_FILE, plain)
    settings = model.peft_config[NAME]
    settings.inference_mode = True
    settings.save_pretrained(str(fresh))
    tokenizer.save_pretrained(str(fresh))
    check_file(fresh / ADAPTER_FILE, plain)
    if folder.exists():
        shutil.rmtree(folder)
    fresh.rename(folder)


def check_whole(weights: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise IncompleteAdapterError for missing or empty matrices, which a save without gathering would produce."""
    problems: list[Text] = []
    for name, shape in expected.items():
        if name not in weights:
            problems.append(listed("program.part-missing", name=name))
        elif tuple(weights[name].shape) != tuple(shape):
            problems.append(
                listed("program.part-shape", name=name, found=list(weights[name].shape), expected=list(shape))
            )
        elif not bool(torch.isfinite(weights[name]).all()):
            problems.append(listed("program.part-not-finite", name=name))
    problems += [listed("program.part-unknown", name=name) for name in set(weights) - set(expected)]
    if problems:
        raise IncompleteAdapterError.of([listed("program.adapter-not-saved"), *problems])


def check_file(path: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as opened:
        if set(opened.keys()) != set(wanted):
            raise IncompleteAdapterError(listed("program.adapter-file", path=path))
        differ = [name for name in wanted if not torch.equal(opened.get_tensor(name), wanted[name])]
    if differ:
        raise IncompleteAdapterError(listed("program.adapter-values", path=path, name=differ[0]))


def saved_name(name: str) -> str:
    """Return the name in the file: peft removes the adapter's own name, and DoRA's `weight` too."""
    plain = name.replace(f".{NAME}.", ".")
    return plain[: -len(".weight")] if f".{MAGNITUDE}." in plain else plain


def gathered(engine: Engine) -> dict[str, torch.Tensor]:
    """Return all trained weights, unsharded, in float32, on rank 0; {} elsewhere. All ranks call it together."""
    return {name: tensor.float() for name, tensor in engine.full_weights().items() if "lora_" in name}


def read_settings(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")))


def target_of(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return {base weight: {A, B, magnitude: name in the adapter's file}}."""
    found: dict[str, dict[str, str]] = {}
    kinds = {".lora_A.weight": "A", ".lora_B.weight": "B", f".{MAGNITUDE}": "magnitude"}
    for name in names:
        for ending, kind in kinds.items():
            if name.endswith(ending):
                base = name[len(WRAPPER) : -len(ending)] + ".weight"
                found.setdefault(base, {})[kind] = name
    return found


COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")


def merge(base: Path, adapter: Path, out: Path) -> int:
    """Write the merged model to `out`, in the base's files and precision. Return the number of changed weights."""
    from safetensors import safe_open

    settings, files = read_settings(adapter), file_of_tensor(base)
    fresh = out.with_name(f".{out.name}-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    with safe_open(str(adapter / ADAPTER_FILE), framework="pt") as opened:
        targets = target_of(list(opened.keys()))
        lost = sorted(set(targets) - set(files))
        if lost:
            raise InvalidDataError(listed("program.other-base", adapter=adapter, name=lost[0], base=base))
        for file in sorted(set(files.values())):
            with safe_open(str(base / file), framework="pt") as source:
                weights = {
                    name: changed(source.get_tensor(name), targets.get(name), opened.get_tensor, settings)
                    for name in source.keys()
                }
                replace_weights(fresh / file, weights)
    for pattern in COPIED:
        for each in base.glob(pattern):
            shutil.copy(each, fresh / each.name)
    if out.exists():
        shutil.rmtree(out)
    fresh.rename(out)
    return len(targets)


def changed(
    weight: torch.Tensor, parts: dict[str, str] | None, read: Callable[[str], torch.Tensor], settings: Mapping[str, Any]
) -> torch.Tensor:
    if not parts:
        return weight
    rank = settings["r"]
    scale = float(settings["lora_alpha"]) / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    whole = weight.float() + scale * (read(parts["B"]).float() @ read(parts["A"]).float())
    if "magnitude" in parts:
        whole = whole * (read(parts["magnitude"]).float() / whole.norm(dim=1))[:, None]
    return whole.to(weight.dtype)
