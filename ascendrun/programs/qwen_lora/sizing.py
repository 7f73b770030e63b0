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
from ascendrun.programs.qwen_lora.lora import add_lora
from ascendrun.programs.qwen_lora.sft_task import forward
from ascendrun.programs.trainer.devices.accelerator import Precision
from ascendrun.programs.trainer.devices.chips import Chip
from ascendrun.programs.trainer.errors import InvalidDataError, ModelTooLargeError
from ascendrun.programs.trainer.metrics import flops_per_token
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies import memory
from ascendrun.programs.trainer.strategies.simulate import Simulated, simulate_deep
from ascendrun.text import Text

WAYS = ("ddp", "fsdp2", "zero3")


@dataclass(frozen=True)
class Holding:
    """`offload`: weights and optimizer lie in host memory. `checkpointing`: activations are made anew."""

    how: str
    offload: bool
    checkpointing: bool

    def text(self) -> Text:
        return Text(
            "program.layout",
            "{strategy}{offload}, activations {activations}",
            strategy=self.how,
            offload=Text("program.offloaded", ", offloaded") if self.offload else "",
            activations=(
                Text("program.recomputed", "recomputed") if self.checkpointing else Text("program.kept", "kept")
            ),
        )


@dataclass(frozen=True)
class Reckoning:
    """`lines`: what was reckoned, for people. `problems`: why nothing fits, with the ways out; then `chosen` and `need`
    are None. `simulated`: one step, to know the model's sizes by."""

    lines: tuple[Text, ...]
    problems: tuple[Text, ...]
    chosen: Holding | None
    need: memory.Need | None
    simulated: Simulated


def refuse(options: Mapping[str, Any], *, world_size: int, precision: Precision, has_deepspeed: bool = True) -> None:
    """What cannot work, before anything is read or made. Raises InvalidDataError with all reasons and ways out."""
    how, is_offloaded = options["strategy"], options["cpu_offload"]
    problems = []
    if how == "fsdp2" and precision.scales:
        problems.append(
            Text(
                "program.fsdp2-no-scaling",
                "strategy=fsdp2 has no loss scaling, and {reason}\nhint: set --strategy=ddp or --strategy=zero3",
                reason=precision.reason,
            )
        )
    if how in ("fsdp2", "zero3") and world_size == 1:
        problems.append(
            Text(
                "program.one-rank",
                "strategy={strategy} requires at least 2 ranks, got 1\nhint: set --strategy=ddp, or use more devices",
                strategy=how,
            )
        )
    if how == "zero3" and not has_deepspeed:
        problems.append(
            Text(
                "program.no-deepspeed",
                "strategy=zero3 requires deepspeed, which is not installed\n"
                "hint: pip install deepspeed, or set --strategy=fsdp2",
            )
        )
    if is_offloaded and (how == "ddp" or world_size == 1):
        problems.append(
            Text(
                "program.offload-needs-sharding",
                "cpu_offload requires a base that is sharded over at least 2 ranks\n"
                "hint: set --strategy=fsdp2 or --strategy=zero3 on two or more devices, or "
                "--cpu_offload=false",
            )
        )
    elif is_offloaded and precision.scales and not has_deepspeed:
        problems.append(
            Text(
                "program.offload-deepspeed",
                "cpu_offload with float16 requires deepspeed, which is not installed\nhint: pip install deepspeed",
            )
        )
    if problems:
        raise InvalidDataError.of(problems)


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
    lines: list[Text] = []
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
        line = memory.as_sentence(need, card_bytes, family)
        if holding.checkpointing:
            line = Text("program.with-recompute", "{memory}, activations recomputed", memory=line)
        lines.append(line)
        if found is None and (card_bytes is None or memory.fits(need, card_bytes, family)):
            found = need, holding
            if not everything:
                break
    sizes = next(iter(seen.values()))
    size = Text(
        "program.model-size",
        "{millions:,.2f} M weights, {trained:,.2f} M trained; {precision}",
        millions=sizes.parameters / 1e6,
        trained=sizes.trained / 1e6,
        precision=precision.reason,
    )
    lines.insert(0, size)
    if found is not None:
        need, holding = found
        return Reckoning(
            (
                *lines,
                Text(
                    "program.chosen", "chosen: {layout}; {why}", layout=holding.text(), why=why(holding, options, ways)
                ),
            ),
            (),
            holding,
            need,
            sizes,
        )
    least, holding = min(needs, key=lambda each: each[0].on_card(family))
    out = memory.fixes(least, micro_batch=piece["rows"], has_checkpointing=holding.checkpointing, how=least.how)
    problem = Text(
        "program.does-not-fit",
        "{need}; change one of: {fixes}",
        need=memory.as_sentence(least, card_bytes, family),
        fixes=out,
    )
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


def why(holding: Holding, options: Mapping[str, Any], ways: Sequence[str]) -> list[Text]:
    """Of what was chosen here, and what was asked for."""
    parts = (
        [Text("program.fastest", "the fastest strategy that fits")]
        if len(ways) > 1
        else [
            Text("program.only-strategy", "the only strategy available here")
            if options["strategy"] == "auto"
            else Text("program.strategy-requested", "strategy={strategy} as requested", strategy=holding.how)
        ]
    )
    if options["gradient_checkpointing"] is not None:
        parts.append(
            Text(
                "program.checkpointing-requested",
                "gradient_checkpointing={value} as requested",
                value=str(holding.checkpointing).lower(),
            )
        )
    elif len(ways) == 1:
        parts.append(
            Text("program.activations-fit", "activations fit")
            if not holding.checkpointing
            else Text("program.activations-too-large", "activations do not fit")
        )
    return parts


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


def speed_limit(config: Any, sizes: Simulated, chip: Chip | None, *, ranks: int, mean_length: float) -> Text | None:
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
    return Text(
        "program.speed-limit",
        "upper bound: {rate:,.1f} samples/s of {mean:.0f} tokens ({ranks} x {peak:g} TFLOP/s at full use)",
        rate=tokens_per_s / mean_length,
        mean=mean_length,
        ranks=ranks,
        peak=chip.peak_tflops,
    )


def card_bytes_of(here: Runtime) -> int | None:
    """Of this rank's device; on a CPU its share of the node's memory. None: cannot say."""
    total = here.accelerator.memory_total_bytes()
    if total is None or here.family != "cpu":
        return total
    return total // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", here.world_size)))


def choose(
    config: Any, options: Mapping[str, Any], piece: Mapping[str, int], here: Runtime, precision: Precision
) -> tuple[Holding, list[Text]]:
    """Return the strategy and the estimate for people; rank 0 estimates for all.

    Raises ModelTooLargeError. A strategy that was requested is used even then: an estimate may be wrong.
    """
    asked, is_anew = options["strategy"], options["gradient_checkpointing"]
    if asked != "auto" and is_anew is not None:
        chosen = Holding(asked, options["cpu_offload"], is_anew)
        return chosen, [Text("program.chosen-requested", "{chosen}, as requested", chosen=chosen.text())]
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
        raise ModelTooLargeError.of([*lines, *problems], most=len(lines) + len(problems))
    chosen = Holding(asked, options["cpu_offload"], True)
    return chosen, [
        *lines,
        *(Text("program.note", "note: {text}", text=problem) for problem in problems),
        Text(
            "program.chosen-strategy-requested",
            "{chosen}: strategy={strategy} as requested",
            chosen=chosen.text(),
            strategy=asked,
        ),
    ]


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
