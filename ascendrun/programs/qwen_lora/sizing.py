"""How the ranks will hold the base: memory by each way, before a card is taken, and the fastest that fits."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ascendrun.programs.qwen_lora.base import build as build_model
from ascendrun.programs.qwen_lora.base import checkpoint_activations
from ascendrun.programs.qwen_lora.conversations import InvalidDataError
from ascendrun.programs.qwen_lora.lora import add_lora
from ascendrun.programs.qwen_lora.sft_task import forward
from ascendrun.programs.trainer.devices.accelerator import Precision
from ascendrun.programs.trainer.devices.chips import Chip
from ascendrun.programs.trainer.metrics import flops_per_token
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies import memory
from ascendrun.programs.trainer.strategies.simulate import Simulated, simulate_deep

WAYS = ("ddp", "fsdp2", "zero3")


class ModelTooLargeError(Exception):
    """No way of holding the base fits; the message has the numbers and ways out."""


@dataclass(frozen=True)
class Holding:
    """`offload`: weights and optimizer lie in host memory. `checkpointing`: activations are made anew."""

    how: str
    offload: bool
    checkpointing: bool

    def __str__(self) -> str:
        return (
            f"{self.how}{', offloaded' if self.offload else ''}, activations "
            f"{'made anew' if self.checkpointing else 'kept'}"
        )


@dataclass(frozen=True)
class Reckoning:
    """`lines`: what was reckoned, for people. `problems`: why nothing fits, with the ways out; then `chosen` and `need`
    are None. `simulated`: one step, to know the model's sizes by."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]
    chosen: Holding | None
    need: memory.Need | None
    simulated: Simulated


def refuse(options: Mapping[str, Any], *, world_size: int, precision: Precision, has_deepspeed: bool = True) -> None:
    """What cannot work, before anything is read or made. Raises InvalidDataError with all reasons and ways out."""
    how, is_offloaded = options["strategy"], options["cpu_offload"]
    problems = []
    if how == "fsdp2" and precision.scales:
        problems.append(
            f"--strategy=fsdp2 has no loss scaling, and {precision.reason}; use --strategy=ddp or --strategy=zero3"
        )
    if how in ("fsdp2", "zero3") and world_size == 1:
        problems.append(
            f"--strategy={how} shares the base among ranks, and there is one; use --strategy=ddp, or more devices"
        )
    if how == "zero3" and not has_deepspeed:
        problems.append(
            "--strategy=zero3 needs deepspeed, which is not installed here: pip install deepspeed; or use --strategy=fsdp2"  # noqa: E501
        )
    if is_offloaded and (how == "ddp" or world_size == 1):
        problems.append(
            "--cpu_offload=true needs a base that is shared among ranks; use --strategy=fsdp2 or --strategy=zero3 on two "  # noqa: E501
            "devices or more, or --cpu_offload=false"
        )
    elif is_offloaded and precision.scales and not has_deepspeed:
        problems.append("--cpu_offload=true with float16 needs deepspeed, which is not here: pip install deepspeed")
    if problems:
        raise InvalidDataError("; ".join(problems))


def reckon(
    config: Any,
    options: Mapping[str, Any],
    piece: Mapping[str, int],
    *,
    precision: Precision,
    world_size: int,
    family: str,
    card_bytes: int | None,
    ways: Sequence[str] = WAYS,
    everything: bool = False,
) -> Reckoning:
    """`piece`: see learning.heaviest. `card_bytes` None: not known, so nothing can fail to fit. `everything`: also the
    slower ways than the one that is chosen."""
    seen: dict[tuple[bool, bool], Simulated] = {}
    lines: list[str] = []
    needs: list[tuple[memory.Need, Holding]] = []
    found: tuple[memory.Need, Holding] | None = None
    for holding in trials(options, ways):
        is_shared = holding.how != "ddp"
        key = is_shared, holding.checkpointing
        if key not in seen:
            seen[key] = simulated_step(config, options, piece, precision, is_cast=is_shared, is_anew=key[1])
        way = "none" if holding.how == "ddp" and world_size == 1 else holding.how
        need = memory.needs(
            seen[key],
            how=way,
            world_size=world_size,
            precision=precision,
            pieces=piece["pieces"],
            offload_optimizer=holding.offload,
            offload_weights=holding.offload,
        )
        needs.append((need, holding))
        anew = ", activations made anew" if holding.checkpointing else ""
        lines.append(memory.as_sentence(need, card_bytes, family) + anew)
        if found is None and (card_bytes is None or memory.fits(need, card_bytes, family)):
            found = need, holding
            if not everything:
                break
    sizes = next(iter(seen.values()))
    millions = f"{sizes.parameters / 1e6:,.2f} M weights, {sizes.trained / 1e6:,.2f} M trained"
    lines.insert(0, f"{millions}; {precision.reason}")
    if found is not None:
        need, holding = found
        return Reckoning((*lines, f"chosen: {holding}; {why(holding, options, ways)}"), (), holding, need, sizes)
    least, holding = min(needs, key=lambda each: each[0].on_card(family))
    out = memory.ways_out(least, micro_batch=piece["rows"], has_checkpointing=holding.checkpointing, how=least.how)
    problem = f"{memory.as_sentence(least, card_bytes, family)}; try {', or '.join(out)}"
    return Reckoning(tuple(lines), (problem,), None, None, sizes)


