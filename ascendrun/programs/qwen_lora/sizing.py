"""The strategy of a training: estimated memory of each, before a device is in use, and the fastest that fits."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ascendrun.planner import cost
from ascendrun.planner.chips import Chip
from ascendrun.planner.models import flops_per_token, shape_of
from ascendrun.planner.workload import Workload
from ascendrun.programs.errors import ModelTooLargeError
from ascendrun.programs.qwen_lora.base import build as build_model
from ascendrun.programs.qwen_lora.base import checkpoint_activations
from ascendrun.programs.qwen_lora.lora import add_lora
from ascendrun.programs.qwen_lora.sft_task import forward
from ascendrun.programs.trainer.distributed import ranks_of_host
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies import memory
from ascendrun.programs.trainer.strategies.choice import devices_of, has_deepspeed, usable
from ascendrun.programs.trainer.strategies.simulate import Simulated, simulate_deep
from ascendrun.text import Text


@dataclass(frozen=True)
class Layout:
    """`cpu_offload`: weights and optimizer are in host memory. `gradient_checkpointing`: activations are recomputed."""

    strategy: str
    cpu_offload: bool
    gradient_checkpointing: bool

    def text(self) -> Text:
        return Text(
            "program.layout",
            "{strategy}{offload}, activations {activations}",
            strategy=self.strategy,
            offload=Text("program.offloaded", ", offloaded") if self.cpu_offload else "",
            activations=Text("program.recomputed", "recomputed")
            if self.gradient_checkpointing
            else Text("program.kept", "kept"),
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """`lines`: the printed estimate of each layout. `problems`: why nothing fits, with possible changes; then `chosen`
    and `need` are None. `simulated`: one step."""

    lines: tuple[Text, ...]
    problems: tuple[Text, ...]
    chosen: Layout | None
    need: memory.Need | None
    simulated: Simulated


def estimate(
    config: Any,
    options: Mapping[str, Any],
    piece: Mapping[str, int],
    target: memory.Target,
    *,
    has_zero3: bool = True,
    everything: bool = False,
) -> MemoryEstimate:
    """Estimate. `piece`: see sft_task.largest_micro_batch. `everything`: include layouts slower than the chosen one."""
    requested = options["strategy"]
    strategies = usable(options, target, has_zero3=has_zero3) if requested == "auto" else (requested,)
    seen: dict[tuple[bool, bool], Simulated] = {}
    lines: list[Text] = []
    found: list[tuple[memory.Need, Layout]] = []
    chosen: tuple[memory.Need, Layout] | None = None
    for layout in by_cost(layouts(options, strategies), config, options, piece, target):
        key = layout.strategy in cost.SHARDED, layout.gradient_checkpointing
        if key not in seen:
            seen[key] = simulated_step(config, options, piece, target, is_cast=key[0], recomputes=key[1])
        strategy = "none" if layout.strategy == "ddp" and target.world_size == 1 else layout.strategy
        need = memory.needs(
            seen[key],
            target,
            strategy=strategy,
            pieces=piece["pieces"],
            offload=layout.cpu_offload,
            shard_size=options["shard_size"] or ranks_of_host(target.world_size),
        )
        found.append((need, layout))
        line = memory.as_sentence(need, target)
        if layout.gradient_checkpointing:
            line = Text("program.with-recompute", "{memory}, activations recomputed", memory=line)
        lines.append(line)
        if chosen is None and need.fits(target):
            chosen = need, layout
            if not everything:
                break
    sizes = next(iter(seen.values()))
    size = Text(
        "program.model-size",
        "{millions:,.2f} M weights, {trained:,.2f} M trained; {precision}",
        millions=sizes.parameters / 1e6,
        trained=sizes.trained / 1e6,
        precision=target.precision.reason,
    )
    if chosen is not None:
        need, layout = chosen
        reasons = why(layout, options, strategies)
        last = Text("program.chosen", "chosen: {layout}; {why}", layout=layout.text(), why=reasons)
        return MemoryEstimate((size, *lines, last), (), layout, need, sizes)
    least, layout = min(found, key=lambda each: each[0].on_device(target.family))
    problem = Text(
        "program.does-not-fit",
        "{need}; change one of: {fixes}",
        need=memory.as_sentence(least, target),
        fixes=memory.fixes(least, micro_batch=piece["rows"], has_checkpointing=layout.gradient_checkpointing),
    )
    return MemoryEstimate((size, *lines), (problem,), None, None, sizes)


def layouts(options: Mapping[str, Any], strategies: Sequence[str]) -> list[Layout]:
    """Return the layouts from fast to slow. Recomputing activations costs a third more arithmetic, less than gathering
    the weights; host memory is slower than both."""
    requested = options["gradient_checkpointing"]
    recompute = (False, True) if requested is None else (requested,)
    if options["cpu_offload"]:
        return [
            Layout(strategy, True, each)
            for strategy in strategies
            if strategy not in ("none", "ddp")
            for each in recompute
        ]
    found = [Layout(strategy, False, each) for strategy in strategies for each in recompute]
    if "zero3" in strategies and len(strategies) > 1:
        found += [Layout("zero3", True, each) for each in recompute]
    return found


def by_cost(
    found: Sequence[Layout], config: Any, options: Mapping[str, Any], piece: Mapping[str, int], target: memory.Target
) -> list[Layout]:
    """Return the layouts from fast to slow by the cost model of `ascendrun plan`; without a known peak as given."""
    shape = shape_of(config.to_dict())
    if shape is None or target.peak_flops is None:
        return list(found)
    sizes = [shape.linear[name] for name in options["target_modules"] if name in shape.linear]
    work = Workload(
        model=shape,
        trained=options["lora_r"] * shape.layers * sum(map(sum, sizes)),
        is_frozen=True,
        steps=None,
        samples_per_step=options["global_batch_size"],
        tokens_per_step=float(target.world_size * piece["pieces"] * piece["rows"] * piece["length"]),
        mean_length=float(piece["length"]),
        micro_rows=piece["rows"],
        micro_length=piece["length"],
        micro_learned=piece["kept"],
        micro_batches=piece["pieces"],
        is_exact=True,
        weight_bytes_saved=0,
        has_dropout=bool(options["lora_dropout"]),
    )
    of_cost = {cost.Layout(each.strategy, each.gradient_checkpointing, each.cpu_offload): each for each in found}
    choice = cost.compare(work, devices_of(target), list(of_cost), shard_size=options["shard_size"])
    return [of_cost[option.layout] for option in choice.options]


def why(layout: Layout, options: Mapping[str, Any], strategies: Sequence[str]) -> list[Text]:
    """Return the reasons for the chosen layout, and the options that requested it."""
    if len(strategies) > 1:
        parts = [Text("program.fastest", "the fastest strategy that fits")]
    elif options["strategy"] == "auto":
        parts = [Text("program.only-strategy", "the only strategy available here")]
    else:
        parts = [Text("program.strategy-requested", "strategy={strategy} as requested", strategy=layout.strategy)]
    if options["gradient_checkpointing"] is not None:
        value = str(layout.gradient_checkpointing).lower()
        parts.append(
            Text("program.checkpointing-requested", "gradient_checkpointing={value} as requested", value=value)
        )
    elif len(strategies) == 1 and layout.gradient_checkpointing:
        parts.append(Text("program.activations-too-large", "activations do not fit"))
    elif len(strategies) == 1:
        parts.append(Text("program.activations-fit", "activations fit"))
    return parts


def simulated_step(
    config: Any,
    options: Mapping[str, Any],
    piece: Mapping[str, int],
    target: memory.Target,
    *,
    is_cast: bool,
    recomputes: bool,
) -> Simulated:
    def build(layers: int) -> nn.Module:
        model = build_model(with_layers(config, layers))
        if recomputes:
            checkpoint_activations(model, strategy="ddp")
        return add_lora(model, options)  # type: ignore[no-any-return]

    def step(model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return forward(model, tensors).sum()

    rows, length, kept = piece["rows"], piece["length"], piece["kept"]
    shapes = {
        "ids": ((rows, length), torch.int64),
        "kept": ((kept,), torch.int64),
        "targets": ((rows, kept), torch.int64),
    }
    if options["packing"]:
        shapes["positions"] = (rows, length), torch.int64
    given: dict[str, Any] = {"precision": target.precision, "family": target.family, "is_cast": is_cast}
    return simulate_deep(build, config.num_hidden_layers, step, shapes, **given)


def with_layers(config: Any, layers: int) -> Any:
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        shallow.layer_types = list(config.layer_types)[:layers]
    return shallow


def speed_limit(config: Any, sizes: Simulated, chip: Chip | None, *, ranks: int, mean_length: float) -> Text | None:
    """Return the throughput at the peak, an upper bound; None: the peak of the chip is unknown."""
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


def choose(
    config: Any, options: Mapping[str, Any], piece: Mapping[str, int], here: Runtime
) -> tuple[Layout, list[Text]]:
    """Return the layout and the printed estimate; rank 0 estimates for all ranks.

    Raises ModelTooLargeError. A requested strategy is used even if it does not fit: an estimate may be wrong.
    """
    requested, recompute = options["strategy"], options["gradient_checkpointing"]
    if requested != "auto" and recompute is not None:
        chosen = Layout(requested, options["cpu_offload"], recompute)
        return chosen, [Text("program.chosen-requested", "{chosen}, as requested", chosen=chosen.text())]
    found: Any = None
    if here.is_first:
        target = memory.target_of(here.accelerator, options["dtype"], here.world_size)
        found = estimate(config, options, piece, target, has_zero3=has_deepspeed())
    found = here.share(found)
    if found.chosen is not None:
        return found.chosen, list(found.lines)
    if requested == "auto":
        problems = [*found.lines, *found.problems]
        raise ModelTooLargeError.of(problems, most=len(problems))
    chosen = Layout(requested, options["cpu_offload"], True)
    return chosen, [
        *found.lines,
        *(Text("program.note", "note: {text}", text=problem) for problem in found.problems),
        Text(
            "program.chosen-strategy-requested",
            "{chosen}: strategy={strategy} as requested",
            chosen=chosen.text(),
            strategy=requested,
        ),
    ]
