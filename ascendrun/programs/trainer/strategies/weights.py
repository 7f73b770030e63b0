"""Pretrained weights from safetensors files to a model that may be sharded: each rank reads only its own rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Callable

import torch
from torch import nn

from ascendrun.programs.errors import ProgramError
from ascendrun.programs.trainer.strategies.fsdp2 import fill

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class InvalidWeightsError(ProgramError):
    """The files lack a weight of the model, or it has another shape; the message has its name."""


def read_into(
    module: nn.Module, folder: Path, *, name_in_file: Callable[[str], str | None] = lambda name: name
) -> None:
    """Read weights. `name_in_file`: a parameter's name in the files; None: not in the files (an adapter's). A tied
    weight may have either of its names. Raises InvalidWeightsError; for a missing weight, before any is read."""
    from safetensors import safe_open

    files = file_of_tensor(folder)
    wanted: dict[str, list[str]] = {}
    targets: dict[str, torch.Tensor] = {}
    for names, weight in named_with_ties(module):
        candidates = [each for each in map(name_in_file, names) if each is not None]
        if not candidates:
            continue
        found = next((each for each in candidates if each in files), None)
        if found is None:
            raise missing(folder, candidates[0])
        wanted.setdefault(files[found], []).append(found)
        targets[found] = weight
    for file, names in wanted.items():
        with safe_open(str(folder / file), framework="pt") as opened:
            for name in names:
                rows = opened.get_slice(name)
                if list(rows.get_shape()) != list(targets[name].shape):
                    raise InvalidWeightsError(
                        "program.weights-shape",
                        "{file}: {name} has shape [{found}], expected [{expected}]; the files belong to another "
                        "configuration",
                        file=folder / file,
                        name=name,
                        found=rows.get_shape(),
                        expected=list(targets[name].shape),
                    )
                fill(targets[name], rows.__getitem__)


def missing(folder: Path, name: str) -> InvalidWeightsError:
    return InvalidWeightsError(
        "program.weights-missing",
        "{directory}: no file has the weight {name}, which the model requires",
        directory=folder,
        name=name,
    )


def file_of_tensor(folder: Path) -> dict[str, str]:
    """Return {tensor: file}. Raises InvalidWeightsError."""
    if (folder / INDEX).is_file():
        return dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / SINGLE).is_file():
        raise InvalidWeightsError(
            "program.no-safetensors",
            "{directory}: neither {single} nor {index} found\n"
            "hint: convert other formats with save_pretrained of transformers",
            directory=folder,
            single=SINGLE,
            index=INDEX,
        )
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(folder / SINGLE), framework="pt") as opened:
            return dict.fromkeys(opened.keys(), SINGLE)
    except SafetensorError as error:
        raise InvalidWeightsError(
            "program.bad-safetensors",
            "{file}: truncated, or not a safetensors file ({error})\nhint: copy it again",
            file=folder / SINGLE,
            error=error,
        ) from error


def named_with_ties(module: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Return every parameter once, with all its names."""
    names: dict[int, list[str]] = {}
    weights: dict[int, torch.Tensor] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
        weights[id(weight)] = weight
    return [(names[key], weights[key]) for key in names]