def trials(options: Mapping[str, Any], ways: Sequence[str]) -> list[Holding]:
    """From fast to slow. Activations made anew cost a third more arithmetic, less than sending the weights round;
    host memory is slower than both."""
    asked = options["gradient_checkpointing"]
    anew = (False, True) if asked is None else (asked,)
    if options["cpu_offload"]:
        return [Holding(way, True, each) for way in ways if way != "ddp" for each in anew]
    found = [Holding(way, False, each) for way in ways for each in anew]
    if "zero3" in ways and len(ways) > 1:
        found += [Holding("zero3", True, each) for each in anew]
    return found


def why(holding: Holding, options: Mapping[str, Any], ways: Sequence[str]) -> str:
    """Of what was chosen here, and what was asked for."""
    parts = (
        ["the fastest that fits"]
        if len(ways) > 1
        else ["the only way here" if options["strategy"] == "auto" else f"--strategy={holding.how}, as asked"]
    )
    if options["gradient_checkpointing"] is not None:
        parts.append(f"--gradient_checkpointing={str(holding.checkpointing).lower()}, as asked")
    elif len(ways) == 1:
        parts.append("activations fit" if not holding.checkpointing else "activations would not fit")
    return ", ".join(parts)


def simulated_step(
    config: Any,
    options: Mapping[str, Any],
    piece: Mapping[str, int],
    precision: Precision,
    *,
    is_cast: bool,
    is_anew: bool,
) -> Simulated:
    def build(layers: int) -> nn.Module:
        model = build_model(with_layers(config, layers), attention="sdpa")
        if is_anew:
            checkpoint_activations(model, how="ddp")
        return add_lora(model, options)  # type: ignore[no-any-return]

    def step(model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return forward(model, tensors, precision.compute).sum()

    rows, length, kept = piece["rows"], piece["length"], piece["kept"]
    shapes = {
        "ids": ((rows, length), torch.int64),
        "kept": ((kept,), torch.int64),
        "targets": ((rows, kept), torch.int64),
    }
    if options["packing"]:
        shapes.update(positions=((rows, length), torch.int64), segments=((rows, length), torch.int64))
    return simulate_deep(build, config.num_hidden_layers, step, shapes, precision=precision, is_cast=is_cast)


def with_layers(config: Any, layers: int) -> Any:
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        shallow.layer_types = list(config.layer_types)[:layers]
    return shallow


def speed_limit(config: Any, sizes: Simulated, chip: Chip | None, *, ranks: int, mean_length: float) -> str | None:
    """What the cards could do were all of their peak used, which no training does; None: the chip's is not known."""
    if chip is None or chip.peak_tflops is None:
        return None
    words = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    work = flops_per_token(
        parameters=sizes.parameters,
        trainable=sizes.trained,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mean_length=mean_length,
        embedding=words,
    )
    tokens_per_s = ranks * chip.peak_tflops * 1e12 / work
    return (
        f"no faster than {tokens_per_s / mean_length:,.1f} rows of {mean_length:.0f} tokens a second: {ranks} x "
        f"{chip.peak_tflops:g} TFLOP/s, were all of it used"
    )


def card_bytes_of(here: Runtime) -> int | None:
    """Of this rank's device; on a CPU its share of the node's memory. None: cannot say."""
    total = here.accelerator.memory_total_bytes()
    if total is None or here.family != "cpu":
        return total
    return total // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", here.world_size)))


def choose(
    config: Any, options: Mapping[str, Any], piece: Mapping[str, int], here: Runtime, precision: Precision
) -> tuple[Holding, list[str]]:
    """(how to hold it, the reckoning for people). Rank 0 reckons for all. Raises ModelTooLargeError; a way that was asked for is
    taken even then, for an estimate is no fact."""  # noqa: E501
    asked, is_anew = options["strategy"], options["gradient_checkpointing"]
    if asked != "auto" and is_anew is not None:
        chosen = Holding(asked, options["cpu_offload"], is_anew)
        return chosen, [f"{chosen}, as asked"]
    told: Any = None
    if here.is_first:
        ways = ways_for(precision, here.world_size, has_deepspeed()) if asked == "auto" else (asked,)
        found = reckon(
            config,
            options,
            piece,
            precision=precision,
            world_size=here.world_size,
            family=here.family,
            card_bytes=card_bytes_of(here),
            ways=ways,
        )
        told = found.lines, found.problems, found.chosen and list(vars(found.chosen).values())
    lines, problems, parts = here.share(told)
    if parts is not None:
        return Holding(*parts), list(lines)
    if asked == "auto":
        raise ModelTooLargeError("\n".join([*lines, *problems]))
    chosen = Holding(asked, options["cpu_offload"], True)
    return chosen, [*lines, *(f"note: {problem}" for problem in problems), f"{chosen}: --strategy={asked}, as asked"]


def ways_for(precision: Precision, world_size: int, has_deepspeed: bool = True) -> tuple[str, ...]:
    """Sharding needs peers; fsdp2 has no loss scaling; zero3 needs deepspeed."""
    ways = ["ddp"]
    if world_size > 1 and not precision.scales:
        ways.append("fsdp2")
    if world_size > 1 and has_deepspeed:
        ways.append("zero3")
    return tuple(ways)


def has_deepspeed() -> bool:
    from importlib.util import find_spec

    return find_spec("deepspeed") is not None
