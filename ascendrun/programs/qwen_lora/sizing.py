"""How the ranks will hold the base: memory by each way, before a card is taken, and the fastest that fits."""

from __future__ import annotations

import copy
import os
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch import nn

from ascendrun.programs.qwen_lora.base import build as build_model
from ascendrun.programs.qwen_lora.base import checkpoint_activations
from ascendrun.programs.qwen_lora.learning import forward
from ascendrun.programs.qwen_lora.lora import add_lora
from ascendrun.programs.trainer import dry_run
from ascendrun.programs.trainer.accelerator import Precision
from ascendrun.programs.trainer.simulate import simulate_deep
from ascendrun.programs.trainer.start import Runtime

WAYS = ("ddp", "fsdp2", "zero3")


def reckon(config: Any, options: Mapping[str, Any], piece: Mapping[str, int], *, precision: Precision, world_size: int,
           family: str, card: str, card_bytes: Optional[int], ways: Tuple[str, ...] = WAYS) -> dry_run.Report:
    """`piece`: see learning.heaviest."""
    def build(layers: int) -> nn.Module:
        model = build_model(with_layers(config, layers), attention="sdpa")
        if options["checkpointing"]:
            checkpoint_activations(model, how="ddp")
        return add_lora(model, options)  # type: ignore[no-any-return]

    def step(model: nn.Module, tensors: Dict[str, torch.Tensor]) -> torch.Tensor:
        return forward(model, tensors, precision.compute).sum()

    rows, length, kept = piece["rows"], piece["length"], piece["kept"]
    shapes = {"ids": ((rows, length), torch.int64), "kept": ((kept,), torch.int64),
              "targets": ((rows, kept), torch.int64)}
    if options["packing"]:
        shapes.update(positions=((rows, length), torch.int64), segments=((rows, length), torch.int64))
    return dry_run.weigh(
        lambda is_cast: simulate_deep(build, config.num_hidden_layers, step, shapes, precision=precision,
                                      is_cast=is_cast),
        precision=precision, world_size=world_size, family=family, card=card, card_bytes=card_bytes,
        pieces=piece["pieces"], micro_batch=rows, ways=ways, has_checkpointing=options["checkpointing"])


def with_layers(config: Any, layers: int) -> Any:
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        shallow.layer_types = list(config.layer_types)[:layers]
    return shallow


def card_bytes_of(here: Runtime) -> Optional[int]:
    """Of this rank's device; on a CPU its share of the node's memory. None: cannot say."""
    total = here.accelerator.memory_total_bytes()
    if total is None or here.family != "cpu":
        return total
    return total // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", here.world_size)))


def choose(config: Any, options: Mapping[str, Any], piece: Mapping[str, int], here: Runtime, precision: Precision
           ) -> Tuple[str, bool, List[str]]:
    """(way, whether to offload, the reckoning for people). Rank 0 reckons for all. Raises TooLarge."""
    if options["how"] != "auto":
        return options["how"], options["offload"], [f"--how={options['how']}, as asked"]
    told: Any = None
    if here.is_first:
        report = reckon(config, options, piece, precision=precision, world_size=here.world_size, family=here.family,
                        card="", card_bytes=card_bytes_of(here), ways=ways_for(precision, here))
        told = report.lines, report.problems, report.chosen and (report.chosen.how, report.chosen.host > 0)
    lines, problems, chosen = here.share(told)
    if problems:
        raise TooLarge("\n".join([*lines, *problems]))
    way, is_offloaded = chosen
    return "ddp" if way == "none" else way, is_offloaded, list(lines)


def ways_for(precision: Precision, here: Runtime) -> Tuple[str, ...]:
    """Sharding needs peers; fsdp2 has no loss scaling; zero3 needs deepspeed."""
    from importlib.util import find_spec
    ways = ["ddp"]
    if here.world_size > 1 and not precision.scales:
        ways.append("fsdp2")
    if here.world_size > 1 and find_spec("deepspeed") is not None:
        ways.append("zero3")
    return tuple(ways)


class TooLarge(Exception):
    """No way of holding the base fits; the message has the numbers and ways out."""


