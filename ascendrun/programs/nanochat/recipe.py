"""How the model is optimized: Muon for matrices, AdamW for the rest, and their rates by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ascendrun.programs.nanochat.model import NanoChat
from ascendrun.programs.nanochat.sizes import ON_CHATS, Horizon
from ascendrun.programs.trainer import schedule
from ascendrun.programs.trainer.optim import Group, OptimizerPlan
from ascendrun.programs.trainer.schedule import Schedule

RATE_WIDTH = 768
"""Hidden size of the model whose AdamW rates were tuned; others are scaled by its root."""
SMEAR_RATE = 0.2
MOMENTUM_START, MOMENTUM, MOMENTUM_END = 0.85, 0.97, 0.90
MOMENTUM_WARMUP = 400
CHAT_MOMENTUM, CHAT_MOMENTUM_WARMUP = 0.95, 300
ADAMW: Mapping[str, tuple[tuple[float, float], float]] = {
    "unembedding": ((0.8, 0.96), 0.01),
    "embedding": ((0.8, 0.995), 0.001),
    "value_embedding": ((0.8, 0.995), 0.01),
    "residual_scales": ((0.8, 0.95), 0.05),
    "embedding_scales": ((0.96, 0.95), 0.0),
    "smear": ((0.8, 0.95), 0.0),
}
"""Betas and weight decay of each group of AdamW."""


def shape_of(options: Mapping[str, Any], steps: int) -> Schedule:
    """Return the shape of all rates: up, level, and down over the last part of the training."""
    level = schedule.trapezoid(
        steps, warmup=options["warmup_steps"], warmdown=options["warmdown_ratio"], floor=options["final_lr_frac"]
    )
    return schedule.scaled(options.get("init_lr_frac", 1.0), level)


def momentum_of(options: Mapping[str, Any], steps: int) -> Schedule:
    """Return Muon's momentum: in base it rises over the first steps, and falls while the rates fall; on conversations
    it rises to a lower level and stays, which in rl it has from the start."""
    if options.get("mode") == "rl":
        return schedule.ramp(CHAT_MOMENTUM, CHAT_MOMENTUM, 0)
    if options.get("mode") in ON_CHATS:
        return schedule.ramp(MOMENTUM_START, CHAT_MOMENTUM, CHAT_MOMENTUM_WARMUP)
    down = round(options["warmdown_ratio"] * steps)
    rise, fall = (schedule.ramp(MOMENTUM_START, MOMENTUM, MOMENTUM_WARMUP), schedule.ramp(MOMENTUM, MOMENTUM_END, down))
    return lambda step: rise(step) if step < MOMENTUM_WARMUP or step < steps - down else fall(step - (steps - down))


def decay_of(start: float, steps: int) -> Schedule:
    """Return Muon's weight decay, which falls to 0 as a cosine."""
    return lambda step: start * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def rates_of(options: Mapping[str, Any], horizon: Horizon, hidden: int) -> dict[str, float]:
    """Return the peak rate of each group of AdamW."""
    scale = horizon.rate_scale
    by_width = scale * (hidden / RATE_WIDTH) ** -0.5
    return {
        "unembedding": options["unembedding_lr"] * by_width,
        "embedding": options["embedding_lr"] * by_width,
        "value_embedding": 0.5 * options["embedding_lr"] * by_width,
        "residual_scales": 0.01 * options["scalar_lr"] * scale,
        "embedding_scales": options["scalar_lr"] * scale,
        "smear": SMEAR_RATE,
    }


def optimizer_of(model: NanoChat, options: Mapping[str, Any], horizon: Horizon, *, shard: bool) -> OptimizerPlan:
    """Return the groups of a model. `shard`: each rank keeps the optimizer's state of its part of the weights."""
    shape = shape_of(options, horizon.steps)
    params: dict[str, list[Any]] = {
        "unembedding": list(model.lm_head.parameters()),
        "embedding": list(model.embed_tokens.parameters()),
    }
    if not model.sizes.is_classic:
        params.update(
            value_embedding=list(model.value_embeds.parameters()),
            residual_scales=[model.residual_scales],
            embedding_scales=[model.embedding_scales],
            smear=[model.smear_gate.weight, model.smear_scale, model.backout_scale],
        )
    matrices = Group(
        list(model.layers.parameters()),
        "muon",
        lr=schedule.scaled(options["matrix_lr"] * horizon.rate_scale, shape),
        weight_decay=decay_of(horizon.weight_decay, horizon.steps),
        momentum=momentum_of(options, horizon.steps),
    )
    rates = rates_of(options, horizon, model.sizes.hidden)
    return OptimizerPlan(
        [matrices]
        + [
            Group(each, "adamw", schedule.scaled(rates[name], shape), ADAMW[name][1], ADAMW[name][0], eps=1e-10)
            for name, each in params.items()
        ],
        shard=shard,
    )
