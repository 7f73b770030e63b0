"""Merge of an adapter into its base, file by file: a sharded checkpoint is never completely in memory."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

import torch

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.qwen_lora.lora import ADAPTER_FILE, read_settings, target_of
from ascendrun.programs.trainer.strategies.weights import file_of_tensor

COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")


def merge(base: Path, adapter: Path, out: Path) -> int:
    """Write the merged model to `out`, in the base's files and precision. Return the number of changed weights."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    settings, files = read_settings(adapter), file_of_tensor(base)
    fresh = out.with_name(f".{out.name}-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    with safe_open(str(adapter / ADAPTER_FILE), framework="pt") as opened:
        targets = target_of(list(opened.keys()))
        lost = sorted(set(targets) - set(files))
        if lost:
            raise InvalidDataError(
                "program.other-base",
                "{adapter} changes {name}, which {base} does not have; it belongs to another base",
                adapter=adapter,
                name=lost[0],
                base=base,
            )
        for file in sorted(set(files.values())):
            with safe_open(str(base / file), framework="pt") as source:
                weights = {
                    name: changed(source.get_tensor(name), targets.get(name), opened.get_tensor, settings)
                    for name in source.keys()
                }
                save_file(weights, str(fresh / file), metadata={"format": "pt"})
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
    whole = weight.float() + scale_of(settings) * (read(parts["B"]).float() @ read(parts["A"]).float())
    if "magnitude" in parts:
        whole = whole * (read(parts["magnitude"]).float() / whole.norm(dim=1))[:, None]
    return whole.to(weight.dtype)


def scale_of(settings: Mapping[str, Any]) -> float:
    rank = settings["r"]
    return float(settings["lora_alpha"]) / (math.sqrt(rank) if settings.get("use_rslora") else rank)
